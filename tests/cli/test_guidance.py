"""What a command says to someone who typed something else than was meant."""

from __future__ import annotations

import numpy as np
import pytest

from dbksvd_dask import Dictionary, encode_store, open_codes, save_dictionary
from dbksvd_dask.cli import options
from dbksvd_dask.errors import InputError, StoreError
from tests.helpers import jobs
from tests.helpers.cli import run_apart

SMALL = ("--n-atoms", 24, "--k", 3, "--n-iter", 1, "--chunk-size", 128, "--batch-size", 256)


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fitt", "`dbksvd fit`"),
        ("train", "`dbksvd fit`"),
        ("imports", "`dbksvd import`"),
        ("encod", "`dbksvd encode`"),
    ],
)
def test_the_nearest_command_is_named(typed, meant):
    code, _, err = jobs.command(typed, "a", "b")
    assert code == 2
    assert f"No such command '{typed}'. Did you mean {meant}?" in err


def test_the_nearest_command_of_a_group_is_named():
    assert "Did you mean `dbksvd export saelens`?" in jobs.command("export", "saelen", "a", "b")[2]
    err = jobs.command("xylophone")[2]
    assert "No such command 'xylophone'." in err
    assert "Did you mean" not in err


def test_the_nearest_option_is_named():
    code, _, err = jobs.command("fit", "a", "b", "--natoms", 3)
    assert code == 2
    assert "--n-atoms" in err.splitlines()[-1]


def test_help_lists_no_argument_among_the_options():
    out = jobs.command("fit", "--help")[1]
    assert "\n  STORE\n" not in out
    assert "\n  RUN\n" not in out


def test_store_and_run_the_other_way_round_are_told_apart(tmp_path, store):
    for run in (tmp_path / "new", jobs.write_dictionary(tmp_path / "dictionary")):
        code, _, err = jobs.command("fit", run, store, *SMALL)
        assert code == 1
        assert f"STORE comes before RUN; type `dbksvd fit {store} {run}`" in err
    code, _, err = jobs.command("encode", run, store, tmp_path / "codes.zarr")
    assert code == 1
    assert f"type `dbksvd encode {store} {run}`" in err


def test_codes_of_an_earlier_iteration_are_told_by_iterations(tmp_path, store):
    run, codes = tmp_path / "run", tmp_path / "codes.zarr"
    assert jobs.command("fit", store, run, *SMALL)[0] == 0
    encode_store(store, run, codes)
    assert jobs.command("fit", store, run, "--resume", "--n-iter", 3)[0] == 0
    code, _, err = jobs.command("report", run, "--codes", codes, "--out", tmp_path / "page.html")
    assert code == 1
    assert "the codes were made at iteration 1" in err
    assert "the run is at 3; give the run that made them, or encode again" in err


def test_codes_of_other_atoms_are_told_by_their_number_or_as_another_dictionary(tmp_path, store):
    codes = tmp_path / "codes.zarr"
    encode_store(store, jobs.write_dictionary(tmp_path / "a"), codes)
    for name, changes, words in (
        ("b", {"seed": 5}, "another dictionary"),
        ("c", {"n_atoms": 30}, "of 32 atoms, this one has 30"),
    ):
        other = jobs.write_dictionary(tmp_path / name, **changes)
        assert words in jobs.command("report", other, "--codes", codes, "--out", tmp_path / "page.html")[2]


# ---------------------------------------------------------------------------------------------- parts, workers


def test_part_auto_finds_its_part_and_any_range_of_tasks_does_what_is_left(tmp_path, monkeypatch):
    store = jobs.write_store(tmp_path / "store.zarr", jobs.made_up(9000, 16), 1000)
    run, codes = jobs.write_dictionary(tmp_path / "dictionary", 24, 16, 3), tmp_path / "codes.zarr"
    for task in (3, 5):
        for name, value in (("ID", task), ("MIN", 3), ("MAX", 5)):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        code, _, err = jobs.command("encode", store, run, codes, "--part", "auto")
        assert code == 0, err
    assert "Parts not encoded: 2 of 3" in jobs.command("encode", store, run, codes, "--finish")[2]
    assert jobs.command("encode", store, run, codes, "--part", "2/3")[0] == 0
    assert jobs.command("encode", store, run, codes, "--finish")[0] == 0
    encode_store(store, run, tmp_path / "whole.zarr")
    assert jobs.tree(codes) == jobs.tree(tmp_path / "whole.zarr")


def test_part_auto_outside_an_array_job_says_what_it_needs(monkeypatch):
    with pytest.raises(InputError, match="--part auto needs 'JOB_COMPLETION_INDEX' in the environment"):
        options.array_part({})
    assert options.array_part({"JOB_COMPLETION_INDEX": "0", "N_PARTS": "4"}) == (1, 4)


@pytest.mark.parametrize("text", ["3", "a/b", "1/2/3", "automatic"])
def test_parts_that_cannot_be_read_are_refused(text):
    assert "write 3/8 for the third of eight, or auto" in jobs.command("encode", "a", "b", "c", "--part", text)[2]


def test_wait_for_needs_a_cluster(tmp_path, store):
    code, _, err = jobs.command("fit", store, tmp_path / "run", *SMALL, "--wait-for", 3)
    assert code == 1
    assert "--wait-for 3 waits for workers of a running cluster; give its --scheduler ADDRESS" in err


@pytest.mark.cluster
def test_a_command_waits_until_the_workers_are_there(tmp_path, store):
    import logging
    import threading

    from distributed import LocalCluster

    with LocalCluster(
        n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        before = []

        class Late(logging.Handler):
            """Starts the worker once the command says that it waits for it."""

            def emit(self, record):
                if "waiting for 1 workers at tcp://127.0.0.1" in record.getMessage():
                    before.append((tmp_path / "run").exists())
                    threading.Thread(target=cluster.scale, args=(1,)).start()

        late = Late()
        logging.getLogger("dbksvd_dask").addHandler(late)
        at = ("--scheduler", cluster.scheduler_address, "--wait-for", 1)
        try:
            code, _, err = jobs.command("fit", store, tmp_path / "run", *SMALL, *at)
        finally:
            logging.getLogger("dbksvd_dask").removeHandler(late)
    assert code == 0, err
    assert before == [False]


# ---------------------------------------------------------------------------------------------- figures


def test_a_long_time_is_told_in_days_and_not_called_seconds(tmp_path, store):
    from dbksvd_dask.cli.output import table

    assert table({"estimated_seconds": 1645 * 3600.0}) == "estimated time  68 days 13 h"


def test_a_table_shows_parameters_in_full_and_cuts_long_lists():
    from dbksvd_dask.cli.output import table

    assert table({"parameters": {f"p{i}": i for i in range(30)}}).count(",") == 29
    assert table({"arrays": {f"dim_{i}": "float32 (9,)" for i in range(768)}}).endswith(" and 760 more")


def test_a_message_lists_eight_names_at_most(tmp_path):
    np.savez(tmp_path / "many.npz", **{f"layer_{i:02d}": np.zeros((3, 2), "f4") for i in range(20)})
    err = jobs.command("import", tmp_path / "many.npz", tmp_path / "store.zarr")[2]
    assert err.count("layer_") == 8
    assert "and 12 more" in err


def test_a_run_in_place_of_samples_or_codes_is_recognised(tmp_path, store):
    run = tmp_path / "run"
    assert jobs.command("fit", store, run, *SMALL)[0] == 0
    for words in (("fit", run, tmp_path / "b", *SMALL), ("shuffle", run, tmp_path / "b", "--seed", 0)):
        assert (
            f"{run} is the folder of a fit: it holds a dictionary, not samples or codes" in jobs.command(*words)[2]
        )
    with pytest.raises(StoreError, match="is the folder of a fit: it holds a dictionary, not samples or codes"):
        open_codes(run)


def test_what_an_export_loses_is_said_once_and_in_options(tmp_path, make_dictionary):
    params = {"n_atoms": 24, "k": 3, "refit": True}
    save_dictionary(tmp_path / "d", Dictionary(make_dictionary(24, 10), None, params))
    names = ("--model-name", "gpt2", "--hook-name", "h")
    done = run_apart("export", "saelens", tmp_path / "d", tmp_path / "sae", *names)
    printed = done.stdout + done.stderr
    assert printed.count("SAELens does not refit coefficients on the support; use --form plugin to keep it") == 1
    assert printed.count("refit") == 1
