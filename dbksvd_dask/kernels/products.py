"""Products of samples with atoms, each sample at its place on the grid of rows; norms and second moments."""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import jit
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.plan import units


@jit
def squared_norms(Y):
    """Compute the squared norm of each row in float64, (n,); not finite exactly where a row is not."""
    n, d = Y.shape
    out = np.empty(n, np.float64)
    for i in range(n):
        row = Y[i]
        total = 0.0
        for f in range(d):
            total += np.float64(row[f]) * np.float64(row[f])
        out[i] = total
    return out


def tile_products(rows: np.ndarray, D: np.ndarray, tile: units.Tile, buffer: np.ndarray) -> np.ndarray:
    """Multiply the rows of one tile with atoms, each row at its place on the grid: (n, n_atoms).

    Parameters
    ----------
    rows : (n, d);  D : (n_atoms, d)
    buffer : at least height * n_atoms numbers, overwritten; the result is a view of it
    """
    n = rows.shape[0]
    if tile.height != n:
        padded = np.zeros((tile.height, rows.shape[1]), rows.dtype)
        padded[tile.place : tile.place + n] = rows
        rows = padded
    out = buffer.reshape(-1)[: tile.height * D.shape[0]].reshape(tile.height, D.shape[0])
    return np.dot(rows, D.T, out=out)[tile.place : tile.place + n]


@one_blas_thread
def second_moment(Y: np.ndarray) -> np.ndarray:
    """Return the sum of ``y y^T`` over centred samples: (d, d) float64."""
    A = np.asarray(Y, np.float64)
    # a copy, or BLAS would choose between two routines by where the memory lies
    return np.asarray(np.dot(A.T, A.copy()))
