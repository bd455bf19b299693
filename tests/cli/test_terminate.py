"""SIGTERM on the command line: what is done is kept, one line says how to go on, exit code 143."""

import json
import os
import signal
import subprocess
import sys

import distributed  # noqa: F401 - its settings have to be there before a command changes and restores them
import numpy as np
import pytest

from dbksvd_dask.cli import main
from dbksvd_dask.cli.signals import TERMINATED
from dbksvd_dask.store.runs import checkpoints
from tests.helpers.jobs import PATIENCE, made_up, tree, write_store

# runs a command and sends SIGTERM to itself at the n-th event of a kind
TERMINATED_AT = """
import os, signal, sys
from dbksvd_dask import events
from dbksvd_dask.cli import main
kind, left = sys.argv[1], [int(sys.argv[2])]
emit = events.emit
def counted(callbacks, event):
    emit(callbacks, event)
    if type(event).__name__ == kind:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
events.emit = counted
for module in ("jobs.import_", "jobs.shuffle"):
    setattr(__import__(f"dbksvd_dask.{module}", fromlist=["emit"]), "emit", counted)
main(sys.argv[3:])
"""


def terminated(kind, count, *args):
    """Run a command that gets SIGTERM at an event; return its last line."""
    command = [sys.executable, "-c", TERMINATED_AT, kind, str(count), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == TERMINATED == 143, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_terminated_fit_saves_its_last_iteration_and_resumes_to_the_same_bytes(tmp_path):
    store = write_store(tmp_path / "y.zarr", made_up(600, 16), 128)
    fit = ["--n-atoms", 24, "--k", 3, "--n-iter", 7, "--batch-size", 128, "--checkpoint-every", 5]
    # at the start of batch 3: three are finished, and no checkpoint was due
    line = terminated("BatchStarted", 4, "fit", store, tmp_path / "run", *fit)
    kept = checkpoints(tmp_path / "run")
    assert [os.path.basename(path) for path in kept] == ["checkpoint-000003.zarr"]
    assert line == f"dbksvd: terminated; {kept[0]} is intact; continue with --resume"
    for run, more in (("run", ["--resume"]), ("whole", [])):
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in ("fit", store, tmp_path / run, *fit, *more)])
        assert end.value.code == 0
    newest = "checkpoint-000007.zarr"
    resumed, whole = (tree(tmp_path / run / newest) for run in ("run", "whole"))
    described = [json.loads(files.pop("zarr.json"))["attributes"] for files in (resumed, whole)]
    assert resumed == whole
    for attributes in described:
        del attributes["attributes_crc32"]  # covers what was timed
        attributes["history"] = {n: v for n, v in attributes["history"].items() if not n.endswith("_seconds")}
    assert described[0] == described[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["import", "shuffle"])
def test_terminated_job_keeps_its_chunks_and_goes_on_to_the_same_bytes(name, tmp_path):
    np.save(tmp_path / "y.npy", made_up(1000, 16))
    store = write_store(tmp_path / "y.zarr", made_up(1000, 16), 64)
    source, options, count = {
        "import": (tmp_path / "y.npy", ["--chunk-rows", 64], 4),
        "shuffle": (store, ["--seed", 0], 1),
    }[name]
    line = terminated("JobProgress", count, name, source, tmp_path / "out", *options)
    assert line == "dbksvd: terminated; finished work is kept; run the same command again to resume"
    assert not (tmp_path / "out").exists()
    for target in ("out", "whole"):
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in (name, source, tmp_path / target, *options)])
        assert end.value.code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_handler_of_the_caller_is_restored(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        main(["info", "/nowhere"])
    assert signal.getsignal(signal.SIGTERM) is before
    assert "nothing at" in capsys.readouterr().err
