"""Checks of stored numbers: which rows are not finite, and the norms of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store.dtypes import BFLOAT16, widen_bfloat16

# a block of rows that stays in the cache between the steps; norms need four times as much beside it
BLOCK_BYTES, NORM_BLOCK_BYTES = 1 << 20, 1 << 18

# the bits of the exponent; a number with all of them set is infinite or not a number
_EXPONENT = {
    "float16": np.uint16(0x7C00),
    BFLOAT16: np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
    "float64": np.uint64(0x7FF0000000000000),
}


def _blocks(rows: npt.NDArray[Any], nbytes: int) -> range:
    return range(0, len(rows), max(1, nbytes // max(1, rows.nbytes // max(1, len(rows)))))


def nonfinite_rows(rows: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.intp]:
    """Return the indices of the rows that hold an infinite value or NaN, ascending.

    Parameters
    ----------
    rows : ndarray of shape (n, n_features)
        As stored, bfloat16 as its uint16 bits.
    dtype : str
        What the rows are; a NumPy name or "bfloat16".
    """
    exponent: Any = _EXPONENT[dtype]
    bits = rows.view(exponent.dtype)
    signed = bits.view(f"i{exponent.itemsize}")
    negative = int(exponent) | 1 << 8 * exponent.itemsize - 1
    found = []
    blocks = _blocks(rows, BLOCK_BYTES)
    for start in blocks:
        # As integers, what is not finite is the largest of its sign: two searches for a maximum, and no copy.
        # np.isfinite is several times slower on float16, and does not support bfloat16.
        part = slice(start, start + blocks.step)
        if signed[part].max(initial=0) >= int(exponent) or bits[part].max(initial=0) >= negative:
            found.append(start + np.flatnonzero(((bits[part] & exponent) == exponent).any(axis=1)))
    return np.concatenate(found) if found else np.empty(0, np.intp)


def row_norms(rows: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Return the Euclidean norm of each row.

    Parameters
    ----------
    rows : ndarray of shape (n, n_features)
        As stored, bfloat16 as its uint16 bits.
    dtype : str
        What the rows are; a NumPy name or "bfloat16".

    Returns
    -------
    ndarray of float32, shape (n,)
    """
    norms = np.empty(len(rows), np.float32)
    blocks = _blocks(rows, NORM_BLOCK_BYTES)
    for start in blocks:
        block = rows[start : start + blocks.step]
        # float64: the square of a large float32 or bfloat16 overflows float32
        wide = (widen_bfloat16(block) if dtype == BFLOAT16 else block).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            norms[start : start + blocks.step] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    return norms


def exact_median(parts: list[npt.NDArray[np.float32]]) -> float:
    """Return the lower median of non-negative numbers given in parts, without concatenating them.

    The bits of non-negative floats sort as the numbers do, so two counts of 16 bits each find it.

    >>> exact_median([np.array([5, 1], np.float32), np.array([3], np.float32)])
    3.0
    """
    counts = np.zeros(1 << 16, np.int64)
    for part in parts:
        counts += np.bincount(part.view(np.uint32) >> 16, minlength=1 << 16)
    rank = (int(counts.sum()) - 1) // 2
    high = int(np.searchsorted(np.cumsum(counts), rank, "right"))
    rank -= int(counts[:high].sum())
    low_counts = np.zeros(1 << 16, np.int64)
    for part in parts:
        bits = part.view(np.uint32)
        low_counts += np.bincount(bits[bits >> 16 == high] & 0xFFFF, minlength=1 << 16)
    low = int(np.searchsorted(np.cumsum(low_counts), rank, "right"))
    return float(np.array([(high << 16) | low], np.uint32).view(np.float32)[0])
