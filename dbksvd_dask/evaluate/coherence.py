"""Coherence of a dictionary: how close atoms come to each other, tile by tile."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import check_dictionary
from dbksvd_dask.kernels.strongest import strongest_in_rows

# Rows of one tile of the gram: 512 x 65,536 float32 is 134 MB, and BLAS is at full speed from about 256 rows.
TILE = 512
# Above this, two atoms say the same; the figure that dictionary-learning papers use for duplicates.
DUPLICATE = 0.9
# Pairs of near-duplicates that are named.
MAX_PAIRS = 10_000


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
    D: ArrayLike, *, duplicate_threshold: float = DUPLICATE, max_pairs: int = MAX_PAIRS, tile: int = TILE
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
    found = _Closeness(atoms, duplicate_threshold, max_pairs)
    for rows, gram in gram_tiles(atoms, tile):
        found.add(rows, gram)
    return found.result()


class _Closeness:
    """Gathers the coherence of a dictionary from the tiles of its gram."""

    def __init__(self, atoms: NDArray[Any], threshold: float, max_pairs: int) -> None:
        m = atoms.shape[0]
        self._shape, self._threshold, self._most = atoms.shape, threshold, max_pairs
        self._signed, self._absolute = np.zeros(m, atoms.dtype), np.zeros(m, atoms.dtype)
        self._nearest = np.full(m, -1, np.int64)
        self._pairs = [np.empty((0, 2), np.int64)]

    def add(self, rows: slice, gram: NDArray[Any]) -> None:
        """Add some rows of the gram, with -1 on its diagonal; they are overwritten."""
        if self._shape[0] == 1:
            return
        self._signed[rows] = gram.max(axis=1)
        np.abs(gram, out=gram)
        gram[np.arange(gram.shape[0]), np.arange(rows.start, rows.stop)] = -1.0
        nearest = gram.argmax(axis=1)
        self._nearest[rows] = nearest
        self._absolute[rows] = gram[np.arange(gram.shape[0]), nearest]
        missing = self._most - sum(map(len, self._pairs))
        if missing > 0 and self._absolute[rows].max() > self._threshold:
            self._pairs.append(_pairs_above(gram, rows.start, self._threshold)[:missing])

    def result(self) -> Coherence:
        """Return the coherence, after all rows."""
        mutual = min(float(self._absolute.max()), 1.0)
        return Coherence(
            self._signed,
            self._absolute,
            self._nearest,
            mutual,
            welch_bound(*self._shape),
            recoverable_k(mutual, self._shape[0]),
            int(np.count_nonzero(self._absolute > self._threshold)),
            np.concatenate(self._pairs),
            self._threshold,
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
    found = _Nearest(atoms, n_neighbours)
    for rows, gram in gram_tiles(atoms, tile):
        found.add(rows, gram)
    return found.index, found.similarity


class _Nearest:
    """Gathers the nearest atoms of every atom from the tiles of a gram."""

    def __init__(self, atoms: NDArray[Any], n_neighbours: int) -> None:
        n = min(n_neighbours, atoms.shape[0] - 1)
        self.index = np.empty((atoms.shape[0], n), np.int64)
        self.similarity = np.empty((atoms.shape[0], n), atoms.dtype)

    def add(self, rows: slice, gram: NDArray[Any]) -> None:
        """Add some rows of the gram, with -1 on its diagonal; they stay as they are."""
        own = np.arange(gram.shape[0]), np.arange(rows.start, rows.stop)
        gram[own] = 0.0  # nearer than no other atom; where all are at right angles, the lowest come first
        found = strongest_columns(gram, min(self.index.shape[1] + 1, gram.shape[1]))
        gram[own] = -1.0
        self.index[rows] = _without(found, own[1])
        self.similarity[rows] = np.take_along_axis(gram, self.index[rows], axis=1)


def _without(table: NDArray[np.int64], own: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a table with one column less: each row without its own number, or else without its last entry."""
    drop = table == own[:, None]
    drop[~drop.any(axis=1), -1] = True
    return table[~drop].reshape(table.shape[0], -1)


def closeness(
    D: ArrayLike, n_neighbours: int = 10, *, tile: int = TILE
) -> tuple[Coherence, NDArray[np.int64], NDArray[Any]]:
    """Return what `coherence` and `nearest_atoms` do, from one pass over all pairs of atoms."""
    atoms = check_dictionary(D)
    nearest, found = _Nearest(atoms, n_neighbours), _Closeness(atoms, DUPLICATE, MAX_PAIRS)
    for rows, gram in gram_tiles(atoms, tile):
        nearest.add(rows, gram)
        found.add(rows, gram)
    return found.result(), nearest.index, nearest.similarity


def strongest_columns(tile: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Return the columns of the `n` largest absolute values of each row, strongest first; of equal ones the lower.

    Parameters
    ----------
    tile : ndarray of shape (n_rows, n_columns)
    n : int

    Returns
    -------
    int64 ndarray of shape (n_rows, n)
    """
    index = np.empty((tile.shape[0], min(n, tile.shape[1])), np.int64)
    if index.size:
        strongest_in_rows(np.ascontiguousarray(tile), index)
    return index


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
