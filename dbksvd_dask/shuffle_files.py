"""The scratch files of a shuffle of two passes: where they lie, how they are written and read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store import atomic, remote
from dbksvd_dask.store.checksums import bytes_of, crc32c
from dbksvd_dask.store.remote import PathLike

# rows are gathered and written this many bytes at a time, so that the gathered copy stays in the cache
SLAB_BYTES = 1 << 22


def scratch_folder(path: str, scratch: PathLike | None) -> str:
    """Return where pass 1 lays its segments: beside the result, or in a local folder for a remote one."""
    if scratch is None and not remote.is_remote(path):
        return f"{path}.scratch{atomic.PARTIAL_SUFFIX}"
    home = tempfile.gettempdir() if scratch is None else os.fspath(scratch)
    # the name follows from the result, so that the next run finds it
    return os.path.join(home, f"dbksvd-shuffle-{hashlib.sha256(path.encode()).hexdigest()[:16]}")


def write_permuted(path: str, rows: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> int:
    """Write rows in another order; return the CRC-32C of what was written."""
    step = max(1, SLAB_BYTES // max(1, rows.shape[1] * rows.dtype.itemsize))
    slab = np.empty((min(step, len(rows)), rows.shape[1]), rows.dtype)
    crc = 0
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(rows), step):
            part = order[start : start + step]
            np.take(rows, part, axis=0, out=slab[: len(part)], mode="clip")
            crc = crc32c(slab[: len(part)], crc)
            view = bytes_of(slab[: len(part)])
            while view:
                view = view[file.write(view) :]
    return crc


def read_at(path: str, offset: int, target: npt.NDArray[Any]) -> None:
    """Fill a C-contiguous array with the bytes of a file from `offset` on."""
    view = bytes_of(target)
    fd = os.open(path, os.O_RDONLY)
    try:
        while view:
            n = os.preadv(fd, [view], offset)
            if n == 0:
                raise OSError(f"{path} ended at byte {offset}; delete the scratch folder and run again")
            view, offset = view[n:], offset + n
    finally:
        os.close(fd)
