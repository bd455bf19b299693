"""The outer loop of a fit: prepare a batch, run its graph, record, write a checkpoint, repeat.

This is the outer loop of Valentin, Katz, Vanhoucke, Kochenderfer: DB-KSVD (arXiv:2505.18441). The graph of one
batch, with its rounds of atoms, is in `graph.batch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.context import Context
from dbksvd_dask.fit.growing import policy_of
from dbksvd_dask.fit.history import HeldOut, batch_finished, fit_started, recorded, round_counter
from dbksvd_dask.fit.policy import extrapolated
from dbksvd_dask.fit.resume import Run, open_run
from dbksvd_dask.fit.start import (
    check_init,
    check_samples,
    check_scale,
    find_whitening,
    first_dictionary,
    plan_memory,
)
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.run import worker_threads
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.threads import each
from dbksvd_dask.kernels.whiten import Whitening
from dbksvd_dask.plan.memory import MemoryPlan
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.plan.stopping import is_over


class Trainer:
    """A fit of one source with one set of parameters.

    Parameters
    ----------
    source : the samples
    params : checked parameters
    init : (n_atoms, n_features) array to start from, when ``params.init == "array"``
    validation : samples to measure on instead of rows set aside, or None
    callbacks : called with each progress event
    memory_limit : bytes per worker process; a fit planned to take more is refused before it starts
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
        self.held_out = HeldOut.of(self.context, validation)
        self._init, self._memory_limit, self._recipe = init, memory_limit, recipe
        self._white: Whitening | None = None
        check_samples(self.context)
        self.context.place_batches(self.stream.rows_per_batch)

    def check(self, checkpoint: str | None, resume: bool, replace: bool) -> None:
        """Refuse what `fit` would refuse, without reading a sample; parameters as of `fit`.

        Memory is left out: it depends on the scheduler.
        """
        self._require_outside(checkpoint)
        state = None if checkpoint is None or replace else Run(checkpoint, self.context, 1).resumed(resume)
        if state is None:
            check_init(self.context, self.policy, self._init)

    def _require_outside(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            for source in (self.source, self.held_out.source):
                source.require_outside(checkpoint)

    def memory_plan(self) -> MemoryPlan:
        """Return the peak memory per worker process on the current scheduler; refuse a plan above the limit."""
        return plan_memory(self.context, self.held_out.rows.size, self._memory_limit)

    def start(self) -> Dictionary:
        """Return the state before the first batch: mean and first atoms."""
        first = first_dictionary(self.context, self.policy, self._init)
        return first if self._recipe is None else replace(first, extra={"recipe": self._recipe})

    def step(self, state: Dictionary, rows: np.ndarray | None = None) -> Dictionary:
        """Run one outer batch and return the state after it.

        Parameters
        ----------
        rows : (n,) int64, rows of the batch; None for the next ones of the stream
        """
        upcoming = None
        if rows is None:
            rows, upcoming = self.stream.batch(state.iteration), self.context.upcoming(state.iteration)
        if rows.size > self.stream.rows_per_batch:  # given by the caller: may need another plan
            self.context.place_batches(rows.size)
        state = self.policy.before(state, rows)
        result = self._run_batch(state, rows, upcoming)
        check_scale(result.before, self.dtype)
        new, record = self.policy.after(state, result)
        return recorded(self.context, self.held_out, state.history, new, record)

    def _run_batch(
        self, state: Dictionary, rows: np.ndarray, upcoming: batch.Upcoming | None
    ) -> batch.BatchResult:
        """Build and compute the graph of a batch."""
        spec, iteration, white = self.policy.batch_spec(state), state.iteration, self._maps(state)
        ahead = extrapolated(state.atoms, state.previous, self.policy.momentum)
        # the threads that will run the batch have nothing else to do; beside a cluster there is one
        each_atom = partial(each, threads=worker_threads().get("", 1))
        ahead = ahead if white is None else white.into(ahead, each_atom)

        def run(by_tasks: bool | None = None) -> batch.BatchResult:
            graph = batch.build_batch(
                self.source, rows, ahead, state.mean, spec, iteration, upcoming, by_tasks=by_tasks
            )
            self.context.emit(events.BatchStarted(iteration, batch.count_tasks(graph)))
            return batch.run_batch(graph, round_counter(self.context, spec, iteration))

        result = self.context.attempt(batch.safer_again(run), iteration)
        return result if white is None else result._replace(dictionary=white.back(result.dictionary, each_atom))

    def _maps(self, state: Dictionary) -> Whitening | None:
        """Return the coordinates of the updates, or None for those of the samples."""
        if state.whitening is None:
            return None
        if self._white is None or self._white.forward is not state.whitening:
            self._white = Whitening.of(state.whitening)
        return self._white

    def _with_whitening(self, state: Dictionary) -> Dictionary:
        """Return the state with the map that `whiten` asks for; that of a checkpoint stays."""
        if state.whitening is not None:
            return state
        return replace(state, whitening=find_whitening(self.context, state.mean))

    def run(self, state: Dictionary, on_state: Callable[[Dictionary], None] | None = None) -> Dictionary:
        """Run the remaining iterations; call `on_state` with the state after each."""
        began, first = time.monotonic(), state.iteration
        self.context.emit(fit_started(self.context, first, self.memory_plan().total))
        state = self._with_whitening(state)
        warm = began  # the end of the first batch, which compiles kernels and says little about the others
        while not is_over(self.params, state.iteration, state.history):
            before = time.monotonic()
            state = self.step(state)
            now = time.monotonic()
            if state.iteration == first + 1:
                warm = now
            self.context.emit(batch_finished(self.context, state, now - before, now - warm, first + 1))
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
        checkpoint : folder of the fit, or None; no other process may use it meanwhile
        every : iterations between two checkpoints
        resume : continue from the newest checkpoint
        replace : delete the fit in the folder
        """
        self.memory_plan()  # refuses before anything is read
        self._require_outside(checkpoint)
        with open_run(checkpoint, self.context, every, resume, replace) as (state, save):
            return self.run(state or self.start(), save)
