"""Where a fit stands, and one row of its history."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dbksvd_dask.evaluate.metrics import mean_relative_error, variance_explained
from dbksvd_dask.graph import batch

History = dict[str, list[float]]


@dataclass
class FitState:
    """Where a fit stands; all that a checkpoint holds."""

    dictionary: np.ndarray  # (n_atoms, n_features)
    mean: np.ndarray | None  # (n_features,) float64, or None when not centred
    iteration: int = 0
    history: History = field(default_factory=dict)
    counts: np.ndarray | None = None  # (n_atoms,) samples per atom in the last batch
    previous: np.ndarray | None = None  # (n_atoms, n_features) one iteration ago, for the momentum
    threshold: float = 0.0  # smallest coefficient when encoding, where the fit learns one
    training_threshold: float = 0.0  # the same in training; another one only where a dictionary grows
    weights: np.ndarray | None = None  # (n_atoms,) by which the thresholds of atoms differ when encoding


def record_of(result: batch.BatchResult, n_rows: int) -> dict[str, float]:
    """One row of the history."""
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
