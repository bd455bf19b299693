"""Many small reads of one file without the interpreter between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from dbksvd_dask.kernels._jit import jit

_pread: Any = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.intp))


@jit  # type: ignore[untyped-decorator]
def read_each(fd: Any, row_bytes: Any, rows: Any, places: Any, target: Any) -> Any:
    """Read some rows of a file, each to a place of its own in memory.

    Parameters
    ----------
    fd : int
        The open file.
    row_bytes : int
        Bytes of a row.
    rows, places : ndarray of int64, shape (n,)
        Row rows[i] of the file goes to row places[i] of the memory.
    target : int
        Address of that memory.

    Returns
    -------
    int
        Index of the first row that could not be read, or -1.
    """
    for i in range(len(rows)):
        address = np.uintp(target + places[i] * row_bytes)
        if _pread(np.int32(fd), address, np.uintp(row_bytes), rows[i] * row_bytes) != row_bytes:
            return i
    return -1
