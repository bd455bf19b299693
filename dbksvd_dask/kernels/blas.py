"""One BLAS thread inside a task: parallelism is over chunks, and one and two BLAS threads give different bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from threadpoolctl import OpenBLASController, ThreadpoolController

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_inside = 0
_limit: Any = None


@cache
def _controller() -> ThreadpoolController:
    """Find the BLAS libraries once: the search takes milliseconds, a task may take less."""
    return ThreadpoolController()


def _let_this_thread_set_limits() -> None:
    """Let this thread set the limits of OpenBLAS.

    threadpoolctl (3.8, not 3.5) gives control to the first thread that sets a limit and silently ignores all
    others: a task would compute with two BLAS threads, or leave the process with one for good.
    """
    clear = getattr(OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread while any task of this process is inside.

    The limit of OpenBLAS belongs to the process, not to the thread. If every task saved and restored it, the
    first to leave would give two threads to a task that still computes; so only the last one out restores it.
    """
    global _inside, _limit
    with _lock:
        if _inside == 0:
            _let_this_thread_set_limits()
            _limit = _controller().limit(limits=1, user_api="blas")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _let_this_thread_set_limits()
                _limit.restore_original_limits()
                _let_this_thread_set_limits()  # the next thread may set its own
                _limit = None


def one_blas_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` inside `single_blas_thread`."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with single_blas_thread():
            return function(*args, **kwargs)

    return wrapper


def arithmetic() -> str:
    """Describe what decides the last bits of results: numpy, its BLAS kernels, the processor numba compiles for.

    Processes with the same description round the same way.
    """
    found = [info for info in _controller().info() if info["user_api"] == "blas"]
    own = [info for info in found if "numpy" in info["filepath"]] or found  # scipy may bring a BLAS of its own
    kernels = sorted({f"{i['internal_api']} {i['version']} {i.get('architecture', '')}".strip() for i in own})
    processor = numba.config.CPU_NAME or llvm.get_host_cpu_name()
    return ", ".join([f"numpy {np.__version__}", *kernels, f"numba {numba.__version__} for {processor}"])
