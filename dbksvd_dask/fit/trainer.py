"""The outer loop of a fit: plan a batch, run its graph, record, checkpoint, go on."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.evaluate.metrics import mean_relative_error, variance_explained
from dbksvd_dask.fit import growing
from dbksvd_dask.fit.growing import by_frequency, without_dead
from dbksvd_dask.fit.history import record_of
from dbksvd_dask.fit.resume import newest_iteration, newest_readable, require_same_fit, telling_what_is_safe, tidy
from dbksvd_dask.fit.start import check_finite, extrapolated, unit_rows, working_dtype
from dbksvd_dask.graph import batch, load
from dbksvd_dask.graph.backend import place
from dbksvd_dask.graph.draw import Draw, grow
from dbksvd_dask.graph.encode import EncodePlan, build_evaluation, plan_encoding
from dbksvd_dask.graph.run import attempt, compute, dashboard, worker_threads
from dbksvd_dask.graph.sources import ArraySource, LazySource, Source, StoreSource
from dbksvd_dask.kernels.moments import Moments
from dbksvd_dask.kernels.scale import rows_near_one, smallest_norm
from dbksvd_dask.plan import growth, memory, seeds, stream, units
from dbksvd_dask.plan.device import DevicePlan, Sizes
from dbksvd_dask.plan.encoder import AtomWeights, training_groups, training_spec
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.store.atomic import require_outside
from dbksvd_dask.store.lock import Lock, hold
from dbksvd_dask.store.runs import latest_checkpoint, remove_checkpoints, write_checkpoint

logger = logging.getLogger(__name__)

# The mean is taken over this many rows of the stream: exact for data up to that size, and one short pass, not
# one over terabytes, beyond. Its error is then below 0.2 % of a standard deviation per feature.
MEAN_ROWS = 262_144
# Nonzeros of a growing dictionary are counted on so many rows, and the threshold with which it encodes is brought
# to k of them in so many steps.
COUNTED_ROWS, THRESHOLD_STEPS = 2048, 4

T = TypeVar("T")


class Trainer:
    """A fit of one source with one set of parameters.

    Parameters
    ----------
    source : the samples
    params : checked parameters
    init : (n_atoms, n_features) array to start from, when ``params.init == "array"``
    validation : samples to measure on instead of rows set aside, or None
    callbacks : subscribers to progress events
    memory_limit : most bytes per worker process; a fit that is planned to take more is refused before it starts
    """

    def __init__(
        self,
        source: Source,
        params: FitParams,
        init: np.ndarray | None = None,
        validation: Source | None = None,
        callbacks: Sequence[events.Callback] = (),
        memory_limit: int | None = None,
    ) -> None:
        self.source, self.params, self.callbacks = source, params, tuple(callbacks)
        self.memory_limit = memory_limit
        self._fit = uuid.uuid4().hex  # tells fits in one process apart
        self.dtype = working_dtype(source.dtype)
        self._init = init
        held = 0 if validation is not None else params.validation
        self.stream = stream.plan_stream(source.n_samples, params.batch_size, held, params.seed, params.first_rows)
        if 0 < self.stream.n_validation < held:
            logger.info("validation cut from %d to %d rows, a tenth of the data", held, self.stream.n_validation)
        self.validation: Source | None = validation if validation is not None else source
        self._validation_rows = (
            np.arange(validation.n_samples, dtype=np.int64)
            if validation is not None
            else self.stream.validation_rows()
        )
        self._check()
        self._place = self._placed(self.stream.rows_per_batch)

    def _placed(self, n_rows: int) -> DevicePlan:
        """Where the batches run, and in which chunks; raises when a device was asked for that is not there."""
        p = self.params
        n_features = self.source.n_features
        sizes = Sizes(n_rows, p.chunk_size, n_features, p.n_atoms, p.slots, p.n_rounds, p.lanczos_steps)
        return place(p.device, sizes._replace(itemsize=self.dtype.itemsize), p.encoder)

    @property
    def _first_n_atoms(self) -> int:
        """Atoms of the first dictionary."""
        sizes = self.params.growth_sizes
        return self.params.n_atoms if sizes is None else sizes[0]

    def _check(self) -> None:
        """Refuse data that cannot train this dictionary, before any work."""
        needed = 1 if self.params.init != "data" else self._first_n_atoms
        if self.stream.n_train < needed:
            raise InputError(
                f"init='data' needs n_atoms={needed} training rows but there are {self.stream.n_train}; "
                "use init='uniform' or more samples"
            )
        if isinstance(self.source, ArraySource):
            check_finite(self.source, self.params.chunk_size, self.dtype)

    # ------------------------------------------------------------------------------------------ start

    def start(self) -> Dictionary:
        """Mean and first dictionary."""
        mean = self._mean() if self.params.center else None
        return Dictionary(self._first_atoms(mean), mean, self.params.to_json(), self.source.identity)

    def _mean(self) -> np.ndarray:
        if self.params.growth is not None:  # learned on the way
            return np.zeros(self.source.n_features)
        rows = np.sort(self.stream.rows(0, min(self.stream.n_train, MEAN_ROWS)))
        total = self._compute(lambda: load.build_sum(self.source, rows, self.params.chunk_size, self.dtype))
        return np.asarray(total / rows.size)

    def _first_atoms(self, mean: np.ndarray | None) -> np.ndarray:
        n_atoms = self._first_n_atoms
        shape = (n_atoms, self.source.n_features)
        if self._init is not None:
            return unit_rows(self._init, shape, self.dtype)
        fallback = seeds.random_atoms(*shape, self.dtype, self.params.seed)
        if self.params.init == "uniform":
            return fallback
        reach = max(n_atoms, self.stream.rows_per_batch)
        rows = np.sort(self.stream.rows(0, reach)[stream.initial_rows(reach, n_atoms)])
        atoms = self._compute(lambda: load.build_rows(self.source, rows, mean, self.dtype))
        atoms = rows_near_one(atoms)
        norms = np.linalg.norm(atoms, axis=1, keepdims=True)
        return np.where(norms > 0, atoms / np.where(norms > 0, norms, 1), fallback).astype(self.dtype)

    # ------------------------------------------------------------------------------------------ loop

    def batch_spec(self, state: Dictionary | None = None) -> batch.BatchSpec:
        """What a batch needs to know: the same for all of a fit, unless it grows or learns a threshold."""
        p = self.params
        n_atoms, threshold = p.n_atoms, 0.0
        if state is not None:
            n_atoms, threshold = state.atoms.shape[0], state.training_threshold
        groups, encode = training_groups(p, n_atoms), training_spec(p, threshold, n_atoms)
        where, size, _ = self._place
        steps, weights = p.lanczos_steps, None if state is None else self._training_weights(state)
        dead = "keep" if self._draws_dead else p.dead_atoms
        return batch.BatchSpec(groups, encode, steps, size, dead, p.seed, self.dtype, where, weights)

    def _training_weights(self, state: Dictionary) -> AtomWeights | None:
        """Preferences with which a growing dictionary encodes its next batch, if any."""
        p = self.params
        if p.growth is None or state.counts is None or not growing.prefers_frequent(state.history, p.k):
            return None
        return growing.frequent_first(state.counts, self.stream.batch_rows(state.iteration - 1))

    def step(self, state: Dictionary, rows: np.ndarray | None = None) -> Dictionary:
        """Run one outer batch: a new state."""
        in_order = rows is None
        if rows is None:
            rows = self.stream.batch(state.iteration)
        if rows.size > self.stream.rows_per_batch:  # given by the caller: may need another plan
            self._place = self._placed(rows.size)
        now = self._growth_now(state.iteration)
        state = self._grown(state, rows, now)
        spec = self.batch_spec(state)
        # while it grows a dictionary settles within a few batches; moved on, it found fewer true features
        momentum = self.params.momentum if now is None else 0.0
        ahead = extrapolated(state.atoms, state.previous, momentum)

        upcoming = batch.Upcoming(self._fit, self._rows_of_next(state.iteration)) if in_order else None

        def run() -> batch.BatchResult:
            graph = batch.build_batch(self.source, rows, ahead, state.mean, spec, state.iteration, upcoming)
            self._emit(events.BatchStarted(state.iteration, batch.count_tasks(graph)))
            return batch.run_batch(graph, self._round_counter(spec, state.iteration))

        result = self._attempt(run, state.iteration)
        _check_scale(result.before, self.dtype)
        return self._after(state, result, now)

    def _after(self, state: Dictionary, result: batch.BatchResult, now: growth.GrowthStep | None) -> Dictionary:
        """State after a batch: what it gave, what it taught about mean and threshold, and its record."""
        learned = growing.training_threshold(self.params, state.training_threshold, result)
        mean = state.mean if now is None else growing.moved_mean(state.mean, result)
        # an atom that was replaced has no direction of travel yet
        previous = np.where((result.counts == 0)[:, None], result.dictionary, state.atoms)
        new = Dictionary(
            result.dictionary,
            mean,
            self.params.to_json(),
            self.source.identity,
            state.iteration + 1,
            counts=result.counts,
            previous=previous,
            extra=state.extra,
        ).with_thresholds(learned, learned)
        record = record_of(result, result.before.n_samples)
        if now is not None:
            new = by_frequency(new)
            if self.params.frequency_prior:
                assert new.counts is not None
                new.weights = growing.prior_weights(new.counts, result.before.n_samples)
            new = new.with_thresholds(self._encode_threshold(new, state.threshold or learned), learned)
            plain = self._count_nonzeros(new, self._training_plan(new)._replace(weights=None))
            record |= {"n_atoms": float(now.n_atoms), "stage": float(now.stage), "growth_threshold": learned}
            record[growing.PLAIN_NONZEROS] = plain
        if self.params.sparsity == "mean":
            record["threshold"] = new.threshold
        record.update(self._validate(new))
        new.history = {name: [*state.history.get(name, []), value] for name, value in record.items()}
        return new

    def _encode_threshold(self, state: Dictionary, threshold: float) -> float:
        """Smallest coefficient with which a growing dictionary encodes.

        With k as the maximum that of its training; with k as the mean, one that gives some rows k nonzeros.
        """
        if self.params.sparsity == "max":
            return state.training_threshold
        seen: list[tuple[float, float]] = []
        for _ in range(THRESHOLD_STEPS):
            how = self._encode_plan(state.with_thresholds(threshold, state.training_threshold))
            seen.append((threshold, self._count_nonzeros(state, how)))
            fall = growth.threshold_fall(*seen[-2:]) if len(seen) > 1 else growth.FALL
            threshold = growth.next_threshold(*seen[-1], self.params.k, fall)
        return threshold

    def _count_nonzeros(self, state: Dictionary, how: EncodePlan) -> float:
        """Mean number of nonzeros of some rows of the next batch: those just fitted to need fewer than others."""
        part = self.stream.batch(state.iteration)[: min(self._place.chunk_size, COUNTED_ROWS)]
        arguments = (self.source, part, state.atoms, how, part.size, state.iteration - 1)
        _, n_nonzeros = self._compute(partial(build_evaluation, *arguments))
        return float(n_nonzeros) / part.size

    def _growth_now(self, iteration: int) -> growth.GrowthStep | None:
        """What growth does in this iteration; None when the dictionary does not grow."""
        sizes = self.params.growth_sizes
        return None if sizes is None else growth.growth_step(sizes, iteration)

    def _grown(self, state: Dictionary, rows: np.ndarray, now: growth.GrowthStep | None) -> Dictionary:
        """State with the atoms that this iteration should have; new ones have no direction of travel yet."""
        if now is None:
            return state
        if self._draws_dead:
            state = without_dead(state)
        n_atoms = state.atoms.shape[0]
        if now.n_atoms == n_atoms:
            return state
        n_new = now.n_atoms - n_atoms
        # a quarter of the batch would do as well as all of it; at least some rows to choose from for each atom
        rows = rows[: max(self.params.chunk_size, 16 * n_new)]
        draw = Draw(n_new, self.params.seed, state.iteration)
        how, old, size = self._training_plan(state), state.atoms, self._place.chunk_size
        D = self._attempt(lambda: grow(self.source, rows, old, how, size, draw), state.iteration)
        previous = None if state.previous is None else np.concatenate([state.previous, D[n_atoms:]])
        counts = None if state.counts is None else np.append(state.counts, np.zeros(n_new, state.counts.dtype))
        return replace(state, atoms=D, previous=previous, counts=counts)

    @property
    def _draws_dead(self) -> bool:
        """Whether dead atoms are drawn anew like those that a growing dictionary adds."""
        return self.params.growth is not None and self.params.dead_atoms == "residual"

    def _encode_plan(self, state: Dictionary) -> EncodePlan:
        """How the dictionary as it stands encodes samples."""
        return plan_encoding(state, self._place.placement)

    def _training_plan(self, state: Dictionary) -> EncodePlan:
        """How the next batch encodes samples."""
        spec = training_spec(self.params, state.training_threshold, state.atoms.shape[0])
        return self._encode_plan(state)._replace(spec=spec, weights=self._training_weights(state))

    def _rows_of_next(self, iteration: int) -> np.ndarray:
        """Rows of the batch after this one; none after the last."""
        last = iteration + 1 >= self.params.n_iter
        return np.empty(0, np.int64) if last else self.stream.batch(iteration + 1)

    def _round_counter(self, spec: batch.BatchSpec, iteration: int) -> Callable[[], None] | None:
        """What to call after each round of a batch; None when nobody listens."""
        rounds, n_rounds = count(), sum(group.n_rounds for group in spec.groups)

        def on_round() -> None:
            self._emit(events.RoundFinished(iteration, next(rounds), n_rounds))

        return on_round if self.callbacks else None

    def _attempt(self, run: Callable[[], T], iteration: int) -> T:
        """Run something that may fail for a reason that passes, such as a lost worker."""

        def on_retry(number: int, attempts: int, reason: str) -> None:
            self._emit(events.Retrying(iteration, number, attempts, reason))

        return attempt(run, on_retry)

    def _compute(self, build: Callable[[], Delayed], iteration: int = 0) -> Any:
        return self._attempt(lambda: compute(build()), iteration)

    def _validate(self, state: Dictionary) -> dict[str, float]:
        """Metrics on the held-out rows: one pursuit over the whole dictionary, or staged if that was asked for."""
        if self.validation is None or self._validation_rows.size == 0:
            return {}
        how, D = self._encode_plan(state), state.atoms
        size = units.part_rows(self._validation_rows.size, self._validation_rows.size)
        if how.place.device == "gpu":
            size = min(size, self._place.chunk_size)
        source, rows = self.validation, self._validation_rows
        moments, _ = self._compute(lambda: build_evaluation(source, rows, D, how, size, state.iteration - 1))
        return {
            "validation_relative_error": mean_relative_error(moments),
            "validation_variance_explained": variance_explained(moments).value,
        }

    def memory_plan(self) -> memory.MemoryPlan:
        """Peak memory per worker process on the current scheduler; refused when above the limit.

        An array in memory is not counted: it is there already.
        """
        p = self.params
        # the blocks of a Dask array are there as a whole before rows are taken from them
        read = self.source.dtype.itemsize * (2 if isinstance(self.source, LazySource) else 1)
        sizes = memory.FitSizes(
            n_features=self.source.n_features,
            n_atoms=p.n_atoms,
            k=p.training_slots,
            batch_size=self.stream.rows_per_batch,
            chunk_size=p.chunk_size,
            n_rounds=p.n_rounds,
            lanczos_steps=p.lanczos_steps,
            groups=p.groups or (),
            validation=self._validation_rows.size,
            itemsize=self.dtype.itemsize,
            read_itemsize=read,
            reads_ahead=isinstance(self.source, StoreSource),
        )
        where = memory.uneven_workers(list(worker_threads().values()))
        if self.memory_limit is None:
            return memory.plan_fit(sizes, *where)
        return memory.check_limit(sizes, self.memory_limit, *where)

    def run(self, state: Dictionary, on_state: Callable[[Dictionary], None] | None = None) -> Dictionary:
        """Run all iterations that are left; `on_state` sees the state after each."""
        p, began, first = self.params, time.monotonic(), state.iteration
        shape, rows, planned = self.source.shape, self.stream.rows_per_batch, self.memory_plan().total
        link = dashboard()
        self._emit(events.FitStarted(*shape, p.n_atoms, p.k, p.n_iter, first, rows, planned, link))
        while state.iteration < p.n_iter:
            before = time.monotonic()
            state = self.step(state)
            now = time.monotonic()
            self._emit(self._finished(state, now - before, now - began, first))
            if on_state is not None:
                on_state(state)
        self._emit(events.FitFinished(state.iteration, time.monotonic() - began))
        return state

    def _finished(self, state: Dictionary, seconds: float, elapsed: float, first: int) -> events.BatchFinished:
        rows, behind = self.stream.batch_rows(state.iteration - 1), self.stream.rows_before(state.iteration)
        per_row = elapsed / (behind - self.stream.rows_before(first))
        return events.BatchFinished(
            iteration=state.iteration - 1,
            n_iter=self.params.n_iter,
            n_samples=rows,
            seconds=seconds,
            samples_per_second=rows / seconds if seconds > 0 else float("inf"),
            seconds_left=per_row * (self.stream.rows_before(self.params.n_iter) - behind),
            bytes_read=rows * self.source.n_features * self.source.dtype.itemsize,
            record={name: values[-1] for name, values in state.history.items()},
        )

    def _emit(self, event: events.Event) -> None:
        events.emit(self.callbacks, event)

    # ------------------------------------------------------------------------------------------ checkpoints

    def resume(self, run: str) -> Dictionary:
        """State of the newest checkpoint of a run; refused when it is of another fit."""
        stored = newest_readable(run)
        require_same_fit(run, stored, self.params.to_json(), self.source.identity)
        return replace(stored, params=self.params.to_json())  # of which some may change: see `resume.MAY_CHANGE`

    def fit(
        self, checkpoint: str | None = None, every: int = 1, resume: bool = False, replace: bool = False
    ) -> Dictionary:
        """Run the whole fit, with checkpoints if a folder is given.

        Parameters
        ----------
        checkpoint : folder of the fit, which no other process may use meanwhile, or None
        every : iterations between two checkpoints
        resume : go on from the newest checkpoint
        replace : throw away the fit that is in the folder
        """
        self.memory_plan()  # refuses before anything is read
        if checkpoint is None:
            if resume:
                raise InputError("resume=True needs the folder of a fit; give checkpoint=PATH")
            return self.run(self.start())
        for source in (self.source, self.validation):
            if isinstance(source, StoreSource):
                require_outside(checkpoint, source.reader.path)
        if resume and newest_iteration(checkpoint) >= self.params.n_iter:
            state = self.resume(checkpoint)
            if state.iteration >= self.params.n_iter:  # nothing to write: such a folder may be read-only
                tidy(checkpoint)
                return self.run(state)
        with ExitStack() as stack:
            with telling_what_is_safe(checkpoint, self._emit):
                lock = stack.enter_context(hold(checkpoint, "a fit", inside=True))
            if replace:
                remove_checkpoints(checkpoint)
            return self._fit_into(checkpoint, every, resume, lock)

    def _fit_into(self, checkpoint: str, every: int, resume: bool, lock: Lock) -> Dictionary:
        """Run the fit in a folder that this process holds."""
        found = latest_checkpoint(checkpoint)
        if found is not None and not resume:
            raise StoreError(
                f"{checkpoint} holds a fit already ({found}); go on with resume=True (--resume), choose "
                "another folder, or throw that fit away (--force)"
            )

        def save(current: Dictionary) -> None:
            if current.iteration % every == 0 or current.iteration == self.params.n_iter:
                lock.require_held()
                path = write_checkpoint(checkpoint, current)
                self._emit(events.CheckpointWritten(path, current.iteration))

        resumed = None if found is None else self.resume(checkpoint)
        with telling_what_is_safe(checkpoint, self._emit):
            return self.run(self.start() if resumed is None else resumed, save)


def _check_scale(batch: Moments, dtype: np.dtype) -> None:
    """Refuse samples so small that their entries have lost digits; all zeros are no smaller than others."""
    size = math.sqrt(float(batch.y_square_sum.sum()) / max(batch.n_samples, 1))
    if 0 < size < smallest_norm(dtype):
        raise InputError(
            f"the samples have norms of about {size:.2g}, too small for {dtype}, which needs "
            f"{smallest_norm(dtype):.2g} or more; multiply them by a constant, which changes no atom"
        )
