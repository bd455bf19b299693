"""One BLAS thread inside a task: parallelism is over chunks, and one and two BLAS threads give different bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from threadpoolctl import ThreadpoolController

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_inside = 0
_limit: Any = None


@cache
def _controller() -> ThreadpoolController:
    """Find the BLAS libraries once: the search takes milliseconds, a task may take less."""
    return ThreadpoolController()


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread while any task of this process is inside.

    The limit of OpenBLAS belongs to the process, not to the thread. If every task saved and restored it, the
    first to leave would hand two threads to one still computing; so only the last one out restores it.
    """
    global _inside, _limit
    with _lock:
        if _inside == 0:
            _limit = _controller().limit(limits=1, user_api="blas")
            _limit.__enter__()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _limit.__exit__(None, None, None)
                _limit = None


def one_blas_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` inside `single_blas_thread`."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with single_blas_thread():
            return function(*args, **kwargs)

    return wrapper
