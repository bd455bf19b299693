"""A learned dictionary and its codes against a known truth."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import check_codes
from dbksvd_dask.evaluate.codes import code_moments
from dbksvd_dask.evaluate.matching import best_match, match_atoms
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.codes import count_true_positives

# A learned atom stands for a true one above this similarity, the usual line in dictionary-learning papers.
RECOVERED = 0.9


@dataclass(frozen=True)
class Recovery:
    """How much of a true dictionary was found.

    Attributes
    ----------
    mcc : float
        Mean similarity of the optimal one-to-one matching.
    exact : bool
        Whether that matching is optimal (up to 8192 atoms) or a lower bound.
    uniqueness : float
        Distinct true atoms that are the best match of some learned atom, over the number of learned atoms.
    precision : float
        Fraction of the learned atoms within `threshold` of a true one.
    recall : float
        Fraction of the true atoms within `threshold` of a learned one.
    f1 : float
    threshold : float
    """

    mcc: float
    exact: bool
    uniqueness: float
    precision: float
    recall: float
    f1: float
    threshold: float


@dataclass(frozen=True, eq=False)
class SupportCounts:
    """Counts of one block of codes against true codes; `merge` gives the counts of two blocks.

    Attributes
    ----------
    n_samples : int
    best : int64 ndarray of shape (n_atoms,)
        The true atom that each learned atom stands for.
    true_positive, n_active : int64 ndarray of shape (n_atoms,)
    true_active : int64 ndarray of shape (n_true,)
    """

    n_samples: int
    best: NDArray[np.int64]
    true_positive: NDArray[np.int64]
    n_active: NDArray[np.int64]
    true_active: NDArray[np.int64]

    def merge(self, other: Self) -> Self:
        """Return the counts of both blocks; neither is changed."""
        if not np.array_equal(self.best, other.best):
            raise InputError("cannot merge counts of different pairings; use one `best` for all blocks")
        return type(self)(
            self.n_samples + other.n_samples,
            self.best,
            self.true_positive + other.true_positive,
            self.n_active + other.n_active,
            self.true_active + other.true_active,
        )


@dataclass(frozen=True, eq=False)
class SupportScores:
    """Each learned atom as a detector of its best true atom: means over atoms, and the values per atom.

    A value that is undefined (the atom or its true atom is never active) counts as 0.

    Attributes
    ----------
    precision, recall, f1 : float
    precision_per_atom, recall_per_atom, f1_per_atom : float64 ndarray of shape (n_atoms,)
    n_never_active : int
        Learned atoms that are active on no sample.
    n_samples : int
    """

    precision: float
    recall: float
    f1: float
    precision_per_atom: NDArray[np.float64]
    recall_per_atom: NDArray[np.float64]
    f1_per_atom: NDArray[np.float64]
    n_never_active: int
    n_samples: int


def recovery(D: ArrayLike, D_true: ArrayLike, *, threshold: float = RECOVERED, absolute: bool = True) -> Recovery:
    """Compare a learned dictionary with the true one.

    Parameters
    ----------
    D : array_like of shape (n_atoms, n_features)
    D_true : array_like of shape (n_true, n_features)
        Unit rows over the same features.
    threshold : float, default 0.9
    absolute : bool, default True
        Take an atom and its negative for the same.

    Returns
    -------
    Recovery
    """
    matching = match_atoms(D, D_true, absolute=absolute)
    learned, true = best_match(D, D_true, absolute=absolute), best_match(D_true, D, absolute=absolute)
    near = np.abs(learned.similarity) if absolute else learned.similarity
    found = np.abs(true.similarity) if absolute else true.similarity
    precision, recall = float(np.mean(near >= threshold)), float(np.mean(found >= threshold))
    return Recovery(
        mcc=matching.mcc,
        exact=matching.exact,
        uniqueness=np.unique(learned.index).size / learned.index.size,
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall) if precision + recall else 0.0,
        threshold=threshold,
    )


def support_counts(
    codes: tuple[ArrayLike, ArrayLike], true_codes: tuple[ArrayLike, ArrayLike], best: ArrayLike, n_true: int
) -> SupportCounts:
    """Count agreement of learned and true codes on one block of samples.

    Parameters
    ----------
    codes : (atom, coefficient), each of shape (n_samples, n_slots)
    true_codes : (atom, coefficient), each of shape (n_samples, n_true_slots)
    best : array_like of shape (n_atoms,)
        ``best_match(D, D_true).index``.
    n_true : int
        Number of true atoms.

    Returns
    -------
    SupportCounts
    """
    pairing = kernel_input(best, np.int64)
    if pairing.ndim != 1 or (pairing.size and not 0 <= int(pairing.min()) <= int(pairing.max()) < n_true):
        raise InputError(f"best must name true atoms, 0 to {n_true - 1}; pass best_match(D, D_true).index")
    atom, coefficient = check_codes(*codes, pairing.size)
    true_atom, true_coefficient = check_codes(*true_codes, n_true)
    if atom.shape[0] != true_atom.shape[0]:
        raise InputError(
            f"received codes of {atom.shape[0]} samples and true codes of {true_atom.shape[0]}; "
            "pass the same samples in the same order"
        )
    true_positive, true_active = np.zeros(pairing.size, np.int64), np.zeros(n_true, np.int64)
    count_true_positives(atom, coefficient, true_atom, true_coefficient, pairing, true_positive, true_active)
    n_active = code_moments(atom, coefficient, pairing.size).n_active
    return SupportCounts(atom.shape[0], pairing, true_positive, n_active, true_active)


def support_scores(c: SupportCounts) -> SupportScores:
    """Turn counts into precision, recall and F1."""
    truth = c.true_active[c.best]
    precision = c.true_positive / np.maximum(c.n_active, 1)
    recall = c.true_positive / np.maximum(truth, 1)
    # the harmonic mean in counts: 2 tp / (active + truth)
    f1 = 2 * c.true_positive / np.maximum(c.n_active + truth, 1)
    return SupportScores(
        float(precision.mean()),
        float(recall.mean()),
        float(f1.mean()),
        precision,
        recall,
        f1,
        int(np.count_nonzero(c.n_active == 0)),
        c.n_samples,
    )
