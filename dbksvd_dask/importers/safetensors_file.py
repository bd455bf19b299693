"""safetensors files, bfloat16 included, without torch: a JSON header, then plain bytes."""

from __future__ import annotations

import json
import os
import struct

import numpy as np

from dbksvd_dask.errors import StoreError
from dbksvd_dask.importers.base import Hints, Region, RegionFile, SourceFile

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
    """Open a safetensors file; tensors of a dtype that NumPy cannot hold are passed over."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise StoreError(f"{path} is not a readable safetensors file: {size} bytes, header incomplete")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise StoreError(f"{path} is not a readable safetensors file: {error}") from error
    regions = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in DTYPES:
            continue
        dtype = DTYPES[entry["dtype"]]
        bits = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        offset = 8 + length + entry["data_offsets"][0]
        regions[name] = (Region(path, offset, tuple(entry["shape"]), bits), dtype)
    return RegionFile(path, regions)
