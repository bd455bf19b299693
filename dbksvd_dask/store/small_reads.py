"""Many small reads from files, without the interpreter between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from dbksvd_dask.kernels._jit import jit

_pread: Any = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.intp))
_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))


@jit  # type: ignore[untyped-decorator]
def read_each(fds: Any, file_rows: Any, row_bytes: Any, rows: Any, target: Any) -> Any:
    """Read some rows out of files that follow one another, one after the other into memory.

    Parameters
    ----------
    fds : ndarray of int32, shape (n_files,)
        The open files.
    file_rows : int
        Rows of a file.
    row_bytes : int
        Bytes of a row.
    rows : ndarray of int64, shape (n,)
        Which rows, counted over all files.
    target : int
        Address of the memory.

    Returns
    -------
    int
        Index of the first row that could not be read, or -1.
    """
    for i in range(len(rows)):
        file = rows[i] // file_rows
        offset = (rows[i] - file * file_rows) * row_bytes
        address = np.uintp(target + i * row_bytes)
        if _pread(fds[file], address, np.uintp(row_bytes), offset) != row_bytes:
            return i
    return -1


@jit  # type: ignore[untyped-decorator]
def copy_each(addresses: Any, file_rows: Any, row_bytes: Any, rows: Any, target: Any) -> Any:
    """Do as `read_each`, from mapped files: `addresses` of uint64, shape (n_files,). Always return -1."""
    for i in range(len(rows)):
        file = rows[i] // file_rows
        source = addresses[file] + np.uintp((rows[i] - file * file_rows) * row_bytes)
        _memcpy(np.uintp(target + i * row_bytes), source, np.uintp(row_bytes))
    return -1
