"""Signs of atoms: which ones the samples of a batch used with negative coefficients on average.

A dictionary and the same dictionary with some atoms negated give the same codes but for signs, to the bit. A fit
publishes the one whose atoms have positive coefficients on average (the rule of the paper), after every iteration:
continued from a checkpoint or never stopped, it comes by the same dictionaries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.gpu import device
from dbksvd_dask.graph.tasks import Tasks


def coefficient_sums(state: Any, n_atoms: int) -> np.ndarray:
    """Sum the coefficients of each atom over a chunk, row by row: (n_atoms,) float64.

    Parameters
    ----------
    state : of a chunk after its update, on the host or on a device; its `atom` is -1 where a slot is empty
    """
    with device.turn("gpu" if device.on_device(state.atom) else "cpu"):
        atom, coefficient = device.to_host(state.atom), device.to_host(state.coefficient)
    used = atom >= 0
    return np.bincount(atom[used], weights=coefficient[used], minlength=n_atoms)


def add_chunks(sums: list[np.ndarray]) -> np.ndarray:
    """Add the sums of all chunks from left to right; the order fixes the bits."""
    total = sums[0].copy()
    for more in sums[1:]:
        total += more
    return total


def sum_tasks(names: Tasks, g: int, states: list[Any], n_atoms: int) -> Any:
    """Task that sums the coefficients of the atoms of group `g` over a batch."""
    parts = [
        names.call(coefficient_sums, "coefficients", (g, c), state, n_atoms, chunk=c)
        for c, state in enumerate(states)
    ]
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
