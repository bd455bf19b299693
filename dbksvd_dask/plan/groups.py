"""Matryoshka groups: their sizes, their shares of k, and their rounds."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.seeds import ROUNDS, generator


def exponential_groups(n_atoms: int, n_groups: int = 5) -> tuple[int, ...]:
    """Group sizes that double, the first two equal, summing to n_atoms.

    >>> exponential_groups(4096)
    (256, 256, 512, 1024, 2048)
    >>> exponential_groups(100)
    (6, 6, 13, 25, 50)
    >>> exponential_groups(3)
    (1, 2)
    """
    ends = sorted({n_atoms >> shift for shift in range(n_groups)} - {0})
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def group_sizes(n_atoms: int, k: int, groups: Any) -> tuple[int, ...] | None:
    """Check or make the Matryoshka groups; None means one group of all atoms.

    >>> group_sizes(64, 8, (16, 48))
    (16, 48)
    >>> group_sizes(64, 8, "exponential")
    (4, 4, 8, 16, 32)
    """
    if groups is None:
        return None
    if isinstance(groups, str):
        if groups != "exponential":
            raise InputError(f"groups={groups!r} is not known; use 'exponential', a tuple of sizes or None")
        groups = exponential_groups(n_atoms)
    if not isinstance(groups, Sequence) or not all(isinstance(g, numbers.Integral) and int(g) > 0 for g in groups):
        raise InputError(f"groups={groups!r} is not a tuple of sizes; use for example groups=(16, 48)")
    sizes = tuple(int(g) for g in groups)
    if sum(sizes) != n_atoms:
        raise InputError(f"groups={sizes} sum to {sum(sizes)}, not to n_atoms={n_atoms}; make them sum to it")
    if len(sizes) > k:
        raise InputError(
            f"{len(sizes)} groups share k={k} nonzeros, so some would get none; use k >= {len(sizes)} "
            "or fewer groups"
        )
    for size, share in zip(sizes, group_budgets(k, len(sizes)), strict=True):
        if share > size:
            raise InputError(f"a group of {size} atoms gets {share} of k={k}; use larger groups or a smaller k")
    return sizes


def group_budgets(k: int, n_groups: int) -> tuple[int, ...]:
    """Equal shares of k, the remainder to the first groups; they sum to exactly k.

    >>> group_budgets(20, 3)
    (7, 7, 6)
    """
    share, rest = divmod(k, n_groups)
    return tuple(share + (g < rest) for g in range(n_groups))


class Group(NamedTuple):
    """One Matryoshka group: its atoms [start, stop), its share of k, its number of rounds."""

    start: int
    stop: int
    k: int
    n_rounds: int


def plan_groups(n_atoms: int, k: int, groups: Sequence[int] | None, n_rounds: int) -> tuple[Group, ...]:
    """Bounds, budgets and rounds of every group. Rounds keep their size, about n_atoms / n_rounds atoms.

    >>> plan_groups(100, 10, None, 8)
    (Group(start=0, stop=100, k=10, n_rounds=8),)
    >>> [tuple(g) for g in plan_groups(64, 6, (16, 48), 8)]
    [(0, 16, 3, 2), (16, 64, 3, 6)]
    """
    sizes = (n_atoms,) if groups is None else tuple(groups)
    out = []
    start = 0
    for size, share in zip(sizes, group_budgets(k, len(sizes)), strict=True):
        rounds = min(size, max(1, round(n_rounds * size / n_atoms)))
        out.append(Group(start, start + size, share, rounds))
        start += size
    return tuple(out)


def plan_rounds(group: Group, seed: int, iteration: int) -> list[np.ndarray]:
    """Shuffled atoms of one group, split into its rounds; indices inside the group."""
    order = generator(seed, ROUNDS, iteration, group.start).permutation(group.stop - group.start)
    return [part.astype(np.int32) for part in np.array_split(order, group.n_rounds)]
