"""The number formats of stored rows, bfloat16 among them.

Neither NumPy nor Zarr 3.1 has bfloat16. A bfloat16 number is the upper half of a float32: its bits are kept
as uint16 and widened to float32 exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import InputError

BFLOAT16 = "bfloat16"
ROW_DTYPES = ("float16", "float32", "float64", BFLOAT16)


def dtype_name(dtype: npt.DTypeLike | str) -> str:
    """Return the name under which rows of `dtype` are stored; one of `ROW_DTYPES`."""
    name = dtype if isinstance(dtype, str) else str(np.dtype(dtype))
    if name not in ROW_DTYPES:
        try:
            name = np.dtype(name).newbyteorder("=").name
        except TypeError:
            pass
    if name not in ROW_DTYPES:
        raise InputError(f"activations of dtype {name} cannot be stored; use one of {', '.join(ROW_DTYPES)}")
    return name


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype on disk for a name of `ROW_DTYPES`."""
    return np.dtype("uint16" if name == BFLOAT16 else name)


def delivered_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that a reader delivers for a name of `ROW_DTYPES`."""
    return np.dtype("float32" if name == BFLOAT16 else name)


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bits to float32, exactly.

    Parameters
    ----------
    bits : ndarray of uint16, any shape
        The bits of bfloat16 numbers.

    Returns
    -------
    ndarray of float32, same shape
    """
    wide: npt.NDArray[np.uint32] = bits.astype(np.uint32)
    np.left_shift(wide, np.uint32(16), out=wide)
    return wide.view(np.float32)
