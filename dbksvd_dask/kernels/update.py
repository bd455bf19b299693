"""The dictionary update of DB-KSVD on one chunk of samples, row by row.

The method is that of Valentin, Katz, Vanhoucke and Kochenderfer (arXiv:2505.18441): all atoms of a round are
updated at the same time, from sums over chunks.

The nonzeros of a chunk are grouped by round, and inside a round by row ("entries"). All passes walk rows, so
that a residual row stays in the first-level cache while the atoms of its round, a table of a few megabytes,
come from the caches behind it: 2.4 to 3.8 times faster than walking atom by atom through the residual.

Names used throughout::

    R            (n, d)     residual of the chunk, Y - X D
    coefficient  (n, k)     codes; flat position `pos` = row * k + slot
    start        (n + 1,)   entries of row i in this round are start[i]:start[i + 1]
    pos, local   (e,)       flat position of an entry, and its atom's index inside the round

Large results are allocated outside the compiled code: numpy asks for huge pages, numba's allocator does not, and
first touching 75 MB in small pages cost more than the refresh that filled them.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels import pool
from dbksvd_dask.kernels._jit import jit


@jit
def count_atoms(atom, n_atoms):
    """Count the samples that use each atom.

    Parameters
    ----------
    atom : (n, k) int32, -1 where empty

    Returns
    -------
    counts : (n_atoms,) int64
    """
    counts = np.zeros(n_atoms, np.int64)
    for i in range(atom.shape[0]):
        for s in range(atom.shape[1]):
            if atom[i, s] >= 0:
                counts[atom[i, s]] += 1
    return counts


@jit
def group_by_round(atom, round_of, local_of, n_rounds):
    """Group the nonzeros of a chunk by round, and by row inside a round (a counting sort).

    Parameters
    ----------
    atom : (n, k) int32, -1 where empty
    round_of, local_of : (n_atoms,) int32; round of an atom and its index inside the round

    Returns
    -------
    start : (n_rounds, n + 1) int64; entries of row i in round r are start[r, i]:start[r, i + 1]
    pos : (nnz,) int64;  local : (nnz,) int32
    """
    n, k = atom.shape
    start = np.zeros((n_rounds, n + 1), np.int64)
    for i in range(n):
        for s in range(k):
            if atom[i, s] >= 0:
                start[round_of[atom[i, s]], i + 1] += 1
    total = 0
    for r in range(n_rounds):
        start[r, 0] = total
        for i in range(n):
            total += start[r, i + 1]
            start[r, i + 1] = total
    pos = np.empty(total, np.int64)
    local = np.empty(total, np.int32)
    cursor = np.empty(n_rounds, np.int64)
    for r in range(n_rounds):
        cursor[r] = start[r, 0]
    for i in range(n):
        for s in range(k):
            j = atom[i, s]
            if j >= 0:
                r = round_of[j]
                pos[cursor[r]] = i * k + s
                local[cursor[r]] = local_of[j]
                cursor[r] += 1
    return start, pos, local


@jit
def subtract_reconstruction(Y, atom, coefficient, D, R):
    """Write the residual Y - X D to R.

    Parameters
    ----------
    Y, R : (n, d);  atom, coefficient : (n, k);  D : (n_atoms, d)
    """
    n, d = Y.shape
    for i in range(n):
        y = Y[i]
        r = R[i]
        for f in range(d):
            r[f] = y[f]
        for s in range(atom.shape[1]):
            if atom[i, s] >= 0:
                a = coefficient[i, s]
                row = D[atom[i, s]]
                for f in range(d):
                    r[f] -= a * row[f]


def start_products(
    R: np.ndarray, coefficient: np.ndarray, start: np.ndarray, pos: np.ndarray, local: np.ndarray, n_local: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the partial sums of the warm start: ``R[O]^T x`` and ``|x|^2`` for each atom of the round.

    Returns
    -------
    W : (n_local, d);  x2 : (n_local,) float64
    """
    W = np.zeros((n_local, R.shape[1]), R.dtype)
    x2 = np.zeros(n_local, np.float64)
    _start_products(R, coefficient, start, pos, local, W, x2)
    return W, x2


@jit
def _start_products(R, coefficient, start, pos, local, W, x2):
    n, d = R.shape
    x = coefficient.ravel()
    for i in range(n):
        r = R[i]
        for e in range(start[i], start[i + 1]):
            a = x[pos[e]]
            w = W[local[e]]
            x2[local[e]] += np.float64(a) * np.float64(a)
            for f in range(d):
                w[f] += a * r[f]


def next_products(
    R: np.ndarray,
    coefficient: np.ndarray,
    start: np.ndarray,
    pos: np.ndarray,
    local: np.ndarray,
    V: np.ndarray,
    dv: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the partial sums of one Lanczos product ``E^T E v`` for each atom of the round; E is never formed.

    With ``s_i = R_i . v + x_i (d_j . v)`` the product is ``sum_i s_i R_i + (sum_i s_i x_i) d_j``; the second
    part is added by the caller, after the sum over chunks.

    Parameters
    ----------
    V : (n_local, d) current vectors;  dv : (n_local,) products of the old atoms with them

    Returns
    -------
    W : (n_local, d) sums of s_i R_i;  sx, s2 : (n_local,) float64, sums of s_i x_i and of s_i^2
    """
    W = np.zeros(V.shape, R.dtype)
    sx = np.zeros(V.shape[0], np.float64)
    s2 = np.zeros(V.shape[0], np.float64)
    _next_products(R, coefficient, start, pos, local, V, dv, W, sx, s2)
    return W, sx, s2


@jit
def _next_products(R, coefficient, start, pos, local, V, dv, W, sx, s2):
    n, d = R.shape
    x = coefficient.ravel()
    for i in range(n):
        r = R[i]
        for e in range(start[i], start[i + 1]):
            j = local[e]
            v = V[j]
            w = W[j]
            s = R.dtype.type(0)
            for f in range(d):
                s += r[f] * v[f]
            s += x[pos[e]] * dv[j]
            sx[j] += np.float64(s) * np.float64(x[pos[e]])
            s2[j] += np.float64(s) * np.float64(s)
            for f in range(d):
                w[f] += s * r[f]


def refresh(
    R: np.ndarray,
    coefficient: np.ndarray,
    start: np.ndarray,
    pos: np.ndarray,
    local: np.ndarray,
    old: np.ndarray,
    new: np.ndarray,
    nonneg: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange the round's atoms and refit their coefficients, row by row, into new arrays.

    On each row the old atoms give way to the new ones at the old coefficients, then each coefficient is refitted
    in turn (``a = r . d_new; x += a; r -= a d_new``): one sweep of coordinate descent, of which every step can
    only lower the row's error, however large the round. (Starting the sweep from zero instead of from the old
    coefficients left 2 % more error after one round of all atoms on transformer tokens.)

    Parameters
    ----------
    old, new : (n_local, d) atoms of the round before and after

    Returns
    -------
    R_new : (n, d);  coefficient_new : (n, k)
    """
    R_new = pool.empty(R.shape, R.dtype)
    coefficient_new = coefficient.copy()
    _refresh(R, coefficient, start, pos, local, old, new, nonneg, R_new, coefficient_new)
    return R_new, coefficient_new


@jit
def _refresh(R, coefficient, start, pos, local, old, new, nonneg, R_new, coefficient_new):
    n, d = R.shape
    x = coefficient.ravel()
    x_new = coefficient_new.ravel()
    for i in range(n):
        r = R_new[i]
        source = R[i]
        for f in range(d):
            r[f] = source[f]
        for e in range(start[i], start[i + 1]):
            a = x[pos[e]]
            before = old[local[e]]
            after = new[local[e]]
            for f in range(d):
                r[f] += a * (before[f] - after[f])
        for e in range(start[i], start[i + 1]):
            row = new[local[e]]
            a = R.dtype.type(0)
            for f in range(d):
                a += r[f] * row[f]
            if nonneg and x[pos[e]] + a < 0:
                a = -x[pos[e]]
            x_new[pos[e]] = x[pos[e]] + a
            for f in range(d):
                r[f] -= a * row[f]
