"""One-to-one matching of the atoms of two dictionaries."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment  # type: ignore[attr-defined]
from scipy.sparse import coo_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from dbksvd_dask.evaluate._check import check_dictionary, check_same_features
from dbksvd_dask.evaluate.coherence import TILE, product_tiles, strongest_columns

# The largest similarity matrix that is held as a whole: 8192 x 8192.
DENSE_LIMIT = 8192
# Beyond it, each atom keeps this many candidates on the other side.
CANDIDATES = 32


@dataclass(frozen=True, eq=False)
class Matching:
    """Pairs of atoms of two dictionaries, each atom used at most once.

    Attributes
    ----------
    index_a, index_b : int64 ndarray of shape (n_pairs,)
        Pairs ``(index_a[p], index_b[p])``; as many as the smaller dictionary has atoms.
    similarity : float64 ndarray of shape (n_pairs,)
        Signed inner product of each pair.
    mcc : float
        Mean of the matched (absolute) similarities.
    exact : bool
        Whether the assignment is optimal. Beyond 8192 atoms only the strongest candidates of each atom enter
        the assignment, and `mcc` is then a lower bound.
    upper_bound : float
        Mean of the best similarity of each atom of the smaller dictionary; no assignment can exceed it.
    """

    index_a: NDArray[np.int64]
    index_b: NDArray[np.int64]
    similarity: NDArray[np.float64]
    mcc: float
    exact: bool
    upper_bound: float


@dataclass(frozen=True, eq=False)
class BestMatch:
    """The closest atom of another dictionary for every atom; several may share one.

    Attributes
    ----------
    index : int64 ndarray of shape (n_atoms,)
    similarity : ndarray of shape (n_atoms,)
        Signed inner product.
    """

    index: NDArray[np.int64]
    similarity: NDArray[Any]


def match_atoms(
    A: ArrayLike,
    B: ArrayLike,
    *,
    absolute: bool = True,
    dense_limit: int = DENSE_LIMIT,
    n_candidates: int = CANDIDATES,
) -> Matching:
    """Match the atoms of two dictionaries one to one so that the total similarity is largest.

    Parameters
    ----------
    A : array_like of shape (n_atoms_a, n_features)
    B : array_like of shape (n_atoms_b, n_features)
        Unit rows over the same features.
    absolute : bool, default True
        Compare ``|<a, b>|``: an atom and its negative are the same direction. False suits non-negative codes.
    dense_limit : int, default 8192
        Up to this many atoms on the larger side the assignment is exact.
    n_candidates : int, default 32
        Candidates of each atom beyond that limit.

    Returns
    -------
    Matching
    """
    first, second = check_dictionary(A, "first dictionary"), check_dictionary(B, "second dictionary")
    check_same_features(first, second)
    swapped = first.shape[0] > second.shape[0]
    small, large = (second, first) if swapped else (first, second)
    exact = large.shape[0] <= dense_limit
    if exact:
        rows, columns = _assign(small, large, absolute)
    else:
        rows, columns = _assign_candidates(small, large, absolute, min(n_candidates, small.shape[0]), dense_limit)
    similarity = np.einsum("ij,ij->i", small[rows], large[columns], dtype=np.float64)
    weight = np.abs(similarity) if absolute else similarity
    best = best_match(small, large, absolute=absolute).similarity.astype(np.float64)
    pair = (columns, rows) if swapped else (rows, columns)
    return Matching(
        *pair, similarity, float(weight.mean()), exact, float((np.abs(best) if absolute else best).mean())
    )


def best_match(A: ArrayLike, B: ArrayLike, *, absolute: bool = True, tile: int = TILE) -> BestMatch:
    """Return the closest atom of `B` for every atom of `A`, in tiles.

    Parameters
    ----------
    A : array_like of shape (n_atoms_a, n_features)
    B : array_like of shape (n_atoms_b, n_features)
        Unit rows over the same features.
    absolute : bool, default True
    tile : int, default 512

    Returns
    -------
    BestMatch
        Of equal ones the lower index.
    """
    first, second = check_dictionary(A, "first dictionary"), check_dictionary(B, "second dictionary")
    check_same_features(first, second)
    index = np.empty(first.shape[0], np.int64)
    similarity = np.empty(first.shape[0], np.result_type(first, second))
    for rows, products in product_tiles(first, second, tile):
        index[rows] = (np.abs(products) if absolute else products).argmax(axis=1)
        similarity[rows] = np.take_along_axis(products, index[rows, None], axis=1)[:, 0]
    return BestMatch(index, similarity)


def _weights(products: NDArray[Any], absolute: bool) -> NDArray[Any]:
    return np.abs(products) if absolute else products


def _assign(A: NDArray[Any], B: NDArray[Any], absolute: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the optimal assignment on the whole similarity matrix."""
    rows, columns = linear_sum_assignment(_weights(A @ B.T, absolute), maximize=True)
    return rows.astype(np.int64), columns.astype(np.int64)


def _assign_candidates(
    small: NDArray[Any], large: NDArray[Any], absolute: bool, n_candidates: int, limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the optimal assignment among the candidates, then match the remaining atoms among themselves."""
    graph = _candidate_graph(small, large, absolute, n_candidates)
    rows, columns = min_weight_full_bipartite_matching(graph)
    matched = columns < large.shape[0]
    pairs = [(rows[matched], columns[matched])]
    left_rows = rows[~matched]
    free = np.setdiff1d(np.arange(large.shape[0]), columns[matched])
    for start in range(0, left_rows.size, limit):
        part, others = left_rows[start : start + limit], free[start : start + limit]
        r, c = _assign(small[part], large[others], absolute)
        pairs.append((part[r], others[c]))
    index_a = np.concatenate([p[0] for p in pairs]).astype(np.int64)
    index_b = np.concatenate([p[1] for p in pairs]).astype(np.int64)
    order = np.argsort(index_a)
    return index_a[order], index_b[order]


def _candidate_graph(small: NDArray[Any], large: NDArray[Any], absolute: bool, n: int) -> Any:
    """Build the costs of the strongest candidates of either side, with a fallback of similarity 0 for each row."""
    edges = {}
    for transposed, (A, B) in enumerate([(small, large), (large, small)]):
        for rows, products in product_tiles(A, B, TILE):
            weight = _weights(products, absolute)
            columns = strongest_columns(np.maximum(weight, 0), n)
            values = np.take_along_axis(weight, columns, axis=1)
            index = np.broadcast_to(np.arange(rows.start, rows.stop)[:, None], columns.shape)
            edges[transposed, rows.start] = (columns, index, values) if transposed else (index, columns, values)
    rows_, columns_, values_ = (np.concatenate([e[i].ravel() for e in edges.values()]) for i in range(3))
    _, unique = np.unique(rows_ * large.shape[0] + columns_, return_index=True)
    keep = unique[values_[unique] > 0]
    own = np.arange(small.shape[0])
    # cost 2 - similarity: in [1, 2], so no edge is taken for an absent one
    cost = np.concatenate([2.0 - values_[keep].astype(np.float64), np.full(own.size, 2.0)])
    place = (np.concatenate([rows_[keep], own]), np.concatenate([columns_[keep], large.shape[0] + own]))
    shape = (small.shape[0], large.shape[0] + own.size)
    return coo_array((cost, place), shape=shape).tocsr()  # type: ignore[no-untyped-call]
