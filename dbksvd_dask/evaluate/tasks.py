"""Probing a binary task with a few columns, as the protocol of sae-probes has it.

Columns are divided by the mean absolute value of their nonzero entries and ranked by the difference of the class
means over the training samples. On the k best, as they are, a logistic regression with an L1 penalty is fitted;
its strength is chosen by the area under the ROC curve on training samples that are set aside. Reported are the
area, the accuracy and the weighted F1 on the test samples.

The protocol is that of "Are Sparse Autoencoders Useful?" (Kantamneni et al., arXiv 2502.16681), in the form of the
package sae-probes 0.4. It differs in the solver: SAGA with at most 1000 iterations there, the optimum here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.logistic import fit_lasso
from dbksvd_dask.evaluate.probing import stratified_split
from dbksvd_dask.kernels.moments import Float64Array

# Inverse strengths that are tried, the weakest penalty first: of equal ones it wins.
STRENGTHS = np.logspace(5, -5, 10)
# Validation: pairs up to so many training samples, folds below so many, then the last rows.
_PAIRS_UP_TO, _FOLDS_BELOW, _N_FOLDS = 12, 128, 6
_SLIVER = 1e-6

Split = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class TaskProbe:
    """How well a few columns solve a binary task.

    Attributes
    ----------
    k_sp : tuple of int
        Numbers of columns.
    auc, accuracy, f1 : float64 ndarray of shape (len(k_sp),)
        On the test samples; f1 is the mean of both sides, weighted by their size.
    strength : float64 ndarray of shape (len(k_sp),)
        The chosen inverse strength of the penalty.
    columns : int64 ndarray of shape (max(k_sp),)
        Best columns first.
    n_train, n_test : int
    """

    k_sp: tuple[int, ...]
    auc: Float64Array
    accuracy: Float64Array
    f1: Float64Array
    strength: Float64Array
    columns: NDArray[np.int64]
    n_train: int
    n_test: int


def probe_task(
    features: Any,
    positive: ArrayLike,
    *,
    k_sp: Sequence[int] = (1, 2, 5, 16),
    test_fraction: float = 0.25,
    seed: int = 42,
) -> TaskProbe:
    """Probe a binary task with the few columns that tell its sides apart best.

    Parameters
    ----------
    features : array_like or scipy sparse array of shape (n_samples, n_columns)
        Codes, one column per atom, or raw activations for the baseline.
    positive : bool array_like of shape (n_samples,)
    k_sp : sequence of int, default (1, 2, 5, 16)
        Numbers of columns.
    test_fraction : float, default 0.25
        Share of each side that is held out.
    seed : int, default 42
        Of the split.

    Returns
    -------
    TaskProbe

    Examples
    --------
    >>> import numpy as np
    >>> positive = np.arange(40) % 2 == 0
    >>> features = np.column_stack([np.ones(40), np.where(positive, 3.0, 0.0)])
    >>> probe_task(features, positive, k_sp=(1,)).auc.tolist()
    [1.0]
    """
    X, y = _check(features, positive)
    ks = tuple(int(k) for k in k_sp)
    if not ks or min(ks) < 1 or max(ks) > X.shape[1]:
        raise InputError(f"k_sp={ks} must be whole numbers from 1 to the {X.shape[1]} columns of the features")
    test = stratified_split(y.astype(np.int64), test_fraction, seed)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
    columns = rank_columns(X[order], y[order])[: max(ks)]
    chosen = X[:, columns].toarray()
    one = _Task(chosen[order], y[order], chosen[test], y[test], validation_splits(y[order], seed))
    auc, accuracy, f1, strength = np.array([one.solve(k) for k in ks]).T
    return TaskProbe(ks, auc, accuracy, f1, strength, columns, len(order), int(test.sum()))


def rank_columns(X: sp.csr_array, positive: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Order columns by the difference of class means, in units of their mean absolute nonzero entry.

    Parameters
    ----------
    X : csr array of shape (n_samples, n_columns)
    positive : bool ndarray of shape (n_samples,)

    Returns
    -------
    int64 ndarray of shape (n_columns,)
        The largest difference first, of equal ones the lower column.
    """
    size = abs(X).sum(axis=0) / ((X != 0).sum(axis=0) + _SLIVER)
    means = [X[positive == side].sum(axis=0) / max(np.sum(positive == side), 1) for side in (True, False)]
    difference = np.abs(means[0] - means[1]) / (size + _SLIVER)
    return np.argsort(-difference, kind="stable")


def validation_splits(positive: NDArray[np.bool_], seed: int) -> list[Split]:
    """Split training samples for the choice of the penalty: (fit, validate) row numbers.

    Every pair up to 12 samples, six folds below 128, else the last fifth (100 at most); only splits with both
    sides in both parts, and none for three samples or fewer.
    """
    n = len(positive)
    if n <= 3:
        return []
    rows = np.arange(n)
    if n <= _PAIRS_UP_TO:
        held = [np.array(pair) for pair in combinations(range(n), 2)]
    elif n < _FOLDS_BELOW:
        held = _folds(positive, seed)
    else:
        held = [rows[n - min(n // 5, 100) :]]
    splits = [(np.setdiff1d(rows, part), part) for part in held]
    return [s for s in splits if all(0 < positive[part].sum() < len(part) for part in s)]


def _folds(positive: NDArray[np.bool_], seed: int) -> list[NDArray[np.int64]]:
    """Six parts with like shares of both sides."""
    rng = np.random.default_rng(seed)
    fold = np.empty(len(positive), np.int64)
    for side in (False, True):
        members = rng.permutation(np.flatnonzero(positive == side))
        fold[members] = np.arange(len(members)) % _N_FOLDS
    return [np.flatnonzero(fold == f) for f in range(_N_FOLDS)]


def roc_auc(score: ArrayLike, positive: NDArray[np.bool_]) -> float:
    """Return the share of pairs of both sides in which the positive has the higher score; ties count half.

    Examples
    --------
    >>> roc_auc([0.1, 0.4, 0.4, 0.9], np.array([False, False, True, True]))
    0.875
    """
    n_positive = int(positive.sum())
    n_pairs = n_positive * (len(positive) - n_positive)
    if n_pairs == 0:
        raise InputError("the area under the ROC curve needs samples of both sides")
    above = float(rankdata(score)[positive].sum()) - n_positive * (n_positive + 1) / 2
    return above / n_pairs


def f1_score(answer: NDArray[np.bool_], positive: NDArray[np.bool_]) -> float:
    """Return the harmonic mean of precision and recall; 0 without a right answer."""
    right = float(np.sum(answer & positive))
    return 2 * right / float(answer.sum() + positive.sum()) if right else 0.0


@dataclass(frozen=True, eq=False)
class _Task:
    """Chosen columns of one task, training and test."""

    train: Float64Array
    train_side: NDArray[np.bool_]
    test: Float64Array
    test_side: NDArray[np.bool_]
    splits: list[Split]

    def solve(self, k: int) -> tuple[float, float, float, float]:
        """Return area, accuracy, weighted F1 and strength with the first k columns."""
        C = self._choose(k)
        fit = fit_lasso(self.train[:, :k], self.train_side, C=C)
        answer, side = fit.predict(self.test[:, :k]), self.test_side
        share = float(side.mean())
        f1 = share * f1_score(answer, side) + (1 - share) * f1_score(~answer, ~side)
        return roc_auc(self.test[:, :k] @ fit.coef, side), float(np.mean(answer == side)), f1, C

    def _choose(self, k: int) -> float:
        if not self.splits:
            return 1.0
        scores = [np.mean([self._validate(k, C, *split) for split in self.splits]) for C in STRENGTHS]
        return float(STRENGTHS[int(np.argmax(scores))])

    def _validate(self, k: int, C: float, rows: NDArray[np.int64], held: NDArray[np.int64]) -> float:
        fit = fit_lasso(self.train[rows, :k], self.train_side[rows], C=C)
        return roc_auc(self.train[held, :k] @ fit.coef, self.train_side[held])


def mean_over_tasks(probes: Iterable[TaskProbe] | Mapping[Any, TaskProbe]) -> dict[int, float]:
    """Return the mean area under the ROC curve over tasks, for each number of columns."""
    found = list(probes.values()) if isinstance(probes, Mapping) else list(probes)
    if not found:
        raise InputError("no tasks to average; pass at least one result")
    return dict(zip(found[0].k_sp, np.mean([one.auc for one in found], axis=0).tolist(), strict=True))


def _check(features: Any, positive: ArrayLike) -> tuple[sp.csr_array, NDArray[np.bool_]]:
    X = sp.csr_array(features if sp.issparse(features) else np.atleast_2d(np.asarray(features)), dtype=np.float64)
    X.sum_duplicates()
    y = np.asarray(positive)
    if y.shape != (X.shape[0],) or not np.isin(y, (0, 1)).all():
        raise InputError(
            f"received sides of shape {y.shape} for {X.shape[0]} samples; pass one bool (or 0 and 1) per sample"
        )
    y = y.astype(bool)
    if min(y.sum(), (~y).sum()) < 2:
        raise InputError(
            f"{int(y.sum())} positive and {int((~y).sum())} negative samples; a task needs two of each at least"
        )
    return X, y
