"""One outer batch of DB-KSVD as a Dask graph; graphs that only encode are in `graph.encode`.

The algorithm is that of Valentin, Katz, Vanhoucke, Kochenderfer: DB-KSVD (arXiv:2505.18441): encode a batch, then
update the atoms in rounds, all atoms of a round at once. docs/algorithm.md derives the update.

::

    share s:  load, encode, first product of round 0 -> states, sums
    round r:  sums of all shares -> first step -> next product per share -> sums -> step -> new atoms
              refresh, first product of round r + 1 per share -> states, sums
    end:      last refresh, metrics, candidates per share -> merged dictionary, metrics, atom usage

A share is the chunks of one worker on a cluster and a single chunk on threads; `graph.share` has its tasks and
`graph.exchange` what travels between shares. The graph runs on the current scheduler: threads, a LocalCluster or
a remote cluster. Sums are added in a fixed order, so the result does not depend on where or in which order the
tasks run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.errors import InputError
from dbksvd_dask.graph import follow, outcome, readahead, share
from dbksvd_dask.graph._compat import keys_of
from dbksvd_dask.graph.exchange import Exchange
from dbksvd_dask.graph.load import dictionaries_of, grams_of
from dbksvd_dask.graph.peers import PeersLostError
from dbksvd_dask.graph.run import compute, current_client, plan_shares
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.graph.together import Together, can_work_together
from dbksvd_dask.graph.together import build as build_together
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.dead_atoms import SeedPath, rule_of
from dbksvd_dask.kernels.moments import Moments
from dbksvd_dask.plan import units
from dbksvd_dask.plan.device import CPU, Placement
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.groups import Group, plan_rounds
from dbksvd_dask.plan.shares import Share


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
    half_weight: float = 0.0  # of one group: residual norm that halves a sample in the update; 0: all count alike
    whiten: np.ndarray | None = None  # (n_features, n_features): samples are multiplied by it


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


class _Stage(NamedTuple):
    """The tasks of one group of atoms."""

    dictionary: Any
    counts: Any
    encoded: list[Any]  # per group of shares, `share.Encoded`
    closed: list[Any]  # per group of shares, `share.Closed`
    after: list[Any]  # per share, what the next group begins with


class _Builder:
    """The graph of one batch under construction."""

    def __init__(self, names: Tasks, spec: BatchSpec, iteration: int) -> None:
        self.names, self.spec, self.iteration = names, spec, iteration
        self.exchange = Exchange(names)

    def each(
        self, function: Callable[..., Any], label: str, index: tuple[int, ...], *columns: list[Any]
    ) -> list[Any]:
        """Add one call per share, with its entry of every column."""
        rows = zip(*columns, strict=True)
        return [self.names.call(function, label, (*index, i), *row, at=i) for i, row in enumerate(rows)]

    def same(self, value: Any) -> list[Any]:
        """Return a column of equal entries."""
        return [value] * len(self.names.shares)

    def stage(self, g: int, setting: share.Setting, before: list[list[Any]]) -> _Stage:
        """Add the tasks of one group of atoms.

        Parameters
        ----------
        before : columns: the samples of each share, or what the last group left of them
        """
        names, rule, n_chunks = self.names, setting.rule, setting.n_chunks
        settings = self.exchange.broadcast(names.data(setting, f"setting-{g}"), "setting", (g,))
        atoms = [names.inline(_atoms, one) for one in settings]
        D = dictionaries_of(names, atoms, g, self.spec.place)
        weighted = setting.weights is not None
        grams = grams_of(names, atoms, setting.D.shape, setting.spec, g, self.spec.place, weighted)
        encode = share.encode_samples if g == 0 else share.encode_residual
        states = self.each(encode, "encode", (g,), *before, settings, D, grams)
        encoded = self.each(share.encoded_of, "stats", (g,), states, self.same(n_chunks))
        encoded = self.exchange.collect(share.join_encoded, "stats", (g,), encoded, self.same(n_chunks))
        counts = names.call(outcome.counts_of, "counts", (g,), encoded)
        new, proposals, newest, states = self.rounds(g, setting, settings, D, states)
        is_last = g == len(self.spec.groups) - 1
        close = share.close_last if is_last else share.close_group
        proposals = [[*mine, counts] if rule.proposes else [] for mine in proposals]
        after = self.each(close, "close", (g,), states, newest, proposals, settings, D)
        closed = after if is_last else self.each(share.closed_of, "closed", (g,), after)
        closed = self.exchange.collect(share.join_closed, "close", (g,), closed, self.same(n_chunks))
        path = SeedPath(self.spec.seed, self.iteration, self.spec.groups[g].start)
        arguments = (settings[0], new, counts, closed, path)
        merged = names.call(outcome.merge, "dictionary", (g,), *arguments, at=0)
        return _Stage(merged, counts, encoded, closed, after)

    def rounds(
        self, g: int, setting: share.Setting, settings: list[Any], D: list[Any], states: list[Any]
    ) -> tuple[list[Any], list[list[Any]], list[Any], list[Any]]:
        """Add the rounds of one group.

        Returns
        -------
        new : per round, the task of its new atoms
        known : per share, the new atoms of all rounds but the last, where they are nearest
        newest : per share, those of the last
        states : per share, before its last refresh
        """
        new: list[Any] = []
        known: list[list[Any]] = [[] for _ in states]
        last = len(setting.rounds.atoms) - 1
        for r in range(last):
            newest = self.round(g, r, settings, states)
            states = self.each(share.update, "refresh", (g, r), states, self.same(r), newest, settings, D)
            new.append(self.exchange.named(newest, share.new_of, "round", (g, r), states[0]))
            for mine, one in zip(known, self.same(new[-1]) if self.exchange.direct else newest, strict=True):
                mine.append(one)
        newest = self.round(g, last, settings, states)
        new.append(self.exchange.named(newest, share.same, "round", (g, last), newest[0]))
        return new, known, newest, states

    def round(self, g: int, r: int, settings: list[Any], states: list[Any]) -> list[Any]:
        """Add the tasks of one round; return, per share, what it takes for the new atoms."""
        lz = self.same(None)
        for step in range(self.spec.lanczos_steps):
            if step == 0:
                label, parts = "lanczos-start", self.each(share.sums_of, "lanczos-start", (g, r), states)
            else:
                columns = (states, self.same(r), lz, settings)
                label, parts = (
                    "lanczos-product",
                    self.each(share.product, "lanczos-product", (g, r, step), *columns),
                )
            sums = self.exchange.collect(share.join_sums, label, (g, r, step), parts, settings)
            last = step == self.spec.lanczos_steps - 1
            calls = [(sums, r, mine, setting, last) for mine, setting in zip(lz, settings, strict=True)]
            name, index = ("round", (g, r)) if last else ("lanczos-step", (g, r, step))
            lz = self.exchange.step(share.take_step, name, index, calls)
        return lz


def _atoms(setting: share.Setting) -> np.ndarray:
    return setting.D


def build_batch(
    source: Source,
    rows: np.ndarray,
    D: np.ndarray,
    mean: np.ndarray | None,
    spec: BatchSpec,
    iteration: int,
    upcoming: Upcoming | None = None,
    shares: Sequence[Share] | None = None,
    by_tasks: bool | None = None,
) -> Delayed | Together:
    """Build one outer batch, which `run_batch` computes.

    Parameters
    ----------
    source : the samples
    rows : int64 (n_rows,), the batch's rows in reading order
    D : (n_atoms, n_features) current dictionary
    mean : (n_features,) to subtract from every sample, or None
    upcoming : rows of the next batch, which workers may read while they compute this one
    shares : the chunks that tasks take together; None for those of the current scheduler
    by_tasks : whether every step of a worker is a task; None: not on a cluster, unless configured
    """
    n_chunks = len(units.split_rows(rows.size, spec.chunk_size))
    if shares is None:
        # two residuals of all chunks of a worker would not fit on its device
        shares = plan_shares(n_chunks, together=spec.place.device == "cpu")
    refs = _references(source, rows, spec.chunk_size, iteration, upcoming)
    settings = [_setting(spec, g, iteration, D, mean, n_chunks) for g in range(len(spec.groups))]
    if by_tasks is None:
        by_tasks = current_client() is None or exchanges_by_tasks()
    if not by_tasks and can_work_together(shares):
        paths = [SeedPath(spec.seed, iteration, group.start) for group in spec.groups]
        return build_together(settings, paths, spec.lanczos_steps, refs, iteration, shares)
    names = Tasks(iteration, shares)
    builder = _Builder(names, spec, iteration)
    before: list[list[Any]] = [[s.start for s in shares], [refs[s.start : s.stop] for s in shares]]
    stages: list[_Stage] = []
    for g, setting in enumerate(settings):
        stages.append(builder.stage(g, setting, before))
        before = [stages[-1].after]
    encoded, closed = stages[-1].encoded, [stage.closed for stage in stages]
    dictionaries, counts = [s.dictionary for s in stages], [s.counts for s in stages]
    return names.finish(names.call(outcome.gather, "batch", (), dictionaries, counts, encoded, closed, n_chunks))


EXCHANGE = "dbksvd.exchange"  # in Dask's configuration: "direct" or "tasks"


def exchanges_by_tasks() -> bool:
    """Return whether Dask's configuration asks for sums to pass the scheduler; by default workers send them."""
    how = dask.config.get(EXCHANGE, "direct")
    if how not in ("direct", "tasks"):
        raise InputError(f"{EXCHANGE}={how!r} in Dask's configuration; use 'direct' or 'tasks'")
    return bool(how == "tasks")


def _setting(
    spec: BatchSpec, g: int, iteration: int, D: np.ndarray, mean: np.ndarray | None, n_chunks: int
) -> share.Setting:
    """Return what the tasks of one group of atoms have in common."""
    group = spec.groups[g]
    own = np.ascontiguousarray(D[group.start : group.stop])
    return share.Setting(
        D=own,
        rounds=chunk.invert_rounds(plan_rounds(group, spec.seed, iteration), own.shape[0]),
        spec=spec.encode._replace(k=group.k),
        place=spec.place,
        n_chunks=n_chunks,
        dtype=spec.dtype,
        rule=rule_of(spec.dead_atoms),
        mean=mean,
        weights=spec.weights,
        half_weight=spec.half_weight,
        whiten=spec.whiten if g == 0 else None,
    )


def _references(
    source: Source, rows: np.ndarray, chunk_size: int, iteration: int, upcoming: Upcoming | None
) -> list[Any]:
    """Return references to the rows of each chunk."""

    def cut(rows: np.ndarray) -> list[Any]:
        return [source.take(rows[a:b]) for a, b in units.split_rows(rows.size, chunk_size)]

    if upcoming is None or not source.reads_ahead:
        return cut(rows)
    return readahead.with_next(cut(rows), cut(upcoming.rows), readahead.Tag(upcoming.fit, iteration))


def run_batch(graph: Delayed | Together, on_round: Callable[[], None] | None = None) -> BatchResult:
    """Compute a batch on the current scheduler; call `on_round` after each round."""
    began = time.time()
    if isinstance(graph, Together):
        result = follow.compute(graph, on_round)
    else:
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


def safer_again(run: Callable[[bool | None], BatchResult]) -> Callable[[], BatchResult]:
    """Return a function that computes a batch by tasks once its workers have lost each other.

    The graph of tasks survives the loss of workers: only what they held is computed again.

    Parameters
    ----------
    run : builds and computes the batch, given `by_tasks` of `build_batch`
    """
    by_tasks: bool | None = None

    def again() -> BatchResult:
        nonlocal by_tasks
        try:
            return run(by_tasks)
        except PeersLostError:
            by_tasks = True
            raise

    return again


def count_tasks(graph: Delayed | Together) -> int:
    """Return the number of tasks of a batch."""
    return len(keys_of(graph.graph if isinstance(graph, Together) else graph))
