"""Measurements of a reconstruction from its moments: relative error, variance explained, FVU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dbksvd_dask.kernels.moments import Float64Array, Moments

# A feature counts as constant when its variance is at most this fraction of the mean variance over features.
# Six decades below the mean it is a constant with rounding noise, and its quotient var(r) / var(y) would
# swamp the mean over all others.
VARIANCE_RTOL = 1e-6

# ... or at most this fraction of its own mean square: below it the variance is what float64 sums leave of
# E[y^2] - E[y]^2 after cancellation (2^-52 times some hundreds of roundings), not a property of the data.
CANCELLATION_RTOL = 1e-13


class VarianceExplained(NamedTuple):
    """The per-feature variance explained, and what was left out of its mean.

    Attributes
    ----------
    value : float
        ``1 - mean_j var(r_j) / var(y_j)``; nan when every feature is constant.
    n_left_out : int
        Features left out because they are constant or nearly so.
    threshold : float
        Variance at or below which a feature was left out.
    """

    value: float
    n_left_out: int
    threshold: float


def mean_relative_error(m: Moments) -> float:
    """Compute ``mean_i |y_i - x_i D| / |y_i|`` over the rows with ``|y_i| > 0``; nan when there is none."""
    return m.relative_error_sum / m.n_nonzero_rows if m.n_nonzero_rows else float("nan")


def variance_explained(m: Moments, rtol: float = VARIANCE_RTOL) -> VarianceExplained:
    """Compute the per-feature variance explained, ``1 - mean_j var((Y - XD)_j) / var(Y_j)``.

    Parameters
    ----------
    m : Moments
    rtol : float, default VARIANCE_RTOL
        A feature is left out when its variance is at most `rtol` times the mean variance of all features, or
        so far below its own mean square (`CANCELLATION_RTOL`) that float64 sums cannot resolve it.

    Returns
    -------
    VarianceExplained
    """
    y_var = _variance(m.y_sum, m.y_square_sum, m.n_samples)
    r_var = _variance(m.r_sum, m.r_square_sum, m.n_samples)
    threshold = float(rtol * y_var.mean()) if y_var.size else float("nan")
    resolved = y_var > CANCELLATION_RTOL * m.y_square_sum / max(m.n_samples, 1)
    used = (y_var > threshold) & resolved
    n_left_out = int(used.size - np.count_nonzero(used))
    if not used.any():
        return VarianceExplained(float("nan"), n_left_out, threshold)
    return VarianceExplained(float(1.0 - np.mean(r_var[used] / y_var[used])), n_left_out, threshold)


def fvu(m: Moments) -> float:
    """Compute the variance unexplained, ``sum |y - yhat|^2 / sum |y - mean|^2``; nan for constant samples."""
    total = float(np.sum(_variance(m.y_sum, m.y_square_sum, m.n_samples)) * m.n_samples)
    return float(np.sum(m.r_square_sum)) / total if total > 0.0 else float("nan")


def fvu_explained(m: Moments) -> float:
    """Return ``1 - fvu``: the share of the total variance that the reconstruction explains."""
    return 1.0 - fvu(m)


def _variance(total: Float64Array, square: Float64Array, n: int) -> Float64Array:
    """Return the population variance per feature from its sums, never below zero."""
    if n == 0:
        return np.zeros_like(total)
    mean = total / n
    return np.maximum(square / n - mean * mean, 0.0)
