"""Plain-loop twins of staged encoding, of a batch with frequent atoms first, and of the draw of new atoms."""

from __future__ import annotations

import numpy as np

from tests.naive import kernels


def staged(y, D, stages, k, **how):
    """Groups in order, each pursuing what the ones before left: support, coefficients, smallest gap."""
    r = np.asarray(y, np.float64)
    support, x, smallest = [], [], np.inf
    for start, stop, limit in stages:
        limit = min(limit, k - len(support))
        if limit == 0:
            break
        found, values, gap = kernels.pursue(r, D[start:stop], limit, **how)
        r = r - values @ D[start:stop][found] if found else r
        support += [start + j for j in found]
        x += list(values)
        smallest = min(smallest, gap * np.linalg.norm(r) / max(np.linalg.norm(y), 1e-300))
    return support, np.array(x), smallest


def weighted(y, D, floors, preference, k, *, nonneg=True):
    """Pursuit that takes, of the atoms above their floors, the one of the largest product times preference."""
    r, x = np.asarray(y, np.float64).copy(), {}
    for _ in range(4 * k):
        p = D @ r
        size = p if nonneg else np.abs(p)
        score = np.where(size >= floors, size * preference, 0)
        j = int(np.argmax(score))
        if score[j] <= 0 or (j not in x and len(x) == k):
            break
        x[j] = x.get(j, 0.0) + p[j]
        r -= p[j] * D[j]
    return list(x), np.array(list(x.values()))


def prior_weights(counts, n_samples, noise):
    """Thresholds over t, whose squares are t^2 plus 2 (1.5 sigma)^2 times (log odds less their mean), limited."""
    shares = [min(max(c / n_samples, 1 / n_samples), 0.5) for c in counts]
    odds = [np.log(1 - q) - np.log(q) for q in shares]
    mean = sum(odds) / len(odds)
    per_odds = min(2 * (1.5 * noise) ** 2, 1.5 / mean)
    return np.array([max(1 + per_odds * (o - mean), 0.05) ** 0.5 for o in odds])


def batch_in_order(Y, D, used, k, rounds, *, steps, min_coefficient, nonneg, half=None):
    """One outer batch of a growing dictionary that prefers atoms by use: new one sorted, its uses, residual."""
    X, order = np.zeros((Y.shape[0], D.shape[0])), []
    for i, y in enumerate(Y):
        support, x = weighted(y, D, np.full(len(D), min_coefficient), used, k, nonneg=nonneg)
        X[i, support] = x
        order.append(support)
    counts = (X != 0).sum(axis=0)
    new, X, R = kernels.update(Y, X, D, rounds, order, steps=steps, nonneg=nonneg, half=half)
    new[X.sum(axis=0) < 0] *= -1
    by_use = sorted(range(D.shape[0]), key=lambda j: (-counts[j], j))
    return new[by_use], counts[by_use], R


def proportional_winners(norms, uniform, n):
    """Exact draw without replacement by exponential clocks of rate |r|^2: the first n to ring."""
    times = [-np.log(1 - u) / r**2 if r > 0 else np.inf for r, u in zip(norms, uniform, strict=True)]
    return [i for i in np.argsort(times, kind="stable")[:n] if np.isfinite(times[i])]
