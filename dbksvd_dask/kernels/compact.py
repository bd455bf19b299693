"""Matching pursuit on a gram of three bytes per entry, two of which a step reads.

A step of `kernels.pursuit` reads one row of the gram, and where the gram is larger than the caches a step takes as
long as that read: half the bytes made it 2.8 times as fast (4096 atoms, 229 against 654 ns). So the entries are
split into `high`, 16 bits, and `low`, the 8 bits that follow::

    gram = HIGH * high + LOW * low               to 2^-24: sums of float32 products are no more exact

Steps subtract the high part alone. Where a product decides something, it is made exact from the few entries of the
low part that it depends on::

    p[j] = q[j] - LOW * sum_s x[s] low[j, atom[s]]        q: the products without the low part

That holds for every coefficient, and for every choice: all atoms whose products could be the largest, given that
``|p - q| <= HIGH / 2 * sum |x|``, are compared by their exact ones. Where these are many, because little is left
of the sample, all products are made exact (`_refine`) and the error begins at zero again. So the codes are those
of a float32 gram, to rounding.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import (
    inner_in_order,
    inner_uncounted,
    jit_uncounted,
    prefetch,
    running_max,
    running_max_abs,
)
from dbksvd_dask.kernels.compact_gram import HIGH, LOW, CompactGram
from dbksvd_dask.kernels.pursuit import (
    BLOCK,
    LANES,
    STEPS_PER_ATOM,
    clear_slots,
    close_enough,
    noise_floor,
    too_small,
)
from dbksvd_dask.plan.encoder import EncodeSpec

# More atoms than this that could be the best, and exact products of all atoms cost less than theirs.
MANY = 16
# Samples of a smaller squared norm are multiplied by TINY_SCALE, or their steps would be subnormal.
TINY_NORM2 = 2.0**-150
TINY_SCALE = np.float32(2.0**60)
# Unsigned, for indices.
UNIT, WIDTH = np.uint64(1), np.uint64(BLOCK)


# ---------------------------------------------------------------------------------- passes over the products

# Indices are unsigned: numba looks for negative ones in every signed index.


@inner_uncounted
def _stop(b, m):
    """Return the end of block b of m atoms."""
    return min((b + UNIT) * WIDTH, m)


@inner_uncounted
def _scan(prods, i, nonneg, block_max, lane):
    """Write the largest |p| (or p) of each block of sample i."""
    for b in range(np.uint64(block_max.shape[1])):
        best = prods.dtype.type(0)
        if nonneg:
            for t in range(b * WIDTH, _stop(b, np.uint64(prods.shape[1]))):
                best = running_max(best, prods[i, t])
        else:
            for t in range(b * WIDTH, _stop(b, np.uint64(prods.shape[1]))):
                best = running_max_abs(best, prods[i, t])
        block_max[lane, b] = best


@inner_uncounted
def _subtract(prods, i, c, high, j, ahead, nonneg, block_max, lane):
    """Do p -= c * high[j] for sample i and write the largest |p| (or p) of each block; ask for high[ahead]."""
    m, line = np.uint64(prods.shape[1]), np.uint64(64 // high.itemsize)
    for b in range(np.uint64(block_max.shape[1])):
        for t in range(b * WIDTH, (b + UNIT) * WIDTH, line):
            prefetch(high, ahead * m + t)
        best = prods.dtype.type(0)
        if nonneg:
            for t in range(b * WIDTH, _stop(b, m)):
                v = prods[i, t] - c * np.float32(high[j, t])
                prods[i, t] = v
                best = running_max(best, v)
        else:
            for t in range(b * WIDTH, _stop(b, m)):
                v = prods[i, t] - c * np.float32(high[j, t])
                prods[i, t] = v
                best = running_max_abs(best, v)
        block_max[lane, b] = best


@inner_uncounted
def _count(prods, i, b, least, nonneg):
    """Count the products of block b with |p| (or p) >= least; return the count and the sum of their indices."""
    count, index = np.int32(0), np.int32(0)
    stop = _stop(b, np.uint64(prods.shape[1]))
    if nonneg:
        for t in range(b * WIDTH, stop):
            hit = np.int32(prods[i, t] >= least)
            count += hit
            index += hit * np.int32(t)
    else:
        for t in range(b * WIDTH, stop):
            hit = np.int32(abs(prods[i, t]) >= least)
            count += hit
            index += hit * np.int32(t)
    return count, index


# --------------------------------------------------------------------------------------- two samples in turn

LANE = np.dtype(
    [
        ("sample", np.int64),  # -1 when there is none left
        ("chosen", np.uint64),  # atom of the next step, or one that could be it
        ("several", np.int64),  # whether others could be
        ("steps", np.int64),  # steps taken
        ("used", np.uint64),  # different atoms chosen
        ("remaining", np.float64),  # squared norm of the residual
        ("moved", np.float64),  # sum of |coefficients| since all products were exact
        ("floor", np.float64),  # smallest coefficient worth taking
        ("least", np.float32),  # product that an atom needs to be the next one
        ("unit", np.float32),  # of the products, see TINY_SCALE
    ]
)


@inner_uncounted
def _begin(lane, t, i, prods, norm2, min_coefficient, nonneg, block_max):
    """Begin the pursuit of sample i in lane t."""
    lane.sample = i
    lane.steps = 0
    lane.used = 0
    lane.remaining = norm2[i]
    lane.moved = 0.0
    lane.floor = noise_floor(min_coefficient, norm2[i], prods.dtype)
    lane.unit = np.float32(1)
    if norm2[i] < TINY_NORM2:
        lane.unit = 1 / TINY_SCALE
        for j in range(prods.shape[1]):
            prods[i, j] *= TINY_SCALE
    _scan(prods, np.uint64(i), nonneg, block_max, t)


@inner_uncounted
def _refine(lane, t, prods, low, nonneg, block_max, atom, recent):
    """Make the products of all atoms exact."""
    i = np.uint64(lane.sample)
    for s in range(lane.used):
        c, row = recent[t, s] * LOW, np.uint64(atom[i, s])
        recent[t, s] = 0
        if c != 0:
            for j in range(np.uint64(prods.shape[1])):
                prods[i, j] -= c * np.float32(low[row, j])
    lane.moved = 0.0
    _scan(prods, i, nonneg, block_max, t)


@inner_uncounted
def _candidates(lane, t, prods, nonneg, block_max):
    """Count the atoms that could be the best; the best block has one, it is the likely one."""
    i, best = np.uint64(lane.sample), np.uint64(0)
    for b in range(np.uint64(block_max.shape[1])):
        if block_max[t, b] > block_max[t, best]:
            best = b
    lane.least = np.float32(block_max[t, best] - np.float64(HIGH) * lane.moved)
    count, index = _count(prods, i, best, lane.least, nonneg)
    lane.chosen = np.uint64(index) if count == 1 else best * WIDTH
    for b in range(np.uint64(block_max.shape[1])):
        if b != best and block_max[t, b] >= lane.least:
            count += _count(prods, i, b, lane.least, nonneg)[0]
    return count


@inner_uncounted
def _look(lane, t, prods, low, nonneg, block_max, atom, recent):
    """Find the next atom, or those that could be it, and ask for what makes its product exact."""
    count = _candidates(lane, t, prods, nonneg, block_max)
    if count > MANY and lane.moved > 0:
        _refine(lane, t, prods, low, nonneg, block_max, atom, recent)
        count = _candidates(lane, t, prods, nonneg, block_max)
    lane.several = count > 1
    i, row = np.uint64(lane.sample), lane.chosen * np.uint64(prods.shape[1])
    for s in range(lane.used):
        prefetch(low, row + np.uint64(atom[i, s]))


@inner_in_order
def _exact(lane, t, j, prods, low, atom, recent):
    """Return the exact product of atom j and its slot; the next free slot if it has none."""
    i, slot = np.uint64(lane.sample), lane.used
    total = np.float32(0)
    for s in range(lane.used):
        other = np.uint64(atom[i, s])
        total += recent[t, s] * np.float32(low[j, other])
        if other == j:
            slot = s
    return prods[i, j] - total * LOW, slot


@inner_uncounted
def _settle(lane, t, prods, low, nonneg, block_max, atom, recent):
    """Choose among several atoms by their exact products, the lowest index among equals."""
    i, largest = np.uint64(lane.sample), np.float32(0)
    for b in range(np.uint64(block_max.shape[1])):
        if block_max[t, b] >= lane.least:
            for j in range(b * WIDTH, _stop(b, np.uint64(prods.shape[1]))):
                if (prods[i, j] if nonneg else abs(prods[i, j])) >= lane.least:
                    a, _ = _exact(lane, t, j, prods, low, atom, recent)
                    a = a if nonneg else abs(a)
                    if a > largest:
                        lane.chosen, largest = j, a


@inner_uncounted
def _decide(lane, t, prods, low, norm2, rtol, nonneg, block_max, atom, coefficient, recent):
    """Choose the atom of the next step and add to its coefficient; 0 when the pursuit is over."""
    i, k = np.uint64(lane.sample), atom.shape[1]
    if lane.steps == STEPS_PER_ATOM * k or close_enough(rtol, lane.remaining, norm2[i]):
        return np.float32(0)
    if lane.several:
        _settle(lane, t, prods, low, nonneg, block_max, atom, recent)
    a, slot = _exact(lane, t, lane.chosen, prods, low, atom, recent)
    x = a * lane.unit
    if slot == k or too_small(x, lane.floor, nonneg):
        return np.float32(0)
    atom[i, slot] = lane.chosen
    coefficient[i, slot] += x
    if slot == lane.used:
        recent[t, slot] = 0
        lane.used += UNIT
    recent[t, slot] += a
    lane.remaining -= np.float64(x) * np.float64(x)
    lane.moved += abs(np.float64(a))
    lane.steps += 1
    return a


@jit_uncounted
def pursue_tile(
    prods, high, low, norm2, rtol, min_coefficient, nonneg, atom, coefficient, lanes, block_max, recent
):
    """Matching pursuit of a tile of samples; stops as `kernels.pursuit.pursue_tile` does.

    Parameters
    ----------
    prods : (n, n_atoms) float32, products ``Y D^T``; overwritten
    high, low : (n_atoms, n_atoms), see `compact_gram.CompactGram`
    norm2 : (n,) float64, squared norms of the samples
    atom : (n, k) int32, out; -1 where empty
    coefficient : (n, k) out
    lanes, block_max, recent : scratch, see `encode_tile`
    """
    n = prods.shape[0]
    for i in range(n):
        clear_slots(atom[i], coefficient[i])
    for t in range(LANES):
        lanes[t].sample = -1
    waiting, busy = 0, True
    while busy:
        busy = False
        for t in range(LANES):
            lane, other = lanes[t], lanes[(t + 1) % LANES]
            if lane.sample >= 0:
                busy = True
                a = _decide(lane, t, prods, low, norm2, rtol, nonneg, block_max, atom, coefficient, recent)
                if a != 0:
                    i = np.uint64(lane.sample)
                    _subtract(prods, i, a * HIGH, high, lane.chosen, other.chosen, nonneg, block_max, t)
                    _look(lane, t, prods, low, nonneg, block_max, atom, recent)
                else:
                    lane.sample = -1
            if lane.sample < 0 and waiting < n:
                _begin(lane, t, waiting, prods, norm2, min_coefficient, nonneg, block_max)
                _look(lane, t, prods, low, nonneg, block_max, atom, recent)
                waiting += 1
                busy = True


def encode_tile(
    prods: np.ndarray,
    gram: CompactGram,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode one tile by matching pursuit; see `kernels.encode.TileEncoder`."""
    rtol, smallest = float(spec.rtol), float(spec.min_coefficient)
    n_blocks = -(-prods.shape[1] // BLOCK)
    scratch = (
        np.zeros(LANES, LANE),
        np.empty((LANES, n_blocks), np.float32),  # largest |product| of each block
        np.zeros((LANES, spec.k), np.float32),  # coefficients since all products were exact
    )
    pursue_tile(prods, *gram, norm2, rtol, smallest, spec.nonneg, atom, coefficient, *scratch)
