"""Matching pursuit in the gram domain: products in, sparse codes out.

For one sample with products ``p = D y`` a step is::

    j = argmax |p|            # lowest index wins a tie
    x[j] += p[j]              # unit atoms: the product is the coefficient
    p -= p[j] * gram[j]       # products with the new residual

so neither the sample nor its residual is touched until the support is known. The subtraction and the search
for the next maximum are one pass: the largest |p| of each block of `BLOCK` atoms is kept on the way, then only
the best block is searched.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner, jit, prefetch, running_max, running_max_abs
from dbksvd_dask.plan.encoder import EncodeSpec

# 256 atoms: 16 blocks at 4096 atoms, so finding the winner's index costs about 6 % of the pass over p.
BLOCK = 256
# An atom may be chosen again; this bounds the steps when a sample keeps returning to the same atoms.
STEPS_PER_ATOM = 4
# Products below NOISE * eps * |y| are rounding of the subtractions that made them: zero to working precision.
NOISE = 16.0
# Samples pursued in turn, so that the gram row of one is fetched while another computes. Two are enough.
LANES = 2


@inner
def _scan(p, nonneg, block_max):
    """Fill block_max with the largest |p| (or p) of each block."""
    for b in range(block_max.shape[0]):
        part = p[b * BLOCK : (b + 1) * BLOCK]
        best = p[0] - p[0]
        if nonneg:
            for t in range(part.shape[0]):
                best = running_max(best, part[t])
        else:
            for t in range(part.shape[0]):
                best = running_max_abs(best, part[t])
        block_max[b] = best


@inner
def _subtract_and_scan(p, a, g, nonneg, block_max):
    """Do p -= a * g and fill block_max with the largest |p| (or p) of each block, in one pass."""
    for b in range(block_max.shape[0]):
        part = p[b * BLOCK : (b + 1) * BLOCK]
        row = g[b * BLOCK : (b + 1) * BLOCK]
        best = a - a
        if nonneg:
            for t in range(part.shape[0]):
                v = part[t] - a * row[t]
                part[t] = v
                best = running_max(best, v)
        else:
            for t in range(part.shape[0]):
                v = part[t] - a * row[t]
                part[t] = v
                best = running_max_abs(best, v)
        block_max[b] = best


@inner
def _locate(p, nonneg, block_max):
    """Index of the largest |p| (or p): the lowest one among equals."""
    best_block = 0
    for b in range(1, block_max.shape[0]):
        if block_max[b] > block_max[best_block]:
            best_block = b
    largest = block_max[best_block]
    start = best_block * BLOCK
    stop = min(start + BLOCK, p.shape[0])
    for j in range(start, stop):
        if p[j] == largest or (not nonneg and -p[j] == largest):
            return j
    return start


@inner
def _subtract_scan_prefetch(p, a, g, nonneg, block_max, ahead):
    """As `_subtract_and_scan`, asking for the lines of `ahead` on the way."""
    line = 64 // p.itemsize
    for b in range(block_max.shape[0]):
        for t in range(0, BLOCK, line):
            prefetch(ahead, b * BLOCK + t)
        part = p[b * BLOCK : (b + 1) * BLOCK]
        row = g[b * BLOCK : (b + 1) * BLOCK]
        best = a - a
        if nonneg:
            for t in range(part.shape[0]):
                v = part[t] - a * row[t]
                part[t] = v
                best = running_max(best, v)
        else:
            for t in range(part.shape[0]):
                v = part[t] - a * row[t]
                part[t] = v
                best = running_max_abs(best, v)
        block_max[b] = best


@inner
def _choose(p, nonneg, block_max, floor, atom, coefficient, n_used):
    """Next atom of a sample, its coefficient added: (atom, or -1 at the end; coefficient; atoms so far)."""
    j = _locate(p, nonneg, block_max)
    a = p[j]
    if abs(np.float64(a)) < floor or a == 0 or (nonneg and a < 0):
        return -1, a, n_used
    slot = 0
    while slot < n_used and atom[slot] != j:
        slot += 1
    if slot == n_used:
        if n_used == atom.shape[0]:
            return -1, a, n_used
        atom[slot] = j
        n_used += 1
    coefficient[slot] += a
    return j, a, n_used


# Squared pivots that are lost to rounding even where a support was chosen atom by atom.
LOST_PIVOT2 = 1e-10


@inner
def _cholesky_solve(A, b, n, lost_pivot2):
    """Solve A x = b in place for the leading n x n block; a pivot lost to rounding gives x = 0 there."""
    for i in range(n):
        for j in range(i + 1):
            total = A[i, j]
            for t in range(j):
                total -= A[i, t] * A[j, t]
            if i == j:
                A[i, i] = np.sqrt(total) if total > lost_pivot2 else np.inf
            else:
                A[i, j] = total / A[j, j]
    for i in range(n):
        total = b[i]
        for t in range(i):
            total -= A[i, t] * b[t]
        b[i] = total / A[i, i]
    for i in range(n - 1, -1, -1):
        total = b[i]
        for t in range(i + 1, n):
            total -= A[t, i] * b[t]
        b[i] = total / A[i, i]


@inner
def refit_row(p, gram, n_used, atom, coefficient, A, delta, lost_pivot2=LOST_PIVOT2):
    """Least squares on the found support.

    With products p of the residual, the change of the coefficients solves ``gram[S, S] delta = p[S]``.

    Parameters
    ----------
    A : (k, k) float64 scratch;  delta : (k,) float64 scratch
    lost_pivot2 : squared pivot below which an atom depends on those before it and keeps its coefficient
    """
    for i in range(n_used):
        delta[i] = p[atom[i]]
        for j in range(i + 1):
            A[i, j] = gram[atom[i], atom[j]]
    _cholesky_solve(A, delta, n_used, lost_pivot2)
    for i in range(n_used):
        coefficient[i] += delta[i]


# Coordinate descent stops when no coefficient moves by more than this share of the largest one.
_NNLS_TOLERANCE = 1e-7
_NNLS_SWEEPS = 200


@inner
def refit_row_nonneg(p, gram, n_used, atom, coefficient, A, delta):
    """Non-negative least squares on the found support, by coordinate descent from the pursuit's coefficients.

    Each coordinate step can only lower the error, so the result is never worse than the pursuit's own.
    Coefficients that end at zero stay in their slots with value 0.
    """
    largest = 0.0
    for i in range(n_used):
        delta[i] = p[atom[i]]
        largest = max(largest, np.float64(coefficient[i]))
        for j in range(n_used):
            A[i, j] = gram[atom[i], atom[j]]
    for _ in range(_NNLS_SWEEPS):
        moved = 0.0
        for i in range(n_used):
            old = np.float64(coefficient[i])
            step = max(old + delta[i] / A[i, i], 0.0) - old
            if step != 0.0:
                coefficient[i] = old + step
                step = np.float64(coefficient[i]) - old
                for j in range(n_used):
                    delta[j] -= step * A[i, j]
                moved = max(moved, abs(step))
        if moved <= _NNLS_TOLERANCE * largest:
            break


@jit
def pursue_tile(prods, gram, norm2, k, rtol, min_coefficient, nonneg, refit, atom, coefficient):
    """Matching pursuit of a tile of samples.

    A pursuit stops just before the (k+1)-th different atom, after ``4 k`` steps, when the residual norm falls to
    ``rtol * |y|``, when the next coefficient is below `min_coefficient`, or when the products are zero to working
    precision.

    Two samples are pursued in turn. A step is bound by reading a row of the gram, and which row is known only
    when the step before is done; so while one sample's step runs, the row of the other is fetched.

    Parameters
    ----------
    prods : (n, n_atoms) products ``Y D^T``; overwritten with those of the residual
    gram : (n_atoms, n_atoms)
    norm2 : (n,) float64, squared norms of the samples
    atom : (n, k) int32, out; -1 where empty
    coefficient : (n, k) out
    """
    n, m = prods.shape
    block_max = np.empty((LANES, (m + BLOCK - 1) // BLOCK), prods.dtype)
    A = np.empty((k, k), np.float64)
    delta = np.empty(k, np.float64)
    sample = np.full(LANES, -1, np.int64)  # of each lane; -1 when there is none left
    chosen = np.zeros(LANES, np.int64)
    step = np.empty(LANES, prods.dtype)
    used = np.zeros(LANES, np.int64)
    steps = np.zeros(LANES, np.int64)
    remaining = np.zeros(LANES, np.float64)
    for i in range(n):
        for s in range(k):
            atom[i, s] = -1
            coefficient[i, s] = 0
    waiting = 0
    busy = True
    while busy:
        busy = False
        for lane in range(LANES):
            i = sample[lane]
            if i >= 0:
                ahead = gram[chosen[(lane + 1) % LANES]]
                j = chosen[lane]
                _subtract_scan_prefetch(prods[i], step[lane], gram[j], nonneg, block_max[lane], ahead)
                remaining[lane] -= np.float64(step[lane]) * np.float64(step[lane])
                steps[lane] += 1
            while True:
                if sample[lane] < 0:
                    if waiting == n:
                        break
                    i = waiting
                    waiting += 1
                    sample[lane] = i
                    used[lane] = 0
                    steps[lane] = 0
                    remaining[lane] = norm2[i]
                    _scan(prods[i], nonneg, block_max[lane])
                i = sample[lane]
                j = -1
                if steps[lane] < STEPS_PER_ATOM * k and (rtol == 0 or remaining[lane] > rtol * rtol * norm2[i]):
                    floor = max(min_coefficient, NOISE * np.finfo(prods.dtype).eps * np.sqrt(norm2[i]))
                    j, a, used[lane] = _choose(
                        prods[i], nonneg, block_max[lane], floor, atom[i], coefficient[i], used[lane]
                    )
                    step[lane] = a
                if j >= 0:
                    chosen[lane] = j
                    busy = True
                    break
                if refit and nonneg:
                    refit_row_nonneg(prods[i], gram, used[lane], atom[i], coefficient[i], A, delta)
                elif refit:
                    refit_row(prods[i], gram, used[lane], atom[i], coefficient[i], A, delta)
                sample[lane] = -1


def encode_tile(
    prods: np.ndarray,
    gram: np.ndarray,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode one tile by matching pursuit; see `kernels.encode.TileEncoder`."""
    rtol, smallest = float(spec.rtol), float(spec.min_coefficient)
    pursue_tile(prods, gram, norm2, spec.k, rtol, smallest, spec.nonneg, spec.refit, atom, coefficient)
