"""Failures of a fit on the command line: each is told in one line, on a terminal or not."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from dbksvd_dask.store.runs import open_dictionary
from tests.helpers import jobs
from tests.helpers.cli import run_apart

pytestmark = pytest.mark.slow  # a process each

SMALL = ("--n-atoms", 24, "--k", 3, "--n-iter", 2, "--chunk-size", 128, "--batch-size", 256)


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100)


def on_a_terminal(*args):
    """Run `dbksvd` with a terminal for standard error: exit code and all that was written to it."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", "from dbksvd_dask.cli import main; main()", *map(str, args)]
    env = {**os.environ, "COLUMNS": "400", "TERM": "dumb"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env=env) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            seen += part
    os.close(master)
    return process.returncode, seen.decode()


def one_line(done):
    """The line of a command that failed with one."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.startswith("dbksvd: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def truncate(store):
    path = Path(store, "activations", "c.3.0")
    path.write_bytes(path.read_bytes()[:100])


def test_a_truncated_chunk_is_told_once(tmp_path, store):
    truncate(store)
    assert "has 100 bytes instead of" in one_line(run_apart("fit", store, tmp_path / "run", *SMALL))


def test_a_truncated_chunk_is_told_once_on_a_terminal(tmp_path, store):
    truncate(store)
    code, seen = on_a_terminal("fit", store, tmp_path / "run", *SMALL)
    assert code == 1
    assert seen.count("has 100 bytes instead of") == 1, seen
    assert seen.splitlines()[-1].startswith("dbksvd: error: ")


def test_a_run_that_cannot_be_written_is_told_once(tmp_path, store):
    run = tmp_path / "run"
    assert jobs.command("fit", store, run, *SMALL)[0] == 0
    os.chmod(run, 0o555)
    try:
        line = one_line(run_apart("fit", store, run, "--resume", "--n-iter", 3))
    finally:
        os.chmod(run, 0o755)
    assert f"{run} cannot be written (Permission denied); choose a place where this user may write" in line
    assert "checkpoint-000002.zarr is intact; continue with --resume" in line


def test_a_full_disk_is_told_once(tmp_path, store):
    line = one_line(run_apart("fit", store, tmp_path / "run", *SMALL, file_bytes=1024))
    assert "could not write" in line
    assert "File too large; what was there before is untouched; there is no checkpoint yet" in line


def test_a_log_on_a_full_disk_is_one_warning_and_no_failure(tmp_path, store):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no device that is always full")
    done = run_apart("fit", store, tmp_path / "run", *SMALL, "--log", "/dev/full")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "the log /dev/full is incomplete: No space left on device; the run is not affected" in done.stderr
    assert open_dictionary(tmp_path / "run").iteration == 2
