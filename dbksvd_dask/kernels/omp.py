"""Orthogonal matching pursuit in the gram domain: Batch-OMP with a progressive Cholesky factor.

Let L be the Cholesky factor of ``gram[S, S]`` for the support S in order of selection. The rows of
``W = L^-1 gram[S, :]`` are the products of all atoms with an orthonormal basis of the chosen ones. One step is::

    j = argmax |p|
    w = (gram[j] - sum_s W[s, j] W[s]) / pivot        # W[s, j] is the new row of L
    z = p[j] / pivot                                  # coordinate along the new basis vector
    p -= z * w                                        # products with the new residual

and the coefficients solve ``L^T x = z`` once, at the end.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner_uncounted, jit
from dbksvd_dask.kernels.pursuit import (
    BLOCK,
    clear_slots,
    close_enough,
    locate,
    noise_floor,
    scan,
    subtract_and_scan,
    too_small,
)
from dbksvd_dask.plan.encoder import EncodeSpec

# A candidate whose part outside the span of the support has a squared norm below this duplicates the support:
# adding it would only amplify rounding.
_MIN_PIVOT2 = 1e-6


@inner_uncounted
def _orthogonal_products(gram_row, W, j, n_used, out):
    """Write gram_row - sum_s W[s, j] W[s] to out, four rows of W at a time to save passes over out."""
    m = out.shape[0]
    for t in range(m):
        out[t] = gram_row[t]
    s = 0
    while s + 4 <= n_used:
        w0, w1, w2, w3 = W[s], W[s + 1], W[s + 2], W[s + 3]
        c0, c1, c2, c3 = w0[j], w1[j], w2[j], w3[j]
        for t in range(m):
            out[t] -= c0 * w0[t] + c1 * w1[t] + c2 * w2[t] + c3 * w3[t]
        s += 4
    while s < n_used:
        w0 = W[s]
        c0 = w0[j]
        for t in range(m):
            out[t] -= c0 * w0[t]
        s += 1


@inner_uncounted
def _back_substitute(W, pivot, z, atom, n_used, coefficient):
    """Solve L^T x = z, where L[i, s] = W[s, atom[i]] below the diagonal and pivot[i] on it."""
    for i in range(n_used - 1, -1, -1):
        total = np.float64(z[i])
        for t in range(i + 1, n_used):
            total -= np.float64(W[i, atom[t]]) * np.float64(coefficient[t])
        coefficient[i] = total / pivot[i]


@inner_uncounted
def orthogonal_row(p, gram, norm2, k, rtol, min_coefficient, atom, coefficient, W, pivot, z, block_max):
    """Orthogonal matching pursuit of one sample; see the module's text for the recurrence.

    Parameters
    ----------
    p : (n_atoms,) products with the sample; overwritten
    W : (k, n_atoms) scratch;  pivot : (k,) float64 scratch;  z : (k,) scratch
    """
    n_used = 0
    clear_slots(atom, coefficient)
    remaining = norm2
    floor = noise_floor(min_coefficient, norm2, p.dtype)
    scan(p, False, block_max)
    while n_used < k and not close_enough(rtol, remaining, norm2):
        j = locate(p, False, block_max)
        if too_small(p[j], floor, False):
            break
        pivot2 = np.float64(gram[j, j])
        for s in range(n_used):
            pivot2 -= np.float64(W[s, j]) * np.float64(W[s, j])
        if pivot2 < _MIN_PIVOT2:
            break
        pivot[n_used] = np.sqrt(pivot2)
        inverse = p.dtype.type(1.0 / pivot[n_used])
        row = W[n_used]
        _orthogonal_products(gram[j], W, j, n_used, row)
        for t in range(row.shape[0]):
            row[t] *= inverse
        z[n_used] = p[j] * inverse
        remaining -= np.float64(z[n_used]) * np.float64(z[n_used])
        atom[n_used] = j
        subtract_and_scan(p, z[n_used], row, False, block_max)
        n_used += 1
        # exactly zero in theory; rounding must not let a chosen atom be chosen again
        for s in range(n_used):
            p[atom[s]] = 0
    _back_substitute(W, pivot, z, atom, n_used, coefficient)
    return n_used


@jit
def orthogonal_tile(prods, gram, norm2, k, rtol, min_coefficient, atom, coefficient):
    """Orthogonal matching pursuit of a tile of samples; arguments as in `pursuit.pursue_tile`."""
    n, m = prods.shape
    W = np.empty((k, m), prods.dtype)
    pivot = np.empty(k, np.float64)
    z = np.empty(k, prods.dtype)
    block_max = np.empty((m + BLOCK - 1) // BLOCK, prods.dtype)
    for i in range(n):
        orthogonal_row(
            prods[i],
            gram,
            norm2[i],
            k,
            rtol,
            min_coefficient,
            atom[i],
            coefficient[i],
            W,
            pivot,
            z,
            block_max,
        )


def encode_tile(
    prods: np.ndarray,
    gram: np.ndarray,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode one tile by orthogonal matching pursuit; see `kernels.encode.TileEncoder`."""
    rtol, smallest = float(spec.rtol), float(spec.min_coefficient)
    orthogonal_tile(prods, gram, norm2, spec.k, rtol, smallest, atom, coefficient)
