"""Large arrays whose memory is reused.

A round writes each chunk's residual to a new array. The C library returns blocks above 32 MB to the system as
soon as they are freed, so every round would pay for fresh, zeroed pages: more time than the refresh itself takes
on a machine whose memory is too fragmented for huge pages. The pool keeps the blocks and hands them out again once
nothing refers to them. To a task the result is a new array of its own.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

# Below this size the C library recycles blocks itself.
_SMALLEST = 16 * 2**20
# Idle blocks kept, over all sizes: two per core of an ordinary machine.
_MOST_IDLE = 8

_lock = threading.Lock()
_blocks: list[np.ndarray] = []


def _references(blocks: list[np.ndarray], i: int) -> int:
    """Count the references to a block; every view of it holds one."""
    return sys.getrefcount(blocks[i])


# References to a block that only the pool knows; measured, since it depends on the interpreter.
_IDLE = _references([np.empty(1, np.uint8)], 0)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialised array, as `np.empty` does; a large one may lie in reused memory.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype
    """
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if nbytes < _SMALLEST:
        return np.empty(shape, dtype)
    with _lock:
        block = _take(nbytes)
        return block.view(dtype).reshape(shape)


def _take(nbytes: int) -> np.ndarray:
    """Return an idle block of that size or a new one; release idle ones beyond the limit."""
    idle = [i for i in range(len(_blocks)) if _references(_blocks, i) <= _IDLE]
    fitting = [i for i in idle if _blocks[i].nbytes == nbytes]
    if fitting:
        return _blocks[fitting[-1]]
    for i in reversed(idle[: max(0, len(idle) - _MOST_IDLE + 1)]):
        del _blocks[i]
    _blocks.append(np.empty(nbytes, np.uint8))
    return _blocks[-1]


def clear() -> None:
    """Return idle memory to the system; arrays in use are not touched."""
    with _lock:
        for i in reversed(range(len(_blocks))):
            if _references(_blocks, i) <= _IDLE:
                del _blocks[i]
