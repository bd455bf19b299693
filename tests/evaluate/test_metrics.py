"""Relative error, variance explained and FVU: equal to the plain formula, mergeable, stable."""

import numpy as np
import pytest
from sklearn.metrics import r2_score

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate import metrics
from dbksvd_dask.kernels import moments
from tests.naive import metrics as naive


def make(rng, n=101, d=17, dtype=np.float32, offset=0.0):
    Y = (rng.standard_normal((n, d)) * rng.uniform(0.1, 3, d) + offset).astype(dtype)
    R = (0.3 * rng.standard_normal((n, d)) + 0.05).astype(dtype)
    return Y, R


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 101])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_equal_the_plain_sums(n, dtype):
    Y, R = make(np.random.default_rng(n), n=n, dtype=dtype)
    m = moments.moments(Y, R)
    Y, R = Y.astype(np.float64), R.astype(np.float64)
    assert m.n_samples == n
    np.testing.assert_allclose(m.y_sum, Y.sum(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(m.y_square_sum, (Y**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(m.r_sum, R.sum(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(m.r_square_sum, (R**2).sum(0), rtol=1e-12)


def test_numbers_equal_their_twins():
    Y, R = make(np.random.default_rng(0), offset=2.0)
    m = moments.moments(Y, R)
    assert metrics.mean_relative_error(m) == pytest.approx(naive.mean_relative_error(Y, R), rel=1e-6)
    value, left_out = naive.variance_explained(Y, R, metrics.VARIANCE_RTOL)
    assert metrics.variance_explained(m).value == pytest.approx(value, rel=1e-6)
    assert metrics.variance_explained(m).n_left_out == left_out == 0
    assert metrics.fvu(m) == pytest.approx(naive.fvu(Y, R), rel=1e-6)
    assert metrics.fvu_explained(m) == pytest.approx(1 - naive.fvu(Y, R), rel=1e-6)


def test_fvu_explained_is_sklearns_variance_weighted_r2():
    Y, R = make(np.random.default_rng(1), dtype=np.float64)
    expected = r2_score(Y, Y - R, multioutput="variance_weighted")
    assert metrics.fvu_explained(moments.moments(Y, R)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cuts", [(1,), (50,), (3, 4, 99), (20, 40, 60, 80)])
def test_streaming_equals_in_memory(cuts):
    Y, R = make(np.random.default_rng(2))
    whole = moments.moments(Y, R)
    parts = [moments.moments(y, r) for y, r in zip(np.split(Y, cuts), np.split(R, cuts), strict=True)]
    merged = moments.merge_moments(parts)
    assert merged.n_samples == whole.n_samples
    assert metrics.mean_relative_error(merged) == pytest.approx(metrics.mean_relative_error(whole), rel=1e-12)
    assert metrics.variance_explained(merged).value == pytest.approx(
        metrics.variance_explained(whole).value, rel=1e-12
    )
    assert metrics.fvu(merged) == pytest.approx(metrics.fvu(whole), rel=1e-12)


def test_merge_in_one_order_gives_the_same_bits_and_changes_nothing():
    Y, R = make(np.random.default_rng(3))
    parts = [moments.moments(Y[i : i + 10], R[i : i + 10]) for i in range(0, 100, 10)]
    before = [p.y_sum.copy() for p in parts]
    a, b = moments.merge_moments(parts), moments.merge_moments(parts)
    assert a.relative_error_sum == b.relative_error_sum
    np.testing.assert_array_equal(a.r_square_sum, b.r_square_sum)
    for p, y_sum in zip(parts, before, strict=True):
        np.testing.assert_array_equal(p.y_sum, y_sum)


def test_zero_rows_are_left_out_of_the_relative_error():
    Y, R = make(np.random.default_rng(4), n=20)
    Y[[3, 11]] = 0
    m = moments.moments(Y, R)
    assert m.n_nonzero_rows == 18
    assert metrics.mean_relative_error(m) == pytest.approx(naive.mean_relative_error(Y, R), rel=1e-6)


def test_all_zero_samples_have_no_relative_error():
    zeros = np.zeros((5, 3), np.float32)
    m = moments.moments(zeros, zeros)
    assert np.isnan(metrics.mean_relative_error(m))
    assert np.isnan(metrics.fvu(m))
    assert metrics.variance_explained(m) == pytest.approx((np.nan, 3, 0.0), nan_ok=True)


@pytest.mark.parametrize("jitter", [0.0, 1e-6])
def test_nearly_constant_features_are_left_out_and_counted(jitter):
    rng = np.random.default_rng(5)
    Y, R = make(rng, dtype=np.float64)
    Y[:, 4] = 7.0 + jitter * rng.standard_normal(len(Y))
    result = metrics.variance_explained(moments.moments(Y, R))
    keep = np.arange(Y.shape[1]) != 4
    assert result.n_left_out == 1
    assert result.threshold == pytest.approx(metrics.VARIANCE_RTOL * Y.var(0).mean(), rel=1e-9)
    expected = 1 - np.mean(R[:, keep].var(0) / Y[:, keep].var(0))
    assert result.value == pytest.approx(expected, rel=1e-9)


def test_a_constant_feature_in_float32_is_not_taken_for_a_varying_one():
    Y = np.full((4099, 3), np.float32(0.1))
    Y[:, 0] = np.random.default_rng(6).standard_normal(4099) * 1e-9
    m = moments.moments(Y, np.zeros_like(Y))
    assert metrics.variance_explained(m).n_left_out == 2


def test_a_large_common_offset_does_not_change_the_variance():
    Y, R = make(np.random.default_rng(7), n=400, dtype=np.float64)
    near = metrics.variance_explained(moments.moments(Y, R)).value
    far = metrics.variance_explained(moments.moments(Y + 1000.0, R)).value
    assert far == pytest.approx(near, rel=1e-7)


def test_residual_sums_replace_those_of_the_same_rows():
    Y, R = make(np.random.default_rng(8))
    Y[2] = 0
    first = moments.moments(Y, 2 * R)
    newer = first.with_residual(moments.residual_moments(R, moments.row_norms(Y)))
    whole = moments.moments(Y, R)
    assert newer.relative_error_sum == whole.relative_error_sum
    np.testing.assert_array_equal(newer.r_square_sum, whole.r_square_sum)
    np.testing.assert_array_equal(newer.y_sum, whole.y_sum)
    assert np.isnan(moments.residual_moments(R).relative_error_sum)


def test_norms_come_with_the_sums_to_the_last_bit():
    Y, R = make(np.random.default_rng(8))
    sums, norms = moments.moments_and_norms(Y, R)
    np.testing.assert_array_equal(norms, moments.row_norms(Y))
    assert sums.relative_error_sum == moments.moments(Y, R).relative_error_sum


def test_residual_sums_merge():
    Y, R = make(np.random.default_rng(9))
    norms = moments.row_norms(Y)
    merged = moments.merge_moments(
        moments.residual_moments(R[s], norms[s]) for s in (slice(0, 40), slice(40, 101))
    )
    assert merged.n_samples == 101
    assert merged.relative_error_sum == pytest.approx(moments.moments(Y, R).relative_error_sum, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_read_only_strided_and_half_precision_samples_are_accepted(dtype):
    Y, R = make(np.random.default_rng(10), dtype=dtype)
    wide = np.zeros((Y.shape[0], 2 * Y.shape[1]), dtype)
    wide[:, ::2] = Y
    wide.flags.writeable = False
    m = moments.moments(wide[:, ::2], R)
    np.testing.assert_array_equal(m.y_sum, moments.moments(Y, R).y_sum)


def test_wrong_shapes_are_refused():
    Y, R = make(np.random.default_rng(11))
    with pytest.raises(InputError, match=r"samples have shape \(101, 17\) but the residual has \(100, 17\)"):
        moments.moments(Y, R[1:])
    with pytest.raises(InputError, match=r"received shape \(17,\)"):
        moments.residual_moments(R[0])
    with pytest.raises(InputError, match="cannot merge sums over 17 features with sums over 16"):
        moments.moments(Y, R).merge(moments.moments(Y[:, 1:], R[:, 1:]))
    with pytest.raises(InputError, match="covers 100 rows but the samples 101"):
        moments.moments(Y, R).with_residual(moments.residual_moments(R[1:]))
    with pytest.raises(InputError, match="no blocks to merge"):
        moments.merge_moments([])
