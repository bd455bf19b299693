"""Jit flags, vector intrinsics, and the form in which arrays enter a kernel: all of them defined here only."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic

# `reassoc` and `contract` let LLVM vectorise sums and use fused multiply-adds. NaN and infinity keep their
# meaning (no `nnan`/`ninf`): inputs are checked, but a kernel that meets one must still end.
FAST = frozenset({"reassoc", "contract", "nsz", "arcp"})

logger = logging.getLogger(__name__)


@cache
def _fallback() -> str | None:
    """Return a folder for compiled kernels where numba finds none: in the temporary folder, or None.

    Code loaded from it is executed, so a folder that others can write to is refused.
    """
    folder = os.path.join(tempfile.gettempdir(), f"dbksvd-numba-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        private = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022
        if private and stat.S_ISDIR(found.st_mode) and os.access(folder, os.W_OK):
            logger.warning(
                "no folder for compiled kernels can be written; using %s (or set NUMBA_CACHE_DIR)", folder
            )
            return folder
    except OSError:
        pass
    logger.warning("no folder for compiled kernels can be written: every process compiles; set NUMBA_CACHE_DIR")
    return None


def _cached_in(folder: str, compiler: Any, function: Any, options: dict[str, Any]) -> Any:
    """Decorate a function with its cache in a folder: numba chooses the folder at decoration."""
    before, config.CACHE_DIR = config.CACHE_DIR, folder
    try:
        return compiler(cache=True, **options)(function)
    finally:
        config.CACHE_DIR = before


def cached(compiler: Any, **options: Any) -> Callable[[Any], Any]:
    """Decorate with `njit` or `cuda.jit`; cache compiled code for other processes where a folder is writable."""

    def decorate(function: Any) -> Any:
        try:
            return compiler(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache function" not in str(error):
                raise
        folder = _fallback()
        return compiler(**options)(function) if folder is None else _cached_in(folder, compiler, function, options)

    return decorate


# nogil: Dask threads run kernels side by side. Never `parallel=True`: numba's workqueue layer aborts the
# process when two threads enter it, and parallelism here is over chunks anyway.
_KERNEL = {"nogil": True, "error_model": "numpy", "fastmath": set(FAST)}
# Without numba's memory management: it counts references to every array and view that is assigned or handed to
# another function, by atomic additions, which took half of the time of a pursuit. Such functions allocate nothing.
_UNCOUNTED = {"_nrt": False}

# For kernels that allocate, and for those that are given all their arrays.
jit = cached(njit, **_KERNEL)
jit_uncounted = cached(njit, **_KERNEL, **_UNCOUNTED)

# For functions that kernels call. Otherwise LLVM keeps some of them as separate functions, which exist twice:
# compiled alone, and inside each caller's module, optimised again and rounding differently. The process that
# compiles runs the first copy, processes that load the cache run the second: different bits.
inner = cached(njit, **_KERNEL, forceinline=True)
inner_uncounted = cached(njit, **_KERNEL, **_UNCOUNTED, forceinline=True)

# Without the flags under which LLVM vectorises sums: for loops over a few scattered entries, where gathering them
# takes longer than adding them one by one.
inner_in_order = cached(njit, nogil=True, error_model="numpy", **_UNCOUNTED, forceinline=True)

_MAX_FLAGS = ("nnan", "ninf", "nsz", "reassoc", "arcp", "contract", "afn")


def _emit_max(builder: Any, best: Any, value: Any) -> Any:
    """Emit `value if value > best else best` with the flags under which LLVM vectorises the reduction."""
    larger = builder.fcmp_ordered(">", value, best, flags=_MAX_FLAGS)
    return builder.select(larger, value, best, flags=_MAX_FLAGS)


@intrinsic
def running_max(typingctx: Any, best: Any, value: Any) -> Any:
    """Return the larger of `best` and `value`; unlike `max()` and `if`, a loop over it vectorises."""
    if not (isinstance(best, types.Float) and best == value):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_max(builder, args[0], args[1])

    return best(best, value), codegen


@intrinsic
def running_max_abs(typingctx: Any, best: Any, value: Any) -> Any:
    """Return the larger of `best` and `|value|`; a loop over it vectorises."""
    if not (isinstance(best, types.Float) and best == value):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[1].type
        fabs = builder.module.declare_intrinsic("llvm.fabs", [kind], ir.FunctionType(kind, [kind]))
        return _emit_max(builder, args[0], builder.call(fabs, [args[1]]))

    return best(best, value), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index] ahead of its use; an address past the end is harmless."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, int32, int32, int32])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        # for reading, into the second-level cache (locality 2), data
        builder.call(function, [address, int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


class _Writable:
    """Carries the address of a read-only array under numba's ordinary array type."""

    def __init__(self, array: np.ndarray) -> None:
        self._keep = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def kernel_input(array: Any, dtype: Any = None) -> np.ndarray:
    """Bring an array into the one form in which kernels and BLAS take their inputs.

    C-contiguous and aligned, so that BLAS takes the same path wherever the buffer came from, and of numba's
    plain array type even when read-only (arrays off the wire and memory maps are), so that each kernel is
    compiled once. Kernels never write to their inputs; copies only when layout or dtype ask for one.

    Parameters
    ----------
    array : array_like
    dtype : dtype, optional
        Convert to this dtype first.
    """
    ready = np.require(array, dtype=dtype, requirements=["C", "A"])
    return ready if ready.flags.writeable else np.asarray(_Writable(ready))
