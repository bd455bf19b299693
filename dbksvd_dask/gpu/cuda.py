"""CUDA kernels: the counterparts of `kernels.pursuit` and `kernels.update`, one block per sample or per atom.

Every kernel gives the same result with any number of threads per block up to `MAX_THREADS`. None uses atomics or
warp shuffles: sums have a fixed order, so a run repeats bit for bit, and numba's simulator, which has no warps,
runs every line.

In a block, thread `tid` owns the elements ``tid, tid + width, ...`` of a row and the slots ``tid, tid + width,
...`` of the codes of a sample. No other thread reads what a thread owns, so most loops need no barrier.
"""

from __future__ import annotations

import math

from numba import config, cuda, float64, int32

from dbksvd_dask.kernels._jit import cached

# Maximum of threads per block: the size of the shared arrays of the reductions. With 256 threads and 4096 products
# of 4 bytes, four blocks fit on a multiprocessor of a T4 (64 KB, 1024 threads).
MAX_THREADS = 256
# Threads that take part in the first half of a reduction; sqrt(MAX_THREADS) makes both halves equally long.
LANES = 16
# A pivot whose square is below this is rounding error (as in kernels.pursuit).
_MIN_PIVOT2 = 1e-10
# Coordinate descent stops when no coefficient moves by more than this share of the largest one (also as there).
_NNLS_TOLERANCE = 1e-7
_NNLS_SWEEPS = 200
# 80 registers per thread let three blocks of 256 threads run on a multiprocessor instead of two, and in float32
# none spills (ptxas for sm_75, sm_80 and sm_90). The simulator has no registers.
PURSUE_REGISTERS = 80
_PURSUE_OPTIONS = {} if config.ENABLE_CUDASIM else {"max_registers": PURSUE_REGISTERS}


@cuda.jit(device=True)
def _block_argmax(score, code, scores, codes):
    """Return the best candidate of the block to every thread: the highest score and, of equals, the lowest code.

    Callers need a barrier before they call again.
    """
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    scores[tid] = score
    codes[tid] = code
    cuda.syncthreads()
    if tid < LANES:
        for t in range(tid + LANES, width, LANES):
            if scores[t] > score or (scores[t] == score and codes[t] < code):
                score = scores[t]
                code = codes[t]
        scores[tid] = score
        codes[tid] = code
    cuda.syncthreads()
    score = scores[0]
    code = codes[0]
    for t in range(1, min(LANES, width)):
        if scores[t] > score or (scores[t] == score and codes[t] < code):
            score = scores[t]
            code = codes[t]
    return score, code


@cuda.jit(device=True)
def _block_sum(value, values):
    """Return the sum over the threads of the block to every thread; the order of the additions is fixed."""
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    cuda.syncthreads()
    values[tid] = value
    cuda.syncthreads()
    if tid < LANES:
        for t in range(tid + LANES, width, LANES):
            values[tid] += values[t]
    cuda.syncthreads()
    total = values[0]
    for t in range(1, min(LANES, width)):
        total += values[t]
    return total


# ---------------------------------------------------------------------------------------------- encoding


@cached(cuda.jit, **_PURSUE_OPTIONS)
def pursue(prods, gram, norm2, limit, stages, steps_per_atom, rtol, nonneg, in_shared, atom, coefficient, rest):
    """Run matching pursuit, one block per sample, by the rules of `kernels.pursuit` and `kernels.staged`.

    Parameters
    ----------
    prods : (n, n_atoms) products; overwritten unless in_shared
    gram : (n_atoms, n_atoms)
    norm2 : (n,) float64, squared norms of the samples
    limit : (n,) smallest coefficient worth taking
    stages : (n_stages, 3) int64: groups offered in order, each (first atom, end, most nonzeros)
    in_shared : whether a row of products is kept in dynamic shared memory (n_atoms * itemsize bytes)
    atom : (n, k) int32, out;  coefficient : (n, k) out
    rest : (n, k) out, products of the chosen atoms with the residual
    """
    scores = cuda.shared.array(MAX_THREADS, prods.dtype)
    codes = cuda.shared.array(MAX_THREADS, int32)
    p = cuda.shared.array(0, prods.dtype)
    i = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    k = atom.shape[1]
    m = gram.shape[0]
    source = prods[i]
    if not in_shared:
        p = source
    for s in range(tid, k, width):
        atom[i, s] = -1
        coefficient[i, s] = 0
    for t in range(tid, m, width):
        p[t] = source[t]
    smallest = limit[i]
    n_used = 0
    remaining = norm2[i]
    target = rtol * rtol * remaining
    for g in range(stages.shape[0]):
        start = stages[g, 0]
        stop = stages[g, 1]
        before = n_used
        most = min(stages[g, 2], k - n_used)
        mine = start + (tid - start) % width  # first of this thread's elements in the group
        score = smallest - smallest
        code = int32(0)  # 2 * index + (1 if negative): the reduction carries sign and lowest index at once
        for t in range(mine, stop, width):
            v = p[t]
            size = v if nonneg else abs(v)
            # ascending t and a strict comparison: of equals a thread keeps the lowest
            if size > score:
                score = size
                code = int32(2 * t + (v < 0))
        for _ in range(steps_per_atom * most):
            if rtol > 0 and remaining <= target:
                break
            score, code = _block_argmax(score, code, scores, codes)
            if score == 0 or score < smallest:
                break
            a = -score if code & 1 else score
            j = code >> 1
            again = 0
            for s in range(tid, n_used, width):
                if atom[i, s] == j:
                    coefficient[i, s] += a
                    again = 1
            if cuda.syncthreads_or(again) == 0:
                if n_used - before == most:
                    break
                if tid == n_used % width:
                    atom[i, n_used] = j
                    coefficient[i, n_used] = a
                n_used += 1
            if rtol > 0:  # double precision is slow on most cards: only where it is needed
                remaining -= float64(a) * float64(a)
            row = gram[j]
            score = smallest - smallest
            code = int32(0)
            for t in range(mine, stop, width):
                v = p[t] - a * row[t]
                p[t] = v
                size = v if nonneg else abs(v)
                if size > score:
                    score = size
                    code = int32(2 * t + (v < 0))
        cuda.syncthreads()
        if stop - start < m:
            _take_off(p, gram, atom, coefficient, i, before, n_used, start, stop)
    cuda.syncthreads()
    for s in range(tid, k, width):
        rest[i, s] = p[atom[i, s]] if s < n_used else 0


@cuda.jit(device=True)
def _take_off(p, gram, atom, coefficient, i, before, n_used, start, stop):
    """Subtract the atoms that a group chose from the products of the atoms outside it."""
    for s in range(before, n_used):
        x = coefficient[i, s]
        row = gram[atom[i, s]]
        for t in range(cuda.threadIdx.x, gram.shape[0], cuda.blockDim.x):
            if t < start or t >= stop:
                p[t] -= x * row[t]


@cuda.jit(device=True)
def _n_used(atom, i):
    """Count the distinct atoms of sample i; slots fill from the front."""
    n = 0
    while n < atom.shape[1] and atom[i, n] >= 0:
        n += 1
    return n


@cached(cuda.jit)
def refit(grams, place, rest, A, delta, coefficient):
    """Solve least squares on the supports: ``gram[S, S] delta = rest`` by Cholesky, blocks over samples.

    Parameters
    ----------
    grams : (1, n_atoms, n_atoms), or (n, k, k) with one for each sample
    place : (n, k) int32, rows of the gram: the atoms, or the slots; -1 where empty
    rest : (n, k), products of the chosen atoms with the residual
    A : (blocks, k, k) float64 scratch;  delta : (blocks, k) float64 scratch
    coefficient : (n, k), changed
    """
    b = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    for i in range(b, place.shape[0], cuda.gridDim.x):
        gram = grams[i if grams.shape[0] > 1 else 0]
        n = _n_used(place, i)
        cuda.syncthreads()
        for r in range(tid, n, width):
            delta[b, r] = rest[i, r]
            for c in range(r + 1):
                A[b, r, c] = gram[place[i, r], place[i, c]]
        cuda.syncthreads()
        for c in range(n):
            for r in range(c + (tid - c) % width, n, width):
                total = A[b, r, c]
                for t in range(c):
                    total -= A[b, r, t] * A[b, c, t]
                A[b, r, c] = total
            cuda.syncthreads()
            pivot2 = A[b, c, c]
            pivot = math.sqrt(pivot2) if pivot2 > _MIN_PIVOT2 else math.inf
            cuda.syncthreads()
            for r in range(c + (tid - c) % width, n, width):
                A[b, r, c] = pivot if r == c else A[b, r, c] / pivot
            cuda.syncthreads()
        for c in range(n):  # L z = rest
            z = delta[b, c] / A[b, c, c]
            cuda.syncthreads()
            for r in range(c + (tid - c) % width, n, width):
                delta[b, r] = z if r == c else delta[b, r] - A[b, r, c] * z
            cuda.syncthreads()
        for c in range(n - 1, -1, -1):  # L^T delta = z
            z = delta[b, c] / A[b, c, c]
            cuda.syncthreads()
            for r in range(tid, c + 1, width):
                delta[b, r] = z if r == c else delta[b, r] - A[b, c, r] * z
            cuda.syncthreads()
        for r in range(tid, n, width):
            coefficient[i, r] += delta[b, r]


@cached(cuda.jit)
def refit_nonneg(grams, place, rest, A, delta, coefficient):
    """Solve non-negative least squares on the supports by coordinate descent; arguments as in `refit`."""
    b = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    for i in range(b, place.shape[0], cuda.gridDim.x):
        gram = grams[i if grams.shape[0] > 1 else 0]
        n = _n_used(place, i)
        cuda.syncthreads()
        largest = float64(0.0)
        for r in range(n):
            largest = max(largest, float64(coefficient[i, r]))
        for r in range(tid, n, width):
            delta[b, r] = rest[i, r]
            for c in range(n):
                A[b, r, c] = gram[place[i, r], place[i, c]]
        cuda.syncthreads()
        for _ in range(_NNLS_SWEEPS):
            moved = float64(0.0)
            for c in range(n):
                old = float64(coefficient[i, c])
                wanted = max(old + delta[b, c] / A[b, c, c], float64(0.0))
                cuda.syncthreads()
                if tid == c % width:
                    coefficient[i, c] = wanted
                cuda.syncthreads()
                # the stored value is rounded, and the products must match the stored value
                step = float64(coefficient[i, c]) - old
                for r in range(tid, n, width):
                    delta[b, r] -= step * A[b, c, r]
                moved = max(moved, abs(step))
                cuda.syncthreads()
            if moved <= _NNLS_TOLERANCE * largest:
                break


@cached(cuda.jit)
def subtract_reconstruction(Y, atom, coefficient, D, R):
    """Write the residual Y - X D to R, one block per sample."""
    i = cuda.blockIdx.x
    for f in range(cuda.threadIdx.x, Y.shape[1], cuda.blockDim.x):
        r = Y[i, f]
        for s in range(atom.shape[1]):
            j = atom[i, s]
            if j >= 0:
                r -= coefficient[i, s] * D[j, f]
        R[i, f] = r


# ---------------------------------------------------------------------------------------------- update


@cached(cuda.jit)
def entry_products(R, x, start, pos, local, V, dv, weight):
    """Compute ``s = R_i . v + x_i (d_j . v)`` for every nonzero of a round, one block per sample.

    Parameters
    ----------
    x : (n * k,) coefficients;  start : (n + 1,);  pos, local : (n * k,), grouped by round and row
    V : (n_local, d) current vectors;  dv : (n_local,) products of the old atoms with them
    weight : (n * k,) out, at the positions of the round's nonzeros
    """
    values = cuda.shared.array(MAX_THREADS, R.dtype)
    i = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    for e in range(start[i], start[i + 1]):
        j = local[e]
        s = R[i, 0] - R[i, 0]
        for f in range(tid, R.shape[1], cuda.blockDim.x):
            s += R[i, f] * V[j, f]
        s = _block_sum(s, values)
        if tid == 0:
            weight[pos[e]] = s + x[pos[e]] * dv[j]


@cached(cuda.jit)
def atom_sums(R, weight, x, order, rows, first, j0, W, wx, w2):
    """Sum ``w R_i``, ``w x`` and ``w^2`` over the samples of each atom, in the order of the samples.

    Blocks are (atoms of the round, tiles of features): neighbouring blocks read the same columns of R.

    Parameters
    ----------
    weight, x : (n * k,);  order, rows : (n * k,) positions grouped by atom, and the samples they belong to
    first : (n_atoms + 1,) where each atom's positions begin;  j0 : number of the round's first atom in it
    W : (n_local, d) out;  wx, w2 : (n_local,) float64, out
    """
    values = cuda.shared.array(MAX_THREADS, float64)
    j = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    begin = first[j0 + j]
    end = first[j0 + j + 1]
    f = cuda.blockIdx.y * width + tid
    if f < R.shape[1]:
        total = R[0, 0] - R[0, 0]
        for e in range(begin, end):
            total += weight[order[e]] * R[rows[e], f]
        W[j, f] = total
    if cuda.blockIdx.y == 0:
        a = float64(0.0)
        b = float64(0.0)
        for e in range(begin + tid, end, width):
            w = float64(weight[order[e]])
            a += w * float64(x[order[e]])
            b += w * w
        a = _block_sum(a, values)
        b = _block_sum(b, values)
        if tid == 0:
            wx[j] = a
            w2[j] = b


@cached(cuda.jit)
def refresh(R, x, start, pos, local, old, new, nonneg, in_shared, R_new, x_new):
    """Exchange a round's atoms and refit their coefficients, one block per sample; as `kernels.update.refresh`.

    Parameters
    ----------
    old, new : (n_local, d) atoms of the round before and after
    in_shared : whether the row is kept in dynamic shared memory (d * itemsize bytes)
    R_new : (n, d) out;  x_new : (n * k,) out, a copy of x on entry
    """
    values = cuda.shared.array(MAX_THREADS, R.dtype)
    r = cuda.shared.array(0, R.dtype)
    i = cuda.blockIdx.x
    tid = cuda.threadIdx.x
    width = cuda.blockDim.x
    d = R.shape[1]
    if not in_shared:
        r = R_new[i]
    for f in range(tid, d, width):
        r[f] = R[i, f]
    for e in range(start[i], start[i + 1]):
        a = x[pos[e]]
        j = local[e]
        for f in range(tid, d, width):
            r[f] += a * (old[j, f] - new[j, f])
    for e in range(start[i], start[i + 1]):
        j = local[e]
        a = R[i, 0] - R[i, 0]
        for f in range(tid, d, width):
            a += r[f] * new[j, f]
        a = _block_sum(a, values)
        if nonneg and x[pos[e]] + a < 0:
            a = -x[pos[e]]
        if tid == 0:
            x_new[pos[e]] = x[pos[e]] + a
        for f in range(tid, d, width):
            r[f] -= a * new[j, f]
    if in_shared:
        for f in range(tid, d, width):
            R_new[i, f] = r[f]
