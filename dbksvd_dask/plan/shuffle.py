"""The arithmetic of an out-of-core shuffle: integers and random integers only.

Pass 1 takes the store block by block. A block is permuted and cut into one segment per bucket. Pass 2 takes the
segments of one bucket from all blocks, permutes them, and writes the chunks of the bucket. Each block spreads over
the buckets as evenly as integers allow, so a bucket is a sample of the whole store, however ordered that was.
Where the source stays in memory, the rows of a bucket can be picked out of it in one pass, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# a block and a bucket are held in memory; larger ones gain nothing for small stores
MIN_BLOCK_BYTES = 1 << 27
# the pieces that pass 2 reads shrink as the store grows; below this size a disk mostly seeks
MIN_SEGMENT_BYTES = 1 << 16
# a read of a row of 1536 bytes took 1.35 us, its copy within memory 0.2 (measured): the call is most of it, so
# short rows do not pay. The exact break-even was not measured
MIN_PICKED_BYTES = 1 << 10


def default_block_bytes(total_bytes: int) -> int:
    """Return the bytes of a block: 128 MiB, more for stores above 256 GB, where segments would get small.

    >>> default_block_bytes(4 * 10**9) >> 20, default_block_bytes(10**13) >> 20
    (128, 772)
    """
    return max(MIN_BLOCK_BYTES, math.isqrt(total_bytes * MIN_SEGMENT_BYTES))


@dataclass(frozen=True)
class ShufflePlan:
    """How a store is cut into blocks, buckets and chunks.

    Attributes
    ----------
    n_samples : int
        Rows.
    block_rows : int
        Rows of a block of the source and of a bucket of the result: a whole number of chunks; the last may be
        shorter.
    chunk_rows : int
        Rows of a chunk of the result.
    seed : int
        Decides the order.
    """

    n_samples: int
    block_rows: int
    chunk_rows: int
    seed: int

    @property
    def n_blocks(self) -> int:
        """Return the number of blocks, which is that of buckets."""
        return -(-self.n_samples // self.block_rows)

    @property
    def n_chunks(self) -> int:
        """Return the number of chunks."""
        return -(-self.n_samples // self.chunk_rows)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a block of the source, or of a bucket of the result."""
        return block * self.block_rows, min((block + 1) * self.block_rows, self.n_samples)

    def bucket_of(self, chunk: int) -> int:
        """Return the bucket that a chunk lies in."""
        return chunk * self.chunk_rows // self.block_rows

    def block_order(self, block: int) -> npt.NDArray[np.int64]:
        """Return the order in which the rows of a block go to its segments."""
        start, stop = self.bounds(block)
        return self._random(1, block).permutation(stop - start)

    def bucket_order(self, bucket: int) -> npt.NDArray[np.int64]:
        """Return the order in which the gathered rows of a bucket are written."""
        start, stop = self.bounds(bucket)
        return self._random(2, bucket).permutation(stop - start)

    def sources(
        self, bucket: int, orders: Sequence[npt.NDArray[Any]], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return which row of the source each row of a bucket of the result is.

        Parameters
        ----------
        bucket : int
            The bucket.
        orders : sequence of ndarray of shape (rows of a block,)
            `block_order` of every block.
        counts : ndarray of shape (n_blocks, n_blocks)
            As given by `counts`.
        """
        first = counts[:, :bucket].sum(axis=1)
        last = first + counts[:, bucket]
        parts = [orders[b][first[b] : last[b]] + np.int64(self.bounds(b)[0]) for b in range(self.n_blocks)]
        return np.concatenate(parts)[self.bucket_order(bucket)]

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how many rows go from each block to each bucket.

        Returns
        -------
        ndarray of shape (n_blocks, n_blocks)
            Its rows add up to the blocks, its columns to the buckets.
        """
        sizes = np.array([b - a for a, b in map(self.bounds, range(self.n_blocks))], np.int64)
        room = sizes.copy()
        table = np.empty((self.n_blocks, self.n_blocks), np.int64)
        random = self._random(0, 0)
        for block in range(self.n_blocks):
            table[block] = spread(int(sizes[block]), room, int(random.integers(int(room.sum()))))
            room -= table[block]
        return table

    def _random(self, kind: int, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, kind, index])


def spread(n: int, room: npt.NDArray[np.int64], offset: int) -> npt.NDArray[np.int64]:
    """Share n rows among buckets in proportion to the room they have left, with random rounding.

    Systematic sampling: no bucket gets more than it has room for, the sum is n, and each is within one of its
    exact share.

    Parameters
    ----------
    n : int
        Rows to share; at most the sum of `room`.
    room : ndarray of shape (n_buckets,)
        Rows that still fit into each bucket.
    offset : int
        Random, 0 <= offset < sum of `room`.

    >>> spread(6, np.array([4, 4, 4]), 5).tolist()
    [2, 2, 2]
    """
    total = int(room.sum())
    edges = np.concatenate([[0], np.cumsum(room)])
    # edges * n may exceed 64 bits only beyond 1e9 rows in blocks of 1e9
    return np.diff((edges * n + offset) // total)


def fits_one_pass(n_samples: int, row_bytes: int, beside_bytes: int, available: int) -> bool:
    """Tell whether the rows of a result can be picked one by one out of the files of the source.

    The rows must stay in the file cache while that goes on, and be long enough to be worth a read each; the order
    (four bytes a row) and everything that is aligned to the rows lie in memory.

    Parameters
    ----------
    n_samples, row_bytes : int
        Rows of the source and bytes of one.
    beside_bytes : int
        Bytes of everything aligned to the rows.
    available : int
        Bytes of memory that the file cache may take.

    >>> fits_one_pass(2_621_440, 1536, 0, 20 * 10**9), fits_one_pass(2_621_440, 1536, 0, 6 * 10**9)
    (True, False)
    >>> fits_one_pass(2_621_440, 256, 0, 20 * 10**9), fits_one_pass(10**6, 1536, 10**9, 20 * 10**9)
    (False, False)
    """
    held = 4 * n_samples + beside_bytes
    # half: what is written goes through the file cache as well, and others need memory too
    return row_bytes >= MIN_PICKED_BYTES and held <= MIN_BLOCK_BYTES and 2 * n_samples * row_bytes <= available


def plan_shuffle(
    n_samples: int, row_bytes: int, chunk_rows: int, seed: int, block_bytes: int | None = None
) -> ShufflePlan:
    """Cut a store into blocks of about `block_bytes`, at least a chunk.

    Parameters
    ----------
    n_samples : int
        Rows.
    row_bytes : int
        Bytes of a row with everything aligned to it.
    chunk_rows : int
        Rows of a chunk of the result.
    seed : int
        Decides the order, together with `block_bytes`.
    block_bytes : int, optional
        Default: `default_block_bytes`.

    >>> plan = plan_shuffle(1_000_000, 1536, 16384, seed=0)
    >>> plan.n_blocks, plan.n_chunks
    (13, 62)
    """
    size = default_block_bytes(n_samples * row_bytes) if block_bytes is None else block_bytes
    chunks = max(1, size // (row_bytes * chunk_rows))
    return ShufflePlan(n_samples, chunks * chunk_rows, chunk_rows, seed)
