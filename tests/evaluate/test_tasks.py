"""Probes of binary tasks: equal to the protocol of sae-probes, and to scikit-learn's regression."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, roc_auc_score

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate import tasks
from dbksvd_dask.evaluate.logistic import fit_lasso
from tests.naive import probing as naive

N, M = 240, 12


@pytest.fixture(scope="module")
def task():
    rng = np.random.default_rng(3)
    positive = rng.random(N) < 0.5
    X = rng.standard_normal((N, M)) * (rng.random((N, M)) < 0.3)
    X[:, 5] = np.where(rng.random(N) < 0.6, positive * 0.02, 0.0)  # small but telling
    X[:, 7] += 0.6 * positive
    return X, positive


def test_columns_are_ranked_in_their_own_unit(task):
    X, positive = task
    found = tasks.rank_columns(sp.csr_array(X), positive)
    assert found.tolist() == naive.rank_columns(X, positive)
    assert found[0] == 5


@pytest.mark.filterwarnings("ignore:The max_iter was reached")
@pytest.mark.parametrize("C", [1e3, 1.0, 0.05, 1e-5])
def test_lasso_is_the_optimum_that_scikit_learn_approaches(task, C):
    X, positive = task
    X = X / X.std(axis=0)  # SAGA does not end on columns of very different size
    ours = fit_lasso(X[:, :6], positive, C=C)
    value = naive.lasso_loss(X[:, :6], positive, ours.coef, ours.intercept, C)
    rng = np.random.default_rng(0)
    for scale in (1e-2, 1e-4):  # no neighbour is better
        for _ in range(20):
            moved = rng.standard_normal(7) * scale
            near = naive.lasso_loss(X[:, :6], positive, ours.coef + moved[:6], ours.intercept + moved[6], C)
            assert near >= value - 1e-7 * abs(value)
    theirs = LogisticRegression(C=C, l1_ratio=1.0, solver="saga", tol=1e-8, max_iter=2000, random_state=0)
    theirs.fit(X[:, :6], positive)
    reached = naive.lasso_loss(X[:, :6], positive, theirs.coef_[0], theirs.intercept_[0], C)
    assert value <= reached * (1 + 1e-9)
    assert value == pytest.approx(reached, rel=1e-3)


def test_probe_equals_the_protocol_step_by_step(task):
    X, positive = task
    found = tasks.probe_task(X, positive, k_sp=(1, 2, 5), seed=1)
    test = tasks.stratified_split(positive.astype(np.int64), 0.25, 1)
    order = np.random.default_rng(1).permutation(np.flatnonzero(~test))
    train, side = X[order], positive[order]
    columns = naive.rank_columns(train, side)[:5]
    assert found.columns.tolist() == columns
    cut = len(order) - min(len(order) // 5, 100)
    for i, k in enumerate((1, 2, 5)):
        A = train[:, columns[:k]]
        scores = []
        for C in np.logspace(5, -5, 10):
            fit = fit_lasso(A[:cut], side[:cut], C=C)
            scores.append(naive.roc_auc(A[cut:] @ fit.coef, side[cut:]))
        C = np.logspace(5, -5, 10)[int(np.argmax(scores))]
        fit = fit_lasso(A, side, C=C)
        score = X[test][:, columns[:k]] @ fit.coef
        assert found.strength[i] == C
        assert found.auc[i] == pytest.approx(naive.roc_auc(score, positive[test]), abs=1e-12)
        answer = score + fit.intercept > 0
        assert found.accuracy[i] == pytest.approx(np.mean(answer == positive[test]))
        assert found.f1[i] == pytest.approx(f1_score(positive[test], answer, average="weighted"))


def test_sparse_codes_and_their_dense_form_give_the_same(task):
    X, positive = task
    dense, sparse = (tasks.probe_task(one, positive, k_sp=(1, 5)) for one in (X, sp.csr_array(X)))
    np.testing.assert_array_equal(dense.auc, sparse.auc)
    np.testing.assert_array_equal(dense.columns, sparse.columns)


@pytest.mark.parametrize("n", [2, 8, 12, 60, 127, 128, 800])
def test_validation_splits_have_both_sides_and_cover_what_the_protocol_says(n):
    positive = np.arange(n) % 2 == 0
    splits = tasks.validation_splits(positive, 0)
    assert len(splits) == {2: 0, 8: 16, 12: 36, 60: 6, 127: 6, 128: 1, 800: 1}[n]
    for fit, held in splits:
        assert sorted([*fit, *held]) == list(range(n))
        assert 0 < positive[held].sum() < len(held)
    if n == 800:
        assert splits[0][1].tolist() == list(range(700, 800))


def test_area_equals_scikit_learn_with_ties():
    rng = np.random.default_rng(0)
    score, positive = rng.integers(0, 4, 50), rng.random(50) < 0.4
    assert tasks.roc_auc(score, positive) == pytest.approx(roc_auc_score(positive, score))
    assert tasks.roc_auc(score, positive) == pytest.approx(naive.roc_auc(score, positive))
    with pytest.raises(InputError, match="samples of both sides"):
        tasks.roc_auc([1.0, 2.0], np.array([True, True]))


def test_mean_over_tasks(task):
    X, positive = task
    one, two = tasks.probe_task(X, positive, k_sp=(1, 2)), tasks.probe_task(X[:, ::-1], positive, k_sp=(1, 2))
    assert tasks.mean_over_tasks({"a": one, "b": two})[2] == pytest.approx((one.auc[1] + two.auc[1]) / 2)
    with pytest.raises(InputError, match="no tasks to average"):
        tasks.mean_over_tasks([])


@pytest.mark.parametrize(
    ("positive", "k_sp", "message"),
    [
        (np.ones(N, bool), (1,), r"240 positive and 0 negative samples; a task needs two of each"),
        (np.zeros(3, bool), (1,), r"received sides of shape \(3,\) for 240 samples"),
        (np.arange(N), (1,), "pass one bool"),
        (np.arange(N) % 2, (13,), r"k_sp=\(13,\) must be whole numbers from 1 to the 12 columns"),
    ],
)
def test_tasks_that_cannot_be_probed_are_refused(task, positive, k_sp, message):
    with pytest.raises(InputError, match=message):
        tasks.probe_task(task[0], positive, k_sp=k_sp)
