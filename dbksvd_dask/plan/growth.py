"""How a dictionary grows: its sizes by iteration, and the thresholds that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Iterations of one stage of growth. On two SynthSAEBench models of the small size (seeds 10 and 11) 8 gave an
# explained variance .013 to .02 above that of 5 at L0 3, and as many features; 10 gave no more.
GROWTH_ITERATIONS = 8
FIRST_ATOMS = 16


def growth_sizes(n_atoms: int, factor: float, first: int = FIRST_ATOMS) -> tuple[int, ...]:
    """Atoms at each stage of growth: from `first` to n_atoms, each `factor` times the one before.

    >>> growth_sizes(256, 1.5)
    (16, 24, 36, 54, 81, 122, 183, 256)
    >>> growth_sizes(20, 4.0)
    (16, 20)
    >>> growth_sizes(8, 1.5)
    (8,)
    """
    sizes = [min(first, n_atoms)]
    while sizes[-1] < n_atoms:
        # rounded first: 1.2 * 50 is 60.000000000000004 on some machines and must not become 61
        grown = max(sizes[-1] + 1, math.ceil(round(sizes[-1] * factor, 6)))
        sizes.append(min(n_atoms, grown))
    return tuple(sizes)


def growth_iterations(sizes: Sequence[int]) -> int:
    """Iterations until a growing dictionary has all its atoms and its last stage is done.

    >>> growth_iterations((16, 24, 36))
    24
    """
    return len(sizes) * GROWTH_ITERATIONS


class GrowthStep(NamedTuple):
    """What growth does in one iteration: its stage, and the atoms in it."""

    stage: int
    n_atoms: int


def growth_step(sizes: Sequence[int], iteration: int) -> GrowthStep:
    """What growth does in an iteration; after the last stage the number of atoms stays.

    >>> growth_step((16, 24, 36), 11)
    GrowthStep(stage=1, n_atoms=24)
    >>> growth_step((16, 24, 36), 40)
    GrowthStep(stage=2, n_atoms=36)
    """
    stage = min(iteration // GROWTH_ITERATIONS, len(sizes) - 1)
    return GrowthStep(stage, sizes[stage])


# Atoms that staged encoding offers first of a dictionary that is sorted by use, and the step from there.
FIRST_OFFERED = 4
OFFERED_FACTOR = math.sqrt(2)


def frequency_stages(n_atoms: int, k: int) -> tuple[tuple[int, int, int], ...]:
    """Groups of atoms that are sorted by how often they are used, frequent ones first and in small groups.

    Each group is (first atom, end, most nonzeros); most is k: it is not known which of them a sample needs.

    >>> frequency_stages(13, 5)
    ((0, 4, 4), (4, 6, 2), (6, 9, 3), (9, 13, 4))
    """
    ends = growth_sizes(n_atoms, OFFERED_FACTOR, FIRST_OFFERED)
    return tuple((a, b, min(k, b - a)) for a, b in zip([0, *ends], ends, strict=False))


# How fast the number of nonzeros falls with the threshold, as a power, where nothing is known of it; and the
# smallest and largest that is believed.
FALL, FALLS = 2.0, (1.0, 8.0)


def next_threshold(threshold: float, mean_nonzeros: float, k: int, fall: float = FALL) -> float:
    """Threshold for the next batch, so that the mean number of nonzeros comes to k.

    The number of nonzeros falls about as the threshold to the power -1 to -4; taken as -2, it settles in a few
    batches without swinging. One step is at most a factor of 2.

    >>> next_threshold(0.5, 8.0, 8)
    0.5
    >>> next_threshold(0.5, 18.0, 8)
    0.75
    >>> next_threshold(0.5, 0.0, 8)
    0.25
    """
    return float(threshold * min(2.0, max(0.5, (mean_nonzeros / k) ** (1.0 / fall))))


def threshold_fall(first: tuple[float, float], second: tuple[float, float]) -> float:
    """How fast the number of nonzeros falls, as a power, between two (threshold, mean number of nonzeros).

    >>> threshold_fall((1.0, 8.0), (2.0, 1.0))
    3.0
    >>> threshold_fall((1.0, 8.0), (1.0, 8.0))
    2.0
    """
    (t, nonzeros), (u, fewer) = first, second
    if t == u or min(nonzeros, fewer) <= 0:
        return FALL
    return min(FALLS[1], max(FALLS[0], -math.log(fewer / nonzeros) / math.log(u / t)))
