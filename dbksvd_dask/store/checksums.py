"""Bytes of arrays and files: compared, and summed up in CRC-32."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError


def bytes_of(block: npt.NDArray[Any]) -> memoryview:
    """Look at a C-contiguous array as bytes."""
    return block.reshape(-1).view(np.uint8).data


def same_bytes(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> bool:
    """Tell whether two arrays of equally many bytes are the same, eight at a time."""
    words = len(a) // 8 * 8
    head = np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64))
    return head and np.array_equal(a[words:], b[words:])


def file_equals(path: str, content: memoryview) -> bool:
    """Tell whether a file begins with `content`."""
    buffer = np.empty(min(len(content), 1 << 20), np.uint8)
    with open(path, "rb", buffering=0) as file:
        while content:
            n = file.readinto(buffer[: len(content)].data)
            if not n or not same_bytes(buffer[:n], np.frombuffer(content[:n], np.uint8)):
                return False
            content = content[n:]
    return True


def file_crc(path: str, length: int, size: int) -> int:
    """Return the CRC-32 of the first `length` bytes of a file that must have `size` bytes."""
    crc, buffer = 0, memoryview(bytearray(min(length, 1 << 20)))
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise StoreError(f"{path} does not have {size} bytes")
        while length:
            n = file.readinto(buffer[: min(length, len(buffer))])
            if not n:
                raise StoreError(f"{path} ended while it was read")
            crc, length = zlib.crc32(buffer[:n], crc), length - n
    return crc
