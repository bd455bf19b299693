"""What one chunk of samples is between two tasks: state, sums, candidates, rounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dbksvd_dask.kernels.moments import Moments


class ChunkState(NamedTuple):
    """One chunk of samples between two rounds."""

    R: np.ndarray  # (n, d) residual
    atom: np.ndarray  # (n, k) int32, indices inside the group
    coefficient: np.ndarray  # (n, k)
    start: np.ndarray  # (n_rounds, n + 1): entries by round and row, see kernels.update
    pos: np.ndarray  # (nnz,)
    local: np.ndarray  # (nnz,)
    stats: ChunkStats | None = None  # sums over the chunk after its encoding
    unit: int = 0  # exponent of the units of its sums of products, see kernels.scale


class ChunkStats(NamedTuple):
    """Sums over one chunk after its encoding."""

    moments: Moments
    y_norms: np.ndarray  # (n,) float64
    counts: np.ndarray  # (n_atoms of the group,) int64
    finished: float  # time.time() at the end


class Candidates(NamedTuple):
    """Worst-reconstructed samples of one chunk, worst first, to take the place of dead atoms."""

    error: np.ndarray  # (c,) float64, residual norms
    rows: np.ndarray  # (c, d) the samples


class Rounds(NamedTuple):
    """The rounds of one group: which atoms, and for each atom its round and place in it."""

    atoms: tuple[np.ndarray, ...]
    round_of: np.ndarray
    local_of: np.ndarray


def invert_rounds(atoms: list[np.ndarray], n_atoms: int) -> Rounds:
    """Look-up tables from atom to round and place.

    Parameters
    ----------
    atoms : per round, the indices of its atoms
    """
    round_of = np.empty(n_atoms, np.int32)
    local_of = np.empty(n_atoms, np.int32)
    for r, members in enumerate(atoms):
        round_of[members] = r
        local_of[members] = np.arange(members.size, dtype=np.int32)
    return Rounds(tuple(atoms), round_of, local_of)


def add_counts(counts: list[np.ndarray]) -> np.ndarray:
    """Samples per atom over all chunks."""
    return np.sum(counts, axis=0)
