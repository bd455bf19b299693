"""The device: whether there is one, how arrays get there and back, and whose turn it is.

Everything that is CuPy's own is in `CupySpace`. The rest of the package knows a `Space` only: an array namespace
and the few things that no namespace covers (transfers, pinned memory, launches). Tests put another space in its
place, whose arrays refuse every hidden copy to the host and whose launches run in numba's simulator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np

from dbksvd_dask.errors import DeviceError

# Device work of a process goes to one stream, so there is nothing to gain from two threads queueing it at once,
# and one chunk's scratch to lose: tasks take turns. Re-entrant, since a task is made of smaller steps.
_turn = threading.RLock()


class Space(Protocol):
    """What the GPU code needs of an array library.

    Attributes
    ----------
    xp : array namespace of the device's arrays
    threads : threads per block of every launch
    shared_bytes : dynamic shared memory that a launch may ask for
    """

    xp: Any
    threads: int
    shared_bytes: int

    def asarray(self, array: Any) -> Any:
        """Give the array on the device: copied from the host, or itself if it is there already."""
        ...

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Give an array on the device, not filled."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Give an array in page-locked host memory, which transfers can write to in the background."""
        ...

    def fetch(self, array: Any, out: np.ndarray) -> Callable[[], None]:
        """Begin a copy to pinned memory; the call that is returned waits for its end."""
        ...

    def launch(self, kernel: Any, grid: int | tuple[int, int], shared: int, *args: Any) -> None:
        """Run a kernel of `gpu.cuda` on a grid of blocks, with `shared` bytes of dynamic shared memory."""
        ...


class CupySpace:
    """CuPy arrays and numba-cuda launches on the current device, all on the default stream."""

    threads = 256
    # what every card grants without opting in; numba-cuda has no way to ask for more
    shared_bytes = 48 * 1024 - 4096

    def __init__(self) -> None:
        import cupy
        import cupyx
        from numba import cuda

        self.xp = cupy
        self._cupyx, self._cuda = cupyx, cuda
        self._copies = cupy.cuda.Stream(non_blocking=True)

    def asarray(self, array: Any) -> Any:
        """Give the array on the device; CuPy itself goes through pinned memory, in the background."""
        return self.xp.asarray(array)

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host."""
        return self.xp.asnumpy(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Give an array on the device, not filled."""
        return self.xp.empty(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Give an array in page-locked host memory."""
        return self._cupyx.empty_pinned(shape, dtype=dtype)

    def fetch(self, array: Any, out: np.ndarray) -> Callable[[], None]:
        """Begin a copy to pinned memory on a stream of its own, after what computes `array`."""
        computed = self.xp.cuda.get_current_stream().record()
        self._copies.wait_event(computed)
        array.get(stream=self._copies, out=out, blocking=False)
        copied = self._copies.record()

        def wait(keep: Any = array) -> None:
            copied.synchronize()

        return wait

    def launch(self, kernel: Any, grid: int | tuple[int, int], shared: int, *args: Any) -> None:
        """Run a kernel; the launch returns at once, the default stream keeps the order."""
        # sync=False: CuPy and numba both use the default stream, so waiting for it before a launch gains nothing
        ready = [self._cuda.as_cuda_array(a, sync=False) if isinstance(a, self.xp.ndarray) else a for a in args]
        kernel[grid, self.threads, 0, shared](*ready)


def missing() -> str:
    """Say what keeps this process from using a GPU; empty when nothing does."""
    try:
        import cupy
    except Exception as error:  # a wheel for another CUDA version fails with more than ImportError
        return f"CuPy cannot be imported ({error}); install it with `pip install 'dbksvd-dask[gpu]'`"
    if not cupy.is_available():
        return (
            f"CuPy {cupy.__version__} is installed but finds no CUDA device; `nvidia-smi` shows whether there are "
            "a driver and a card, CUDA_VISIBLE_DEVICES may hide it"
        )
    try:
        from numba import cuda

        ready = bool(cuda.is_available())
    except Exception as error:
        return f"numba-cuda cannot be imported ({error}); install it with `pip install 'dbksvd-dask[gpu]'`"
    return "" if ready else "numba-cuda finds no CUDA device; `python -m numba -s` shows what it looked for"


@cache
def current() -> Space:
    """Give the space of this process's device; raises `DeviceError` when there is none."""
    reason = missing()
    if reason:
        raise DeviceError(f"device='gpu' was asked for, but {reason}; or use device='cpu'")
    return CupySpace()


def budget() -> int:
    """Bytes of the device that a fit may plan with, 0 when there is no device.

    85 % of the card, or what is free if others hold more than the rest, in steps of 256 MiB: the chunk size
    follows from it, and with it the last bits of a result, so it must not change with every megabyte.
    """
    if missing():
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    own = cupy.get_default_memory_pool().total_bytes()
    step = 1 << 28
    return int(min(0.85 * total, free + own)) // step * step


def on_device(array: Any) -> bool:
    """Whether an array is on a device rather than numpy's."""
    return not isinstance(array, np.ndarray)


def to_host(array: Any) -> np.ndarray:
    """Give a numpy array: itself, or a copy from the device."""
    return current().to_host(array) if on_device(array) else array


def turn(device: str) -> AbstractContextManager[Any]:
    """Wait for this process's turn on its device; nothing to wait for on the CPU."""
    return _turn if device == "gpu" else nullcontext()
