"""Where a run may lie, what is never taken for one, and what is said of a damaged one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, open_dictionary
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import StoreError
from dbksvd_dask.store.dictionary import save_dictionary
from dbksvd_dask.store.runs import checkpoints, remove_checkpoints, write_checkpoint
from tests.helpers import jobs
from tests.helpers.cli import run_apart

SMALL = ("--n-atoms", 24, "--k", 3, "--n-iter", 2, "--chunk-size", 128, "--batch-size", 256)
HOW = {"n_atoms": 24, "k": 3, "n_iter": 2, "chunk_size": 128, "batch_size": 256}


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100)


@pytest.fixture
def run(tmp_path, store):
    """Folder of a fit of two iterations."""
    DBKSVD(**HOW, checkpoint=tmp_path / "run").fit(store)
    return tmp_path / "run"


def refused(*args):
    """Run a command that must fail with one line; that line."""
    code, out, err = jobs.command(*args)
    assert (code, out) == (1, ""), err
    assert err.startswith("dbksvd: error: ")
    assert err.count("\n") == 1
    return err


def nothing(*_, **__):
    raise AssertionError("work was begun")


# ---------------------------------------------------------------------------------------------- URLs


def test_a_local_url_is_the_path_it_names(tmp_path, store, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = jobs.command("fit", store, f"file://{tmp_path}/run", *SMALL)
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'run'}: ")
    assert sorted(os.listdir(tmp_path)) == ["run", "store.zarr"]
    assert open_dictionary(f"file://{tmp_path}/run").iteration == 2
    assert jobs.command("fit", store, f"file://{tmp_path}/run", "--resume", "--n-iter", 3)[0] == 0
    assert open_dictionary(tmp_path / "run").iteration == 3


# ---------------------------------------------------------------------------------------------- other things


@pytest.mark.parametrize("more", [(), ("--force",), ("--resume",)])
def test_a_store_and_a_file_are_never_taken_for_a_run(tmp_path, store, more):
    (tmp_path / "file.npy").write_bytes(b"numbers")
    before = jobs.tree(tmp_path)
    for name, text in (
        ("store.zarr", "store.zarr is a Zarr store, not the folder of a fit; choose another folder"),
        ("file.npy", "file.npy is a file, and a run is a folder; choose another name"),
    ):
        assert text in refused("fit", store, tmp_path / name, *SMALL, *more)
    assert jobs.tree(tmp_path) == before


def test_what_lies_beside_the_checkpoints_is_left_alone(tmp_path, store):
    run = tmp_path / "run"
    (run / "checkpoint-000001.zarr.partial").mkdir(parents=True)
    (run / "thesis.tex").write_text("years of work")
    for more in ((), ("--force",), ("--resume", "--n-iter", 3)):
        code, _, err = jobs.command("fit", store, run, *SMALL, "--log", run / "events.jsonl", *more)
        assert code == 0, err
        assert (run / "thesis.tex").read_text() == "years of work"
    assert open_dictionary(run).iteration == 3


def test_a_dictionary_takes_the_place_of_dictionaries_only(tmp_path, store):
    made = Dictionary(np.eye(2, dtype=np.float32), None, {"n_atoms": 2, "k": 1})
    for _ in ("new", "again"):
        save_dictionary(tmp_path / "d", made, overwrite=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    for name in ("store.zarr", "papers"):
        with pytest.raises(StoreError, match="only a dictionary is replaced"):
            save_dictionary(tmp_path / name, made, overwrite=True)
    assert (tmp_path / "papers" / "thesis.tex").exists()
    assert jobs.command("info", store)[0] == 0


def test_info_sees_a_store_where_checkpoints_lie_in_it(tmp_path, store, run):
    for path in checkpoints(run):
        os.rename(path, Path(store, Path(path).name))
    code, out, err = jobs.command("info", store, "--json")
    assert code == 0, err
    assert json.loads(out)["kind"] == "activation store"


# ---------------------------------------------------------------------------------------------- --force


@pytest.mark.slow
def test_force_on_a_folder_that_cannot_be_changed_names_it_and_leaves_the_fit(run, store):
    before = jobs.tree(run)
    os.chmod(run, 0o555)
    try:
        done = run_apart("fit", store, run, *SMALL, "--force")
    finally:
        os.chmod(run, 0o755)
    assert done.returncode == 1
    assert done.stderr == (
        f"dbksvd: error: {run} cannot be written (Permission denied); choose a place where this user may write; "
        f"{run / 'checkpoint-000002.zarr'} is intact; continue with --resume\n"
    )
    assert jobs.tree(run) == before


def test_what_to_do_with_a_fit_that_is_there_names_all_three_ways(run, store):
    err = refused("fit", store, run, *SMALL)
    assert "continue with --resume, choose another folder, or discard that fit with --force" in err


def test_what_a_killed_force_left_of_checkpoints_goes_with_the_next_checkpoint(tmp_path, monkeypatch):
    made = Dictionary(np.eye(2, dtype=np.float32), None, {"n_atoms": 2, "k": 1})
    for iteration in (1, 2):
        write_checkpoint(tmp_path, dataclasses.replace(made, iteration=iteration))
    real = shutil.rmtree

    def killed(path, **options):
        if os.path.exists(path):
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoints(tmp_path)
    os.rename(checkpoints(tmp_path)[-1], tmp_path / "checkpoint-000002.zarr.17-0.replaced")  # by a killed publish
    (tmp_path / "notes.replaced").mkdir()
    assert len([p for p in tmp_path.iterdir() if p.name.endswith(".zarr.replaced")]) == 1
    write_checkpoint(tmp_path, dataclasses.replace(made, iteration=7))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000007.zarr", "notes.replaced"]


# ---------------------------------------------------------------------------------------------- damage


@pytest.fixture
def damaged(run):
    """A run whose newest checkpoint has lost the file of its atoms."""
    Path(checkpoints(run)[-1], "dictionary/c/0/0").unlink()
    return run


def test_a_damaged_checkpoint_is_named_with_the_one_that_can_be_read(tmp_path, damaged, store):
    older, newest = checkpoints(damaged)
    for args in (("info", damaged), ("encode", store, damaged, tmp_path / "codes.zarr")):
        err = refused(*args)
        assert f"{newest} is damaged" in err
        assert f"{older} can be read: give that one, or continue from it with --resume" in err
    assert jobs.command("info", older)[0] == 0


@pytest.mark.slow
def test_resume_goes_on_from_the_one_that_can_be_read_and_says_so_once(damaged, store):
    done = run_apart("fit", store, damaged, "--resume", "--n-iter", 3)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("checkpoint-000002.zarr is damaged") == 1
    assert done.stderr.count("\n") == 1
    assert open_dictionary(damaged).iteration == 3


def test_a_fit_that_stops_calls_only_that_one_intact(damaged, store):
    for path in Path(store, "activations").glob("c.*"):
        path.write_bytes(path.read_bytes()[:100])
    err = refused("fit", store, damaged, "--resume", "--n-iter", 3)
    assert "checkpoint-000001.zarr is intact; continue with --resume" in err
    assert "checkpoint-000002.zarr" not in err


def test_when_none_can_be_read_nothing_is_called_intact(damaged, store):
    Path(checkpoints(damaged)[0], "dictionary/c/0/0").unlink()
    err = refused("fit", store, damaged, "--resume")
    assert "checkpoint-000002.zarr is damaged" in err
    with pytest.raises(StoreError, match=r"checkpoint-000002\.zarr is damaged") as caught:
        DBKSVD(**HOW, checkpoint=damaged).fit(store, resume=True)
    assert "intact" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- --verify


def test_verify_compares_every_checkpoint_of_a_run_and_a_dictionary(tmp_path, run):
    code, out, _ = jobs.command("info", run, "--verify", "--json")
    assert (code, json.loads(out)["verified"]) == (0, "8 arrays agree with their checksums")
    given = jobs.write_dictionary(tmp_path / "dictionary")
    code, out, _ = jobs.command("info", given, "--verify", "--json")
    assert (code, json.loads(out)["verified"]) == (0, "2 arrays agree with their checksums")


def test_verify_finds_damage_in_the_older_checkpoint_too(run):
    older = checkpoints(run)[0]
    path = Path(older, "mean/c/0")
    path.write_bytes(bytes(len(path.read_bytes())))
    assert jobs.command("info", run)[0] == 0
    assert f"{older} is damaged: its array `mean` is not what was written" in refused("info", run, "--verify")


def test_verify_refuses_what_has_no_checksums(tmp_path, store):
    np.save(tmp_path / "a.npy", np.ones((4, 3), np.float32))
    assert "a.npy has no checksums to verify" in refused("info", tmp_path / "a.npy", "--verify")
    bare = jobs.write_dictionary(tmp_path / "bare")
    meta = Path(bare, "zarr.json")
    content = json.loads(meta.read_text())
    del content["attributes"]["crc32"]
    meta.write_text(json.dumps(content))
    assert "bare is damaged: its attributes are not what was written" in refused("info", bare, "--verify")


def test_verify_refuses_what_is_unfinished(tmp_path, store, run):
    from dbksvd_dask.store.activations import create_activations

    writer = create_activations(tmp_path / "half.zarr", 20, 4, "float32", chunk_rows=10)
    writer.write_chunk(0, np.ones((10, 4), np.float32))
    assert jobs.command("encode", store, run, tmp_path / "codes.zarr", "--part", "1/2")[0] == 0
    for name in ("half.zarr.partial", "codes.zarr.partial"):
        assert jobs.command("info", tmp_path / name)[0] == 0
        assert "is unfinished and cannot be verified yet; finish it" in refused(
            "info", tmp_path / name, "--verify"
        )
