"""Matching pursuit with weights: each atom has its own threshold and its own preference.

Of the atoms whose product reaches their threshold, a step takes the one with the largest product times preference.
With equal thresholds and preferences this is `pursuit`.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner_uncounted, jit, kernel_input, running_max
from dbksvd_dask.kernels.pursuit import (
    BLOCK,
    STEPS_PER_ATOM,
    best_block,
    clear_slots,
    close_enough,
    find_slot,
    noise_floor,
    refit_support,
    too_small,
)
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec


@inner_uncounted
def _subtract_and_score(p, a, g, floor, preference, nonneg, block_max):
    """Do p -= a * g and fill block_max with the best score of each block, in one pass."""
    for b in range(block_max.shape[0]):
        part, row = p[b * BLOCK : (b + 1) * BLOCK], g[b * BLOCK : (b + 1) * BLOCK]
        low, wanted = floor[b * BLOCK : (b + 1) * BLOCK], preference[b * BLOCK : (b + 1) * BLOCK]
        best = p.dtype.type(0)
        if nonneg:
            for t in range(part.shape[0]):
                v = part[t] - a * row[t]
                part[t] = v
                # a product with 0 or 1, not a branch: it vectorises
                best = running_max(best, v * wanted[t] * part.dtype.type(v >= low[t]))
        else:
            for t in range(part.shape[0]):
                v = part[t] - a * row[t]
                part[t] = v
                best = running_max(best, abs(v) * wanted[t] * part.dtype.type(abs(v) >= low[t]))
        block_max[b] = best


@inner_uncounted
def _locate(p, floor, preference, nonneg, block_max):
    """Atom of the best score, the lowest one among equals; -1 when there is none."""
    block = best_block(block_max)
    largest = block_max[block]
    if not largest > 0:
        return -1
    for j in range(block * BLOCK, min((block + 1) * BLOCK, p.shape[0])):
        size = p[j] if nonneg else abs(p[j])
        if size >= floor[j] and size * preference[j] == largest:
            return j
    return -1


@inner_uncounted
def weighted_row(p, gram, norm2, rtol, floor, preference, nonneg, atom, coefficient, block_max):
    """Weighted pursuit of one sample; stops as `pursuit` does, each atom with a threshold of its own.

    Parameters
    ----------
    p : (n_atoms,) products with the sample; on return, products with the residual
    gram : (n_atoms, n_atoms)
    norm2 : squared norm of the sample, float64
    floor : (n_atoms,) smallest coefficient of each atom;  preference : (n_atoms,) positive
    atom : (k,) int32, out; -1 where empty;  coefficient : (k,) out
    block_max : (ceil(n_atoms / BLOCK),) scratch

    Returns
    -------
    n_used : number of different atoms
    """
    k = atom.shape[0]
    clear_slots(atom, coefficient)
    used, remaining = 0, norm2
    noise = noise_floor(0.0, norm2, p.dtype)
    a = p.dtype.type(0)
    _subtract_and_score(p, a, gram[0], floor, preference, nonneg, block_max)
    for _ in range(STEPS_PER_ATOM * k):
        j = _locate(p, floor, preference, nonneg, block_max)
        if close_enough(rtol, remaining, norm2) or j < 0 or too_small(p[j], noise, nonneg):
            break
        slot = find_slot(atom, 0, used, j)
        if slot == k:
            break
        a = p[j]
        atom[slot] = j
        used = max(used, slot + 1)
        coefficient[slot] += a
        remaining -= np.float64(a) * np.float64(a)
        _subtract_and_score(p, a, gram[j], floor, preference, nonneg, block_max)
    return used


@jit
def weighted_tile(prods, gram, norm2, rtol, floor, preference, nonneg, refit, atom, coefficient):
    """Weighted pursuit of a tile of samples; parameters as in `weighted_row`, `refit` as in `pursuit`.

    Parameters
    ----------
    prods : (n, n_atoms) products ``Y D^T``; overwritten
    norm2 : (n,) float64, squared norms of the samples
    atom : (n, k) int32, out;  coefficient : (n, k) out
    """
    n, m = prods.shape
    k = atom.shape[1]
    block_max = np.empty((m + BLOCK - 1) // BLOCK, prods.dtype)
    A = np.empty((k, k), np.float64)
    delta = np.empty(k, np.float64)
    for i in range(n):
        p = prods[i]
        used = weighted_row(p, gram, norm2[i], rtol, floor, preference, nonneg, atom[i], coefficient[i], block_max)
        refit_support(refit, nonneg, p, gram, used, atom[i], coefficient[i], A, delta)


def encode_tile(
    prods: np.ndarray,
    gram: np.ndarray,
    norm2: np.ndarray,
    spec: EncodeSpec,
    weights: AtomWeights,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode one tile with weights per atom; otherwise as `kernels.encode.TileEncoder`."""
    floor = kernel_input(float(spec.min_coefficient) * weights.threshold, prods.dtype)
    preference = kernel_input(weights.preference, prods.dtype)
    rtol, nonneg, refit = float(spec.rtol), spec.nonneg, spec.refit
    weighted_tile(prods, gram, norm2, rtol, floor, preference, nonneg, refit, atom, coefficient)
