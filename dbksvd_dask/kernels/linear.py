"""A linear encoder fitted to codes: sums over samples, and the encoder that follows from them.

The codes of a pursuit are approximated by one linear step and a threshold per latent, ``z = W y + b``, kept where
``z > threshold``: the encoder of a JumpReLU sparse autoencoder. `W` is the least-squares map from samples to
codes. The threshold lets a latent fire as often as it does in the codes. A last line per latent, fitted where it
fires, undoes the shrinking of least squares and becomes part of `W` and `b`.

A latent is an atom or, for codes of both signs, the positive or the negative part of its coefficient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.kernels._jit import jit
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.products import second_moment

# Bins of a latent's histogram, and bins per typical coefficient: pre-activations from 0 to twice that, in steps of
# 1/32; the threshold is interpolated in between.
N_BINS, BINS_PER_TYPICAL = 64, 32
# Added to the variance of every feature, as a share of their mean: features that never vary have no influence.
RIDGE = 1e-4
# A line needs this many samples on which a latent fires.
FEWEST_FOR_LINE = 16
# Rows of one matrix product.
_TILE = 512


class CodeSums(NamedTuple):
    """Sums over samples y, centred by the dictionary's mean, and codes x."""

    n_samples: int
    y: np.ndarray  # (d,) float64, sum of y
    yy: np.ndarray  # (d, d) float64, sum of y y^T
    x: np.ndarray  # (n_latents,) float64, sum of x
    xy: np.ndarray  # (n_latents, d) float64, sum of x y^T
    counts: np.ndarray  # (n_latents,) int64, samples with x > 0

    def __add__(self, other: Any) -> CodeSums:
        return CodeSums(*(a + b for a, b in zip(tuple(self), other, strict=True)))


class LinearMap(NamedTuple):
    """Pre-activations ``W y + b`` of samples, kept above a threshold."""

    W: np.ndarray  # (n_latents, d) float32
    b: np.ndarray  # (n_latents,) float32
    threshold: np.ndarray  # (n_latents,) float32


def latents_of(atom: np.ndarray, coefficient: np.ndarray, n_atoms: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn codes into latents: a negative coefficient of atom j belongs to latent n_atoms + j, with its size."""
    latent = np.where((atom >= 0) & (coefficient < 0), atom + n_atoms, atom)
    return latent.astype(np.int32), np.abs(coefficient)


@one_blas_thread
def code_sums(Y: np.ndarray, latent: np.ndarray, value: np.ndarray, n_latents: int) -> CodeSums:
    """Sum over a chunk of samples.

    Parameters
    ----------
    Y : (n, d), centred
    latent, value : (n, k), -1 where empty; values >= 0
    """
    A = Y.astype(np.float64)
    x, xy = np.zeros(n_latents), np.zeros((n_latents, Y.shape[1]))
    counts = np.zeros(n_latents, np.int64)
    _add_codes(A, latent, value, x, xy, counts)
    return CodeSums(A.shape[0], A.sum(axis=0), second_moment(A), x, xy, counts)


@jit
def _add_codes(A, latent, value, x, xy, counts):
    """Add the codes of samples `A` to the sums per latent."""
    for i in range(latent.shape[0]):
        for s in range(latent.shape[1]):
            j = latent[i, s]
            v = np.float64(value[i, s])
            if j < 0 or v == 0.0:
                continue
            counts[j] += 1
            x[j] += v
            for f in range(A.shape[1]):
                xy[j, f] += v * A[i, f]


@one_blas_thread
def least_squares(sums: CodeSums) -> LinearMap:
    """Return the linear map with the least squared error to the codes, without thresholds yet."""
    n = max(sums.n_samples, 1)
    mean = sums.y / n
    C = sums.yy / n - np.outer(mean, mean)
    C[np.diag_indices_from(C)] += max(RIDGE * float(np.trace(C)) / C.shape[0], np.finfo(np.float64).tiny)
    means = sums.x / n
    W = np.linalg.solve(C, (sums.xy / n - np.outer(means, mean)).T).T
    b = means - W @ mean
    return LinearMap(*(part.astype(np.float32) for part in (W, b, np.zeros_like(b))))


class BinSums(NamedTuple):
    """Per latent and bin of its pre-activation z, sums over samples: (n_latents, N_BINS) float64 each."""

    n: np.ndarray
    z: np.ndarray
    zz: np.ndarray
    x: np.ndarray
    xz: np.ndarray

    def __add__(self, other: Any) -> BinSums:
        return BinSums(*(a + b for a, b in zip(tuple(self), other, strict=True)))


def typical_coefficients(sums: CodeSums) -> np.ndarray:
    """Return the mean of each latent's nonzero values; 1 where there are none: (n_latents,) float64."""
    return np.where(sums.counts > 0, sums.x / np.maximum(sums.counts, 1), 1.0)


@one_blas_thread
def bin_sums(
    Y: np.ndarray, latent: np.ndarray, value: np.ndarray, linear: LinearMap, typical: np.ndarray
) -> BinSums:
    """Sum over a chunk of samples by bins of their pre-activations; those that are not positive are left out.

    Parameters
    ----------
    Y, latent, value : as for `code_sums`
    typical : (n_latents,) from `typical_coefficients`
    """
    sums = BinSums(*(np.zeros((typical.size, N_BINS)) for _ in range(5)))
    for start in range(0, Y.shape[0], _TILE):
        part = slice(start, start + _TILE)
        Z = np.dot(Y[part], linear.W.T) + linear.b
        _add_bins(Z, latent[part], value[part], BINS_PER_TYPICAL / typical, *sums)
    return sums


@jit
def _add_bins(Z, latent, value, bins_per_one, n, z, zz, x, xz):
    """Add pre-activations (rows, n_latents) and the codes of the same samples to the sums by bin."""
    last = n.shape[1] - 1
    for i in range(Z.shape[0]):
        for j in range(Z.shape[1]):
            a = np.float64(Z[i, j])
            if a > 0.0:
                c = min(np.int64(min(a * bins_per_one[j], 1e9)), last)
                n[j, c] += 1.0
                z[j, c] += a
                zz[j, c] += a * a
        for s in range(latent.shape[1]):
            j = latent[i, s]
            if j < 0:
                continue
            a = np.float64(Z[i, j])
            if a > 0.0:
                c = min(np.int64(min(a * bins_per_one[j], 1e9)), last)
                x[j, c] += value[i, s]
                xz[j, c] += value[i, s] * a


def with_thresholds(linear: LinearMap, bins: BinSums, counts: np.ndarray, typical: np.ndarray) -> LinearMap:
    """Return a map whose latents fire as often as in the codes, and are as large there on average.

    Parameters
    ----------
    linear : from `least_squares`
    bins : sums over the same samples
    counts : (n_latents,) samples with the latent, from `CodeSums`
    typical : (n_latents,)
    """
    from_here = BinSums(*(np.cumsum(part[:, ::-1], axis=1)[:, ::-1] for part in bins))
    above = np.argmax(from_here.n <= counts[:, None], axis=1)  # first bin from which no more samples follow
    above = np.where((from_here.n <= counts[:, None]).any(axis=1), above, N_BINS - 1)
    rows = np.arange(counts.size)
    missing = counts - from_here.n[rows, above]
    inside = np.where(above > 0, bins.n[rows, np.maximum(above - 1, 0)], 0.0)
    share = np.where(inside > 0, np.clip(missing / np.maximum(inside, 1.0), 0.0, 1.0), 0.0)
    threshold = np.where(above > 0, above - share, 0.0) * typical / BINS_PER_TYPICAL
    slope, offset = _lines(*(part[rows, above] for part in from_here))
    dead = counts == 0
    slope, offset = np.where(dead, 0.0, slope), np.where(dead, 0.0, offset)
    return LinearMap(
        (linear.W * slope[:, None]).astype(np.float32),
        (linear.b * slope + offset).astype(np.float32),
        np.maximum(threshold * slope + offset, 0.0).astype(np.float32),
    )


def _lines(
    n: np.ndarray, z: np.ndarray, zz: np.ndarray, x: np.ndarray, xz: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return slope and offset of x over z by least squares; 1 and 0 where that has no positive slope."""
    n_safe = np.maximum(n, 1.0)
    variance = zz / n_safe - np.square(z / n_safe)
    covariance = xz / n_safe - x * z / np.square(n_safe)
    usable = (n >= FEWEST_FOR_LINE) & (covariance > 0) & (variance > 1e-12 * zz / n_safe)
    slope = np.where(usable, covariance / np.where(usable, variance, 1.0), 1.0)
    return slope, np.where(usable, (x - slope * z) / n_safe, 0.0)


@one_blas_thread
def activations(Y: np.ndarray, linear: LinearMap) -> np.ndarray:
    """Return the activations of centred samples: (n, n_latents), 0 up to the threshold."""
    Z = np.dot(Y, linear.W.T) + linear.b
    return np.where(Z > np.maximum(linear.threshold, 0), Z, np.float32(0))
