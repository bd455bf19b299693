"""Whitening: the maps, and what they do to samples and atoms."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from dbksvd_dask.kernels import chunk, encode, whiten
from dbksvd_dask.kernels.products import second_moment
from dbksvd_dask.plan.encoder import EncodeSpec


@pytest.fixture
def samples(rng):
    """Centred samples whose directions vary by a factor of 20."""
    Y = rng.standard_normal((4000, 5)) * np.array([10, 5, 2, 1, 0.5])
    Q = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    Y = (Y @ Q).astype(np.float32)
    return Y - Y.mean(axis=0)


def made(Y, a, dtype=np.float32):
    return whiten.Whitening.of(whiten.whitening(second_moment(Y), a, np.dtype(dtype)))


def naive_maps(Y, a):
    """The formula as written: C^(-a/2), scaled to keep the mean squared norm, and its inverse."""
    values, vectors = np.linalg.eigh(np.cov(Y.T.astype(float), bias=True))
    W = sum(v ** (-a / 2) * np.outer(q, q) for v, q in zip(values, vectors.T, strict=True))
    W *= np.sqrt(np.square(Y).sum() / np.square(Y @ W).sum())
    return W, np.linalg.inv(W)


@pytest.mark.parametrize("a", [0.0, 0.5, 1.0])
def test_maps_are_those_of_the_formula(samples, a):
    maps = made(samples, a, np.float64)
    for got, expected in zip(maps, naive_maps(samples, a), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_whole_whitening_makes_all_directions_alike_and_keeps_the_norm(samples):
    maps = made(samples, 1.0)
    Z = chunk.whiten(samples, maps.forward)
    np.testing.assert_allclose(np.cov(Z.T), np.eye(5) * np.cov(Z.T).trace() / 5, atol=0.02)
    assert np.square(Z).sum() == pytest.approx(np.square(samples).sum(), rel=1e-4)


def test_atoms_come_back_as_they_went(samples, make_dictionary):
    maps = made(samples, 0.5)
    D = make_dictionary(12, 5)
    there = maps.into(D)
    np.testing.assert_allclose(np.linalg.norm(there, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(maps.back(there), D, atol=1e-5)
    assert np.abs(there - D).max() > 0.1


def test_atoms_mapped_on_threads_have_the_same_bits_and_are_those_of_float64(make_dictionary, rng):
    D, W = make_dictionary(2500, 40), (np.eye(40) + 0.1 * rng.standard_normal((40, 40))).astype(np.float32)
    alone, lengths = whiten.unit_product(D, W)
    with ThreadPoolExecutor(3) as pool:
        together = whiten.unit_product(D, W, pool.map)
    assert alone.tobytes() == together[0].tobytes()
    assert lengths.tobytes() == together[1].tobytes()
    twin = D.astype(float) @ W
    np.testing.assert_allclose(lengths, np.linalg.norm(twin, axis=1), rtol=1e-6)
    np.testing.assert_allclose(alone, twin / np.linalg.norm(twin, axis=1)[:, None], atol=1e-6)


def test_codes_of_whitened_samples_reconstruct_samples(samples, make_dictionary, rng):
    """X D' = Y W exactly gives X |D' W^-1| D = Y."""
    maps = made(samples, 0.5, np.float64)
    there, X = maps.into(make_dictionary(12, 5).astype(float)), rng.random((7, 12))
    lengths = np.linalg.norm(there @ maps.backward, axis=1)
    np.testing.assert_allclose((X * lengths) @ maps.back(there), X @ there @ maps.backward, atol=1e-9)


@pytest.mark.parametrize("how", [{}, {"refit": True}, {"nonneg": True}, {"gram": "never"}, {"encoder": "omp"}])
def test_whitened_codes_are_those_of_mapped_samples_for_atoms_as_they_are(samples, make_dictionary, how):
    maps, D, spec = made(samples, 0.5), make_dictionary(12, 5), EncodeSpec(3, **how)
    atom, coefficient = encode.encode_rows(samples, D, encode.gram_for(D, spec, whitening=maps.forward), spec)
    there = maps.into(D)
    twin, by_twin = encode.encode_rows(samples @ maps.forward, there, encode.gram_for(there, spec), spec)
    same = (atom == twin).all(axis=1)
    assert same.mean() > 0.999  # a near tie may fall otherwise
    lengths = np.linalg.norm(D.astype(float) @ maps.forward, axis=1)
    np.testing.assert_allclose(coefficient[same], (by_twin / lengths[twin])[same], rtol=1e-3, atol=1e-4)
    left = encode.residual(samples, atom, coefficient, D)
    in_place = encode.residual(samples @ maps.forward, twin, by_twin, there) @ maps.backward
    np.testing.assert_allclose(left[same], in_place[same], atol=1e-3)


@pytest.mark.parametrize("cut", [1, 7, 48, 1000])
def test_whitened_codes_have_the_same_bits_however_samples_are_cut(samples, make_dictionary, cut):
    D, spec = make_dictionary(12, 5), EncodeSpec(3)
    beside = encode.gram_for(D, spec, whitening=made(samples, 0.5).forward)
    whole = encode.encode_rows(samples[:2000], D, beside, spec)
    parts = [
        encode.encode_rows(samples[a : min(a + cut, 2000)], D, beside, spec, first=a) for a in range(0, 2000, cut)
    ]
    for i in (0, 1):
        assert np.concatenate([part[i] for part in parts]).tobytes() == whole[i].tobytes()


@pytest.mark.parametrize("n_used", [0, 2])
def test_directions_without_variance_stay_finite(samples, n_used):
    Y = samples.copy()
    Y[:, n_used:] = 0
    maps = made(Y, 1.0)
    assert np.isfinite(maps.forward).all()
    np.testing.assert_allclose(maps.forward @ maps.backward, np.eye(5), atol=1e-4)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_maps_have_the_same_bits_on_any_number_of_blas_threads(rng, dtype):
    # above 256 features or so, OpenBLAS divides an inversion among its threads
    total = second_moment(rng.standard_normal((800, 400)) * np.geomspace(5, 0.1, 400))
    found = []
    for n_threads in (1, 2):
        with threadpool_limits(n_threads, user_api="blas"):
            maps = whiten.Whitening.of(whiten.whitening(total, 0.5, np.dtype(dtype)))
        found.append((maps.forward.tobytes(), maps.backward.tobytes()))
    assert found[0] == found[1]
