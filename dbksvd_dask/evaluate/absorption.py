"""Absorption: whether the atom of a class stays inactive where a more specific atom stands in for it.

An atom for "begins with s" that is active on most words with s, but not on "short" because the atom of "short" has
taken its direction in, is absorbed there: nobody who reads the atom of the class would know of the exception.

The measure is that of SAEBench 0.6 (arXiv 2503.09532), after "A is for Absorption" (Chanin et al., arXiv
2409.14507):

1. A linear probe per class on the activations gives the direction of the class. A class whose probe has an F1
   score of at most `min_probe_f1` on the test samples is left out: the activations do not hold it.
2. The atoms of a class are the few that a sparse probe on the codes takes: the next one is taken for as long as it
   adds `min_gain` to the F1 score.
3. On test samples that the linear probe answers rightly with the class, absorption is the share of the projection
   on its direction that other aligned atoms carry in place of the atoms of the class.

It differs in the solvers, which here run to the optimum of convex problems: a ridge for the linear probe, and L1
over the `SCREENED` atoms with the largest difference of class means for the order of the atoms, on codes scaled to
nonzeros of mean size 1. An atom with a negative coefficient counts as active; codes of autoencoders have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate._check import check_dictionary
from dbksvd_dask.evaluate.logistic import fit_lasso, fit_logistic
from dbksvd_dask.evaluate.tasks import f1_score, rank_columns
from dbksvd_dask.kernels.moments import Float64Array

# Thresholds of SAEBench: what an absorbing atom must have in common with the probe, and carry of its projection.
FRACTION_COSINE, FULL_COSINE, LEAST_SHARE, MOST_ABSORBERS = 0.1, 0.025, 0.4, 3
SILENT = 1e-8
# L1 per training sample, on codes whose nonzeros have a mean size of 1.
DECAY = 0.01
SCREENED = 64


@dataclass(frozen=True, eq=False)
class ClassProbes:
    """One linear probe per class.

    Attributes
    ----------
    direction : float64 ndarray of shape (n_classes, n_features)
        Unit rows.
    answer : bool ndarray of shape (n_samples, n_classes)
        Whether the probe of a class says yes.
    """

    direction: Float64Array
    answer: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Absorption:
    """Absorption per class; classes that their linear probe does not find are left out.

    Attributes
    ----------
    classes : int64 ndarray of shape (n,)
    fraction : float64 ndarray of shape (n,)
        Mean share of the projection that other atoms carry.
    full : float64 ndarray of shape (n,)
        Share of the samples on which the atoms of the class are inactive and one other atom stands in for them.
    n_samples : int64 ndarray of shape (n,)
        Test samples that count.
    atoms : tuple of int64 ndarray
        The atoms of each class, best first.
    f1 : float64 ndarray of shape (n,)
        Of the sparse probe with these atoms, on the test samples.
    probe_f1 : float64 ndarray of shape (n,)
        Of the linear probe on the activations, on the test samples.
    """

    classes: NDArray[np.int64]
    fraction: Float64Array
    full: Float64Array
    n_samples: NDArray[np.int64]
    atoms: tuple[NDArray[np.int64], ...]
    f1: Float64Array
    probe_f1: Float64Array

    @property
    def mean_fraction(self) -> float:
        """Mean over classes, as SAEBench reports it; lower is better."""
        return float(self.fraction.mean())

    @property
    def full_rate(self) -> float:
        """Mean over classes of `full`."""
        return float(self.full.mean())

    @property
    def mean_split(self) -> float:
        """Mean number of atoms that share a class."""
        return float(np.mean([len(atoms) for atoms in self.atoms]))


def class_probes(rows: ArrayLike, label: ArrayLike, train: ArrayLike, *, C: float = 1.0) -> ClassProbes:
    """Fit a logistic regression per class on activations, both sides weighted alike.

    Parameters
    ----------
    rows : array_like of shape (n_samples, n_features)
    label : int array_like of shape (n_samples,)
        Class of each sample, from 0.
    train : bool array_like of shape (n_samples,)
        Samples to fit on.
    C : float, default 1
        Inverse strength of the ridge, for rows scaled to a mean square of 1.

    Returns
    -------
    ClassProbes
    """
    from sklearn.linear_model import LogisticRegression

    Y, y, fit_on = np.asarray(rows, np.float64), np.asarray(label), np.asarray(train, bool)
    _check_samples(len(Y), y, fit_on)
    mean = Y[fit_on].mean(axis=0)
    centred = Y - mean
    centred /= np.sqrt(np.mean(centred[fit_on] ** 2))
    n_classes = int(y.max()) + 1
    direction, answer = np.zeros((n_classes, Y.shape[1])), np.zeros((len(Y), n_classes), bool)
    for c in range(n_classes):
        side = y[fit_on] == c
        if side.all() or not side.any():
            continue
        probe = LogisticRegression(C=C, class_weight="balanced", max_iter=1000, tol=1e-3)
        probe.fit(centred[fit_on], side)
        direction[c] = probe.coef_[0] / np.linalg.norm(probe.coef_[0])
        answer[:, c] = probe.decision_function(centred) > 0
    return ClassProbes(direction, answer)


def absorption(
    codes: Any,
    D: ArrayLike,
    rows: ArrayLike,
    label: ArrayLike,
    train: ArrayLike,
    *,
    probes: ClassProbes | None = None,
    max_split: int = 10,
    min_gain: float = 0.03,
    min_probe_f1: float = 0.6,
) -> Absorption:
    """Measure how much of a class's direction other atoms than its own carry.

    Parameters
    ----------
    codes : array_like or scipy sparse array of shape (n_samples, n_atoms)
    D : array_like of shape (n_atoms, n_features)
        Unit rows.
    rows : array_like of shape (n_samples, n_features)
        The activations that were encoded, such as those of words at their last token.
    label : int array_like of shape (n_samples,)
        Class of each sample, such as its first letter.
    train : bool array_like of shape (n_samples,)
        Samples to fit probes on; the others are counted.
    probes : ClassProbes, optional
        From `class_probes`, to fit them once for several dictionaries.
    max_split : int, default 10
        Most atoms of a class.
    min_gain : float, default 0.03
        F1 that a further atom of a class must add.
    min_probe_f1 : float, default 0.6
        Classes whose linear probe has no better F1 score on the test samples are left out. SAEBench asks that 20
        of 26 first letters remain.

    Returns
    -------
    Absorption
    """
    X = sp.csr_array(codes if sp.issparse(codes) else np.asarray(codes), dtype=np.float64)
    atoms, Y = check_dictionary(D), np.asarray(rows)
    y, fit_on = np.asarray(label), np.asarray(train, bool)
    if X.shape != (len(Y), len(atoms)) or Y.shape[1:] != atoms.shape[1:]:
        raise MismatchError(
            f"codes of shape {X.shape}, samples of shape {Y.shape} and a dictionary of shape {atoms.shape} do not "
            "belong together; encode these samples with this dictionary"
        )
    _check_samples(len(Y), y, fit_on)
    found = class_probes(Y, y, fit_on) if probes is None else probes
    scaled = X / max(float(abs(X).sum()) / max(X.nnz, 1), 1e-300)
    results = []
    for c in range(len(found.direction)):
        counted = np.flatnonzero(~fit_on & (y == c) & found.answer[:, c])
        probe_f1 = f1_score(found.answer[~fit_on, c], y[~fit_on] == c)
        if counted.size == 0 or probe_f1 <= min_probe_f1 or not np.any(fit_on & (y == c)):
            continue
        own, f1 = class_atoms(scaled, y == c, fit_on, max_split, min_gain)
        cosine = atoms @ found.direction[c]
        projection = Y[counted] @ found.direction[c]
        fraction, full = absorbed(X[counted].toarray(), cosine, projection, own)
        results.append((c, fraction.mean(), full.mean(), len(counted), own, f1, probe_f1))
    if not results:
        raise InputError(
            f"no class has a linear probe with an F1 score above min_probe_f1={min_probe_f1:g} on the test "
            "samples; give more samples, or activations that hold the classes"
        )
    classes, fractions, fulls, counts, atoms_of, f1s, probe_f1s = zip(*results, strict=True)
    return Absorption(
        np.array(classes),
        np.array(fractions),
        np.array(fulls),
        np.array(counts),
        atoms_of,
        np.array(f1s),
        np.array(probe_f1s),
    )


def class_atoms(
    X: sp.csr_array, positive: NDArray[np.bool_], train: NDArray[np.bool_], max_split: int, min_gain: float
) -> tuple[NDArray[np.int64], float]:
    """Choose the atoms of one class, and return the F1 score of a probe with them on the test samples.

    Parameters
    ----------
    X : csr array of shape (n_samples, n_atoms)
    positive, train : bool ndarray of shape (n_samples,)
    max_split : int
    min_gain : float
    """
    candidates = rank_columns(X[train], positive[train])[:SCREENED]
    columns, side = X[:, candidates].toarray(), positive[train]
    weight = _balanced(side)
    # the weights of the penalised probe there are 1 for the other classes, so they do not average 1
    strength = 2 * float((~side).mean()) / (DECAY * len(side))
    lasso = fit_lasso(columns[train], side, weight=weight, C=strength)
    # an atom is evidence for the class where it is active in it: with codes of one sign, if its weight is positive
    evidence = lasso.coef * columns[train][side].mean(axis=0)
    order = np.argsort(np.where(evidence > 0, -np.abs(lasso.coef), np.inf), kind="stable")[:max_split]
    best, kept = -np.inf, 0
    for k in range(1, len(order) + 1):
        few = columns[:, order[:k]]
        answer = fit_logistic(few[train], side, weight=weight).predict(few[~train])
        score = f1_score(answer, positive[~train])
        if score <= best + min_gain:
            break
        best, kept = score, k
    return candidates[order[:kept]], float(best)


def absorbed(
    codes: Float64Array, cosine: NDArray[Any], projection: NDArray[Any], own: NDArray[np.int64]
) -> tuple[Float64Array, NDArray[np.bool_]]:
    """Return the absorbed share of each sample, and whether one other atom has absorbed all of it.

    Parameters
    ----------
    codes : ndarray of shape (n_samples, n_atoms)
    cosine : ndarray of shape (n_atoms,)
        Of each atom with the direction of the class.
    projection : ndarray of shape (n_samples,)
        Of the samples on that direction.
    own : int ndarray
        The atoms of the class.

    Returns
    -------
    fraction : float64 ndarray of shape (n_samples,)
    full : bool ndarray of shape (n_samples,)
    """
    carried = codes * cosine
    mine = carried[:, own].sum(axis=1)
    others = np.where(cosine >= FRACTION_COSINE, np.maximum(carried, 0.0), 0.0)
    others[:, own] = 0.0
    theirs = -np.sort(-others, axis=1)[:, :MOST_ABSORBERS].sum(axis=1)
    there = projection > 0
    safe = np.where(there, projection, 1.0)
    none = ~there | (mine >= projection) | (theirs < LEAST_SHARE * projection)
    missing = np.minimum(theirs, projection - mine)
    # where the atoms of the class point the wrong way or are silent, all of it is absorbed
    share = np.where(mine <= 0, 1.0, missing / np.where(missing + mine > 0, missing + mine, 1.0))
    fraction = np.where(none, 0.0, np.clip(share, 0.0, 1.0))
    top = carried.argmax(axis=1)
    speaks = (cosine[top] >= FULL_COSINE) & (carried[np.arange(len(top)), top] >= LEAST_SHARE * safe)
    silent = (np.abs(codes[:, own]) < SILENT).all(axis=1)
    return fraction, np.asarray(silent & speaks & there)


def _balanced(side: NDArray[np.bool_]) -> Float64Array:
    """Weights with which both sides count alike, 1 on average."""
    n, n_positive = len(side), int(side.sum())
    weight: Float64Array = np.where(side, n / (2 * n_positive), n / (2 * max(n - n_positive, 1)))
    return weight


def _check_samples(n: int, label: NDArray[Any], train: NDArray[np.bool_]) -> None:
    if label.shape != (n,) or train.shape != (n,) or not np.issubdtype(label.dtype, np.integer):
        raise InputError(
            f"received labels of shape {label.shape} and type {label.dtype} and a training mask of shape "
            f"{train.shape} for {n} samples; pass one class number and one bool per sample"
        )
    if not train.any() or train.all():
        raise InputError("samples must be both in `train`, to fit probes on, and outside, to count")
