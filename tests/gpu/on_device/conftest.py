"""One set of tests for both: numba's simulator in a process of its own, and a card where there is one.

`tests/gpu/test_simulator.py` starts the first; `make test-gpu` runs them on a card.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from dbksvd_dask.gpu import device
from tests.naive.kernels import unit_rows

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

if SIMULATED:
    # the simulator's threads wait for each other at every barrier; by default Python lets each run for 5 ms
    sys.setswitchinterval(1e-5)


@pytest.fixture
def space(monkeypatch):
    """The device under test."""
    if not SIMULATED:
        reason = device.missing()
        if reason:
            pytest.skip(reason)
        return device.current()
    from dbksvd_dask.gpu import cuda
    from tests.gpu.on_device.spaces import SimulatedSpace

    simulated = SimulatedSpace()
    # few threads, since each is a thread of Python, and fewer lanes, so that both halves of a reduction have work
    monkeypatch.setattr(cuda, "LANES", 2)
    monkeypatch.setattr(device, "current", lambda: simulated)
    monkeypatch.setattr(device, "missing", lambda: "")
    return simulated


@pytest.fixture
def data(rng):
    """Make samples and a dictionary of unit rows."""

    def make(n, n_atoms, d, dtype=np.float32, coherent=False):
        atoms = rng.standard_normal((n_atoms, d)) * (0.3 if coherent else 1) + (1.0 if coherent else 0.0)
        return rng.standard_normal((n, d)).astype(dtype), unit_rows(atoms).astype(dtype)

    return make
