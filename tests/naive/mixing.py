"""The figure of mixing and the order of a shuffle, in plain loops over everything at once."""

from __future__ import annotations

import numpy as np


def batch_mean_ratio(rows, batch_rows):
    """Variance of the means of batches over that of a full shuffle, averaged over the features that vary."""
    rows = np.asarray(rows, np.float64)
    batches = [rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows)]
    ratios = []
    for j in range(rows.shape[1]):
        mean = rows[:, j].mean()
        between = sum(len(b) * (b[:, j].mean() - mean) ** 2 for b in batches) / (len(batches) - 1)
        variance = rows[:, j].var(ddof=1)
        if variance > 0:
            ratios.append(between / variance)
    return float(np.mean(ratios))


def shuffled_order(plan):
    """Which source row each row of the result is, from the plan, with lists instead of files."""
    counts = plan.counts()
    segments = {}
    for block in range(plan.n_blocks):
        start, _ = plan.bounds(block)
        rows = [start + int(i) for i in plan.block_order(block)]
        for bucket in range(plan.n_blocks):
            n = int(counts[block, bucket])
            segments[block, bucket], rows = rows[:n], rows[n:]
        assert not rows
    order = []
    for bucket in range(plan.n_blocks):
        gathered = [row for block in range(plan.n_blocks) for row in segments[block, bucket]]
        order += [gathered[int(i)] for i in plan.bucket_order(bucket)]
    return np.array(order)
