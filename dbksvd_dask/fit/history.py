"""What a fit records and reports: figures of each batch, figures on held-out samples, progress events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary, History
from dbksvd_dask.evaluate.metrics import mean_relative_error, variance_explained
from dbksvd_dask.fit.context import Context
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.encode import build_evaluation
from dbksvd_dask.graph.run import count_workers, dashboard
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.plan import units


def record_of(result: batch.BatchResult) -> dict[str, float]:
    """Return the figures of one batch."""
    return {
        "relative_error_before": mean_relative_error(result.before),
        "relative_error": mean_relative_error(result.after),
        "variance_explained_before": variance_explained(result.before).value,
        "variance_explained": variance_explained(result.after).value,
        "dead_atoms": float(result.n_dead),
        "nonzeros": float(result.counts.sum()) / result.before.n_samples,
        "encode_seconds": result.encode_seconds,
        "update_seconds": result.update_seconds,
    }


def recorded(
    context: Context, held_out: HeldOut, before: History, state: Dictionary, record: dict[str, float]
) -> Dictionary:
    """Return the state after a batch with its history: one row more than before.

    Parameters
    ----------
    record : the batch's figures, to which those on held-out samples are added
    """
    if context.params.sparsity == "mean":
        record = record | {"threshold": state.threshold}
    record = record | held_out.measure(context, state)
    return replace(state, history={name: [*before.get(name, []), value] for name, value in record.items()})


@dataclass(frozen=True)
class HeldOut:
    """Samples that are not trained on, with which each state of a fit is measured.

    Attributes
    ----------
    source : the source that holds them
    rows : (n,) int64, their rows; if empty, nothing is measured
    """

    source: Source
    rows: np.ndarray

    @classmethod
    def of(cls, context: Context, validation: Source | None) -> HeldOut:
        """Return the given samples or, without any, the rows that the stream of a fit sets aside."""
        if validation is None:
            return cls(context.source, context.stream.validation_rows())
        return cls(validation, np.arange(validation.n_samples, dtype=np.int64))

    def measure(self, context: Context, state: Dictionary) -> dict[str, float]:
        """Return the figures of a state on these samples, encoded as `transform` would."""
        if self.rows.size == 0:
            return {}
        how, size = context.encode_plan(state), units.part_rows(self.rows.size, self.rows.size)
        if how.place.device == "gpu":
            size = min(size, context.place.chunk_size)
        arguments = (self.source, self.rows, state.atoms, how, size, state.iteration - 1)
        moments, _ = context.compute(lambda: build_evaluation(*arguments))
        return {
            "validation_relative_error": mean_relative_error(moments),
            "validation_variance_explained": variance_explained(moments).value,
        }


# ---------------------------------------------------------------------------------------------- events


def fit_started(context: Context, first: int, planned_bytes: int) -> events.FitStarted:
    """Return the event of a fit that starts or resumes at iteration `first`."""
    p, shape, rows = context.params, context.source.shape, context.stream.rows_per_batch
    watch, workers = dashboard(), count_workers()
    return events.FitStarted(*shape, p.n_atoms, p.k, p.n_iter, first, rows, planned_bytes, watch, workers)


def round_counter(context: Context, spec: batch.BatchSpec, iteration: int) -> Callable[[], None] | None:
    """Return a function to call after each round of a batch; None without callbacks."""
    rounds, n_rounds = count(), sum(group.n_rounds for group in spec.groups)

    def on_round() -> None:
        context.emit(events.RoundFinished(iteration, next(rounds), n_rounds))

    return on_round if context.callbacks else None


def batch_finished(
    context: Context, state: Dictionary, seconds: float, elapsed: float, warm: int
) -> events.BatchFinished:
    """Return the event of a finished batch.

    Parameters
    ----------
    state : after the batch
    seconds, elapsed : duration of the batch, and of all batches since iteration `warm`
        The time left is unknown until there is one.
    """
    stream, source = context.stream, context.source
    rows, done = stream.batch_rows(state.iteration - 1), stream.rows_before(state.iteration)
    paced, left = done - stream.rows_before(warm), stream.rows_before(context.params.n_iter) - done
    return events.BatchFinished(
        iteration=state.iteration - 1,
        n_iter=context.params.n_iter,
        n_samples=rows,
        seconds=seconds,
        samples_per_second=rows / seconds if seconds > 0 else float("inf"),
        seconds_left=elapsed / paced * left if paced else float("nan") if left else 0.0,
        bytes_read=rows * source.n_features * source.dtype.itemsize,
        record={name: values[-1] for name, values in state.history.items()},
    )
