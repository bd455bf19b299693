"""Files that are written, handed to the disk a little later, and then let go from memory."""

from __future__ import annotations

import os
import threading
from collections import deque

from dbksvd_dask.store._system import can_drop_pages, drop_pages, finish_writeback

# bytes under way to the disk: enough to keep it busy while more are made; a small store stays in memory
DEPTH_BYTES = 1 << 29
# below this a file costs more in calls than its pages are worth
MIN_BYTES = 1 << 20


class WriteBehind:
    """Follows a writer of large files: waits for each, some files later, and lets its pages go.

    What is forced to the disk at the end anyway need not fill the memory until then. The next file gets the
    pages of one that has arrived: fresh pages cost several times as much (0.25 against 2 s/GB on a virtual
    machine that fetches them from its host, measured), and push out what other programs have in memory. A writer
    that is faster than the disk waits here. Whoever publishes the files still has to force them to the disk.

    Parameters
    ----------
    depth : int, optional
        Bytes that may be under way; default: `DEPTH_BYTES`.
    """

    def __init__(self, depth: int | None = None) -> None:
        self._depth, self._bytes = DEPTH_BYTES if depth is None else depth, 0
        self._under_way: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    def add(self, path: str, nbytes: int) -> None:
        """Take note of a file that was written; an earlier one is settled. From any thread.

        Raises
        ------
        OSError
            When the earlier file could not be brought to the disk.
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
    """Wait until a file is written and let its pages in memory go; what was not written stays."""
    fd = os.open(path, os.O_RDONLY)
    try:
        finish_writeback(fd)
        drop_pages(fd)
    finally:
        os.close(fd)
