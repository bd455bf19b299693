"""Codes block by block: what every streaming measurement of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError, MismatchError

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
    require_codes(codes)
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


def require_codes(codes: Any) -> None:
    """Refuse a Dataset that cannot hold codes: arrays missing, of other dimensions, or atoms that are no integers.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    """
    missing = [name for name in ("atom", "coefficient") if name not in codes]
    if missing:
        raise InputError(f"codes lack {' and '.join(missing)}; pass what transform() or encode() returned")
    for name in ("atom", "coefficient"):
        if codes[name].dims != ("sample", "slot"):
            raise InputError(f"`{name}` of codes has dimensions {codes[name].dims}; need ('sample', 'slot')")
    require_integers(codes["atom"].dtype)


def require_integers(dtype: Any) -> None:
    """Refuse indices of atoms that are no integers."""
    if not np.issubdtype(dtype, np.integer):
        raise InputError(f"atom must hold integers, received dtype {dtype}; -1 marks an empty slot")


def check_atoms(atom: NDArray[Any], n_atoms: int, first_sample: int = 0) -> None:
    """Refuse indices that no dictionary of `n_atoms` atoms has: kernels use them as they are.

    Parameters
    ----------
    atom : integer ndarray of shape (n_samples, n_slots)
    n_atoms : int
    first_sample : int, default 0
        Number of the first of these samples, for the message.
    """
    wrong = describe_wrong_atom(atom, n_atoms, first_sample)
    if wrong is not None:
        raise MismatchError(f"these codes do not fit: {wrong}; pass the dictionary these codes were made with")


def describe_wrong_atom(atom: NDArray[Any], n_atoms: int, first_sample: int = 0) -> str | None:
    """Name the first sample with an index outside -1 to n_atoms - 1; None when there is none.

    Parameters
    ----------
    atom, n_atoms, first_sample
        As in `check_atoms`.
    """
    if atom.size == 0 or (int(atom.min()) >= -1 and int(atom.max()) < n_atoms):
        return None
    row, slot = np.argwhere((atom < -1) | (atom >= n_atoms))[0].tolist()
    return (
        f"sample {first_sample + row} names atom {int(atom[row, slot])}, but the dictionary has {n_atoms} atoms, "
        f"0 to {n_atoms - 1}"
    )


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
