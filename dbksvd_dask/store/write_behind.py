"""Files that are written, handed to the disk a little later, and then let go from memory."""

from __future__ import annotations

import os
import threading
from collections import deque

from dbksvd_dask.store import atomic

# files under way to the disk: enough to keep it busy while the next ones are made
DEPTH = 3
# below this a file costs more in calls than its pages are worth
MIN_BYTES = 1 << 20


class WriteBehind:
    """Follows a writer of large files: waits for each, `depth` files later, and lets its pages go.

    What is forced to the disk at the end anyway need not fill the memory until then. The next file gets the
    pages of one that has arrived: fresh pages cost several times as much (0.25 against 2 s/GB on a virtual
    machine that fetches them from its host, measured), and push out what other programs have in memory. A writer
    that is faster than the disk waits here. Whoever publishes the files still has to force them to the disk.

    Parameters
    ----------
    depth : int
        Files that may be under way.
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._under_way: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, path: str, nbytes: int) -> None:
        """Take note of a file that was written; an earlier one is settled. From any thread.

        Raises
        ------
        OSError
            When the earlier file could not be brought to the disk.
        """
        if nbytes < MIN_BYTES or not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            self._under_way.append(path)
            oldest = self._under_way.popleft() if len(self._under_way) > self._depth else None
        if oldest is not None:
            settle(oldest)


def settle(path: str) -> None:
    """Wait until a file is written and let its pages in memory go; what was not written stays."""
    fd = os.open(path, os.O_RDONLY)
    try:
        atomic.finish_writeback(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
