"""Coherence of a dictionary: how close atoms come to each other, tile by tile."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import check_dictionary

# Rows of one tile of the gram: 512 x 65,536 float32 is 134 MB, and BLAS is at full speed from about 256 rows.
TILE = 512
# Above this, two atoms say the same; the figure that dictionary-learning papers use for duplicates.
DUPLICATE = 0.9


@dataclass(frozen=True, eq=False)
class Coherence:
    """Coherence per atom and of the whole dictionary.

    Attributes
    ----------
    signed, absolute : ndarray of shape (n_atoms,)
        ``max_{l != j} <d_j, d_l>`` and the same of absolute values.
    nearest : int64 ndarray of shape (n_atoms,)
        The atom that gives `absolute`, -1 if there is only one atom.
    mutual : float
        The largest of `absolute`.
    welch_bound : float
        No dictionary of this shape has a smaller mutual coherence.
    recoverable_k : int
        Largest ``k < (1 + 1 / mutual) / 2``: codes this sparse are recovered for certain.
    n_near_duplicates : int
        Atoms with a neighbour above `duplicate_threshold` in absolute value.
    duplicate_pairs : int64 ndarray of shape (n_pairs, 2)
        The first of those pairs, at most `max_pairs`.
    duplicate_threshold : float
    """

    signed: NDArray[Any]
    absolute: NDArray[Any]
    nearest: NDArray[np.int64]
    mutual: float
    welch_bound: float
    recoverable_k: int
    n_near_duplicates: int
    duplicate_pairs: NDArray[np.int64]
    duplicate_threshold: float


def coherence(
    D: ArrayLike, *, duplicate_threshold: float = DUPLICATE, max_pairs: int = 10_000, tile: int = TILE
) -> Coherence:
    """Compute the coherence per atom, the mutual coherence, the Welch bound and near-duplicates.

    Memory is ``tile x n_atoms``, never ``n_atoms x n_atoms``.

    Parameters
    ----------
    D : array_like of shape (n_atoms, n_features)
        Unit rows.
    duplicate_threshold : float, default 0.9
    max_pairs : int, default 10000
        How many pairs of near-duplicates to name.
    tile : int, default 512
        Rows of the gram at a time.

    Returns
    -------
    Coherence
    """
    atoms = check_dictionary(D)
    m = atoms.shape[0]
    signed, absolute = np.zeros(m, atoms.dtype), np.zeros(m, atoms.dtype)
    nearest = np.full(m, -1, np.int64)
    pairs: list[NDArray[np.int64]] = []
    n_pairs = 0
    for rows, gram in gram_tiles(atoms, tile):
        if m == 1:
            break
        signed[rows] = gram.max(axis=1)
        np.abs(gram, out=gram)
        gram[np.arange(gram.shape[0]), np.arange(rows.start, rows.stop)] = -1.0
        nearest[rows] = gram.argmax(axis=1)
        absolute[rows] = gram.max(axis=1)
        if n_pairs < max_pairs:
            pairs.append(_pairs_above(gram, rows.start, duplicate_threshold)[: max_pairs - n_pairs])
            n_pairs += len(pairs[-1])
    mutual = min(float(absolute.max()), 1.0)
    return Coherence(
        signed,
        absolute,
        nearest,
        mutual,
        welch_bound(*atoms.shape),
        recoverable_k(mutual, m),
        int(np.count_nonzero(absolute > duplicate_threshold)),
        np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64),
        duplicate_threshold,
    )


def welch_bound(n_atoms: int, n_features: int) -> float:
    """Return the smallest mutual coherence that any dictionary of this shape can have.

    ``sqrt((m - d) / (d (m - 1)))`` for more atoms than features, else 0.
    """
    if n_atoms <= n_features:
        return 0.0
    return math.sqrt((n_atoms - n_features) / (n_features * (n_atoms - 1)))


def recoverable_k(mutual: float, n_atoms: int) -> int:
    """Return the largest whole ``k < (1 + 1 / mutual) / 2``, at most `n_atoms`.

    Parameters
    ----------
    mutual : float
        Mutual coherence, in [0, 1].
    n_atoms : int
    """
    if not 0.0 <= mutual <= 1.0:
        raise InputError(f"mutual coherence must be in [0, 1], received {mutual}")
    if mutual == 0.0:
        return n_atoms
    return min(math.ceil((1.0 + 1.0 / mutual) / 2.0) - 1, n_atoms)


def nearest_atoms(
    D: ArrayLike, n_neighbours: int = 10, *, tile: int = TILE
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the nearest atoms of every atom by absolute inner product.

    Parameters
    ----------
    D : array_like of shape (n_atoms, n_features)
        Unit rows.
    n_neighbours : int, default 10
        Fewer if there are fewer other atoms.
    tile : int, default 512

    Returns
    -------
    index : int64 ndarray of shape (n_atoms, n_neighbours)
        Strongest first; of equal ones the lower atom first.
    similarity : ndarray of shape (n_atoms, n_neighbours)
        Signed inner products.
    """
    atoms = check_dictionary(D)
    n = min(n_neighbours, atoms.shape[0] - 1)
    index = np.empty((atoms.shape[0], n), np.int64)
    similarity = np.empty((atoms.shape[0], n), atoms.dtype)
    for rows, gram in gram_tiles(atoms, tile):
        gram[np.arange(gram.shape[0]), np.arange(rows.start, rows.stop)] = 0.0
        index[rows] = strongest_columns(gram, n)
        similarity[rows] = np.take_along_axis(gram, index[rows], axis=1)
    return index, similarity


def strongest_columns(tile: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Return the columns of the `n` largest absolute values of each row, strongest first.

    Parameters
    ----------
    tile : ndarray of shape (n_rows, n_columns)
    n : int

    Returns
    -------
    int64 ndarray of shape (n_rows, n)
    """
    size = -np.abs(tile)
    if 0 < n < tile.shape[1]:
        columns = np.sort(np.argpartition(size, n - 1, axis=1)[:, :n], axis=1)
    else:
        columns = np.broadcast_to(np.arange(tile.shape[1]), tile.shape)[:, :n]
    order = np.argsort(np.take_along_axis(size, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1).astype(np.int64)


def gram_tiles(A: NDArray[Any], tile: int) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Walk over ``A A^T`` in tiles of rows; the diagonal is replaced by -1, below any other entry."""
    if tile < 1:
        raise InputError(f"tile={tile} must be at least 1")
    for rows, products in product_tiles(A, A, tile):
        products[np.arange(products.shape[0]), np.arange(rows.start, rows.stop)] = -1.0
        yield rows, products


def product_tiles(A: NDArray[Any], B: NDArray[Any], tile: int) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Walk over ``A B^T`` in tiles of rows of `A`; the buffer is used again for the next tile."""
    buffer = np.empty((min(tile, A.shape[0]), B.shape[0]), np.result_type(A, B))
    for start in range(0, A.shape[0], tile):
        rows = slice(start, min(start + tile, A.shape[0]))
        yield rows, np.dot(A[rows], B.T, out=buffer[: rows.stop - start])


def _pairs_above(absolute: NDArray[Any], first_row: int, threshold: float) -> NDArray[np.int64]:
    """Return the pairs ``(i, l)``, ``i < l``, above the threshold, in the rows of one tile."""
    i, other = np.nonzero(absolute > threshold)
    keep = other > i + first_row
    return np.stack([i[keep] + first_row, other[keep]], axis=1).astype(np.int64)
