"""The tasks of one share of a batch: consecutive chunks, computed side by side on the threads of their worker.

A task returns new states and the sums over its chunks as nodes of one fixed tree (`plan.shares`). States are
large and stay where they are, so sums that travel are taken out of them by tasks of their own. Work between which
nothing travels is one task: the refresh of a round and the first product of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dbksvd_dask.gpu import device
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.load import prepare
from dbksvd_dask.graph.threads import each
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.dead_atoms import Candidates, Rule
from dbksvd_dask.kernels.lanczos import LanczosState
from dbksvd_dask.kernels.moments import Mergeable, Moments, ResidualMoments
from dbksvd_dask.plan.device import Placement
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.shares import Node, add_nodes

M = TypeVar("M", bound=Mergeable)


class Setting(NamedTuple):
    """Everything about one group of atoms that does not change during a batch; each worker gets it once."""

    D: np.ndarray  # (n_atoms of the group, n_features) on the host
    rounds: chunk.Rounds
    spec: EncodeSpec
    place: Placement
    n_chunks: int  # of the batch
    dtype: Any
    rule: Rule
    mean: np.ndarray | None = None  # (n_features,)
    weights: AtomWeights | None = None
    half_weight: float = 0.0  # residual norm that halves a sample in the update; 0: all count alike
    whiten: np.ndarray | None = None  # (n_features, n_features): samples are multiplied by it


class States(NamedTuple):
    """The chunks of a share between two tasks."""

    start: int  # number of the first chunk
    chunks: tuple[Any, ...]  # `kernels.chunk.ChunkState` or `gpu.chunk.DeviceState` each
    sums: list[Node[Any]]  # of the first product of the round that follows
    new: Any = None  # atoms of the round before


class Encoded(NamedTuple):
    """Sums over some chunks after their encoding."""

    moments: list[Node[Moments]]
    counts: np.ndarray  # (n_atoms of the group,) int64
    finished: float  # time.time() when the last encoding ended


class Closed(NamedTuple):
    """Sums over some chunks after the last round of a group of atoms, and candidates to replace dead ones."""

    after: list[Node[ResidualMoments]]  # of the last group; empty for others
    coefficients: list[Node[np.ndarray]]  # (n_atoms of the group,) float64; empty where none is negative
    candidates: list[Candidates]  # in chunk order; empty if the rule proposes none
    rule: Rule | None = None  # that proposed them
    n_dead: int = 0  # atoms to replace


# ---------------------------------------------------------------------------------------------- sums


def add_moments(nodes: Iterable[Node[M]], start: int, stop: int, n: int) -> list[Node[M]]:
    """Add moments, or anything else that merges, as far as the tree allows."""
    return add_nodes(nodes, start, stop, n, lambda a, b: a.merge(b))


def join_sums(parts: list[list[Node[Any]]], setting: Setting) -> list[Node[Any]]:
    """Add the sums of neighbouring shares as far as the tree allows."""
    nodes = [node for part in parts for node in part]
    add = functions(setting.place).add_sums
    return add_nodes(nodes, nodes[0].start, nodes[-1].stop, setting.n_chunks, lambda a, b: add([a, b]))


def join_encoded(parts: list[Encoded], n_chunks: int) -> Encoded:
    """Add the statistics of neighbouring shares."""
    nodes = [node for part in parts for node in part.moments]
    moments = add_moments(nodes, nodes[0].start, nodes[-1].stop, n_chunks)
    return Encoded(moments, chunk.add_counts([p.counts for p in parts]), max(p.finished for p in parts))


def join_closed(parts: list[Closed], n_chunks: int) -> Closed:
    """Add the results of neighbouring shares."""
    after = [node for part in parts for node in part.after]
    coefficients = [node for part in parts for node in part.coefficients]
    if after:
        after = add_moments(after, after[0].start, after[-1].stop, n_chunks)
    if coefficients:
        span = (coefficients[0].start, coefficients[-1].stop)
        coefficients = add_nodes(coefficients, *span, n_chunks, np.add)
    candidates = [c for part in parts for c in part.candidates]
    rule, n_dead = parts[0].rule, parts[0].n_dead
    return Closed(after, coefficients, rule.best(candidates, n_dead) if rule else candidates, rule, n_dead)


def _nodes(start: int, values: Iterable[Any]) -> Iterator[Node[Any]]:
    return (Node(c, c + 1, value) for c, value in enumerate(values, start))


# ---------------------------------------------------------------------------------------------- encoding


def encode_samples(start: int, rows: list[Any], setting: Setting, D: Any, gram: Any) -> States:
    """Load and encode chunks, so that no task keeps the samples, and begin the first round.

    Parameters
    ----------
    rows : per chunk, `graph.sources.Rows`
    D, gram : where the chunks are
    """
    compute = functions(setting.place)

    def encode(ref: Any) -> Any:
        raw = ref.load()
        with device.turn(setting.place.pursuit):
            Y = prepare(raw, ref.where, setting.mean, setting.dtype, setting.place)
            if setting.whiten is not None:
                Y = compute.whiten(Y, setting.whiten)
            state, counts = compute.encode_chunk(Y, D, gram, setting.spec, setting.rounds, setting.weights)
            state = state._replace(stats=compute.chunk_stats(Y, state, counts))
        del raw, Y  # the weighed residual takes their room
        return compute.weigh_samples(state, setting.half_weight) if setting.half_weight > 0 else state

    return _begun(start, rows, encode, setting)


def encode_residual(pair: tuple[States, Closed], setting: Setting, D: Any, gram: Any) -> States:
    """Encode the residual that the preceding groups leave, and begin the first round.

    Parameters
    ----------
    pair : from `close_group`
    """
    compute, before = functions(setting.place), pair[0]

    def encode(old: Any) -> Any:
        stats = old.stats
        state, counts = compute.encode_chunk(old.R, D, gram, setting.spec, setting.rounds)
        moments = stats.moments.with_residual(compute.after_update(state, stats))
        return state._replace(stats=stats._replace(moments=moments, counts=counts, finished=time.time()))

    return _begun(before.start, before.chunks, encode, setting)


def _begun(start: int, chunks: Sequence[Any], encode: Callable[[Any], Any], setting: Setting) -> States:
    """Encode chunks and take the first product of round 0; park the states if the device is too small."""
    compute = functions(setting.place)

    def one(given: Any) -> tuple[Any, Any]:
        state = encode(given)
        part = compute.first_product(state, 0, setting.rounds.atoms[0].size)
        return state if setting.place.resident else compute.park(state), part

    return _with_sums(start, chunks, one, setting)


def _with_sums(
    start: int, chunks: Sequence[Any], one: Callable[[Any], tuple[Any, Any]], setting: Setting
) -> States:
    """Compute a new state and its sums for each chunk; add the sums as they come."""
    states: list[Any] = []

    def parts() -> Iterator[Any]:
        for state, part in each(one, chunks):
            states.append(state)
            yield part

    sums = _added(start, len(chunks), parts(), setting)
    return States(start, tuple(states), sums)


def _added(start: int, n: int, parts: Iterable[Any], setting: Setting) -> list[Node[Any]]:
    """Add the sums of n chunks as far as the tree allows."""
    add = functions(setting.place).add_sums
    return add_nodes(_nodes(start, parts), start, start + n, setting.n_chunks, lambda a, b: add([a, b]))


def sums_of(states: States) -> list[Node[Any]]:
    """Return the sums of the first product, which travel while the states stay."""
    return states.sums


def new_of(states: States) -> Any:
    """Return the atoms of the round before."""
    return states.new


def same(value: Any) -> Any:
    """Return the value: a task that copies it to a worker, or gives it a name."""
    return value


def encoded_of(states: States, n_chunks: int) -> Encoded:
    """Return the statistics of the encoding: kilobytes, while the states stay."""
    stats = [state.stats for state in states.chunks]
    stop = states.start + len(stats)
    moments = add_moments(_nodes(states.start, (s.moments for s in stats)), states.start, stop, n_chunks)
    return Encoded(moments, chunk.add_counts([s.counts for s in stats]), max(s.finished for s in stats))


# ---------------------------------------------------------------------------------------------- rounds


def product(states: States, r: int, lz: Any, setting: Setting) -> list[Node[Any]]:
    """Return the sums of a further Lanczos product of round `r`."""
    next_product = functions(setting.place).next_product
    parts = each(lambda state: next_product(state, r, lz), states.chunks)
    return _added(states.start, len(states.chunks), parts, setting)


def update(states: States, r: int, new: Any, setting: Setting, D: Any) -> States:
    """Exchange the atoms of round `r`, refit their coefficients, and begin the next round."""
    compute, n_local = functions(setting.place), setting.rounds.atoms[r + 1].size

    def one(old: Any) -> tuple[Any, Any]:
        state = _refreshed(old, r, new, setting, D)
        return state, compute.first_product(state, r + 1, n_local)

    return _with_sums(states.start, states.chunks, one, setting)._replace(new=new)


def _refreshed(state: Any, r: int, new: Any, setting: Setting, D: Any) -> Any:
    members, nonneg = setting.rounds.atoms[r], setting.spec.nonneg
    return functions(setting.place).refresh_chunk(state, r, D, members, new, nonneg)


def cut_sums(sums: list[Node[Any]], spans: list[tuple[int, int]]) -> list[list[Node[Any]]]:
    """Cut the sums of a round into pieces: spans of its atoms."""
    if len(spans) == 1:
        return [sums]
    return [[node._replace(value=_rows(node.value, a, b)) for node in sums] for a, b in spans]


def _rows(sums: chunk.RoundSums, a: int, b: int) -> chunk.RoundSums:
    return sums._replace(W=sums.W[a:b], scalars=tuple(total[a:b] for total in sums.scalars))


def join_pieces(pieces: list[Any]) -> Any:
    """Return the result of a step on the host from those of its pieces: atoms, or what a product takes."""
    if len(pieces) == 1:
        return pieces[0]
    if not isinstance(pieces[0], LanczosState):
        return chunk.frozen(np.concatenate(pieces))
    basis, alpha2, _, _, dv = zip(*pieces, strict=True)
    return LanczosState(
        (np.concatenate([rows for (rows,) in basis]),), np.concatenate(alpha2), (), (), np.concatenate(dv)
    )


def take_step(
    sums: list[list[Node[Any]]],
    r: int,
    lz: Any,
    setting: Setting,
    last: bool,
    span: tuple[int, int] | None = None,
) -> Any:
    """Take one Lanczos step of a round from the sums of all shares; after the last, return its new atoms.

    Parameters
    ----------
    lz : `kernels.lanczos.LanczosState` so far; None to start the round
    span : of those atoms of the round to which the sums belong; None for all
    """
    compute, members = functions(setting.place), setting.rounds.atoms[r][slice(*span or (None,))]
    (total,) = join_sums(sums, setting)
    if lz is None:
        lz = compute.begin_round([total.value], setting.D, members)
    else:
        lz = compute.advance_round([total.value], lz, setting.D, members)
    return compute.finish_round(lz, setting.D, members) if last else lz


# ---------------------------------------------------------------------------------------------- the end of a group


class _End(NamedTuple):
    """One chunk after the last round."""

    state: Any
    after: ResidualMoments | None
    coefficients: np.ndarray | None
    candidates: Candidates | None


def _end(old: Any, new: Any, proposals: list[Any], setting: Setting, D: Any, last: bool) -> _End:
    """Refresh a chunk a last time, and sum up what it has become."""
    compute, members = functions(setting.place), list(setting.rounds.atoms)
    state = _refreshed(old, len(members) - 1, new, setting, D)
    after = compute.after_update(state, state.stats) if last else None
    coefficients = None if setting.spec.nonneg else compute.coefficient_sums(state, setting.D.shape[0])
    candidates = None
    if proposals:
        *earlier, counts = proposals
        candidates = setting.rule.propose(compute, state, D, members, [*earlier, new], counts)
    return _End(None if last else state, after, coefficients, candidates)


def _closed(start: int, ends: list[_End], proposals: list[Any], setting: Setting) -> Closed:
    n_dead = int(np.count_nonzero(proposals[-1] == 0)) if proposals else 0
    parts = [
        Closed(
            [] if end.after is None else [Node(c, c + 1, end.after)],
            [] if end.coefficients is None else [Node(c, c + 1, end.coefficients)],
            [] if end.candidates is None else [end.candidates],
            setting.rule if proposals else None,
            n_dead,
        )
        for c, end in enumerate(ends, start)
    ]
    return join_closed(parts, setting.n_chunks)


def close_last(states: States, new: Any, proposals: list[Any], setting: Setting, D: Any) -> Closed:
    """Finish the last group of atoms: nothing but sums is needed of its chunks.

    Parameters
    ----------
    new : atoms of the last round
    proposals : for a rule that proposes replacements of dead atoms: the new atoms of the rounds before, and the
        samples of the batch per atom, (n_atoms,)
    """
    ends = list(each(lambda state: _end(state, new, proposals, setting, D, True), states.chunks))
    return _closed(states.start, ends, proposals, setting)


def close_group(states: States, new: Any, proposals: list[Any], setting: Setting, D: Any) -> tuple[States, Closed]:
    """Finish a group of atoms that others follow; parameters as of `close_last`."""
    ends = list(each(lambda state: _end(state, new, proposals, setting, D, False), states.chunks))
    after = States(states.start, tuple(end.state for end in ends), [])
    return after, _closed(states.start, ends, proposals, setting)


def closed_of(pair: tuple[States, Closed]) -> Closed:
    """Return the sums after a group, which travel while the states stay."""
    return pair[1]
