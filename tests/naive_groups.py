"""Plain-loop twins of staged encoding, of a batch with frequent atoms first, and of the draw of new atoms."""

from __future__ import annotations

import numpy as np

from tests import naive


def staged(y, D, stages, k, **how):
    """Groups in order, each pursuing what the ones before left: support, coefficients, smallest gap."""
    r = np.asarray(y, np.float64)
    support, x, smallest = [], [], np.inf
    for start, stop, limit in stages:
        limit = min(limit, k - len(support))
        if limit == 0:
            break
        found, values, gap = naive.pursue(r, D[start:stop], limit, **how)
        r = r - values @ D[start:stop][found] if found else r
        support += [start + j for j in found]
        x += list(values)
        smallest = min(smallest, gap * np.linalg.norm(r) / max(np.linalg.norm(y), 1e-300))
    return support, np.array(x), smallest


def weighted(y, D, weights, k, *, min_coefficient):
    """Non-negative pursuit that takes the atom of the largest product per weight: support and coefficients."""
    r, x = np.asarray(y, np.float64).copy(), {}
    for _ in range(4 * k):
        p = D @ r
        j = int(np.argmax(p / weights))
        if p[j] / weights[j] < min_coefficient or (j not in x and len(x) == k):
            break
        x[j] = x.get(j, 0.0) + p[j]
        r -= p[j] * D[j]
    support = list(x)
    return support, np.array([x[j] for j in support])


def prior_weights(counts, n_samples):
    """Square root of the log of one over the share of samples, of mean 1."""
    raw = [np.sqrt(np.log(1 / min(max(c / n_samples, 1 / n_samples), 0.5))) for c in counts]
    return np.array(raw) / (sum(raw) / len(raw))


def batch_in_order(Y, D, stages, k, rounds, *, steps, **how):
    """One outer batch of a growing dictionary: the new one sorted by use, the uses, the residual, the gap.

    Groups are offered in order, but every atom is fitted to what all of them leave.
    """
    X, order, smallest = np.zeros((Y.shape[0], D.shape[0])), [], np.inf
    for i, y in enumerate(Y):
        support, x, gap = staged(y, D, stages, k, **how)
        X[i, support] = x
        order.append(support)
        smallest = min(smallest, gap)
    counts = (X != 0).sum(axis=0)
    new, X, R = naive.update(Y, X, D, rounds, order, steps=steps, nonneg=how["nonneg"])
    new = naive.replace_dead(new, X, R, counts)
    by_use = sorted(range(D.shape[0]), key=lambda j: (-counts[j], j))
    return new[by_use], counts[by_use], R, smallest


def proportional_winners(norms, uniform, n):
    """Exact draw without replacement by exponential clocks of rate |r|^2: the first n to ring."""
    times = [-np.log(1 - u) / r**2 if r > 0 else np.inf for r, u in zip(norms, uniform, strict=True)]
    return [i for i in np.argsort(times, kind="stable")[:n] if np.isfinite(times[i])]
