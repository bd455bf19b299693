"""Whitening: samples and atoms in coordinates in which all directions vary more alike.

With the covariance C of the samples, a fit on ``Y W`` with ``W = C^(-a/2)`` weighs an error along a direction by
the inverse of its variance to the power a: 0 changes nothing, 1 makes all directions alike. A reconstruction
``X D'`` of ``Y W`` is one of Y by the atoms ``D' W^-1``, with the same codes up to the lengths of the atoms. So a
dictionary is brought into these coordinates for an update, and back afterwards; what it stores and how it encodes
stay as ever.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.products import tile_products
from dbksvd_dask.plan.units import grid_tiles

# Smallest variance of a direction, as a share of the mean: below it lies what the samples do not use.
LEAST_VARIANCE = 1e-3


class Whitening(NamedTuple):
    """The two maps, both symmetric."""

    forward: np.ndarray  # (d, d) in the precision of the fit: rows times it are whitened
    backward: np.ndarray  # (d, d) float64, its inverse

    def into(self, D: np.ndarray) -> np.ndarray:
        """Return atoms in whitened coordinates, with unit rows: (n_atoms, d)."""
        return _unit_product(D, self.forward)

    def back(self, D: np.ndarray) -> np.ndarray:
        """Return atoms of whitened coordinates as atoms of samples, with unit rows: (n_atoms, d)."""
        return _unit_product(D, self.backward)


@one_blas_thread
def _unit_product(D: np.ndarray, W: np.ndarray) -> np.ndarray:
    """Return ``D W`` with unit rows, in the precision of D."""
    mapped = np.dot(D.astype(np.float64), W.astype(np.float64))
    return np.asarray(mapped / np.linalg.norm(mapped, axis=1, keepdims=True)).astype(D.dtype)


@one_blas_thread
def second_moment(Y: np.ndarray) -> np.ndarray:
    """Return the sum of ``y y^T`` over centred samples: (d, d) float64."""
    A = Y.astype(np.float64)
    # a copy, or BLAS would choose between two routines by where the memory lies
    return np.asarray(np.dot(A.T, A.copy()))


@one_blas_thread
def whitening(total: np.ndarray, exponent: float, dtype: np.dtype) -> Whitening:
    """Return the maps of an exponent; samples keep their mean squared norm.

    Parameters
    ----------
    total : (d, d) sum of `second_moment` over all samples, in any unit
    exponent : a, from 0 to 1
    """
    size = float(np.trace(total)) / total.shape[0]
    C = total / size if size > 0 else np.eye(total.shape[0])  # samples that are all equal have no directions
    variances, directions = np.linalg.eigh((C + C.T) / 2)
    used = np.maximum(variances, LEAST_VARIANCE)
    factors = used ** (-exponent / 2)
    factors /= np.sqrt(float((np.square(factors) * np.maximum(variances, 0)).mean()) or 1.0)
    forward = np.dot(directions * factors, directions.T)
    return Whitening(forward.astype(dtype), np.dot(directions / factors, directions.T))


@one_blas_thread
def mapped_rows(Y: np.ndarray, W: np.ndarray, first: int = 0) -> np.ndarray:
    """Return ``Y W``, each row with the same bits wherever its source is cut: (n, d).

    Parameters
    ----------
    Y : (n, d) centred samples;  W : (d, d) in their precision
    first : index in their source of the first of them
    """
    n, d = Y.shape
    out = np.empty_like(Y)
    tiles = grid_tiles(n, first, d * d)
    buffer = np.empty(max((tile.height for tile in tiles), default=0) * d, Y.dtype)
    across = np.ascontiguousarray(W.T)
    for tile in tiles:
        out[tile.start : tile.stop] = tile_products(Y[tile.start : tile.stop], across, tile, buffer)
    return out
