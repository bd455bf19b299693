"""Large arrays whose memory is used again.

A round writes each chunk's residual to a new array. The C library returns blocks above 32 MB to the system as
soon as they are freed, so every round would pay for fresh, zeroed pages: more time than the refresh itself takes
on a machine whose memory is too fragmented for huge pages. Here the blocks are kept and handed out again once
nothing refers to them any more. A task still sees nothing but a new array of its own.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

# Below this the C library recycles blocks by itself.
_SMALLEST = 16 * 2**20
# Idle blocks that are kept, over all sizes: two per core of an ordinary machine.
_MOST_IDLE = 8

_lock = threading.Lock()
_blocks: list[np.ndarray] = []


def _references(blocks: list[np.ndarray], i: int) -> int:
    """References to a block; a view, or a view of a view, holds one."""
    return sys.getrefcount(blocks[i])


# What a block has that only the pool knows; measured, since it depends on the interpreter.
_IDLE = _references([np.empty(1, np.uint8)], 0)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised array, as `np.empty`; large ones may lie in memory that was used before.

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
    """An idle block of that size or a new one; idle ones beyond the limit are let go."""
    idle = [i for i in range(len(_blocks)) if _references(_blocks, i) <= _IDLE]
    fitting = [i for i in idle if _blocks[i].nbytes == nbytes]
    if fitting:
        return _blocks[fitting[-1]]
    for i in reversed(idle[: max(0, len(idle) - _MOST_IDLE + 1)]):
        del _blocks[i]
    _blocks.append(np.empty(nbytes, np.uint8))
    return _blocks[-1]


def clear() -> None:
    """Give idle memory back to the system; arrays in use are not touched."""
    with _lock:
        for i in reversed(range(len(_blocks))):
            if _references(_blocks, i) <= _IDLE:
                del _blocks[i]
