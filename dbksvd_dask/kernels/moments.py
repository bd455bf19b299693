"""Sums over samples and residual, per feature and per row, and how sums of blocks merge.

One block of rows gives one `Moments`: partial sums in float64. Blocks merge by addition, in one fixed order, so
the bits are the same on one thread and on a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.kernels._jit import inner, jit, kernel_input


@inner
def _add_four(a, b, c, d, total, square):
    """Add four rows to the sums per feature; return the four squared norms."""
    sa = 0.0
    sb = 0.0
    sc = 0.0
    sd = 0.0
    for j in range(total.shape[0]):
        va = np.float64(a[j])
        vb = np.float64(b[j])
        vc = np.float64(c[j])
        vd = np.float64(d[j])
        qa = va * va
        qb = vb * vb
        qc = vc * vc
        qd = vd * vd
        total[j] += (va + vb) + (vc + vd)
        square[j] += (qa + qb) + (qc + qd)
        sa += qa
        sb += qb
        sc += qc
        sd += qd
    return sa, sb, sc, sd


@inner
def _add_one(a, total, square):
    """Add one row to the sums per feature; return its squared norm."""
    norm = 0.0
    for j in range(total.shape[0]):
        v = np.float64(a[j])
        q = v * v
        total[j] += v
        square[j] += q
        norm += q
    return norm


@jit
def column_sums(A, total, square, norms):
    """Write sums and square sums per column, and the norm of every row, to the given arrays.

    Parameters
    ----------
    A : ndarray of shape (n_samples, n_features), C-contiguous
    total, square : float64 ndarray of shape (n_features,), zero on entry
    norms : float64 ndarray of shape (n_samples,)
    """
    n = A.shape[0]
    whole = n - n % 4
    for i in range(0, whole, 4):
        sa, sb, sc, sd = _add_four(A[i], A[i + 1], A[i + 2], A[i + 3], total, square)
        norms[i] = math.sqrt(sa)
        norms[i + 1] = math.sqrt(sb)
        norms[i + 2] = math.sqrt(sc)
        norms[i + 3] = math.sqrt(sd)
    for i in range(whole, n):
        norms[i] = math.sqrt(_add_one(A[i], total, square))


@jit
def relative_error_sum(y_norms, r_norms):
    """Sum of ``|r| / |y|`` over the rows with ``|y| > 0``, and the number of those rows."""
    total = 0.0
    count = 0
    for i in range(y_norms.shape[0]):
        if y_norms[i] > 0.0:
            total += r_norms[i] / y_norms[i]
            count += 1
    return total, count


# ---------------------------------------------------------------------------------------------- mergeable sums

Float64Array = NDArray[np.float64]


class Mergeable(Protocol):
    """Partial sums of a block of rows, which two blocks combine without changing either."""

    def merge(self, other: Self) -> Self:
        """Return the sums of both."""
        ...


M = TypeVar("M", bound=Mergeable)


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

    def with_residual(self, residual: ResidualMoments) -> Moments:
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


def moments(Y: NDArray[Any], R: NDArray[Any]) -> Moments:
    """Compute partial sums of samples and residual.

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
    return moments_and_norms(Y, R)[0]


def moments_and_norms(Y: NDArray[Any], R: NDArray[Any]) -> tuple[Moments, Float64Array]:
    """`moments` together with `row_norms` of the samples, which come from the same pass.

    Parameters
    ----------
    Y, R : ndarray of shape (n_samples, n_features)

    Returns
    -------
    sums : Moments
    y_norms : float64 ndarray of shape (n_samples,)
    """
    if Y.shape != R.shape:
        raise InputError(f"samples have shape {Y.shape} but the residual has {R.shape}; they must be equal")
    y_sum, y_square_sum, y_norms = _sums(Y)
    r_sum, r_square_sum, r_norms = _sums(R)
    error, n_nonzero = relative_error_sum(y_norms, r_norms)
    sums = Moments(int(Y.shape[0]), int(n_nonzero), float(error), y_sum, y_square_sum, r_sum, r_square_sum)
    return sums, y_norms


def residual_moments(R: NDArray[Any], y_norms: Float64Array | None = None) -> ResidualMoments:
    """Compute partial sums of a residual alone, for rows whose samples are already summed.

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
    """Compute the Euclidean norm of every row.

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


def _require_same_width(a: Float64Array, b: Float64Array) -> None:
    if a.shape != b.shape:
        raise InputError(f"cannot merge sums over {a.size} features with sums over {b.size} features")
