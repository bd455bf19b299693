"""safetensors files, bfloat16 included, without torch: a JSON header, then plain bytes.

The header is parsed here, not by the library: an import reads rows by their place in the file, which the library
does not expose, and must not load a file of many gigabytes.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np

from dbksvd_dask.errors import StoreError, brief
from dbksvd_dask.importers.base import Hints, Region, RegionFile, SourceFile
from dbksvd_dask.store import paths
from dbksvd_dask.store.dtypes import BFLOAT16

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def open_safetensors(path: str, hints: Hints) -> SourceFile:
    """Open a safetensors file; tensors of a dtype that NumPy cannot hold are skipped."""
    size = paths.size_of(path)
    with paths.open_binary(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise StoreError(f"{path} is not a readable safetensors file: {size} bytes, header incomplete")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise StoreError(f"{path} is not a readable safetensors file: {brief(error)}") from error
    if not isinstance(header, dict):
        raise StoreError(f"{path} is not a readable safetensors file: its header is not a table of tensors")
    regions = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape, offsets = _entry(path, name, entry)
            if dtype in DTYPES:
                bits = np.dtype("uint16" if DTYPES[dtype] == BFLOAT16 else DTYPES[dtype])
                _require_length(path, name, offsets, shape, bits)
                regions[name] = (Region(path, 8 + length + offsets[0], shape, bits), DTYPES[dtype])
    return RegionFile(path, regions)


def _entry(path: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, shape and place of a tensor as the header gives them."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key, "") for key in ("dtype", "shape", "data_offsets"))
    if not dtype or not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise StoreError(
            f"{path} is not a readable safetensors file: tensor {name!r} needs dtype, shape and data_offsets in "
            f"the header, which has {str(entry)[:80]}"
        )
    return dtype, tuple(shape), tuple(offsets)


def _require_length(
    path: str, name: str, offsets: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    needed = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise StoreError(
            f"{path} is not a readable safetensors file: tensor {name!r} of shape {shape} needs {needed} bytes, "
            f"its data_offsets are {list(offsets)}"
        )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
