"""Plain-loop twins of staged encoding and of the draw of new atoms."""

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


def proportional_winners(norms, uniform, n):
    """Exact draw without replacement by exponential clocks of rate |r|^2: the first n to ring."""
    times = [-np.log(1 - u) / r**2 if r > 0 else np.inf for r, u in zip(norms, uniform, strict=True)]
    return [i for i in np.argsort(times, kind="stable")[:n] if np.isfinite(times[i])]
