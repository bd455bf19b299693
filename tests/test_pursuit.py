"""Matching pursuit and OMP equal their plain-loop twins, on random and real data and at the edges."""

import numpy as np
import pytest

from dbksvd_dask import plan
from dbksvd_dask.kernels.encode import EncodeSpec, encode_rows, gram_matrix, residual
from tests import naive

# A step whose two best candidates are closer than this (relative to the sample) may go either way in float32.
NEAR_TIE = 1e-6


def run(Y, D, k, **how):
    return encode_rows(Y, D, gram_matrix(D), EncodeSpec(k, **how))


def assert_same_codes(Y, D, atom, coefficient, twin, tolerance=1e-5):
    """Compare row by row; returns how many rows were compared, near ties left out."""
    compared = 0
    for i, y in enumerate(Y):
        support, x, gap = twin(y)
        if gap < NEAR_TIE:
            continue
        n = len(support)
        assert atom[i, :n].tolist() == support
        assert (atom[i, n:] == -1).all()
        assert (coefficient[i, n:] == 0).all()
        scale = max(np.abs(x).max(initial=0), 1e-30)
        np.testing.assert_allclose(coefficient[i, :n], x, rtol=tolerance, atol=tolerance * scale)
        compared += 1
    return compared


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("n_atoms", [20, 256, 700])
def test_pursuit_equals_twin_on_random_data(rng, make_dictionary, n_atoms, k, nonneg):
    D = make_dictionary(n_atoms, 48)
    Y = rng.standard_normal((60, 48)).astype(np.float32)
    atom, coefficient = run(Y, D, k, nonneg=nonneg)
    compared = assert_same_codes(Y, D, atom, coefficient, lambda y: naive.pursue(y, D, k, nonneg=nonneg))
    # 16 of 20 atoms exhaust a sample: what is left to choose from at the end is near-ties
    assert compared >= (55 if n_atoms > 20 else 15)


@pytest.mark.parametrize("nonneg", [False, True])
def test_pursuit_equals_twin_on_real_patches(patches, nonneg):
    D = naive.unit_rows(patches[:300]).astype(np.float32)
    Y = patches[300:400]
    atom, coefficient = run(Y, D, 8, nonneg=nonneg)
    compared = assert_same_codes(Y, D, atom, coefficient, lambda y: naive.pursue(y, D, 8, nonneg=nonneg))
    assert compared >= 90


@pytest.mark.parametrize("how", [{"rtol": 0.5}, {"min_coefficient": 0.9}, {"rtol": 0.3, "nonneg": True}])
def test_stopping_rules_equal_twin(rng, make_dictionary, how):
    D = make_dictionary(64, 24)
    Y = rng.standard_normal((50, 24)).astype(np.float32)
    atom, coefficient = run(Y, D, 12, **how)
    assert assert_same_codes(Y, D, atom, coefficient, lambda y: naive.pursue(y, D, 12, **how)) >= 45
    assert (atom == -1).any(), "the rule must stop some pursuits early, or this test shows nothing"


def test_float64_gives_float64_and_agrees_to_its_precision(rng, make_dictionary):
    D = make_dictionary(80, 32, np.float64)
    Y = rng.standard_normal((40, 32))
    atom, coefficient = run(Y, D, 6)
    assert coefficient.dtype == np.float64
    noise = 16 * np.finfo(np.float64).eps
    assert assert_same_codes(Y, D, atom, coefficient, lambda y: naive.pursue(y, D, 6, noise=noise), 1e-11) == 40


def test_atoms_may_be_chosen_again_but_never_more_than_k_differ(rng, make_dictionary):
    D = naive.unit_rows(1.0 + 0.3 * rng.standard_normal((30, 16))).astype(np.float32)  # coherent: revisits
    Y = rng.standard_normal((40, 16)).astype(np.float32)
    atom, _ = run(Y, D, 4)
    for row in atom:
        used = row[row >= 0]
        assert len(set(used)) == len(used) <= 4
    assert assert_same_codes(Y, D, atom, _, lambda y: naive.pursue(y, D, 4), 1e-4) >= 30


def test_steps_are_bounded_when_two_atoms_keep_alternating():
    D = naive.unit_rows(np.array([[1.0, 0.0, 0.0], [1.0, 0.02, 0.0]])).astype(np.float32)
    Y = np.array([[1.0, 1.0, 0.0]], np.float32)
    atom, coefficient = run(Y, D, 2)
    support, x, _ = naive.pursue(Y[0], D, 2)
    assert atom[0].tolist() == support
    np.testing.assert_allclose(coefficient[0], x, rtol=1e-4)


def test_exact_tie_goes_to_the_lowest_index():
    D = np.eye(300, 8, dtype=np.float32)
    D[8:] = np.eye(8, dtype=np.float32)[np.arange(292) % 8]  # every direction many times over
    Y = np.ones((1, 8), np.float32)
    atom, coefficient = run(Y, D, 8)
    assert atom[0].tolist() == list(range(8))
    np.testing.assert_array_equal(coefficient[0], 1)


def test_tie_of_opposite_signs_goes_to_the_lowest_index():
    D = np.vstack([-np.eye(4), np.eye(4)]).astype(np.float32)
    atom, coefficient = run(np.full((1, 4), 2.0, np.float32), D, 4)
    assert atom[0].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(coefficient[0], -2)


def test_zero_row_has_no_nonzeros(make_dictionary):
    atom, coefficient = run(np.zeros((3, 16), np.float32), make_dictionary(20, 16), 5)
    assert (atom == -1).all()
    assert (coefficient == 0).all()


def test_a_row_with_only_negative_products_has_no_non_negative_code():
    D = np.eye(3, dtype=np.float32)
    atom, _ = run(-np.ones((1, 3), np.float32), D, 2, nonneg=True)
    assert (atom == -1).all()


def test_k_equal_to_n_atoms_reconstructs_an_orthonormal_basis(rng):
    D = np.linalg.qr(rng.standard_normal((12, 12)))[0].astype(np.float32)
    Y = rng.standard_normal((5, 12)).astype(np.float32)
    atom, coefficient = run(Y, D, 12)
    np.testing.assert_allclose(naive.dense(atom, coefficient, 12) @ D, Y, atol=1e-5)


def test_one_sample_and_duplicate_samples_give_equal_codes(rng, make_dictionary):
    D = make_dictionary(100, 20)
    y = rng.standard_normal((1, 20)).astype(np.float32)
    atom, coefficient = run(y, D, 5)
    many_atom, many_coefficient = run(np.repeat(y, 9, axis=0), D, 5)
    assert (many_atom == atom).all()
    np.testing.assert_allclose(many_coefficient, np.repeat(coefficient, 9, axis=0), rtol=1e-6)


def test_read_only_and_non_contiguous_inputs_give_the_same_codes(rng, make_dictionary):
    D = make_dictionary(60, 24)
    Y = rng.standard_normal((30, 24)).astype(np.float32)
    atom, coefficient = run(Y, D, 4)
    strided = np.empty((30, 48), np.float32)[:, ::2]
    strided[...] = Y
    locked = D.copy()
    locked.flags.writeable = False
    for Y2, D2 in ((strided, locked), (np.asfortranarray(Y), np.asfortranarray(D))):
        before = Y2.copy()
        atom2, coefficient2 = run(Y2, D2, 4)
        np.testing.assert_array_equal(atom2, atom)
        np.testing.assert_array_equal(coefficient2, coefficient)
        np.testing.assert_array_equal(Y2, before)


def test_tiles_do_not_change_codes(rng, make_dictionary, monkeypatch):
    D = make_dictionary(50, 20)
    Y = rng.standard_normal((1100, 20)).astype(np.float32)
    whole = run(Y, D, 4)
    monkeypatch.setattr(plan, "TILE_ROWS", 2 * plan.GRID_ROWS)
    for all_at_once, tiled in zip(whole, run(Y, D, 4), strict=True):
        np.testing.assert_array_equal(all_at_once, tiled)


def test_refit_is_least_squares_on_the_support(rng, make_dictionary):
    D = make_dictionary(90, 30)
    Y = rng.standard_normal((40, 30)).astype(np.float32)
    plain, _ = run(Y, D, 7)
    atom, coefficient = run(Y, D, 7, refit=True)
    np.testing.assert_array_equal(atom, plain)
    for i, y in enumerate(Y):
        np.testing.assert_allclose(coefficient[i], naive.refit(y, D, atom[i]), rtol=1e-4, atol=1e-5)


def test_non_negative_refit_is_nnls_on_the_support(rng, make_dictionary):
    from scipy.optimize import nnls

    D = make_dictionary(60, 16)
    Y = rng.standard_normal((30, 16)).astype(np.float32)
    atom, coefficient = run(Y, D, 6, refit=True, nonneg=True)
    assert (coefficient >= 0).all()
    for i, y in enumerate(Y):
        support = atom[i][atom[i] >= 0]
        expected, _ = nnls(D[support].T.astype(np.float64), y.astype(np.float64))
        np.testing.assert_allclose(coefficient[i, : support.size], expected, atol=2e-4)


@pytest.mark.parametrize("how", [{}, {"rtol": 0.4}, {"min_coefficient": 0.8}])
@pytest.mark.parametrize("k", [1, 6, 13])
def test_omp_equals_twin_on_random_data(rng, make_dictionary, k, how):
    D = make_dictionary(300, 40)
    Y = rng.standard_normal((50, 40)).astype(np.float32)
    atom, coefficient = run(Y, D, k, encoder="omp", **how)
    twin = lambda y: naive.omp(y, D, k, **how)  # noqa: E731
    assert assert_same_codes(Y, D, atom, coefficient, twin, 1e-4) >= 45


def test_omp_equals_twin_on_real_patches(patches):
    D = naive.unit_rows(patches[:200]).astype(np.float32)
    Y = patches[300:360]
    atom, coefficient = run(Y, D, 6, encoder="omp")
    assert assert_same_codes(Y, D, atom, coefficient, lambda y: naive.omp(y, D, 6), 2e-3) >= 50


def test_omp_never_adds_a_duplicate_of_a_chosen_atom(rng, make_dictionary):
    D = make_dictionary(10, 20)
    D = np.vstack([D, D]).astype(np.float32)
    Y = rng.standard_normal((20, 20)).astype(np.float32)
    atom, coefficient = run(Y, D, 20, encoder="omp")
    assert ((atom >= 0).sum(axis=1) <= 10).all()
    R = residual(Y, atom, coefficient, D)
    best = Y - Y @ np.linalg.pinv(D[:10]) @ D[:10]
    np.testing.assert_allclose(R, best, atol=1e-4)


def test_omp_explains_at_least_as_much_as_pursuit(patches):
    D = naive.unit_rows(patches[:200]).astype(np.float32)
    Y = patches[200:]
    error = {
        name: np.linalg.norm(residual(Y, *run(Y, D, 8, **how), D))
        for name, how in {"mp": {}, "refit": {"refit": True}, "omp": {"encoder": "omp"}}.items()
    }
    assert error["omp"] < error["refit"] < error["mp"]


def test_residual_equals_twin_and_gram_equals_product(rng, make_dictionary):
    D = make_dictionary(1500, 16)
    Y = rng.standard_normal((33, 16)).astype(np.float32)
    gram = gram_matrix(D)
    np.testing.assert_allclose(gram, gram.T, atol=1e-6)
    np.testing.assert_allclose(gram, D.astype(np.float64) @ D.T.astype(np.float64), atol=1e-6)
    atom, coefficient = run(Y, D, 3)
    expected = Y - naive.dense(atom, coefficient, 1500) @ D
    np.testing.assert_allclose(residual(Y, atom, coefficient, D), expected, atol=1e-5)
