"""Shuffle in one pass: the same store as by two passes, no scratch files, and either goes on with the other."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbksvd_dask.errors import StoreError
from dbksvd_dask.events import JobProgress
from dbksvd_dask.jobs import _passes, _shuffle_job
from dbksvd_dask.jobs.shuffle import ShuffleJob, shuffle_activations
from dbksvd_dask.plan.shuffle import MIN_PICKED_BYTES, ShufflePlan
from dbksvd_dask.store.activations import Aligned, open_rows
from dbksvd_dask.store.picker import RowPicker, can_pick, files_to_open, in_file_cache, memory_for_files
from dbksvd_dask.store.write_behind import settle
from tests.helpers.import_patterns import pattern
from tests.helpers.stores import make_store, ordered_rows, tree
from tests.naive.mixing import shuffled_order
from tests.store.test_write_behind import in_memory


@pytest.fixture
def store(tmp_path):
    """1000 rows of 1200 bytes in chunks of 64, and two aligned arrays."""
    aligned = {"row": np.arange(1000, dtype=np.int32), "span": np.arange(2000).reshape(1000, 2)}
    specs = {"row": "int32", "span": Aligned("int64", (2,))}
    return make_store(tmp_path / "source", ordered_rows(1000, 300), 64, aligned, specs=specs)


@pytest.fixture
def passes(monkeypatch):
    """Call it to make the following shuffles take one or two passes."""

    def choose(n):
        monkeypatch.setattr(_shuffle_job, "may_pick", lambda *_: n == 1)
        monkeypatch.setattr(_shuffle_job, "in_file_cache", lambda _: n == 1)

    return choose


# which row goes where


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_sources_of_all_buckets_are_the_order_of_two_passes(n_samples, chunk_rows, chunks, seed):
    plan = ShufflePlan(n_samples, chunks * chunk_rows, chunk_rows, seed)
    orders = [plan.block_order(block).astype(np.int32) for block in range(plan.n_blocks)]
    found = [plan.sources(bucket, orders, plan.counts()) for bucket in range(plan.n_blocks)]
    np.testing.assert_array_equal(np.concatenate(found), shuffled_order(plan))


def test_sources_do_not_wrap_in_a_store_of_billions_of_rows():
    plan = ShufflePlan(4 * 10**9 + 3, 10**9, 10**9, 0)
    counts = np.zeros((5, 5), np.int64)
    counts[4, 4] = 3
    assert sorted(plan.sources(4, [np.arange(3, dtype=np.int32)] * 5, counts)) == [4 * 10**9 + i for i in range(3)]


def test_memory_that_is_left_decides(monkeypatch, store, tmp_path):
    chosen = []
    for available in (2 * 1_200_000, 2 * 1_200_000 - 1, 0):
        monkeypatch.setattr("dbksvd_dask.jobs._passes.memory_for_files", lambda available=available: available)
        job = ShuffleJob(store, tmp_path / "s", seed=0, force=True)
        job.init()
        chosen.append(job.one_pass)
    assert chosen == [True, False, False]


def test_memory_for_files_is_some_of_the_memory_of_this_machine():
    if not os.path.exists("/proc/meminfo"):
        assert memory_for_files() == 0
    else:
        assert 1 << 20 < memory_for_files() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# picking rows


def mapped_files():
    with open("/proc/self/maps") as file:
        return file.read()


@pytest.mark.parametrize("n", [1, 7, 300])
@pytest.mark.parametrize("most_mapped", [50 * 33 * 2 - 1, 50 * 33 * 2])
def test_picked_rows_are_those_asked_for(most_mapped, n, tmp_path, rng):
    bits = pattern((50, 33), "bfloat16")
    reader = open_rows(make_store(tmp_path / "s", bits, 8, dtype="bfloat16"))
    rows = rng.integers(0, 50, n)
    out = np.zeros((n, 33), np.uint16)
    files = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(RowPicker(reader, most_mapped)) as picker:
        picker.pick(rows, out)
        assert (str(tmp_path) in mapped_files()) == (most_mapped == 50 * 33 * 2)
    assert str(tmp_path) not in mapped_files()
    assert len(os.listdir("/proc/self/fd")) == files
    np.testing.assert_array_equal(out, bits[rows])


def test_only_plain_local_files_are_picked_from(tmp_path, store):
    assert can_pick(open_rows(store))
    assert not can_pick(open_rows(make_store(tmp_path / "z", ordered_rows(40, 6), compressor="zstd")))


def test_more_files_than_may_be_open_are_not_picked_from(store, monkeypatch):
    assert files_to_open() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    reader = open_rows(store)
    for files, picked in ((16, True), (15, False)):  # of the 16 chunks of the store
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (2 * files, 2 * files))
        assert can_pick(reader) == picked


def test_rows_that_cannot_be_read_are_refused(store, tmp_path):
    reader = open_rows(store)
    files = len(os.listdir("/proc/self/fd"))
    file = tmp_path / "source" / "activations" / "c.3.0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"chunk 3 of .* \(rows 192 to 255\) has 76799 bytes instead of 76800"):
        RowPicker(reader)
    file.unlink()
    with pytest.raises(StoreError, match=r"chunk 3 of .* is missing"):
        RowPicker(reader)
    assert len(os.listdir("/proc/self/fd")) == files


def test_row_that_ends_early_is_refused(store, tmp_path):
    with contextlib.closing(RowPicker(open_rows(store))) as picker:
        os.truncate(tmp_path / "source" / "activations" / "c.3.0", 8 * 1200 + 1199)  # row 200 lacks a byte
        with pytest.raises(StoreError, match=r"row 200 of .* cannot be read"):
            picker.pick(np.array([0, 199, 200]), np.zeros((3, 300), np.float32))


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what lies in memory")
def test_one_chunk_that_left_the_memory_is_noticed(tmp_path):
    reader = open_rows(make_store(tmp_path / "s", ordered_rows(2048, 300), 1024))
    reader.read(0, 2048)
    in_memory(reader.chunk_file(1))  # or skip
    assert in_file_cache(reader)
    settle(reader.chunk_file(1))
    if in_memory(reader.chunk_file(1)):
        pytest.skip("the files of this disk are memory")
    assert not in_file_cache(reader)


# the job


@pytest.mark.parametrize("block_bytes", [1, 3 * 64 * 1220, None])
@pytest.mark.parametrize("chunk_rows", [None, 50])
@pytest.mark.parametrize("mapped", [True, False])
def test_one_pass_gives_the_bytes_of_two(mapped, block_bytes, chunk_rows, store, tmp_path, passes, monkeypatch):
    if not mapped:  # as a store of gigabytes would be
        monkeypatch.setattr(_passes, "MOST_MAPPED_BYTES", 0)
    options = {"seed": 5, "block_bytes": block_bytes, "chunk_rows": chunk_rows}
    passes(2)
    two = shuffle_activations(store, tmp_path / "two", **options)
    passes(1)
    steps = []
    one = shuffle_activations(store, tmp_path / "one", **options, callbacks=[steps.append])
    assert {e.job for e in steps if isinstance(e, JobProgress)} == {"survey", "gather"}
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert (one.mixing_before, one.mixing_after) == (two.mixing_before, two.mixing_after)
    assert (one.blocks_written, one.chunks_written) == (two.blocks_written, two.chunks_written)
    assert sorted(os.listdir(tmp_path)) == ["one", "source", "two"]


def test_one_pass_writes_no_row_to_the_scratch_folder(store, tmp_path, passes):
    passes(1)
    job = ShuffleJob(store, tmp_path / "s", seed=0, block_bytes=100_000)
    job.init()
    job.scatter()
    job.gather()
    names = os.listdir(job.scratch)
    assert {name.split("-")[0] for name in names} == {"job.json", "block"}


def test_source_that_leaves_the_memory_is_shuffled_in_two_passes(store, tmp_path, passes, monkeypatch):
    passes(1)
    shuffle_activations(store, tmp_path / "one", seed=0, block_bytes=100_000)
    monkeypatch.setattr(_shuffle_job, "in_file_cache", lambda _: False)
    steps = []
    result = shuffle_activations(store, tmp_path / "two", seed=0, block_bytes=100_000, callbacks=[steps.append])
    assert {e.job for e in steps if isinstance(e, JobProgress)} == {"survey", "scatter", "gather"}
    assert result.blocks_written == ShuffleJob(store, tmp_path / "x", seed=0, block_bytes=100_000).plan.n_blocks
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_short_rows_are_not_worth_a_read_each(tmp_path):
    source = make_store(tmp_path / "source", ordered_rows(100, MIN_PICKED_BYTES // 4 - 1))
    job = ShuffleJob(source, tmp_path / "s", seed=0)
    job.init()
    assert not job.one_pass


@pytest.mark.slow
@pytest.mark.parametrize("passes_of", ["11", "12", "21"])
def test_same_bytes_after_a_kill_whichever_way_it_goes_on(passes_of, tmp_path):
    """SIGKILL at every fifth publishing of a file; see kills/sweep.py."""
    command = [sys.executable, "-W", "error", "-m", "tests.kills.sweep", f"shuffle{passes_of}", str(tmp_path), "5"]
    swept = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    chunks, blocks = swept["undisturbed"]["chunks_written"], swept["undisturbed"]["blocks_written"]
    assert len(swept["points"]) > (chunks + blocks) / 5
    for point in swept["points"]:
        second = point["second"]
        done = chunks if point["complete"] else point["done"]["chunks"]
        assert point["same_bytes"], point
        assert (second["chunks_kept"], second["chunks_written"]) == (done, chunks - done), point
        assert point["left"] == ["store"], point
        if passes_of != "12":  # what was only read through has to be read again for two passes
            assert second["blocks_kept"] == point["done"]["blocks"], point
