"""Codes block by block: what every streaming measurement of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError

# Rows of one block of codes in memory; lazy codes come in blocks of whole chunks of about this many rows.
BLOCK_ROWS = 32_768


def code_blocks(codes: xr.Dataset, start: int = 0, stop: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Walk over codes in blocks of rows, holding one block at a time.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`), in memory or Dask-backed
    start, stop : int, optional
        Rows to walk over; all without them.

    Yields
    ------
    atom : int32 ndarray of shape (rows, n_slots)
    coefficient : ndarray of shape (rows, n_slots)
    """
    missing = [name for name in ("atom", "coefficient") if name not in codes]
    if missing:
        raise InputError(f"codes lack {' and '.join(missing)}; pass what transform() or encode() returned")
    end = codes.sizes["sample"] if stop is None else min(stop, codes.sizes["sample"])
    for a, b in _bounds(codes, start, end):
        yield read_codes(codes, slice(a, b))


def read_codes(codes: xr.Dataset, rows: slice | NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read some rows of codes.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    rows : slice, or increasing int64 ndarray of shape (n_rows,)

    Returns
    -------
    atom, coefficient : ndarray of shape (n_rows, n_slots)
    """
    pair = codes["atom"].data[rows], codes["coefficient"].data[rows]
    atom, coefficient = dask.compute(*pair)
    return np.asarray(atom), np.asarray(coefficient)


def _bounds(codes: xr.Dataset, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut rows at chunk borders where codes are lazy, so that no chunk is read twice."""
    chunks = getattr(codes["atom"].data, "chunks", None)
    edges = np.concatenate([[0], np.cumsum(chunks[0])]) if chunks else np.arange(0, stop + BLOCK_ROWS, BLOCK_ROWS)
    begin = start
    for edge in edges.tolist():
        last = min(edge, stop)
        if last > begin and (last - begin >= BLOCK_ROWS or edge >= stop):
            yield begin, last
            begin = last
