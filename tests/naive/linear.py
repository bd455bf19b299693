"""A linear encoder, plainly: dense codes, one least-squares problem, loops over bins."""

import numpy as np


def least_squares(Y, X, ridge):
    """W (n_latents, d) and b of the map from samples to codes, with a penalty on W only."""
    n, d = Y.shape
    penalty = np.sqrt(n * ridge * Y.var(axis=0).mean())
    A = np.vstack([Y - Y.mean(axis=0), penalty * np.eye(d)])
    B = np.vstack([X - X.mean(axis=0), np.zeros((d, X.shape[1]))])
    W = np.linalg.lstsq(A, B, rcond=None)[0].T
    return W, X.mean(axis=0) - W @ Y.mean(axis=0)


def thresholds(Z, X, n_bins, bins_per_typical, fewest):
    """Threshold, slope and offset of each latent, from pre-activations and codes (n, n_latents)."""
    out = []
    for z, x in zip(Z.T, X.T, strict=True):
        count = int((x > 0).sum())
        if count == 0:
            out.append((0.0, 0.0, 0.0))
            continue
        width = x[x > 0].mean() / bins_per_typical
        bins = np.minimum(np.floor(z / width).astype(int), n_bins - 1)
        bins[z <= 0] = -1
        above = next((c for c in range(n_bins) if (bins >= c).sum() <= count), n_bins - 1)
        threshold = 0.0
        if above > 0:
            inside = (bins == above - 1).sum()
            missing = count - (bins >= above).sum()
            threshold = (above - (min(max(missing / inside, 0), 1) if inside else 0.0)) * width
        fires = bins >= above
        slope, offset = 1.0, 0.0
        if fires.sum() >= fewest and np.cov(x[fires], z[fires])[0, 1] > 0:
            slope, offset = np.polyfit(z[fires], x[fires], 1)
        if threshold * slope + offset <= 0:  # would silence samples above the threshold
            product = (x[fires] * z[fires]).sum()
            slope, offset = (product / (z[fires] ** 2).sum() if product > 0 else 1.0), 0.0
        out.append((threshold, slope, offset))
    return np.array(out).T


def jump_relu(Y, W, b, threshold):
    """What SAELens documents for its architecture `jumprelu`, sample by sample."""
    acts = np.zeros((len(Y), len(W)))
    for i, y in enumerate(Y):
        for j in range(len(W)):
            z = float(W[j] @ y + b[j])
            acts[i, j] = z if z > threshold[j] and z > 0 else 0.0
    return acts
