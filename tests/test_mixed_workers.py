"""Workers that round differently are named before their results are used."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from dbksvd_dask import running
from dbksvd_dask.errors import MixedArithmeticWarning
from dbksvd_dask.kernels.blas import arithmetic
from tests import clusters

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
                client.wait_for_workers(2, timeout=120)
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
        running.warn_of_mixed_arithmetic(mixed)


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
