"""An empty environment with the wheel of this checkout, for tests that stand where a new user stands."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.version import Version

from tests.helpers import jobs

OWN = ("dbksvd_dask", "pipelines")


def pip(*args):
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", *quiet, *map(str, args)], check=True)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the sources: setuptools leaves a folder beside them."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(jobs.ROOT / name, sources)
    for name in OWN:
        shutil.copytree(jobs.ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    new_enough = Version(importlib.metadata.version("setuptools")) >= Version("77")  # else pip fetches one
    more = ["--no-build-isolation"] if new_enough else []
    pip("wheel", "--no-deps", *more, "--wheel-dir", out, sources)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def home(wheel, tmp_path_factory):
    """An environment with the wheel; its dependencies are those of this one, which is not part of it."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    place = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return home
