"""Running the parts of a job on a few threads with a bounded number of them in memory."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import MismatchError, StoreError

T = TypeVar("T")

# where parts are loaded whole: reading is a small part of the work and happens in the caller
N_THREADS = 2
# more would only wait for one disk, and each may hold a chunk
MOST_THREADS = 8


def storing_threads() -> int:
    """Return how many threads keep the cores busy with chunks: one each, at least two, since one waits at times.

    One more than cores was slower, also where they wait: 2.1 against 1.8 s for an import of 4 GB on two cores.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(usable, 2), MOST_THREADS)


def run_bounded(
    parts: Iterable[int],
    load: Callable[[int], T],
    store: Callable[[int, T], None],
    on_done: Callable[[int], None],
    n_threads: int = N_THREADS,
) -> int:
    """Load parts one after the other in this thread and store them in others.

    At most `n_threads` + 1 loaded parts exist at any time. When one fails, the others in flight are finished and
    the error is raised.

    Parameters
    ----------
    parts : iterable of int
        What to do, in this order.
    load : callable
        Called with a part; returns its content.
    store : callable
        Called with a part and its content; stores it.
    on_done : callable
        Called with each stored part, in order, in this thread.
    n_threads : int
        Threads that store.

    Returns
    -------
    int
        How many parts were done.
    """
    pending: deque[tuple[int, Future[None]]] = deque()
    count = 0
    with ThreadPoolExecutor(n_threads) as pool:  # leaving it waits for parts in flight
        for part in parts:
            content = load(part)
            if len(pending) >= n_threads:
                count += _settle(pending, on_done)
            pending.append((part, pool.submit(store, part, content)))
            del content
        while pending:
            count += _settle(pending, on_done)
    return count


def _settle(pending: deque[tuple[int, Future[None]]], on_done: Callable[[int], None]) -> int:
    part, future = pending.popleft()
    future.result()
    on_done(part)
    return 1


def begin_or_resume(begin: Callable[[bool], T], force: bool) -> T:
    """Resume unfinished work; start again if its description differs and `force` allows it.

    Parameters
    ----------
    begin : callable
        Called with whether to resume; raises `MismatchError` if the unfinished work is another, `StoreError` if
        it is damaged.
    force : bool
        Replace other work.
    """
    try:
        return begin(True)
    except (MismatchError, StoreError):
        if not force:
            raise
        return begin(False)


class Buffers:
    """Reused memory: touching fresh pages costs more than filling them with rows."""

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of that shape with arbitrary content; `give` it back when done."""
        needed = math.prod(shape) * dtype.itemsize
        with self._lock:
            # not one far too large: a caller that needs that much would have to allocate it again
            fitting = [b for b in self._free if needed <= b.nbytes <= 2 * needed]
            found = min(fitting, key=lambda b: b.nbytes) if fitting else np.empty(needed, np.uint8)
            self._free = [b for b in self._free if b is not found]
        return found[:needed].view(dtype).reshape(shape)

    def give(self, array: npt.NDArray[Any]) -> None:
        """Hand an array back."""
        base: Any = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        with self._lock:
            self._free.append(base)
