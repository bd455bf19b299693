"""Matching, recovery of a truth, stability: equal to the assignment on the whole matrix."""

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate import ground_truth as gt
from dbksvd_dask.evaluate.matching import best_match, match_atoms
from dbksvd_dask.evaluate.stability import stability
from dbksvd_dask.kernels.moments import merge_moments
from tests.naive import metrics as naive


def noisy_copy(rng, D, noise):
    other = D[rng.permutation(len(D))] * rng.choice([-1.0, 1.0], (len(D), 1)) + noise * rng.standard_normal(
        D.shape
    )
    return other / np.linalg.norm(other, axis=1, keepdims=True)


@pytest.mark.parametrize(("a", "b"), [(30, 30), (20, 31), (31, 20), (1, 5)])
@pytest.mark.parametrize("absolute", [True, False])
def test_mcc_equals_the_assignment_on_the_whole_matrix(a, b, absolute):
    rng = np.random.default_rng(a)
    A, B = naive.unit_rows(rng, a, 8), naive.unit_rows(rng, b, 8)
    m = match_atoms(A, B, absolute=absolute)
    assert m.mcc == pytest.approx(naive.mcc(A, B, absolute), rel=1e-9)
    assert m.exact
    assert len(set(m.index_a)) == len(set(m.index_b)) == min(a, b)
    np.testing.assert_allclose(m.similarity, np.sum(A[m.index_a] * B[m.index_b], axis=1), rtol=1e-12)
    assert m.mcc <= m.upper_bound + 1e-12


def test_signs_and_order_do_not_matter():
    rng = np.random.default_rng(0)
    D = naive.unit_rows(rng, 25, 12)
    same = noisy_copy(rng, D, 0.0)
    assert match_atoms(D, same).mcc == pytest.approx(1.0)
    assert match_atoms(D, same, absolute=False).mcc < 0.8


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_beyond_the_dense_limit_candidates_give_the_same_matching_of_close_runs(noise):
    rng = np.random.default_rng(1)
    A = naive.unit_rows(rng, 90, 20)
    B = noisy_copy(rng, A, noise / np.sqrt(20) * 2)
    m = match_atoms(A, B, dense_limit=50, n_candidates=10)
    assert not m.exact
    assert m.mcc == pytest.approx(naive.mcc(A, B), rel=1e-9)
    assert len(set(m.index_a)) == len(set(m.index_b)) == 90


@pytest.mark.parametrize("shape", [(80, 80), (60, 95), (95, 60)])
def test_beyond_the_dense_limit_every_atom_is_matched_and_the_mcc_is_a_lower_bound(shape):
    rng = np.random.default_rng(2)
    A, B = naive.unit_rows(rng, shape[0], 4), naive.unit_rows(rng, shape[1], 4)
    A[:20] = A[0]  # twenty atoms compete for the same candidates, so some are left over
    m = match_atoms(A, B, dense_limit=8, n_candidates=2)
    optimum = naive.mcc(A, B)
    assert len(set(m.index_a)) == len(set(m.index_b)) == min(shape)
    assert 0.8 * optimum < m.mcc <= optimum + 1e-12 <= m.upper_bound + 1e-9


def test_best_match_is_the_row_maximum():
    rng = np.random.default_rng(3)
    A, B = naive.unit_rows(rng, 33, 6), naive.unit_rows(rng, 21, 6)
    for absolute in (True, False):
        S = np.abs(A @ B.T) if absolute else A @ B.T
        b = best_match(A, B, absolute=absolute, tile=5)
        np.testing.assert_array_equal(b.index, S.argmax(1))
        np.testing.assert_allclose(b.similarity, (A @ B.T)[np.arange(33), S.argmax(1)], rtol=1e-12)


def test_recovery_of_a_half_found_dictionary():
    truth = np.eye(8)
    learned = np.concatenate([truth[:4], -truth[:2], np.full((2, 8), 8**-0.5)])
    r = gt.recovery(learned, truth)
    assert (r.precision, r.recall) == (6 / 8, 4 / 8)
    assert r.f1 == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert r.uniqueness == 4 / 8  # atoms 0 to 3 are best matches, the rest repeat them
    assert r.mcc == pytest.approx(naive.mcc(learned, truth))
    assert gt.recovery(truth, truth).f1 == 1.0
    assert gt.recovery(learned[6:], truth).f1 == 0.0


@pytest.mark.parametrize("rows", [13, 150])
def test_support_scores_equal_dense_and_sklearn(rows):
    rng = np.random.default_rng(4)
    codes = naive.random_codes(rng, 150, 4, 11)
    true_codes = naive.random_codes(rng, 150, 3, 7)
    best = rng.integers(0, 7, 12)  # the twelfth learned atom is never active
    parts = [
        gt.support_counts(
            (codes[0][i : i + rows], codes[1][i : i + rows]),
            (true_codes[0][i : i + rows], true_codes[1][i : i + rows]),
            best,
            7,
        )
        for i in range(0, 150, rows)
    ]
    s = gt.support_scores(merge_moments(parts))
    X, X_true = naive.dense_codes(*codes, 12), naive.dense_codes(*true_codes, 7)
    expected = naive.support_scores(X, X_true, best)
    np.testing.assert_allclose(np.stack([s.precision_per_atom, s.recall_per_atom, s.f1_per_atom], 1), expected)
    assert (s.precision, s.recall, s.f1) == pytest.approx(tuple(expected.mean(0)))
    sk = precision_recall_fscore_support(X_true[:, best] != 0, X != 0, average="macro", zero_division=0)
    assert (s.precision, s.recall, s.f1) == pytest.approx(sk[:3])
    assert (s.n_never_active, s.n_samples) == (1, 150)


def test_stability_of_equal_and_of_unrelated_runs():
    rng = np.random.default_rng(5)
    D = naive.unit_rows(rng, 20, 30)
    other = naive.unit_rows(rng, 20, 30)
    s = stability([D, noisy_copy(rng, D, 0.0), other])
    assert s.mcc[0, 1] == s.mcc[1, 0] == pytest.approx(1.0)
    assert s.smallest == pytest.approx(naive.mcc(D, other))
    assert s.smallest < 0.6
    assert s.mean == pytest.approx((s.mcc[0, 1] + s.mcc[0, 2] + s.mcc[1, 2]) / 3)
    assert s.exact


def test_dictionaries_that_do_not_fit_are_refused():
    with pytest.raises(MismatchError, match="have 3 and 4 features"):
        match_atoms(np.eye(3), np.eye(4))
    with pytest.raises(InputError, match="second dictionary has 3 rows that are not of norm 1"):
        best_match(np.eye(3), 2 * np.eye(3))
    with pytest.raises(InputError, match="received 1 dictionary, pass at least two"):
        stability([np.eye(3)])
    codes = (np.zeros((4, 1), int), np.ones((4, 1)))
    with pytest.raises(InputError, match="codes of 4 samples and true codes of 3"):
        gt.support_counts(codes, (codes[0][1:], codes[1][1:]), [0], 1)
    with pytest.raises(InputError, match="different pairings"):
        gt.support_counts(codes, codes, [0, 0], 2).merge(gt.support_counts(codes, codes, [0, 1], 2))
