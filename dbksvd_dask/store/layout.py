"""What an activation store looks like on disk: its description, its arrays, its first attributes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import dbksvd_dask
from dbksvd_dask.base.safe_text import redacted_values
from dbksvd_dask.errors import InputError, MismatchError, StoreError, brief
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.arrays import ArraySpec
from dbksvd_dask.store.checksums import CHECKSUMS
from dbksvd_dask.store.dtypes import BFLOAT16, dtype_name, stored_dtype
from dbksvd_dask.store.reader import ACTIVATIONS_FORMAT, ACTIVATIONS_VERSION, ROWS

# chunks of 16-64 MB: fewer files than smaller ones, and a few fit into memory; the power of two in the middle
CHUNK_BYTES = 1 << 25


def default_chunk_rows(n_features: int, itemsize: int) -> int:
    """Return the rows of one chunk: the power of two nearest below 32 MiB, so 16 to 32 MiB per chunk.

    >>> default_chunk_rows(768, 2)
    16384
    """
    rows = max(1, CHUNK_BYTES // (n_features * itemsize))
    return 1 << (rows.bit_length() - 1)


@dataclass(frozen=True)
class Aligned:
    """What an aligned array holds for each sample.

    Attributes
    ----------
    dtype : str
        Its NumPy dtype, fixed-size numbers or booleans.
    shape : tuple of int
        Shape of the entry of one sample; () for one number.
    attributes : dict
        Kept with the array, such as the names of labels.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Aligned | npt.DTypeLike) -> Aligned:
        """Accept a plain dtype for one number per sample."""
        spec = value if isinstance(value, Aligned) else cls(np.dtype(value).str)
        dtype = np.dtype(spec.dtype).newbyteorder("=")
        if dtype.kind not in "biuf":
            raise InputError(f"an aligned array of dtype {dtype} cannot be stored; use numbers or booleans")
        return cls(dtype.name, tuple(int(n) for n in spec.shape), dict(spec.attributes))


@dataclass(frozen=True)
class StorePlan:
    """What a store will hold; written first, so that a later run can compare."""

    n_samples: int | None
    n_features: int
    dtype: str
    chunk_rows: int
    compressor: str | None
    attributes: dict[str, Any]
    aligned: dict[str, Aligned]
    job: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain JSON values."""
        described = {**self.__dict__, "aligned": {n: dict(a.__dict__) for n, a in self.aligned.items()}}
        out: dict[str, Any] = json.loads(json.dumps(described))
        return out

    @classmethod
    def read(cls, path: str) -> StorePlan:
        """Read the description of a store that is being written."""
        described = atomic.read_sealed(path)
        try:
            aligned = {
                n: Aligned(a["dtype"], tuple(a["shape"]), a["attributes"]) for n, a in described["aligned"].items()
            }
            return cls(**{**described, "aligned": aligned})
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} does not describe an activation store: {brief(error)}") from error


def make_plan(
    n_samples: int | None,
    n_features: int,
    dtype: npt.DTypeLike | str,
    chunk_rows: int | None,
    compressor: str | None,
    attributes: Mapping[str, Any] | None,
    aligned: Mapping[str, Aligned | npt.DTypeLike] | None,
    job: Mapping[str, Any] | None,
) -> StorePlan:
    """Check the request and fill in the defaults."""
    name = dtype_name(dtype)
    if (n_samples is not None and n_samples < 1) or n_features < 1:
        raise InputError(f"a store of shape ({n_samples}, {n_features}) has no content; need at least (1, 1)")
    if compressor not in (None, "zstd", "blosc"):
        raise InputError(f"compressor={compressor!r} is not known; use None, 'zstd' or 'blosc'")
    rows = default_chunk_rows(n_features, stored_dtype(name).itemsize) if chunk_rows is None else chunk_rows
    if chunk_rows is None and n_samples is not None:
        rows = min(rows, n_samples)  # a chunk is padded to its full size on disk
    if rows < 1:
        raise InputError(f"chunk_rows={rows}; need at least 1")
    specs = {key: Aligned.of(value) for key, value in (aligned or {}).items()}
    for key in specs:
        if key in (ROWS, CHECKSUMS) or not key.replace("_", "a").replace("-", "a").isalnum():
            raise InputError(f"an aligned array cannot be called {key!r}; use letters, digits, - and _")
    provenance, identity = dict(attributes or {}), dict(job or {})
    return StorePlan(n_samples, n_features, name, rows, compressor, provenance, specs, identity)


def check_same(path: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume a store that was begun with another description, naming the difference."""
    different = [key for key in now if before.get(key) != now[key]]
    if different:
        key, old, new = _first_difference(different[0], before.get(different[0]), now[different[0]])
        raise MismatchError(
            f"an unfinished store at {atomic.aside(path)} was begun with {key}={old!r}, now {key}={new!r}; use "
            "the same options to resume, or force=True to begin again"
        )


def _first_difference(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the innermost name and the two values that differ: a whole description would not fit the screen."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = next(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
        return _first_difference(inner, old.get(inner), new.get(inner))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return key, *next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    return key, old, new


def require_replaceable(path: str, format_name: str) -> None:
    """Refuse to replace anything of another kind: a wrong name must not delete a user's files.

    Parameters
    ----------
    path : str
        What exists there; an empty folder may be replaced too.
    format_name : str
        The attribute `format` of stores that may be replaced.
    """
    if not paths.is_remote(path) and os.path.isdir(path) and not os.listdir(path):
        return
    try:
        found = paths.open_zarr(path).attrs.get("format")
    except StoreError:
        found = None
    if found != format_name:
        kind = {"activations": "an activation store", "codes": "a codes store"}.get(
            format_name.removeprefix("dbksvd-"), "a dictionary"
        )
        raise StoreError(
            f"{path} is {found or 'something else'}, and only {kind} is replaced; choose another name, or remove "
            "it yourself"
        )


def attributes_of(plan: StorePlan) -> dict[str, Any]:
    """Return the attributes of a store while it is not complete."""
    return {
        "format": ACTIVATIONS_FORMAT,
        "format_version": ACTIVATIONS_VERSION,
        "package_version": dbksvd_dask.__version__,
        "complete": False,
        "provenance": redacted_values(plan.attributes),
    }


def array_specs(plan: StorePlan) -> list[ArraySpec]:
    """Describe the arrays of a store: the rows, and what is aligned to them."""
    marked = {"dtype": BFLOAT16} if plan.dtype == BFLOAT16 else {}
    rows = ArraySpec(ROWS, stored_dtype(plan.dtype).name, (plan.n_features,), ("feature",), marked)
    return [rows, *(_aligned_spec(name, spec) for name, spec in plan.aligned.items())]


def _aligned_spec(name: str, spec: Aligned) -> ArraySpec:
    dims = tuple(f"{name}_{axis}" for axis in range(len(spec.shape)))
    return ArraySpec(name, spec.dtype, spec.shape, dims, spec.attributes)
