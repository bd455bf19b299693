"""What a batch ends with: the merged dictionary of each group, and everything that the driver needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.graph import share
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.dead_atoms import SeedPath
from dbksvd_dask.kernels.moments import Moments


class Outcome(NamedTuple):
    """What the driver receives of a batch."""

    dictionary: np.ndarray  # (n_atoms, n_features)
    counts: np.ndarray  # (n_atoms,) samples per atom
    before: Moments
    after: Moments
    encoded: float  # time.time() when the last encoding ended
    coefficient_sums: np.ndarray | None  # (n_atoms,) float64; None where none is negative


def counts_of(encoded: list[share.Encoded]) -> np.ndarray:
    """Return the samples of the batch per atom: (n_atoms,)."""
    return chunk.add_counts([part.counts for part in encoded])


def merge(
    setting: share.Setting, new: list[Any], counts: np.ndarray, closed: list[share.Closed], path: SeedPath
) -> np.ndarray:
    """Return the updated atoms of a group, with dead ones replaced.

    Parameters
    ----------
    new : per round, its new atoms
    """
    candidates = [c for part in closed for c in part.candidates]
    arguments = (list(setting.rounds.atoms), new, counts, candidates, setting.rule, path)
    merged: np.ndarray = functions(setting.place).merge_dictionary(setting.D, *arguments)
    return merged


def gather(
    dictionaries: list[np.ndarray],
    counts: list[np.ndarray],
    encoded: list[share.Encoded],
    closed: list[list[share.Closed]],
    n_chunks: int,
) -> Outcome:
    """Return the outcome of a batch from those of its groups.

    Parameters
    ----------
    dictionaries, counts : per group
    encoded : of the last group
    closed : per group
    """
    statistics = share.join_encoded(encoded, n_chunks)
    ends = [share.join_closed(parts, n_chunks) for parts in closed]
    (before,), (after,) = statistics.moments, ends[-1].after
    sums = [end.coefficients[0].value for end in ends if end.coefficients]
    return Outcome(
        np.concatenate(dictionaries),
        np.concatenate(counts),
        before.value,
        before.value.with_residual(after.value),
        statistics.finished,
        np.concatenate(sums) if sums else None,
    )
