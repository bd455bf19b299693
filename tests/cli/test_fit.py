"""`dbksvd fit`: the same parameters as the library, one-line errors, resume, plan, log."""

from __future__ import annotations

import inspect
import json
import re

import numpy as np
import pytest

from dbksvd_dask import DBKSVD
from dbksvd_dask.cli import fit as fit_command
from dbksvd_dask.cli import options
from dbksvd_dask.store.runs import open_dictionary
from tests.helpers import jobs

SMALL = ("--n-atoms", 24, "--k", 3, "--n-iter", 2, "--chunk-size", 128, "--batch-size", 256)


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100)


def test_every_parameter_of_the_library_is_an_option_with_its_default():
    signature = inspect.signature(DBKSVD.__init__).parameters
    # RUN is the checkpoint, the bar a callback, and `output` is about transform
    library = {
        name: p.default
        for name, p in signature.items()
        if name not in ("self", "checkpoint", "callbacks", "output", "verbose")
    }
    library |= {"n_atoms": None, "k": None}  # no default there, and checked by the command
    assert fit_command.PARAMETERS == library
    handed = fit_command.command.make_context("fit", ["a", "b"]).params
    assert {name: handed[name] for name in library} == {**library, "validation": str(library["validation"])}
    by_name = {p.name: p for p in fit_command.command.params}
    for name in library:
        assert "--" + name.replace("_", "-") in by_name[name].opts
        assert by_name[name].help == options.HELP[name]


def test_fit_gives_the_dictionary_of_the_library(tmp_path, store):
    code, out, err = jobs.command("fit", store, tmp_path / "run", *SMALL, "--nonneg", "--seed", 3)
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'run'}: 24 atoms, k=3, 2 iterations in ")
    assert "held-out variance explained" in out
    model = DBKSVD(24, 3, n_iter=2, chunk_size=128, batch_size=256, nonneg=True, seed=3).fit(store)
    np.testing.assert_array_equal(open_dictionary(tmp_path / "run").atoms, model.components_)


def test_samples_without_an_error_to_tell_end_the_line_at_the_time(tmp_path):
    alone = jobs.write_store(tmp_path / "one.zarr", jobs.made_up(1, 16), 1)
    code, out, err = jobs.command("fit", alone, tmp_path / "run", "--n-atoms", 4, "--k", 1, "--n-iter", 1)
    assert code == 0, err
    assert re.fullmatch(r".*: 4 atoms, k=1, 1 iteration in [0-9.]+ s\n", out)


def test_json_is_one_object_and_nothing_else_is_said(tmp_path, store):
    code, out, err = jobs.command("fit", store, tmp_path / "run", *SMALL, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["n_iter"], result["n_atoms"], result["k"]) == (2, 24, 3)
    assert result["last"]["relative_error"] == open_dictionary(tmp_path / "run").history["relative_error"][-1]


def test_resume_takes_what_is_not_given_from_the_run_and_makes_it_longer(tmp_path, store):
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert jobs.command("fit", store, run, *SMALL, "--init", "data")[0] == 0
    code, _, err = jobs.command("fit", store, run, "--resume", "--n-iter", 4)
    assert code == 0, err
    assert jobs.command("fit", store, whole, *SMALL, "--init", "data", "--n-iter", 4)[0] == 0
    resumed = open_dictionary(run)
    assert (resumed.iteration, resumed.params["init"]) == (4, "data")
    np.testing.assert_array_equal(resumed.atoms, open_dictionary(whole).atoms)


def test_resume_with_another_value_is_refused_with_both(tmp_path, store):
    run = tmp_path / "run"
    jobs.command("fit", store, run, *SMALL)
    code, out, err = jobs.command("fit", store, run, "--resume", "--k", 4)
    assert (code, out) == (1, "")
    assert "was made with --k 3, this fit has --k 4" in err
    assert err.count("\n") == 1


def test_a_run_that_is_there_is_kept_unless_forced(tmp_path, store):
    run = tmp_path / "run"
    jobs.command("fit", store, run, *SMALL)
    before = jobs.tree(run)
    code, _, err = jobs.command("fit", store, run, *SMALL)
    assert code == 1
    assert "already holds a fit" in err
    assert "--resume" in err
    for bad in (("--k", 99), ("--scheduler", "nowhere"), ("--init", "nothing.npy")):
        assert jobs.command("fit", store, run, *SMALL, "--force", *bad)[0] == 1
        assert jobs.tree(run) == before
    assert jobs.command("fit", store, run, *SMALL, "--force", "--n-iter", 1)[0] == 0
    assert open_dictionary(run).iteration == 1


def test_init_may_be_a_file_a_dictionary_or_a_run(tmp_path, store):
    given = jobs.write_dictionary(tmp_path / "dictionary", 24, 16)
    np.save(tmp_path / "atoms.npy", open_dictionary(given).atoms)
    np.save(tmp_path / "turned.npy", 2 * open_dictionary(given).atoms.T)  # (features, atoms), as KSVD.jl saves
    found = []
    for name in ("dictionary", "atoms.npy", "turned.npy"):
        code, _, err = jobs.command("fit", store, tmp_path / f"run-{name}", *SMALL, "--init", tmp_path / name)
        assert code == 0, err
        found.append(open_dictionary(tmp_path / f"run-{name}").atoms)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], found[2], atol=1e-5)
    code, _, err = jobs.command("fit", store, tmp_path / "run-dictionary", "--resume", "--n-iter", 3)
    assert code == 0, err


def test_groups_and_a_validation_store_are_understood(tmp_path, store):
    other = jobs.write_store(tmp_path / "other.zarr", jobs.made_up(200, 16, seed=4), 100)
    groups = ("--groups", "8,16", "--validation", other)
    code, _, err = jobs.command("fit", store, tmp_path / "run", *SMALL, *groups)
    assert code == 0, err
    assert open_dictionary(tmp_path / "run").params["groups"] == [8, 16]
    code, _, err = jobs.command("fit", store, tmp_path / "none", *SMALL, "--groups", "8,x")
    assert code == 2
    assert "'8,x' is not 'exponential' or sizes such as 64,64,128" in err


def test_log_holds_every_event_as_a_line_of_json(tmp_path, store):
    log = tmp_path / "run.jsonl"
    assert jobs.command("fit", store, tmp_path / "run", *SMALL, "--log", log)[0] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines].count("BatchFinished") == 2
    assert lines[-1]["event"] == "FitFinished"


def test_plan_says_what_it_takes_and_does_nothing(tmp_path, store):
    code, out, _ = jobs.command("fit", store, tmp_path / "run", *SMALL, "--plan", "--json")
    plan = json.loads(out)
    assert code == 0
    assert not (tmp_path / "run").exists()
    assert (plan["rows"], plan["features"], plan["atoms"], plan["k"]) == (600, 16, 24, 3)
    assert (plan["iterations"], plan["batch_rows"], plan["validation_rows"]) == (2, 256, 60)
    assert plan["passes"] == pytest.approx(2 * 256 / 540)
    assert plan["read_bytes"] == (2 * (256 + 60) + 540) * 16 * 4
    assert plan["estimated_seconds"] > 0
    assert plan["not_estimated"].startswith("start-up: a few seconds")
    assert (plan["workers"], plan["chunks_per_batch"], plan["tasks_per_worker"]) == (0, 2, None)
    assert plan["memory_bytes"] == DBKSVD(24, 3, batch_size=256, chunk_size=128).plan(store).total


def test_plan_counts_the_passes_for_mean_and_covariance(tmp_path, store):
    def planned(*how):
        return json.loads(jobs.command("fit", store, tmp_path / "run", *SMALL, *how, "--plan", "--json")[1])

    plain, white = planned(), planned("--whiten", 0.5)
    one_pass = 540 * 16 * 4
    assert white["read_bytes"] - plain["read_bytes"] == one_pass
    assert plain["read_bytes"] - planned("--no-center")["read_bytes"] == one_pass


def test_plan_counts_the_tasks_of_workers_without_starting_them(tmp_path, store):
    how = (*SMALL, "--workers", 4, "--threads", 2, "--plan", "--json")
    plan = json.loads(jobs.command("fit", store, tmp_path / "run", *how)[1])
    assert (plan["workers"], plan["threads"], plan["chunks_per_batch"]) == (4, 8, 2)
    assert plan["tasks_per_worker"] == plan["tasks_per_batch"] / 4 < 60
    # no batch can have the 1024 samples that eight chunks take
    assert plan["advice"] == "6 of 8 threads have no chunk; use --chunk-size 32 or less"


def test_a_fit_that_needs_more_memory_than_allowed_is_refused_before_it_starts(tmp_path, store):
    code, out, err = jobs.command("fit", store, tmp_path / "run", *SMALL, "--memory-limit", "50MB")
    assert (code, out) == (1, "")
    assert "this fit is planned to take" in err
    assert "more than --memory-limit 50.0 MB" in err
    assert not list(tmp_path.glob("run/checkpoint-*"))


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("--n-atoms", 24), 2, "Missing option '--k'"),
        (("--k", 3), 2, "Missing option '--n-atoms'"),
        (("--n-atoms", 24, "--k", 0), 1, "dbksvd: error: --k 0 is too small; use --k >= 1"),
        (("--n-atoms", 24, "--k", 30), 1, "dbksvd: error: --k 30 exceeds --n-atoms 24; use --k <= 24"),
        (("--n-atoms", 24, "--k", 3, "--rtol", -1), 1, "--rtol -1.0 is not a finite number >= 0"),
        (("--n-atoms", 24, "--k", 3, "--encoder", "ols"), 2, "'ols' is not one of 'mp', 'omp'"),
        (
            ("--n-atoms", 24, "--k", 3, "--validation", "no"),
            1,
            "neither a number of samples nor an existing store",
        ),
        (("--n-atoms", 24, "--k", 3, "--init", "zeros"), 1, "--init zeros is not known; use 'uniform', 'data'"),
        (("--n-atoms", 24, "--k", 3, "--workers", 2, "--scheduler", "tcp://h:1"), 1, "were both given"),
        (("--n-atoms", 24, "--k", 3, "--tls-cert", "x"), 1, "needs both --tls-ca and --tls-cert"),
    ],
)
def test_bad_options_give_one_clear_line(tmp_path, store, args, code, text):
    found, out, err = jobs.command("fit", store, tmp_path / "run", *args)
    assert (found, out) == (code, "")
    assert text in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_bad_stores_give_one_clear_line(tmp_path, store):
    (tmp_path / "empty").mkdir()
    broken = jobs.made_up(300, 16)
    broken[120, 3] = np.nan
    jobs.write_store(tmp_path / "nan.zarr", broken, 100)
    for name, text in (
        ("missing.zarr", "no store at"),
        ("empty", "is not a Zarr store"),
        ("nan.zarr", "sample 120 (chunk 1, row 20 in it)"),
    ):
        code, out, err = jobs.command("fit", tmp_path / name, tmp_path / "run", *SMALL)
        assert (code, out) == (1, "")
        assert text in err
        assert err.startswith("dbksvd: error: ")
        assert err.count("\n") == 1
        assert not list(tmp_path.glob("run/checkpoint-*"))


def test_a_traceback_is_shown_when_asked_for(tmp_path):
    code, _, err = jobs.command("-v", "fit", tmp_path / "missing.zarr", tmp_path / "run", *SMALL)
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert "StoreError: no store at" in err


def test_an_error_nobody_foresaw_is_one_line_too(tmp_path, store, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the scheduler\nhas another environment")

    monkeypatch.setattr(DBKSVD, "_fit", broken)
    code, out, err = jobs.command("fit", store, tmp_path / "run", *SMALL)
    assert (code, out) == (1, "")
    assert err == (
        "dbksvd: error: RuntimeError: the scheduler has another environment "
        "(`dbksvd -v` shows where it happened)\n"
    )


def test_paths_are_made_absolute_for_other_processes():
    alone = {"workers": None, "scheduler": None}
    assert options.seen_by_workers("store.zarr", alone) == "store.zarr"
    assert options.seen_by_workers("store.zarr", {**alone, "workers": 2}).startswith("/")
    assert options.seen_by_workers("s3://bucket/store.zarr", {**alone, "workers": 2}) == "s3://bucket/store.zarr"


def test_help_has_an_example_and_names_every_option(tmp_path):
    code, out, _ = jobs.command("fit", "--help")
    assert code == 0
    assert "dbksvd fit store.zarr run --n-atoms 4096 --k 32" in out
    for name in fit_command.PARAMETERS:
        assert "--" + name.replace("_", "-") in out


def test_info_describes_a_run_and_its_checkpoints(tmp_path, store):
    jobs.command("fit", store, tmp_path / "run", *SMALL, "--n-iter", 3)
    code, out, _ = jobs.command("info", tmp_path / "run", "--json")
    found = json.loads(out)
    assert (code, found["kind"], found["iteration"], found["finished"]) == (0, "run", 3, True)
    assert found["checkpoints"] == ["checkpoint-000002.zarr", "checkpoint-000003.zarr"]
    assert found["last"]["relative_error"] > 0
    code, out, _ = jobs.command("info", tmp_path / "run" / found["checkpoints"][0])
    assert code == 0
    assert out.startswith("kind ")
    assert "dictionary" in out.splitlines()[0]
