"""Sparse probing: equal to dense selection and scikit-learn's regression, from codes or from a matrix."""

import tracemalloc

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate import probing
from dbksvd_dask.evaluate.codes import code_moments
from dbksvd_dask.evaluate.features import CodeFeatures, DenseFeatures
from dbksvd_dask.evaluate.logistic import fit_logistic
from dbksvd_dask.kernels.logistic import newton_sums
from tests.naive import metrics as naive

N, K, M, CLASSES = 600, 5, 30, 4


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, N)
    atom, coefficient = naive.random_codes(rng, N, K, M - 4)
    hit = rng.random(N) < 0.7  # atom 26 + c marks class c most of the time
    atom[hit, 0] = M - 4 + labels[hit]
    coefficient[hit, 0] = 1 + rng.random(hit.sum())
    return atom, coefficient, labels


def sklearn_probe(X, labels, test, c, columns, scale=True):
    """The same probe with a dense matrix and scikit-learn; accuracy and balanced accuracy."""
    X = X[:, columns]
    if scale:
        rms = np.sqrt(np.mean(X[~test] ** 2, axis=0))
        X = X / np.where(rms > 0, rms, 1)
    answers = []
    for class_weight in (None, "balanced"):
        model = LogisticRegression(class_weight=class_weight, solver="newton-cholesky", tol=1e-10)
        answers.append(model.fit(X[~test], labels[~test] == c).predict(X[test]))
    truth = labels[test] == c
    return accuracy_score(truth, answers[0]), balanced_accuracy_score(truth, answers[1])


@pytest.mark.parametrize("scale", [True, False])
def test_probe_equals_dense_selection_and_sklearn(data, scale):
    atom, coefficient, labels = data
    result = probing.probe(CodeFeatures.from_arrays(atom, coefficient, M), labels, scale=scale)
    X = naive.dense_codes(atom, coefficient, M)
    test = probing.stratified_split(labels, 0.2, 0)
    differences = naive.class_differences(X[~test], labels[~test], CLASSES)
    for c in range(CLASSES):
        chosen = np.argsort(-differences[c], kind="stable")[:5]
        np.testing.assert_array_equal(result.columns[c], chosen)
        for j, k in enumerate(result.k_sp):
            expected = sklearn_probe(X, labels, test, c, chosen[:k], scale)
            assert (result.accuracy[c, j], result.balanced_accuracy[c, j]) == pytest.approx(expected, abs=1e-12)
    assert result.n_test == test.sum()
    assert result.columns[:, 0].tolist() == [26, 27, 28, 29]
    assert result.mean_balanced_accuracy[1] > 0.75


def test_codes_and_their_dense_matrix_give_the_same_result(data):
    atom, coefficient, labels = data
    sparse = probing.probe(CodeFeatures.from_arrays(atom, coefficient, M), labels)
    dense = probing.probe(naive.dense_codes(atom, coefficient, M), labels)
    np.testing.assert_array_equal(sparse.columns, dense.columns)
    np.testing.assert_array_equal(sparse.accuracy, dense.accuracy)
    np.testing.assert_array_equal(sparse.balanced_accuracy, dense.balanced_accuracy)


@pytest.mark.parametrize("rows", [1, 77, 600])
def test_streaming_equals_in_memory(data, rows):
    atom, coefficient, labels = data
    X = naive.dense_codes(atom, coefficient, M)
    starts = range(0, N, rows)
    whole = probing.probe(CodeFeatures.from_arrays(atom, coefficient, M), labels)
    for streamed in (
        CodeFeatures(lambda: ((atom[i : i + rows], coefficient[i : i + rows]) for i in starts), M),
        DenseFeatures(lambda: (X[i : i + rows] for i in starts), M),
    ):
        result = probing.probe(streamed, labels)
        np.testing.assert_array_equal(result.columns, whole.columns)
        np.testing.assert_array_equal(result.accuracy, whole.accuracy)


def test_more_classes_than_one_pass_holds(data, monkeypatch):
    atom, coefficient, labels = data
    features = CodeFeatures.from_arrays(atom, coefficient, M)
    whole = probing.probe(features, labels)
    monkeypatch.setattr(probing, "_CLASSES_PER_PASS", 3)
    np.testing.assert_array_equal(probing.probe(features, labels).accuracy, whole.accuracy)


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_regression_equals_sklearn(C, class_weight):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((400, 3)) * [0.1, 1, 30]
    y = X @ [5, 1, 0.02] + rng.standard_normal(400) > 1.0
    model = LogisticRegression(C=C, class_weight=class_weight, solver="newton-cholesky", tol=1e-12).fit(X, y)
    weight = None if class_weight is None else 400 / 2 / np.where(y, y.sum(), (~y).sum())
    fit = fit_logistic(X, y, weight=weight, C=C)
    np.testing.assert_allclose(fit.coef, model.coef_[0], rtol=1e-5, atol=1e-8)
    assert fit.intercept == pytest.approx(model.intercept_[0], rel=1e-5)


def test_newton_sums_equal_the_plain_formula():
    rng = np.random.default_rng(5)
    X, positive, weight = rng.standard_normal((30, 2)), rng.random(30) < 0.4, rng.random(30)
    theta = np.array([0.7, -1.1, 0.3])
    gradient, hessian = np.empty(3), np.empty((3, 3))
    loss = newton_sums(X, positive, weight, theta, gradient, hessian)
    expected = naive.logistic_sums(X, positive, weight, theta)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-12)
    np.testing.assert_allclose(hessian, expected[2], rtol=1e-12)


def test_no_array_of_samples_by_atoms_is_made():
    rng = np.random.default_rng(6)
    n, n_atoms = 20_000, 4000
    atom, coefficient = rng.integers(0, n_atoms, (n, 2), np.int32), rng.random((n, 2), np.float32)
    features = CodeFeatures.from_arrays(atom, coefficient, n_atoms)
    tracemalloc.start()
    probing.probe(features, rng.integers(0, 3, n), k_sp=[1])
    code_moments(atom, coefficient, n_atoms)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n_atoms / 10  # a tenth of even one byte per sample and atom


def test_zero_rows_may_be_counted_instead_of_listed():
    rng = np.random.default_rng(2)
    X = np.where(rng.random((500, 2)) < 0.1, rng.standard_normal((500, 2)), 0)
    y = (X[:, 0] > 0) | (rng.random(500) < 0.2)
    rows = X.any(axis=1)
    counted = fit_logistic(X[rows], y[rows], zeros=(float(np.sum(~y[~rows])), float(np.sum(y[~rows]))))
    listed = fit_logistic(X, y)
    np.testing.assert_allclose(counted.coef, listed.coef, rtol=1e-7)
    assert counted.intercept == pytest.approx(listed.intercept, rel=1e-7)


def test_separable_classes_and_far_samples_stay_finite():
    X = np.array([[-1e6], [-1e5], [2e5], [1e6]])
    fit = fit_logistic(X, np.array([False, False, True, True]))
    assert np.isfinite([*fit.coef, fit.intercept]).all()
    assert fit.predict(X).tolist() == [False, False, True, True]


@pytest.mark.parametrize("seed", [0, 1])
def test_split_takes_the_same_share_of_every_class(seed):
    codes = np.repeat([0, 1, 2, 3], [100, 10, 2, 1])
    test = probing.stratified_split(codes, 0.2, seed)
    assert [int(test[codes == c].sum()) for c in range(4)] == [20, 2, 1, 0]
    np.testing.assert_array_equal(test, probing.stratified_split(codes, 0.2, seed))
    assert (test != probing.stratified_split(codes, 0.2, seed + 7)).any()


def test_labels_may_be_words(data):
    atom, coefficient, labels = data
    words = np.array(["ant", "bee", "cat", "dog"])[labels].tolist()
    result = probing.probe(CodeFeatures.from_arrays(atom, coefficient, M), words, k_sp=[1])
    assert result.classes.tolist() == ["ant", "bee", "cat", "dog"]
    assert list(result.mean_accuracy) == [1]


def test_a_learned_marker_beats_raw_features_and_a_random_dictionary(data):
    atom, coefficient, labels = data
    D = probing.random_dictionary(M, 8, seed=3)
    np.testing.assert_allclose(np.linalg.norm(D, axis=1), 1, rtol=1e-6)
    raw = naive.dense_codes(atom, coefficient, M) @ D
    results = probing.compare_probes(
        {
            "codes": CodeFeatures.from_arrays(atom, coefficient, M),
            "raw features": raw,
            "random dictionary": probing.random_dictionary_codes(raw, M, K, seed=4),
        },
        labels,
        k_sp=[1, 2],
    )
    codes, baseline, random = (r.mean_balanced_accuracy[1] for r in results.values())
    assert codes > baseline + 0.05
    assert codes > random + 0.05
    table = probing.probe_table(results)
    assert table.splitlines()[0].startswith("| features | accuracy, k_sp=1 | accuracy, k_sp=2 | balanced")
    assert f"| codes | {results['codes'].mean_accuracy[1]:.4f} |" in table
    assert table.splitlines()[-1].startswith("| always no | 0.7")


def test_a_class_with_one_sample_is_named(data):
    atom, coefficient, labels = data
    features = CodeFeatures.from_arrays(atom, coefficient, M)
    lonely = labels.astype(object)
    lonely[[5, 9]] = [77, 88]
    with pytest.raises(InputError, match=r"2 of 6 classes have a single sample: 77, 88; .* small_classes='skip'"):
        probing.probe(features, lonely.astype(int))
    result = probing.probe(features, lonely.astype(int), small_classes="skip")
    assert result.skipped == (77, 88)
    assert result.classes.tolist() == [0, 1, 2, 3]
    assert result.accuracy.shape == (4, 3)


def test_missing_and_wrong_labels_are_refused(data):
    atom, coefficient, labels = data
    features = CodeFeatures.from_arrays(atom, coefficient, M)
    with pytest.raises(InputError, match=r"labels of shape \(599,\) for 600 samples; pass one label per sample"):
        probing.probe(features, labels[1:])
    for missing in (None, float("nan")):
        gaps = labels.astype(object)
        gaps[[3, 8]] = missing
        with pytest.raises(InputError, match=r"2 of 600 labels are missing .* the first at sample 3"):
            probing.probe(features, gaps)
    with pytest.raises(InputError, match="1 of 600 labels are missing"):
        probing.probe(features, ["", *("a" if x else "b" for x in labels[1:])])
    with pytest.raises(InputError, match="all 600 labels are '1'; probing needs at least two classes"):
        probing.probe(features, np.ones(N, int))


def test_impossible_parameters_are_refused(data):
    atom, coefficient, labels = data
    features = CodeFeatures.from_arrays(atom, coefficient, M)
    with pytest.raises(InputError, match=r"k_sp=\(31,\) must be whole numbers from 1 to the 30 columns"):
        probing.probe(features, labels, k_sp=[31])
    with pytest.raises(InputError, match=r"test_fraction=1\.0 must lie between 0 and 1"):
        probing.probe(features, labels, test_fraction=1.0)
    with pytest.raises(InputError, match="small_classes='drop' is not known"):
        probing.probe(features, labels, small_classes="drop")
    with pytest.raises(InputError, match="none of the 600 classes has two samples"):
        probing.probe(features, np.arange(N), small_classes="skip")
    with pytest.raises(InputError, match=r"\(n_samples, n_columns\), received \(3,\)"):
        probing.probe(np.ones(3), [0, 1, 1])
    with pytest.raises(InputError, match="expected blocks of 3 columns"):
        probing.probe(DenseFeatures(lambda: [np.ones((2, 2))], 3), [0, 1], k_sp=[1])
    with pytest.raises(InputError, match="no results"):
        probing.probe_table({})
