"""Plain-loop twin of the lasso encoder: coordinate descent on all atoms in float64, penalty by penalty."""

from __future__ import annotations

import numpy as np

from tests.naive.kernels import NOISE, refit


def lasso(y, D, penalty, nonneg=False, start=None):
    """Minimise ``|y - x D|^2 / 2 + penalty |x|_1`` for one sample: (n_atoms,)."""
    y, D = np.asarray(y, np.float64), np.asarray(D, np.float64)
    x = np.zeros(D.shape[0]) if start is None else start.copy()
    r = y - x @ D
    for _ in range(20_000):
        before = x.copy()
        for j in range(D.shape[0]):
            v = x[j] + D[j] @ r / (D[j] @ D[j])
            new = np.sign(v) * max(abs(v) - penalty, 0) if not nonneg else max(v - penalty, 0)
            r += (x[j] - new) * D[j]
            x[j] = new
        if np.abs(x - before).max() <= 1e-7 * np.abs(y).max():
            break
    return x


def path_end(y, D, k, *, rtol=0.0, min_coefficient=0.0, nonneg=False):
    """Lasso at the first penalty that ends the path: (penalty, coefficients of all atoms)."""
    y, D = np.asarray(y, np.float64), np.asarray(D, np.float64)
    products = D @ y
    penalty = max(0.0, (products if nonneg else np.abs(products)).max())
    lowest = max(min_coefficient, NOISE * np.linalg.norm(y), 0.01 * penalty)
    x = np.zeros(D.shape[0])
    while penalty > lowest and np.count_nonzero(x) < 2 * k:
        if rtol > 0 and np.linalg.norm(y - x @ D) <= rtol * np.linalg.norm(y):
            break
        penalty = max(0.75 * penalty, lowest)
        x = lasso(y, D, penalty, nonneg, x)
    return penalty, x


def encode(y, D, k, penalty, nonneg=False):
    """Codes at the end of a path: atoms of the k largest coefficients, refitted; and the gap to the next one.

    Which atoms are kept is only defined where the gap is not tiny.
    """
    x = lasso(y, D, penalty, nonneg)
    order = [int(j) for j in np.argsort(-np.abs(x), kind="stable") if x[j] != 0]
    sizes = np.append(np.abs(x[order]), np.zeros(k + 1))
    gap = sizes[k - 1] - sizes[k] if len(order) > k else sizes.min(initial=np.inf, where=sizes > 0)
    return order[:k], refit(y, D, order[:k]), float(gap)
