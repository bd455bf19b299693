"""What the command line says beside its results: the next command, folded tables, plans for clusters."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from dbksvd_dask.cli import output
from tests.helpers import jobs
from tests.helpers.cli import fails, run


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(2000, 16), 500)


def on_a_terminal(monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_a_terminal_is_told_the_next_command_and_a_log_is_not(capsys, monkeypatch):
    output.next_step("encode", "my store.zarr", "run", as_json=False)
    assert capsys.readouterr().err == ""
    on_a_terminal(monkeypatch)
    output.next_step("encode", "my store.zarr", "run", as_json=False)
    assert capsys.readouterr().err == "next: dbksvd encode 'my store.zarr' run\n"
    output.next_step("encode", "my store.zarr", "run", as_json=True)
    assert capsys.readouterr().err == ""


def test_long_values_are_folded_on_a_terminal_only(monkeypatch):
    fields = {"path": "a", "parameters": {f"name_{i}": i for i in range(40)}}
    assert output.table(fields).count("\n") == 1
    on_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    lines = output.table(fields).splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 12) for line in lines[2:])


def test_values_within_values_have_brackets():
    fields = {
        "params": {"groups": [16, 48], "k": 4, "one": [3], "none": [], "name": ""},
        "stages": [[0, 16], [16, 64]],
    }
    lines = ["params  groups (16, 48), k 4, one 3, none none, name ''", "stages  (0, 16), (16, 64)"]
    assert output.table(fields).splitlines() == lines


def test_a_plan_for_a_cluster_that_does_not_run(store, capsys):
    size = ("--n-atoms", 64, "--k", 4, "--batch-size", 1600, "--chunk-size", 100)
    _, out, _ = run(capsys, "fit", store, "run", *size, "--plan-workers", "4x8", "--json")
    four = json.loads(out)
    assert (four["workers"], four["threads"]) == (4, 32)
    assert four["chunks_per_batch"] == 16
    assert four["advice"] == "16 of 32 threads have no chunk; use --chunk-size 50 or less"
    _, out, _ = run(capsys, "fit", store, "run", *size, "--plan-workers", "3x6", "--json")
    three = json.loads(out)["advice"]
    assert three == "2 of 18 threads have no chunk; use --batch-size 1800 or more, or --chunk-size 89 or less"
    assert four["received_bytes"] > 0
    _, out, _ = run(capsys, "fit", store, "run", *size, "--plan-workers", "1x16", "--json")
    one = json.loads(out)
    assert (one["received_bytes"], one["advice"]) == (0, None)
    assert one["memory_bytes"] > four["memory_bytes"]  # it holds the whole batch
    code, _, err = run(capsys, "fit", store, "run", *size, "--plan-workers", "16")
    assert code == 2
    assert "write 16x8 for 16 workers with 8 threads each" in err


@pytest.mark.cluster
def test_a_plan_for_the_cluster_that_runs(store, capsys):
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=3, processes=False, protocol="tcp", dashboard_address="127.0.0.1:0"
    ) as cluster:
        at = ("--scheduler", cluster.scheduler_address)
        code, out, _ = run(capsys, "fit", store, "run", "--n-atoms", 64, "--k", 4, "--plan", "--json", *at)
    assert code == 0
    plan = json.loads(out)
    assert (plan["workers"], plan["threads"]) == (2, 6)


def test_an_unquoted_pattern_without_a_store_is_recognised(tmp_path, capsys):
    for i in range(3):
        np.save(tmp_path / f"a_{i}.npy", np.ones((4, 3), np.float32))
    files = sorted(tmp_path.glob("*.npy"))
    error = fails(capsys, "import", *files)
    assert f"{files[-1]} is a file, and the last argument is the store to write: dbksvd import" in error
    code, out, _ = run(capsys, "import", *files, tmp_path / "store.zarr")
    assert code == 0
    assert "12 x 3 float32 (144 B) from 3 files" in out


def test_a_warning_is_one_line_without_the_name_of_a_module(tmp_path, capsys):
    numbers = np.random.default_rng(0).standard_normal((400, 32)).astype("float16")
    numbers.tofile(tmp_path / "acts.bin")
    raw = ("--dtype", "float32", "--n-features", 16)
    code, _, err = run(capsys, "import", tmp_path / "acts.bin", tmp_path / "store.zarr", *raw)
    assert code == 0
    assert err.startswith(
        "dbksvd: warning: these values do not look like activations: half of the values are below "
    )
    assert err.endswith("; as float16 they would look right\n")


@pytest.mark.slow
def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "dbksvd_dask", "--version"]
    assert "version" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_report_without_codes_says_how_to_make_them():
    code, _, err = jobs.command("report", "run")
    assert code == 2
    assert "make codes with `dbksvd encode STORE run codes.zarr`" in err
