"""Files that are written, flushed to the disk a little later, and then dropped from memory."""

from __future__ import annotations

import os
import threading
from collections import deque

from dbksvd_dask.store._system import can_drop_pages, drop_pages, finish_writeback

# bytes in flight to the disk: enough to keep it busy; a small store stays in memory
DEPTH_BYTES = 1 << 29
# below this a file costs more in calls than its pages are worth
MIN_BYTES = 1 << 20


class WriteBehind:
    """Follows a writer of large files: flushes each one some files later and drops its pages.

    Files that are forced to the disk at the end need not fill the memory until then. The next file reuses the
    pages of a flushed one: fresh pages cost several times as much (2 against 0.25 s/GB on a virtual machine that
    gets them from its host, measured) and evict those of other programs. A writer that is faster than the disk
    waits here. Publishing still requires forcing the files to the disk.

    Parameters
    ----------
    depth : int, optional
        Bytes that may be in flight; default: `DEPTH_BYTES`.
    """

    def __init__(self, depth: int | None = None) -> None:
        self._depth, self._bytes = DEPTH_BYTES if depth is None else depth, 0
        self._under_way: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    def add(self, path: str, nbytes: int) -> None:
        """Register a written file and settle earlier ones; thread-safe.

        Raises
        ------
        OSError
            When an earlier file could not be written to the disk.
        """
        if nbytes < MIN_BYTES or not can_drop_pages():
            return
        arrived = []
        with self._lock:
            self._under_way.append((path, nbytes))
            self._bytes += nbytes
            while self._bytes > self._depth:
                oldest, size = self._under_way.popleft()
                self._bytes -= size
                arrived.append(oldest)
        for oldest in arrived:
            settle(oldest)


def settle(path: str) -> None:
    """Wait until a file is written, then drop its pages from memory; unwritten pages stay."""
    fd = os.open(path, os.O_RDONLY)
    try:
        finish_writeback(fd)
        drop_pages(fd)
    finally:
        os.close(fd)
