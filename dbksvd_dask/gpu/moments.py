"""Sums over the rows of a device array: the counterpart of `kernels.moments.column_sums`."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.gpu import device
from dbksvd_dask.gpu.products import row_tiles
from dbksvd_dask.kernels.lanczos import namespace

# Rows widened to float64 at a time.
_SUM_ROWS = 1024


def row_sums(A: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return column sums, column sums of squares and row norms, in float64 on the host.

    Only these few kilobytes leave the device.

    Parameters
    ----------
    A : device array of shape (n, n_features)

    Returns
    -------
    total, square : (n_features,);  norms : (n,)
    """
    xp = namespace(A)
    norms = []
    total = square = None
    for rows in row_tiles(A.shape[0], _SUM_ROWS):
        wide = xp.astype(A[rows, :], xp.float64)
        squares = wide * wide
        norms.append(xp.sqrt(xp.sum(squares, axis=1)))
        part, part_square = xp.sum(wide, axis=0), xp.sum(squares, axis=0)
        total = part if total is None else total + part
        square = part_square if square is None else square + part_square
    return device.to_host(total), device.to_host(square), device.to_host(xp.concat(norms))
