"""A worker's own threads inside one task.

On a cluster a task takes all chunks of its worker and computes them side by side; on a thread scheduler a task has
one chunk, and the tasks run side by side. Results never depend on the number of threads.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def own_threads() -> int:
    """Return the threads of the worker that runs this task; 1 in a task that no distributed worker runs."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return 1
    try:
        return int(distributed.get_worker().state.nthreads)
    except ValueError:  # not in a task of a worker
        return 1


def each(function: Callable[[S], T], items: Iterable[S], threads: int | None = None) -> Iterator[T]:
    """Call a function for every item on threads, by default those of this worker; yield the results in order.

    The function must not call `each` itself. After an error no further item is begun.
    """
    items = list(items)
    threads = min(len(items), own_threads() if threads is None else threads)
    if threads <= 1:
        yield from map(function, items)
        return
    futures = deque(_pool(threads).submit(function, item) for item in items)
    try:
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of that many threads, one for all tasks of the process."""
    with _lock:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads, "dbksvd-chunks")
        return _pools[threads]
