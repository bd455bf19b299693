"""Small stores and the content of folders."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from dbksvd_dask.store.activations import create_activations


def tree(folder):
    """Return the digest of each file below a folder, by relative name."""
    found = {}
    for home, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(home, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    return found


def make_store(path, rows, chunk_rows=4, aligned=None, **options):
    """Write an activation store of `rows` with aligned arrays given as name to array."""
    aligned = aligned or {}
    dtype = options.pop("dtype", rows.dtype)
    specs = options.pop("specs", {name: array.dtype for name, array in aligned.items()})
    writer = create_activations(path, *rows.shape, dtype, chunk_rows=chunk_rows, aligned=specs, **options)
    for i in range(writer.n_chunks):
        part = slice(i * chunk_rows, (i + 1) * chunk_rows)
        writer.write_chunk(i, rows[part], {name: array[part] for name, array in aligned.items()})
    writer.finish()
    return str(path)


def ordered_rows(n_samples, n_features, seed=0):
    """Rows with a strong order: a drift over the whole store and sequences of nearly equal rows."""
    rng = np.random.default_rng(seed)
    drift = np.linspace(0, 5, n_samples)[:, None]
    sequences = np.repeat(rng.standard_normal((n_samples // 50 + 1, n_features)), 50, axis=0)[:n_samples]
    return (drift + sequences + 0.1 * rng.standard_normal((n_samples, n_features))).astype(np.float32)
