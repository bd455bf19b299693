"""Mergeable measurements of a reconstruction: relative error, variance explained, FVU.

One block of rows gives one `Moments`: partial sums in float64. Blocks merge by addition, so that any number
of chunks, merged in one fixed order, gives the same bits on one thread and on a cluster.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.moments import column_sums, relative_error_sum

Float64Array = NDArray[np.float64]


class Mergeable(Protocol):
    """Partial sums of a block of rows, which two blocks combine without changing either."""

    def merge(self, other: Self) -> Self:
        """Return the sums of both."""
        ...


M = TypeVar("M", bound=Mergeable)

# A feature counts as constant when its variance is at most this fraction of the mean variance over features.
# Six decades below the mean it is a constant with rounding noise, and its quotient var(r) / var(y) would
# swamp the mean over all others.
VARIANCE_RTOL = 1e-6

# ... or at most this fraction of its own mean square: below it the variance is what float64 sums leave of
# E[y^2] - E[y]^2 after cancellation (2^-52 times some hundreds of roundings), not a property of the data.
CANCELLATION_RTOL = 1e-13


@dataclass(frozen=True, eq=False)
class ResidualMoments:
    """Partial sums of the residual of one block of rows.

    Attributes
    ----------
    n_samples : int
    relative_error_sum : float
        Sum of ``|r_i| / |y_i|``; nan when the norms of the samples were not given.
    r_sum, r_square_sum : float64 ndarray of shape (n_features,)
    """

    n_samples: int
    relative_error_sum: float
    r_sum: Float64Array
    r_square_sum: Float64Array

    def merge(self, other: Self) -> Self:
        """Return the sums of both blocks; neither is changed."""
        _require_same_width(self.r_sum, other.r_sum)
        return type(self)(
            self.n_samples + other.n_samples,
            self.relative_error_sum + other.relative_error_sum,
            self.r_sum + other.r_sum,
            self.r_square_sum + other.r_square_sum,
        )


@dataclass(frozen=True, eq=False)
class Moments:
    """Partial sums of the samples and the residual of one block of rows.

    Attributes
    ----------
    n_samples : int
    n_nonzero_rows : int
        Rows with ``|y_i| > 0``; only these enter the relative error.
    relative_error_sum : float
        Sum of ``|r_i| / |y_i|`` over those rows.
    y_sum, y_square_sum, r_sum, r_square_sum : float64 ndarray of shape (n_features,)
    """

    n_samples: int
    n_nonzero_rows: int
    relative_error_sum: float
    y_sum: Float64Array
    y_square_sum: Float64Array
    r_sum: Float64Array
    r_square_sum: Float64Array

    def merge(self, other: Self) -> Self:
        """Return the sums of both blocks; neither is changed."""
        _require_same_width(self.y_sum, other.y_sum)
        return type(self)(
            self.n_samples + other.n_samples,
            self.n_nonzero_rows + other.n_nonzero_rows,
            self.relative_error_sum + other.relative_error_sum,
            self.y_sum + other.y_sum,
            self.y_square_sum + other.y_square_sum,
            self.r_sum + other.r_sum,
            self.r_square_sum + other.r_square_sum,
        )

    def with_residual(self, residual: ResidualMoments) -> "Moments":
        """Return the same samples with the sums of a newer residual of the same rows."""
        if residual.n_samples != self.n_samples:
            raise InputError(
                f"the residual covers {residual.n_samples} rows but the samples {self.n_samples}; "
                "pass the residual of the same rows"
            )
        _require_same_width(self.y_sum, residual.r_sum)
        return replace(
            self,
            relative_error_sum=residual.relative_error_sum,
            r_sum=residual.r_sum,
            r_square_sum=residual.r_square_sum,
        )


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


def moments(Y: NDArray[Any], R: NDArray[Any]) -> Moments:
    """Partial sums of samples and residual.

    Parameters
    ----------
    Y : ndarray of shape (n_samples, n_features)
        Samples, as they were encoded.
    R : ndarray of shape (n_samples, n_features)
        Residual ``Y - X D``.

    Returns
    -------
    Moments
    """
    if Y.shape != R.shape:
        raise InputError(f"samples have shape {Y.shape} but the residual has {R.shape}; they must be equal")
    y_sum, y_square_sum, y_norms = _sums(Y)
    r_sum, r_square_sum, r_norms = _sums(R)
    error, n_nonzero = relative_error_sum(y_norms, r_norms)
    return Moments(int(Y.shape[0]), int(n_nonzero), float(error), y_sum, y_square_sum, r_sum, r_square_sum)


def residual_moments(R: NDArray[Any], y_norms: Float64Array | None = None) -> ResidualMoments:
    """Partial sums of a residual alone, for rows whose samples are already summed.

    Parameters
    ----------
    R : ndarray of shape (n_samples, n_features)
    y_norms : float64 ndarray of shape (n_samples,), optional
        `row_norms` of the samples; without them the relative error is nan.

    Returns
    -------
    ResidualMoments
    """
    r_sum, r_square_sum, r_norms = _sums(R)
    error = np.nan if y_norms is None else relative_error_sum(y_norms, r_norms)[0]
    return ResidualMoments(int(R.shape[0]), float(error), r_sum, r_square_sum)


def row_norms(A: NDArray[Any]) -> Float64Array:
    """Euclidean norm of every row.

    Parameters
    ----------
    A : ndarray of shape (n_samples, n_features)

    Returns
    -------
    float64 ndarray of shape (n_samples,)
    """
    return _sums(A)[2]


def merge_moments(parts: Iterable[M]) -> M:
    """Merge partial sums from left to right; the order of `parts` fixes the bits of the result.

    Parameters
    ----------
    parts : iterable of Moments, or of any other class with a pure ``merge``

    Returns
    -------
    The same class, with the sums of all parts.
    """
    merged: M | None = None
    for part in parts:
        merged = part if merged is None else merged.merge(part)
    if merged is None:
        raise InputError("no blocks to merge; pass at least one block of rows")
    return merged


def mean_relative_error(m: Moments) -> float:
    """``mean_i |y_i - x_i D| / |y_i|`` over the rows with ``|y_i| > 0``; nan when there is none."""
    return m.relative_error_sum / m.n_nonzero_rows if m.n_nonzero_rows else float("nan")


def variance_explained(m: Moments, rtol: float = VARIANCE_RTOL) -> VarianceExplained:
    """Per-feature variance explained, ``1 - mean_j var((Y - XD)_j) / var(Y_j)``.

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
    """Fraction of variance unexplained, ``sum |y - yhat|^2 / sum |y - mean|^2``; nan for constant samples."""
    total = float(np.sum(_variance(m.y_sum, m.y_square_sum, m.n_samples)) * m.n_samples)
    return float(np.sum(m.r_square_sum)) / total if total > 0.0 else float("nan")


def fvu_explained(m: Moments) -> float:
    """Return ``1 - fvu``: the share of the total variance that the reconstruction explains."""
    return 1.0 - fvu(m)


def _sums(A: NDArray[Any]) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Give sums, square sums per feature and norms per row of any real array."""
    if A.ndim != 2:
        raise InputError(f"expected an array of shape (n_samples, n_features), received shape {A.shape}")
    block = kernel_input(A, np.float32 if A.dtype in (np.float16, np.float32) else np.float64)
    total = np.zeros(A.shape[1])
    square = np.zeros(A.shape[1])
    norms = np.empty(A.shape[0])
    column_sums(block, total, square, norms)
    return total, square, norms


def _variance(total: Float64Array, square: Float64Array, n: int) -> Float64Array:
    """Give the population variance per feature from its sums, never below zero."""
    if n == 0:
        return np.zeros_like(total)
    mean = total / n
    return np.maximum(square / n - mean * mean, 0.0)


def _require_same_width(a: Float64Array, b: Float64Array) -> None:
    if a.shape != b.shape:
        raise InputError(f"cannot merge sums over {a.size} features with sums over {b.size} features")
