"""The outer loop of a fit: prepare a batch, run its graph, record, write a checkpoint, repeat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.fit.context import Context
from dbksvd_dask.fit.growing import policy_of
from dbksvd_dask.fit.history import HeldOut, batch_finished, extended
from dbksvd_dask.fit.resume import Run, report_checkpoint_on_exit
from dbksvd_dask.fit.start import check_samples, check_scale, extrapolated, first_dictionary, fit_sizes
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.run import dashboard, worker_threads
from dbksvd_dask.graph.sources import Source, StoreSource
from dbksvd_dask.plan import memory
from dbksvd_dask.plan.encoder import training_groups, training_spec
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.store.atomic import require_outside


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
    recipe : name of the recipe that the parameters came from, to store with the dictionary, or None
    """

    def __init__(
        self,
        source: Source,
        params: FitParams,
        init: np.ndarray | None = None,
        validation: Source | None = None,
        callbacks: Sequence[events.Callback] = (),
        memory_limit: int | None = None,
        recipe: str | None = None,
    ) -> None:
        n_held = 0 if validation is not None else params.validation
        self.context = Context(source, params, n_held, callbacks)
        self.source, self.params = source, self.context.params
        self.stream, self.dtype = self.context.stream, self.context.dtype
        self.policy = policy_of(self.context)
        self.memory_limit = memory_limit
        self._fit = uuid.uuid4().hex  # tells fits in one process apart
        self._init = init
        self._recipe = recipe
        if validation is None:
            self.held_out = HeldOut(source, self.stream.validation_rows())
        else:
            self.held_out = HeldOut(validation, np.arange(validation.n_samples, dtype=np.int64))
        check_samples(self.context)
        self.context.place_batches(self.stream.rows_per_batch)

    def memory_plan(self) -> memory.MemoryPlan:
        """Return the peak memory per worker process on the current scheduler; refused when above the limit.

        An array in memory is not counted: it is there already.
        """
        sizes = fit_sizes(self.context, self.held_out.rows.size)
        processes = memory.uneven_workers(list(worker_threads().values()))
        if self.memory_limit is None:
            return memory.plan_fit(sizes, *processes)
        return memory.check_limit(sizes, self.memory_limit, *processes)

    # ------------------------------------------------------------------------------------------ one batch

    def start(self) -> Dictionary:
        """Return the state before the first batch: mean and first atoms."""
        first = first_dictionary(self.context, self.policy, self._init)
        return first if self._recipe is None else replace(first, extra={"recipe": self._recipe})

    def batch_spec(self, state: Dictionary | None = None) -> batch.BatchSpec:
        """Return what a batch needs to know: the same for all of a fit, unless it grows or learns a threshold."""
        p, where = self.params, self.context.place
        n_atoms, threshold, weights = p.n_atoms, 0.0, None
        if state is not None:
            n_atoms, threshold, weights = state.n_atoms, state.training_threshold, self.policy.preferences(state)
        return batch.BatchSpec(
            groups=training_groups(p, n_atoms),
            encode=training_spec(p, threshold, n_atoms),
            lanczos_steps=p.lanczos_steps,
            chunk_size=where.chunk_size,
            dead_atoms=self.policy.dead_atoms,
            seed=p.seed,
            dtype=self.dtype,
            place=where.placement,
            weights=weights,
        )

    def step(self, state: Dictionary, rows: np.ndarray | None = None) -> Dictionary:
        """Run one outer batch and return the state after it.

        Parameters
        ----------
        rows : (n,) int64, rows of the batch; None for the next ones of the stream
        """
        upcoming = None
        if rows is None:
            rows = self.stream.batch(state.iteration)
            upcoming = batch.Upcoming(self._fit, self._rows_of_next(state.iteration))
        if rows.size > self.stream.rows_per_batch:  # given by the caller: may need another plan
            self.context.place_batches(rows.size)
        state = self.policy.before(state, rows)
        result = self._run_batch(state, rows, upcoming)
        check_scale(result.before, self.dtype)
        new, record = self.policy.after(state, result)
        if self.params.sparsity == "mean":
            record["threshold"] = new.threshold
        record |= self.held_out.measure(self.context, new)
        return replace(new, history=extended(state.history, record))

    def _run_batch(
        self, state: Dictionary, rows: np.ndarray, upcoming: batch.Upcoming | None
    ) -> batch.BatchResult:
        """Build and compute the graph of a batch."""
        spec, iteration = self.batch_spec(state), state.iteration
        ahead = extrapolated(state.atoms, state.previous, self.policy.momentum)

        def run() -> batch.BatchResult:
            graph = batch.build_batch(self.source, rows, ahead, state.mean, spec, iteration, upcoming)
            self.context.emit(events.BatchStarted(iteration, batch.count_tasks(graph)))
            return batch.run_batch(graph, self._round_counter(spec, iteration))

        return self.context.attempt(run, iteration)

    def _rows_of_next(self, iteration: int) -> np.ndarray:
        """Rows of the batch after this one; none after the last."""
        last = iteration + 1 >= self.params.n_iter
        return np.empty(0, np.int64) if last else self.stream.batch(iteration + 1)

    def _round_counter(self, spec: batch.BatchSpec, iteration: int) -> Callable[[], None] | None:
        """What to call after each round of a batch; None without subscribers."""
        rounds, n_rounds = count(), sum(group.n_rounds for group in spec.groups)

        def on_round() -> None:
            self.context.emit(events.RoundFinished(iteration, next(rounds), n_rounds))

        return on_round if self.context.callbacks else None

    # ------------------------------------------------------------------------------------------ all batches

    def run(self, state: Dictionary, on_state: Callable[[Dictionary], None] | None = None) -> Dictionary:
        """Run all iterations that are left; `on_state` is called with the state after each."""
        p, began, first = self.params, time.monotonic(), state.iteration
        shape, rows, planned = self.source.shape, self.stream.rows_per_batch, self.memory_plan().total
        link = dashboard()
        self.context.emit(events.FitStarted(*shape, p.n_atoms, p.k, p.n_iter, first, rows, planned, link))
        while state.iteration < p.n_iter:
            before = time.monotonic()
            state = self.step(state)
            now = time.monotonic()
            self.context.emit(batch_finished(self.context, state, now - before, now - began, first))
            if on_state is not None:
                on_state(state)
        self.context.emit(events.FitFinished(state.iteration, time.monotonic() - began))
        return state

    def fit(
        self, checkpoint: str | None = None, every: int = 1, resume: bool = False, replace: bool = False
    ) -> Dictionary:
        """Run the whole fit, with checkpoints if a folder is given.

        Parameters
        ----------
        checkpoint : folder of the fit, which no other process may use meanwhile, or None
        every : iterations between two checkpoints
        resume : continue from the newest checkpoint
        replace : delete the fit that is in the folder
        """
        self.memory_plan()  # refuses before anything is read
        if checkpoint is None:
            if resume:
                raise InputError("resume=True needs the folder of a fit; give checkpoint=PATH")
            return self.run(self.start())
        for source in (self.source, self.held_out.source):
            if isinstance(source, StoreSource):
                require_outside(checkpoint, source.reader.path)
        run = Run(checkpoint, self.context, every)
        done = run.finished() if resume else None
        if done is not None:
            return self.run(done)
        with run.held(overwrite=replace) as lock:
            state = run.resumed(resume)
            with report_checkpoint_on_exit(checkpoint, self.context.emit):
                return self.run(state or self.start(), lambda current: run.save(current, lock))
