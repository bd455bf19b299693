"""The file of one chunk: read, checksummed, written and read back piece by piece, while the piece is in the cache.

One pass over memory instead of five: at the size of a chunk, each further pass costs about 0.08 s/GB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store import atomic
from dbksvd_dask.store._system import read_at, reserve, same_bytes, start_writeback
from dbksvd_dask.store.checksums import crc32c

# in the processor's cache together with what is read back; smaller writes cost more in the kernel
PIECE_BYTES = 3 << 18
# the disk starts before the chunk is complete; smaller steps cost more calls than they gain
WRITEBACK_BYTES = 1 << 23

Watch = Callable[[int, npt.NDArray[Any]], None]


class ReadBackError(OSError):
    """A file does not read back as it was written."""


@dataclass(frozen=True)
class Stream:
    """Rows of a chunk that are read while they are written, never all in memory.

    Attributes
    ----------
    shape : tuple of int
        Rows first, as of an array.
    dtype : dtype
        As stored.
    fill : callable
        Called with the first row and an array of shape (n, ...); fills it with the n rows from there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[int, npt.NDArray[Any]], None]

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> npt.NDArray[Any]:
        """Read all rows at once."""
        rows = np.empty(self.shape, self.dtype)
        self.fill(0, rows)
        return rows


Rows = npt.NDArray[Any] | Stream


def piece_rows(row_bytes: int) -> int:
    """Return the rows of a piece: a power of two, so pieces start at multiples of a page if rows do.

    >>> piece_rows(1536), piece_rows(4096), piece_rows(1 << 30)
    (512, 128, 1)
    """
    return 1 << max(1, PIECE_BYTES // max(1, row_bytes)).bit_length() - 1


def write_chunk_file(
    path: str,
    rows: Rows,
    pad: int = 0,
    *,
    folder: str,
    verify: bool = True,
    on_rows: Watch | None = None,
    durable: bool = False,
) -> int:
    """Write one file, whole or not at all; return the CRC-32C of its rows.

    Parameters
    ----------
    path : str
        The file, on a local disk.
    rows : C-contiguous ndarray, or Stream, of shape (n, ...)
        Its content.
    pad : int
        Zero bytes that follow; not part of the checksum.
    folder : str
        Where the scratch file is, on the same filesystem.
    verify : bool
        Read every piece back and compare it.
    on_rows : callable, optional
        Called with (first row, rows) before each piece is written.
    durable : bool
        Force the file to the disk before it gets its name.

    Raises
    ------
    ReadBackError
        When a piece does not read back; the file then does not get its name.
    """
    crc, done, started = 0, 0, 0
    step = _step(rows)
    buffers = np.empty((2, step, *rows.shape[1:]), rows.dtype)
    with atomic.staged(path, folder, durable=durable) as scratch, open(scratch, "w+b", buffering=0) as file:
        reserve(file.fileno(), rows.nbytes + pad)
        for first in range(0, len(rows), step):
            piece = _piece(rows, first, buffers[0])
            if on_rows is not None:
                on_rows(first, piece)
            content = piece.reshape(-1).view(np.uint8)
            crc = crc32c(content, crc)
            atomic.write_all(file, content.data)
            if verify and not _reads_back(file.fileno(), done, content, buffers[1]):
                raise ReadBackError(f"{path} does not read back as it was written")
            done += len(content)
            if done - started >= WRITEBACK_BYTES:
                start_writeback(file.fileno(), started, done - started)
                started = done
        atomic.write_all(file, memoryview(bytes(pad)))
        start_writeback(file.fileno(), started)
    return crc


def read_through(rows: Rows, on_rows: Watch | None = None) -> int:
    """Read rows piece by piece, without writing them; return their CRC-32C.

    Parameters
    ----------
    rows : C-contiguous ndarray, or Stream, of shape (n, ...)
    on_rows : callable, optional
        Called with (first row, rows) of each piece.
    """
    crc, step = 0, _step(rows)
    buffer = np.empty((step, *rows.shape[1:]), rows.dtype)
    for first in range(0, len(rows), step):
        piece = _piece(rows, first, buffer)
        if on_rows is not None:
            on_rows(first, piece)
        crc = crc32c(piece, crc)
    return crc


def _step(rows: Rows) -> int:
    """Return the rows of a piece of some rows."""
    return max(1, min(len(rows), piece_rows(rows.nbytes // max(1, len(rows)))))


def _piece(rows: Rows, first: int, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the rows from `first`, as many as fit the buffer."""
    if isinstance(rows, np.ndarray):
        return rows[first : first + len(buffer)]
    piece = buffer[: len(rows) - first]
    rows.fill(first, piece)
    return piece


def _reads_back(fd: int, start: int, content: npt.NDArray[np.uint8], buffer: npt.NDArray[Any]) -> bool:
    """Return whether a file has `content` at `start`."""
    found = buffer.reshape(-1).view(np.uint8)[: len(content)]
    return read_at(fd, found.data, start) == len(content) and same_bytes(found, content)
