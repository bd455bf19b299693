"""Plain-loop twins of every kernel and rule: float64, np.linalg.svd, no tricks.

They say what the fast code must compute. Nothing here imports the kernels.
"""

from __future__ import annotations

import numpy as np

NOISE = 16 * np.finfo(np.float32).eps  # products below this share of |y| are rounding


def unit_rows(D):
    return D / np.linalg.norm(D, axis=1, keepdims=True)


def best_atom(p, nonneg):
    """Index of the largest |p| (or p), lowest index first, and the gap to the runner-up."""
    score = p if nonneg else np.abs(p)
    j = int(np.argmax(score))
    others = np.delete(score, j)
    gap = score[j] - others.max() if others.size else np.inf
    return j, gap


def pursue(y, D, k, *, rtol=0.0, min_coefficient=0.0, nonneg=False, noise=NOISE):
    """Matching pursuit of one sample.

    Returns the atoms in order of first selection, their coefficients, and the smallest gap between the two best
    candidates of any step, relative to the sample's norm: a support is only defined where it is not tiny.
    """
    y, D = np.asarray(y, np.float64), np.asarray(D, np.float64)
    norm = np.linalg.norm(y)
    r = y.copy()
    support, x = [], {}
    smallest_gap = np.inf
    for _ in range(4 * k):
        if rtol > 0 and np.linalg.norm(r) <= rtol * norm:
            break
        p = D @ r
        j, gap = best_atom(p, nonneg)
        a = p[j]
        if nonneg and a <= 0:
            break
        if abs(a) < max(min_coefficient, noise * norm) or a == 0:
            break
        smallest_gap = min(smallest_gap, gap / norm)
        if j not in x:
            if len(support) == k:
                break
            support.append(j)
            x[j] = 0.0
        x[j] += a
        r = r - a * D[j]
    return support, np.array([x[j] for j in support]), smallest_gap


def screened(y, D, k, passes, candidates, *, rtol=0.0, min_coefficient=0.0, nonneg=False, noise=NOISE):
    """Matching pursuit in passes, each among the atoms with the largest products at its start and those chosen."""
    y, D = np.asarray(y, np.float64), np.asarray(D, np.float64)
    norm = np.linalg.norm(y)
    r, support, x, steps, largest = y.copy(), [], {}, 0, None
    for t in range(passes):
        quota, share, fresh = -(-k * (t + 1) // passes), (t + 1) / passes, True
        score = (D @ r) if nonneg else np.abs(D @ r)
        score[support] = 0
        order = [j for j in np.argsort(-score, kind="stable")[:candidates] if score[j] > 0]
        allowed = np.array(sorted(set(order) | set(support)), int)
        while allowed.size:
            if steps == 4 * k or (rtol > 0 and np.linalg.norm(r) <= rtol * norm):
                return support, np.array([x[j] for j in support])
            p = D[allowed] @ r
            j, a = allowed[np.argmax(p if nonneg else np.abs(p))], p[np.argmax(p if nonneg else np.abs(p))]
            if (nonneg and a <= 0) or abs(a) < max(min_coefficient, noise * norm) or a == 0:
                if fresh:
                    return support, np.array([x[j] for j in support])
                break
            largest = abs(a) if largest is None else largest
            if not fresh and share < 1:
                if 0 < min_coefficient < largest and abs(a) < largest * (min_coefficient / largest) ** share:
                    break
                if rtol > 0 and np.linalg.norm(r) <= norm * rtol**share:
                    break
            if j not in x:
                if len(support) == quota:
                    break
                support.append(j)
                x[j] = 0.0
            x[j] += a
            r, steps, fresh = r - a * D[j], steps + 1, False
    return support, np.array([x[j] for j in support])


def refit(y, D, support):
    """Least squares on a support."""
    if len(support) == 0:
        return np.empty(0)
    A = np.asarray(D, np.float64)[support]
    return np.linalg.lstsq(A.T, np.asarray(y, np.float64), rcond=None)[0]


def omp(y, D, k, *, rtol=0.0, min_coefficient=0.0, noise=NOISE):
    """Orthogonal matching pursuit of one sample by least squares in every step."""
    y, D = np.asarray(y, np.float64), np.asarray(D, np.float64)
    norm = np.linalg.norm(y)
    support, r = [], y.copy()
    smallest_gap = np.inf
    while len(support) < k:
        if rtol > 0 and np.linalg.norm(r) <= rtol * norm:
            break
        p = D @ r
        p[support] = 0
        j, gap = best_atom(p, False)
        if abs(p[j]) < max(min_coefficient, noise * norm) or p[j] == 0:
            break
        basis = np.linalg.qr(D[support].T)[0] if support else np.zeros((D.shape[1], 0))
        outside = D[j] - basis @ (basis.T @ D[j])
        if outside @ outside < 1e-6:
            break
        smallest_gap = min(smallest_gap, gap / norm)
        support.append(j)
        r = y - refit(y, D, support) @ D[support]
    return support, refit(y, D, support), smallest_gap


def dense(atom, coefficient, n_atoms):
    """Codes as a dense matrix (n, n_atoms)."""
    X = np.zeros((atom.shape[0], n_atoms))
    for i in range(atom.shape[0]):
        for s in range(atom.shape[1]):
            if atom[i, s] >= 0:
                X[i, atom[i, s]] += coefficient[i, s]
    return X


def error_matrix(R, X, D, j):
    """E of atom j: the residual of its samples with its own contribution put back, and those samples."""
    samples = np.flatnonzero(X[:, j] != 0)
    return R[samples] + np.outer(X[samples, j], D[j]), samples


def leading_vector(E, old):
    """Leading right singular vector, turned towards the old atom."""
    v = np.linalg.svd(E, full_matrices=False)[2][0]
    return -v if v @ old < 0 else v


def krylov_vector(E, x, steps, old):
    """Best vector of the Krylov space of dimension `steps` grown from E^T x: Rayleigh-Ritz on the left side."""
    U = [x / np.linalg.norm(x)]
    for _ in range(steps - 1):
        U.append(E @ (E.T @ U[-1]))
    Q = np.linalg.qr(np.array(U).T)[0]
    v = np.linalg.svd(Q.T @ E, full_matrices=False)[2][0]
    return -v if v @ old < 0 else v


def refresh_rows(R, X, old_D, new_D, members, order, nonneg=False):
    """Exchange the atoms `members` and refit their coefficients row by row.

    `order[i]` lists the atoms of row i in the order of its slots.
    """
    R, X = R.copy(), X.copy()
    for i in range(R.shape[0]):
        mine = [j for j in order[i] if j in set(members)]
        for j in mine:
            R[i] += X[i, j] * (old_D[j] - new_D[j])
        for j in mine:
            a = R[i] @ new_D[j]
            if nonneg:
                a = max(a, -X[i, j])
            X[i, j] += a
            R[i] -= a * new_D[j]
    return R, X


def update(Y, X, D, rounds, order, *, steps=None, nonneg=False, half=None):
    """Dictionary update in rounds: exact SVD per atom, or `steps` Krylov steps.

    With `half`, the rows of a sample count (half / (half + norm of its residual))^2 in the atoms.
    """
    D, X = D.copy(), X.copy()
    R = Y - X @ D
    s = np.ones(len(Y)) if half is None else np.array([half / (half + np.linalg.norm(r)) for r in R])
    for members in rounds:
        new = D.copy()
        for j in members:
            E, samples = error_matrix(R, X, D, j)
            if samples.size == 0:
                continue
            if steps is None:
                new[j] = leading_vector(s[samples, None] * E, D[j])
            else:
                new[j] = krylov_vector(s[samples, None] * E, s[samples] * X[samples, j], steps, D[j])
        R, X = refresh_rows(R, X, D, new, members, order, nonneg)
        D = new
    return D, X, R


def replace_dead(D, X, R, counts):
    """Dead atoms, ascending, take the worst-reconstructed samples, worst first, each once."""
    D = D.copy()
    samples = R + X @ D
    order = np.argsort(-np.linalg.norm(R, axis=1), kind="stable")
    order = [i for i in order if np.linalg.norm(samples[i]) > 0]
    for j, i in zip(np.flatnonzero(counts == 0), order, strict=False):
        D[j] = samples[i] / np.linalg.norm(samples[i])
    return D


def encode_matrix(Y, D, k, **how):
    """Codes of a matrix as (X dense, order of slots per row, smallest gap of any step)."""
    X = np.zeros((Y.shape[0], D.shape[0]))
    order, smallest = [], np.inf
    for i, y in enumerate(Y):
        support, x, gap = pursue(y, D, k, **how)
        X[i, support] = x
        order.append(support)
        smallest = min(smallest, gap)
    return X, order, smallest


def outer_batch(Y, D, groups, rounds, *, steps=None, nonneg=False):
    """One outer batch, Matryoshka groups in order: the new dictionary, the final residual and the gap.

    An atom whose coefficients have a negative mean is negated.

    `groups` is a list of (start, stop, k), `rounds[g]` the rounds of group g with indices inside the group.
    """
    R = np.asarray(Y, np.float64)
    out = np.asarray(D, np.float64).copy()
    smallest = np.inf
    for (start, stop, k), parts in zip(groups, rounds, strict=True):
        own = out[start:stop]
        X, order, gap = encode_matrix(R, own, k, nonneg=nonneg)
        counts = (X != 0).sum(axis=0)
        new, X, R = update(R, X, own, parts, order, steps=steps, nonneg=nonneg)
        out[start:stop] = replace_dead(new, X, R, counts)
        out[start:stop][X.sum(axis=0) < 0] *= -1
        smallest = min(smallest, gap)
    return out, R, smallest
