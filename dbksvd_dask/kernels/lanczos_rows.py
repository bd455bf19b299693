"""The steps of `kernels.lanczos` on the host: the same recurrence, row by row while a row is in cache.

Between two passes over the samples every other core waits for these steps. With one numpy operation after another
they took a quarter as long as the passes; here each step reads its arrays once. Old atoms are rows of the
dictionary, ``D[members]``, which is never copied. Sums are in float64.

Rows whose squares leave the range of float32 are measured in units of their own (`_near_one`), as in `lanczos`.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner_uncounted, jit_uncounted, kernel_input, running_max_abs
from dbksvd_dask.kernels.lanczos import _BREAKDOWN, _UNDERFLOW, LanczosState, _projected


@inner_uncounted
def _dot(a, b):
    """Product of two rows, summed in float64."""
    total = 0.0
    for f in range(a.shape[0]):
        total += np.float64(a[f]) * np.float64(b[f])
    return total


@inner_uncounted
def _near_one(w):
    """Multiply a row by a power of two, its largest entry to about one; return the exponent."""
    largest = w.dtype.type(0)
    for f in range(w.shape[0]):
        largest = running_max_abs(largest, w[f])
    if not largest > 0:
        return 0.0
    exponent = min(-np.floor(np.log2(np.float64(largest))), -np.log2(np.float64(np.finfo(w.dtype).tiny)))
    scale = w.dtype.type(2.0**exponent)
    for f in range(w.shape[0]):
        w[f] *= scale
    return exponent


@inner_uncounted
def _measure(w, used, unit):
    """Return the squared norm of a row, brought near one if it is lost to float32, and the factor back."""
    norm2 = _dot(w, w)
    if unit == 0 and not (used and (norm2 < _UNDERFLOW or not np.isfinite(norm2))):
        return norm2, 1.0
    exponent = _near_one(w)
    return _dot(w, w), 2.0 ** (unit - exponent)


@inner_uncounted
def _normalise(w, norm2):
    """Divide a row by its norm; a row of norm 0 becomes zero."""
    scale = w.dtype.type(1.0 / np.sqrt(norm2) if norm2 > 0 else 0.0)
    for f in range(w.shape[0]):
        w[f] *= scale


@inner_uncounted
def _sum_rows(W, old, share, w):
    """Write the sums of one atom with their share of the old atom: w = W + share * old."""
    a = w.dtype.type(share)
    for f in range(w.shape[0]):
        w[f] = W[f] + a * old[f]


@jit_uncounted
def _warm_start(W, x2, D, members, unit, v, alpha2, dv):
    for j in range(W.shape[0]):
        w, old = v[j], D[members[j]]
        _sum_rows(W[j], old, x2[j] * 2.0**-unit, w)
        norm2, factor = _measure(w, x2[j] > 0, unit)
        _normalise(w, norm2)
        alpha2[j] = norm2 * factor * factor / x2[j] if x2[j] > 0 else 0.0
        dv[j] = _dot(old, w)


@jit_uncounted
def _begin_step(W, sx, s2, D, members, unit, w, before, factor):
    for j in range(W.shape[0]):
        _sum_rows(W[j], D[members[j]], sx[j] * 2.0**-unit, w[j])
        before[j], factor[j] = _measure(w[j], s2[j] > 0, unit)


@jit_uncounted
def _project_out(w, v):
    """Subtract from each row its projection on the matching row of v."""
    for j in range(w.shape[0]):
        row, other = w[j], v[j]
        a = w.dtype.type(_dot(row, other))
        for f in range(row.shape[0]):
            row[f] -= a * other[f]


@jit_uncounted
def _end_step(w, before, factor, D, members, gamma, dv):
    for j in range(w.shape[0]):
        norm2 = _dot(w[j], w[j])
        norm2 = norm2 if norm2 > _BREAKDOWN * before[j] else 0.0
        _normalise(w[j], norm2)
        gamma[j] = np.sqrt(norm2) * factor[j]
        dv[j] = _dot(D[members[j]], w[j])


@jit_uncounted
def _add_scaled(v, g, new):
    """Add the rows of v times g to those of new."""
    for j in range(v.shape[0]):
        a, row, out = v.dtype.type(g[j]), v[j], new[j]
        for f in range(row.shape[0]):
            out[f] += a * row[f]


@jit_uncounted
def _finish(new, D, members):
    """Normalise new atoms, give them the sign of the old ones, and keep the old one where there is no new one."""
    for j in range(new.shape[0]):
        row, old = new[j], D[members[j]]
        norm2 = _dot(row, row)
        alive = norm2 > 0 and np.isfinite(norm2)
        _normalise(row, norm2)
        # a comparison, never sign(): the sign of zero would wipe the atom out
        turned = alive and _dot(row, old) < 0
        for f in range(row.shape[0]):
            value = -row[f] if turned else row[f]
            row[f] = value if alive else old[f]


# ---------------------------------------------------------------------------------------------- on whole rounds


def warm_start(W: np.ndarray, x2: np.ndarray, D: np.ndarray, members: np.ndarray, unit: int = 0) -> LanczosState:
    """Compute the first vector of every atom from the sums of the warm start.

    Parameters
    ----------
    W : (n_local, d), sums of ``x_i R_i``;  x2 : (n_local,) float64, sums of ``x_i^2``
    D : (n_atoms, d), the current atoms;  members : (n_local,) the round's
    unit : exponent of the units of the sums
    """
    n, v = W.shape[0], np.empty_like(W)
    alpha2, dv = np.empty(n), np.empty(n, W.dtype)
    _warm_start(kernel_input(W), kernel_input(x2), kernel_input(D), kernel_input(members), unit, v, alpha2, dv)
    return LanczosState((v,), alpha2, (), (), dv)


def advance(
    state: LanczosState,
    W: np.ndarray,
    sx: np.ndarray,
    s2: np.ndarray,
    D: np.ndarray,
    members: np.ndarray,
    unit: int = 0,
) -> LanczosState:
    """Take one further step, from the sums of `kernels.update.next_products`; arguments as in `warm_start`."""
    D, members, n = kernel_input(D), kernel_input(members), W.shape[0]
    w, before, factor, gamma = np.empty_like(W), np.empty(n), np.empty(n), np.empty(n)
    dv = np.empty(n, W.dtype)
    _begin_step(kernel_input(W), kernel_input(sx), kernel_input(s2), D, members, unit, w, before, factor)
    # Against every earlier vector, twice over the newest: three-term recurrences lose orthogonality in float32.
    for v in (*state.basis, state.basis[-1]):
        _project_out(w, kernel_input(v))
    _end_step(w, before, factor, D, members, gamma, dv)
    return LanczosState((*state.basis, w), state.alpha2, (*state.diagonal, s2), (*state.off, gamma), dv)


def leading_vectors(state: LanczosState, D: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Compute the new atoms of the round, as `lanczos.leading_vectors` does: (n_local, d)."""
    if len(state.basis) == 1:
        new = np.array(state.basis[0])
    else:
        new = np.zeros_like(state.basis[0])
        for v, g in zip(state.basis, _leading(state), strict=True):
            _add_scaled(kernel_input(v), np.ascontiguousarray(g), new)
    _finish(new, kernel_input(D), kernel_input(members))
    return new


def _leading(state: LanczosState) -> np.ndarray:
    """Return the leading eigenvectors of ``B^T B``, one row per entry: (steps, n_local)."""
    A = _projected(state)
    if A.shape[1] > 2:
        return np.linalg.eigh(A)[1][:, :, -1].T
    # of a symmetric 2 x 2 matrix by its angle: LAPACK takes a hundred times as long
    angle = 0.5 * np.arctan2(2 * A[:, 0, 1], A[:, 0, 0] - A[:, 1, 1])
    return np.stack([np.cos(angle), np.sin(angle)])
