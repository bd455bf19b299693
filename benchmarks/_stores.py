"""Stores of made-up activations for the benchmarks, written chunk by chunk."""

from __future__ import annotations

import os

import numpy as np

from dbksvd_dask.store.activations import create_activations


def made_up_rows(n: int, n_features: int, seed: int, n_true: int = 2048, active: int = 16) -> np.ndarray:
    """Rows with the structure a dictionary finds: a few directions each, and noise. (n, n_features) float32."""
    rng = np.random.default_rng([seed, 1])
    directions = np.random.default_rng(0).standard_normal((n_true, n_features)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    rows = 0.02 * rng.standard_normal((n, n_features), dtype=np.float32)
    chosen = rng.integers(0, n_true, (active, n))
    for picked in chosen:
        rows += rng.exponential(size=(n, 1)).astype(np.float32) * directions[picked]
    return rows


def write_store(
    path: str | os.PathLike[str], n_samples: int, n_features: int, dtype: str = "float16", chunk_rows: int = 16384
) -> int:
    """Write a store of made-up rows; its bytes. One block is made and rolled, so gigabytes take seconds."""
    block = made_up_rows(chunk_rows, n_features, seed=0).astype(dtype)
    writer = create_activations(path, n_samples, n_features, dtype, chunk_rows=chunk_rows)
    for i, start in enumerate(range(0, n_samples, chunk_rows)):
        rows = np.roll(block, i, axis=1)  # other rows in every chunk, at the speed of a copy
        writer.write_chunk(i, rows[: min(chunk_rows, n_samples - start)])
    writer.finish(verify=False)
    return n_samples * n_features * np.dtype(dtype).itemsize
