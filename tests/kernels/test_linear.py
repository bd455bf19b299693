"""The linear encoder fitted to codes, against dense least squares and loops."""

import numpy as np
import pytest

from dbksvd_dask.kernels import linear
from tests.naive import linear as naive
from tests.naive.metrics import dense_codes


@pytest.fixture
def codes(rng):
    """Samples of six features, and codes of four latents that are nearly linear in them; the last one is dead."""
    Y = rng.standard_normal((700, 6)).astype(np.float32) + 0.5
    X = np.maximum(Y[:, :4] + 0.2 * rng.standard_normal((700, 4)) - 0.6, 0).astype(np.float32)
    X[:, 3] = 0
    latent = np.where(X > 0, np.arange(4), -1).astype(np.int32)
    return Y, latent, X


def fitted(Y, latent, value, n_latents):
    sums = linear.code_sums(Y, latent, value, n_latents)
    typical = linear.typical_coefficients(sums)
    first = linear.least_squares(sums)
    return first, linear.with_thresholds(
        first, linear.bin_sums(Y, latent, value, first, typical), sums.counts, typical
    )


def test_the_map_is_that_of_dense_least_squares(codes):
    Y, latent, value = codes
    first, _ = fitted(Y, latent, value, 4)
    W, b = naive.least_squares(Y.astype(float), dense_codes(latent, value, 4), linear.RIDGE)
    np.testing.assert_allclose(first.W, W, atol=1e-6)
    np.testing.assert_allclose(first.b, b, atol=1e-6)


def test_thresholds_and_lines_are_those_of_loops(codes):
    Y, latent, value = codes
    first, last = fitted(Y, latent, value, 4)
    Z = Y @ first.W.T + first.b
    threshold, slope, offset = naive.thresholds(
        Z, dense_codes(latent, value, 4), linear.N_BINS, linear.BINS_PER_TYPICAL, linear.FEWEST_FOR_LINE
    )
    np.testing.assert_allclose(last.W, first.W * slope[:, None], atol=1e-5)
    np.testing.assert_allclose(last.b, first.b * slope + offset, atol=1e-5)
    np.testing.assert_allclose(last.threshold, np.maximum(threshold * slope + offset, 0), atol=1e-5)


def test_a_latent_fires_as_often_as_in_the_codes_and_a_dead_one_never(codes):
    Y, latent, value = codes
    _, last = fitted(Y, latent, value, 4)
    acts = linear.activations(Y, last)
    np.testing.assert_allclose((acts > 0).sum(axis=0), (value > 0).sum(axis=0), atol=10)
    assert not acts[:, 3].any()
    np.testing.assert_allclose(acts, naive.jump_relu(Y, *last), atol=1e-5)


def test_a_line_that_is_negative_at_the_threshold_gives_way_to_one_through_zero(rng):
    # pre-activations and codes that are zero for most samples far above the threshold
    Y = rng.uniform(0, 4, (2000, 1)).astype(np.float32)
    X = np.where(Y > 3, 4 * (Y - 3), 0) * (rng.random(Y.shape) < 0.9) + 0.01 * (rng.random(Y.shape) < 0.3)
    latent, value = np.where(X > 0, 0, -1).astype(np.int32), X.astype(np.float32)
    first, last = fitted(Y, latent, value, 1)
    Z = Y @ first.W.T + first.b
    given = (Z, X, linear.N_BINS, linear.BINS_PER_TYPICAL, linear.FEWEST_FOR_LINE)
    threshold, slope, offset = naive.thresholds(*given)
    assert offset[0] == 0 < threshold[0]
    np.testing.assert_allclose(last.W, first.W * slope[:, None], rtol=1e-4)
    assert (linear.activations(Y, last) > 0).sum() == pytest.approx((X > 0).sum(), rel=0.02)


def test_sums_of_two_parts_are_those_of_the_whole(codes):
    Y, latent, value = codes
    whole = linear.code_sums(Y, latent, value, 4)
    parts = [linear.code_sums(Y[a:b], latent[a:b], value[a:b], 4) for a, b in ((0, 300), (300, 700))]
    for a, b in zip(whole, parts[0] + parts[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-9)


def test_signed_codes_become_two_latents_per_atom():
    atom = np.array([[0, 2, -1]], np.int32)
    latent, value = linear.latents_of(atom, np.array([[-1.5, 2.0, 0.0]], np.float32), 3)
    assert latent.tolist() == [[3, 2, -1]]
    assert value.tolist() == [[1.5, 2.0, 0.0]]


def test_features_that_never_vary_are_no_obstacle(codes):
    Y, latent, value = codes
    Y = np.c_[Y, np.ones(len(Y), np.float32)]
    _, last = fitted(Y, latent, value, 4)
    assert np.isfinite(last.W).all()
