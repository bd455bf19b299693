"""Rows picked from anywhere in a local store: quick as long as the file cache holds its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import remote
from dbksvd_dask.store.rows import RowReader

_PAGE = 4096


def pick_rows(reader: RowReader, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    """Read rows in any order, one small read each, out of the files of a local uncompressed store.

    Not by a memory map: mapped pages count as memory of the process, and the promise is a bounded one.

    Parameters
    ----------
    reader : RowReader
        The store; `raw` and not remote.
    rows : ndarray of int64, shape (n,)
        Which rows.
    out : ndarray of shape (n, n_features), C-contiguous, of the dtype as stored
        Where they go.

    Raises
    ------
    StoreError
        When a chunk is missing or short.
    """
    from dbksvd_dask.store.small_reads import read_each  # numba: half a second that most jobs need not wait for

    assert out.shape == (len(rows), reader.n_features)
    assert out.flags.c_contiguous
    places = np.argsort(rows)
    ascending = rows[places]
    row_bytes = reader.n_features * reader.stored.itemsize
    for chunk, start, stop in _runs(ascending, reader.chunk_rows):
        within = ascending[start:stop] - chunk * reader.chunk_rows
        fd = reader.open_chunk(chunk)
        try:
            failed = read_each(fd, row_bytes, within, places[start:stop], out.ctypes.data)
        finally:
            os.close(fd)
        if failed >= 0:
            raise StoreError(
                f"row {ascending[start + failed]} of {reader.path} cannot be read; is the disk failing?"
            )


def _runs(ascending: npt.NDArray[np.int64], chunk_rows: int) -> Iterator[tuple[int, int, int]]:
    """Split ascending rows by chunk: (chunk, first index, index after the last)."""
    chunks = np.unique(ascending // chunk_rows)
    edges = np.searchsorted(ascending, chunks * chunk_rows)
    return zip(chunks.tolist(), edges.tolist(), [*edges[1:].tolist(), len(ascending)], strict=True)


def in_file_cache(reader: RowReader) -> bool:
    """Tell whether the files of a local uncompressed store lie in the file cache; False when it cannot be told.

    Looks at three pages of every chunk without waiting for the disk.
    """
    size = reader.chunk_rows * reader.n_features * reader.stored.itemsize
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    page = bytearray(min(_PAGE, size))
    places = (0, (size - len(page)) // 2, size - len(page))
    for chunk in range(reader.n_chunks):
        fd = reader.open_chunk(chunk)
        try:
            if any(os.preadv(fd, [page], place, os.RWF_NOWAIT) != len(page) for place in places):
                return False
        except OSError:  # not there, or a filesystem that cannot tell
            return False
        finally:
            os.close(fd)
    return True


def can_pick(reader: RowReader) -> bool:
    """Tell whether the rows of a store lie in local files as plain bytes, every chunk in a file."""
    if not reader.raw or remote.is_remote(reader.path):
        return False
    return reader.complete or all(os.path.exists(reader.chunk_file(i)) for i in range(reader.n_chunks))


def memory_for_files() -> int:
    """Return the bytes of memory that the file cache may take without pushing programs out; 0 when unknown."""
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
