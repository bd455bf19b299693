"""Whitening: samples and atoms in coordinates in which all directions vary more alike.

With the covariance C of the samples, a fit on ``Y W`` with ``W = C^(-a/2)`` weighs an error along a direction by
the inverse of its variance to the power a: 0 changes nothing, 1 makes all directions alike. A reconstruction
``X D'`` of ``Y W`` is one of Y by the atoms ``D' W^-1``, with the same codes up to the lengths of the atoms. So a
dictionary is brought into these coordinates to encode and for an update, and back afterwards: its atoms and its
codes are always those of the samples as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.products import squared_norms, tile_products
from dbksvd_dask.plan.units import grid_tiles, split_rows

# Smallest variance of a direction, as a share of the mean: below it lies what the samples do not use.
LEAST_VARIANCE = 1e-3

# Atoms that one call multiplies: a part of a dictionary, for a thread.
_ATOMS_AT_ONCE = 960

Each = Callable[[Callable[[Any], Any], list[Any]], Iterable[Any]]


class Whitening(NamedTuple):
    """The two maps, both symmetric."""

    forward: np.ndarray  # (d, d) in the precision of the fit: rows times it are whitened
    backward: np.ndarray  # (d, d) float64, its inverse

    @classmethod
    def of(cls, forward: np.ndarray) -> Whitening:
        """Return both maps; the second follows from the first, so a fit that resumes has the same."""
        return cls(forward, _inverse(forward))

    def into(self, D: np.ndarray, each: Each = map) -> np.ndarray:
        """Return atoms in whitened coordinates, with unit rows: (n_atoms, d); `each` as of `unit_product`."""
        return unit_product(D, self.forward, each)[0]

    def back(self, D: np.ndarray, each: Each = map) -> np.ndarray:
        """Return atoms of whitened coordinates as atoms of samples, with unit rows: (n_atoms, d)."""
        return unit_product(D, self.backward, each)[0]


@one_blas_thread
def _inverse(forward: np.ndarray) -> np.ndarray:
    """Return the inverse of a symmetric map: (d, d) float64, with the same bits on any number of BLAS threads."""
    inverse = np.linalg.inv(forward.astype(np.float64))
    return (inverse + inverse.T) / 2


def unit_product(D: np.ndarray, W: np.ndarray, each: Each = map) -> tuple[np.ndarray, np.ndarray]:
    """Return ``D W`` with unit rows, and the lengths they had, in the precision of D: (n_atoms, d), (n_atoms,).

    Parameters
    ----------
    each : calls a function for all items, as `map` does; one that uses threads gives the same bits
    """
    W = np.ascontiguousarray(W, dtype=D.dtype)
    spans = split_rows(D.shape[0], _ATOMS_AT_ONCE)
    mapped = np.concatenate(list(each(lambda span: mapped_rows(D[slice(*span)], W, span[0]), spans)))
    lengths = np.sqrt(squared_norms(mapped)).astype(D.dtype)
    mapped /= lengths[:, None]
    return mapped, lengths


class Whitened(NamedTuple):
    """What it takes to encode in whitened coordinates; it stands where the gram stands otherwise."""

    forward: Any  # (d, d): samples times it are whitened
    atoms: Any  # (n_atoms, d), unit rows there
    lengths: Any  # (n_atoms,) of the atoms there before they were scaled: coefficients are divided by them
    gram: Any  # of these atoms, or None

    def coefficients(self, atom: np.ndarray, coefficient: np.ndarray) -> np.ndarray:
        """Return coefficients of whitened atoms as those of the atoms as they are: (n, k)."""
        return coefficient / self.lengths[atom]  # an empty slot takes the last length, and stays 0


@one_blas_thread
def whitening(total: np.ndarray, exponent: float, dtype: np.dtype) -> np.ndarray:
    """Return the map of an exponent, (d, d): rows times it are whitened and keep their mean squared norm.

    Parameters
    ----------
    total : (d, d) sum of `kernels.products.second_moment` over all samples, in any unit
    exponent : a, from 0 to 1
    """
    size = float(np.trace(total)) / total.shape[0]
    C = total / size if size > 0 else np.eye(total.shape[0])  # samples that are all equal have no directions
    variances, directions = np.linalg.eigh((C + C.T) / 2)
    used = np.maximum(variances, LEAST_VARIANCE)
    factors = used ** (-exponent / 2)
    factors /= np.sqrt(float((np.square(factors) * np.maximum(variances, 0)).mean()) or 1.0)
    forward = np.dot(directions * factors, directions.T)
    return ((forward + forward.T) / 2).astype(dtype)


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
