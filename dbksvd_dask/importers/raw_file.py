"""Raw memory maps: plain bytes, described by a small JSON file beside them or by options.

The description is `FILE.json`, `STEM.json` or `STEM.meta`: {"dtype": "float16", "shape": [n, d], "offset": 0};
"n_features" may stand in place of "shape".
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Hints, Region, RegionFile, SourceFile
from dbksvd_dask.store import atomic


def description_of(path: str) -> dict[str, Any]:
    """Return the description that lies beside a raw file; empty when there is none."""
    stem = os.path.splitext(path)[0]
    for candidate in (f"{path}.json", f"{stem}.json", f"{stem}.meta"):
        if os.path.isfile(candidate):
            found = atomic.read_json(candidate)
            if isinstance(found, dict):
                return found
    return {}


def open_raw(path: str, hints: Hints) -> SourceFile:
    """Open a raw file with the description beside it; options of the user go first."""
    given = description_of(path)
    dtype = hints.dtype or given.get("dtype")
    shape = given.get("shape")
    n_features = hints.n_features or given.get("n_features") or (shape[-1] if shape else None)
    if not dtype or not n_features:
        raise InputError(
            f"{path} does not describe itself; give dtype and n_features (--dtype float16 --n-features 768), "
            f'or write {path}.json with {{"dtype": "float16", "shape": [n_samples, n_features]}}'
        )
    name = str(dtype).removeprefix("torch.")
    bits = _bits(name, path)
    offset = int(given.get("offset", 0))
    if shape is None or hints.n_features:
        shape = _infer_shape(path, offset, int(n_features), bits)
    region = Region(path, offset, tuple(int(n) for n in shape), bits)
    return RegionFile(path, {"": (region, "bfloat16" if name == "bfloat16" else bits.newbyteorder("=").name)})


def _bits(name: str, path: str) -> np.dtype[Any]:
    try:
        return np.dtype("uint16" if name == "bfloat16" else name)
    except TypeError as error:
        raise InputError(f"dtype {name!r} of {path} is not known; use float16, float32 or bfloat16") from error


def _infer_shape(path: str, offset: int, n_features: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    row, size = n_features * dtype.itemsize, os.path.getsize(path) - offset
    if size < row or size % row:
        raise StoreError(
            f"{path} holds {size} bytes, not a whole number of rows of {n_features} {dtype} ({row} bytes): "
            "wrong n_features or dtype, or truncated"
        )
    return math.floor(size / row), n_features
