"""Signs of atoms: negate those whose coefficients in a batch have a negative mean.

Negating atoms negates their coefficients and changes nothing else, to the bit. A fit publishes, after every
iteration, the dictionary whose atoms have positive coefficients on average (the rule of the paper), so a fit that
resumes from a checkpoint gives the same dictionaries as one that never stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.plan.device import Placement


def add_chunks(sums: list[np.ndarray]) -> np.ndarray:
    """Add the sums of all chunks from left to right; the order fixes the bits."""
    total = sums[0].copy()
    for more in sums[1:]:
        total += more
    return total


def sum_tasks(names: Tasks, place: Placement, g: int, states: list[Any], n_atoms: int) -> Any:
    """Add tasks that sum the coefficients of the atoms of group `g` over a batch.

    Parameters
    ----------
    states : per chunk, the task that gives its state after the group's update
    """
    sums = functions(place).coefficient_sums
    parts = [names.call(sums, "coefficients", (g, c), state, n_atoms, chunk=c) for c, state in enumerate(states)]
    return names.call(add_chunks, "coefficients-sum", (g,), parts)


def turned(sums: np.ndarray | None, *dictionaries: np.ndarray) -> tuple[np.ndarray, ...]:
    """Negate the atoms whose coefficients have a negative mean.

    Parameters
    ----------
    sums : (n_atoms,) sums of their coefficients in the last batch; None where none can be negative
    dictionaries : (n_atoms, n_features) each, of the same atoms
    """
    if sums is None or not (sums < 0).any():
        return dictionaries
    negative = (sums < 0)[:, None]
    return tuple(np.where(negative, -D, D) for D in dictionaries)
