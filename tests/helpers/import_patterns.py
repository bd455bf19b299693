"""Numbers for round trips: arbitrary bits that are finite numbers, the same wherever they are made."""

from __future__ import annotations

import numpy as np

_BITS = {
    "float16": ("uint16", 0x7C00, 0x0400),
    "bfloat16": ("uint16", 0x7F80, 0x0080),
    "float32": ("uint32", 0x7F800000, 0x00800000),
    "float64": ("uint64", 0x7FF0000000000000, 0x0010000000000000),
}


def pattern(shape, dtype, seed=0):
    """Random bits of `dtype` as unsigned integers; NaN and infinity become numbers, -0.0 and subnormals stay."""
    kind, exponent, one = _BITS[dtype]
    size = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size=size * np.dtype(kind).itemsize, dtype=np.uint8)
    bits = raw.view(kind)
    mask, step = bits.dtype.type(exponent), bits.dtype.type(one)
    bits = np.where(bits & mask == mask, bits ^ step, bits)
    bits[:2] = [0, bits.dtype.type(1) << bits.dtype.type(8 * bits.dtype.itemsize - 1)]
    return bits.reshape(shape)


def values(shape, dtype, seed=0):
    """The same as numbers; bfloat16 stays bits."""
    bits = pattern(shape, dtype, seed)
    return bits if dtype == "bfloat16" else bits.view(dtype)
