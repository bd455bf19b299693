"""The tasks with which every graph begins: load rows, compute the gram, transfer the dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.errors import InputError
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.graph.threads import each
from dbksvd_dask.kernels import chunk, encode
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.products import second_moment
from dbksvd_dask.kernels.scale import largest_norm
from dbksvd_dask.kernels.whiten import unit_product
from dbksvd_dask.plan import shares
from dbksvd_dask.plan.device import CPU, Placement
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.units import split_rows

if TYPE_CHECKING:
    from dbksvd_dask.graph.encode import EncodePlan


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


Pair = tuple[tuple[int, int], tuple[int, int]]


def grams_of(
    names: Tasks,
    atoms: list[Any],
    shape: tuple[int, int],
    spec: EncodeSpec,
    g: int = 0,
    place: Placement = CPU,
    weighted: bool = False,
) -> list[Any]:
    """Add the tasks of a gram; return its reference for each share, or None for each where `spec` uses no gram.

    On threads every tile of its upper triangle is a task. A worker of a cluster computes all tiles on its own
    threads if that is faster than receiving them (they are half the bytes of the gram), or shares them with some
    neighbours. A device computes a gram faster than it would receive one.

    Parameters
    ----------
    atoms : per share, the reference to the atoms, (n_atoms, n_features), on the host
    shape : of the atoms
    weighted : whether atoms have weights, which take the whole gram
    """
    if not spec.uses_gram(shape[0]):
        return [None] * len(names.shares)
    if place.device == "gpu":
        return names.once_per_home(functions(place).gram_matrix, "gram", (g,), atoms[0], place.gram_on_device)
    pairs, compact = gram_pairs(shape[0]), spec.compact_gram(weighted)
    if not names.has_homes:
        tiles = [names.call(gram_tiles, "gram", (g, t), atoms[0], [pair], compact) for t, pair in enumerate(pairs)]
        whole = names.call(assemble_gram, "gram-assemble", (g,), shape[0], tiles, compact)
        return [whole] * len(names.shares)
    out: list[Any] = []
    for group in _gram_groups(names.shares, shape[1]):
        tiles = [
            names.call(gram_tiles, "gram-tiles", (g, group[i]), atoms[group[i]], pairs[a:b], compact, at=group[i])
            for i, (a, b) in enumerate(shares.weighted_spans(areas(pairs), len(group)) if len(group) > 1 else ())
        ]
        for i in group:
            made = (
                (assemble_gram, "gram", (g, i), shape[0], tiles)
                if tiles
                else (whole_gram, "gram", (g, i), atoms[i], pairs)
            )
            out.append(names.call(*made, compact, at=i))
    return out


def gram_pairs(n_atoms: int) -> list[Pair]:
    """Return the tiles of the upper triangle of a gram, as pairs of ranges of atoms."""
    bounds = encode.gram_bounds(n_atoms)
    return [(rows, columns) for i, rows in enumerate(bounds) for columns in bounds[i:]]


def areas(pairs: list[Pair]) -> list[int]:
    """Return the number of products in each tile."""
    return [(b - a) * (d - c) for (a, b), (c, d) in pairs]


# Workers that share the tiles of a gram: more would wait for each other longer than they save.
_GRAM_GROUP = 8


def _gram_groups(homes: list[shares.Share], n_features: int) -> list[range]:
    """Return the shares that compute a gram together."""
    alone = shares.computes_gram_alone(n_features, min(share.threads for share in homes))
    n_groups = len(homes) if alone else -(-len(homes) // _GRAM_GROUP)
    return [range(a, b) for a, b in shares.even_spans(len(homes), n_groups)]


@one_blas_thread
def gram_tiles(D: np.ndarray, pairs: list[Pair], compact: bool) -> list[Any]:
    """Return tiles of the gram: the products of pairs of blocks of atoms."""
    make = encode.compact_gram_tile if compact else encode.gram_tile
    return list(each(lambda pair: make(D, *pair), pairs))


def assemble_gram(n_atoms: int, tiles: list[list[Any]], compact: bool) -> encode.Gram:
    """Return the gram of which tiles were computed in several places, in the order of `gram_pairs`."""
    make = encode.assemble_compact_gram if compact else encode.assemble_gram
    gram = make(n_atoms, [tile for some in tiles for tile in some])
    for part in gram if isinstance(gram, tuple) else (gram,):
        chunk.frozen(part)
    return gram


def whole_gram(D: np.ndarray, pairs: list[Pair], compact: bool) -> encode.Gram:
    """Compute all tiles of a gram here."""
    return assemble_gram(D.shape[0], [gram_tiles(D, pairs, compact)], compact)


def dictionaries_of(names: Tasks, atoms: list[Any], g: int = 0, place: Placement = CPU) -> list[Any]:
    """Return the dictionary for each share: on the host, or on the device of the share's home."""
    if place.device == "gpu":
        return names.once_per_home(functions(place).to_device, "dictionary-device", (g,), atoms[0])
    return atoms


def dictionaries_and_grams(names: Tasks, D: np.ndarray, how: EncodePlan) -> tuple[list[Any], list[Any]]:
    """Return the dictionary and, as `kernels.encode.gram_for` gives it, what stands beside it, for each share."""
    D_host = [names.data(np.ascontiguousarray(D), "dictionary")] * len(names.shares)
    return dictionaries_of(names, D_host, 0, how.place), _beside(names, D_host, D.shape, how)


def dictionary_and_gram(names: Tasks, D: np.ndarray, how: EncodePlan) -> tuple[Any, Any]:
    """Return the same for tasks without homes."""
    dictionaries, grams = dictionaries_and_grams(names, D, how)
    return dictionaries[0], grams[0]


def _beside(names: Tasks, atoms: list[Any], shape: tuple[int, int], how: EncodePlan) -> list[Any]:
    """Return, per share, the gram, None, or whitened coordinates with theirs; parameters as of `grams_of`."""
    rest = (how.spec, 0, how.place, how.weights is not None)
    if how.whitening is None:
        return grams_of(names, atoms, shape, *rest)
    W = names.data(how.whitening, "whitening")
    mapped = names.once_per_home(unit_product, "whitened-atoms", (), atoms[0], W)
    grams = grams_of(names, [names.inline(_unit_rows, one) for one in mapped], shape, *rest)
    make, made = functions(how.place).whitened, dict[str, Any]()
    for i, share in enumerate(names.shares):
        if share.home not in made:
            made[share.home] = names.call(make, "whitened", (i,), W, mapped[i], grams[i], at=i)
    return [made[share.home] for share in names.shares]


def _unit_rows(mapped: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return mapped[0]


def build_sum(source: Source, rows: np.ndarray, chunk_size: int, dtype: Any) -> Delayed:
    """Build the graph of the sum of rows in float64: (n_features,). It refuses rows with NaN."""
    names = Tasks()
    parts = [
        names.call(_sum_block, "mean", (c,), source.take(rows[a:b]), dtype)
        for c, (a, b) in enumerate(split_rows(rows.size, chunk_size))
    ]
    return names.finish(names.call(_add_all, "mean-sum", (), parts))


def build_second_moment(
    source: Source, rows: np.ndarray, mean: np.ndarray | None, chunk_size: int, dtype: Any
) -> Delayed:
    """Build the graph of the sum of ``y y^T`` over rows, centred, in float64: (n_features, n_features)."""
    names, total = Tasks(), None
    for c, (a, b) in enumerate(split_rows(rows.size, chunk_size)):
        part = names.call(_second_moment, "covariance", (c,), source.take(rows[a:b]), mean, dtype)
        # one by one: the parts of all chunks together may not fit into memory
        total = part if total is None else names.call(np.add, "covariance-sum", (c,), total, part)
    return names.finish(total)


def _second_moment(rows: Any, mean: np.ndarray | None, dtype: Any) -> np.ndarray:
    return second_moment(load(rows, mean, dtype))


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
