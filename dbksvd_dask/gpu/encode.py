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

from dbksvd_dask.gpu import cuda, device, screened
from dbksvd_dask.gpu.products import itemsize, refit, row_tiles, smallest_coefficients, squared_norms
from dbksvd_dask.kernels import encode as host
from dbksvd_dask.kernels.lanczos import namespace
from dbksvd_dask.kernels.pursuit import STEPS_PER_ATOM
from dbksvd_dask.kernels.whiten import Whitened
from dbksvd_dask.plan import units
from dbksvd_dask.plan.device import product_tile_rows
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS


def gram_matrix(D: Any) -> Any:
    """Return the gram of a dictionary, ``D D^T``: (n_atoms, n_atoms)."""
    return D @ D.T


def pursuit_place(gram: Any) -> str:
    """Return where samples are pursued: where the gram is, or on the device without one."""
    inner = gram.gram if isinstance(gram, Whitened) else gram
    return "gpu" if device.on_device(inner) else "cpu"


def encode_rows(
    Y: Any, D: Any, gram: Any, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[Any, Any]:
    """Encode samples with a dictionary; the pursuit runs where the gram is.

    Parameters
    ----------
    Y : device array of shape (n, n_features)
    D : device array of shape (n_atoms, n_features), unit rows, same dtype as Y
    gram : (n_atoms, n_atoms), on the device or a numpy array; None to encode without it (`gpu.screened`); or
        whitened coordinates
    weights, first : as in `kernels.encode.encode_rows`

    Returns
    -------
    atom : int32 device array of shape (n, k), -1 where a slot is empty
    coefficient : device array of shape (n, k)
    """
    if isinstance(gram, Whitened):
        atom, coefficient = encode_rows(Y @ gram.forward, gram.atoms, gram.gram, spec, weights, first)
        xp = namespace(Y)
        lengths = xp.take(gram.lengths, xp.reshape(xp.where(atom < 0, 0, atom), (-1,)))
        return atom, coefficient / xp.reshape(lengths, coefficient.shape)
    if gram is None:
        return screened.encode_rows(Y, D, spec, weights, first)
    if not device.on_device(gram):
        return _encode_on_host(Y, D, gram, spec, weights, first)
    if not ENCODERS[spec.encoder].on_device or weights is not None:
        # orthogonal pursuit keeps k rows of n_atoms products per sample, too much for shared memory; weights,
        # which only growing dictionaries use, have no CUDA kernel
        return _encode_on_host(Y, D, device.to_host(gram), spec, weights, first)
    xp = namespace(Y)
    norm2 = squared_norms(Y)
    limit = smallest_coefficients(norm2, spec, Y.dtype)
    parts = []
    for rows in row_tiles(Y.shape[0], product_tile_rows(Y.shape[0], D.shape[0], itemsize(Y)), first):
        prods = Y[rows, :] @ D.T
        parts.append(_pursue(prods, gram, norm2[rows], limit[rows], spec))
    return xp.concat([atom for atom, _ in parts]), xp.concat([coefficient for _, coefficient in parts])


def _pursue(prods: Any, gram: Any, norm2: Any, limit: Any, spec: EncodeSpec) -> tuple[Any, Any]:
    """Run matching pursuit on one tile of products, which is overwritten."""
    space = device.current()
    n, m = prods.shape
    k = spec.k
    stages = space.asarray(np.array(spec.stages or [(0, m, k)], np.int64))
    atom = space.empty((n, k), space.xp.int32)
    coefficient, rest = space.empty((n, k), prods.dtype), space.empty((n, k), prods.dtype)
    shared = m * itemsize(prods)
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
        refit(space.xp.reshape(gram, (1, m, m)), atom, rest, spec.nonneg, coefficient)
    return atom, coefficient


def _encode_on_host(
    Y: Any, D: Any, gram: np.ndarray, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[Any, Any]:
    """Compute products on the device and pursue on the host; one pinned buffer fills while the other is read."""
    space = device.current()
    n, m = Y.shape[0], D.shape[0]
    tiles = row_tiles(n, units.TILE_ROWS, first)
    dtype = np.dtype(np.float64 if itemsize(Y) == 8 else np.float32)
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
