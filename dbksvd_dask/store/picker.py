"""Rows picked from anywhere in a local store: fast while its files are in the file cache."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store._system import is_cached, map_file
from dbksvd_dask.store.reader import RowReader

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_PAGE = 4096


class RowPicker:
    """Reads rows in any order out of the files of a local uncompressed store; all of them stay open until `close`.

    A small store is mapped, which takes a quarter of the time of a read per row. Mapped pages count as memory of
    the process, which is promised to be bounded: beyond `most_mapped` bytes every row is a small read.

    Parameters
    ----------
    reader : RowReader
        The store; see `can_pick`.
    most_mapped : int
        Bytes of the largest store that is mapped.

    Raises
    ------
    StoreError
        When a chunk is missing or has the wrong size.
    """

    def __init__(self, reader: RowReader, most_mapped: int = 0) -> None:
        self._reader = reader
        self._fds = np.full(reader.n_chunks, -1, np.int32)
        self._maps: list[npt.NDArray[np.uint8]] = []
        try:
            for chunk in range(reader.n_chunks):
                self._fds[chunk] = reader.open_chunk(chunk)
        except BaseException:
            self.close()
            raise
        if reader.nbytes <= most_mapped:
            self._maps = [map_file(int(fd)) for fd in self._fds]
        self._addresses = np.array([view.ctypes.data for view in self._maps], np.uint64)

    def pick(self, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Read rows; thread-safe.

        Parameters
        ----------
        rows : ndarray of int64, shape (n,)
            Which rows.
        out : ndarray of shape (n, n_features), C-contiguous, of the dtype as stored
            Filled with them.
        """
        # imported here: numba takes half a second, which most jobs do not need
        from dbksvd_dask.store.small_reads import copy_each, read_each

        reader = self._reader
        assert out.shape == (len(rows), reader.n_features)
        assert out.flags.c_contiguous
        copy, files = (copy_each, self._addresses) if self._maps else (read_each, self._fds)
        failed = copy(files, reader.chunk_rows, reader.row_bytes, rows, out.ctypes.data)
        if failed >= 0:
            raise StoreError(f"row {rows[failed]} of {reader.path} cannot be read; is the disk failing?")

    def close(self) -> None:
        """Close the files; nothing may be picked afterwards."""
        self._maps = []  # a map is closed with its last reference
        for fd in self._fds[self._fds >= 0].tolist():
            os.close(fd)
        self._fds[:] = -1


def in_file_cache(reader: RowReader) -> bool:
    """Return whether the files of a local uncompressed store are in the file cache; False if unknown.

    Probes three pages of every chunk without waiting for the disk.
    """
    size = reader.chunk_rows * reader.row_bytes
    page = bytearray(min(_PAGE, size))
    places = (0, (size - len(page)) // 2, size - len(page))
    for chunk in range(reader.n_chunks):
        fd = reader.open_chunk(chunk)
        try:
            if not all(is_cached(fd, page, place) for place in places):
                return False
        finally:
            os.close(fd)
    return True


def can_pick(reader: RowReader) -> bool:
    """Return whether the rows of a store are plain bytes in local files, one per chunk, and not too many."""
    if not reader.one_file_per_chunk or reader.n_chunks > files_to_open():
        return False
    return reader.complete or all(os.path.exists(reader.chunk_file(i)) for i in range(reader.n_chunks))


def files_to_open() -> int:
    """Return how many files may be kept open: half of what this process is allowed; 0 when unknown."""
    if resource is None:
        return 0
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed // 2


def memory_for_files() -> int:
    """Return the bytes of memory that the file cache may take without evicting programs; 0 when unknown."""
    try:
        with open("/proc/meminfo") as file:
            found = dict(line.split(":", 1) for line in file)
        available = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
    try:  # of a container: the cache counts towards its limit
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(available, int(file.read()))
    except (OSError, ValueError):
        return available
