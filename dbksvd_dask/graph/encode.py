"""Tasks that encode rows outside a batch: held-out measurements, and whole sources."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.base.late import late
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.gpu import device
from dbksvd_dask.graph import backend
from dbksvd_dask.graph._compat import Task, compute_graph
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.load import dictionaries_and_grams, dictionary_and_gram, prepare
from dbksvd_dask.graph.run import plan_shares
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.graph.threads import each
from dbksvd_dask.kernels.moments import Moments, merge_moments
from dbksvd_dask.plan.device import CPU, Placement, Sizes
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.units import split_rows

if TYPE_CHECKING:
    import dask.array as da
else:
    da = late("dask.array")


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _second(pair: tuple[Any, Any]) -> Any:
    return pair[1]


class EncodePlan(NamedTuple):
    """How a dictionary encodes new samples: everything `encode_block` needs besides the rows."""

    spec: EncodeSpec
    mean: np.ndarray | None
    dtype: Any
    place: Placement = CPU
    weights: AtomWeights | None = None
    whitening: np.ndarray | None = None

    def in_tasks(self) -> EncodePlan:
        """Return what every task takes: the map to whitened coordinates comes with the gram."""
        return self._replace(whitening=None)


def plan_encoding(
    dictionary: Dictionary, place: Placement = CPU, given: Mapping[str, Any] | None = None
) -> EncodePlan:
    """Return how a dictionary encodes: as it was fitted, except for the given parameters.

    Parameters
    ----------
    place : where blocks are encoded, from `place_encoding`
    given : some of `plan.encoder.CHOOSABLE`, or None
    """
    spec, weights = dictionary.encode_spec(given), dictionary.encode_weights(given)
    return EncodePlan(spec, dictionary.mean, dictionary.atoms.dtype, place, weights, dictionary.whitening)


def place_encoding(dictionary: Dictionary, spec: EncodeSpec, device: str, block_rows: int) -> Placement:
    """Return where blocks of at most `block_rows` rows are encoded.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
    """
    shape, itemsize = (dictionary.n_features, dictionary.n_atoms), dictionary.atoms.dtype.itemsize
    sizes = Sizes(block_rows, block_rows, *shape, spec.k, itemsize=itemsize)
    return backend.place(device, sizes, spec.encoder, spec.gram).placement


def encode_block(
    rows: Any, D: np.ndarray, gram: np.ndarray | None, how: EncodePlan
) -> tuple[np.ndarray, np.ndarray]:
    """Load and encode a block of rows; return atom (n, k) int32 and coefficient (n, k)."""
    raw = rows.load()
    with device.turn(how.place.pursuit):
        Y = prepare(raw, rows.where, how.mean, how.dtype, how.place)
        return functions(how.place).encode_rows(Y, D, gram, how.spec, how.weights, int(rows.rows[0]))


def evaluate_block(
    rows: Any, D: np.ndarray, gram: np.ndarray | None, how: EncodePlan, first: int
) -> tuple[Moments, int]:
    """Load and encode a block of rows; return sums over samples and residual, and the number of nonzeros.

    Parameters
    ----------
    first : index of the first of these rows among all that are measured
    """
    raw = rows.load()
    with device.turn(how.place.pursuit):
        Y = prepare(raw, rows.where, how.mean, how.dtype, how.place)
        return functions(how.place).measure(Y, D, gram, how.spec, how.weights, first)


def build_evaluation(
    source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, chunk_size: int, iteration: int = 0
) -> Delayed:
    """Build the graph that encodes rows and merges their metrics: (Moments, number of nonzeros)."""
    spans = split_rows(rows.size, chunk_size)
    names = Tasks(iteration, plan_shares(len(spans)))
    D_share, grams = dictionaries_and_grams(names, D, how)
    parts, light = [], how.in_tasks()
    for i, share in enumerate(names.shares):
        own = spans[share.start : share.stop]
        blocks = [source.take(rows[a:b]) for a, b in own]
        arguments = (blocks, [a for a, _ in own], D_share[i], grams[i], light)
        parts.append(names.call(evaluate_blocks, "evaluate", (i,), *arguments, at=i))
    return names.finish(names.call(_merge_evaluation, "evaluation", (), parts))


def evaluate_blocks(
    blocks: list[Any], firsts: list[int], D: np.ndarray, gram: np.ndarray | None, how: EncodePlan
) -> list[tuple[Moments, int]]:
    """Return what `evaluate_block` returns for each of several blocks."""
    pairs = list(zip(blocks, firsts, strict=True))
    return list(each(lambda pair: evaluate_block(pair[0], D, gram, how, pair[1]), pairs))


def _merge_evaluation(parts: list[list[tuple[Moments, int]]]) -> tuple[Moments, int]:
    every = [part for some in parts for part in some]
    return merge_moments(m for m, _ in every), sum(count for _, count in every)


def _encoding(
    source: Source, D: np.ndarray, how: EncodePlan, block_rows: int
) -> tuple[Tasks, list[Any], list[int]]:
    """Return the tasks that encode a whole source, block by block, and the number of rows of each block."""
    names = Tasks()
    dictionary, gram = dictionary_and_gram(names, D, how)
    light = how.in_tasks()
    spans = split_rows(source.n_samples, block_rows)
    blocks = []
    for c, (a, b) in enumerate(spans):
        rows = source.take(np.arange(a, b, dtype=np.int64))
        blocks.append(names.call(encode_block, "encode", (c,), rows, dictionary, gram, light))
    return names, blocks, [b - a for a, b in spans]


def encode_now(source: Source, D: np.ndarray, how: EncodePlan, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Encode a whole source on the current scheduler; return atom (n, k) and coefficient (n, k)."""
    names, blocks, _ = _encoding(source, D, how, block_rows)
    codes = compute_graph(names.finish(names.call(_stack, "codes", (), blocks)))
    return codes


def _stack(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


def encode_lazily(source: Source, D: np.ndarray, how: EncodePlan, block_rows: int) -> tuple[da.Array, da.Array]:
    """Return Dask arrays that encode a whole source when computed: atom (n, k) and coefficient (n, k)."""
    names, blocks, sizes = _encoding(source, D, how, block_rows)
    return (
        _as_array(names, "atom", _first, blocks, (tuple(sizes), (how.spec.k,)), np.int32),
        _as_array(names, "coefficient", _second, blocks, (tuple(sizes), (how.spec.k,)), how.dtype),
    )


def _as_array(
    names: Tasks, label: str, which: Callable[[Any], Any], blocks: list[Any], chunks: Any, dtype: Any
) -> da.Array:
    """Return one of the two arrays that a list of encoding tasks gives, as a Dask array."""
    name = f"{label}-{uuid.uuid4().hex}"
    graph = dict(names.graph)
    for i, block in enumerate(blocks):
        graph[(name, i, 0)] = Task((name, i, 0), which, block)
    return da.Array(graph, name, chunks, dtype=dtype)
