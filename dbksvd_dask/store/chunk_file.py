"""The file of one chunk: summed up, written and read back in pieces, while the processor's cache has the piece.

One pass over memory instead of three: at the sizes of chunks each further one costs about 0.08 s/GB.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store import atomic
from dbksvd_dask.store.checksums import crc32c, same_bytes

# in the processor's cache together with what is read back; smaller writes cost more in the kernel
PIECE_BYTES = 1 << 20


class ReadBackError(OSError):
    """A file does not read back as it was written."""


def write_chunk_file(
    path: str, content: npt.NDArray[np.uint8], pad: int = 0, *, folder: str, verify: bool = True
) -> int:
    """Write one file, whole or not at all; return the CRC-32C of its content.

    Parameters
    ----------
    path : str
        The file, on a local disk.
    content : ndarray of uint8, shape (n,)
        Its bytes.
    pad : int
        Zeros that follow; not part of the checksum.
    folder : str
        Where the scratch file lies, on the same filesystem.
    verify : bool
        Read every piece back and compare it.

    Raises
    ------
    ReadBackError
        When a piece does not read back; the file then does not get its name.
    """
    crc = 0
    buffer = np.empty(min(len(content), PIECE_BYTES), np.uint8)
    with atomic.staged(path, folder, durable=False) as scratch, open(scratch, "w+b", buffering=0) as file:
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            crc = crc32c(piece, crc)
            atomic.write_all(file, piece.data)
            if verify and not _reads_back(file.fileno(), start, piece, buffer):
                raise ReadBackError(f"{path} does not read back as it was written")
        atomic.write_all(file, memoryview(bytes(pad)))
        atomic.start_writeback(file.fileno())
    return crc


def _reads_back(fd: int, start: int, piece: npt.NDArray[np.uint8], buffer: npt.NDArray[np.uint8]) -> bool:
    """Tell whether a file has `piece` at `start`."""
    found = buffer[: len(piece)]
    return os.preadv(fd, [found.data], start) == len(piece) and same_bytes(found, piece)
