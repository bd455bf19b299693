"""Which rows a batch reads: epochs, each in a new order; held-out rows; the warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dbksvd_dask.plan.seeds import EPOCH, VALIDATION, generator

# ---------------------------------------------------------------------------------------------- rows

# Rows are read in blocks. At least this many blocks make up a batch, so that a batch mixes many places ...
BLOCKS_PER_BATCH = 64
# ... but a block is no longer than this, 1.5 MB of 768 features in float16: whole reads from a disk or an object
# store, and at most this many blocks in all, so that their order is planned in megabytes.
BLOCK_ROWS, MOST_BLOCKS = 1024, 1 << 20
# Blocks from whose ends the rows for validation are taken.
VALIDATION_BLOCKS = 64


def block_rows(n_samples: int, batch_size: int) -> int:
    """Return the rows of one block that a fit reads; they do not depend on the chunks of the store.

    >>> block_rows(10**6, 65536), block_rows(20_011, 65536), block_rows(2000, 100), block_rows(8 << 30, 65536)
    (1024, 312, 1, 8192)
    """
    longest = max(BLOCK_ROWS, n_samples // MOST_BLOCKS)
    wanted = max(1, min(n_samples, batch_size) // BLOCKS_PER_BATCH)
    return longest if wanted >= BLOCK_ROWS else wanted


# A batch that doubles every other iteration has reached any batch_size by then.
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
        """Return rows `position` to `position + count` of the stream, across the ends of epochs."""
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
    order = generator(stream.seed, VALIDATION).permutation(stream.n_blocks)
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
    order = generator(stream.seed, EPOCH, epoch).permutation(stream.n_blocks)
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
    """Remove the rows set aside from contiguous, ascending rows."""
    inside = held[np.searchsorted(held, rows[0]) : np.searchsorted(held, rows[-1], side="right")]
    return np.delete(rows, inside - rows[0]) if inside.size else rows


# Rows of the first batch of a warm-up: per atom, and at least.
WARM_UP_ROWS_PER_ATOM = 4
WARM_UP_ROWS = 8192


def warm_up_rows(n_atoms: int) -> int:
    """Return the rows of the first batch of a warm-up: few, but enough to move every atom.

    >>> warm_up_rows(1024), warm_up_rows(4096)
    (8192, 16384)
    """
    return max(WARM_UP_ROWS, WARM_UP_ROWS_PER_ATOM * n_atoms)


def plan_stream(
    n_samples: int, batch_size: int, validation: int, seed: int, first_rows: int | None = None
) -> RowStream:
    """Plan the stream of a fit; `validation` is at most a tenth of the rows, so that small data can still train.

    >>> plan_stream(1000, 65536, 8192, 0).n_validation
    100
    """
    held = min(validation, n_samples // 10)
    return RowStream(n_samples, block_rows(n_samples, batch_size), batch_size, held, seed, first_rows)


def runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Split rows into contiguous runs (start, stop).

    >>> runs(np.array([4, 5, 6, 1, 2, 9]))
    [(4, 7), (1, 3), (9, 10)]
    """
    if rows.size == 0:
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.concatenate([[0], breaks])]
    ends = rows[np.concatenate([breaks - 1, [rows.size - 1]])]
    return [(int(a), int(b) + 1) for a, b in zip(starts, ends, strict=True)]


# ---------------------------------------------------------------------------------------------- first atoms


def initial_rows(n_train: int, n_atoms: int) -> np.ndarray:
    """Return the positions in the stream of the rows for ``init="data"``, spread over the first batch."""
    return np.linspace(0, n_train - 1, n_atoms).astype(np.int64)
