"""What a fit records of itself: the figures of each batch, and those on samples that are held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary, History
from dbksvd_dask.evaluate.metrics import mean_relative_error, variance_explained
from dbksvd_dask.fit.context import Context
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.encode import build_evaluation
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


def extended(history: History, record: dict[str, float]) -> History:
    """Return a history with one more row."""
    return {name: [*history.get(name, []), value] for name, value in record.items()}


@dataclass(frozen=True)
class HeldOut:
    """Samples that never train, on which each state of a fit is measured.

    Attributes
    ----------
    source : where they are
    rows : (n,) int64, which ones; none: nothing is measured
    """

    source: Source
    rows: np.ndarray

    def measure(self, context: Context, state: Dictionary) -> dict[str, float]:
        """Return their figures: one pursuit over the whole dictionary, or staged if that was asked for."""
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


def batch_finished(
    context: Context, state: Dictionary, seconds: float, elapsed: float, first: int
) -> events.BatchFinished:
    """Return the event of a batch that is done.

    Parameters
    ----------
    state : after the batch
    seconds, elapsed : time that the batch took, and all batches since iteration `first`
    """
    stream, source = context.stream, context.source
    rows, behind = stream.batch_rows(state.iteration - 1), stream.rows_before(state.iteration)
    per_row = elapsed / (behind - stream.rows_before(first))
    return events.BatchFinished(
        iteration=state.iteration - 1,
        n_iter=context.params.n_iter,
        n_samples=rows,
        seconds=seconds,
        samples_per_second=rows / seconds if seconds > 0 else float("inf"),
        seconds_left=per_row * (stream.rows_before(context.params.n_iter) - behind),
        bytes_read=rows * source.n_features * source.dtype.itemsize,
        record={name: values[-1] for name, values in state.history.items()},
    )
