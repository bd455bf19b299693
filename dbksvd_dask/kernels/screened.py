"""Matching pursuit without a gram, for dictionaries so wide that theirs would not fit into memory.

A pursuit is cut into a few passes. Each pass multiplies the residual of a sample with all atoms, keeps the
`plan.screening.n_candidates` atoms with the largest products, and pursues among those and the atoms chosen before
by the rules of `pursuit`. For candidate c a step with atom j and coefficient a is::

    p[c] -= a * <d_c, d_j>    # products of the residual with the candidates only

so a step costs as many multiplications as there are candidates times features, and the memory is that of one
tile of products. A pass ends when it has its share of the k atoms, or when the coefficients have fallen its share
of the way to the smallest one (the residual, to `rtol`). Atoms that were not candidates then get their chance.
With as many candidates as atoms this is `pursuit`, to rounding.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner, jit, kernel_input, running_max, running_max_abs
from dbksvd_dask.kernels.products import squared_norms, tile_products
from dbksvd_dask.kernels.pursuit import (
    STEPS_PER_ATOM,
    clear_slots,
    close_enough,
    noise_floor,
    refit_support,
    too_small,
)
from dbksvd_dask.kernels.update import subtract_reconstruction
from dbksvd_dask.plan import screening, units
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec

# Atoms per block in the search for candidates: the maxima of blocks bound the smallest candidate from below.
BLOCK = 16

# A sample between two passes.
SAMPLE = np.dtype(
    [
        ("active", np.int64),  # 0 when its pursuit is over
        ("first", np.int64),  # slots filled before this group
        ("used", np.int64),  # slots filled
        ("steps", np.int64),  # steps taken in this group
        ("norm2", np.float64),  # squared norm of the sample
        ("given", np.float64),  # squared norm of the residual at the start of this group
        ("remaining", np.float64),  # squared norm of the residual
        ("largest", np.float64),  # size of the first coefficient of this group
    ]
)

# ---------------------------------------------------------------------------------------------- candidates


@inner
def _weigh(p, floor, preference, nonneg, score):
    """Fill `score` with the size of each product times preference, 0 below the threshold of its atom."""
    for t in range(p.shape[0]):
        size = p[t] if nonneg else abs(p[t])
        score[t] = size * preference[t] * p.dtype.type(size >= floor[t])


@inner
def _block_maxima(x, signed, maxima):
    """Fill `maxima` with the largest |x| (or x, if not signed) of each block; 0 where none is positive."""
    for b in range(maxima.shape[0]):
        part = x[b * BLOCK : (b + 1) * BLOCK]
        best = x.dtype.type(0)
        if signed:
            for t in range(part.shape[0]):
                best = running_max_abs(best, part[t])
        else:
            for t in range(part.shape[0]):
                best = running_max(best, part[t])
        maxima[b] = best


@inner
def _nth_largest(values, n):
    """Return the n-th largest value, or 0 if there are fewer."""
    m = values.shape[0]
    if m < n:
        return values.dtype.type(0)
    return np.partition(values, m - n)[m - n]


@inner
def _collect(x, signed, maxima, bound, index, size):
    """List the atoms of positive size that reach `bound`, in ascending order; return how many."""
    n = 0
    for b in range(maxima.shape[0]):
        if maxima[b] >= bound and maxima[b] > 0:
            for t in range(b * BLOCK, min((b + 1) * BLOCK, x.shape[0])):
                v = abs(x[t]) if signed else x[t]
                if v >= bound and v > 0:
                    index[n] = t
                    size[n] = v
                    n += 1
    return n


@inner
def _lower_bound(maxima, most):
    """Return a size that at least `most` atoms reach, or 0: the `most`-th largest of about twice as many maxima.

    Of the maxima of all blocks the bound would be sharper, and cost four times as much as it saves.
    """
    width = max(1, maxima.shape[0] // (2 * most))
    coarse = np.zeros((maxima.shape[0] + width - 1) // width, maxima.dtype)
    for b in range(maxima.shape[0]):
        coarse[b // width] = max(coarse[b // width], maxima[b])
    return _nth_largest(coarse, most)


@inner
def screen(x, signed, most, maxima, index, size):
    """List the atoms with the largest |x| (or x), the lowest index first among equals; return how many.

    Parameters
    ----------
    x : (m,);  most : how many are wanted; of more atoms than that only positive sizes count
    maxima : (ceil(m / BLOCK),) scratch;  index : (m,) int64, out, ascending;  size : (m,) scratch
    """
    if x.shape[0] <= most:  # one pass: an atom whose product is negative now may be chosen later
        for t in range(x.shape[0]):
            index[t] = t
        return x.shape[0]
    _block_maxima(x, signed, maxima)
    n = _collect(x, signed, maxima, _lower_bound(maxima, most), index, size)
    if n <= most:
        return n
    bound = _nth_largest(size[:n], most)
    equal = most
    for i in range(n):
        equal -= size[i] > bound
    kept = 0
    for i in range(n):
        if size[i] > bound or (size[i] == bound and equal > 0):
            equal -= size[i] == bound
            index[kept] = index[i]
            kept += 1
    return kept


# ---------------------------------------------------------------------------------------------- one pass


@inner
def _dot(a, b):
    total = a.dtype.type(0)
    for f in range(a.shape[0]):
        total += a[f] * b[f]
    return total


@inner
def _best(n, value, candidate, nonneg, floor, preference):
    """Return the candidate with the best score, the lowest atom among equals; -1 when none is positive."""
    best, found = value.dtype.type(0), -1
    for c in range(n):
        size = value[c] if nonneg else abs(value[c])
        if floor.shape[0]:
            j = candidate[c]
            size = size * preference[j] * value.dtype.type(size >= floor[j])
        if size > best or (size == best and found >= 0 and candidate[c] < candidate[found]):
            best, found = size, c
    return found


@inner
def _over_for_now(sample, a, share, rtol, min_coefficient):
    """Whether coefficients, or the residual, have fallen the share of this pass of the way to the end."""
    if min_coefficient > 0 and sample.largest > min_coefficient:
        if abs(np.float64(a)) < sample.largest * (min_coefficient / sample.largest) ** share:
            return True
    target = rtol * rtol * sample.norm2
    return (
        target > 0
        and sample.given > target
        and sample.remaining <= sample.given * (target / sample.given) ** share
    )


@inner
def _pursue(
    sample, n, candidate, value, slot, D, start, limit, quota, share, rtol, min_coefficient, nonneg, floor,
    preference, rows, known, atom, coefficient
):  # fmt: skip
    """Pursue one sample among its candidates until the pass is over; parameters as in `pursue_pass`."""
    smallest = noise_floor(0.0 if floor.shape[0] else min_coefficient, sample.norm2, value.dtype)
    fresh = True
    while True:
        if sample.steps == STEPS_PER_ATOM * limit or close_enough(rtol, sample.remaining, sample.norm2):
            sample.active = 0
            break
        c = _best(n, value, candidate, nonneg, floor, preference)
        if c < 0 or too_small(value[c], smallest, nonneg):
            if fresh:  # of all atoms, not of the candidates alone
                sample.active = 0
            break
        a = value[c]
        if sample.steps == 0:
            sample.largest = abs(np.float64(a))
        if not fresh and share < 1 and _over_for_now(sample, a, share, rtol, min_coefficient):
            break
        if slot[c] < 0:
            if sample.used - sample.first == quota:
                break
            slot[c] = sample.used
            atom[sample.used] = start + candidate[c]
            sample.used += 1
        s = slot[c]
        coefficient[s] += a
        row = rows[s - sample.first]
        if not known[s - sample.first]:
            known[s - sample.first] = True
            chosen = D[start + candidate[c]]
            for t in range(n):
                row[t] = _dot(D[start + candidate[t]], chosen)
        for t in range(n):
            value[t] -= a * row[t]
        sample.remaining -= np.float64(a) * np.float64(a)
        sample.steps += 1
        fresh = False


@jit
def pursue_pass(
    prods, D, start, limit, quota, share, most, rtol, min_coefficient, nonneg, floor, preference, state, atom,
    coefficient
):  # fmt: skip
    """One pass of a tile of samples.

    Parameters
    ----------
    prods : (n, m) products of the residuals with the m atoms of a group; overwritten
    D : (n_atoms, d)
    start : first atom of the group;  limit : most nonzeros from the group;  quota : the most after this pass
    share : of the passes that are over after this one
    most : candidates
    floor, preference : (m,) threshold and preference of each atom, or (0,)
    state : (n,) `SAMPLE`, changed
    atom : (n, k) int32, in and out;  coefficient : (n, k) in and out
    """
    n, m = prods.shape
    k = atom.shape[1]
    maxima = np.empty((m + BLOCK - 1) // BLOCK, prods.dtype)
    index, size, score = np.empty(m, np.int64), np.empty(m, prods.dtype), np.empty(floor.shape[0], prods.dtype)
    candidate, slot = np.empty(k + most, np.int64), np.empty(k + most, np.int64)
    value, rows = np.empty(k + most, prods.dtype), np.empty((k, k + most), prods.dtype)
    known = np.empty(k, np.bool_)
    for i in range(n):
        sample = state[i]
        if sample.active == 0:
            continue
        known[:] = False
        p = prods[i]
        used = sample.used - sample.first
        for s in range(used):
            j = np.int64(atom[i, sample.first + s]) - start
            candidate[s], value[s], slot[s] = j, p[j], sample.first + s
            p[j] = 0
        if floor.shape[0]:
            _weigh(p, floor, preference, nonneg, score)
            found = screen(score, False, most, maxima, index, size)
        else:
            found = screen(p, not nonneg, most, maxima, index, size)
        for c in range(found):
            candidate[used + c], value[used + c], slot[used + c] = index[c], p[index[c]], -1
        most_here = min(limit, k - sample.first)
        _pursue(
            sample, used + found, candidate, value, slot, D, start, most_here, min(quota, most_here), share, rtol,
            min_coefficient, nonneg, floor, preference, rows, known, atom[i], coefficient[i]
        )  # fmt: skip


@jit
def refit_tile(R, D, nonneg, state, atom, coefficient):
    """Least squares on the supports of a tile, whose residuals are R."""
    k = atom.shape[1]
    own, p = np.arange(k), np.empty(k, R.dtype)
    gram, A, delta = np.empty((k, k), R.dtype), np.empty((k, k), np.float64), np.empty(k, np.float64)
    for i in range(R.shape[0]):
        used = state[i].used
        for s in range(used):
            row = D[atom[i, s]]
            p[s] = _dot(R[i], row)
            for t in range(s + 1):
                gram[s, t] = _dot(row, D[atom[i, t]])
                gram[t, s] = gram[s, t]
        refit_support(True, nonneg, p, gram, used, own, coefficient[i], A, delta)


@jit
def begin(norm2, state, atom, coefficient):
    """Begin the pursuits of a tile of samples."""
    for i in range(state.shape[0]):
        clear_slots(atom[i], coefficient[i])
        state[i].used = 0
        state[i].norm2 = norm2[i]
        state[i].remaining = norm2[i]


@jit
def begin_group(state, k):
    """Begin the next group of atoms; return whether any sample may use it."""
    for i in range(state.shape[0]):
        state[i].first = state[i].used
        state[i].steps = 0
        state[i].given = state[i].remaining
        state[i].active = state[i].used < k


# ---------------------------------------------------------------------------------------------- tiles


class _Settings:
    """What the passes of all tiles share."""

    def __init__(self, D: np.ndarray, spec: EncodeSpec, weights: AtomWeights | None) -> None:
        self.D, self.spec = D, spec
        self.groups = (() if weights is not None else spec.stages) or ((0, D.shape[0], spec.k),)
        self.floor = self.preference = np.empty(0, D.dtype)
        if weights is not None:
            self.floor = kernel_input(float(spec.min_coefficient) * weights.threshold, D.dtype)
            self.preference = kernel_input(weights.preference, D.dtype)

    def tiles(self, n: int, first: int) -> list[tuple[units.Tile, ...]]:
        """Return the tiles of n rows, each once per group: a product with few atoms is padded to full height."""
        n_atoms, d = self.D.shape
        rows = units.tile_rows(n_atoms)
        grids = [units.grid_tiles(n, first, (stop - start) * d, rows) for start, stop, _ in self.groups]
        return list(zip(*grids, strict=True))


def _encode_tile(
    Y: np.ndarray,
    how: _Settings,
    tiles: tuple[units.Tile, ...],
    buffer: np.ndarray,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode the samples of one tile, which `tiles` holds once per group."""
    D, spec = how.D, how.spec
    state, R = np.zeros(Y.shape[0], SAMPLE), np.empty_like(Y)
    begin(squared_norms(Y), state, atom, coefficient)
    for (start, stop, limit), tile in zip(how.groups, tiles, strict=True):
        begin_group(state, spec.k)
        passes = screening.n_passes(limit, stop - start)
        for t in range(passes):
            if not state["active"].any():
                break
            subtract_reconstruction(Y, atom, coefficient, D, R)
            prods = tile_products(R, D[start:stop], tile, buffer)
            quota, share = screening.pass_limit(limit, t, passes), (t + 1) / passes
            pursue_pass(
                prods, D, start, limit, quota, share, screening.n_candidates(limit), float(spec.rtol),
                float(spec.min_coefficient), spec.nonneg, how.floor, how.preference, state, atom, coefficient
            )  # fmt: skip
    if spec.refit:
        subtract_reconstruction(Y, atom, coefficient, D, R)
        refit_tile(R, D, spec.nonneg, state, atom, coefficient)


def encode_rows(
    Y: np.ndarray, D: np.ndarray, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Encode samples with a dictionary, without its gram; parameters as in `kernels.encode.encode_rows`."""
    Y, D = kernel_input(Y), kernel_input(D)
    n = Y.shape[0]
    atom, coefficient = np.empty((n, spec.k), np.int32), np.empty((n, spec.k), Y.dtype)
    how = _Settings(D, spec, weights)
    tiles = how.tiles(n, first)
    sizes = [
        tile.height * (stop - start)
        for each in tiles
        for tile, (start, stop, _) in zip(each, how.groups, strict=True)
    ]
    buffer = np.empty(max(sizes, default=0), Y.dtype)
    for each in tiles:
        part = slice(each[0].start, each[0].stop)
        _encode_tile(Y[part], how, each, buffer, atom[part], coefficient[part])
    return atom, coefficient
