"""The encode job interrupted: kills, broken connections, late tasks; and on other schedulers and places."""

# ruff: noqa: F811 - fixtures are imported, and then named by the tests that use them

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import xarray as xr

from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import JobError
from dbksvd_dask.evaluate.sums import CodeSums
from dbksvd_dask.events import Retrying
from dbksvd_dask.jobs import _units
from dbksvd_dask.jobs.encode import EncodeJob, encode_store
from dbksvd_dask.store import atomic
from tests.helpers import clusters, jobs
from tests.helpers.encode_fixtures import CHUNK, D, K, M, N, count_units, rows, run, small_chunks, store, whole  # noqa: F401

# -- late tasks -------------------------------------------------------------------------------------------


def test_a_task_that_ends_after_the_work_was_discarded_leaves_nothing(tmp_path, store, run):
    job = EncodeJob(store, run, tmp_path / "codes.zarr")
    job.init()
    job._encode([0], lambda unit: None)
    file = tmp_path / "codes.zarr.partial/.parts/sums-00000000.npz"
    sums = CodeSums.from_bytes(file.read_bytes(), pytest.fail)
    codes = np.zeros((CHUNK, K), np.int32), np.zeros((CHUNK, K), np.float32)
    stopped = []

    def keep_writing():
        while True:
            try:
                job.writer.write_unit(1, *codes, sums)
            except FileNotFoundError as error:
                stopped.append(error)
                return

    writers = [threading.Thread(target=keep_writing) for _ in range(3)]
    for writer in writers:
        writer.start()
    job.writer.discard()
    for writer in writers:
        writer.join(jobs.PATIENCE)
    assert len(stopped) == 3
    assert not list(tmp_path.glob("codes*"))


# -- interruptions ----------------------------------------------------------------------------------------


def test_a_run_killed_before_publishing_is_published_by_the_next(
    tmp_path, store, run, whole, monkeypatch, count_units
):
    out = tmp_path / "codes.zarr"

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            encode_store(store, run, out)
    before = list(count_units)
    assert encode_store(store, run, out).samples_written == 0
    assert count_units == before
    assert jobs.tree(out) == jobs.tree(whole)


ENCODE_AND_DIE = """
import os, signal, sys
import dask
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.plan import units
units.MIN_CHUNK_ROWS = 64
store, run, out, limit = *sys.argv[1:4], int(sys.argv[4])
def die(event):
    if event.done >= limit:
        os.kill(os.getpid(), signal.SIGKILL)
with dask.config.set(scheduler="threads", num_workers=2):
    print(encode_store(store, run, out, callbacks=[die]).samples_kept)
"""


@pytest.mark.slow
def test_kill_and_run_again_gives_the_same_bytes_without_repeating_work(tmp_path, store, run, whole, count_units):
    out = tmp_path / "codes.zarr"
    process = jobs.python(ENCODE_AND_DIE, store, run, out, 300)
    assert process.wait(timeout=jobs.PATIENCE) == -signal.SIGKILL, process.stderr.read()
    process.communicate()
    assert not out.exists()
    result = encode_store(store, run, out)
    assert result.samples_kept >= 300
    assert len(count_units) == len(set(count_units)) == -(-result.samples_written // CHUNK)
    assert result.samples_kept + result.samples_written == N
    assert jobs.tree(out) == jobs.tree(whole)


@pytest.mark.slow
def test_kill_at_any_write_gives_the_same_bytes_and_no_work_twice(tmp_path):
    """SIGKILL at the publishing of files in turn; see kills/encode_sweep.py. Step 1 kills at every single one."""
    command = [sys.executable, "-W", "error", "-m", "tests.kills.encode_sweep", str(tmp_path), "5"]
    swept = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(swept["points"]) > 6
    for point in swept["points"]:
        assert point["same_bytes"], point
        assert not point["published"], point
        assert point["left"] == ["codes.zarr"], point
        written, kept = point["second"]["samples_written"], point["second"]["samples_kept"]
        assert written + kept == swept["undisturbed"]["samples_written"], point
        units = -(-written // 16)
        assert units == 3 - point["marked"] or written == 0, point


ONE_PART = """
import sys
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.plan import units
units.MIN_CHUNK_ROWS = 64
store, run, out, i, n = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
sys.stdin.readline()
print(encode_store(store, run, out, part=(i, n)).samples_written)
"""


@pytest.mark.slow
def test_processes_that_begin_at_the_same_moment_share_the_work(tmp_path, store, run, whole):
    out = tmp_path / "codes.zarr"
    processes = [jobs.python(ONE_PART, store, run, out, i, 2, stdin=-1) for i in (1, 2)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=jobs.PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum(int(output) for output, _ in outputs) == N
    encode_store(store, run, out, finish=True)
    assert jobs.tree(out) == jobs.tree(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "codes.zarr", "dictionary.zarr", "store.zarr", "whole.zarr",
    ]  # fmt: skip


# -- schedulers and places --------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_cluster_gives_the_same_bytes(tmp_path, store, run, whole):
    from distributed import Client, LocalCluster

    heard = []
    out = tmp_path / "codes.zarr"
    with (
        LocalCluster(**clusters.IN_PROCESS, n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster),
    ):
        result = encode_store(store, run, out, callbacks=[heard.append])
    assert (result.finished, heard[-1].done, len(heard)) == (True, N, 12)
    assert jobs.tree(out) == jobs.tree(whole)


def test_a_connection_that_breaks_is_tried_again_without_repeating_work(
    tmp_path, store, run, whole, monkeypatch, count_units
):
    heard, real = [], _units.run_units
    monkeypatch.setattr("dbksvd_dask.graph.run.time.sleep", lambda seconds: None)

    def breaking(tasks, on_done):
        if not heard or not any(isinstance(event, Retrying) for event in heard):
            real(itertools.islice(tasks, 4), on_done)
            raise ConnectionError("gone")
        real(tasks, on_done)

    monkeypatch.setattr(_units, "run_units", breaking)
    result = encode_store(store, run, tmp_path / "codes.zarr", callbacks=[heard.append])
    assert [event.reason for event in heard if isinstance(event, Retrying)] == ["ConnectionError: gone"]
    assert (result.samples_written, heard[-1].done) == (N, N)
    assert sorted(count_units) == list(range(11))
    assert jobs.tree(tmp_path / "codes.zarr") == jobs.tree(whole)


def test_codes_can_be_written_to_a_remote(store, run, whole):
    fsspec = pytest.importorskip("fsspec")
    out = "memory://test-encode-job/codes.zarr"
    try:
        encode_store(store, run, out, part=(2, 2))
        with pytest.raises(JobError, match="Parts not encoded: 1 of 2"):
            encode_store(store, run, out, finish=True)
        encode_store(store, run, out)
        codes = open_codes(out).compute()
        wanted = open_codes(whole).compute()
        xr.testing.assert_equal(codes, wanted)
        assert codes.attrs["content_id"] == wanted.attrs["content_id"]
        assert encode_store(store, run, out, resume=True).samples_written == 0
    finally:
        fsspec.filesystem("memory").rm("/test-encode-job", recursive=True)
