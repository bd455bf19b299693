"""Which atoms are active together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dbksvd_dask.kernels.strongest import partners_in_rows

# Atoms of one tile: at most 512 x 65,536 counts of 8 bytes each, 268 MB, if every pair of atoms meets.
TILE = 512


@dataclass(frozen=True, eq=False)
class Coactivation:
    """For every atom the atoms that share most of its samples.

    Attributes
    ----------
    n_samples : int
        Samples that were counted.
    atom : int64 ndarray of shape (n_atoms, n_partners)
        Largest Jaccard index first; -1 where there are fewer.
    jaccard : float32 ndarray of shape (n_atoms, n_partners)
        Samples with both, divided by samples with either.
    together : int64 ndarray of shape (n_atoms, n_partners)
        Samples with both.
    """

    n_samples: int
    atom: NDArray[np.int64]
    jaccard: NDArray[np.float32]
    together: NDArray[np.int64]


def coactivation(active: sp.csr_array, n_partners: int = 8, *, tile: int = TILE) -> Coactivation:
    """Count shared samples of every pair of atoms, a tile of atoms at a time.

    Parameters
    ----------
    active : sparse matrix of shape (n_samples, n_atoms)
        Nonzero where an atom is active on a sample.
    n_partners : int, default 8
    tile : int, default 512
        Atoms at a time; memory is ``tile x n_atoms`` at most.

    Returns
    -------
    Coactivation
    """
    n_samples, n_atoms = active.shape
    ones = sp.csr_array((np.ones(active.nnz, np.float32), active.indices, active.indptr), shape=active.shape)
    by_atom = ones.T.tocsr()
    count = np.diff(by_atom.indptr).astype(np.float32)
    n = min(n_partners, max(n_atoms - 1, 0))
    atom = np.full((n_atoms, n), -1, np.int64)
    jaccard, together = np.zeros((n_atoms, n), np.float32), np.zeros((n_atoms, n), np.int64)
    for start in range(0, n_atoms, tile):
        rows = slice(start, min(start + tile, n_atoms))
        both = by_atom[rows] @ ones
        lists = atom[rows], jaccard[rows], together[rows]
        partners_in_rows(both.indptr, both.indices, both.data, count, start, *lists)
    return Coactivation(n_samples, atom, jaccard, together)
