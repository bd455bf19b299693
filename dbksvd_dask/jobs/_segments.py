"""The scratch files between the two passes of a shuffle: one per block and array, with a segment per bucket.

Pass 2 takes the segments of one bucket after the other, so the files shrink from their start on: `release` gives
the room of segments that are no longer needed back to the disk. The result and the scratch files together then
take little more than one copy of the store, where the filesystem can do it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import _system, atomic
from dbksvd_dask.store.checksums import bytes_of, crc32c
from dbksvd_dask.store.reader import RowReader

# rows are gathered and written this many bytes at a time, so that the gathered copy stays in the cache
SLAB_BYTES = 1 << 22


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
        self._released = 0  # buckets whose segments are given back, from the first on

    def file(self, block: int, name: str) -> str:
        """Return the path of the file of a block."""
        return os.path.join(self._folder, f"{block:08d}.{name}")

    def write(self, block: int, name: str, rows: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> list[int]:
        """Write the rows of a block in another order; return the CRC-32C of every segment."""
        with atomic.staged(self.file(block, name), durable=False) as scratch:
            return _write_permuted(str(scratch), rows, order, self._ends[block])

    def are_whole(self, block: int, crcs: Any, buckets: Iterable[int]) -> bool:
        """Return whether the segments of a block for some buckets are as they were written.

        Parameters
        ----------
        block : int
        crcs : dict of str to list of int
            What `write` returned, by array.
        buckets : iterable of int
        """
        wanted = list(buckets)
        if not isinstance(crcs, dict) or crcs.keys() != self._row_bytes.keys():
            return False
        try:
            return all(self._crc(block, name, bucket) == crcs[name][bucket] for name in crcs for bucket in wanted)
        except (OSError, LookupError, TypeError):
            return False

    def _crc(self, block: int, name: str, bucket: int) -> int:
        content = np.empty(int(self._counts[block, bucket]) * self._row_bytes[name], np.uint8)
        self._read(block, name, bucket, content)
        return crc32c(content)

    def load(self, bucket: int, name: str, rows: npt.NDArray[Any]) -> None:
        """Fill an array with the rows of a bucket, segment by segment."""
        filled = 0
        for block, n in enumerate(self._counts[:, bucket].tolist()):
            self._read(block, name, bucket, rows[filled : filled + n])
            filled += n

    def _read(self, block: int, name: str, bucket: int, target: npt.NDArray[Any]) -> None:
        path = self.file(block, name)
        offset = int(self._ends[block, bucket] - self._counts[block, bucket]) * self._row_bytes[name]
        with open(path, "rb", buffering=0) as file:
            n = _system.read_at(file.fileno(), bytes_of(target), offset)
        if n < target.nbytes:
            raise StoreError(f"{path} ended at byte {offset + n}; delete the scratch folder and run again")

    def release(self, n_buckets: int) -> None:
        """Give the room of the segments of the first `n_buckets` buckets back, if the filesystem can do that."""
        if n_buckets <= self._released:
            return
        for name, row_bytes in self._row_bytes.items():
            for block in range(len(self._ends)):
                start = 0 if self._released == 0 else int(self._ends[block, self._released - 1]) * row_bytes
                stop = int(self._ends[block, n_buckets - 1]) * row_bytes
                if not _system.release_bytes(self.file(block, name), start, stop):
                    return
        self._released = n_buckets


def _write_permuted(
    path: str, rows: npt.NDArray[Any], order: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> list[int]:
    """Write rows in another order; return the CRC-32C of each segment that ends before a row of `ends`."""
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
    return crcs
