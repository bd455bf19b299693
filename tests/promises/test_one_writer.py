"""Two runs at one target, results that are recognised, and places that are not written to."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, events
from dbksvd_dask.errors import BusyError, StoreError
from dbksvd_dask.jobs import encode, import_, shuffle
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.plan import units
from dbksvd_dask.store import atomic, partial, paths
from dbksvd_dask.store.lock import Owner, hold
from dbksvd_dask.store.runs import checkpoints, open_dictionary
from tests.helpers import jobs
from tests.helpers.cli import run_apart

HOW = {"n_atoms": 24, "k": 3, "n_iter": 2, "chunk_size": 128, "batch_size": 256}
SMALL = ("--n-atoms", 24, "--k", 3, "--n-iter", 2, "--chunk-size", 128, "--batch-size", 256)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a file, a store and a dictionary."""
    folder = tmp_path_factory.mktemp("made")
    np.save(folder / "rows.npy", jobs.made_up(60, 6))
    jobs.write_store(folder / "store.zarr", jobs.made_up(600, 16), 100)
    jobs.write_dictionary(folder / "dictionary.zarr", 24, 16, 3)
    return folder


@pytest.fixture(autouse=True)
def small_code_chunks(monkeypatch):
    monkeypatch.setattr(units, "MIN_CHUNK_ROWS", 100)


def run_import(made, out, **more):
    return import_activations(made / "rows.npy", out, **{"chunk_rows": 8, "drop_outliers": 1.5, **more})


def run_shuffle(made, out, **more):
    return shuffle_activations(made / "store.zarr", out, **{"seed": 3, **more})


def run_encode(made, out, **more):
    return encode_store(made / "store.zarr", made / "dictionary.zarr", out, **more)


RUNS = {"import": run_import, "shuffle": run_shuffle, "encode": run_encode}


# ---------------------------------------------------------------------------------------------- two at once


@pytest.mark.parametrize("job", RUNS)
def test_a_second_job_with_the_same_target_is_refused_and_the_first_goes_on(made, tmp_path, job):
    refused = []

    def second(event):
        if not refused:
            with pytest.raises(
                BusyError, match=rf"out is in use: an? {job} by process {os.getpid()} on "
            ) as caught:
                RUNS[job](made, tmp_path / "out")
            refused.append(caught.value)

    RUNS[job](made, tmp_path / "out", callbacks=[second])
    assert refused
    RUNS[job](made, tmp_path / "alone")
    assert jobs.tree(tmp_path / "out") == jobs.tree(tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "out"]


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"seed": 1}, {"replace": True}])
def test_a_second_fit_in_the_same_folder_is_refused_and_costs_the_first_nothing(made, tmp_path, more):
    store, run, refused = made / "store.zarr", tmp_path / "run", []

    def second(event):
        if isinstance(event, events.BatchStarted) and event.iteration == 1:
            how = {name: more[name] for name in ("resume", "replace") if name in more}
            with pytest.raises(
                BusyError, match=r"run is in use: a fit by process .* delete .*run/fit\.lock"
            ) as caught:
                DBKSVD(**HOW, seed=more.get("seed", 0), checkpoint=run)._fit(store, **how)
            refused.append(str(caught.value))

    first = DBKSVD(**HOW, checkpoint=run, callbacks=[second]).fit(store)
    assert len(refused) == 1
    assert "intact" not in refused[0], "the checkpoint there is another's"
    np.testing.assert_array_equal(first.components_, DBKSVD(**HOW).fit(store).components_)
    np.testing.assert_array_equal(open_dictionary(run).atoms, first.components_)
    assert sorted(os.listdir(run)) == ["checkpoint-000001.zarr", "checkpoint-000002.zarr", "status.json"]


def test_a_command_is_refused_in_one_line(made, tmp_path):
    with hold(tmp_path / "run", "a fit", inside=True):
        code, out, err = jobs.command("fit", made / "store.zarr", tmp_path / "run", *SMALL, "--force")
    assert (code, out) == (1, "")
    assert err.startswith(f"dbksvd: error: {tmp_path / 'run'} is in use: a fit by process {os.getpid()} on ")
    assert err.count("\n") == 1


def test_a_fit_whose_lock_was_taken_over_writes_no_checkpoint(made, tmp_path):
    run = tmp_path / "run"

    def take(event):
        if isinstance(event, events.BatchStarted) and event.iteration == 1:
            other = json.loads((run / "fit.lock").read_bytes())
            (run / "fit.lock").write_text(json.dumps({**other, "host": "elsewhere", "token": "another"}))

    with pytest.raises(BusyError, match=r"fit\.lock was taken over \(a fit by process .* on elsewhere"):
        DBKSVD(**HOW, checkpoint=run, callbacks=[take]).fit(made / "store.zarr")
    assert sorted(os.listdir(run)) == ["checkpoint-000001.zarr", "fit.lock", "status.json"]


# ---------------------------------------------------------------------------------------------- parts


def test_parts_of_one_encode_never_refuse_each_other_nor_a_whole_one(made, tmp_path):
    """Within the first of two parts: the same part, the other part, and an encode that finishes under its feet."""
    out, inner = tmp_path / "out", []

    def others(event):
        if not inner:
            inner.append(None)
            inner.append(run_encode(made, out, part=(1, 2)).samples_written)
            inner.append(run_encode(made, out, part=(2, 2)).samples_written)
            inner.append(run_encode(made, out).finished)

    result = run_encode(made, out, part=(1, 2), callbacks=[others])
    assert inner == [None, 300, 300, True]
    assert result.finished
    run_encode(made, tmp_path / "alone")
    assert jobs.tree(out) == jobs.tree(tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "out"]


def test_a_part_is_encoded_while_a_whole_encode_holds_the_target(made, tmp_path):
    done = []

    def part(event):
        if not done:
            done.append(run_encode(made, tmp_path / "out", part=(2, 2)).samples_written)

    assert run_encode(made, tmp_path / "out", callbacks=[part]).finished
    assert done == [300]


def test_a_part_whose_work_was_discarded_is_told_so(made, tmp_path):
    def discard(event):
        paths.remove(tmp_path / "out.partial")

    with pytest.raises(StoreError, match=r"out\.partial is gone: another process has finished or discarded"):
        run_encode(made, tmp_path / "out", part=(1, 2), callbacks=[discard])


# ---------------------------------------------------------------------------------------------- own results


@pytest.mark.parametrize("job", RUNS)
def test_a_job_killed_after_its_rename_succeeds_without_work_when_run_again(made, tmp_path, monkeypatch, job):
    RUNS[job](made, tmp_path / "alone")
    out, publish = tmp_path / "out", atomic.publish

    def killed(*args, **kwargs):
        publish(*args, **kwargs)
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "publish", killed)
        with pytest.raises(SystemExit):
            RUNS[job](made, out)
    assert (out / partial.PARTS).exists(), "killed before it had tidied up"
    for _ in ("left behind", "tidy"):
        with monkeypatch.context() as patch:
            for module, name in ((import_.ImportJob, "init"), (shuffle.ShuffleJob, "init")):
                patch.setattr(module, name, nothing)
            patch.setattr(encode.EncodeJob, "init", nothing)
            again = RUNS[job](made, out)
        assert jobs.tree(out) == jobs.tree(tmp_path / "alone")
        assert sorted(os.listdir(tmp_path)) == ["alone", "out"]
    assert_kept(job, again, RUNS[job](made, tmp_path / "alone"))


@pytest.mark.parametrize("job", RUNS)
def test_the_lock_of_a_job_killed_at_its_very_end_goes_when_it_is_run_again(made, tmp_path, job):
    RUNS[job](made, tmp_path / "out")
    dead = dataclasses.replace(Owner.current(job), started="1")
    (tmp_path / "out.lock").write_text(json.dumps(dataclasses.asdict(dead)))
    RUNS[job](made, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def nothing(*_, **__):
    raise AssertionError("work was begun")


def assert_kept(job, again, expected):
    if job == "encode":
        assert (again.finished, again.samples_written, again.samples_kept) == (True, 0, 600)
        assert again.metrics == expected.metrics
        return
    assert again.chunks_written == 0
    assert again.chunks_kept == expected.chunks_kept > 1
    names = {
        "import": ("n_samples", "n_features", "dtype", "n_files", "dropped", "nbytes"),
        "shuffle": ("n_samples", "n_features", "mixing_before", "mixing_after", "nbytes", "blocks_kept"),
    }
    for name in names[job]:
        assert getattr(again, name) == getattr(expected, name), name


def test_the_figures_of_a_recognised_result_are_those_of_the_run_that_made_it(made, tmp_path):
    for run in (run_import, run_shuffle):
        first, second = (run(made, tmp_path / run.__name__) for _ in range(2))
        for name in ("n_samples", "nbytes", "dropped", "mixing_before", "mixing_after"):
            assert getattr(first, name, None) == getattr(second, name, None), name


@pytest.mark.parametrize(
    ("job", "first", "other"),
    [
        ("import", {}, {"chunk_rows": 16}),
        ("import", {}, {"drop_outliers": None}),
        ("import", {}, {"source_row": True}),
        ("import", {}, {"compressor": "zstd"}),
        ("shuffle", {}, {"seed": 4}),
        ("shuffle", {}, {"chunk_rows": 50}),
        ("shuffle", {}, {"compressor": "zstd"}),
    ],
)
def test_a_result_of_other_parameters_is_not_taken_for_ones_own(made, tmp_path, job, first, other):
    RUNS[job](made, tmp_path / "out", **first)
    before = jobs.tree(tmp_path / "out")
    with pytest.raises(StoreError, match="out already exists; choose another name"):
        RUNS[job](made, tmp_path / "out", **other)
    assert jobs.tree(tmp_path / "out") == before
    assert RUNS[job](made, tmp_path / "out", force=True).chunks_written > 0, "force means again"


def test_a_result_of_files_that_have_changed_is_not_taken_for_ones_own(tmp_path):
    source = tmp_path / "a.npy"
    np.save(source, np.zeros((20, 3), np.float32))
    import_activations(source, tmp_path / "s")
    os.utime(source, (1, 1))
    with pytest.raises(StoreError, match="s already exists"):
        import_activations(source, tmp_path / "s")


# ---------------------------------------------------------------------------------------------- into the source


@pytest.mark.parametrize("below", ["x.zarr", "activations/x", "../store.zarr/x"])
def test_nothing_is_written_into_the_store_that_is_read(tmp_path, below):
    store = Path(jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100))
    jobs.write_dictionary(tmp_path / "dictionary.zarr", 24, 16, 3)
    before = jobs.tree(tmp_path)
    (tmp_path / "link").symlink_to(store)
    for source in (store, tmp_path / "link"):
        for out in (store / below, tmp_path / "link" / below):
            for args in (
                ("shuffle", source, out, "--seed", 0),
                ("shuffle", source, out, "--seed", 0, "--force"),
                ("fit", source, out, *SMALL),
                ("fit", source, out, *SMALL, "--resume"),
                ("encode", source, tmp_path / "dictionary.zarr", out),
            ):
                code, _, err = jobs.command(*args)
                assert code == 1
                assert "lies inside the store" in err
                assert "choose a place outside of it" in err
    assert jobs.tree(tmp_path) == before


def test_neighbours_of_the_source_are_not_inside_it(made, tmp_path):
    store = jobs.write_store(tmp_path / "s", jobs.made_up(600, 16), 100)
    shuffle_activations(store, tmp_path / "s2", seed=0)
    DBKSVD(**HOW, checkpoint=tmp_path / "s-run").fit(store)


# ---------------------------------------------------------------------------------------------- read-only places


@pytest.fixture
def read_only(tmp_path):
    folder = tmp_path / "ro"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("name", ["ro/run", "ro"])
def test_a_fit_into_a_read_only_folder_is_refused_before_the_first_batch(made, read_only, monkeypatch, name):
    monkeypatch.setattr(os, "open", refusing(os.open, read_only))
    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, read_only))
    seen = []
    with pytest.raises(StoreError, match=r"cannot be written \(Read-only file system\); choose a place"):
        DBKSVD(**HOW, checkpoint=read_only.parent / name, callbacks=[seen.append]).fit(made / "store.zarr")
    assert not [e for e in seen if isinstance(e, events.FitStarted | events.BatchStarted)]


def refusing(real, folder):
    """A system call that finds a read-only file system below a folder."""

    def call(path, *rest, **more):
        writes = real is not os_open or rest[0] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
        if writes and str(path).startswith(str(folder)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, *rest, **more)

    return call


os_open = os.open


def test_a_finished_fit_in_a_read_only_folder_can_be_resumed(made, tmp_path, monkeypatch):
    run = tmp_path / "run"
    first = DBKSVD(**HOW, checkpoint=run).fit(made / "store.zarr")
    monkeypatch.setattr(os, "open", refusing(os.open, run))
    again = DBKSVD(**HOW, checkpoint=run).fit(made / "store.zarr", resume=True)
    np.testing.assert_array_equal(again.components_, first.components_)


@pytest.mark.slow
def test_commands_name_a_read_only_place(made, read_only):
    dictionary = made / "dictionary.zarr"
    hooked = ("--model-name", "gpt2-small", "--hook-name", "blocks.6.hook_resid_post")
    for args, named in (
        (("fit", made / "store.zarr", read_only / "run", *SMALL), "ro/run"),
        (("fit", made / "store.zarr", made / "unused", *SMALL, "--log", read_only / "log"), "the log"),
        (("import", made / "rows.npy", read_only / "s"), "ro/s"),
        (("encode", made / "store.zarr", dictionary, read_only / "s"), "ro/s"),
        (("export", "saelens", dictionary, read_only / "sae", *hooked), "ro/sae"),
    ):
        done = run_apart(*args)
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert named in done.stderr
        assert "cannot be written (Permission denied); choose a place" in done.stderr
        assert "Errno" not in done.stderr
    assert not os.listdir(read_only)
    assert not checkpoints(made / "unused")
