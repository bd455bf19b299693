"""Ctrl-C on the command line: one line, what is kept and how to go on, exit code 130."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from dbksvd_dask.cli import main
from dbksvd_dask.store.runs import latest_checkpoint, open_dictionary
from tests.helpers import clusters


@pytest.mark.slow
def test_ctrl_c_leaves_the_checkpoint_and_says_where_it_is(tmp_path):
    np.save(tmp_path / "y.npy", np.random.default_rng(0).standard_normal((4000, 32)).astype("f4"))
    # a shell's background job hands "ignore Ctrl-C" down to its children
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{listening}; from dbksvd_dask.cli import main; main()"]
    store, folder = str(tmp_path / "y.zarr"), str(tmp_path / "run")
    subprocess.run([*command, "import", str(tmp_path / "y.npy"), store], check=True, capture_output=True)
    run = subprocess.Popen(
        [*command, "fit", store, folder, "--n-atoms", "64", "--k", "4", "--n-iter", "100000"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        clusters.await_true(lambda: latest_checkpoint(folder) is not None or run.poll() is not None)
        os.kill(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=clusters.PATIENCE)
    finally:
        run.kill()
    assert run.returncode == 130, errors
    told = [line for line in errors.splitlines() if line and not line.startswith("fit: ")]  # those tell progress
    assert len(told) == 1, told
    last = told[0]
    assert last.startswith("dbksvd: ")
    assert "checkpoint" in last
    assert "is intact; continue with --resume" in last
    assert "Traceback" not in errors
    assert open_dictionary(folder).iteration >= 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("import", "a.npy", "b.zarr"), "finished work is kept; run the same command again to resume"),
        (
            ("shuffle", "a.zarr", "b.zarr", "--seed", "0"),
            "finished work is kept; run the same command again to resume",
        ),
        (("encode", "a.zarr", "run", "c.zarr"), "finished work is kept; run the same command again to resume"),
        (("fit", "a.zarr", "run", "--n-atoms", "4", "--k", "1"), "run the same command with --resume to continue"),
        (("info", "a.zarr"), None),
    ],
)
def test_ctrl_c_says_how_to_resume(capsys, monkeypatch, args, text):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    for module, name in (
        ("dbksvd_dask.jobs.import_", "import_activations"),
        ("dbksvd_dask.jobs.shuffle", "shuffle_activations"),
        ("dbksvd_dask.jobs.encode", "encode_store"),
        ("dbksvd_dask.store.reader", "open_rows"),
        ("dbksvd_dask.store.paths", "exists"),
    ):
        monkeypatch.setattr(f"{module}.{name}", pressed)
    with pytest.raises(SystemExit) as end:
        main(list(args))
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == "dbksvd: interrupted" + (f"; {text}" if text else "")
