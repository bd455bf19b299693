"""The device: whether there is one, transfers to it and back, and turns on it.

`CupySpace` holds everything specific to CuPy. The rest of the package uses a `Space`: an array namespace and what
no namespace covers (transfers, pinned memory, launches). Tests substitute a space whose arrays refuse implicit
copies to the host and whose launches run in numba's simulator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np

from dbksvd_dask.errors import DeviceError

# A process queues its device work on one stream. Two threads that queue at once gain nothing and need the scratch
# memory of two chunks, so tasks take turns. Re-entrant, because a task consists of smaller steps that take turns.
_turn = threading.RLock()


class Space(Protocol):
    """What the GPU code needs from an array library.

    Attributes
    ----------
    xp : array namespace of the device's arrays
    threads : threads per block of every launch
    shared_bytes : dynamic shared memory that a launch may request
    """

    xp: Any
    threads: int
    shared_bytes: int

    def asarray(self, array: Any) -> Any:
        """Return the array on the device: a copy from the host, or the array itself if it is already there."""
        ...

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised array on the device."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array in page-locked host memory, to which transfers write in the background."""
        ...

    def fetch(self, array: Any, out: np.ndarray) -> Callable[[], None]:
        """Begin a copy to pinned memory; return a function that waits for its end."""
        ...

    def launch(self, kernel: Any, grid: int | tuple[int, int], shared: int, *args: Any) -> None:
        """Run a kernel of `gpu.cuda` on a grid of blocks, with `shared` bytes of dynamic shared memory."""
        ...


class CupySpace:
    """CuPy arrays and numba-cuda launches on the current device, all on the default stream."""

    threads = 256
    # what every card grants without opting in; numba-cuda cannot request more
    shared_bytes = 48 * 1024 - 4096

    def __init__(self) -> None:
        import cupy
        import cupyx
        from numba import cuda

        self.xp = cupy
        self._cupyx, self._cuda = cupyx, cuda
        self._copies = cupy.cuda.Stream(non_blocking=True)

    def asarray(self, array: Any) -> Any:
        """Return the array on the device; CuPy transfers through pinned memory in the background."""
        return self.xp.asarray(array)

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host."""
        return self.xp.asnumpy(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised array on the device."""
        return self.xp.empty(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array in page-locked host memory."""
        return self._cupyx.empty_pinned(shape, dtype=dtype)

    def fetch(self, array: Any, out: np.ndarray) -> Callable[[], None]:
        """Begin a copy to pinned memory on a separate stream, once `array` is computed."""
        computed = self.xp.cuda.get_current_stream().record()
        self._copies.wait_event(computed)
        array.get(stream=self._copies, out=out, blocking=False)
        copied = self._copies.record()

        def wait(keep: Any = array) -> None:
            copied.synchronize()

        return wait

    def launch(self, kernel: Any, grid: int | tuple[int, int], shared: int, *args: Any) -> None:
        """Run a kernel; the launch returns at once and the default stream keeps the order."""
        # sync=False: CuPy and numba both use the default stream, so a launch need not wait for it
        ready = [self._cuda.as_cuda_array(a, sync=False) if isinstance(a, self.xp.ndarray) else a for a in args]
        kernel[grid, self.threads, 0, shared](*ready)


def missing() -> str:
    """Return what keeps this process from using a GPU, in words; empty when nothing does."""
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
    """Return the space of this process's device; raise `DeviceError` when there is none."""
    reason = missing()
    if reason:
        raise DeviceError(f"device='gpu' was asked for, but {reason}; or use device='cpu'")
    return CupySpace()


def budget() -> int:
    """Return the bytes of the device that a fit may plan with; 0 when there is no device.

    That is 85 % of the card, or the free memory if other processes hold more than the rest, rounded down to 256
    MiB. The chunk size follows from it, and the last bits of a result from that, so small changes must not alter
    it.
    """
    if missing():
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    own = cupy.get_default_memory_pool().total_bytes()
    step = 1 << 28
    return int(min(0.85 * total, free + own)) // step * step


def on_device(array: Any) -> bool:
    """Return whether an array is on a device rather than in numpy."""
    return not isinstance(array, np.ndarray)


def to_host(array: Any) -> np.ndarray:
    """Return a numpy array: the array itself, or a copy from the device."""
    return current().to_host(array) if on_device(array) else array


def turn(device: str) -> AbstractContextManager[Any]:
    """Return a context that waits for a turn on the device of this process; on the CPU it does not wait."""
    return _turn if device == "gpu" else nullcontext()
