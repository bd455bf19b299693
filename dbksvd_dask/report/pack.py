"""One block of bytes for a page: a JSON head and typed arrays, laid out for a browser to map without parsing."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask._words import plain
from dbksvd_dask.errors import InputError

MAGIC = b"DBKR0001"
# Array types that JavaScript can view in place; it has none for float16, and int64 only as BigInt.
_TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float64")
_ALIGN = 8


@dataclass(frozen=True, eq=False)
class Payload:
    """A part of the page's data: JSON values and typed arrays."""

    head: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


def pack(head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Lay out a head and arrays: magic, length of the JSON, JSON, then each array on a multiple of 8 bytes.

    Parameters
    ----------
    head : JSON-able mapping; values that are not finite become null
    arrays : mapping of name to ndarray, any shape

    Returns
    -------
    bytes
    """
    directory: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        if array.dtype.name not in _TYPES:
            raise InputError(f"array {name} has dtype {array.dtype}; a page can hold {', '.join(_TYPES)}")
        content = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        directory[name] = {"type": array.dtype.name, "shape": list(array.shape), "offset": offset}
        parts.append(_padded(content))
        offset += len(parts[-1])
    text = json.dumps({"head": plain(head), "arrays": directory}, ensure_ascii=False, allow_nan=False)
    encoded = text.encode()
    start = MAGIC + len(encoded).to_bytes(8, "little") + _padded(encoded, b" ")
    return start + b"".join(parts)


def compress(content: bytes) -> str:
    """Gzip, then base64: text that can stand in an HTML file; the same bytes give the same text."""
    return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode("ascii")


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Hold whole numbers in the smallest type that fits, with room for -1; numbers beyond int32 as float64."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for name in ("int8", "int16", "int32"):
        if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
            return values.astype(name)
    return values.astype(np.float64)


def _padded(content: bytes, filler: bytes = b"\0") -> bytes:
    return content + filler * (-len(content) % _ALIGN)
