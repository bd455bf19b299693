"""Checkpoints: what a killed fit leaves behind, going on from it, and what is refused."""

from __future__ import annotations

import _thread
import dataclasses
import json
import logging
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, cluster, events
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.fit import resume
from dbksvd_dask.fit.resume import require_same_fit
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.store import dictionary, runs
from dbksvd_dask.store.lock import Owner
from dbksvd_dask.store.runs import checkpoints, open_dictionary
from tests.helpers import clusters, jobs


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return clusters.small_store(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def expected(store):
    return clusters.on_threads(store, 1)


@pytest.fixture(scope="module")
def halfway(store, tmp_path_factory):
    """Folder of a fit that was stopped after two of its three iterations."""
    run = tmp_path_factory.mktemp("resume") / "halfway"
    clusters.on_threads(store, 2, checkpoint=run, n_iter=2)
    return run


@pytest.fixture
def run(halfway, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(halfway, tmp_path / "run")


def names(run):
    return [Path(path).name for path in checkpoints(run)]


# ---------------------------------------------------------------------------------------------- kill and resume


@pytest.mark.slow
def test_driver_killed_mid_batch_and_resumed_gives_the_same_bits(store, expected, tmp_path):
    run = tmp_path / "run"
    process = clusters.start_driver(store, run, tmp_path, iteration=1, round_=1)
    clusters.kill(process)
    assert names(run) == ["checkpoint-000001.zarr"], "the batch at work left nothing"
    seen = []
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True, callbacks=[seen.append]), expected)
    assert [e.iteration for e in seen if isinstance(e, events.BatchStarted)] == [1, 2], "nothing was done twice"


@pytest.mark.cluster
def test_driver_of_a_cluster_killed_mid_batch_and_resumed_gives_the_same_bits(store, expected, tmp_path):
    code = clusters.DRIVER.replace(
        'with dask.config.set(scheduler="threads", num_workers=2):',
        "from dbksvd_dask import cluster\n    with cluster.connect(workers=2) as client:\n"
        '        Path(folder, "pids").write_text(str(list(client.run(__import__("os").getpid).values())))',
    )
    run = tmp_path / "run"
    process = clusters.start_driver(store, run, tmp_path, iteration=1, round_=1, code=code)
    clusters.kill(process)
    workers = json.loads((tmp_path / "pids").read_text())
    assert len(workers) == 2
    clusters.await_true(lambda: not any(map(clusters.is_alive, workers)))
    assert names(run) == ["checkpoint-000001.zarr"]
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_checkpoints_come_as_often_as_asked_and_at_the_end(store, tmp_path, every):
    seen = []
    clusters.on_threads(store, 2, checkpoint=tmp_path, checkpoint_every=every, callbacks=[seen.append])
    written = [e.iteration for e in seen if isinstance(e, events.CheckpointWritten)]
    assert written == [i for i in (1, 2, 3) if i % every == 0 or i == clusters.N_ITER]
    assert len(names(tmp_path)) <= 2
    assert names(tmp_path)[-1] == "checkpoint-000003.zarr"


def test_resume_goes_on_with_history_and_gives_the_same_bits(store, expected, run):
    model = DBKSVD(**clusters.HOW, checkpoint=run).fit(store, resume=True)
    clusters.same(model.components_.tobytes(), expected)
    assert model.n_iter_ == 3
    whole = DBKSVD(**clusters.HOW).fit(store)
    for name in whole.history_:
        if not name.endswith("seconds"):
            np.testing.assert_array_equal(model.history_[name], whole.history_[name])


@pytest.mark.cluster
def test_resume_on_another_scheduler_gives_the_same_bits(store, expected, run):
    with cluster.connect(workers=1, threads=2):
        clusters.same(clusters.fit(store, checkpoint=run, resume=True), expected)


def test_resume_without_a_checkpoint_starts(store, expected, tmp_path):
    clusters.same(clusters.on_threads(store, 2, checkpoint=tmp_path / "new", resume=True), expected)


def test_a_finished_fit_can_be_made_longer(store, expected, run):
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)  # n_iter 2 -> 3


def test_resume_of_a_finished_fit_does_nothing(store, halfway):
    seen = []
    clusters.on_threads(store, 1, checkpoint=halfway, resume=True, n_iter=2, callbacks=[seen.append])
    assert [type(e).__name__ for e in seen] == ["FitStarted", "FitFinished"]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"k": 3}, "was made with k=4, this fit has k=3"),
        ({"seed": 9}, "was made with seed=0, this fit has seed=9"),
        ({"batch_size": 800}, "was made with batch_size=1600, this fit has batch_size=800"),
        ({"chunk_size": 500}, "was made with chunk_size=400, this fit has chunk_size=500"),
        ({"encoder": "omp"}, "was made with encoder='mp', this fit has encoder='omp'"),
        ({"n_atoms": 40}, "was made with n_atoms=48, this fit has n_atoms=40"),
    ],
)
def test_a_checkpoint_of_other_parameters_is_refused_with_both_values(store, halfway, other, text):
    with pytest.raises(MismatchError, match=text):
        clusters.on_threads(store, 1, checkpoint=halfway, resume=True, **other)


def test_a_checkpoint_older_than_a_parameter_has_its_default():
    params = FitParams.checked(n_atoms=4, k=2).to_json()
    old = Dictionary(np.eye(4, dtype="f4"), None, {n: v for n, v in params.items() if n != "whiten"}, source="a")
    require_same_fit("run", old, params, "a")
    with pytest.raises(MismatchError, match=r"was made with whiten=0.0, this fit has whiten=0.5"):
        require_same_fit("run", old, {**params, "whiten": 0.5}, "a")


def test_a_checkpoint_of_another_store_is_refused_with_both(halfway, tmp_path):
    other = jobs.write_store(tmp_path / "other.zarr", jobs.made_up(6000, 32, seed=5), 400)
    with pytest.raises(MismatchError, match=r"was fitted on store [0-9a-f]+, this fit reads store [0-9a-f]+"):
        clusters.on_threads(other, 1, checkpoint=halfway, resume=True)


def test_a_checkpoint_of_another_format_version_is_refused_with_both(store, run):
    meta = Path(checkpoints(run)[-1], "zarr.json")
    content = json.loads(meta.read_text())
    content["attributes"]["format_version"] = 99
    meta.write_text(json.dumps(content))
    with pytest.raises(MismatchError, match=r"format version 99 .* reads versions 2 and 3"):
        clusters.on_threads(store, 1, checkpoint=run, resume=True)


def test_a_folder_that_holds_a_fit_is_not_overwritten(store, halfway):
    with pytest.raises(StoreError, match=r"already holds a fit .*; continue with resume=True"):
        clusters.on_threads(store, 1, checkpoint=halfway)


def test_resume_needs_a_folder(store):
    with pytest.raises(InputError, match="give checkpoint=PATH"):
        clusters.on_threads(store, 1, resume=True)


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("part", ["dictionary/c/0/0", "mean/c/0", "previous/c/0/0", "zarr.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(store, expected, run, part, how, caplog):
    newest = Path(checkpoints(run)[-1])
    damage(newest / part, how)
    with caplog.at_level(logging.WARNING):
        found = clusters.on_threads(store, 2, checkpoint=run, resume=True)
    clusters.same(found, expected)
    if (part, how) != ("zarr.json", "missing"):  # without it the folder is not taken for a checkpoint at all
        assert "trying the checkpoint before" in caplog.text
        assert newest.name in caplog.text


def damage(path, how):
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 0x11]) + content[-8:])


CHANGES = {
    "an iteration less": lambda a: a.update(iteration=1),
    "more iterations": lambda a: a.update(iteration=7),
    "another threshold": lambda a: a["extra"].update(threshold=0.25),
    "another parameter": lambda a: a["params"].update(momentum=0.3),
    "another source": lambda a: a.update(source="store 123"),
    "a value of the history": lambda a: a["history"]["relative_error"].__setitem__(0, 0.5),
    "no checksum": lambda a: a.pop("attributes_crc32"),
    "no checksums of arrays": lambda a: a.update(crc32={}),
}
WRONG_TYPES = {
    "iteration": [None, "two", [2], {}],
    "history": [None, 3, {"relative_error": 3}, {"relative_error": [[]]}],
    "params": [None, 3, [1]],
    "extra": [3, [1]],
    "crc32": [None, 3, []],
}


def edit(checkpoint, change, *, sign=False):
    """Change the attributes of a checkpoint; signed: with the checksum that goes with the change."""
    meta = Path(checkpoint, "zarr.json")
    content = json.loads(meta.read_text())
    change(content["attributes"])
    if sign:
        content["attributes"][dictionary.ATTRIBUTES_CRC] = dictionary.attributes_checksum(content["attributes"])
    meta.write_text(json.dumps(content))


def test_a_checkpoint_with_another_iteration_is_passed_over_and_the_bits_are_the_same(
    store, expected, run, caplog
):
    edit(checkpoints(run)[-1], CHANGES["an iteration less"])
    with caplog.at_level(logging.WARNING):
        clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)
    assert "its attributes are not what was written; trying the checkpoint before" in caplog.text


@pytest.mark.parametrize("change", CHANGES)
def test_changed_attributes_of_a_checkpoint_are_damage(run, change):
    edit(checkpoints(run)[-1], CHANGES[change])
    path, found, damaged = runs.readable_checkpoint(run)
    assert (Path(path).name, found.iteration) == ("checkpoint-000001.zarr", 1)
    assert ["checkpoint-000002.zarr is damaged: its attributes" in str(error) for error in damaged] == [True]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_TYPES.items() for v in values])
@pytest.mark.parametrize("sign", [False, True])
def test_attributes_of_a_wrong_type_are_damage(run, name, value, sign):
    edit(checkpoints(run)[-1], lambda attributes: attributes.update({name: value}), sign=sign)
    assert runs.readable_checkpoint(run)[1].iteration == 1
    with pytest.raises(StoreError, match=r"checkpoint-000002\.zarr"):
        open_dictionary(run)


@pytest.mark.parametrize(("name", "value"), [("data_type", "int32"), ("shape", [32, 48])])
def test_an_array_of_another_dtype_or_shape_is_damage(run, name, value):
    """The bytes of the chunk are the same."""
    meta = Path(checkpoints(run)[-1], "previous", "zarr.json")
    content = json.loads(meta.read_text())
    content[name] = value
    if name == "shape":
        content["chunk_grid"]["configuration"]["chunk_shape"] = value
    else:
        content["fill_value"] = 0
    meta.write_text(json.dumps(content))
    _, found, damaged = runs.readable_checkpoint(run)
    assert found.iteration == 1
    assert "its array `previous` is not what was written" in str(damaged[0])


def test_a_checkpoint_under_the_name_of_another_is_damage(run):
    Path(checkpoints(run)[-1]).rename(run / "checkpoint-000009.zarr")
    _, found, damaged = runs.readable_checkpoint(run)
    assert found.iteration == 1
    assert "checkpoint-000009.zarr is damaged: it holds iteration 2" in str(damaged[0])


def test_a_checkpoint_of_the_format_before_is_refused(store, run):
    edit(checkpoints(run)[-1], lambda attributes: attributes.update(format_version=1))
    with pytest.raises(MismatchError, match=r"format version 1 .* reads versions 2 and 3"):
        clusters.on_threads(store, 1, checkpoint=run, resume=True)


def test_what_a_fit_killed_at_its_very_end_left_goes_when_it_is_resumed(store, run):
    before = names(run)
    shutil.copytree(run / before[0], run / "checkpoint-000000.zarr")
    (run / "fit.lock").write_text(json.dumps({**dataclasses.asdict(Owner.current("a fit")), "started": "1"}))
    clusters.on_threads(store, 1, checkpoint=run, resume=True, n_iter=2)
    assert sorted(path.name for path in run.iterdir()) == [*before, "status.json"]


def test_when_every_checkpoint_is_damaged_the_newest_is_named(store, run):
    for path in checkpoints(run):
        Path(path, "dictionary/c/0/0").unlink()
    with pytest.raises(StoreError, match=r"checkpoint-000002\.zarr"):
        clusters.on_threads(store, 1, checkpoint=run, resume=True)


def test_no_checkpoint_holds_a_pickle(halfway):
    for path in Path(halfway).rglob("*"):
        if path.is_file() and path.name not in ("zarr.json", "status.json"):
            assert path.parent.name == "c" or path.parent.parent.name == "c", f"{path} is not an array's chunk"
    assert open_dictionary(halfway).iteration == 2


# ---------------------------------------------------------------------------------------------- Ctrl-C


def test_interrupt_while_a_checkpoint_is_written_ends_with_that_checkpoint(tmp_path, monkeypatch):
    """Zarr would go on writing behind the back of a caller that is interrupted, in the way of the next write."""
    begun, ended, write = [], [], resume.write_checkpoint

    def interrupt(run, state):
        begun.append(state.iteration)
        if begun == [1, 2]:
            _thread.interrupt_main()
        path = write(run, state)
        ended.append(state.iteration)
        return path

    monkeypatch.setattr(resume, "write_checkpoint", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = str(tmp_path / "run")
    try:
        with pytest.raises(KeyboardInterrupt, match=r"checkpoint-000002\.zarr is intact"):
            DBKSVD(8, 2, n_iter=5, validation=0, checkpoint=run).fit(jobs.made_up(300, 6))
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == ended == [1, 2]
    assert open_dictionary(run).iteration == 2


@pytest.mark.slow
def test_interrupt_mid_batch_says_what_is_safe_and_goes_on_later(store, expected, tmp_path):
    run = tmp_path / "run"
    process = clusters.start_driver(store, run, tmp_path, iteration=1, round_=1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=clusters.PATIENCE)
    assert process.returncode != 0
    assert "KeyboardInterrupt: interrupted; " in errors
    assert "checkpoint-000001.zarr is intact; continue with resume=True" in errors
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)
