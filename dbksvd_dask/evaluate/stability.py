"""Stability: whether two runs find the same atoms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.matching import match_atoms


@dataclass(frozen=True, eq=False)
class Stability:
    """Agreement of several runs.

    Attributes
    ----------
    mcc : float64 ndarray of shape (n_runs, n_runs)
        Mean similarity of the optimal matching of each pair of runs; 1 on the diagonal.
    mean, smallest : float
        Over pairs of different runs.
    exact : bool
        Whether every matching is optimal (up to 8192 atoms).
    """

    mcc: NDArray[np.float64]
    mean: float
    smallest: float
    exact: bool


def stability(dictionaries: Sequence[ArrayLike], *, absolute: bool = True) -> Stability:
    """Match the atoms of every pair of runs.

    Parameters
    ----------
    dictionaries : sequence of array_like of shape (n_atoms, n_features)
        Unit rows; the number of atoms may differ.
    absolute : bool, default True
        Take an atom and its negative for the same.

    Returns
    -------
    Stability
    """
    n = len(dictionaries)
    if n < 2:
        raise InputError(f"stability compares runs; received {n} dictionary, pass at least two")
    mcc = np.eye(n)
    exact = True
    for i in range(n):
        for j in range(i):
            matching = match_atoms(dictionaries[i], dictionaries[j], absolute=absolute)
            mcc[i, j] = mcc[j, i] = matching.mcc
            exact = exact and matching.exact
    pairs = mcc[np.triu_indices(n, 1)]
    return Stability(mcc, float(pairs.mean()), float(pairs.min()), exact)
