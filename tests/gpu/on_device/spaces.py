"""A device without a device: array-api-strict arrays that refuse the host, kernels in numba's simulator."""

from __future__ import annotations

import sys
import threading

import array_api_strict
import numpy as np
from numba.core import types
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np import numpy_support

Array = type(array_api_strict.empty(0))
DEVICE = array_api_strict.Device("device1")

_allocating = threading.Lock()


def _shared_array(self, shape, dtype):
    """Shared memory of a block, one array per line of source, as the simulator means it.

    Its own version looks for the array and makes it in two steps; of two threads that come at once each may then
    get an array to itself, and the block's sums go wrong.
    """
    dtype = np.dtype(numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    if shape == 0:
        return np.frombuffer(self._dynshared.data, dtype=dtype, count=self._dynshared_size // dtype.itemsize)
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    with _allocating:
        if line not in self._allocations:
            self._allocations[line] = np.empty(shape, dtype)
        return self._allocations[line]


FakeCUDAShared.array = _shared_array


class SimulatedSpace:
    """What `gpu.device.CupySpace` is on hardware.

    Arrays are of the strict namespace, on a device from which numpy may not read: a hidden copy to the host, a
    mix with host arrays or a function outside the array API raises. Transfers are counted. A fetched array arrives
    only when it is waited for, so reading the buffer earlier reads rubbish.
    """

    xp = array_api_strict

    def __init__(self, threads: int = 5, shared_bytes: int = 44 * 1024) -> None:
        self.threads, self.shared_bytes = threads, shared_bytes
        self.to_host_bytes = 0
        self.launches: list[str] = []

    def asarray(self, array):
        if isinstance(array, np.ndarray):
            array = array.astype(np.float32) if array.dtype == np.float16 else array.copy()
            return array_api_strict.asarray(array, device=DEVICE)
        assert array.device == DEVICE
        return array

    def to_host(self, array):
        assert array.device == DEVICE
        self.to_host_bytes += array._array.nbytes
        return array._array.copy()

    def empty(self, shape, dtype):
        out = array_api_strict.empty(shape, dtype=dtype, device=DEVICE)
        out._array.view(np.uint8)[...] = 0x7B  # rubbish: what is not written must not be read
        return out

    def pinned(self, shape, dtype):
        return np.full(shape, np.nan, dtype)

    def fetch(self, array, out):
        assert array.device == DEVICE
        self.to_host_bytes += array._array.nbytes
        out[...] = np.nan

        def wait():
            out[...] = array._array

        return wait

    def launch(self, kernel, grid, shared, *args):
        self.launches.append(kernel.__name__)
        assert shared <= self.shared_bytes
        for a in args:
            assert not isinstance(a, np.ndarray), "a kernel was handed a host array"
            if isinstance(a, Array):
                assert a.device == DEVICE
                assert a._array.flags.c_contiguous
        ready = [FakeCUDAArray(a._array) if isinstance(a, Array) else a for a in args]
        kernel[grid, self.threads, 0, shared](*ready)
