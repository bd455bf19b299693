"""The scratch files between the two passes of a shuffle: one per block and array, with a segment per bucket.

The CRC-32C of every segment, as little-endian uint32, follows the rows. Pass 2 takes the segments of one bucket
after the other, and `release` gives their room back to the disk. The result and the scratch files together then
take little more than one copy of the store, where the filesystem can do it. A segment is compared with its
checksum when it is read: a power failure may have lost it, and another process that has written its bucket may
have released it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import _system, atomic
from dbksvd_dask.store.checksums import bytes_of, crc32c
from dbksvd_dask.store.reader import RowReader

# rows are gathered and written this many bytes at a time, so that the gathered copy stays in the cache
SLAB_BYTES = 1 << 22
CRC = np.dtype("<u4")


class SegmentLostError(StoreError):
    """A segment is not as it was written, or was released.

    Attributes
    ----------
    block : int
        The block that it came from.
    """

    def __init__(self, block: int) -> None:
        super().__init__(f"the scratch file of block {block} is not as it was written")
        self.block = block


class Segments:
    """Files of permuted blocks.

    Parameters
    ----------
    folder : str
    counts : ndarray of shape (n_blocks, n_buckets)
        Rows of every segment.
    readers : dict of RowReader
        The arrays, by name.
    """

    def __init__(self, folder: str, counts: npt.NDArray[np.int64], readers: Mapping[str, RowReader]) -> None:
        self._folder, self._counts = folder, counts
        self._row_bytes = {name: reader.row_bytes for name, reader in readers.items()}
        self._ends = np.cumsum(counts, axis=1)
        self._can_release = True

    def file(self, block: int, name: str) -> str:
        """Return the path of the file of a block."""
        return os.path.join(self._folder, f"{block:08d}.{name}")

    def write(self, block: int, name: str, rows: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> None:
        """Write the rows of a block in another order, and the checksums of the segments."""
        with atomic.staged(self.file(block, name), durable=False) as scratch:
            _write_permuted(str(scratch), rows, order, self._ends[block])

    def load(self, bucket: int, name: str, rows: npt.NDArray[Any]) -> None:
        """Fill an array with the rows of a bucket, segment by segment.

        Raises
        ------
        SegmentLostError
            When a segment is not as it was written.
        """
        filled = 0
        for block, n in enumerate(self._counts[:, bucket].tolist()):
            if not self._read(block, name, bucket, rows[filled : filled + n]):
                raise SegmentLostError(block)
            filled += n

    def _read(self, block: int, name: str, bucket: int, target: npt.NDArray[Any]) -> bool:
        """Fill an array with a segment; return whether it is as it was written."""
        ends, row_bytes, crc = self._ends[block], self._row_bytes[name], np.empty(1, CRC)
        start = (int(ends[bucket]) - len(target)) * row_bytes
        try:
            with open(self.file(block, name), "rb", buffering=0) as file:
                fd = file.fileno()
                n = _system.read_at(fd, bytes_of(target), start)
                n += _system.read_at(fd, bytes_of(crc), int(ends[-1]) * row_bytes + bucket * CRC.itemsize)
        except FileNotFoundError:
            return False
        return n == target.nbytes + CRC.itemsize and crc32c(target) == int(crc[0])

    def release(self, bucket: int) -> None:
        """Give the room of the segments of a bucket back, if the filesystem can do that."""
        for name, row_bytes in self._row_bytes.items():
            for block in range(len(self._ends)):
                stop = int(self._ends[block, bucket])
                start = stop - int(self._counts[block, bucket])
                if not self._can_release:
                    return
                self._can_release = _system.release_bytes(
                    self.file(block, name), start * row_bytes, stop * row_bytes
                )


def _write_permuted(
    path: str, rows: npt.NDArray[Any], order: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> None:
    """Write rows in another order, then the CRC-32C of each segment that ends before a row of `ends`."""
    step = max(1, SLAB_BYTES // max(1, rows.shape[1] * rows.dtype.itemsize))
    slab = np.empty((min(step, len(rows)), rows.shape[1]), rows.dtype)
    crcs, starts = [0] * len(ends), ends - np.diff(ends, prepend=0)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(rows), step):
            part = order[start : start + step]
            np.take(rows, part, axis=0, out=slab[: len(part)], mode="clip")
            first, last = np.searchsorted(ends, [start, start + len(part) - 1], "right").tolist()
            for i in range(first, last + 1):
                low, high = max(int(starts[i]) - start, 0), min(int(ends[i]) - start, len(part))
                crcs[i] = crc32c(slab[low:high], crcs[i])
            atomic.write_all(file, bytes_of(slab[: len(part)]))
        atomic.write_all(file, bytes_of(np.array(crcs, CRC)))
