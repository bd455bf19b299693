"""The tasks with which every graph begins: load rows, compute the gram, transfer the dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.errors import InputError
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.kernels import chunk, encode
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.scale import largest_norm
from dbksvd_dask.plan.device import CPU, Placement
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.units import split_rows


def load(rows: Any, mean: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Load, widen and centre a chunk of samples; refuse NaN and infinity, and name the row."""
    return prepare(rows.load(), rows.where, mean, dtype)


def prepare(
    raw: np.ndarray, where: Callable[[int], str], mean: np.ndarray | None, dtype: Any, place: Placement = CPU
) -> np.ndarray:
    """Widen and centre a chunk of samples where they are needed; refuse NaN and infinity, and name the row."""
    compute = functions(place)
    Y: np.ndarray = compute.prepare(raw, mean, dtype)
    bad = np.flatnonzero(~(compute.squared_norms(Y) <= largest_norm(dtype) ** 2))  # catches NaN too
    if bad.size:
        raise InputError(_refused(raw, where, bad, dtype))
    return Y


def _refused(raw: np.ndarray, where: Callable[[int], str], bad: np.ndarray, dtype: Any) -> str:
    """Return why some rows of a chunk cannot be encoded."""
    first = int(bad[0])
    many = f"({bad.size} such row{'s' * (bad.size > 1)} in this chunk of the batch); drop those rows"
    if not np.isfinite(raw[first]).all():
        return f"{where(first)} has NaN or infinity {many}, or import the samples again with nonfinite='drop'"
    largest = float(np.abs(raw[first]).max())
    return (
        f"{where(first)} has a value of magnitude {largest:.2g}, too large for {np.dtype(dtype)}: norms may be "
        f"{largest_norm(dtype):.2g} at most {many}, or divide all samples by a constant, which changes no atom"
    )


def grams_of(
    names: Tasks,
    D: Any,
    n_atoms: int,
    spec: EncodeSpec,
    g: int = 0,
    place: Placement = CPU,
    weighted: bool = False,
) -> list[Any]:
    """Add the tasks of a gram; return its reference for each chunk, or None for each where `spec` uses no gram.

    `weighted` if atoms have weights, which need the whole gram.

    The tiles of its upper triangle, half the bytes of the gram, are spread over the homes and assembled once per
    home. A device computes a gram faster than it would receive one.
    """
    if not spec.uses_gram(n_atoms):
        return [None] * names.n_chunks
    if place.device == "gpu":
        return names.once_per_home(functions(place).gram_matrix, "gram", (g,), D, place.gram_on_device)
    bounds = encode.gram_bounds(n_atoms)
    compact = spec.compact_gram(weighted)
    tile = one_blas_thread(encode.compact_gram_tile if compact else encode.gram_tile)
    pairs = [(i, j) for i in range(len(bounds)) for j in range(i, len(bounds))]
    tiles = [
        names.call(tile, "gram", (g, i, j), D, bounds[i], bounds[j], chunk=names.beside(t, len(pairs)))
        for t, (i, j) in enumerate(pairs)
    ]
    return names.once_per_home(_assemble, "gram-assemble", (g,), n_atoms, tiles, compact)


def dictionaries_of(names: Tasks, D: Any, g: int = 0, place: Placement = CPU) -> list[Any]:
    """Return the dictionary for each chunk: on the host, or on the device of the chunk's home."""
    if place.device == "gpu":
        return names.once_per_home(functions(place).to_device, "dictionary-device", (g,), D)
    return [D] * names.n_chunks


def _assemble(n_atoms: int, tiles: list[Any], compact: bool) -> encode.Gram:
    gram = (encode.assemble_compact_gram if compact else encode.assemble_gram)(n_atoms, tiles)
    for part in gram if isinstance(gram, tuple) else (gram,):
        chunk.frozen(part)
    return gram


def dictionary_and_gram(
    names: Tasks, D: np.ndarray, spec: EncodeSpec, place: Placement, weighted: bool = False
) -> tuple[Any, Any]:
    """Return the dictionary and its gram, or None, for tasks without homes."""
    D_host = names.data(np.ascontiguousarray(D), "dictionary")
    grams = grams_of(names, D_host, D.shape[0], spec, 0, place, weighted)
    return dictionaries_of(names, D_host, 0, place)[0], grams[0]


def build_sum(source: Source, rows: np.ndarray, chunk_size: int, dtype: Any) -> Delayed:
    """Build the graph of the sum of rows in float64: (n_features,). It refuses rows with NaN."""
    names = Tasks()
    parts = [
        names.call(_sum_block, "mean", (c,), source.take(rows[a:b]), dtype)
        for c, (a, b) in enumerate(split_rows(rows.size, chunk_size))
    ]
    return names.finish(names.call(_add_all, "mean-sum", (), parts))


def _sum_block(rows: Any, dtype: Any) -> np.ndarray:
    return np.asarray(load(rows, None, dtype).sum(axis=0, dtype=np.float64))


def _add_all(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def build_rows(source: Source, rows: np.ndarray, mean: np.ndarray | None, dtype: Any) -> Delayed:
    """Build the graph that loads some rows, widened and centred: (n, n_features)."""
    names = Tasks()
    return names.finish(names.call(load, "rows", (), source.take(rows), mean, dtype))
