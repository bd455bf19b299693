"""Tasks that encode rows outside a batch: held-out measurements, whole sources, the units of an encode job.

Also what every graph begins with: loading rows, and the gram of a dictionary.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from dask._task_spec import Task
from dask.callbacks import Callback as DaskCallback
from dask.delayed import Delayed, delayed

from dbksvd_dask import chunk, plan, running
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.reconstruction import reconstruction_moments
from dbksvd_dask.gpu import device
from dbksvd_dask.gpu.plan import CPU, Placement
from dbksvd_dask.kernels import encode
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.encode import AtomWeights, EncodeSpec
from dbksvd_dask.kernels.scale import largest_norm
from dbksvd_dask.metrics import Moments, merge_moments
from dbksvd_dask.store.code_sums import CodeSums
from dbksvd_dask.store.code_writer import CodesWriter, UnitWritten
from dbksvd_dask.store.rows import RowReader
from dbksvd_dask.store.sources import LazySource, Source, StoreRows
from dbksvd_dask.tasks import Tasks, chunk_homes, current_client

# ---------------------------------------------------------------------------------------------- loading


def load(rows: Any, mean: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Read, widen and centre a chunk of samples; refuse NaN and infinity by name."""
    return prepare(rows.load(), rows.where, mean, dtype)


def prepare(
    raw: np.ndarray, where: Callable[[int], str], mean: np.ndarray | None, dtype: Any, where_to: str = "cpu"
) -> np.ndarray:
    """Widen and centre a chunk of samples, on the device they are needed on; refuse NaN and infinity by name."""
    Y = chunk.prepare(raw, mean, dtype, where_to)
    bad = np.flatnonzero(~(chunk.norms2_of(Y) <= largest_norm(dtype) ** 2))  # catches NaN too
    if bad.size:
        raise InputError(_refused(raw, where, bad, dtype))
    return Y


def _refused(raw: np.ndarray, where: Callable[[int], str], bad: np.ndarray, dtype: Any) -> str:
    """Why some rows of a chunk cannot be encoded."""
    first = int(bad[0])
    many = f"({bad.size} such row{'s' * (bad.size > 1)} in this chunk of the batch); drop those rows"
    if not np.isfinite(raw[first]).all():
        return f"{where(first)} has NaN or infinity {many}, for example with `dbksvd import --nonfinite drop`"
    largest = float(np.abs(raw[first]).max())
    return (
        f"{where(first)} has a value of magnitude {largest:.2g}, too large for {np.dtype(dtype)}: norms may be "
        f"{largest_norm(dtype):.2g} at most {many}, or divide all samples by a constant, which changes no atom"
    )


class _Loaded:
    """Rows of a Dask array, computed by tasks of the same graph."""

    def __init__(self, blocks: list[list[np.ndarray]], rows: np.ndarray, chunk_ends: np.ndarray) -> None:
        self.blocks, self.rows, self.chunk_ends = blocks, rows, chunk_ends

    def load(self) -> np.ndarray:
        return np.concatenate([np.concatenate(row, axis=1) for row in self.blocks])

    def where(self, index: int) -> str:
        row = int(self.rows[index])
        block = int(np.searchsorted(self.chunk_ends, row, side="right"))
        inside = row - (int(self.chunk_ends[block - 1]) if block else 0)
        return f"sample {row} (chunk {block}, row {inside} in it)"


def rows_of(source: Source, rows: np.ndarray) -> Any:
    """Reference to rows: plain for stores and arrays, delayed for Dask arrays."""
    if not isinstance(source, LazySource):
        return source.take(rows)  # type: ignore[attr-defined]
    ends = np.cumsum(source.array.chunks[0])
    blocks = [list(line) for a, b in plan.runs(rows) for line in source.array[a:b].to_delayed()]
    return delayed(_Loaded, pure=False)(blocks, rows, ends)


def grams_of(names: Tasks, D: Any, n_atoms: int, g: int = 0, place: Placement = CPU) -> list[Any]:
    """The gram for each chunk: tiles of its upper triangle as tasks of their own, put together once per home.

    Tiles are shared out among the homes and travel as they are: half the bytes of the gram. A device computes a
    gram faster than it could receive one.
    """
    if place.device == "gpu":
        return names.once_per_home(chunk.device_gram, "gram", (g,), D, place.gram_on_device)
    bounds = encode.gram_bounds(n_atoms)
    tile = one_blas_thread(encode.gram_tile)
    pairs = [(i, j) for i in range(len(bounds)) for j in range(i, len(bounds))]
    tiles = [
        names.call(tile, "gram", (g, i, j), D, bounds[i], bounds[j], chunk=names.beside(t, len(pairs)))
        for t, (i, j) in enumerate(pairs)
    ]
    return names.once_per_home(_assemble, "gram-assemble", (g,), n_atoms, tiles)


def dictionaries_of(names: Tasks, D: Any, g: int = 0, place: Placement = CPU) -> list[Any]:
    """The dictionary for each chunk, where its tasks use it: on the host, or on the device of its home."""
    if place.device == "gpu":
        return names.once_per_home(chunk.to_device, "dictionary-device", (g,), D)
    return [D] * names.n_chunks


def _assemble(n_atoms: int, tiles: list[np.ndarray]) -> np.ndarray:
    return chunk.frozen(encode.assemble_gram(n_atoms, tiles))


# ---------------------------------------------------------------------------------------------- encoding


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


def encode_block(rows: Any, D: np.ndarray, gram: np.ndarray, how: EncodePlan) -> tuple[np.ndarray, np.ndarray]:
    """Load and encode a block of rows: atom (n, k) int32 and coefficient (n, k)."""
    raw = rows.load()
    with device.turn(how.place.pursuit):
        Y = prepare(raw, rows.where, how.mean, how.dtype, how.place.device)
        return chunk.codes_of(Y, D, gram, how.spec, how.weights, int(rows.rows[0]))


def evaluate_block(rows: Any, D: np.ndarray, gram: np.ndarray, how: EncodePlan, first: int) -> tuple[Moments, int]:
    """Load and encode a block of rows: sums over samples and residual, and the number of nonzeros.

    Parameters
    ----------
    first : place of the first of these rows among all that are measured
    """
    raw = rows.load()
    with device.turn(how.place.pursuit):
        Y = prepare(raw, rows.where, how.mean, how.dtype, how.place.device)
        return chunk.measure(Y, D, gram, how.spec, how.weights, first)


def dictionary_and_gram(names: Tasks, D: np.ndarray, place: Placement) -> tuple[Any, Any]:
    """Dictionary and gram for tasks that have no homes."""
    own = names.data(np.ascontiguousarray(D), "dictionary")
    (dictionary, *_), (gram, *_) = (
        dictionaries_of(names, own, 0, place),
        grams_of(names, own, D.shape[0], 0, place),
    )
    return dictionary, gram


def build_evaluation(
    source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, chunk_size: int, iteration: int = 0
) -> Delayed:
    """Graph that encodes rows and merges their metrics: computing it gives (Moments, number of nonzeros)."""
    spans = plan.split_rows(rows.size, chunk_size)
    names = Tasks(iteration, len(spans), chunk_homes(len(spans)))
    own = names.data(np.ascontiguousarray(D), "dictionary")
    near, grams = dictionaries_of(names, own, 0, how.place), grams_of(names, own, D.shape[0], 0, how.place)
    parts = [
        names.call(
            evaluate_block, "evaluate", (c,), rows_of(source, rows[a:b]), near[c], grams[c], how, a, chunk=c
        )
        for c, (a, b) in enumerate(spans)
    ]
    return names.finish(names.call(_merge_evaluation, "evaluation", (), parts))


def _merge_evaluation(parts: list[tuple[Moments, int]]) -> tuple[Moments, int]:
    return merge_moments(m for m, _ in parts), sum(count for _, count in parts)


def build_sum(source: Source, rows: np.ndarray, chunk_size: int, dtype: Any) -> Delayed:
    """Graph of the float64 sum of rows over samples: (n_features,). Checks them for NaN on the way."""
    names = Tasks()
    parts = [
        names.call(_sum_block, "mean", (c,), rows_of(source, rows[a:b]), dtype)
        for c, (a, b) in enumerate(plan.split_rows(rows.size, chunk_size))
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
    """Graph that loads some rows, widened and centred: (n, n_features)."""
    names = Tasks()
    return names.finish(names.call(load, "rows", (), rows_of(source, rows), mean, dtype))


def _encoding(
    source: Source, D: np.ndarray, how: EncodePlan, block_rows: int
) -> tuple[Tasks, list[Any], list[int]]:
    """Tasks that encode a whole source, block by block, and the rows of each block."""
    names = Tasks()
    dictionary, gram = dictionary_and_gram(names, D, how.place)
    spans = plan.split_rows(source.n_samples, block_rows)
    blocks = []
    for c, (a, b) in enumerate(spans):
        rows = rows_of(source, np.arange(a, b, dtype=np.int64))
        blocks.append(names.call(encode_block, "encode", (c,), rows, dictionary, gram, how))
    return names, blocks, [b - a for a, b in spans]


def encode_now(source: Source, D: np.ndarray, how: EncodePlan, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Encode a whole source on the current scheduler: atom (n, k) and coefficient (n, k)."""
    names, blocks, _ = _encoding(source, D, how, block_rows)
    (codes,) = dask.compute(names.finish(names.call(_stack, "codes", (), blocks)))
    return codes


def _stack(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


def encode_lazily(source: Source, D: np.ndarray, how: EncodePlan, block_rows: int) -> tuple[da.Array, da.Array]:
    """Encode a whole source when asked: Dask arrays atom (n, k) and coefficient (n, k)."""
    names, blocks, sizes = _encoding(source, D, how, block_rows)
    return (
        _as_array(names, "atom", _first, blocks, (tuple(sizes), (how.spec.k,)), np.int32),
        _as_array(names, "coefficient", _second, blocks, (tuple(sizes), (how.spec.k,)), how.dtype),
    )


def _as_array(
    names: Tasks, label: str, which: Callable[[Any], Any], blocks: list[Any], chunks: Any, dtype: Any
) -> da.Array:
    """One of the two arrays of a list of code tasks, as a Dask array."""
    name = f"{label}-{uuid.uuid4().hex}"
    graph = dict(names.graph)
    for i, block in enumerate(blocks):
        graph[(name, i, 0)] = Task((name, i, 0), which, block)
    return da.Array(graph, name, chunks, dtype=dtype)


# ---------------------------------------------------------------------------------------------- encode job

# Rows that a task of the encode job widens and encodes at a time: whole tiles, enough for full speed, and a task
# then needs the memory of its stored chunk and little more.
BLOCK_ROWS = 9 * plan.TILE_ROWS
# Tasks of one graph on local threads, where results are a few bytes and only as many chunks as there are
# threads are in memory; between two graphs the threads wait for the slowest.
LOCAL_WINDOW = 256


@one_blas_thread
def encode_unit(
    reader: RowReader, unit: int, D: np.ndarray, gram: np.ndarray, how: EncodePlan, writer: CodesWriter
) -> UnitWritten:
    """Encode one unit of a store and write it; what comes back is a few bytes.

    Writing is the one side effect of a task here: a unit that is run twice writes the same bytes twice.
    """
    goal = writer.plan
    first, stop = goal.unit_bounds(unit)
    atom = np.empty((stop - first, how.spec.k), np.int32)
    coefficient = np.empty((stop - first, how.spec.k), goal.coefficient_dtype)
    sums = []
    for start in range(first, stop, goal.chunk_rows):
        raw = reader.read(start, min(start + goal.chunk_rows, stop))
        for a, b in plan.split_rows(raw.shape[0], BLOCK_ROWS):
            where = StoreRows(reader, np.arange(start + a, start + b)).where
            Y = prepare(raw[a:b], where, how.mean, how.dtype)
            part = slice(start - first + a, start - first + b)
            atom[part], exact = chunk.codes_of(Y, D, gram, how.spec, how.weights, start + a)
            coefficient[part] = _narrow(exact, goal.coefficient_dtype)
            # the error of what is stored, not of what was computed
            R = chunk.residual_of(Y, atom[part], coefficient[part].astype(how.dtype), D)
            sums.append(reconstruction_moments(Y, R))
    total = CodeSums.of(merge_moments(sums), atom, coefficient, first, (goal.n_atoms, goal.n_top))
    return writer.write_unit(unit, atom, coefficient, total)


def _narrow(coefficient: np.ndarray, dtype: str) -> np.ndarray:
    """Bring coefficients to the dtype of the store, refusing those that do not fit."""
    limit = float(np.finfo(dtype).max)
    largest = float(np.abs(coefficient).max(initial=0.0))
    if largest > limit:
        raise InputError(
            f"a coefficient of {largest:.4g} does not fit into {dtype} (at most {limit:.4g}); "
            "use coefficient_dtype='float32'"
        )
    smallest = float(np.finfo(dtype).smallest_normal)
    if 0 < largest < smallest:
        raise InputError(
            f"the largest coefficient of a block is {largest:.4g}: {dtype} keeps all digits only from "
            f"{smallest:.2g} on; use coefficient_dtype='float32'"
        )
    return coefficient.astype(dtype)


def hold_dictionary(D: np.ndarray, place: Placement = CPU) -> tuple[Delayed, Delayed]:
    """Dictionary and gram, computed once and kept where the tasks run."""
    names = Tasks()
    dictionary, gram = dictionary_and_gram(names, D, place)
    return dask.persist(names.finish(dictionary), names.finish(gram))


def build_units(
    reader: RowReader, units: Iterable[int], held: tuple[Delayed, Delayed], how: EncodePlan, writer: CodesWriter
) -> Iterator[Delayed]:
    """Tasks that encode and write the units of a store, made when they are asked for."""
    for unit in units:
        names = Tasks()
        yield names.finish(names.call(encode_unit, "encode", (unit,), reader, unit, *held, how, writer))


def run_units(tasks: Iterator[Delayed], on_done: Callable[[UnitWritten], None]) -> None:
    """Run tasks on the current scheduler, a bounded number at a time; `on_done` hears of each."""
    client = current_client()
    if client is not None:
        running.warn_of_mixed_arithmetic(client)
        _run_on_client(client, tasks, on_done)
        return

    def heard(key: Any, result: Any, *_: Any) -> None:
        if isinstance(result, UnitWritten):
            on_done(result)

    while window := list(itertools.islice(tasks, LOCAL_WINDOW)):
        with DaskCallback(posttask=heard):
            dask.compute(window)


def _run_on_client(client: Any, tasks: Iterator[Delayed], on_done: Callable[[UnitWritten], None]) -> None:
    from distributed import as_completed

    # two per thread: one at work and one whose chunk is next
    in_flight = max(8, 2 * sum(client.nthreads().values()))
    running = as_completed([client.compute(task) for task in itertools.islice(tasks, in_flight)])
    try:
        for future in running:
            on_done(future.result())
            for task in itertools.islice(tasks, 1):
                running.add(client.compute(task))
    except BaseException:
        client.cancel(list(running.futures))  # an exception keeps this frame: what is left would go on running
        raise
