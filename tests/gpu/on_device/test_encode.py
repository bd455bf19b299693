"""The pursuit on the device equals the CPU kernel: supports, ties, stopping rules, refits, both places."""

import numpy as np
import pytest

from dbksvd_dask.gpu import device
from dbksvd_dask.kernels import encode as cpu
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from tests.naive import kernels as naive

pytestmark = pytest.mark.gpu


def run(space, Y, D, k, gram_on_device=True, **how):
    from dbksvd_dask.gpu import encode

    gram = cpu.gram_matrix(D)
    atom, coefficient = encode.encode_rows(
        space.asarray(Y), space.asarray(D), space.asarray(gram) if gram_on_device else gram, EncodeSpec(k, **how)
    )
    assert device.on_device(atom)
    assert device.on_device(coefficient)
    return space.to_host(atom), space.to_host(coefficient)


def assert_equals_cpu(Y, D, k, got, tolerance=1e-5, fewest=1.0, **how):
    """Same supports but where two candidates of a step are nearly equal, same coefficients."""
    atom, coefficient = cpu.encode_rows(Y, D, cpu.gram_matrix(D), EncodeSpec(k, **how))
    assert got[0].dtype == np.int32
    assert got[1].dtype == Y.dtype
    same = (got[0] == atom).all(axis=1)
    assert same.mean() >= fewest
    for i in np.flatnonzero(~same):
        twin = {name: how[name] for name in ("rtol", "min_coefficient", "nonneg") if name in how}
        assert naive.pursue(Y[i], D, k, **twin)[2] < 1e-6, "supports differ, and no near tie explains it"
    scale = np.abs(coefficient).max(axis=1, keepdims=True, initial=1e-30)
    difference = np.abs(got[1] - coefficient) / scale
    assert difference[same].max(initial=0) < tolerance


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize(("n_atoms", "k"), [(5, 1), (40, 4), (67, 9)])
def test_pursuit_equals_cpu(space, data, n_atoms, k, nonneg):
    Y, D = data(6, n_atoms, 24)
    assert_equals_cpu(Y, D, k, run(space, Y, D, k, nonneg=nonneg), nonneg=nonneg)


def test_pursuit_equals_cpu_on_real_patches(space, patches):
    D = naive.unit_rows(patches[:40]).astype(np.float32)
    Y = patches[300:306]
    assert_equals_cpu(Y, D, 5, run(space, Y, D, 5), fewest=0.8)


@pytest.mark.parametrize("how", [{"rtol": 0.5}, {"min_coefficient": 0.9}, {"rtol": 0.4, "nonneg": True}])
def test_stopping_rules_equal_cpu(space, data, how):
    Y, D = data(6, 48, 16)
    atom, coefficient = run(space, Y, D, 8, **how)
    assert (atom == -1).any(), "the rule must stop some pursuits early, or this test shows nothing"
    assert_equals_cpu(Y, D, 8, (atom, coefficient), **how)


def test_products_in_global_memory_give_the_same_codes(space, data, monkeypatch):
    Y, D = data(5, 40, 16)
    shared = run(space, Y, D, 4, refit=True)
    monkeypatch.setattr(space, "shared_bytes", 0)
    for a, b in zip(shared, run(space, Y, D, 4, refit=True), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("threads", [1, 3, 32])
def test_any_number_of_threads_gives_the_same_codes(space, data, monkeypatch, threads):
    Y, D = data(3, 40, 16)
    atom, coefficient = run(space, Y, D, 4, rtol=0.3)
    monkeypatch.setattr(space, "threads", threads)
    again = run(space, Y, D, 4, rtol=0.3)
    np.testing.assert_array_equal(atom, again[0])
    np.testing.assert_allclose(coefficient, again[1], rtol=1e-6)


def test_exact_tie_goes_to_the_lowest_index(space):
    D = np.eye(8, dtype=np.float32)[np.arange(50) % 8]
    atom, coefficient = run(space, np.ones((1, 8), np.float32), D, 8)
    assert atom[0].tolist() == list(range(8))
    np.testing.assert_array_equal(coefficient[0], 1)


def test_tie_of_opposite_signs_goes_to_the_lowest_index(space):
    D = np.vstack([-np.eye(4), np.eye(4)]).astype(np.float32)
    atom, coefficient = run(space, np.full((1, 4), 2.0, np.float32), D, 4)
    assert atom[0].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(coefficient[0], -2)


def test_a_coefficient_equal_to_the_limit_is_taken_as_on_the_cpu(space):
    D = np.eye(4, dtype=np.float32)
    Y = np.array([[0.7, 0.5, 0.3, 0.0]], np.float32)
    for limit in (0.7, 0.5, 0.3, float(np.float32(0.7))):  # 0.7 and 0.3 round to either side in float32
        got = run(space, Y, D, 4, min_coefficient=limit)
        assert_equals_cpu(Y, D, 4, got, min_coefficient=limit)


def test_zero_rows_and_rows_without_positive_products_have_no_nonzeros(space):
    D = np.eye(3, dtype=np.float32)
    Y = np.array([[0, 0, 0], [-1, -2, -3]], np.float32)
    atom, coefficient = run(space, Y, D, 2, nonneg=True, refit=True)
    assert (atom == -1).all()
    assert (coefficient == 0).all()


def test_atoms_are_chosen_again_within_the_bound_on_steps(space, data):
    Y, D = data(4, 20, 12, coherent=True)
    assert_equals_cpu(Y, D, 4, run(space, Y, D, 4), 1e-4, fewest=0.7)


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_refit_equals_cpu(space, data, nonneg, dtype, monkeypatch):
    from dbksvd_dask.gpu import products

    monkeypatch.setattr(products, "_REFIT_BLOCKS", 2)  # several samples per block: scratch is used again
    Y, D = data(3, 30, 12, dtype)
    how = {"nonneg": nonneg, "refit": True}
    assert_equals_cpu(Y, D, 4, run(space, Y, D, 4, **how), 2e-5 if nonneg else 1e-5, **how)


def test_refit_of_duplicate_atoms_is_finite(space, data):
    Y, D = data(3, 6, 8)
    D = np.vstack([D, D]).astype(np.float32)
    got = run(space, Y, D, 8, refit=True)
    assert np.isfinite(got[1]).all()
    assert_equals_cpu(Y, D, 8, got, 1e-3, refit=True)


def test_float64_agrees_to_its_precision(space, data):
    Y, D = data(4, 40, 16, np.float64)
    assert_equals_cpu(Y, D, 5, run(space, Y, D, 5), 1e-12)


def test_tiles_do_not_change_codes(space, data, monkeypatch):
    from dbksvd_dask.gpu import encode

    Y, D = data(7, 30, 12)
    whole = run(space, Y, D, 3)
    monkeypatch.setattr(encode, "product_tile_rows", lambda *_: 3)
    tiled = run(space, Y, D, 3)
    np.testing.assert_array_equal(whole[0], tiled[0])
    np.testing.assert_allclose(whole[1], tiled[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"encoder": "omp"}, {"nonneg": True, "refit": True}, {"rtol": 0.4}])
def test_pursuit_on_the_host_equals_cpu_through_two_buffers(space, data, monkeypatch, how):
    monkeypatch.setattr(units, "TILE_ROWS", 48)
    Y, D = data(75, 60, 24)
    assert_equals_cpu(Y, D, 5, run(space, Y, D, 5, gram_on_device=False, **how), fewest=0.95, **how)


def test_orthogonal_pursuit_takes_the_gram_wherever_it_is(space, data):
    Y, D = data(9, 40, 16)
    on_device = run(space, Y, D, 4, encoder="omp")
    on_host = run(space, Y, D, 4, gram_on_device=False, encoder="omp")
    for a, b in zip(on_device, on_host, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gram_residual_and_norms_equal_cpu(space, data):
    from dbksvd_dask.gpu import encode, products

    Y, D = data(9, 30, 20)
    atom, coefficient = cpu.encode_rows(Y, D, cpu.gram_matrix(D), EncodeSpec(4, rtol=0.5))
    R = products.residual(*(space.asarray(a) for a in (Y, atom, coefficient, D)))
    np.testing.assert_allclose(space.to_host(R), cpu.residual(Y, atom, coefficient, D), atol=1e-6)
    gram = encode.gram_matrix(space.asarray(D))
    np.testing.assert_allclose(space.to_host(gram), cpu.gram_matrix(D), atol=1e-6)
    norm2 = products.squared_norms(space.asarray(Y))
    np.testing.assert_allclose(space.to_host(norm2), cpu.squared_norms(Y), rtol=1e-12)


@pytest.mark.parametrize("how", [{}, {"nonneg": True}, {"rtol": 0.4}, {"refit": True}])
def test_groups_offered_in_order_equal_cpu(space, data, how):
    Y, D = data(6, 30, 16)
    stages = ((0, 7, 2), (7, 20, 3), (20, 30, 2))
    got = run(space, Y, D, 6, stages=stages, **how)
    expected = cpu.encode_rows(Y, D, cpu.gram_matrix(D), EncodeSpec(6, stages=stages, **how))
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-5)
    assert ((got[0] >= 20).sum(axis=1) > 0).any()


@pytest.mark.parametrize("gram_on_device", [True, False])
def test_weighted_pursuit_equals_cpu(space, data, rng, gram_on_device):
    from dbksvd_dask.gpu import encode

    Y, D = data(6, 40, 24)
    weights = AtomWeights(rng.uniform(0.5, 2.0, 40), rng.uniform(0.1, 1.0, 40))
    spec = EncodeSpec(5, nonneg=True, refit=True, min_coefficient=0.3)
    gram = cpu.gram_matrix(D)
    near = space.asarray(gram) if gram_on_device else gram
    got = encode.encode_rows(space.asarray(Y), space.asarray(D), near, spec, weights)
    atom, coefficient = cpu.encode_rows(Y, D, gram, spec, weights)
    np.testing.assert_array_equal(space.to_host(got[0]), atom)
    np.testing.assert_allclose(space.to_host(got[1]), coefficient, atol=1e-5)
