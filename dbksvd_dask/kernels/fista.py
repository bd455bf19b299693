"""Lasso codes in the gram domain: FISTA along a path of falling penalties, then least squares on k atoms.

For one sample with products ``b = D y`` the lasso at penalty ``l`` minimises ``|y - x D|^2 / 2 + l |x|_1``. Its
gradient does not need the sample: ``gram x - b``. One step of FISTA (Beck and Teboulle, 2009) is::

    x_new = shrink(z - (gram z - b) / L, l / L)            # L: bound on the largest eigenvalue of the gram
    z = x_new + (t - 1) / t_new * (x_new - x)              # momentum; restarted when it points uphill

The penalty falls from ``max |b|``, where x = 0 is the solution, until ``2 k`` atoms have a coefficient; the k
largest stay and are refitted. A solution has few nonzeros, so each step works on a small set of atoms: those that
have a coefficient, and those that the optimality conditions ask for, ``|p| > l`` with the products
``p = b - gram x`` of the residual.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dbksvd_dask.kernels._jit import inner, inner_uncounted, jit
from dbksvd_dask.kernels.pursuit import clear_slots, find_slot, noise_floor, refit_row, refit_row_nonneg
from dbksvd_dask.plan.encoder import EncodeSpec

# Factor from one penalty to the next, and share of the first penalty at which a path ends (as in glmnet).
PATH_RATIO, PATH_END = 0.75, 0.01
# Where atoms crowd, penalties lie closer together, and the last one is solved until no atom is missing.
MOST_SOLVES = 100
# Coefficients per slot at which a path ends. With one, the penalty still hides small coefficients: of the 10 atoms
# that made a sample (of 500, 79 features, non-negative) 8.7 were found; with two 9.9; with three all, in twice
# the time.
PER_SLOT = 2
# A solve ends when no coefficient moves by more than this share of the penalty (as a gradient): on the way, where
# it only starts the next solve, and at the end of the path.
ON_THE_WAY, AT_THE_END = 0.05, 1e-4
# Most FISTA steps of one solve. With restarts tens are usual; nearly dependent atoms take more.
MOST_STEPS = 500
# The lasso shares a coefficient among atoms that nearly coincide. One whose part outside the span of the atoms
# before it has a squared norm below this keeps the lasso's coefficient: a refit would only amplify rounding.
DEPENDENT = 1e-6


class Working(NamedTuple):
    """The atoms that a solve works on, in the first places of arrays of the same capacity c, and scratch."""

    atom: np.ndarray  # (c,) int64
    x: np.ndarray  # (c,) coefficients
    b: np.ndarray  # (c,) products with the sample
    A: np.ndarray  # (c, c) gram of these atoms
    p: np.ndarray  # (n_atoms,) products of all atoms with the residual
    z: np.ndarray  # (c,) scratch
    gradient: np.ndarray  # (c,) scratch
    kept: np.ndarray  # (c,) int64 scratch


@inner
def working_set(limit, m, dtype):
    """Make an empty working set: room for `limit` atoms with a coefficient, and for as many newcomers."""
    c = min(m, 2 * limit + 32)
    x, b, z, gradient = np.empty(c, dtype), np.empty(c, dtype), np.empty(c, dtype), np.empty(c, dtype)
    A, p = np.empty((c, c), dtype), np.empty(m, dtype)
    return Working(np.empty(c, np.int64), x, b, A, p, z, gradient, np.empty(c, np.int64))


@inner_uncounted
def _copy(source, out, n):
    """Copy n numbers; assigning a slice would compile the text of numpy's error too, for seconds."""
    for i in range(n):
        out[i] = source[i]


@inner_uncounted
def _size(v, nonneg):
    """What of a product can become a coefficient."""
    return v if nonneg else abs(v)


@inner_uncounted
def _shrink(v, by, nonneg):
    """Move v towards zero by `by`, and no further; a negative v becomes zero if `nonneg`."""
    if v > by:
        return v - by
    if not nonneg and v < -by:
        return v + by
    return v * 0


@inner_uncounted
def _row_sum_bound(A, n):
    """Bound on the largest eigenvalue of the leading n x n block: its largest absolute row sum."""
    bound = 0.0
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += abs(A[i, j])
        bound = max(bound, total)
    return bound


@inner_uncounted
def _gradient(A, b, z, n, out):
    """Write A z - b to out; rows of A whose entry of z is zero are skipped."""
    for i in range(n):
        out[i] = -b[i]
    for j in range(n):
        if z[j] != 0:
            row, a = A[j], z[j]
            for i in range(n):
                out[i] += a * row[i]


@inner_uncounted
def _step(x, z, gradient, rate, by, momentum, nonneg, n):
    """One step from z: the largest move, and whether momentum pointed uphill (positive)."""
    moved = 0.0
    uphill = 0.0
    for i in range(n):
        new = _shrink(z[i] - rate * gradient[i], by, nonneg)
        ahead, back = new - x[i], z[i] - new
        moved = max(moved, abs(np.float64(back)))
        uphill += np.float64(back) * np.float64(ahead)
        x[i] = new
        z[i] = new + momentum * ahead
    return moved, uphill


@inner_uncounted
def solve(w, n, penalty, nonneg, tolerance):
    """Lasso of the first n atoms of a working set by FISTA with restarts, from the coefficients at hand."""
    kind = w.x.dtype.type
    bound = _row_sum_bound(w.A, n)
    rate, by = kind(1.0 / bound), kind(penalty / bound)
    _copy(w.x, w.z, n)
    t = 1.0
    for _ in range(MOST_STEPS):
        t_new = (1.0 + np.sqrt(1.0 + 4.0 * t * t)) / 2.0
        _gradient(w.A, w.b, w.z, n, w.gradient)
        moved, uphill = _step(w.x, w.z, w.gradient, rate, by, kind((t - 1.0) / t_new), nonneg, n)
        if moved * bound <= tolerance * penalty:
            break
        t = t_new
        if uphill > 0.0:
            t = 1.0
            _copy(w.x, w.z, n)


@inner_uncounted
def _forget_zeros(w, n):
    """Take atoms without a coefficient out of the working set; returns the number left."""
    left = 0
    for i in range(n):
        if w.x[i] != 0:
            w.kept[left] = i
            left += 1
    for i in range(left):
        k = w.kept[i]
        w.atom[i], w.b[i], w.x[i] = w.atom[k], w.b[k], w.x[k]
        for j in range(left):
            w.A[i, j] = w.A[k, w.kept[j]]
    return left


@inner_uncounted
def _add(w, n, j, product, gram_row):
    """Put atom j at place n of the working set."""
    w.atom[n], w.b[n], w.x[n] = j, product, 0
    for i in range(n + 1):
        w.A[n, i] = gram_row[w.atom[i]]
        w.A[i, n] = w.A[n, i]


@inner_uncounted
def _admit(w, n, products, gram, penalty, nonneg):
    """Add the atoms whose product with the residual exceeds the penalty, while there is room; returns all."""
    before = n
    for j in range(w.p.shape[0]):
        if _size(w.p[j], nonneg) > penalty and n < w.atom.shape[0]:
            if find_slot(w.atom, 0, before, j) == before:
                _add(w, n, j, products[j], gram[j])
                n += 1
    return n


@inner_uncounted
def _subtract(w, n, products, gram):
    """Bring the products with the residual up to date, four atoms at a time to save passes over them."""
    p, m = w.p, w.p.shape[0]
    _copy(products, p, m)
    s = 0
    while s + 4 <= n:
        g0, g1, g2, g3 = gram[w.atom[s]], gram[w.atom[s + 1]], gram[w.atom[s + 2]], gram[w.atom[s + 3]]
        x0, x1, x2, x3 = w.x[s], w.x[s + 1], w.x[s + 2], w.x[s + 3]
        for t in range(m):
            p[t] -= x0 * g0[t] + x1 * g1[t] + x2 * g2[t] + x3 * g3[t]
        s += 4
    while s < n:
        g0, x0 = gram[w.atom[s]], w.x[s]
        for t in range(m):
            p[t] -= x0 * g0[t]
        s += 1


@inner_uncounted
def _count_above(p, penalty, nonneg):
    """Number of products above a penalty."""
    count = 0
    for j in range(p.shape[0]):
        count += _size(p[j], nonneg) > penalty
    return count


@inner_uncounted
def _next_penalty(p, penalty, lowest, nonneg, room):
    """The next penalty of a path; nearer to the last one where more atoms would come than there is room for."""
    following = max(PATH_RATIO * penalty, lowest)
    for _ in range(6):
        if _count_above(p, following, nonneg) <= room:
            break
        following = (following + penalty) / 2.0
    return following


@inner_uncounted
def _residual2(w, n, norm2):
    """Squared norm of the residual, ``|y|^2 - x (b + p)``."""
    left = norm2
    for i in range(n):
        left -= np.float64(w.x[i]) * (np.float64(w.b[i]) + np.float64(w.p[w.atom[i]]))
    return left


@inner_uncounted
def lasso_row(products, gram, norm2, limit, target, lowest, nonneg, w):
    """Follow the path of one sample, and solve at its end.

    Parameters
    ----------
    products : (n_atoms,) products with the sample
    limit : coefficients at which the path ends
    target : squared norm of the residual at which it ends, or 0
    lowest : penalty at which it ends, positive
    w : Working, out: coefficients in its first n places

    Returns
    -------
    n : number of coefficients
    penalty : at the end of the path
    """
    n = 0
    _copy(products, w.p, w.p.shape[0])
    penalty = 0.0
    for j in range(w.p.shape[0]):
        penalty = max(penalty, np.float64(_size(w.p[j], nonneg)))
    lowest = max(lowest, PATH_END * penalty)
    exact = False
    for _ in range(MOST_SOLVES):
        # an approximate solution may have too many coefficients: the path goes on if the exact one has not
        at_end = not penalty > lowest or n >= limit or (target > 0 and _residual2(w, n, norm2) <= target)
        if not at_end:
            penalty = _next_penalty(w.p, penalty, lowest, nonneg, w.atom.shape[0] - n)
        before = n
        n = _admit(w, n, products, gram, penalty * (1.0 + AT_THE_END), nonneg)
        if at_end and exact and n == before:
            break
        exact = at_end
        solve(w, n, penalty, nonneg, AT_THE_END if exact else ON_THE_WAY)
        n = _forget_zeros(w, n)
        _subtract(w, n, products, gram)
    return n, penalty


@inner_uncounted
def _keep_largest(w, n, atom, coefficient):
    """Fill the slots of one sample, largest coefficient first, lowest atom among equals."""
    for s in range(min(n, atom.shape[0])):
        best = 0
        for i in range(1, n):
            more, as_much = abs(w.x[i]) > abs(w.x[best]), abs(w.x[i]) == abs(w.x[best])
            if more or (as_much and w.atom[i] < w.atom[best]):
                best = i
        atom[s], coefficient[s] = w.atom[best], w.x[best]
        w.x[best] = 0


@inner_uncounted
def _subtract_on_support(products, gram, atom, coefficient, p):
    """Write products with the residual to p, at the atoms of one sample only; returns their number."""
    used = 0
    while used < atom.shape[0] and atom[used] >= 0:
        used += 1
    for s in range(used):
        row = gram[atom[s]]
        left = np.float64(products[atom[s]])
        for t in range(used):
            left -= np.float64(coefficient[t]) * np.float64(row[atom[t]])
        p[atom[s]] = left
    return used


@jit
def lasso_tile(prods, gram, norm2, k, rtol, min_coefficient, nonneg, atom, coefficient, penalty):
    """Lasso of a tile of samples: the k largest coefficients at the end of each path.

    A path ends when ``2 k`` atoms have a coefficient, at the penalty `min_coefficient` or a hundredth of the first
    penalty, when the residual norm falls to ``rtol * |y|``, or when products are zero to working precision.

    Parameters
    ----------
    prods : (n, n_atoms) products ``Y D^T``
    gram : (n_atoms, n_atoms)
    norm2 : (n,) float64, squared norms of the samples
    atom : (n, k) int32, out; -1 where empty
    coefficient : (n, k) out, largest first
    penalty : (n,) float64, out: at the end of the path
    """
    limit = PER_SLOT * k
    w = working_set(limit, prods.shape[1], prods.dtype)
    for i in range(prods.shape[0]):
        clear_slots(atom[i], coefficient[i])
        lowest = noise_floor(min_coefficient, norm2[i], prods.dtype)
        n, penalty[i] = lasso_row(prods[i], gram, norm2[i], limit, rtol * rtol * norm2[i], lowest, nonneg, w)
        _keep_largest(w, n, atom[i], coefficient[i])


@jit
def refit_tile(prods, gram, nonneg, atom, coefficient):
    """Least squares on the atoms of each sample of a tile, non-negative if asked for, from its coefficients.

    Parameters
    ----------
    prods : (n, n_atoms) products ``Y D^T``
    gram : (n_atoms, n_atoms)
    atom : (n, k) int32, -1 where empty
    coefficient : (n, k), in and out
    """
    k = atom.shape[1]
    p = np.empty(prods.shape[1], prods.dtype)
    A, delta = np.empty((k, k), np.float64), np.empty(k, np.float64)
    for i in range(prods.shape[0]):
        used = _subtract_on_support(prods[i], gram, atom[i], coefficient[i], p)
        if nonneg:
            refit_row_nonneg(p, gram, used, atom[i], coefficient[i], A, delta)
        else:
            refit_row(p, gram, used, atom[i], coefficient[i], A, delta, DEPENDENT)


def encode_tile(
    prods: np.ndarray,
    gram: np.ndarray,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode one tile by the lasso; see `kernels.encode.TileEncoder`."""
    rtol, smallest = float(spec.rtol), float(spec.min_coefficient)
    penalty = np.empty(prods.shape[0])
    lasso_tile(prods, gram, norm2, spec.k, rtol, smallest, spec.nonneg, atom, coefficient, penalty)
    refit_tile(prods, gram, spec.nonneg, atom, coefficient)
