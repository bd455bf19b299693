"""Calls that not every operating system has, each with a portable fallback.

| Function | Call | Fallback |
|---|---|---|
| `read_at` | `preadv` | `pread` and an extra copy |
| `same_bytes` | `memcmp` | `np.array_equal`, half as fast |
| `reserve` | `fallocate` | nothing: room is found as the file grows |
| `start_writeback` | `sync_file_range` | nothing: the kernel starts when it chooses |
| `finish_writeback` | `sync_file_range` | `fsync`, which waits longer |
| `drop_pages` | `posix_fadvise` | nothing: the kernel keeps the pages; see `can_drop_pages` |
| `is_cached` | `preadv2` with `RWF_NOWAIT` | False: unknown |
| `release_bytes` | `fallocate` that punches a hole | nothing: the file keeps its room |
| `map_file` | `MAP_POPULATE` | pages are faulted in one by one |

Results never depend on which one is used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _c_function(name: str, *arguments: Any) -> Any:
    """Return a function of the C library; None if it does not exist."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = arguments
    return function


_MEMCMP = _c_function("memcmp", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FALLOCATE = _c_function("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH_HOLE = 3  # from <linux/falloc.h>: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_PAGE = 4096  # filesystems release whole blocks; those of ext4 and XFS are of this size
_SYNC_FILE_RANGE = _c_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE, _SYNC_FILE_RANGE_ALL = 2, 7  # from <fcntl.h>; all: wait before, write, wait after


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read bytes of an open file, starting at `offset`, into `view`.

    Returns
    -------
    int
        Bytes read: all of `view`, or fewer if the file ends first.
    """
    done = 0
    while done < len(view):  # one call reads at most 2 GB
        n = _read_some(fd, view[done:], offset + done)
        if n == 0:
            break
        done += n
    return done


def _read_some(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    content = os.pread(fd, len(view), offset)
    view[: len(content)] = content
    return len(content)


def same_bytes(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> bool:
    """Return whether two contiguous arrays of bytes are the same.

    Uses the C library: `np.array_equal` takes twice as long, because it records where they differ.
    """
    if _MEMCMP is None:
        return np.array_equal(a, b)
    return len(a) == len(b) and _MEMCMP(a.ctypes.data, b.ctypes.data, len(a)) == 0


def reserve(fd: int, nbytes: int) -> None:
    """Reserve room on the disk for a new file.

    The kernel then does not allocate page by page, which saves a fifth of the time to write a chunk. Not
    `os.posix_fallocate`, which writes zeros where the filesystem cannot reserve.

    Raises
    ------
    OSError
        When the disk is full.
    """
    if _FALLOCATE is not None and _FALLOCATE(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in NO_ROOM:
            raise OSError(code, os.strerror(code))


def release_bytes(path: str, start: int, stop: int) -> bool:
    """Give the room of bytes [start, stop) of a file back to the disk; they read as zeros afterwards.

    Whole blocks only: that of `start` is included, because what precedes it was released before; that of `stop`
    is not.

    Returns
    -------
    bool
        Whether the filesystem can do this.
    """
    first, last = start // _PAGE * _PAGE, stop // _PAGE * _PAGE
    if _FALLOCATE is None:
        return False
    fd = os.open(path, os.O_WRONLY)
    try:
        return first == last or _FALLOCATE(fd, _PUNCH_HOLE, first, last - first) == 0
    finally:
        os.close(fd)


def can_release(folder: str) -> bool:
    """Return whether files in a folder can give room back; see `release_bytes`."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(2 * _PAGE))
        file.flush()
        return release_bytes(file.name, 0, _PAGE)


def start_writeback(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Start writing a file to the disk, without waiting: forcing it later then takes less time.

    Parameters
    ----------
    fd : int
        The open file.
    offset, nbytes : int
        Which bytes; with `nbytes=0` all from `offset` on.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def finish_writeback(fd: int) -> None:
    """Wait until the content of a file has been handed to the disk.

    Unlike `fsync`, does not wait for the journal or the cache of the disk: quick, but not yet durable.

    Raises
    ------
    OSError
        When the content could not be written. The kernel may not report it again to a later `fsync`.
    """
    if _SYNC_FILE_RANGE is None:
        os.fsync(fd)
    elif _SYNC_FILE_RANGE(fd, 0, 0, _SYNC_FILE_RANGE_ALL):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def can_drop_pages() -> bool:
    """Return whether `drop_pages` has an effect on this system."""
    return hasattr(os, "posix_fadvise")


def drop_pages(fd: int) -> None:
    """Drop the pages of a file from the file cache; those not yet written to the disk stay."""
    if can_drop_pages():
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(fd: int, buffer: bytearray, offset: int) -> bool:
    """Return whether `len(buffer)` bytes of a file from `offset` are in the file cache; False if unknown."""
    if not hasattr(os, "RWF_NOWAIT") or not hasattr(os, "preadv"):
        return False
    try:
        return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT) == len(buffer)
    except OSError:  # not cached, or a filesystem that cannot tell
        return False


def map_file(fd: int) -> npt.NDArray[np.uint8]:
    """Map a whole file for reading; the map lives as long as the array."""
    populate = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, not one by one as they are touched
    return np.frombuffer(mmap.mmap(fd, 0, mmap.MAP_SHARED | populate, mmap.PROT_READ), np.uint8)
