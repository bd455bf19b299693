"""Sparse probing: how well a few atoms tell a class from the rest.

Per class: the `k_sp` columns with the largest difference of mean activation between the class and the rest of
the training samples, a logistic regression on them, its accuracy on the test samples. No array of samples by
atoms is formed: the means come from sums per class, the regressions from the active samples of a few atoms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask._words import listed
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import encode_labels
from dbksvd_dask.evaluate.features import CodeFeatures, Columns, DenseFeatures, Features
from dbksvd_dask.evaluate.logistic import LogisticFit, fit_logistic
from dbksvd_dask.kernels.encode import encode_rows, gram_for
from dbksvd_dask.kernels.moments import Float64Array
from dbksvd_dask.plan.encoder import EncodeSpec

# Classes whose columns are gathered in one pass: bounds a dense gather at 64 x 5 columns per sample.
_CLASSES_PER_PASS = 64


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """Accuracies per class and number of columns.

    Attributes
    ----------
    classes : ndarray of shape (n_classes,)
        Labels of the probed classes.
    k_sp : tuple of int
    accuracy, balanced_accuracy : float64 ndarray of shape (n_classes, len(k_sp))
        Accuracy of the plain regression, balanced accuracy of the regression that weighs both sides alike.
    columns : int64 ndarray of shape (n_classes, max(k_sp))
        Chosen columns, the largest difference first.
    majority : float64 ndarray of shape (n_classes,)
        Accuracy of always answering "not this class": what an accuracy must be compared with.
    n_train, n_test : int
    skipped : tuple
        Labels of classes with a single sample, if skipping was asked for.
    """

    classes: NDArray[Any]
    k_sp: tuple[int, ...]
    accuracy: Float64Array
    balanced_accuracy: Float64Array
    columns: NDArray[np.int64]
    majority: Float64Array
    n_train: int
    n_test: int
    skipped: tuple[Any, ...]

    @property
    def mean_accuracy(self) -> dict[int, float]:
        """Mean over classes for each k_sp."""
        return dict(zip(self.k_sp, self.accuracy.mean(axis=0).tolist(), strict=True))

    @property
    def mean_balanced_accuracy(self) -> dict[int, float]:
        """Mean over classes for each k_sp."""
        return dict(zip(self.k_sp, self.balanced_accuracy.mean(axis=0).tolist(), strict=True))


def probe(
    features: Features | ArrayLike,
    labels: Sequence[Any] | NDArray[Any],
    *,
    k_sp: Sequence[int] = (1, 2, 5),
    test_fraction: float = 0.2,
    seed: int = 0,
    C: float = 1.0,
    scale: bool = True,
    small_classes: Literal["error", "skip"] = "error",
) -> ProbeResult:
    """Probe every class against the rest with a few columns.

    Parameters
    ----------
    features : CodeFeatures, DenseFeatures or array_like of shape (n_samples, n_columns)
    labels : sequence of length n_samples
        Integers or strings, one per sample.
    k_sp : sequence of int, default (1, 2, 5)
        Numbers of columns to probe with.
    test_fraction : float, default 0.2
        Share of each class that is held out.
    seed : int, default 0
        Of the split.
    C : float, default 1
        Inverse strength of the L2 penalty.
    scale : bool, default True
        Divide each chosen column by its root mean square over the training samples first, so that `C` means
        the same for codes, raw features and any unit of the data.
    small_classes : {"error", "skip"}, default "error"
        What to do with classes of a single sample, which cannot be split.

    Returns
    -------
    ProbeResult
    """
    source: Features = features if _is_features(features) else DenseFeatures.from_array(features)  # type: ignore[assignment, arg-type]
    ks = _check_k_sp(k_sp, source.n_columns)
    classes, codes = encode_labels(labels, source.count())
    probed, skipped = _check_classes(classes, codes, small_classes)
    test = stratified_split(codes, test_fraction, seed)
    chosen = _choose_columns(source, codes, ~test, probed, max(ks))
    accuracy, balanced = np.empty((probed.size, len(ks))), np.empty((probed.size, len(ks)))
    for start in range(0, probed.size, _CLASSES_PER_PASS):
        part = slice(start, start + _CLASSES_PER_PASS)
        for i, columns in enumerate(source.select(list(chosen[part])), start):
            one = _Problem(columns, codes == probed[i], test, C, scale)
            for j, k in enumerate(ks):
                accuracy[i, j], balanced[i, j] = one.accuracies(k)
    return ProbeResult(
        classes[probed],
        ks,
        accuracy,
        balanced,
        chosen,
        np.array([1.0 - np.mean(codes[test] == c) for c in probed]),
        int(np.count_nonzero(~test)),
        int(np.count_nonzero(test)),
        tuple(classes[skipped].tolist()),
    )


def stratified_split(codes: NDArray[np.int64], test_fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose the test samples: the same share of every class, at least one and not all of it.

    Parameters
    ----------
    codes : int64 ndarray of shape (n_samples,)
        Class number of each sample.
    test_fraction : float
    seed : int

    Returns
    -------
    bool ndarray of shape (n_samples,)
        True for test samples. A class of a single sample is in training.
    """
    if not 0.0 < test_fraction < 1.0:
        raise InputError(f"test_fraction={test_fraction} must lie between 0 and 1, such as 0.2")
    rng = np.random.default_rng(seed)
    test = np.zeros(codes.size, bool)
    order = np.argsort(codes, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        n_test = min(max(1, round(test_fraction * members.size)), members.size - 1)
        test[rng.permutation(members)[:n_test]] = True
    return test


def random_dictionary(n_atoms: int, n_features: int, seed: int = 0) -> NDArray[np.float32]:
    """Draw unit atoms with entries from U(-1/2, 1/2): the dictionary that has learned nothing.

    Encode the samples with it and probe those codes for the random-dictionary baseline.

    Returns
    -------
    float32 ndarray of shape (n_atoms, n_features)
    """
    atoms = np.random.default_rng(seed).random((n_atoms, n_features)) - 0.5
    unit: NDArray[np.float64] = atoms / np.linalg.norm(atoms, axis=1, keepdims=True)
    return unit.astype(np.float32)


def random_dictionary_codes(Y: ArrayLike, n_atoms: int, k: int, *, seed: int = 0) -> CodeFeatures:
    """Encode samples with a random dictionary: the baseline that has the shape of codes but learned nothing.

    Parameters
    ----------
    Y : array_like of shape (n_samples, n_features)
        Samples as the run encodes them, without their mean if the run took it off.
    n_atoms, k : int
        Those of the dictionary to compare with.
    seed : int, default 0

    Returns
    -------
    CodeFeatures
    """
    samples = np.asarray(Y, np.float32)
    D = random_dictionary(n_atoms, samples.shape[1], seed)
    atom, coefficient = encode_rows(samples, D, gram_for(D, EncodeSpec(k)), EncodeSpec(k))
    return CodeFeatures.from_arrays(atom, coefficient, n_atoms)


def compare_probes(
    features: Mapping[str, Features | ArrayLike], labels: Sequence[Any] | NDArray[Any], **options: Any
) -> dict[str, ProbeResult]:
    """Probe several feature matrices of the same samples with the same split.

    Parameters
    ----------
    features : mapping of name to features
        For instance the codes, the raw activations and the codes of a random dictionary.
    labels : sequence of length n_samples
    **options
        As in `probe`.

    Returns
    -------
    dict of str to ProbeResult
    """
    return {name: probe(one, labels, **options) for name, one in features.items()}


def probe_table(results: Mapping[str, ProbeResult]) -> str:
    """Lay out results as a Markdown table: mean accuracy and mean balanced accuracy for each k_sp."""
    if not results:
        raise InputError("no results to lay out; pass at least one")
    ks = next(iter(results.values())).k_sp
    head = ["features", *(f"accuracy, k_sp={k}" for k in ks), *(f"balanced, k_sp={k}" for k in ks)]
    lines = [head, ["---"] * len(head)]
    for name, r in results.items():
        values = [*r.mean_accuracy.values(), *r.mean_balanced_accuracy.values()]
        lines.append([name, *(f"{v:.4f}" for v in values)])
    majority = float(np.mean([r.majority.mean() for r in results.values()]))
    lines.append(["always no", *([f"{majority:.4f}"] * len(ks)), *(["0.5000"] * len(ks))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class _Problem:
    """One class against the rest on its chosen columns."""

    def __init__(
        self, columns: Columns, positive: NDArray[np.bool_], test: NDArray[np.bool_], C: float, scale: bool
    ) -> None:
        held = test[columns.rows]
        sides = positive[columns.rows]
        self._C = C
        self._train, self._train_side = columns.values[~held], sides[~held]
        self._test, self._test_side = columns.values[held], sides[held]
        # (negative, positive) counts of all samples of each part, and of those without an active column
        self._n_train, self._n_test = _sides(positive[~test]), _sides(positive[test])
        self._zero_train = self._n_train - _sides(self._train_side)
        self._zero_test = self._n_test - _sides(self._test_side)
        if scale:
            rms = np.sqrt(np.square(self._train).sum(axis=0) / self._n_train.sum())
            unit = np.where(rms > 0.0, rms, 1.0)
            self._train, self._test = self._train / unit, self._test / unit

    def accuracies(self, k: int) -> tuple[float, float]:
        """Return the accuracy of the plain fit and balanced accuracy of the fit that weighs both sides alike."""
        correct = self._correct(np.ones(2), k)
        equal = self._correct(self._n_train.sum() / (2.0 * self._n_train), k)
        return float(correct.sum() / self._n_test.sum()), float(np.mean(equal / self._n_test))

    def _correct(self, side_weight: Float64Array, k: int) -> Float64Array:
        """Count the correctly answered test samples, (negative, positive)."""
        fit: LogisticFit = fit_logistic(
            self._train[:, :k],
            self._train_side,
            weight=side_weight[self._train_side.astype(np.intp)],
            zeros=tuple(side_weight * self._zero_train),
            C=self._C,
        )
        right = fit.predict(self._test[:, :k]) == self._test_side
        at_zero = self._zero_test * (np.array([False, True]) == (fit.intercept > 0.0))
        counts = np.array([np.sum(right & ~self._test_side), np.sum(right & self._test_side)])
        return np.asarray(counts + at_zero, np.float64)


def _sides(positive: NDArray[np.bool_]) -> Float64Array:
    """Count (negative, positive)."""
    n = float(np.count_nonzero(positive))
    return np.array([positive.size - n, n])


def _choose_columns(
    source: Features, codes: NDArray[np.int64], train: NDArray[np.bool_], probed: NDArray[np.int64], k: int
) -> NDArray[np.int64]:
    """Return the columns of the largest mean difference, shape (n_probed, k); of equal ones the lower column."""
    n_classes = int(codes.max()) + 1
    sums = source.sums(np.where(train, codes, -1), n_classes)
    sizes = np.bincount(codes[train], minlength=n_classes)
    total, n = sums.sum(axis=0), int(sizes.sum())
    chosen = np.empty((probed.size, k), np.int64)
    for i, c in enumerate(probed):
        difference = np.abs(sums[c] / sizes[c] - (total - sums[c]) / (n - sizes[c]))
        chosen[i] = np.argsort(-difference, kind="stable")[:k]
    return chosen


def _check_k_sp(k_sp: Sequence[int], n_columns: int) -> tuple[int, ...]:
    ks = tuple(int(k) for k in k_sp)
    if not ks or min(ks) < 1 or max(ks) > n_columns:
        raise InputError(f"k_sp={ks} must be whole numbers from 1 to the {n_columns} columns of the features")
    return ks


def _check_classes(
    classes: NDArray[Any], codes: NDArray[np.int64], small_classes: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the classes to probe and of those to skip."""
    if small_classes not in ("error", "skip"):
        raise InputError(f"small_classes={small_classes!r} is not known; use 'error' or 'skip'")
    sizes = np.bincount(codes, minlength=classes.size)
    small = np.flatnonzero(sizes < 2)
    if small.size and small_classes == "error":
        raise InputError(
            f"{small.size} of {classes.size} classes have a single sample: {listed(classes[small])}; "
            "a class needs one to train and one to test: merge or drop them, or pass small_classes='skip'"
        )
    probed = np.flatnonzero(sizes >= 2)
    if probed.size == 0:
        raise InputError(f"none of the {classes.size} classes has two samples; nothing can be probed")
    return probed, small


def _is_features(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("n_columns", "count", "sums", "select"))
