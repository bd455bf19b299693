"""How a dictionary grows: its sizes by iteration, and the thresholds that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Iterations of one stage of growth. On two small SynthSAEBench models (seeds 10 and 11), 8 explained .013 to .02
# more variance than 5 at L0 3 and found as many features; 10 gained nothing.
GROWTH_ITERATIONS = 8
FIRST_ATOMS = 16


def growth_sizes(n_atoms: int, factor: float, first: int = FIRST_ATOMS) -> tuple[int, ...]:
    """Return the number of atoms at each stage of growth, from `first` to n_atoms in steps of `factor`.

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
    """Count the iterations until a growing dictionary has finished its last stage.

    >>> growth_iterations((16, 24, 36))
    24
    """
    return len(sizes) * GROWTH_ITERATIONS


class GrowthStep(NamedTuple):
    """One iteration of growth: its stage, and the number of atoms in it."""

    stage: int
    n_atoms: int


def growth_step(sizes: Sequence[int], iteration: int) -> GrowthStep:
    """Return the stage of an iteration; after the last stage the number of atoms stays.

    >>> growth_step((16, 24, 36), 11)
    GrowthStep(stage=1, n_atoms=24)
    >>> growth_step((16, 24, 36), 40)
    GrowthStep(stage=2, n_atoms=36)
    """
    stage = min(iteration // GROWTH_ITERATIONS, len(sizes) - 1)
    return GrowthStep(stage, sizes[stage])


# Atoms in the first group of staged encoding, of a dictionary sorted by use, and the growth of later groups.
FIRST_OFFERED = 4
OFFERED_FACTOR = math.sqrt(2)


def frequency_stages(n_atoms: int, k: int) -> tuple[tuple[int, int, int], ...]:
    """Cut atoms sorted by use into groups, small ones for the frequent atoms at the start.

    Each group is (first atom, end, most nonzeros). Each may spend up to k: which groups a sample needs is unknown.

    >>> frequency_stages(13, 5)
    ((0, 4, 4), (4, 6, 2), (6, 9, 3), (9, 13, 4))
    """
    ends = growth_sizes(n_atoms, OFFERED_FACTOR, FIRST_OFFERED)
    return tuple((a, b, min(k, b - a)) for a, b in zip([0, *ends], ends, strict=False))


# How fast the number of nonzeros falls with the threshold, as a power: the assumption until it is measured, and
# the range in which a measurement is trusted.
FALL, FALLS = 2.0, (1.0, 8.0)


def next_threshold(threshold: float, mean_nonzeros: float, k: int, fall: float = FALL) -> float:
    """Return the threshold for the next batch, so that the mean number of nonzeros approaches k.

    The number of nonzeros falls with the threshold to the power of -1 to -4; assuming -2, it settles in a few
    batches without oscillating. One step is at most a factor of 2.

    >>> next_threshold(0.5, 8.0, 8)
    0.5
    >>> next_threshold(0.5, 18.0, 8)
    0.75
    >>> next_threshold(0.5, 0.0, 8)
    0.25
    """
    return float(threshold * min(2.0, max(0.5, (mean_nonzeros / k) ** (1.0 / fall))))


def threshold_fall(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return how fast the nonzeros fall, as a power, between two pairs (threshold, mean number of nonzeros).

    >>> threshold_fall((1.0, 8.0), (2.0, 1.0))
    3.0
    >>> threshold_fall((1.0, 8.0), (1.0, 8.0))
    2.0
    """
    (t, nonzeros), (u, fewer) = first, second
    if t == u or min(nonzeros, fewer) <= 0:
        return FALL
    return min(FALLS[1], max(FALLS[0], -math.log(fewer / nonzeros) / math.log(u / t)))
