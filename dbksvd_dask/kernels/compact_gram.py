"""A gram in three bytes per entry, for unit atoms; `kernels.compact` says what for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.kernels import pool
from dbksvd_dask.kernels._jit import jit_uncounted, kernel_input, running_max_abs

# The steps of the two parts: an entry of 1 is 32767 of the first, and half of that is 127 of the second.
HIGH = np.float32(1 / 32767)
LOW = np.float32(1 / 32767 / 254)
# Largest entry that is split: the parts can hold no larger one, and that of atoms of norm 1 to rounding is below.
LARGEST = 1 + 1e-5
# Side of the squares in which a tile is transposed: rows and columns of one fit into the first-level cache.
_SQUARE = 64


class CompactGram(NamedTuple):
    """The gram of a dictionary of unit atoms, or a tile of it: ``HIGH * high + LOW * low``, to 2^-24."""

    high: np.ndarray  # (n_atoms, n_atoms) int16
    low: np.ndarray  # (n_atoms, n_atoms) int8


@jit_uncounted
def _split(gram, high, low):
    """Split float32 entries into their two parts; return the largest magnitude."""
    n, m = gram.shape
    largest = np.float32(0)
    for i in range(n):
        g, top, rest = gram[i], high[i], low[i]
        for t in range(m):
            largest = running_max_abs(largest, g[t])
            value = min(max(g[t], np.float32(-1)), np.float32(1))
            whole = np.rint(value * np.float32(32767))
            top[t] = np.int16(whole)
            rest[t] = np.int8(np.rint((value - whole * HIGH) / LOW))
    return largest


@jit_uncounted
def mirror(a):
    """Copy the upper triangle of a square array to the lower one.

    The two triangles of a product round differently, and `kernels.compact` takes an entry and its mirror for the
    same number.
    """
    n = a.shape[0]
    for i in range(0, n, _SQUARE):
        for j in range(0, i + _SQUARE, _SQUARE):
            for t in range(i, min(i + _SQUARE, n)):
                line = a[t, j : min(j + _SQUARE, t)]
                for s in range(line.shape[0]):
                    line[s] = a[j + s, t]


@jit_uncounted
def _transpose(a, out, row, column):
    """Write the transpose of an array to ``out[row:, column:]``."""
    n, m = a.shape
    for i in range(0, n, _SQUARE):
        for j in range(0, m, _SQUARE):
            for t in range(j, min(j + _SQUARE, m)):
                line = out[row + t, column + i : column + min(i + _SQUARE, n)]
                for s in range(line.shape[0]):
                    line[s] = a[i + s, t]


def split(gram: np.ndarray) -> Any:
    """Split a gram or a tile of it; give it back as it is where it cannot be split."""
    if gram.dtype != np.float32:
        return gram
    parts = CompactGram(np.empty(gram.shape, np.int16), np.empty(gram.shape, np.int8))
    return parts if _split(kernel_input(gram), *parts) <= LARGEST else gram


def joined(gram: Any) -> np.ndarray:
    """Return a gram or a tile of it in float32, whether it is split or not."""
    return gram.high * HIGH + gram.low * LOW if isinstance(gram, CompactGram) else gram


def assemble(n_atoms: int, bounds: list[tuple[int, int]], tiles: list[CompactGram]) -> CompactGram:
    """Assemble the split tiles of the upper triangle of a gram and mirror those off the diagonal.

    Parameters
    ----------
    bounds : blocks of atoms; each pair of blocks has a tile
    """
    shape = (n_atoms, n_atoms)
    gram = CompactGram(pool.empty(shape, np.int16), pool.empty(shape, np.int8))
    for part, whole in enumerate(gram):
        remaining = iter(tiles)
        for i, (a, b) in enumerate(bounds):
            for c, d in bounds[i:]:
                tile = kernel_input(next(remaining)[part])
                whole[a:b, c:d] = tile
                if c != a:
                    _transpose(tile, whole, c, a)
    return gram
