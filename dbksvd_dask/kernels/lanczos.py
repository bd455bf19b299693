"""Leading singular vectors of many matrices at once, by a few Golub-Kahan-Lanczos steps.

The new atoms of a round of DB-KSVD (Valentin, Katz, Vanhoucke, Kochenderfer: arXiv:2505.18441). For each atom j of
a round, E (its samples x features) is known only through sums over its rows. From the warm start ``u = x / |x|``
(the current coefficients) the recurrence is::

    alpha_1 v_1 = E^T u                          one pass over the samples
    A v_i       = E^T E v_i                      one pass per further step
    gamma_i v_{i+1} = A v_i - t_i v_i - gamma_{i-1} v_{i-1},   t_i = |E v_i|^2
    beta_i^2 = t_i - alpha_i^2,  alpha_{i+1} = gamma_i / beta_i

so `steps` passes give the exact bidiagonal matrix B of E on a Krylov space of dimension `steps`, whose leading
right singular vector g gives the best vector of the space: ``d_new = sum_i g_i v_i``. The warm start supplies
alpha_1 and so saves the pass that plain Lanczos needs for its last diagonal entry.

All functions take their namespace from their arguments: numpy, CuPy or any array-API library.

Sums come in units: those of samples far from one are made of samples times ``2^unit`` (see `kernels.scale`), and
W, which is squared here, carries one factor ``2^unit`` instead of two.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

# A step whose remainder is below this share of what it was taken from is rounding, not direction (float32).
_BREAKDOWN = 1e-10
# A vector of a smaller squared norm than this has lost digits to float32, whose products end at 2^-126.
_UNDERFLOW = 2.0**-80


class LanczosState(NamedTuple):
    """The recurrence of the atoms of one round, after some steps."""

    basis: tuple[Any, ...]  # vectors v_i, each (n_local, d)
    alpha2: Any  # (n_local,) float64, alpha_1^2
    diagonal: tuple[Any, ...]  # t_i, each (n_local,) float64
    off: tuple[Any, ...]  # gamma_i, each (n_local,) float64
    dv: Any  # (n_local,) products of the old atoms with the newest vector

    @property
    def newest(self) -> LanczosState:
        """The part that the next product takes."""
        return LanczosState(self.basis[-1:], self.alpha2, (), (), self.dv)


def namespace(array: Any) -> Any:
    """Array namespace of `array`: what its `__array_namespace__` says, or CuPy, whose arrays do not say it."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def row_dots(a: Any, b: Any) -> Any:
    """Products of matching rows, summed in float64: (n_local,)."""
    xp = namespace(a)
    return xp.sum(a * b, axis=1, dtype=xp.float64)


def _scaled(a: Any, scale: Any) -> Any:
    """Rows of `a` times `scale` (n_local,), in the dtype of `a`."""
    xp = namespace(a)
    return a * xp.astype(scale, a.dtype)[:, None]


def _normalised(w: Any, norm2: Any) -> Any:
    """Rows of `w` divided by their norms; rows of norm 0 stay zero."""
    xp = namespace(w)
    safe = xp.where(norm2 > 0, norm2, xp.ones_like(norm2))
    return _scaled(w, xp.where(norm2 > 0, 1.0 / xp.sqrt(safe), xp.zeros_like(norm2)))


def _near_one(w: Any) -> tuple[Any, Any]:
    """Rows times powers of two, the largest entry of each about one, and those exponents: (n_local,) float64."""
    xp = namespace(w)
    largest = xp.astype(xp.max(xp.abs(w), axis=1), xp.float64)
    exponent = -xp.floor(xp.log2(xp.where(largest > 0, largest, xp.ones_like(largest))))
    most = -math.log2(xp.finfo(w.dtype).smallest_normal)  # a subnormal row is raised as far as the dtype allows
    exponent = xp.where(exponent > most, xp.full_like(exponent, most), exponent)
    return _scaled(w, 2.0**exponent), exponent


def _measured(w: Any, used: Any, unit: int) -> tuple[Any, Any, Any]:
    """Rows whose squares fit into float32, their squared norms, and the factors back to the units of the sums.

    Rows of ordinary samples are given back as they are.

    Parameters
    ----------
    w : (n_local, d);  used : (n_local,) bool, atoms that have samples

    Returns
    -------
    w : (n_local, d);  norm2 : (n_local,) float64;  factor : (n_local,) float64
    """
    xp = namespace(w)
    if unit == 0:
        norm2 = row_dots(w, w)
        lost = used & ((norm2 < _UNDERFLOW) | ~xp.isfinite(norm2))
        if not bool(xp.any(lost)):
            return w, norm2, xp.ones_like(norm2)
    w, exponent = _near_one(w)
    return w, row_dots(w, w), 2.0 ** (unit - exponent)


def warm_start(W: Any, x2: Any, old: Any, unit: int = 0) -> LanczosState:
    """Compute the first vector of every atom from the sums of the warm start.

    Parameters
    ----------
    W : (n_local, d), sums of ``x_i R_i``;  x2 : (n_local,) float64, sums of ``x_i^2``
    old : (n_local, d), the current atoms
    unit : exponent of the units of the sums
    """
    xp = namespace(W)
    w, norm2, factor = _measured(W + _scaled(old, x2 * 2.0**-unit), x2 > 0, unit)
    v = _normalised(w, norm2)
    norm2 = norm2 * factor * factor
    alpha2 = xp.where(x2 > 0, norm2 / xp.where(x2 > 0, x2, xp.ones_like(x2)), xp.zeros_like(x2))
    return LanczosState((v,), alpha2, (), (), xp.astype(row_dots(old, v), W.dtype))


def advance(state: LanczosState, W: Any, sx: Any, s2: Any, old: Any, unit: int = 0) -> LanczosState:
    """Take one further step, from the sums of `kernels.update.next_products`.

    Parameters
    ----------
    W : (n_local, d), sums of ``s_i R_i``;  sx, s2 : (n_local,) float64, sums of ``s_i x_i`` and ``s_i^2``
    unit : exponent of the units of the sums
    """
    xp = namespace(W)
    w, before, factor = _measured(W + _scaled(old, sx * 2.0**-unit), s2 > 0, unit)
    # Against every earlier vector, twice over the newest: three-term recurrences lose orthogonality in float32.
    for v in (*state.basis, state.basis[-1]):
        w = w - _scaled(v, row_dots(w, v))
    norm2 = row_dots(w, w)
    norm2 = xp.where(norm2 > _BREAKDOWN * before, norm2, xp.zeros_like(norm2))
    v = _normalised(w, norm2)
    return LanczosState(
        (*state.basis, v),
        state.alpha2,
        (*state.diagonal, s2),
        (*state.off, xp.sqrt(norm2) * factor),
        xp.astype(row_dots(old, v), W.dtype),
    )


def _projected(state: LanczosState) -> Any:
    """``B^T B`` of every atom, (n_local, steps, steps) float64: tridiagonal, its last entry alpha_steps^2."""
    xp = namespace(state.alpha2)
    n, steps = state.alpha2.shape[0], len(state.basis)
    zero = xp.zeros_like(state.alpha2)
    alpha2 = state.alpha2
    diagonal = []
    for t, gamma in zip(state.diagonal, state.off, strict=True):
        beta2 = t - alpha2
        converged = beta2 <= _BREAKDOWN * t
        diagonal.append(t)
        alpha2 = xp.where(converged, zero, gamma * gamma / xp.where(converged, xp.ones_like(t), beta2))
    diagonal.append(alpha2)
    rows = []
    for i in range(steps):
        row = [zero] * steps
        row[i] = diagonal[i]
        if i > 0:
            row[i - 1] = state.off[i - 1]
        if i + 1 < steps:
            row[i + 1] = state.off[i]
        rows.append(xp.stack(row, axis=1))
    return xp.reshape(xp.stack(rows, axis=1), (n, steps, steps))


def leading_vectors(state: LanczosState, old: Any) -> Any:
    """Compute the new atoms of the round: unit rows with ``<d_new, d_old> >= 0``; an unused atom stays as it is.

    Parameters
    ----------
    old : (n_local, d), the current atoms
    """
    xp = namespace(old)
    new = state.basis[0]
    if len(state.basis) > 1:
        _, vectors = xp.linalg.eigh(_projected(state))
        new = _scaled(state.basis[0], vectors[:, 0, -1])
        for i in range(1, len(state.basis)):
            new = new + _scaled(state.basis[i], vectors[:, i, -1])
    norm2 = row_dots(new, new)
    new = _normalised(new, norm2)
    # a comparison, never sign(): the sign of zero would wipe the atom out
    new = xp.where((row_dots(new, old) < 0)[:, None], -new, new)
    alive = xp.isfinite(norm2) & (norm2 > 0)
    return xp.where(alive[:, None], new, old)
