"""The dictionary update on one chunk of samples, on the device.

The sums over the samples of an atom must not depend on the order in which blocks run, which rules out atomics.
Instead the nonzeros are grouped twice: by round and row, as on the CPU, for work on a row (its products, refresh),
and by round and atom for sums over the rows of an atom.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.gpu import cuda, device
from dbksvd_dask.kernels.lanczos import namespace


class Entries(NamedTuple):
    """The nonzeros of a chunk, grouped by round; positions are ``row * k + slot``, unused slots last."""

    start: Any  # (n_rounds, n + 1) int32: entries of row i in round r are start[r, i]:start[r, i + 1]
    pos: Any  # (n * k,) int32 positions by round and row
    local: Any  # (n * k,) int32 index of the entry's atom inside its round
    order: Any  # (n * k,) int32 positions by round and atom
    rows: Any  # (n * k,) int32 rows of `order`
    first: Any  # (n_atoms + 1,) int32: entries of the t-th atom in the order of the rounds begin at first[t]
    offset: tuple[int, ...]  # number, in that order, of each round's first atom


def _sorted_keys(xp: Any, group: Any, used: Any, n_groups: int, position: Any) -> Any:
    """Sort positions by group, unused ones last. Keys are unique, so any sort gives the same order."""
    n = position.shape[0]
    return xp.sort(xp.where(used, group, xp.full_like(group, n_groups)) * n + position)


def _places(round_of: np.ndarray, local_of: np.ndarray, n_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each atom in the order of the rounds, and that of each round's first atom."""
    offset = np.concatenate([[0], np.cumsum(np.bincount(round_of, minlength=n_rounds))])
    return (offset[round_of] + local_of).astype(np.int64), offset


def group_by_round(atom: Any, round_of: np.ndarray, local_of: np.ndarray, n_rounds: int) -> Entries:
    """Group the nonzeros of a chunk by round and row, and by round and atom.

    Parameters
    ----------
    atom : int32 device array of shape (n, k), -1 where empty
    round_of, local_of : (n_atoms,) int32 numpy arrays; round of an atom and its index inside the round
    """
    space, xp = device.current(), namespace(atom)
    n, k = atom.shape
    n_atoms = round_of.shape[0]
    place_of, offset = _places(round_of, local_of, n_rounds)
    flat = xp.reshape(atom, (n * k,))
    used = flat >= 0
    safe = xp.where(used, flat, xp.zeros_like(flat))
    position = space.asarray(np.arange(n * k, dtype=np.int64))

    keys = _sorted_keys(xp, xp.take(space.asarray(round_of.astype(np.int64)), safe), used, n_rounds, position)
    pos = keys % (n * k)
    row_ends = space.asarray(np.arange(n + 1, dtype=np.int64) * k)
    round_ends = space.asarray(np.arange(n_rounds, dtype=np.int64) * (n * k))
    start = xp.searchsorted(keys, round_ends[:, None] + row_ends[None, :])
    local = xp.take(space.asarray(local_of), xp.take(safe, pos))

    keys = _sorted_keys(xp, xp.take(space.asarray(place_of), safe), used, n_atoms, position)
    order = keys % (n * k)
    first = xp.searchsorted(keys, space.asarray(np.arange(n_atoms + 1, dtype=np.int64) * (n * k)))
    whole = (start, pos, local, order, order // k, first)
    return Entries._make((*(xp.astype(a, xp.int32) for a in whole), tuple(int(o) for o in offset[:-1])))


def count_atoms(entries: Entries, round_of: np.ndarray, local_of: np.ndarray) -> np.ndarray:
    """Count the samples that use each atom: (n_atoms,) int64 on the host."""
    place_of, _ = _places(round_of, local_of, len(entries.offset))
    return np.diff(device.to_host(entries.first).astype(np.int64))[place_of]


def _atom_sums(R: Any, weight: Any, x: Any, entries: Entries, r: int, n_local: int) -> tuple[Any, Any, Any]:
    """Sum ``w R_i``, ``w x`` and ``w^2`` over the samples of each atom of round r."""
    space = device.current()
    d = R.shape[1]
    W = space.empty((n_local, d), R.dtype)
    wx, w2 = space.empty((n_local,), space.xp.float64), space.empty((n_local,), space.xp.float64)
    grid = (n_local, -(-d // space.threads))
    arrays = (R, weight, x, entries.order, entries.rows, entries.first, entries.offset[r], W, wx, w2)
    space.launch(cuda.atom_sums, grid, 0, *arrays)
    return W, wx, w2


def start_products(R: Any, coefficient: Any, entries: Entries, r: int, n_local: int) -> tuple[Any, Any]:
    """Return partial sums of the warm start of round r: ``R[O]^T x`` and ``|x|^2`` for each of its atoms.

    Returns
    -------
    W : (n_local, d);  x2 : (n_local,) float64
    """
    x = _flat(coefficient)
    W, _, x2 = _atom_sums(R, x, x, entries, r, n_local)
    return W, x2


def next_products(R: Any, coefficient: Any, entries: Entries, r: int, V: Any, dv: Any) -> tuple[Any, Any, Any]:
    """Return partial sums of one Lanczos product of round r; see `kernels.update.next_products`.

    Parameters
    ----------
    V : (n_local, d) current vectors;  dv : (n_local,) products of the old atoms with them

    Returns
    -------
    W : (n_local, d) sums of s_i R_i;  sx, s2 : (n_local,) float64, sums of s_i x_i and of s_i^2
    """
    space = device.current()
    x = _flat(coefficient)
    weight = space.empty(x.shape, R.dtype)
    arrays = (R, x, entries.start[r, :], entries.pos, entries.local, V, dv, weight)
    space.launch(cuda.entry_products, R.shape[0], 0, *arrays)
    return _atom_sums(R, weight, x, entries, r, V.shape[0])


def refresh(
    R: Any, coefficient: Any, entries: Entries, r: int, old: Any, new: Any, nonneg: bool
) -> tuple[Any, Any]:
    """Exchange the atoms of round r and refit their coefficients, into new arrays.

    Parameters
    ----------
    old, new : (n_local, d) atoms of the round before and after

    Returns
    -------
    R_new : (n, d);  coefficient_new : (n, k)
    """
    space, xp = device.current(), namespace(R)
    R_new = space.empty(R.shape, R.dtype)
    coefficient_new = xp.astype(coefficient, coefficient.dtype, copy=True)
    shared = R.shape[1] * (8 if R.dtype == xp.float64 else 4)
    in_shared = shared <= space.shared_bytes
    space.launch(
        cuda.refresh,
        R.shape[0],
        shared if in_shared else 0,
        R,
        _flat(coefficient),
        entries.start[r, :],
        entries.pos,
        entries.local,
        old,
        new,
        bool(nonneg),
        in_shared,
        R_new,
        _flat(coefficient_new),
    )
    return R_new, coefficient_new


def _flat(coefficient: Any) -> Any:
    """Return coefficients (n, k) as a view of shape (n * k,)."""
    n, k = coefficient.shape
    return namespace(coefficient).reshape(coefficient, (n * k,))
