"""Encode samples on the device without a gram: the counterpart of `kernels.screened`.

A pass takes one matrix product and one launch per tile. Samples that have ended are skipped by the launch, not by
the product: to know that all of them have, the host would have to wait for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.gpu import cuda_screened, device
from dbksvd_dask.gpu.products import itemsize, refit, residual, row_tiles, smallest_coefficients, squared_norms
from dbksvd_dask.kernels.lanczos import namespace
from dbksvd_dask.kernels.pursuit import STEPS_PER_ATOM
from dbksvd_dask.plan import screening
from dbksvd_dask.plan.device import screened_tile_rows
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec

# What a launch is told about the first pass of a sample and of a later group.
_OF_SAMPLE, _OF_GROUP, _LATER = 2, 1, 0


class _Settings:
    """What the passes of all tiles share."""

    def __init__(self, D: Any, spec: EncodeSpec, weights: AtomWeights | None) -> None:
        self.D, self.spec = D, spec
        self.groups = (() if weights is not None else spec.stages) or ((0, D.shape[0], spec.k),)
        self.most = max(screening.n_candidates(limit) for _, _, limit in self.groups)
        dtype = np.dtype(np.float64 if itemsize(D) == 8 else np.float32)
        floor = preference = np.empty(0, dtype)
        if weights is not None:
            floor = (float(spec.min_coefficient) * weights.threshold).astype(dtype)
            preference = np.asarray(weights.preference, dtype)
        space = device.current()
        self.floor, self.preference = space.asarray(floor), space.asarray(preference)


def encode_rows(
    Y: Any, D: Any, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[Any, Any]:
    """Encode samples with a dictionary, without its gram; parameters as in `gpu.encode.encode_rows`."""
    xp, how = namespace(Y), _Settings(D, spec, weights)
    norm2 = squared_norms(Y)
    noise_only = spec if weights is None else spec._replace(min_coefficient=0.0)
    smallest = smallest_coefficients(norm2, noise_only, Y.dtype)
    tiles = row_tiles(Y.shape[0], screened_tile_rows(Y.shape[0], D.shape[0], itemsize(Y)), first)
    parts = [_encode_tile(Y[rows, :], how, norm2[rows], smallest[rows]) for rows in tiles]
    return xp.concat([atom for atom, _ in parts]), xp.concat([coefficient for _, coefficient in parts])


def _encode_tile(Y: Any, how: _Settings, norm2: Any, smallest: Any) -> tuple[Any, Any]:
    """Encode the samples of one tile."""
    space, (D, spec) = device.current(), (how.D, how.spec)
    n, k, slots = Y.shape[0], spec.k, spec.k + how.most
    atom, coefficient = space.empty((n, k), space.xp.int32), space.empty((n, k), Y.dtype)
    numbers, counts = space.empty((n, 3), space.xp.float64), space.empty((n, 4), space.xp.int32)
    candidate, value = space.empty((n, slots), space.xp.int32), space.empty((n, slots), Y.dtype)
    stage = _OF_SAMPLE
    for start, stop, limit in how.groups:
        passes = screening.n_passes(limit, stop - start)
        for t in range(passes):
            R = Y if stage == _OF_SAMPLE else residual(Y, atom, coefficient, D)
            quota, share = screening.pass_limit(limit, t, passes), (t + 1) / passes
            space.launch(
                cuda_screened.pursue_pass, n, 0, R @ D[start:stop, :].T, D, start, limit, quota, share,
                screening.n_candidates(limit), STEPS_PER_ATOM, float(spec.rtol), float(spec.min_coefficient),
                bool(spec.nonneg), how.floor, how.preference, stage, smallest, norm2, numbers, counts, candidate,
                value, atom, coefficient
            )  # fmt: skip
            stage = _LATER
        stage = _OF_GROUP
    if spec.refit:
        _refit(Y, how, atom, coefficient)
    return atom, coefficient


def _refit(Y: Any, how: _Settings, atom: Any, coefficient: Any) -> None:
    """Replace the coefficients of a tile by least squares on the supports, from a gram of each support."""
    space = device.current()
    xp, (n, k) = space.xp, atom.shape
    grams, rest = space.empty((n, k, k), Y.dtype), space.empty((n, k), Y.dtype)
    R = residual(Y, atom, coefficient, how.D)
    space.launch(cuda_screened.support_grams, n, 0, R, how.D, atom, grams, rest)
    slot = xp.broadcast_to(space.asarray(np.arange(k, dtype=np.int32)), (n, k))
    place = xp.where(atom >= 0, slot, xp.full_like(atom, -1))
    refit(grams, place, rest, how.spec.nonneg, coefficient)
