"""How workers that exchange an array cut it into pieces, so that none of them passes on all of it.

Each piece has a binomial tree of its own over the ranks: sums go up, its *owner*, the root, takes the step, the
result goes down. The trees differ in their roots, and what two ranks send each other at one level is one message.
With as many pieces as ranks this is recursive halving and doubling: a rank sends half of its array at the lowest
level, then a quarter, and so on, about the whole array on the way up and down together, where the first rank of a
single tree takes in and gives out log2(ranks) arrays. A single piece gives that one tree::

    level 0   (0 1) (2 3) (4 5) (6 7)    of each pair, one gets the sums of a piece, the other those of the next
    level 1   (0 1 2 3) (4 5 6 7)        of each pair of pairs, the owners of a piece meet
    level 2   (0 ... 7)

At every level neighbouring ranks are joined, whatever the piece: sums have one order and the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

# A piece should take longer on its way than a hop takes at all: at 1 GB/s this one takes 0.07 ms.
LEAST_BYTES = 1 << 16
# Bounds of pieces are multiples of it: processors compute several entries of a vector at once, the last few alone.
ROWS_MULTIPLE = 16

Moved = tuple[tuple[int, tuple[int, ...]], ...]  # per partner, the numbers of pieces


class Level(NamedTuple):
    """What a rank sends and receives at one level on the way up; on the way down it is the reverse."""

    sends: Moved
    receives: Moved


def count_pieces(n_bytes: int, n_ranks: int, n_rows: int | None = None) -> int:
    """Return the number of pieces of an array, a power of two.

    Parameters
    ----------
    n_rows : of the array, if pieces are rows of it

    Examples
    --------
    >>> count_pieces(512 * 768 * 4, 64, 512), count_pieces(512 * 768 * 4, 5, 512), count_pieces(100_000, 64, 512)
    (16, 4, 1)
    """
    most = min(n_ranks, n_bytes // LEAST_BYTES, n_ranks if n_rows is None else n_rows // ROWS_MULTIPLE)
    return 1 << max(most, 1).bit_length() - 1


def piece_spans(n_rows: int, n_pieces: int) -> list[tuple[int, int]]:
    """Cut rows into pieces of nearly equal size.

    >>> piece_spans(100, 2), piece_spans(5, 1)
    ([(0, 48), (48, 100)], [(0, 5)])
    """
    ends = [i * n_rows // n_pieces // ROWS_MULTIPLE * ROWS_MULTIPLE for i in range(n_pieces)]
    return list(zip(ends, [*ends[1:], n_rows], strict=True))


def byte_spans(n_bytes: int, n_pieces: int) -> list[tuple[int, int]]:
    """Cut bytes into pieces of nearly equal size.

    >>> byte_spans(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    ends = [i * n_bytes // n_pieces for i in range(n_pieces + 1)]
    return list(pairwise(ends))


def depth(n_ranks: int) -> int:
    """Return the levels of the trees.

    >>> depth(1), depth(2), depth(5), depth(64)
    (0, 1, 3, 6)
    """
    return (n_ranks - 1).bit_length()


def owner(piece: int, n_ranks: int, n_pieces: int, start: int = 0, levels: int | None = None) -> int:
    """Return the rank that has the sums of a piece over the ranks ``[start, start + 2^levels)``.

    By default, over all of them: the root of the piece's tree.

    >>> [owner(piece, 8, 4) for piece in range(4)], [owner(piece, 6, 4) for piece in range(4)]
    ([0, 5, 2, 7], [0, 5, 2, 5])
    >>> owner(0, 100, 1)
    0
    """
    bits = n_pieces.bit_length() - 1
    for level in reversed(range(depth(n_ranks) if levels is None else levels)):
        # above the lowest levels the bits are used again, so that owners lie all over the ranks
        if bits and piece >> level % bits & 1 and start + (1 << level) < n_ranks:
            start += 1 << level
    return start


@lru_cache(1 << 13)
def plan_levels(rank: int, n_ranks: int, n_pieces: int) -> tuple[Level, ...]:
    """Return what a rank does on the way up, from the lowest level.

    >>> plan_levels(2, 4, 1)
    (Level(sends=(), receives=((3, (0,)),)), Level(sends=((0, (0,)),), receives=()))
    >>> plan_levels(2, 4, 4)
    (Level(sends=((3, (1, 3)),), receives=((3, (0, 2)),)), Level(sends=((0, (0,)),), receives=((0, (2,)),)))
    """
    made = []
    for level in range(depth(n_ranks)):
        half, block = 1 << level, rank >> level << level
        other = block ^ half
        sends: dict[int, list[int]] = {}
        receives: dict[int, list[int]] = {}
        if other < n_ranks:
            for piece in range(n_pieces):
                if owner(piece, n_ranks, n_pieces, block, level) != rank:
                    continue
                partner = owner(piece, n_ranks, n_pieces, other, level)
                stays = owner(piece, n_ranks, n_pieces, min(block, other), level + 1) == rank
                (receives if stays else sends).setdefault(partner, []).append(piece)
        made.append(Level(_frozen(sends), _frozen(receives)))
    return tuple(made)


def _frozen(moved: dict[int, list[int]]) -> Moved:
    return tuple((partner, tuple(moved[partner])) for partner in sorted(moved))


def partners(rank: int, n_ranks: int, n_pieces: int) -> set[int]:
    """Return the ranks with which one exchanges pieces.

    >>> sorted(partners(0, 8, 1)), sorted(partners(5, 8, 1)), sorted(partners(5, 8, 8))
    ([1, 2, 4], [4], [1, 4, 7])
    """
    levels = plan_levels(rank, n_ranks, n_pieces)
    return {partner for level in levels for moved in level for partner, _ in moved}


def busiest(n_ranks: int, n_pieces: int) -> float:
    """Return the arrays that pass one after the other on one way through all levels, of a power of two of ranks.

    >>> busiest(64, 1), busiest(2, 2), busiest(64, 16), busiest(64, 64), busiest(1, 1)
    (6.0, 0.5, 1.0625, 0.984375, 0.0)
    """
    return sum(max(n_pieces >> level + 1, 1) for level in range(depth(n_ranks))) / n_pieces


class Traffic(NamedTuple):
    """What passes one after the other between workers of one batch, at the busiest of them."""

    hops: int  # of an exchange: sums up, results down
    arrays: float  # of an exchange: arrays of a round
    first_hops: int  # of what the first worker sends all others at the start
    dictionaries: float  # at the start


def traffic(n_ranks: int, n_pieces: int) -> Traffic:
    """Return what the batches of some workers send each other.

    >>> traffic(64, 1)
    Traffic(hops=12, arrays=12.0, first_hops=6, dictionaries=6.0)
    >>> traffic(64, 16), traffic(1, 1).hops
    (Traffic(hops=12, arrays=2.125, first_hops=12, dictionaries=2.0), 0)
    """
    levels, up = depth(n_ranks), busiest(n_ranks, n_pieces)
    if n_pieces == 1:
        return Traffic(2 * levels, 2 * up, levels, up)
    # the first worker gives out the pieces, then all pass them on
    return Traffic(2 * levels, 2 * up, 2 * levels, 1 - 1 / n_pieces + up)
