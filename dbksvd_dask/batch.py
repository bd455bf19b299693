"""One outer batch as a Dask graph: the only module that builds graphs.

::

    chunk c:  load -> encode (tiles) -> state
    round r:  first product per chunk -> sum -> warm start -> next product per chunk -> sum -> step -> new atoms
              refresh per chunk -> state
    end:      merged dictionary, metrics, atom usage

The graph runs on whatever scheduler is current: threads, a LocalCluster, a remote one. Partial sums are made
per chunk and added in a fixed order, so its result does not depend on where or in which order the tasks ran.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from dask._task_spec import Task
from dask.callbacks import Callback as DaskCallback
from dask.delayed import Delayed, delayed

from dbksvd_dask import chunk, plan
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.reconstruction import reconstruction_moments
from dbksvd_dask.kernels import encode
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.encode import EncodeSpec
from dbksvd_dask.metrics import Moments, merge_moments
from dbksvd_dask.store.code_sums import CodeSums
from dbksvd_dask.store.code_writer import CodesWriter, UnitWritten
from dbksvd_dask.store.rows import RowReader
from dbksvd_dask.store.sources import LazySource, Source, StoreRows
from dbksvd_dask.tasks import Tasks

# Parts that one task adds up. Eight keeps a batch of 65,536 rows at one level of sums, and bounds the memory of
# a sum to eight partial products.
FAN_IN = 8


class BatchSpec(NamedTuple):
    """What a batch needs to know besides its rows and the dictionary."""

    groups: tuple[plan.Group, ...]
    encode: EncodeSpec
    lanczos_steps: int
    chunk_size: int
    dead_atoms: str
    seed: int
    dtype: Any


class BatchResult(NamedTuple):
    """What one outer batch gives."""

    dictionary: np.ndarray  # (n_atoms, n_features)
    counts: np.ndarray  # (n_atoms,) samples per atom
    before: Moments
    after: Moments
    n_dead: int
    encode_seconds: float
    update_seconds: float


# ---------------------------------------------------------------------------------------------- loading


def _load(rows: Any, mean: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Read, widen and centre a chunk of samples; refuse NaN and infinity by name."""
    return _prepare(rows.load(), rows.where, mean, dtype)


def _prepare(raw: np.ndarray, where: Callable[[int], str], mean: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Widen and centre a chunk of samples; refuse NaN and infinity by name."""
    Y = chunk.prepare(raw, mean, dtype)
    bad = np.flatnonzero(~np.isfinite(encode.squared_norms(Y)))
    if bad.size:
        raise InputError(
            f"{where(int(bad[0]))} has NaN or infinity ({bad.size} such row{'s' * (bad.size > 1)} in this "
            "chunk of the batch); drop those rows, for example with `dbksvd import --drop-nonfinite`"
        )
    return Y


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


def _chunk_rows(source: Source, rows: np.ndarray) -> Any:
    """Reference to rows: plain for stores and arrays, delayed for Dask arrays."""
    if not isinstance(source, LazySource):
        return source.take(rows)  # type: ignore[attr-defined]
    ends = np.cumsum(source.array.chunks[0])
    blocks = [
        list(block_row)
        for a, b in plan.runs(rows)
        for block_row in source.array[a:b].to_delayed(optimize_graph=False)
    ]
    return delayed(_Loaded, pure=False)(blocks, rows, ends)


# ---------------------------------------------------------------------------------------------- graph


def _gram(names: Any, D: Any, n_atoms: int, g: int) -> Any:
    """Tiles of the gram's upper triangle as tasks of their own, then one that puts them together."""
    bounds = encode.gram_bounds(n_atoms)
    tile = one_blas_thread(encode.gram_tile)
    tiles = [
        names.call(tile, "gram", (g, i, j), D, rows, bounds[j])
        for i, rows in enumerate(bounds)
        for j in range(i, len(bounds))
    ]
    return names.call(_assemble, "gram-assemble", (g,), n_atoms, tiles)


def _assemble(n_atoms: int, tiles: list[np.ndarray]) -> np.ndarray:
    return chunk.frozen(encode.assemble_gram(n_atoms, tiles))


def _tree(names: Tasks, label: str, index: tuple[int, ...], parts: list[Any]) -> list[Any]:
    """Add parts in the fixed order of `plan.tree_levels`, all but the last level."""
    for depth, spans in enumerate(plan.tree_levels(len(parts), FAN_IN)[:-1]):
        parts = [
            names.call(chunk.add_parts, f"{label}-sum", (*index, depth, i), parts[a:b])
            for i, (a, b) in enumerate(spans)
        ]
    return parts


class _Stage(NamedTuple):
    """The tasks of one group: new atoms, states after its update, and what was counted on the way."""

    dictionary: Any
    states: list[Any]
    stats: list[Any]
    counts: Any


def _encode_first(
    rows: Any, mean: Any, dtype: Any, D: np.ndarray, gram: np.ndarray, spec: EncodeSpec, rounds: chunk.Rounds
) -> tuple[chunk.ChunkState, chunk.ChunkStats]:
    """Load and encode a chunk in one task, so that the samples themselves are never kept."""
    Y = _load(rows, mean, dtype)
    state, counts = chunk.encode_chunk(Y, D, gram, spec, rounds)
    return state, chunk.chunk_stats(Y, state, counts)


def _encode_residual(
    before: chunk.ChunkState,
    stats: chunk.ChunkStats,
    D: np.ndarray,
    gram: np.ndarray,
    spec: EncodeSpec,
    rounds: chunk.Rounds,
) -> tuple[chunk.ChunkState, chunk.ChunkStats]:
    """Encode what the groups before have left over."""
    state, counts = chunk.encode_chunk(before.R, D, gram, spec, rounds)
    moments = stats.moments.with_residual(chunk.after_update(state, stats))
    return state, stats._replace(moments=moments, counts=counts, finished=time.time())


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _second(pair: tuple[Any, Any]) -> Any:
    return pair[1]


def _counts_of(stats: list[chunk.ChunkStats]) -> np.ndarray:
    return chunk.add_counts([s.counts for s in stats])


def _update(
    names: Tasks, spec: BatchSpec, g: int, D: Any, rounds: chunk.Rounds, states: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Rounds of one group: new atoms of each round, and the states after the last."""
    new_atoms = []
    for r, members in enumerate(rounds.atoms):
        parts = [
            names.call(chunk.first_product, "lanczos-start", (g, r, c), state, r, members.size)
            for c, state in enumerate(states)
        ]
        parts = _tree(names, "lanczos-start", (g, r), parts)
        lz = names.call(chunk.begin_round, "lanczos-begin", (g, r), parts, D, members)
        for step in range(1, spec.lanczos_steps):
            parts = [
                names.call(chunk.next_product, "lanczos-product", (g, r, step, c), state, r, lz)
                for c, state in enumerate(states)
            ]
            parts = _tree(names, "lanczos-product", (g, r, step), parts)
            lz = names.call(chunk.advance_round, "lanczos-step", (g, r, step), parts, lz, D, members)
        new = names.call(chunk.finish_round, "round", (g, r), lz, D, members)
        states = [
            names.call(chunk.refresh_chunk, "refresh", (g, r, c), state, r, D, members, new, spec.encode.nonneg)
            for c, state in enumerate(states)
        ]
        new_atoms.append(new)
    return new_atoms, states


def _fresh_atoms(spec: BatchSpec, group: plan.Group, n_features: int, iteration: int) -> np.ndarray | None:
    """Random unit rows for dead atoms, if that is the rule."""
    if spec.dead_atoms != "random":
        return None
    size = group.stop - group.start
    return plan.random_atoms(size, n_features, spec.dtype, spec.seed, iteration, group.start)


def _stage(
    names: Tasks,
    spec: BatchSpec,
    g: int,
    iteration: int,
    D: np.ndarray,
    encode_tasks: Callable[[Any, Any, EncodeSpec, chunk.Rounds], list[Any]],
) -> _Stage:
    """Encode and update one group of atoms."""
    group = spec.groups[g]
    own = names.data(np.ascontiguousarray(D[group.start : group.stop]), f"dictionary-{g}")
    rounds = chunk.invert_rounds(plan.plan_rounds(group, spec.seed, iteration), group.stop - group.start)
    gram = _gram(names, own, group.stop - group.start, g)
    pairs = encode_tasks(own, gram, spec.encode._replace(k=group.k), rounds)
    states = [names.call(_first, "state", (g, c), pair) for c, pair in enumerate(pairs)]
    stats = [names.call(_second, "stats", (g, c), pair) for c, pair in enumerate(pairs)]
    counts = names.call(_counts_of, "counts", (g,), stats)
    new, states = _update(names, spec, g, own, rounds, states)
    members = list(rounds.atoms)
    candidates: list[Any] = []
    if spec.dead_atoms == "residual":
        candidates = [
            names.call(chunk.worst_samples, "worst", (g, c), state, own, members, new, counts)
            for c, state in enumerate(states)
        ]
    fresh = _fresh_atoms(spec, group, D.shape[1], iteration)
    merged = names.call(chunk.merge_dictionary, "dictionary", (g,), own, members, new, counts, candidates, fresh)
    return _Stage(merged, states, stats, counts)


def build_batch(
    source: Source, rows: np.ndarray, D: np.ndarray, mean: np.ndarray | None, spec: BatchSpec, iteration: int
) -> Delayed:
    """Graph of one outer batch; computing it gives a `BatchResult`.

    Parameters
    ----------
    source : where the samples are
    rows : int64 (n_rows,), the batch's rows in reading order
    D : (n_atoms, n_features) current dictionary
    mean : (n_features,) taken off every sample, or None
    """
    names = Tasks(iteration)
    refs = [_chunk_rows(source, rows[a:b]) for a, b in plan.split_rows(rows.size, spec.chunk_size)]
    centre = None if mean is None else names.data(mean, "mean")
    stages: list[_Stage] = []
    for g in range(len(spec.groups)):

        def encode_tasks(own: Any, gram: Any, how: EncodeSpec, rounds: chunk.Rounds, g: int = g) -> list[Any]:
            if g == 0:
                return [
                    names.call(_encode_first, "encode", (g, c), ref, centre, spec.dtype, own, gram, how, rounds)
                    for c, ref in enumerate(refs)
                ]
            last = stages[-1]
            return [
                names.call(_encode_residual, "encode", (g, c), state, stats, own, gram, how, rounds)
                for c, (state, stats) in enumerate(zip(last.states, last.stats, strict=True))
            ]

        stages.append(_stage(names, spec, g, iteration, D, encode_tasks))
    last = stages[-1]
    after = [
        names.call(chunk.after_update, "metrics", (c,), state, stats)
        for c, (state, stats) in enumerate(zip(last.states, last.stats, strict=True))
    ]
    dictionaries, counts = [s.dictionary for s in stages], [s.counts for s in stages]
    return names.finish(names.call(_collect, "batch", (), dictionaries, counts, last.stats, after))


def _collect(
    dictionaries: list[np.ndarray], counts: list[np.ndarray], stats: list[chunk.ChunkStats], after: list[Any]
) -> tuple[np.ndarray, np.ndarray, Moments, Moments, float]:
    """Everything the driver wants of a batch."""
    before = merge_moments(s.moments for s in stats)
    total = after[0]
    for part in after[1:]:
        total = total.merge(part)
    encoded = max(s.finished for s in stats)
    return (
        np.concatenate(dictionaries),
        np.concatenate(counts),
        before,
        before.with_residual(total),
        encoded,
    )


def run_batch(graph: Delayed) -> BatchResult:
    """Compute a batch's graph on the current scheduler."""
    began = time.time()
    (result,) = dask.compute(graph)
    ended = time.time()
    dictionary, counts, before, after, encoded = result
    encoded = min(max(encoded, began), ended)  # clocks of other machines may differ
    return BatchResult(
        dictionary,
        counts,
        before,
        after,
        int(np.count_nonzero(counts == 0)),
        encoded - began,
        ended - encoded,
    )


def count_tasks(graph: Delayed) -> int:
    """Tasks of a graph."""
    return sum(1 for _ in graph.__dask_graph__())


# ---------------------------------------------------------------------------------------------- encoding


class EncodePlan(NamedTuple):
    """How a dictionary encodes new samples: everything `encode_block` needs besides the rows."""

    spec: EncodeSpec
    mean: np.ndarray | None
    dtype: Any


@one_blas_thread
def encode_block(rows: Any, D: np.ndarray, gram: np.ndarray, how: EncodePlan) -> tuple[np.ndarray, np.ndarray]:
    """Load and encode a block of rows: atom (n, k) int32 and coefficient (n, k)."""
    Y = _load(rows, how.mean, how.dtype)
    return encode.encode_rows(Y, D, gram, how.spec)


@one_blas_thread
def evaluate_block(rows: Any, D: np.ndarray, gram: np.ndarray, how: EncodePlan) -> tuple[Moments, int]:
    """Load and encode a block of rows: sums over samples and residual, and the number of nonzeros."""
    from dbksvd_dask.metrics import moments

    Y = _load(rows, how.mean, how.dtype)
    atom, coefficient = encode.encode_rows(Y, D, gram, how.spec)
    R = encode.residual(Y, atom, coefficient, D)
    return moments(Y, R), int(np.count_nonzero(atom >= 0))


def build_evaluation(
    source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, chunk_size: int, iteration: int = 0
) -> Delayed:
    """Graph that encodes rows and merges their metrics: computing it gives (Moments, number of nonzeros)."""
    names = Tasks(iteration)
    dictionary = names.data(D, "dictionary")
    gram = _gram(names, dictionary, D.shape[0], 0)
    parts = [
        names.call(evaluate_block, "evaluate", (c,), _chunk_rows(source, rows[a:b]), dictionary, gram, how)
        for c, (a, b) in enumerate(plan.split_rows(rows.size, chunk_size))
    ]
    return names.finish(names.call(_merge_evaluation, "evaluation", (), parts))


def _merge_evaluation(parts: list[tuple[Moments, int]]) -> tuple[Moments, int]:
    return merge_moments(m for m, _ in parts), sum(count for _, count in parts)


def build_sum(source: Source, rows: np.ndarray, chunk_size: int, dtype: Any) -> Delayed:
    """Graph of the float64 sum of rows over samples: (n_features,). Checks them for NaN on the way."""
    names = Tasks()
    parts = [
        names.call(_sum_block, "mean", (c,), _chunk_rows(source, rows[a:b]), dtype)
        for c, (a, b) in enumerate(plan.split_rows(rows.size, chunk_size))
    ]
    return names.finish(names.call(_add_all, "mean-sum", (), parts))


def _sum_block(rows: Any, dtype: Any) -> np.ndarray:
    return np.asarray(_load(rows, None, dtype).sum(axis=0, dtype=np.float64))


def _add_all(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def build_rows(source: Source, rows: np.ndarray, mean: np.ndarray | None, dtype: Any) -> Delayed:
    """Graph that loads some rows, widened and centred: (n, n_features)."""
    names = Tasks()
    return names.finish(names.call(_load, "rows", (), _chunk_rows(source, rows), mean, dtype))


def _encoding(
    source: Source, D: np.ndarray, how: EncodePlan, block_rows: int
) -> tuple[Tasks, list[Any], list[int]]:
    """Tasks that encode a whole source, block by block, and the rows of each block."""
    names = Tasks()
    dictionary = names.data(D, "dictionary")
    gram = _gram(names, dictionary, D.shape[0], 0)
    spans = plan.split_rows(source.n_samples, block_rows)
    blocks = []
    for c, (a, b) in enumerate(spans):
        rows = _chunk_rows(source, np.arange(a, b, dtype=np.int64))
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

# Rows that a task of the encode job widens and encodes at a time: enough for full speed, and a task then needs
# the memory of its stored chunk and little more.
BLOCK_ROWS = 4096
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
            Y = _prepare(raw[a:b], where, how.mean, how.dtype)
            part = slice(start - first + a, start - first + b)
            atom[part], exact = encode.encode_rows(Y, D, gram, how.spec)
            coefficient[part] = _narrow(exact, goal.coefficient_dtype)
            # the error of what is stored, not of what was computed
            R = encode.residual(Y, atom[part], coefficient[part].astype(how.dtype), D)
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
    return coefficient.astype(dtype)


def hold_dictionary(D: np.ndarray) -> tuple[Delayed, Delayed]:
    """Dictionary and gram, computed once and kept where the tasks run."""
    names = Tasks()
    dictionary = names.data(np.ascontiguousarray(D), "dictionary")
    gram = _gram(names, dictionary, D.shape[0], 0)
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
    client = getattr(dask.base.get_scheduler(), "__self__", None)
    if client is not None:
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
    for future in running:
        on_done(future.result())
        for task in itertools.islice(tasks, 1):
            running.add(client.compute(task))
