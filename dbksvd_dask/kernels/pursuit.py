"""Matching pursuit in the gram domain: products in, sparse codes out.

The encoding step of DB-KSVD (Valentin, Katz, Vanhoucke, Kochenderfer: arXiv:2505.18441). For one sample with
products ``p = D y`` a step is::

    j = argmax |p|            # lowest index wins a tie
    x[j] += p[j]              # unit atoms: the product is the coefficient
    p -= p[j] * gram[j]       # products with the new residual

so neither the sample nor its residual is touched until the support is known. The subtraction and the search
for the next maximum are one pass: the largest |p| of each block of `BLOCK` atoms is kept on the way, then only
the best block is searched.

Two samples are pursued in turn (`LANE`). A step is bound by reading a row of the gram, and which row is known
only after the step before it; so while the step of one sample runs, the row of the other is fetched.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner_uncounted, jit, prefetch, running_max, running_max_abs
from dbksvd_dask.plan.encoder import EncodeSpec

# 256 atoms: 16 blocks at 4096 atoms, so finding the winner's index costs about 6 % of the pass over p.
BLOCK = 256
# An atom may be chosen again; this bounds the steps when a sample keeps returning to the same atoms.
STEPS_PER_ATOM = 4
# Products below NOISE * eps * |y| are rounding of the subtractions that made them: zero to working precision.
NOISE = 16.0
# Samples pursued in turn, so that the gram row of one is fetched while another computes. Two are enough.
LANES = 2


# ------------------------------------------------------------------------- rules that all pursuits share


@inner_uncounted
def noise_floor(min_coefficient, norm2, dtype):
    """Smallest coefficient worth taking from a sample of squared norm `norm2`."""
    return max(min_coefficient, NOISE * np.finfo(dtype).eps * np.sqrt(norm2))


@inner_uncounted
def too_small(a, floor, nonneg):
    """Whether a pursuit ends before a step of size a."""
    return abs(np.float64(a)) < floor or a == 0 or (nonneg and a < 0)


@inner_uncounted
def close_enough(rtol, remaining, norm2):
    """Whether a residual of squared norm `remaining` ends the pursuit of a sample of squared norm `norm2`."""
    return rtol > 0 and remaining <= rtol * rtol * norm2


@inner_uncounted
def find_slot(atom, first, used, j):
    """Slot of atom j among ``atom[first:used]``; `used`, the next free one, if it has none."""
    slot = first
    while slot < used and atom[slot] != j:
        slot += 1
    return slot


@inner_uncounted
def clear_slots(atom, coefficient):
    """Empty all slots of one sample."""
    for s in range(atom.shape[0]):
        atom[s] = -1
        coefficient[s] = 0


# ---------------------------------------------------------------------------------- passes over the products


@inner_uncounted
def _largest(p, b, nonneg):
    """Largest |p| (or p) of block b; 0 where no p is positive."""
    part = p[b * BLOCK : (b + 1) * BLOCK]
    best = p.dtype.type(0)
    if nonneg:
        for t in range(part.shape[0]):
            best = running_max(best, part[t])
    else:
        for t in range(part.shape[0]):
            best = running_max_abs(best, part[t])
    return best


@inner_uncounted
def _subtract(p, a, g, b, nonneg):
    """Do p -= a * g on block b and return its largest |p| (or p).

    The blocks are cut here, not by the caller: a slice that is handed over counts references, 16 % of a step.
    """
    part = p[b * BLOCK : (b + 1) * BLOCK]
    row = g[b * BLOCK : (b + 1) * BLOCK]
    best = p.dtype.type(0)
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
    return best


@inner_uncounted
def scan(p, nonneg, block_max):
    """Fill block_max with the largest |p| (or p) of each block."""
    for b in range(block_max.shape[0]):
        block_max[b] = _largest(p, b, nonneg)


@inner_uncounted
def subtract_and_scan(p, a, g, nonneg, block_max):
    """Do p -= a * g and fill block_max with the largest |p| (or p) of each block, in one pass."""
    for b in range(block_max.shape[0]):
        block_max[b] = _subtract(p, a, g, b, nonneg)


@inner_uncounted
def _subtract_scan_prefetch(p, a, g, nonneg, block_max, ahead):
    """As `subtract_and_scan`, asking for the cache lines of `ahead` on the way."""
    line = 64 // p.itemsize
    for b in range(block_max.shape[0]):
        for t in range(0, BLOCK, line):
            prefetch(ahead, b * BLOCK + t)
        block_max[b] = _subtract(p, a, g, b, nonneg)


@inner_uncounted
def best_block(block_max):
    """Index of the block with the largest entry, the first among equals."""
    best = 0
    for b in range(1, block_max.shape[0]):
        if block_max[b] > block_max[best]:
            best = b
    return best


@inner_uncounted
def locate(p, nonneg, block_max):
    """Index of the largest |p| (or p), the lowest one among equals."""
    block = best_block(block_max)
    largest = block_max[block]
    start = block * BLOCK
    for j in range(start, min(start + BLOCK, p.shape[0])):
        if p[j] == largest or (not nonneg and -p[j] == largest):
            return j
    return start


# ------------------------------------------------------------------------------ least squares on a support

# Squared pivots that are lost to rounding even where a support was chosen atom by atom.
LOST_PIVOT2 = 1e-10


@inner_uncounted
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


@inner_uncounted
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


@inner_uncounted
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


@inner_uncounted
def refit_support(refit, nonneg, p, gram, n_used, atom, coefficient, A, delta):
    """Refit one sample as its parameters ask for: not at all, by least squares, or non-negative."""
    if refit and nonneg:
        refit_row_nonneg(p, gram, n_used, atom, coefficient, A, delta)
    elif refit:
        refit_row(p, gram, n_used, atom, coefficient, A, delta)


# --------------------------------------------------------------------------------------- two samples in turn


# A pursuit under way. The functions below take this record and whole arrays: numba counts references to every
# view, and every array of a tuple, that is handed over, which took up to a fifth of a step.
LANE = np.dtype(
    [
        ("sample", np.int64),  # -1 when there is none left
        ("chosen", np.int64),  # atom of the next step
        ("steps", np.int64),  # steps taken
        ("used", np.int64),  # different atoms chosen
        ("remaining", np.float64),  # squared norm of the residual
    ]
)


@inner_uncounted
def _begin(lane, t, i, prods, norm2, nonneg, block_max):
    """Begin the pursuit of sample i in lane t."""
    lane.sample = i
    lane.steps = 0
    lane.used = 0
    lane.remaining = norm2[i]
    scan(prods[i], nonneg, block_max[t])


@inner_uncounted
def _choose(lane, t, prods, norm2, rtol, min_coefficient, nonneg, block_max, atom, coefficient):
    """Choose the atom of the next step and add to its coefficient; False when the pursuit is over."""
    i, k = lane.sample, atom.shape[1]
    if lane.steps == STEPS_PER_ATOM * k or close_enough(rtol, lane.remaining, norm2[i]):
        return False
    j = locate(prods[i], nonneg, block_max[t])
    a = prods[i, j]
    if too_small(a, noise_floor(min_coefficient, norm2[i], prods.dtype), nonneg):
        return False
    slot = find_slot(atom[i], 0, lane.used, j)
    if slot == k:
        return False
    atom[i, slot] = j
    coefficient[i, slot] += a
    lane.used = max(lane.used, slot + 1)
    lane.chosen = j
    return True


@inner_uncounted
def _take_step(lane, t, prods, gram, nonneg, block_max, other):
    """Subtract the chosen atom from the products, while the gram row of the `other` lane's atom is fetched."""
    a = prods[lane.sample, lane.chosen]
    row, ahead = gram[lane.chosen], gram[other.chosen]
    _subtract_scan_prefetch(prods[lane.sample], a, row, nonneg, block_max[t], ahead)
    lane.remaining -= np.float64(a) * np.float64(a)
    lane.steps += 1


@jit
def pursue_tile(prods, gram, norm2, k, rtol, min_coefficient, nonneg, refit, atom, coefficient):
    """Matching pursuit of a tile of samples.

    A pursuit stops just before the (k+1)-th different atom, after ``4 k`` steps, when the residual norm falls to
    ``rtol * |y|``, when the next coefficient is below `min_coefficient`, or when the products are zero to working
    precision.

    Parameters
    ----------
    prods : (n, n_atoms) products ``Y D^T``; overwritten with those of the residual
    gram : (n_atoms, n_atoms)
    norm2 : (n,) float64, squared norms of the samples
    atom : (n, k) int32, out; -1 where empty
    coefficient : (n, k) out
    """
    n, m = prods.shape
    lanes = np.zeros(LANES, LANE)
    block_max = np.empty((LANES, (m + BLOCK - 1) // BLOCK), prods.dtype)
    A, delta = np.empty((k, k), np.float64), np.empty(k, np.float64)
    for i in range(n):
        clear_slots(atom[i], coefficient[i])
    for t in range(LANES):
        lanes[t].sample = -1
    waiting, busy = 0, True
    while busy:
        busy = False
        for t in range(LANES):
            lane = lanes[t]
            if lane.sample >= 0:
                _take_step(lane, t, prods, gram, nonneg, block_max, lanes[(t + 1) % LANES])
            while lane.sample >= 0 or waiting < n:
                if lane.sample < 0:
                    _begin(lane, t, waiting, prods, norm2, nonneg, block_max)
                    waiting += 1
                if _choose(lane, t, prods, norm2, rtol, min_coefficient, nonneg, block_max, atom, coefficient):
                    busy = True
                    break
                i = lane.sample
                refit_support(refit, nonneg, prods[i], gram, lane.used, atom[i], coefficient[i], A, delta)
                lane.sample = -1


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
