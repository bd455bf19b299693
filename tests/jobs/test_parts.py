"""Imports and shuffles in parts and on workers: the bytes of one run, whoever does what, and after kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dbksvd_dask import cluster
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.events import JobProgress
from dbksvd_dask.importers import selection
from dbksvd_dask.jobs._import_job import ImportJob
from dbksvd_dask.jobs._shuffle_job import ShuffleJob
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.store import atomic, paths, writer
from dbksvd_dask.store.job_folder import JobFolder
from dbksvd_dask.store.lock import hold
from dbksvd_dask.store.partial import Partial
from tests.helpers import jobs
from tests.helpers.stores import make_store, ordered_rows, tree


@pytest.fixture
def folder(tmp_path):
    """Three files of 50 rows with a column of numbers beside them, and a store of 150 rows."""
    rows = ordered_rows(150, 6)
    for i in range(3):
        np.savez(tmp_path / f"a_{i}.npz", rows=rows[50 * i : 50 * i + 50], label=np.arange(50, dtype=np.int32) + i)
    (tmp_path / "texts.txt").write_text("".join(f"line {i}\n" for i in range(150)))
    make_store(tmp_path / "source", rows, 8, {"row": np.arange(150, dtype=np.int32)})
    return tmp_path


def run_import(folder, out, **more):
    options = {"array": "rows", "aligned": ["label"], "chunk_rows": 8, "source_row": True}
    return import_activations(str(folder / "a_*.npz"), folder / out / "s", **options, **more)


def run_dropping(folder, out, **more):
    return run_import(folder, out, drop_outliers=1.1, texts=folder / "texts.txt", **more)


def run_link(folder, out, **more):
    return import_activations(folder / "source", folder / out / "s", chunk_rows=16, link=True, verify=True, **more)


def run_shuffle(folder, out, **more):
    return shuffle_activations(folder / "source", folder / out / "s", seed=3, block_bytes=24 * 28, **more)


RUNS = {"import": run_import, "dropping": run_dropping, "link": run_link, "shuffle": run_shuffle}


# ---------------------------------------------------------------------------------------------- one process each


@pytest.mark.parametrize("n_parts", [3, 25])
@pytest.mark.parametrize("job", RUNS)
def test_parts_in_any_order_give_the_bytes_of_one_run(job, n_parts, folder, rng):
    RUNS[job](folder, "whole")
    results = [RUNS[job](folder, "parts", part=(int(i), n_parts)) for i in rng.permutation(n_parts) + 1]
    assert tree(folder / "parts") == tree(folder / "whole")
    assert [r.finished for r in results].count(True) >= 1
    assert results[-1].finished
    assert {"s"} <= set(os.listdir(folder / "parts")) <= {"s", "s.texts.txt"}
    again = RUNS[job](folder, "parts", part=(1, n_parts))
    assert (again.finished, again.chunks_written) == (True, 0)


@pytest.mark.parametrize("job", RUNS)
def test_a_part_names_the_parts_that_are_missing(job, folder):
    assert RUNS[job](folder, "out", part=(2, 4)).parts_missing == (1, 3, 4)
    result = RUNS[job](folder, "out", part=(4, 4))
    assert (result.finished, result.parts_missing) == (False, (1, 3))
    whole = RUNS[job](folder, "out")  # does what is left
    assert min(whole.chunks_kept, whole.chunks_written) > 0


@pytest.mark.parametrize("job", ["dropping", "shuffle"])
def test_what_all_parts_need_is_done_once_if_the_first_does_it_and_shared_if_all_begin_at_once(job, folder):
    """A part never waits: alone it does the whole first pass, and the others find it done."""
    first, second = (RUNS[job](folder, "out", part=(i, 2)) for i in (1, 2))
    if job == "dropping":
        assert (first.blocks_scanned, second.blocks_scanned) == (19, 0)
    else:
        n_blocks = ShuffleJob(folder / "source", folder / "x", seed=3, block_bytes=24 * 28).plan.n_blocks
        assert (first.blocks_written, second.blocks_written) == (n_blocks, 0)


def test_a_part_begins_with_its_own_share_of_the_first_pass(folder, monkeypatch):
    scanned, scattered = [], []
    scan, store = selection.Selection._scan_block, ShuffleJob._store_block
    monkeypatch.setattr(selection.Selection, "_scan_block", lambda s, b: (scanned.append(b), scan(s, b))[1])
    monkeypatch.setattr(ShuffleJob, "_store_block", lambda s, b, a: (scattered.append(b), store(s, b, a))[1])
    run_dropping(folder, "a", part=(2, 2))
    run_shuffle(folder, "b", part=(2, 2))
    assert scanned == [*range(9, 19), *range(9)]
    assert sorted(scattered[:2]) == [3, 4]  # two threads write


def test_a_block_that_another_process_scans_at_the_same_time_stays_marked(folder, monkeypatch):
    """The other process may be about to read the marker, with all blocks done."""
    is_scanned, scan = selection.Selection._is_scanned, selection.Selection._scan_block
    there = []

    def another_ends_after_the_look(self, ledger, block):
        done = is_scanned(self, ledger, block)
        if not done:
            ledger.mark(block, scan(self, block))
        return done

    def scan_and_look(self, block):
        there.append(block in atomic.Ledger(self.folder, "block").parts())
        return scan(self, block)

    monkeypatch.setattr(selection.Selection, "_is_scanned", another_ends_after_the_look)
    monkeypatch.setattr(selection.Selection, "_scan_block", scan_and_look)
    run_dropping(folder, "out", part=(1, 1))
    assert there == [True] * 19


@pytest.mark.parametrize("job", ["import", "dropping", "shuffle"])
def test_parts_of_one_job_never_refuse_each_other_nor_a_whole_one(job, folder):
    """Within the first of two parts: the same part, the other part, and a whole run."""
    RUNS[job](folder, "whole")
    inner = []

    def others(event):
        if isinstance(event, JobProgress) and event.job in ("import", "gather") and not inner:
            inner.append(None)
            inner.append(RUNS[job](folder, "out", part=(1, 2)).finished)
            inner.append(RUNS[job](folder, "out", part=(2, 2)).finished)
            inner.append(RUNS[job](folder, "out").finished)

    assert RUNS[job](folder, "out", part=(1, 2), callbacks=[others]).finished
    assert inner == [None, False, True, True]
    assert tree(folder / "out") == tree(folder / "whole")


@pytest.mark.parametrize("job", ["import", "shuffle"])
def test_a_part_that_ends_last_leaves_the_publishing_to_whoever_holds_the_target(job, folder):
    RUNS[job](folder, "out", part=(1, 2))
    with hold(folder / "out" / "s", "another run"):
        result = RUNS[job](folder, "out", part=(2, 2))
    assert (result.finished, result.parts_missing) == (False, ())
    assert RUNS[job](folder, "out", part=(1, 2)).finished  # any part again publishes it


@pytest.mark.parametrize(("job", "kind"), [("import", ImportJob), ("shuffle", ShuffleJob)])
def test_work_torn_by_publishing_is_no_error_though_a_late_part_has_begun_again(job, kind, folder, monkeypatch):
    init = kind.init

    def torn(self, *arguments):
        monkeypatch.setattr(kind, "init", init)
        RUNS[job](folder, "out")
        (folder / "out" / "s.partial").mkdir()  # of another part, which looked for the result a moment too early
        raise StoreError("metadata are not those the store was begun with")

    monkeypatch.setattr(kind, "init", torn)
    assert RUNS[job](folder, "out", part=(1, 2)).finished


@pytest.mark.parametrize("step", ["settle", "begin", "_publish"])
@pytest.mark.parametrize("job", ["dropping", "shuffle"])
def test_a_part_that_begins_while_another_process_publishes_leaves_nothing_behind(job, step, folder, monkeypatch):
    """The whole job is done and published at three points of the beginning of a part."""
    RUNS[job](folder, "whole")
    inside = []

    def meanwhile(method):
        def call(*args, **kwargs):
            if not inside:
                inside.append(None)
                inside.append(RUNS[job](folder, "out").finished)
            return method(*args, **kwargs)

        return call

    owner = Partial if step == "_publish" else JobFolder
    name = "begin" if step == "_publish" else step
    monkeypatch.setattr(owner, name, meanwhile(getattr(owner, name)))
    assert RUNS[job](folder, "out", part=(1, 2)).finished
    assert inside == [None, True]
    assert tree(folder / "out") == tree(folder / "whole")


@pytest.mark.parametrize("job", ["import", "shuffle"])
def test_a_part_whose_work_was_discarded_says_so(job, folder):
    def discard(event):
        if isinstance(event, JobProgress) and event.job in ("import", "gather"):
            paths.remove(folder / "out" / "s.partial")

    with pytest.raises(StoreError, match=r"s\.partial is gone: another process has finished or discarded"):
        RUNS[job](folder, "out", part=(1, 2), callbacks=[discard])


@pytest.mark.parametrize("job", RUNS)
def test_refusals(job, folder):
    with pytest.raises(InputError, match="part 3/2 does not exist; parts count from 1/2 to 2/2"):
        RUNS[job](folder, "out", part=(3, 2))
    with pytest.raises(InputError, match=r"part and force were both given; .*remove the old store first"):
        RUNS[job](folder, "out", part=(1, 2), force=True)
    assert not (folder / "out").exists()


def test_parts_with_other_options_are_refused(folder):
    run_dropping(folder, "out", part=(1, 2))
    with pytest.raises(MismatchError, match="begun with other files or options"):
        run_import(folder, "out", drop_outliers=1.2, part=(2, 2))
    run_shuffle(folder, "mixed", part=(1, 2))
    with pytest.raises(MismatchError, match="begun with another store, seed or size"):
        shuffle_activations(folder / "source", folder / "mixed" / "s", seed=4, block_bytes=24 * 28, part=(2, 2))


# ---------------------------------------------------------------------------------------------- power failures


def test_chunks_of_parts_are_on_the_disk_before_they_count(folder, monkeypatch):
    forced = []
    fsync = atomic.fsync_path
    monkeypatch.setattr(atomic, "fsync_path", lambda path: (forced.append(os.path.basename(path)), fsync(path))[1])
    monkeypatch.setattr("dbksvd_dask.store.chunk_file.fsync_path", atomic.fsync_path, raising=False)
    run_import(folder, "out", part=(1, 19))
    assert any(name.startswith("chunk-00000000.json") for name in forced)


def test_a_chunk_that_a_whole_run_lost_is_found_by_the_part_that_publishes(folder, monkeypatch):
    """A run that forces nothing to the disk is killed, the power fails, and parts do the rest."""
    with monkeypatch.context() as patch:
        patch.setattr(writer.ActivationWriter, "finish", lambda *_, **__: sys.exit(9))
        with pytest.raises(SystemExit):
            run_import(folder, "out")
    (folder / "out" / "s.partial" / "activations" / "c.3.0").write_bytes(b"")
    run_import(folder, "whole")
    assert [run_import(folder, "out", part=(i, 2)).chunks_written for i in (1, 2)] == [1, 0]
    assert tree(folder / "out") == tree(folder / "whole")


# ---------------------------------------------------------------------------------------------- processes

PART = """
import sys
from pathlib import Path
from tests.jobs.test_parts import RUNS
job, folder, i, n = sys.argv[1:]
print(RUNS[job](Path(folder), "out", part=(int(i), int(n))).finished)
"""


@pytest.mark.slow
@pytest.mark.parametrize("job", ["dropping", "shuffle"])
def test_processes_at_the_same_time_some_with_the_same_part(job, folder):
    RUNS[job](folder, "whole")
    started = [jobs.python(PART, job, folder, i, 3) for i in (1, 2, 3, 2, 1)]
    ended = [process.communicate(timeout=jobs.PATIENCE) for process in started]
    assert not [err for _, err in ended if err]
    assert "True\n" in [out for out, _ in ended]
    assert tree(folder / "out") == tree(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["import-parts", "shuffle-parts"])
def test_same_bytes_after_a_kill_at_any_write_of_a_part(job, tmp_path):
    """SIGKILL at every eleventh publishing of a file in turn; see kills/sweep.py."""
    command = [sys.executable, "-W", "error", "-m", "tests.kills.sweep", job, str(tmp_path), "11"]
    swept = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(swept["points"]) > 4
    for point in swept["points"]:
        assert point["same_bytes"], point
        assert point["left"] == ["store"], point


# ---------------------------------------------------------------------------------------------- workers


@pytest.mark.cluster
def test_workers_give_the_bytes_of_one_process_and_close_their_files(folder):
    for job, run in RUNS.items():
        run(folder, f"whole-{job}")
    with cluster.connect(workers=2) as client:
        for job, run in RUNS.items():
            result = run(folder, f"workers-{job}")
            assert result.finished
            assert result.chunks_written > 0
        run_dropping(folder, "part", part=(2, 2))
        assert run_dropping(folder, "part", part=(1, 2)).finished
        opened = client.run(lambda: len(__import__("dbksvd_dask.jobs._workers", fromlist=["_OPENED"])._OPENED))
        assert set(opened.values()) == {0}
        np.savez(folder / "a_1.npz", rows=np.full((50, 6), np.nan, np.float32), label=np.zeros(50, np.int32))
        with pytest.raises(InputError, match=r"row \d+ of .*a_1\.npz.* holds a value that is NaN"):
            run_import(folder, "broken")
        assert not (folder / "broken").exists()  # nothing to resume, also while tasks were still writing
    for job in RUNS:
        assert tree(folder / f"workers-{job}") == tree(folder / f"whole-{job}")
    assert tree(folder / "part") == tree(folder / "whole-dropping")


@pytest.mark.cluster
def test_a_worker_that_dies_is_replaced(folder):
    run_shuffle(folder, "whole")
    killed = []

    def kill(event):
        if isinstance(event, JobProgress) and not killed:
            killed.append(event)
            pid = next(iter(client.run(os.getpid).values()))
            os.kill(pid, 9)

    with cluster.connect(workers=2) as client:
        assert run_shuffle(folder, "out", callbacks=[kill]).finished
    assert killed
    assert tree(folder / "out") == tree(folder / "whole")


def test_a_shuffle_to_a_url_on_a_cluster_needs_a_shared_folder(folder, monkeypatch):
    monkeypatch.setattr("dbksvd_dask.jobs._workers.current_client", lambda: object())
    with pytest.raises(InputError, match=r"a folder between the passes that all workers see; give scratch=FOLDER"):
        shuffle_activations(folder / "source", "memory://mixed", seed=0)
