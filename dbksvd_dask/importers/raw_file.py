"""Raw memory maps: plain bytes, described by a small JSON file beside them or by options.

The description is `FILE.json`, `STEM.json` or `STEM.meta`: {"dtype": "float16", "shape": [n, d], "offset": 0};
"n_features" may stand in place of "shape". A shape of four is (example, layer, token, feature), and "layers" may
say what the layers are called.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Hints, Region, RegionFile, SourceFile, plain_name
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.dtypes import BFLOAT16


def description_of(path: str, needed: bool = True) -> dict[str, Any]:
    """Return the description beside a raw file; empty if there is none.

    Parameters
    ----------
    path : str
        The raw file.
    needed : bool
        Whether to refuse a description that cannot be read; otherwise it is ignored.
    """
    stem = os.path.splitext(path)[0]
    for candidate in (f"{path}.json", f"{stem}.json", f"{stem}.meta"):
        if not paths.exists(candidate):
            continue
        try:
            found = atomic.read_json(candidate)
        except StoreError:
            if needed:
                raise
            continue
        if isinstance(found, dict):
            return found
    return {}


def open_raw(path: str, hints: Hints) -> SourceFile:
    """Open a raw file with the description beside it; the user's hints take precedence."""
    given = description_of(path, needed=hints.dtype is None or hints.n_features is None)
    shape = None if given.get("shape") is None else _sizes(path, "shape", given["shape"], 1)
    if hints.n_features is not None:
        n_features: int | None = _sizes(path, "n_features", [hints.n_features], 1)[0]
    elif given.get("n_features") is not None:
        n_features = _sizes(path, "n_features", [given["n_features"]], 1)[0]
    else:
        n_features = shape[-1] if shape else None
    dtype = hints.dtype or given.get("dtype")
    if not dtype or n_features is None:
        raise InputError(
            f"{path} does not describe itself; give its dtype and width, such as dtype='float16' n_features=768, "
            f'or write {path}.json with {{"dtype": "float16", "shape": [n_samples, n_features]}}'
        )
    name = str(dtype).removeprefix("torch.")
    bits = _bits(name, path)
    offset = _sizes(path, "offset", [given.get("offset", 0)], 0)[0]
    if shape is None or hints.n_features is not None:
        shape = _infer_shape(path, offset, n_features, bits)
    needed, size = offset + math.prod(shape) * bits.itemsize, paths.size_of(path)
    if size != needed:
        raise StoreError(
            f"{path} holds {size} bytes, but {list(shape)} of {name} from byte {offset} on are {needed}: wrong "
            "shape, dtype or offset in its description, or truncated"
        )
    file = RegionFile(path, {"": (Region(path, offset, shape, bits), plain_name(name))})
    if given.get("layers") is not None and len(shape) == 4:
        layers = _sizes(path, "layers", given["layers"], -(1 << 31))
        if len(layers) != shape[1]:
            raise InputError(
                f"layers of {path} are {list(layers)}; its shape {list(shape)} has {shape[1]} of them"
            )
        file.arrays[""] = replace(file.arrays[""], layers=layers)
    return file


def _sizes(path: str, what: str, value: Any, least: int) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(isinstance(n, int | np.integer) and n >= least for n in value)
    if not whole or not value:
        plural = what in ("shape", "layers")
        shown = value[0] if not plural and isinstance(value, list) else value
        need = "a list such as [1000, 768]" if plural else f"a whole number from {least} on"
        raise InputError(f"{what} of {path} is {shown!r}; need {need}")
    return tuple(int(n) for n in value)


def _bits(name: str, path: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype("uint16" if name == BFLOAT16 else name)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "biuf" or dtype.subdtype is not None:
        raise InputError(f"dtype {name!r} of {path} is not known; use float16, float32 or bfloat16")
    return dtype


def _infer_shape(path: str, offset: int, n_features: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    row, size = n_features * dtype.itemsize, paths.size_of(path) - offset
    if size < row or size % row:
        raise StoreError(
            f"{path} holds {size} bytes, not a whole number of rows of {n_features} {dtype} ({row} bytes): "
            "wrong n_features or dtype, or truncated"
        )
    return size // row, n_features
