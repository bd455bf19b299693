"""Integers in, integers out: batches, rounds, groups and memory. No data, no Dask, no files.

Random choices are drawn from (seed, purpose, number) alone, so that any iteration can be planned anew after a
crash, on any machine, without replaying those before it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.errors import InputError

# One number per purpose keeps the random streams apart.
_EPOCH, _ROUNDS, _INIT, _VALIDATION, _DEAD, GROWTH = range(6)


def generator(seed: int, *path: int) -> np.random.Generator:
    """Random generator of one purpose, from the seed and a path of integers."""
    return np.random.default_rng(np.random.SeedSequence([seed, *path]))


# ---------------------------------------------------------------------------------------------- groups


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
    order = generator(seed, _ROUNDS, iteration, group.start).permutation(group.stop - group.start)
    return [part.astype(np.int32) for part in np.array_split(order, group.n_rounds)]


# ---------------------------------------------------------------------------------------------- growth

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


# ---------------------------------------------------------------------------------------------- thresholds


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


# ---------------------------------------------------------------------------------------------- tiles

# BLAS rounds a row of a matrix product differently depending on where in the product it lies: OpenBLAS' Haswell
# sgemm tells positions 0-5 from 6-11 modulo 12. So a row always lies at its own index modulo GRID_ROWS, a multiple
# of the unrolling of every kernel, and the rows around it do not matter.
GRID_ROWS = 48
# Rows per matrix product. BLAS reaches full speed at about 256 rows; 480 rows of 4096 atoms take 8 MB.
TILE_ROWS = 480
# Up to this many multiplications BLAS may pick a kernel by the size of the product (OpenBLAS: up to 10^6).
SMALL_PRODUCT = 4_000_000


class Tile(NamedTuple):
    """One matrix product: rows [start, stop) lie in it from row `place` on; the rest of its `height` is zero."""

    start: int
    stop: int
    place: int
    height: int


def grid_tiles(n_rows: int, first: int, n_products: int) -> list[Tile]:
    """Cut rows into matrix products that round every row the same way, wherever the rows are cut.

    Parameters
    ----------
    n_rows : rows at hand
    first : index in their source of the first of them
    n_products : multiplications per row, n_atoms * n_features; a small product is always of full height

    >>> grid_tiles(500, 50, 10**6)
    [Tile(start=0, stop=478, place=2, height=480), Tile(start=478, stop=500, place=0, height=48)]
    >>> grid_tiles(1, 7, 100)
    [Tile(start=0, stop=1, place=7, height=480)]
    """
    lead = first % GRID_ROWS
    small = n_products * GRID_ROWS <= SMALL_PRODUCT
    tiles = []
    for a in range(0, lead + n_rows, TILE_ROWS):
        start, stop = max(a - lead, 0), min(a + TILE_ROWS - lead, n_rows)
        height = TILE_ROWS if small else -(-(stop + lead - a) // GRID_ROWS) * GRID_ROWS
        tiles.append(Tile(start, stop, start + lead - a, height))
    return tiles


def part_rows(n_rows: int, at_most: int) -> int:
    """Rows per task when rows are only encoded: at least four tasks, so that a few thousand rows use every core.

    A multiple of GRID_ROWS where that is allowed, so that only the last task pads a product.

    >>> part_rows(5000, 8192), part_rows(100, 8192), part_rows(10**6, 8192)
    (1296, 288, 8160)
    >>> part_rows(5000, 20)
    20
    """
    wanted = min(at_most, -(-max(256, -(-n_rows // 4)) // GRID_ROWS) * GRID_ROWS)
    return max(wanted // GRID_ROWS * GRID_ROWS, min(at_most, GRID_ROWS))


# ---------------------------------------------------------------------------------------------- rows

# Blocks of rows that are read together: at least this many make up a batch, so that a batch mixes many places ...
BLOCKS_PER_BATCH = 64
# ... but a block is no longer than this, 1.5 MB of 768 features in float16: whole reads from a disk or an object
# store, and at most this many blocks in all, so that their order is planned in megabytes.
BLOCK_ROWS, MOST_BLOCKS = 1024, 1 << 20
# Blocks from whose ends the rows for validation are taken.
VALIDATION_BLOCKS = 64


def block_rows(n_samples: int, batch_size: int) -> int:
    """Rows that a fit reads together: a grid of its own, whatever the chunks in which the rows are stored.

    >>> block_rows(10**6, 65536), block_rows(20_011, 65536), block_rows(2000, 100), block_rows(8 << 30, 65536)
    (1024, 312, 1, 8192)
    """
    longest = max(BLOCK_ROWS, n_samples // MOST_BLOCKS)
    wanted = max(1, min(n_samples, batch_size) // BLOCKS_PER_BATCH)
    return longest if wanted >= BLOCK_ROWS else wanted


# A batch that has doubled every other iteration has all its rows by then, however many those are.
WARM_UP_END = 128


@dataclass(frozen=True)
class RowStream:
    """The endless order in which a fit reads its training rows: epoch after epoch, blocks shuffled in each.

    Parameters
    ----------
    n_samples : rows of the data
    block_rows : rows that are always read together; see `block_rows`
    batch_size : rows per outer batch; never more than there are training rows
    n_validation : rows set aside
    first_rows : rows of the first batch; batches double every other iteration until they have all their rows
    """

    n_samples: int
    block_rows: int
    batch_size: int
    n_validation: int
    seed: int
    first_rows: int | None = None

    @property
    def n_train(self) -> int:
        """Rows that training may use."""
        return self.n_samples - self.n_validation

    @property
    def rows_per_batch(self) -> int:
        """Rows of a batch after the warm-up: batch_size, or all of them when there are fewer."""
        return min(self.batch_size, self.n_train)

    def batch_rows(self, iteration: int) -> int:
        """Rows of one outer batch.

        >>> stream = RowStream(10**6, 1, 65536, 0, 0, first_rows=8192)
        >>> [stream.batch_rows(i) for i in (0, 1, 2, 5, 6, 999)]
        [8192, 8192, 16384, 32768, 65536, 65536]
        """
        if self.first_rows is None or iteration >= WARM_UP_END:
            return self.rows_per_batch
        return min(self.first_rows << iteration // 2, self.rows_per_batch)

    def rows_before(self, iteration: int) -> int:
        """Rows that the outer batches before this one read.

        >>> RowStream(10**6, 1, 65536, 0, 0, first_rows=8192).rows_before(7)
        180224
        """
        missing = sum(self.rows_per_batch - self.batch_rows(i) for i in range(min(iteration, WARM_UP_END)))
        return iteration * self.rows_per_batch - missing

    @property
    def n_blocks(self) -> int:
        """Blocks of the data, the last one possibly short."""
        return -(-self.n_samples // self.block_rows)

    def validation_rows(self) -> np.ndarray:
        """Rows set aside, ascending: the ends of up to VALIDATION_BLOCKS blocks (of single rows: any rows)."""
        return _validation_rows(self)

    def batch(self, iteration: int) -> np.ndarray:
        """Rows of one outer batch, in reading order: int64 (batch_rows,)."""
        return self.rows(self.rows_before(iteration), self.batch_rows(iteration))

    def rows(self, position: int, count: int) -> np.ndarray:
        """Rows `position` to `position + count` of the stream; what an epoch leaves over rolls into the next."""
        parts = []
        while count > 0:
            epoch, offset = divmod(position, self.n_train)
            take = min(count, self.n_train - offset)
            parts.append(_epoch_rows(self, epoch, offset, take))
            position, count = position + take, count - take
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


@lru_cache(maxsize=4)
def _validation_rows(stream: RowStream) -> np.ndarray:
    if stream.n_validation == 0:
        return np.empty(0, np.int64)
    order = generator(stream.seed, _VALIDATION).permutation(stream.n_blocks)
    # at most half of a block, so that every block still trains; as few blocks as that allows
    per_block = max(1, min(-(-stream.n_validation // VALIDATION_BLOCKS), stream.block_rows // 2))
    picked: list[np.ndarray] = []
    left = stream.n_validation
    passes = 0
    while left > 0:
        for block in order:
            start = int(block) * stream.block_rows
            stop = min(start + stream.block_rows, stream.n_samples) - passes * per_block
            count = min(per_block, left, stop - start)
            if count > 0:
                picked.append(np.arange(stop - count, stop, dtype=np.int64))
                left -= count
            if left == 0:
                break
        passes += 1
    return np.sort(np.concatenate(picked))


@lru_cache(maxsize=2)
def _epoch_blocks(stream: RowStream, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of one epoch in their order, and the training rows before each: (n_blocks,), (n_blocks + 1,)."""
    order = generator(stream.seed, _EPOCH, epoch).permutation(stream.n_blocks)
    sizes = np.full(stream.n_blocks, stream.block_rows, np.int64)
    sizes[-1] = stream.n_samples - (stream.n_blocks - 1) * stream.block_rows
    held = stream.validation_rows()
    if held.size:
        sizes -= np.bincount(held // stream.block_rows, minlength=stream.n_blocks)
    return order, np.concatenate([[0], np.cumsum(sizes[order])])


def _epoch_rows(stream: RowStream, epoch: int, offset: int, count: int) -> np.ndarray:
    order, before = _epoch_blocks(stream, epoch)
    first = int(np.searchsorted(before, offset, side="right")) - 1
    last = int(np.searchsorted(before, offset + count, side="left"))
    held = stream.validation_rows()
    blocks = order[first:last]
    starts = blocks * stream.block_rows
    stops = np.minimum(starts + stream.block_rows, stream.n_samples)
    if stream.block_rows == 1:
        rows = starts[before[first + 1 : last + 1] > before[first:last]].astype(np.int64)
    else:
        rows = np.concatenate(
            [_without(np.arange(a, b, dtype=np.int64), held) for a, b in zip(starts, stops, strict=True)]
        )
    skip = offset - int(before[first])
    return rows[skip : skip + count]


def _without(rows: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Rows (ascending, contiguous) less those set aside."""
    inside = held[np.searchsorted(held, rows[0]) : np.searchsorted(held, rows[-1], side="right")]
    return np.delete(rows, inside - rows[0]) if inside.size else rows


# Rows of the first batch of a warm-up: so many per atom, and no fewer than this.
WARM_UP_ROWS_PER_ATOM = 4
WARM_UP_ROWS = 8192


def warm_up_rows(n_atoms: int) -> int:
    """Rows of the first batch of a fit that warms up: few, but enough to move every atom.

    >>> warm_up_rows(1024), warm_up_rows(4096)
    (8192, 16384)
    """
    return max(WARM_UP_ROWS, WARM_UP_ROWS_PER_ATOM * n_atoms)


def plan_stream(
    n_samples: int, batch_size: int, validation: int, seed: int, first_rows: int | None = None
) -> RowStream:
    """Stream of a fit; `validation` is cut to a tenth of the rows, so that small data can still train.

    >>> plan_stream(1000, 65536, 8192, 0).n_validation
    100
    """
    held = min(validation, n_samples // 10)
    return RowStream(n_samples, block_rows(n_samples, batch_size), batch_size, held, seed, first_rows)


def runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Contiguous runs of rows as (start, stop).

    >>> runs(np.array([4, 5, 6, 1, 2, 9]))
    [(4, 7), (1, 3), (9, 10)]
    """
    if rows.size == 0:
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.concatenate([[0], breaks])]
    ends = rows[np.concatenate([breaks - 1, [rows.size - 1]])]
    return [(int(a), int(b) + 1) for a, b in zip(starts, ends, strict=True)]


def split_rows(n_rows: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cut a batch into chunks of chunk_size rows, the last one possibly short.

    >>> split_rows(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(a, min(a + chunk_size, n_rows)) for a in range(0, n_rows, chunk_size)]


def tree_levels(n: int, fan_in: int) -> list[list[tuple[int, int]]]:
    """Fixed order of a sum of n parts: per level, the spans of the parts that are added left to right.

    >>> tree_levels(10, 4)
    [[(0, 4), (4, 8), (8, 10)], [(0, 3)]]
    >>> tree_levels(1, 4)
    []
    """
    levels = []
    while n > 1:
        spans = [(a, min(a + fan_in, n)) for a in range(0, n, fan_in)]
        levels.append(spans)
        n = len(spans)
    return levels


def spread(n_chunks: int, threads: Sequence[int]) -> list[int]:
    """Worker of each chunk: neighbouring chunks together, workers loaded by their threads.

    >>> spread(8, [1, 1])
    [0, 0, 0, 0, 1, 1, 1, 1]
    >>> spread(6, [2, 1])
    [0, 0, 0, 0, 1, 1]
    >>> spread(2, [1, 1, 1, 1])
    [0, 2]
    """
    ends = np.cumsum(threads)
    if ends.size == 0 or ends[-1] == 0:
        return []
    return [int(np.searchsorted(ends, c * int(ends[-1]) // n_chunks, side="right")) for c in range(n_chunks)]


# ---------------------------------------------------------------------------------------------- first atoms


def random_atoms(n_atoms: int, n_features: int, dtype: Any, seed: int, *path: int) -> np.ndarray:
    """Atoms with entries from U(-1/2, 1/2), rows normalised: (n_atoms, n_features).

    With a `path` (iteration, first atom) it gives replacements for dead atoms, without one the first dictionary.
    """
    rng = generator(seed, _DEAD if path else _INIT, *path)
    atoms = rng.random((n_atoms, n_features)) - 0.5
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    return atoms.astype(dtype)


def initial_rows(n_train: int, n_atoms: int) -> np.ndarray:
    """Positions in the stream of the rows that start a dictionary from data: spread over the first batch."""
    return np.linspace(0, n_train - 1, n_atoms).astype(np.int64)
