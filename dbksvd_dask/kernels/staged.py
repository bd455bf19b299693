"""Staged pursuit: encode with the groups of a dictionary in order, each on the residual of the groups before it.

As in `pursuit`, only products are touched. A step updates the products of its own group only; those of all other
atoms are updated when the group is done, once per atom that it chose.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner_uncounted, jit
from dbksvd_dask.kernels.pursuit import (
    BLOCK,
    STEPS_PER_ATOM,
    clear_slots,
    close_enough,
    find_slot,
    locate,
    noise_floor,
    refit_support,
    scan,
    subtract_and_scan,
    too_small,
)
from dbksvd_dask.plan.encoder import EncodeSpec


@inner_uncounted
def _bring_up_to_date(p, gram, start, stop, first, used, atom, coefficient):
    """Take what a group chose off the products of the atoms outside it."""
    before, after = p[:start], p[stop:]
    for slot in range(first, used):
        x = coefficient[slot]
        row = gram[atom[slot]]
        head, tail = row[:start], row[stop:]
        for t in range(before.shape[0]):
            before[t] -= x * head[t]
        for t in range(after.shape[0]):
            after[t] -= x * tail[t]


@inner_uncounted
def staged_row(p, gram, norm2, stages, k, rtol, min_coefficient, nonneg, atom, coefficient, block_max):
    """Staged pursuit of one sample.

    The rules of `pursuit.pursue_tile` hold inside each group; `rtol` is relative to the sample, not to what a
    group was given.

    Parameters
    ----------
    p : (n_atoms,) products with the sample; on return, products with the residual
    gram : (n_atoms, n_atoms)
    norm2 : squared norm of the sample, float64
    stages : (n_groups, 3) int64: first atom, end, and most nonzeros of each group
    k : most nonzeros of all groups together
    atom : (k,) int32, out; -1 where empty
    coefficient : (k,) out
    block_max : (ceil(n_atoms / BLOCK),) scratch

    Returns
    -------
    n_used : number of different atoms
    """
    clear_slots(atom, coefficient)
    used = 0
    remaining = norm2
    floor = noise_floor(min_coefficient, norm2, p.dtype)
    for g in range(stages.shape[0]):
        start, stop = stages[g, 0], stages[g, 1]
        limit = min(stages[g, 2], k - used)
        first = used
        part = p[start:stop]
        blocks = block_max[: (stop - start + BLOCK - 1) // BLOCK]
        scan(part, nonneg, blocks)
        for _ in range(STEPS_PER_ATOM * limit):
            j = locate(part, nonneg, blocks)
            a = part[j]
            if close_enough(rtol, remaining, norm2) or too_small(a, floor, nonneg):
                break
            slot = find_slot(atom, first, used, start + j)
            if slot == first + limit:
                break
            atom[slot] = start + j
            used = max(used, slot + 1)
            coefficient[slot] += a
            remaining -= np.float64(a) * np.float64(a)
            subtract_and_scan(part, a, gram[start + j][start:stop], nonneg, blocks)
        _bring_up_to_date(p, gram, start, stop, first, used, atom, coefficient)
    return used


@jit
def staged_tile(prods, gram, norm2, stages, k, rtol, min_coefficient, nonneg, refit, atom, coefficient):
    """Staged pursuit of a tile of samples; `refit` is least squares on the support of all groups.

    Parameters
    ----------
    prods : (n, n_atoms) products ``Y D^T``; overwritten
    gram : (n_atoms, n_atoms)
    norm2 : (n,) float64, squared norms of the samples
    stages : (n_groups, 3) int64: first atom, end, and most nonzeros of each group
    atom : (n, k) int32, out
    coefficient : (n, k) out
    """
    n, m = prods.shape
    block_max = np.empty((m + BLOCK - 1) // BLOCK, prods.dtype)
    A = np.empty((k, k), np.float64)
    delta = np.empty(k, np.float64)
    for i in range(n):
        used = staged_row(
            prods[i],
            gram,
            norm2[i],
            stages,
            k,
            rtol,
            min_coefficient,
            nonneg,
            atom[i],
            coefficient[i],
            block_max,
        )
        refit_support(refit, nonneg, prods[i], gram, used, atom[i], coefficient[i], A, delta)


def encode_tile(
    prods: np.ndarray,
    gram: np.ndarray,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
) -> None:
    """Encode one tile group by group; see `kernels.encode.TileEncoder`."""
    stages = np.array(spec.stages, np.int64)
    rtol, smallest = float(spec.rtol), float(spec.min_coefficient)
    staged_tile(prods, gram, norm2, stages, spec.k, rtol, smallest, spec.nonneg, spec.refit, atom, coefficient)
