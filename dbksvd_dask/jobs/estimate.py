"""How fast this machine multiplies and reads: what the time estimates of `--plan` rest on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

# An iteration and an encode cost this many times their bare products (benchmarks.iteration gives 1.6 to 2.4 for
# an iteration, benchmarks.jobs_encode 1.3 to 1.7 for an encode, by k and number of features).
ITERATION_RATIO = 2.0
ENCODE_RATIO = 1.5
# What a plan says of the time that is not in its estimate: it depends on the machine and not on the data.
START_UP = "start-up: a few seconds, and some ten more the first time, when the kernels are compiled"


def product_speed(n_features: int, n_atoms: int, dtype: Any = np.float32) -> float:
    """Measure the matrix product ``Y D^T`` on all cores, in floating-point operations per second.

    Parameters
    ----------
    n_features, n_atoms : int
        Inner and outer size; cut to 4096 each, so that it takes a blink.
    """
    d, m, n = min(n_features, 4096), min(n_atoms, 4096), 512
    rng = np.random.default_rng(0)
    Y, D = rng.random((n, d)).astype(dtype), rng.random((m, d)).astype(dtype)
    best, began = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - began < 0.2:
        start = time.perf_counter()
        np.dot(Y, D.T)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n * d * m / max(best, 1e-9)


def read_speed(reader: Any) -> float:
    """Measure reading one chunk of a store, in bytes per second.

    Parameters
    ----------
    reader : `store.reader.RowReader`
    """
    best = float("inf")
    for _ in range(3):  # a busy moment must not count for the whole run
        began = time.perf_counter()
        chunk = reader.read_stored(*reader.chunk_bounds(reader.n_chunks - 1))
        best = min(best, time.perf_counter() - began)
    return float(chunk.nbytes / max(best, 1e-9))
