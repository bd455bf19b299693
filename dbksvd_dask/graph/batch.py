"""One outer batch of DB-KSVD as a Dask graph; graphs that only encode are in `graph.encode`.

The algorithm is that of Valentin, Katz, Vanhoucke, Kochenderfer: DB-KSVD (arXiv:2505.18441): encode a batch, then
update the atoms in rounds, all atoms of a round at once. docs/algorithm.md derives the update.

::

    chunk c:  load -> encode (tiles) -> state
    round r:  first product per chunk -> sum -> warm start -> next product per chunk -> sum -> step -> new atoms
              refresh per chunk -> state
    end:      merged dictionary, metrics, atom usage

The graph runs on the current scheduler: threads, a LocalCluster or a remote cluster. Partial sums are computed per
chunk and added in a fixed order, so the result does not depend on where or in which order the tasks run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.gpu import device
from dbksvd_dask.graph import readahead, signs
from dbksvd_dask.graph._compat import keys_of
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.load import dictionaries_of, grams_of, prepare
from dbksvd_dask.graph.run import chunk_homes, compute
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.dead_atoms import Candidates, Rule, SeedPath, rule_of
from dbksvd_dask.kernels.moments import Moments, merge_moments
from dbksvd_dask.plan import units
from dbksvd_dask.plan.device import CPU, Placement
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.groups import Group, plan_rounds

# Parts that one task adds. Neighbouring chunks lie on one worker, so with pairs all levels but the top add where
# the parts are, and one sum per worker is transferred instead of one per chunk.
FAN_IN = 2


class BatchSpec(NamedTuple):
    """The settings of a batch, besides its rows and the dictionary."""

    groups: tuple[Group, ...]
    encode: EncodeSpec
    lanczos_steps: int
    chunk_size: int
    dead_atoms: str
    seed: int
    dtype: Any
    place: Placement = CPU
    weights: AtomWeights | None = None  # only for a dictionary of one group


class Upcoming(NamedTuple):
    """The rows that the next batch of a fit reads."""

    fit: str  # identifies the fit among those of a process
    rows: np.ndarray  # int64 (n_rows,); empty for the last batch


class BatchResult(NamedTuple):
    """The result of one outer batch."""

    dictionary: np.ndarray  # (n_atoms, n_features)
    counts: np.ndarray  # (n_atoms,) samples per atom
    before: Moments
    after: Moments
    n_dead: int
    encode_seconds: float
    update_seconds: float
    coefficient_sums: np.ndarray | None = None  # (n_atoms,) float64 after the update; None where none is negative


# ---------------------------------------------------------------------------------------------- graph


def _tree(names: Tasks, place: Placement, label: str, index: tuple[int, ...], parts: list[Any]) -> list[Any]:
    """Add all levels but the last of a sum over chunks, in the fixed order of `plan.units.tree_levels`."""
    add = functions(place).add_sums
    firsts = list(range(len(parts)))  # first chunk of each part: its worker computes the sum
    for depth, spans in enumerate(units.tree_levels(len(parts), FAN_IN)[:-1]):
        parts = [
            names.call(add, f"{label}-sum", (*index, depth, i), parts[a:b], chunk=firsts[a])
            for i, (a, b) in enumerate(spans)
        ]
        firsts = [firsts[a] for a, _ in spans]
    return parts


class _Stage(NamedTuple):
    """The tasks of one group: new atoms, states after its update, statistics and counts of its encoding."""

    dictionary: Any
    states: list[Any]
    stats: list[Any]
    counts: Any


def _encode_first(
    rows: Any,
    mean: Any,
    dtype: Any,
    D: np.ndarray,
    gram: np.ndarray | None,
    spec: EncodeSpec,
    rounds: chunk.Rounds,
    place: Placement,
    weights: AtomWeights | None,
) -> chunk.ChunkState:
    """Load and encode a chunk in one task, so that no task keeps the samples."""
    compute, raw = functions(place), rows.load()
    with device.turn(place.pursuit):
        Y = prepare(raw, rows.where, mean, dtype, place)
        state, counts = compute.encode_chunk(Y, D, gram, spec, rounds, weights)
        state = state._replace(stats=compute.chunk_stats(Y, state, counts))
    return _waiting(state, place)


def _encode_residual(
    before: chunk.ChunkState,
    D: np.ndarray,
    gram: np.ndarray | None,
    spec: EncodeSpec,
    rounds: chunk.Rounds,
    place: Placement,
) -> chunk.ChunkState:
    """Encode the residual that the preceding groups leave."""
    compute, stats = functions(place), before.stats
    assert stats is not None
    state, counts = compute.encode_chunk(before.R, D, gram, spec, rounds)
    moments = stats.moments.with_residual(compute.after_update(state, stats))
    state = state._replace(stats=stats._replace(moments=moments, counts=counts, finished=time.time()))
    return _waiting(state, place)


def _waiting(state: chunk.ChunkState, place: Placement) -> chunk.ChunkState:
    """Return the state for the next task: on its device, or parked on the host if the device is too small."""
    parked: chunk.ChunkState = state if place.resident else functions(place).park(state)
    return parked


def _stats_of(state: chunk.ChunkState) -> chunk.ChunkStats:
    """Return the statistics that the driver needs: kilobytes, while the state stays on its worker."""
    assert state.stats is not None
    return state.stats._replace(y_norms=np.empty(0))


def _counts_of(stats: list[chunk.ChunkStats]) -> np.ndarray:
    return chunk.add_counts([s.counts for s in stats])


def _after(state: chunk.ChunkState, place: Placement) -> Any:
    return functions(place).after_update(state, state.stats)


def _first_step(parts: list[Any], D: np.ndarray, members: np.ndarray, last: bool, place: Placement) -> Any:
    """Start a round; with a single Lanczos step, return its new atoms."""
    compute = functions(place)
    lz = compute.begin_round(parts, D, members)
    return compute.finish_round(lz, D, members) if last else lz


def _next_step(parts: list[Any], lz: Any, D: np.ndarray, members: np.ndarray, last: bool, place: Placement) -> Any:
    """Take one Lanczos step of a round; after the last, return its new atoms."""
    compute = functions(place)
    lz = compute.advance_round(parts, lz, D, members)
    return compute.finish_round(lz, D, members) if last else lz


def _round(names: Tasks, spec: BatchSpec, g: int, r: int, D: Any, members: np.ndarray, states: list[Any]) -> Any:
    """Add the tasks of one round; return that of its new atoms."""
    steps, compute = spec.lanczos_steps, functions(spec.place)
    parts = [
        names.call(compute.first_product, "lanczos-start", (g, r, c), state, r, members.size, chunk=c)
        for c, state in enumerate(states)
    ]
    parts = _tree(names, spec.place, "lanczos-start", (g, r), parts)
    label, index = ("lanczos-begin", (g, r, 0)) if steps > 1 else ("round", (g, r))
    out = names.call(_first_step, label, index, parts, D, members, steps == 1, spec.place)
    for step in range(1, steps):
        parts = [
            names.call(compute.next_product, "lanczos-product", (g, r, step, c), state, r, out, chunk=c)
            for c, state in enumerate(states)
        ]
        parts = _tree(names, spec.place, "lanczos-product", (g, r, step), parts)
        last = step == steps - 1
        label, index = ("round", (g, r)) if last else ("lanczos-step", (g, r, step))
        out = names.call(_next_step, label, index, parts, out, D, members, last, spec.place)
    return out


def _update(
    names: Tasks, spec: BatchSpec, g: int, D: Any, D_chunk: list[Any], rounds: chunk.Rounds, states: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Add the rounds of one group; return the new atoms of each round, and the states after the last.

    Parameters
    ----------
    D : the group's atoms on the host;  D_chunk : per chunk, the same atoms on the device of its tasks
    """
    new_atoms = []
    refresh, nonneg = functions(spec.place).refresh_chunk, spec.encode.nonneg
    for r, members in enumerate(rounds.atoms):
        new = _round(names, spec, g, r, D, members, states)
        states = [
            names.call(refresh, "refresh", (g, r, c), state, r, D_chunk[c], members, new, nonneg, chunk=c)
            for c, state in enumerate(states)
        ]
        new_atoms.append(new)
    return new_atoms, states


def _propose(rule: Rule, place: Placement, *chunk: Any) -> Candidates:
    """Return the candidates of one chunk to replace dead atoms."""
    return rule.propose(functions(place), *chunk)


def _stage(
    names: Tasks,
    spec: BatchSpec,
    g: int,
    iteration: int,
    D: np.ndarray,
    encode_tasks: Callable[[list[Any], list[Any], EncodeSpec, chunk.Rounds], list[Any]],
) -> _Stage:
    """Encode and update one group of atoms."""
    group, compute = spec.groups[g], functions(spec.place)
    D_group = names.data(np.ascontiguousarray(D[group.start : group.stop]), f"dictionary-{g}")
    rounds = chunk.invert_rounds(plan_rounds(group, spec.seed, iteration), group.stop - group.start)
    D_chunk = dictionaries_of(names, D_group, g, spec.place)
    grams = grams_of(
        names, D_group, group.stop - group.start, spec.encode, g, spec.place, spec.weights is not None
    )
    states = encode_tasks(D_chunk, grams, spec.encode._replace(k=group.k), rounds)
    stats = [names.call(_stats_of, "stats", (g, c), state, chunk=c) for c, state in enumerate(states)]
    counts = names.call(_counts_of, "counts", (g,), stats)
    new, states = _update(names, spec, g, D_group, D_chunk, rounds, states)
    members = list(rounds.atoms)
    rule, update = rule_of(spec.dead_atoms), (members, new, counts)
    candidates = [
        names.call(_propose, "propose", (g, c), rule, spec.place, state, D_chunk[c], *update, chunk=c)
        for c, state in enumerate(states)
        if rule.proposes
    ]
    path = SeedPath(spec.seed, iteration, group.start)
    merged = names.call(compute.merge_dictionary, "dictionary", (g,), D_group, *update, candidates, rule, path)
    return _Stage(merged, states, stats, counts)


def build_batch(
    source: Source,
    rows: np.ndarray,
    D: np.ndarray,
    mean: np.ndarray | None,
    spec: BatchSpec,
    iteration: int,
    upcoming: Upcoming | None = None,
) -> Delayed:
    """Build the graph of one outer batch, which `run_batch` computes.

    Parameters
    ----------
    source : the samples
    rows : int64 (n_rows,), the batch's rows in reading order
    D : (n_atoms, n_features) current dictionary
    mean : (n_features,) to subtract from every sample, or None
    upcoming : rows of the next batch, which workers may read while they compute this one
    """
    spans = units.split_rows(rows.size, spec.chunk_size)
    names = Tasks(iteration, len(spans), chunk_homes(len(spans)))
    refs = _references(source, rows, spec.chunk_size, iteration, upcoming)
    centre = None if mean is None else names.data(mean, "mean")
    weights = None if spec.weights is None else names.data(spec.weights, "weights")
    stages: list[_Stage] = []
    for g in range(len(spec.groups)):

        def encode_tasks(
            D_chunk: list[Any], grams: list[Any], how: EncodeSpec, rounds: Any, g: int = g
        ) -> list[Any]:
            out = []
            for c, ref in enumerate(refs):
                rest = (D_chunk[c], grams[c], how, rounds, spec.place)
                if g == 0:
                    call = names.call(
                        _encode_first, "encode", (g, c), ref, centre, spec.dtype, *rest, weights, chunk=c
                    )
                else:
                    call = names.call(_encode_residual, "encode", (g, c), stages[-1].states[c], *rest, chunk=c)
                out.append(call)
            return out

        stages.append(_stage(names, spec, g, iteration, D, encode_tasks))
    last = stages[-1]
    after = [
        names.call(_after, "metrics", (c,), state, spec.place, chunk=c) for c, state in enumerate(last.states)
    ]
    dictionaries, counts = [s.dictionary for s in stages], [s.counts for s in stages]
    sums = [] if spec.encode.nonneg else _coefficient_sums(names, spec, stages)
    return names.finish(names.call(_collect, "batch", (), dictionaries, counts, last.stats, after, sums))


def _coefficient_sums(names: Tasks, spec: BatchSpec, stages: list[_Stage]) -> list[Any]:
    """Add tasks that sum the coefficients of each group's atoms."""
    return [
        signs.sum_tasks(names, spec.place, g, stage.states, group.stop - group.start)
        for g, (group, stage) in enumerate(zip(spec.groups, stages, strict=True))
    ]


def _references(
    source: Source, rows: np.ndarray, chunk_size: int, iteration: int, upcoming: Upcoming | None
) -> list[Any]:
    """Return references to the rows of each chunk."""

    def cut(rows: np.ndarray) -> list[Any]:
        return [source.take(rows[a:b]) for a, b in units.split_rows(rows.size, chunk_size)]

    if upcoming is None or not source.reads_ahead:
        return cut(rows)
    return readahead.with_next(cut(rows), cut(upcoming.rows), readahead.Tag(upcoming.fit, iteration))


def _collect(
    dictionaries: list[np.ndarray],
    counts: list[np.ndarray],
    stats: list[chunk.ChunkStats],
    after: list[Any],
    sums: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, Moments, Moments, float, np.ndarray | None]:
    """Return everything that the driver needs from a batch."""
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
        np.concatenate(sums) if sums else None,
    )


def run_batch(graph: Delayed, on_round: Callable[[], None] | None = None) -> BatchResult:
    """Compute the graph of a batch on the current scheduler; call `on_round` after each round."""
    began = time.time()
    result = compute(graph, "round-", on_round)
    ended = time.time()
    dictionary, counts, before, after, encoded, sums = result
    encoded = min(max(encoded, began), ended)  # a worker's clock may differ from this one
    return BatchResult(
        dictionary,
        counts,
        before,
        after,
        int(np.count_nonzero(counts == 0)),
        encoded - began,
        ended - encoded,
        sums,
    )


def count_tasks(graph: Delayed) -> int:
    """Return the number of tasks of a graph."""
    return len(keys_of(graph))
