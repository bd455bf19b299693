"""The wheel, installed into an empty environment, works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

import pipelines
from tests.docs.conftest import OWN
from tests.helpers import jobs

pytestmark = pytest.mark.slow

SCRIPTS = (
    "fit_and_encode",
    "gpu_workers",
    "image_features",
    "image_patches",
    "lm_activations",
    "text_activations",
)
# `python -m NAME --help` for every name, in one process: the libraries load once.
EVERY_HELP = """
import contextlib, runpy, sys
names, sys.argv = sys.argv[1:], ["", "--help"]
for name in names:
    with contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def run(home, folder, program, *args):
    """Run a program of the environment in a folder; the checkout is not on any path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(home / "bin" / program), *map(str, args)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=jobs.PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_listed_here():
    found = {p.stem for p in Path(pipelines.__file__).parent.glob("*.py") if "def main(" in p.read_text()}
    assert found == set(SCRIPTS)


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(OWN)
    assert "dbksvd_dask/py.typed" in names


def test_the_demo_runs_from_the_wheel(home, tmp_path):
    out = run(home, tmp_path, "dbksvd", "demo", "out", "--small")
    assert "8,374 x 768" in out
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    where = run(home, tmp_path, "python", "-c", "import dbksvd_dask; print(dbksvd_dask.__file__)")
    assert where.startswith(str(home))


def test_every_script_runs_from_the_wheel(home, tmp_path):
    told = run(home, tmp_path, "python", "-c", EVERY_HELP, *(f"pipelines.{name}" for name in SCRIPTS))
    for name in SCRIPTS:
        assert f"usage: python -m pipelines.{name}" in told
    run(home, tmp_path, "python", "-m", "pipelines.image_patches", "patches.zarr", "--stride", "64")
    assert "activation store" in run(home, tmp_path, "dbksvd", "info", "patches.zarr")
