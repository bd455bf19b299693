"""Plain-loop twins of the sums over codes that the encode job gathers."""

from __future__ import annotations

import numpy as np


def largest(atom, coefficient, n_atoms, n_top, sign):
    """Sort every atom's samples of one sign by |coefficient|, then by sample; both of shape (n_atoms, n_top)."""
    found = [[] for _ in range(n_atoms)]
    for i in range(atom.shape[0]):
        for j, x in zip(atom[i], coefficient[i], strict=True):
            if j >= 0 and x * sign > 0:
                found[j].append((-abs(float(x)), i, x))
    sample, value = np.full((n_atoms, n_top), -1, np.int64), np.zeros((n_atoms, n_top), np.float32)
    for j, entries in enumerate(found):
        for t, (_, i, x) in enumerate(sorted(entries)[:n_top]):
            sample[j, t], value[j, t] = i, x
    return sample, value


def per_atom(atom, coefficient, n_atoms):
    """Count, positive count, sum, sum of squares and largest absolute value of every atom."""
    out = {name: np.zeros(n_atoms) for name in ("count", "positive_count", "coefficient_sum")}
    out |= {"coefficient_square_sum": np.zeros(n_atoms), "abs_max": np.zeros(n_atoms)}
    for j, x in zip(atom.ravel(), coefficient.ravel().astype(np.float64), strict=True):
        if j < 0 or x == 0:
            continue
        out["count"][j] += 1
        out["positive_count"][j] += x > 0
        out["coefficient_sum"][j] += x
        out["coefficient_square_sum"][j] += x * x
        out["abs_max"][j] = max(out["abs_max"][j], abs(x))
    return out


def reconstruct(atom, coefficient, D):
    """Samples from codes in float64."""
    out = np.zeros((atom.shape[0], D.shape[1]))
    for i in range(atom.shape[0]):
        for j, x in zip(atom[i], coefficient[i], strict=True):
            if j >= 0:
                out[i] += float(x) * D[j].astype(np.float64)
    return out
