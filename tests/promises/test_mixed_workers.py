"""Workers that round differently are named before their results are used."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from dbksvd_dask import cluster
from dbksvd_dask.errors import ClusterError, MixedArithmeticWarning
from dbksvd_dask.graph import run
from dbksvd_dask.kernels.blas import arithmetic
from tests.helpers import clusters
from tests.helpers.jobs import made_up

pytestmark = pytest.mark.cluster


def start_worker(address, **env):
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-dashboard", "--nthreads", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--no-nanny"], env={**os.environ, **env}, **quiet)


@pytest.fixture
def mixed():
    """A client of a cluster with one worker of this machine's kernels and one of the oldest."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        with distributed.Client(cluster) as client:
            started = [start_worker(cluster.scheduler_address, OPENBLAS_CORETYPE=kind) for kind in ("", "Nehalem")]
            try:
                client.wait_for_workers(2, timeout=clusters.PATIENCE)
                yield client
            finally:
                for process in started:
                    process.kill()
                    process.wait()


def test_workers_with_other_kernels_are_warned_about_by_name_and_once(mixed, tmp_path):
    store = clusters.small_store(tmp_path)
    if "Nehalem" in arithmetic() or "openblas" not in arithmetic():
        pytest.skip("this process has no other kernels than Nehalem's")
    with pytest.warns(MixedArithmeticWarning, match="round differently.*Nehalem.* on tcp://") as seen:
        clusters.fit(store)
    assert len([w for w in seen if w.category is MixedArithmeticWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixedArithmeticWarning)
        run.warn_of_mixed_arithmetic(mixed)


def test_arithmetic_tells_kernels_apart():
    code = "from dbksvd_dask.kernels.blas import arithmetic; print(arithmetic())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OPENBLAS_CORETYPE": kind, "NUMBA_CPU_NAME": cpu},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for kind, cpu in (("Nehalem", ""), ("Sandybridge", ""), ("Nehalem", "generic"))
    }
    assert len(found) == 3


@pytest.fixture
def plain():
    """A client of a cluster with one worker, a process of its own."""
    with cluster.connect(workers=1) as client:
        yield client


def pretend(version):
    """In a worker: be of another version; None: without the package."""
    import sys

    import dbksvd_dask

    if version is None:
        sys.modules["dbksvd_dask"] = None
    else:
        dbksvd_dask.__version__ = version


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.0.9", r"worker at tcp://.* has dbksvd-dask 0.0.9, this process"),
        (None, r"worker at tcp://.* cannot import dbksvd-dask .*pip install"),
    ],
)
def test_workers_with_another_version_of_the_package_are_refused_by_name(plain, version, message):
    plain.run(pretend, version)
    with pytest.raises(ClusterError, match=message):
        clusters.fit(made_up(400, 8), n_atoms=8, k=2)


def test_workers_of_another_numpy_are_warned_about(plain):
    """One worker of another version joins one of this: both are named."""
    plain.run(setattr_numpy, "1.99.9")
    plain.cluster.scale(2)
    plain.wait_for_workers(2, timeout=clusters.PATIENCE)
    with pytest.warns(MixedArithmeticWarning, match=r"numpy 1\.99\.9"):
        run.warn_of_mixed_arithmetic(plain)


def setattr_numpy(version):
    """In a worker: pretend that numpy is of another version."""
    import numpy as np

    np.__version__ = version
