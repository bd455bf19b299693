"""ITDA, our nearest neighbour: the dictionary is made of the activations that matching pursuit explains worst.

After "Inference-Time Decomposition of Activations" (Leask et al., arXiv 2505.17769): rows are read once; those
whose relative error with the atoms so far is above a threshold become atoms themselves. Nothing is optimised. The
threshold decides how many atoms there are; for a given number it is searched outside the clock, so that the
dictionary is full near the end of the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from benchmarks.peer_base import Recorder
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import encode_rows, residual
from dbksvd_dask.plan.encoder import EncodeSpec

# Rows encoded at a time. The rows of a batch do not see each other: within one, the worst become atoms first.
BATCH = 512
# Of a batch, at most this share become atoms, or similar bad rows of one batch would crowd the dictionary.
MOST_OF_BATCH = 8
# Halvings of the range of thresholds: the last two differ by 1/64.
N_HALVINGS = 6


class Growing:
    """Atoms and their gram, with room for all of them; atoms that are not there yet are zero and never chosen."""

    def __init__(self, n_atoms: int, n_features: int) -> None:
        self.size, self._room = 0, min(64, n_atoms)
        self._n_atoms = n_atoms
        self.atoms = np.zeros((self._room, n_features), np.float32)
        self.gram = np.zeros((self._room, self._room), np.float32)

    @property
    def full(self) -> bool:
        """Whether no more atoms fit."""
        return self.size == self._n_atoms

    def add(self, rows: np.ndarray) -> None:
        """Append unit rows, as many as fit."""
        rows = rows[: self._n_atoms - self.size]
        while self.size + len(rows) > self._room:
            self._widen()
        new = slice(self.size, self.size + len(rows))
        self.atoms[new] = rows
        products = rows @ self.atoms.T
        self.gram[new] = products
        self.gram[:, new] = products.T
        self.size = new.stop

    def _widen(self) -> None:
        room = min(2 * self._room, self._n_atoms)
        more = room - self._room
        self.atoms = np.pad(self.atoms, ((0, more), (0, 0)))
        self.gram = np.pad(self.gram, ((0, more), (0, more)))
        self._room = room

    def errors(self, rows: np.ndarray, k: int) -> np.ndarray:
        """Relative errors of rows with at most k of the atoms: (n,)."""
        spec = EncodeSpec(min(k, self._room))
        atom, coefficient = encode_rows(rows, self.atoms, self.gram, spec)
        left = residual(rows, atom, coefficient, self.atoms)
        return np.linalg.norm(left, axis=1) / np.linalg.norm(rows, axis=1)


def grow(rows: np.ndarray, n_atoms: int, k: int, threshold: float, seed: int = 0) -> Iterator[tuple[Growing, int]]:
    """Read rows once in random order; yield the dictionary and the rows seen so far, until it is full.

    Parameters
    ----------
    rows : float32 ndarray of shape (n, n_features), centred
    threshold : relative error from which a row becomes an atom
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    found = Growing(n_atoms, rows.shape[1])
    for start in range(0, len(order), BATCH):
        batch = rows[order[start : start + BATCH]]
        norms = np.linalg.norm(batch, axis=1)
        batch, norms = batch[norms > 0], norms[norms > 0]
        error = found.errors(batch, k) if found.size else np.ones(len(batch))
        worst = np.argsort(-error, kind="stable")[: max(1, BATCH // MOST_OF_BATCH)]
        chosen = worst[error[worst] > threshold]
        found.add(batch[chosen] / norms[chosen, None])
        yield found, min(start + BATCH, len(order))
        if found.full:
            return


def dictionary(
    rows: np.ndarray, n_atoms: int, k: int, threshold: float, seed: int = 0
) -> tuple[np.ndarray, int, bool]:
    """Return atoms, rows read, and whether the dictionary is full; if not, the rows ended first."""
    with single_blas_thread():
        ((found, seen),) = deque(grow(rows, n_atoms, k, threshold, seed), maxlen=1)
    return found.atoms[: found.size], seen, found.full


def choose_threshold(rows: np.ndarray, n_atoms: int, k: int, seed: int = 0) -> float:
    """Return the largest threshold, of those that halving tries, with which the rows fill the dictionary."""
    low, high = 0.0, 1.0
    for _ in range(N_HALVINGS):
        middle = (low + high) / 2
        *_, full = dictionary(rows, n_atoms, k, middle, seed)
        low, high = (middle, high) if full else (low, middle)
    return low


def itda(recorder: Recorder) -> None:
    """Fill the dictionary once; its own end, however much time is left."""
    problem = recorder.problem
    recorder.clock.stop()
    threshold = choose_threshold(problem.train, problem.n_atoms, problem.k, problem.seed)
    recorder.notes |= {"threshold": threshold}
    recorder.clock.start()
    with single_blas_thread():
        for found, seen in grow(problem.train, problem.n_atoms, problem.k, threshold, problem.seed):
            if not found.full:
                recorder.show(lambda: found.atoms[: found.size], seen)  # noqa: B023  (called at once)
    recorder.finish(lambda: found.atoms[: found.size], seen)
