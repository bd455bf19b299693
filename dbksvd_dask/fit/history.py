"""One row of the history of a fit."""

from __future__ import annotations

from dbksvd_dask.evaluate.metrics import mean_relative_error, variance_explained
from dbksvd_dask.graph import batch


def record_of(result: batch.BatchResult, n_rows: int) -> dict[str, float]:
    """Return the figures of one batch."""
    return {
        "relative_error_before": mean_relative_error(result.before),
        "relative_error": mean_relative_error(result.after),
        "variance_explained_before": variance_explained(result.before).value,
        "variance_explained": variance_explained(result.after).value,
        "dead_atoms": float(result.n_dead),
        "nonzeros": float(result.counts.sum()) / n_rows,
        "encode_seconds": result.encode_seconds,
        "update_seconds": result.update_seconds,
    }
