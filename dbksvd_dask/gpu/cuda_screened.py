"""CUDA kernels of the pursuit without a gram: the counterparts of `kernels.screened`, one block per sample.

The rules of `gpu.cuda` hold here too: no atomics, sums in a fixed order, any number of threads up to
`MAX_THREADS`. Products of candidates with a chosen atom are computed at each step and not kept: a candidate
belongs to one thread, and the row of the chosen atom, which all of them read, stays in cache.
"""

from __future__ import annotations

from numba import cuda, float64, int32

from dbksvd_dask.gpu.cuda import MAX_THREADS, _block_argmax, _n_used
from dbksvd_dask.kernels._jit import cached

# Maxima that each thread keeps of its share of the products; the n-th largest of all bounds the candidates from
# below, so all of them together must be more than `plan.screening.MOST_CANDIDATES`.
_MAXIMA = 2
_MAXIMA_SIZE = _MAXIMA * MAX_THREADS + 1
# Atoms above that bound which a block can rank; more are rare, and then candidates are found one by one.
RANKED = 512


@cuda.jit(device=True)
def _score(v, j, nonneg, floor, preference):
    """Return the size of a product times the preference of its atom; 0 below the atom's threshold."""
    size = v if nonneg else abs(v)
    if floor.shape[0] == 0:
        return size
    return size * preference[j] if size >= floor[j] else v - v


@cuda.jit(device=True)
def _lower_bound(p, most, nonneg, floor, preference, maxima):
    """Return, to every thread, a score that at least `most` atoms reach, or 0."""
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    n = _MAXIMA * width
    for part in range(_MAXIMA):
        best = p[0] - p[0]
        for t in range(tid + part * width, p.shape[0], _MAXIMA * width):
            score = _score(p[t], t, nonneg, floor, preference)
            if score > best:
                best = score
        maxima[part * width + tid] = best
    if tid == 0:
        maxima[n] = 0
    cuda.syncthreads()
    for e in range(tid, n, width):
        v = maxima[e]
        rank = 0
        for other in range(n):
            if maxima[other] > v or (maxima[other] == v and other < e):
                rank += 1
        if rank == most - 1:
            maxima[n] = v
    cuda.syncthreads()
    return maxima[n]


@cuda.jit(device=True)
def _rank(p, most, bound, nonneg, floor, preference, offset, index, size, candidate):
    """Write the atoms with the highest scores, strongest first; return how many, -1 if too many reach the bound.

    Parameters
    ----------
    offset : (MAX_THREADS,) scratch;  index, size : (RANKED,) scratch
    candidate : (most,) out
    """
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    mine = 0
    for t in range(tid, p.shape[0], width):
        score = _score(p[t], t, nonneg, floor, preference)
        if score >= bound and score > 0:
            mine += 1
    offset[tid] = mine
    cuda.syncthreads()
    at = 0
    total = 0
    for t in range(width):
        if t < tid:
            at += offset[t]
        total += offset[t]
    if total > RANKED:
        return -1
    for t in range(tid, p.shape[0], width):
        score = _score(p[t], t, nonneg, floor, preference)
        if score >= bound and score > 0:
            index[at] = t
            size[at] = score
            at += 1
    cuda.syncthreads()
    for e in range(tid, total, width):
        rank = 0
        for other in range(total):
            if size[other] > size[e] or (size[other] == size[e] and index[other] < index[e]):
                rank += 1
        if rank < most:
            candidate[rank] = index[e]
    return min(total, most)


@cuda.jit(device=True)
def _one_by_one(p, most, nonneg, floor, preference, scores, codes, candidate):
    """Write the atoms with the highest scores, strongest first, each by a pass over all; return how many."""
    tid = cuda.threadIdx.x
    last = p[0] - p[0]
    last_code = int32(-1)
    for n in range(most):
        best = p[0] - p[0]
        code = int32(p.shape[0])
        for t in range(tid, p.shape[0], cuda.blockDim.x):
            score = _score(p[t], t, nonneg, floor, preference)
            after = n == 0 or score < last or (score == last and t > last_code)
            if after and score > best:
                best = score
                code = int32(t)
        cuda.syncthreads()
        last, last_code = _block_argmax(best, code, scores, codes)
        if last == 0:
            return n
        if tid == 0:
            candidate[n] = last_code
    return most


@cuda.jit(device=True)
def _screen(p, most, nonneg, floor, preference, maxima, offset, index, size, scores, codes, candidate):
    """Write the candidates of a pass; return how many. See `kernels.screened.screen`."""
    if p.shape[0] <= most:
        for t in range(cuda.threadIdx.x, p.shape[0], cuda.blockDim.x):
            candidate[t] = t
        return p.shape[0]
    bound = _lower_bound(p, most, nonneg, floor, preference, maxima)
    n = _rank(p, most, bound, nonneg, floor, preference, offset, index, size, candidate)
    if n < 0:
        n = _one_by_one(p, most, nonneg, floor, preference, scores, codes, candidate)
    return n


@cuda.jit(device=True)
def _over_for_now(a, largest, given, remaining, norm2, share, rtol, min_coefficient):
    """Whether coefficients, or the residual, have fallen the share of this pass of the way to the end."""
    if 0 < min_coefficient < largest:
        if abs(float64(a)) < largest * (min_coefficient / largest) ** share:
            return True
    target = rtol * rtol * norm2
    return 0 < target < given and remaining <= given * (target / given) ** share


@cached(cuda.jit)
def pursue_pass(
    prods, D, start, limit, quota, share, most, steps_per_atom, rtol, min_coefficient, nonneg, floor, preference,
    first_pass, smallest, norm2, numbers, counts, candidate, value, atom, coefficient
):  # fmt: skip
    """One pass of the samples of a tile, one block per sample, by the rules of `kernels.screened.pursue_pass`.

    Parameters
    ----------
    prods : (n, m) products of the residuals with the m atoms of a group; overwritten
    D : (n_atoms, d)
    start, limit, quota, share, most, floor, preference : as there
    first_pass : 2 for the first of a sample, 1 for the first of a later group, else 0
    smallest : (n,) smallest coefficient worth taking;  norm2 : (n,) float64
    numbers : (n, 3) float64, of each sample between passes: largest coefficient and squared norms of the residual,
        given to the group and now;  counts : (n, 4) int32: active, slots filled before the group, slots, steps
    candidate : (n, k + most) int32 scratch;  value : the same shape, scratch
    atom : (n, k) int32, in and out;  coefficient : (n, k) in and out
    """
    scores = cuda.shared.array(MAX_THREADS, prods.dtype)
    codes = cuda.shared.array(MAX_THREADS, int32)
    maxima = cuda.shared.array(_MAXIMA_SIZE, prods.dtype)
    offset = cuda.shared.array(MAX_THREADS, int32)
    index = cuda.shared.array(RANKED, int32)
    size = cuda.shared.array(RANKED, prods.dtype)
    i = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    k = atom.shape[1]
    p = prods[i]
    if first_pass == 2:
        for s in range(tid, k, width):
            atom[i, s] = -1
            coefficient[i, s] = 0
        used = 0
        remaining = norm2[i]
    else:
        used = counts[i, 2]
        remaining = numbers[i, 2]
    if first_pass:
        active = used < k
        first = used
        steps = 0
        given = remaining
        largest = float64(0.0)
    else:
        active = counts[i, 0] != 0
        first = counts[i, 1]
        steps = counts[i, 3]
        largest = numbers[i, 0]
        given = numbers[i, 1]
    cuda.syncthreads()
    if active:
        before = used - first
        for s in range(tid, before, width):
            j = atom[i, first + s] - start
            candidate[i, s] = j
            value[i, s] = p[j]
            p[j] = 0
        cuda.syncthreads()
        found = _screen(
            p, most, nonneg, floor, preference, maxima, offset, index, size, scores, codes, candidate[i, before:]
        )  # fmt: skip
        cuda.syncthreads()
        n = before + found
        for c in range(before + (tid - before) % width, n, width):
            value[i, c] = p[candidate[i, c]]
        most_here = min(limit, k - first)
        fresh = True
        while True:
            if steps == steps_per_atom * most_here or (rtol > 0 and remaining <= rtol * rtol * norm2[i]):
                active = False
                break
            best = p[0] - p[0]
            own = int32(-1)
            code = int32(D.shape[0])
            for c in range(tid, n, width):
                j = candidate[i, c]
                score = _score(value[i, c], j, nonneg, floor, preference)
                if score > best or (score == best and own >= 0 and j < code):
                    best = score
                    code = j
                    own = int32(c)
            mine = code
            best, code = _block_argmax(best, code, scores, codes)
            if best > 0 and mine == code and own >= 0:
                size[0] = value[i, own]
            cuda.syncthreads()
            a = size[0]
            if best == 0 or abs(a) < smallest[i]:
                if fresh:  # of all atoms, not of the candidates alone
                    active = False
                break
            if steps == 0:
                largest = abs(float64(a))
            if not fresh and share < 1:
                if _over_for_now(a, largest, given, remaining, norm2[i], share, rtol, min_coefficient):
                    break
            j = code + start
            again = 0
            for s in range(tid, used, width):
                if s >= first and atom[i, s] == j:
                    coefficient[i, s] += a
                    again = 1
            if cuda.syncthreads_or(again) == 0:
                if used - first == min(quota, most_here):
                    break
                if tid == used % width:
                    atom[i, used] = j
                    coefficient[i, used] = a
                used += 1
            for c in range(tid, n, width):
                row = candidate[i, c] + start
                total = p[0] - p[0]
                for f in range(D.shape[1]):
                    total += D[row, f] * D[j, f]
                value[i, c] -= a * total
            if rtol > 0:
                remaining -= float64(a) * float64(a)
            steps += 1
            fresh = False
    if tid == 0:
        counts[i, 0] = 1 if active else 0
        counts[i, 1] = first
        counts[i, 2] = used
        counts[i, 3] = steps
        numbers[i, 0] = largest
        numbers[i, 1] = given
        numbers[i, 2] = remaining


@cached(cuda.jit)
def support_grams(R, D, atom, grams, rest):
    """Compute the products of the atoms of each support, and those with its residual, one block per sample.

    Parameters
    ----------
    R : (n, d) residuals;  D : (n_atoms, d);  atom : (n, k) int32
    grams : (n, k, k) out, the lower triangle and its mirror;  rest : (n, k) out
    """
    i = cuda.blockIdx.x
    n = _n_used(atom, i)
    for e in range(cuda.threadIdx.x, n * n, cuda.blockDim.x):
        r = e // n
        c = e % n
        if c > r:
            continue
        total = R[i, 0] - R[i, 0]
        for f in range(R.shape[1]):
            total += D[atom[i, r], f] * D[atom[i, c], f]
        grams[i, r, c] = total
        grams[i, c, r] = total
    for s in range(cuda.threadIdx.x, atom.shape[1], cuda.blockDim.x):
        total = R[i, 0] - R[i, 0]
        if s < n:
            for f in range(R.shape[1]):
                total += R[i, f] * D[atom[i, s], f]
        rest[i, s] = total
