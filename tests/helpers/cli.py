"""Run the command line in this process, or in one of its own with less than usual rights."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

from dbksvd_dask.cli import main

# The lines that tell every ten seconds how far a command is come on busy machines, and are not what is tested.
WITHOUT_LINES = "from dbksvd_dask import progress; progress.LINE_EVERY = float('inf')"

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


def run(capsys, *args):
    """Return exit code, standard output and standard error of `dbksvd args`."""
    capsys.readouterr()
    try:
        main([str(a) for a in args])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def fails(capsys, *args):
    """Run a command that must fail with one line; return that line."""
    code, out, err = run(capsys, *args)
    assert code == 1, (code, out, err)
    assert out == ""
    assert err.startswith("dbksvd: error: ")
    assert err.count("\n") == 1
    return err


def run_apart(*args, file_bytes=None):
    """Run in a process of its own: root obeys the modes of folders, and files may be limited in size."""

    def restrict():
        libc = ctypes.CDLL(None)
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    command = [sys.executable, "-c", f"{WITHOUT_LINES}; from dbksvd_dask.cli import main; main()", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=restrict, cwd=os.getcwd()
    )
