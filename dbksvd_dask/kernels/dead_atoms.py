"""Rules that replace dead atoms, those that no sample of a batch used.

A rule proposes candidates of each chunk, on the chunk's worker, and then chooses among the candidates of all
chunks. `plan.dead_atoms.DEAD_ATOM_RULES` lists the rules by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.kernels.scale import rows_near_one
from dbksvd_dask.plan import seeds
from dbksvd_dask.plan.dead_atoms import DEAD_ATOM_RULES


class Candidates(NamedTuple):
    """Rows of some chunks that may become atoms, best first."""

    score: np.ndarray  # (c,) float64, the larger the better
    rows: np.ndarray  # (c, d)


class SeedPath(NamedTuple):
    """The path to the random numbers of one group of atoms in one batch, see `plan.seeds`."""

    seed: int
    iteration: int
    first: int  # first atom of the group in the dictionary


class Rule(ABC):
    """A rule that replaces dead atoms; stateless, because it is an argument of tasks.

    Attributes
    ----------
    proposes : whether to call `propose` for every chunk
    """

    proposes = False

    def propose(
        self, compute: Any, state: Any, D: Any, members: list[np.ndarray], new: list[Any], counts: np.ndarray
    ) -> Candidates:
        """Return candidates of one chunk, after its last round.

        Parameters
        ----------
        compute : `kernels.chunk` or, for a chunk on a device, `gpu.chunk`
        state : the chunk: `kernels.chunk.ChunkState` or `gpu.chunk.DeviceState`
        D : (n_atoms, d) atoms of the group before the batch
        members, new : per round, the indices of its atoms and their new values
        counts : (n_atoms,) samples of the batch per atom
        """
        return Candidates(np.empty(0), np.empty((0, D.shape[1])))

    def best(self, candidates: list[Candidates], n_dead: int) -> list[Candidates]:
        """Return candidates of neighbouring chunks without those that cannot be chosen, so that fewer travel.

        Parameters
        ----------
        candidates : in chunk order
        n_dead : number of dead atoms
        """
        return candidates

    @abstractmethod
    def choose(self, candidates: list[Candidates], D: np.ndarray, dead: np.ndarray, path: SeedPath) -> np.ndarray:
        """Return unit rows for the first dead atoms: (at most n_dead, d). Atoms without a row stay unchanged.

        Parameters
        ----------
        candidates : of all chunks, in chunk order, as `best` left them; empty for a rule that does not propose
        D : (n_atoms, d) atoms of the group after the batch, on the host
        dead : (n_dead,) indices of dead atoms, ascending; at least one
        """


class WorstSamples(Rule):
    """Samples with the largest residuals, each at most once."""

    proposes = True

    def propose(
        self, compute: Any, state: Any, D: Any, members: list[np.ndarray], new: list[Any], counts: np.ndarray
    ) -> Candidates:
        """Return the worst-reconstructed samples of a chunk."""
        worst: Candidates = compute.worst_samples(state, D, members, new, counts)
        return worst

    def best(self, candidates: list[Candidates], n_dead: int) -> list[Candidates]:
        """Return the worst samples in descending order of error; of equal errors the earlier one first."""
        error = np.concatenate([c.score for c in candidates])
        rows = np.concatenate([c.rows for c in candidates])
        order = np.argsort(-error, kind="stable")
        order = order[rows[order].any(axis=1)][:n_dead]
        return [Candidates(error[order], rows[order])]

    def choose(self, candidates: list[Candidates], D: np.ndarray, dead: np.ndarray, path: SeedPath) -> np.ndarray:
        """Return the worst of all, in descending order of error; of equal errors the earlier sample first."""
        (worst,) = self.best(candidates, dead.size)
        chosen = rows_near_one(worst.rows)
        norms = np.linalg.norm(chosen.astype(np.float64), axis=1)
        return (chosen / norms[:, None]).astype(D.dtype)


class RandomAtoms(Rule):
    """Random directions, each a function of the atom's index and not of which other atoms are dead."""

    def choose(self, candidates: list[Candidates], D: np.ndarray, dead: np.ndarray, path: SeedPath) -> np.ndarray:
        """Return one random unit row per dead atom."""
        n_atoms, n_features = D.shape
        return seeds.random_atoms(n_atoms, n_features, D.dtype, *path)[dead]


class Keep(Rule):
    """Dead atoms stay as they are."""

    def choose(self, candidates: list[Candidates], D: np.ndarray, dead: np.ndarray, path: SeedPath) -> np.ndarray:
        """Return no rows."""
        return D[:0]


@cache
def rule_of(name: str) -> Rule:
    """Return the rule that an entry of `plan.dead_atoms.DEAD_ATOM_RULES` names."""
    module, rule = DEAD_ATOM_RULES[name].rule.split(":")
    made: Rule = getattr(import_module(f"dbksvd_dask.kernels.{module}"), rule)()
    return made
