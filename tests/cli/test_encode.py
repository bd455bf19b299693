"""`dbksvd encode` and what `dbksvd info` says of its result."""

from __future__ import annotations

import inspect
import json
import re

import numpy as np
import pytest

from dbksvd_dask.cli import encode as encode_command
from dbksvd_dask.codes import open_codes
from dbksvd_dask.jobs.encode import encode_store
from tests.helpers import jobs


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(9000, 16), 1000)


@pytest.fixture
def run(tmp_path):
    return jobs.write_dictionary(tmp_path / "dictionary", 32, 16, 3)


def test_every_parameter_of_the_library_is_an_option_with_its_default():
    library = {
        name: None if p.default is inspect.Parameter.empty else p.default
        for name, p in inspect.signature(encode_store).parameters.items()
        if name not in ("callbacks", "verbose")
    }
    handed = dict(encode_command.command.make_context("encode", ["a", "b", "c"]).params)
    for name in (
        "workers",
        "scheduler",
        "wait_for",
        "threads",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "as_json",
        "show_plan",
        "plan_workers",
        "status",
        "log",
    ):
        del handed[name]
    assert handed == library | {"store": "a", "dictionary": "b", "path": "c"}
    for parameter in encode_command.command.params:
        assert parameter.name in ("store", "dictionary", "path") or parameter.help


def test_encode_writes_the_codes_of_the_library_and_says_how_good_they_are(tmp_path, store, run):
    code, out, err = jobs.command("encode", store, run, tmp_path / "codes.zarr", "--k", 2, "--refit")
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'codes.zarr'}: 9000 samples, k=2 (144.0 kB) in ")
    assert "variance explained 0." in out
    assert "of 32 atoms unused" in out
    encode_store(store, run, tmp_path / "library.zarr", k=2, refit=True)
    assert jobs.tree(tmp_path / "codes.zarr") == jobs.tree(tmp_path / "library.zarr")


def test_parts_and_finish(tmp_path, store, run):
    out = tmp_path / "codes.zarr"
    code, text, _ = jobs.command("encode", store, run, out, "--part", "2/2")
    assert code == 0
    assert "part 2/2 done, " in text
    assert "the last part to end publishes the codes" in text
    code, text, err = jobs.command("encode", store, run, out, "--finish")
    assert (code, text) == (1, "")
    assert "Parts not encoded: 1 of 2" in err
    assert err.count("\n") == 1
    assert jobs.command("encode", store, run, out, "--part", "1/2", "--threads", 1)[0] == 0
    code, text, _ = jobs.command("encode", store, run, out, "--finish", "--json")
    result = json.loads(text)
    assert (code, result["finished"], result["samples_kept"]) == (0, True, 9000)
    encode_store(store, run, tmp_path / "whole.zarr")
    assert jobs.tree(out) == jobs.tree(tmp_path / "whole.zarr")


def test_existing_codes_are_recognised_and_others_need_force(tmp_path, store, run):
    out = tmp_path / "codes.zarr"
    jobs.command("encode", store, run, out)
    for more in ((), ("--resume",)):
        code, text, _ = jobs.command("encode", store, run, out, *more)
        assert code == 0
        assert "9000 kept from an earlier run" in text
    code, _, err = jobs.command("encode", store, run, out, "--k", 2)
    assert code == 1
    assert "was begun with --k 3, this run has --k 2" in err
    assert jobs.command("encode", store, run, out, "--force", "--k", 2)[0] == 0
    assert open_codes(out).sizes["slot"] == 2


def test_plan_says_what_it_takes_and_does_nothing(tmp_path, store, run):
    code, out, err = jobs.command("encode", store, run, tmp_path / "codes.zarr", "--plan", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["rows"], plan["atoms"], plan["k"], plan["passes"], plan["units"]) == (9000, 32, 3, 1, 2)
    assert (plan["read_bytes"], plan["written_bytes"]) == (9000 * 16 * 4, 9000 * 3 * 8)
    assert plan["memory_bytes"] > plan["read_bytes"]
    assert plan["estimated_seconds"] > 0
    code, out, _ = jobs.command("encode", store, run, tmp_path / "codes.zarr", "--plan", "--part", "2/2")
    assert re.search(r"^rows +4000$", out, re.MULTILINE)
    assert not list(tmp_path.glob("codes*"))


PEAK = """
import sys
from dbksvd_dask.cli import main
from tests.helpers.clusters import peak
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
print(peak())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("n_rows", "n_features", "n_atoms"), [(3000, 16, 32), (40_000, 256, 1024)])
def test_encode_stays_within_the_memory_of_its_plan(n_rows, n_features, n_atoms, tmp_path):
    store = jobs.write_store(tmp_path / "s", jobs.made_up(n_rows, n_features), 8192)
    run = jobs.write_dictionary(tmp_path / "d", n_atoms, n_features, 8)
    planned = json.loads(jobs.command("encode", store, run, tmp_path / "c", "--plan", "--json")[1])["memory_bytes"]
    out, err = jobs.python(PEAK, "encode", store, run, tmp_path / "c").communicate()
    assert int(out.split()[-1]) <= planned, err


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("--part", "3"), 2, "'3' is not a part; write 3/8 for the third of eight"),
        (("--part", "9/8"), 1, "part 9/8 does not exist; parts count from 1/8 to 8/8"),
        (("--part", "1/2", "--finish"), 1, "run every part first, then finish alone"),
        (("--finish",), 1, "no encode was begun at"),
        (("--k", 40), 1, "--k 40 exceeds n_atoms=32"),
        (("--coefficient-dtype", "int8"), 2, "'int8' is not one of 'float32', 'float16'"),
        (("--encoder", "omp", "--nonneg"), 1, "--encoder omp gives coefficients of both signs"),
    ],
)
def test_bad_options_give_one_clear_line(tmp_path, store, run, args, code, text):
    found, out, err = jobs.command("encode", store, run, tmp_path / "codes.zarr", *args)
    assert (found, out) == (code, "")
    assert text in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("codes*"))


def test_bad_input_gives_one_clear_line_and_publishes_nothing(tmp_path, store, run):
    rows = jobs.made_up(5000, 16)
    rows[4321, 0] = np.inf
    jobs.write_store(tmp_path / "inf.zarr", rows, 1000)
    jobs.write_dictionary(tmp_path / "narrow", 32, 12)
    truncated = jobs.write_store(tmp_path / "short.zarr", jobs.made_up(3000, 16), 1000)
    chunk = next(p for p in sorted((tmp_path / "short.zarr" / "activations").iterdir()) if p.name != "zarr.json")
    chunk.write_bytes(chunk.read_bytes()[:500])
    (tmp_path / "file").write_text("not a store")
    for args, text in (
        ((tmp_path / "none.zarr", run), "no store at"),
        ((store, tmp_path / "none"), "none does not exist; give a dictionary or the folder of a fit"),
        ((store, store), "is 'dbksvd-activations', not a 'dbksvd-dictionary'"),
        ((store, tmp_path / "narrow"), "has 16 features, but the dictionary has 12"),
        ((tmp_path / "inf.zarr", run), "sample 4321 (chunk 4, row 321 in it)"),
        ((truncated, run), "has 500 bytes instead of 64000"),
        ((tmp_path / "file", run), "file"),
    ):
        code, out, err = jobs.command("encode", *args, tmp_path / "codes.zarr")
        assert (code, out) == (1, ""), args
        assert text in err
        assert err.startswith("dbksvd: error: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "codes.zarr").exists()


def test_a_target_that_cannot_be_made_gives_one_clear_line(tmp_path, store, run):
    (tmp_path / "file").write_text("in the way")
    code, out, err = jobs.command("encode", store, run, tmp_path / "file" / "codes.zarr")
    assert (code, out) == (1, "")
    assert err.startswith("dbksvd: error: ")
    assert err.count("\n") == 1


def test_info_describes_codes_finished_and_not(tmp_path, store, run):
    out = tmp_path / "codes.zarr"
    jobs.command("encode", store, run, out, "--part", "1/2")
    code, text, _ = jobs.command("info", f"{out}.partial", "--json")
    found = json.loads(text)
    assert (code, found["kind"], found["units_written"], found["n_units"]) == (0, "unfinished codes", 1, 2)
    assert found["missing"] == "Parts not encoded: 2 of 2 (4000 of 9000 samples)"
    jobs.command("encode", store, run, out)
    code, text, _ = jobs.command("info", out, "--verify", "--json")
    found = json.loads(text)
    assert (code, found["kind"], found["n_samples"], found["params"]["k"]) == (0, "codes", 9000, 3)
    assert found["metrics"]["n_samples"] == 9000
    assert found["verified"] == "2 chunks agree with their checksums"
    target = out / "atom" / "c.1.0"
    damaged = bytearray(target.read_bytes())
    damaged[8] ^= 1
    target.write_bytes(damaged)
    code, _, err = jobs.command("info", out, "--verify")
    assert code == 1
    assert "chunks 1 of" in err
    assert "differ from their checksums" in err


@pytest.mark.cluster
def test_worker_processes_give_the_same_bytes(tmp_path, store, run):
    encode_store(store, run, tmp_path / "threads.zarr")
    code, _, err = jobs.command("encode", store, run, tmp_path / "codes.zarr", "--workers", 1)
    assert code == 0, err
    assert jobs.tree(tmp_path / "codes.zarr") == jobs.tree(tmp_path / "threads.zarr")


def test_help_has_examples():
    code, out, _ = jobs.command("encode", "--help")
    assert code == 0
    assert "dbksvd encode store.zarr run codes.zarr --part 3/8" in out


def test_a_plan_for_a_cluster_that_is_not_there(tmp_path, store, run):
    out = tmp_path / "codes.zarr"
    here = json.loads(jobs.command("encode", store, run, out, "--plan", "--json")[1])
    there = json.loads(jobs.command("encode", store, run, out, "--plan-workers", "2x3", "--json")[1])
    assert (there["workers"], there["threads"]) == (2, 6)
    assert "workers" not in here
    assert there["written_bytes"] == here["written_bytes"]
    assert not out.exists()


@pytest.mark.cluster
def test_a_plan_for_a_scheduler_without_workers_says_so(tmp_path, store, run):
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        address = cluster.scheduler_address
        for args in (("encode", store, run, "codes.zarr"), ("fit", store, "new", "--n-atoms", 24, "--k", 3)):
            code, _, err = jobs.command(*args, "--plan", "--scheduler", address)
            assert code == 1
            assert f"{address} has no workers yet; start some with `dask worker {address}`" in err
