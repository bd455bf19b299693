"""Encode samples on the device: the counterparts of `kernels.encode`.

The pursuit runs where the gram is. On the device, each tile takes one matrix product and one block per sample, and
products never leave the device. On the host (orthogonal pursuit, or a gram that does not fit on the device),
products are copied back tile by tile through two pinned buffers: the host works on one tile while the device
computes the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbksvd_dask.gpu import cuda, device
from dbksvd_dask.kernels import encode as host
from dbksvd_dask.kernels.lanczos import namespace
from dbksvd_dask.kernels.pursuit import NOISE, STEPS_PER_ATOM
from dbksvd_dask.plan import units
from dbksvd_dask.plan.device import product_tile_rows
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS

# Rows per float64 sum, so that the widened copy of a chunk stays small.
_SUM_ROWS = 1024
# Blocks of a refit, each with its own scratch: several per multiprocessor of any card.
_REFIT_BLOCKS = 2048


def row_tiles(n: int, size: int, first: int = 0) -> list[slice]:
    """Return slices of n rows, of at most `size` rows each, cut on the grid of rows that starts at row 0.

    Parameters
    ----------
    first : index of the first of these rows
    """
    lead = first % units.GRID_ROWS % size  # tiles smaller than a cell of the grid are also cut inside it
    return [slice(max(a - lead, 0), min(a - lead + size, n)) for a in range(0, lead + n, size)]


def squared_norms(Y: Any) -> Any:
    """Return the squared norm of each row: (n,) float64, not finite exactly where the row has NaN or infinity."""
    xp = namespace(Y)
    parts = []
    for rows in row_tiles(Y.shape[0], _SUM_ROWS):
        wide = xp.astype(Y[rows, :], xp.float64)
        parts.append(xp.sum(wide * wide, axis=1))
    return xp.concat(parts)


def gram_matrix(D: Any) -> Any:
    """Return the gram of a dictionary, ``D D^T``: (n_atoms, n_atoms)."""
    return D @ D.T


def encode_rows(
    Y: Any, D: Any, gram: Any, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[Any, Any]:
    """Encode samples with a dictionary; the pursuit runs where the gram is.

    Parameters
    ----------
    Y : device array of shape (n, n_features)
    D : device array of shape (n_atoms, n_features), unit rows, same dtype as Y
    gram : (n_atoms, n_atoms), on the device or a numpy array
    weights, first : as in `kernels.encode.encode_rows`

    Returns
    -------
    atom : int32 device array of shape (n, k), -1 where a slot is empty
    coefficient : device array of shape (n, k)
    """
    if not device.on_device(gram):
        return _encode_on_host(Y, D, gram, spec, weights, first)
    if not ENCODERS[spec.encoder].on_device or weights is not None:
        # orthogonal pursuit keeps k rows of n_atoms products per sample, too much for shared memory; weights,
        # which only growing dictionaries use, have no CUDA kernel
        return _encode_on_host(Y, D, device.to_host(gram), spec, weights, first)
    xp = namespace(Y)
    norm2 = squared_norms(Y)
    limit = _limits(norm2, spec, Y.dtype)
    parts = []
    for rows in row_tiles(Y.shape[0], product_tile_rows(Y.shape[0], D.shape[0], _itemsize(Y)), first):
        prods = Y[rows, :] @ D.T
        parts.append(_pursue(prods, gram, norm2[rows], limit[rows], spec))
    return xp.concat([atom for atom, _ in parts]), xp.concat([coefficient for _, coefficient in parts])


def _itemsize(array: Any) -> int:
    return 8 if array.dtype == namespace(array).float64 else 4


def _limits(norm2: Any, spec: EncodeSpec, dtype: Any) -> Any:
    """Return the smallest coefficient worth taking, per sample: (n,) of the working dtype.

    The limit is rounded up: a coefficient of that dtype is below the float64 limit exactly when it is below the
    rounded one.
    """
    xp = namespace(norm2)
    eps = float(xp.finfo(dtype).eps)
    exact = NOISE * eps * xp.sqrt(norm2)
    if spec.min_coefficient > 0:
        exact = xp.where(exact < spec.min_coefficient, xp.full_like(exact, spec.min_coefficient), exact)
    near = xp.astype(exact, dtype)
    above = xp.nextafter(near, xp.full_like(near, float("inf")))
    return xp.where(xp.astype(near, xp.float64) < exact, above, near)


def _pursue(prods: Any, gram: Any, norm2: Any, limit: Any, spec: EncodeSpec) -> tuple[Any, Any]:
    """Run matching pursuit on one tile of products, which is overwritten."""
    space = device.current()
    n, m = prods.shape
    k = spec.k
    stages = space.asarray(np.array(spec.stages or [(0, m, k)], np.int64))
    atom = space.empty((n, k), space.xp.int32)
    coefficient, rest = space.empty((n, k), prods.dtype), space.empty((n, k), prods.dtype)
    shared = m * _itemsize(prods)
    in_shared = shared <= space.shared_bytes
    space.launch(
        cuda.pursue,
        n,
        shared if in_shared else 0,
        prods,
        gram,
        norm2,
        limit,
        stages,
        STEPS_PER_ATOM,
        float(spec.rtol),
        bool(spec.nonneg),
        in_shared,
        atom,
        coefficient,
        rest,
    )
    if spec.refit:
        blocks = min(n, _REFIT_BLOCKS)
        A = space.empty((blocks, k, k), space.xp.float64)
        delta = space.empty((blocks, k), space.xp.float64)
        kernel = cuda.refit_nonneg if spec.nonneg else cuda.refit
        space.launch(kernel, blocks, 0, gram, atom, rest, A, delta, coefficient)
    return atom, coefficient


def _encode_on_host(
    Y: Any, D: Any, gram: np.ndarray, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[Any, Any]:
    """Compute products on the device and pursue on the host; one pinned buffer fills while the other is read."""
    space = device.current()
    n, m = Y.shape[0], D.shape[0]
    tiles = row_tiles(n, units.TILE_ROWS, first)
    dtype = np.dtype(np.float64 if _itemsize(Y) == 8 else np.float32)
    norm2 = space.to_host(squared_norms(Y))
    atom, coefficient = np.empty((n, spec.k), np.int32), np.empty((n, spec.k), dtype)
    buffers = [space.pinned((min(n, units.TILE_ROWS), m), dtype) for _ in tiles[:2]]

    def begin(t: int) -> Callable[[], None]:
        rows = tiles[t]
        return space.fetch(Y[rows, :] @ D.T, buffers[t % 2][: rows.stop - rows.start])

    waits = [begin(0)]
    for t, rows in enumerate(tiles):
        if t + 1 < len(tiles):
            waits.append(begin(t + 1))
        waits[t]()
        prods = buffers[t % 2][: rows.stop - rows.start]
        host.encode_tile(prods, gram, norm2[rows], spec, atom[rows], coefficient[rows], weights)
    return space.asarray(atom), space.asarray(coefficient)


def residual(Y: Any, atom: Any, coefficient: Any, D: Any) -> Any:
    """Return the residual ``Y - X D`` as a new array: (n, n_features)."""
    space = device.current()
    R = space.empty(Y.shape, Y.dtype)
    space.launch(cuda.subtract_reconstruction, Y.shape[0], 0, Y, atom, coefficient, D, R)
    return R
