"""One pass over samples and residual: sums per feature and relative error per row.

Plain formula, for every feature ``j`` and row ``i``, all sums in float64::

    y_sum[j] += Y[i, j];  y_square_sum[j] += Y[i, j] ** 2        (the same for R)
    error += sqrt(sum_j R[i, j] ** 2) / sqrt(sum_j Y[i, j] ** 2)   where the denominator is > 0

Rows are walked four at a time, so that the float64 sums per feature are read and written once for four rows;
with one row at a time that traffic, not the reading of the data, sets the speed.
"""

import math

import numpy as np

from dbksvd_dask.kernels._jit import inner, jit


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
