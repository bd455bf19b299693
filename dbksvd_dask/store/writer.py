"""Writing an activation store: chunk by chunk, in any order, by any number of threads and processes."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

from dbksvd_dask.errors import InputError, JobError, MismatchError, StoreError
from dbksvd_dask.store import atomic, remote
from dbksvd_dask.store.dtypes import BFLOAT16, dtype_name, stored_dtype
from dbksvd_dask.store.remote import PathLike
from dbksvd_dask.store.rows import ACTIVATIONS_FORMAT, ACTIVATIONS_VERSION, CHECKSUMS

PARTS = ".parts"
# DESIGN section 5: chunks of 16-64 MB; 32 MiB is the power of two in the middle
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
class _Plan:
    """What a store will hold; written first, so that a later run can tell whether it is the same."""

    n_samples: int | None
    n_features: int
    dtype: str
    chunk_rows: int
    compressor: str | None
    attributes: dict[str, Any]
    aligned: dict[str, Aligned]

    def to_json(self) -> dict[str, Any]:
        described = {**self.__dict__, "aligned": {n: dict(a.__dict__) for n, a in self.aligned.items()}}
        out: dict[str, Any] = json.loads(json.dumps(described))
        return out

    @classmethod
    def from_json(cls, described: dict[str, Any]) -> _Plan:
        aligned = {
            n: Aligned(a["dtype"], tuple(a["shape"]), a["attributes"])
            for n, a in described["aligned"].items()
        }
        return cls(**{**described, "aligned": aligned})


class ActivationWriter:
    """Writes an activation store chunk by chunk, in any order, from any number of threads and processes.

    Made by `create_activations` and, in further processes, by `open_writer`. Chunk i holds the rows
    [i * chunk_rows, (i + 1) * chunk_rows); only the last chunk may be shorter.
    """

    def __init__(self, path: str, plan: _Plan, overwrite: bool) -> None:
        self.path = path
        self.work = atomic.aside(path)
        self.chunk_rows = plan.chunk_rows
        self.n_features = plan.n_features
        self.n_samples = plan.n_samples
        self._plan = plan
        self._overwrite = overwrite
        self._stored = stored_dtype(plan.dtype)
        self._parts = remote.join(self.work, PARTS)
        self._ledger = atomic.Ledger(self._parts, "chunk")
        self._direct = plan.compressor is None and not remote.is_remote(path)
        self._group = zarr.open_group(store=remote.zarr_store(self.work, read_only=False), mode="r+")

    @property
    def n_chunks(self) -> int | None:
        """Return the number of chunks; None while the number of samples is open."""
        return None if self.n_samples is None else -(-self.n_samples // self.chunk_rows)

    def done(self) -> list[int]:
        """Return the chunks that are written."""
        return self._ledger.parts()

    def missing(self) -> list[int]:
        """Return the chunks that are still to be written."""
        done = self._ledger.parts()
        n_chunks = self.n_chunks if self.n_chunks is not None else (done[-1] + 1 if done else 0)
        return sorted(set(range(n_chunks)) - set(done))

    def write_chunk(
        self, i: int, rows: npt.NDArray[Any], aligned: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> None:
        """Write one whole chunk; a chunk that was written before is replaced.

        Parameters
        ----------
        i : int
            Number of the chunk.
        rows : ndarray of shape (chunk_rows, n_features)
            Its rows, of the dtype of the store (uint16 bits for bfloat16); the last chunk may have fewer.
        aligned : dict of ndarray of shape (len(rows), ...)
            One entry for each aligned array of the store.
        """
        given = {"activations": rows, **(aligned or {})}
        self._check_chunk(i, given)
        checksums = []
        for name in self._names():
            block = np.ascontiguousarray(given[name])
            checksums.append(zlib.crc32(_bytes_of(block)))
            self._write_block(name, i, block)
        self._ledger.mark(i, {"rows": len(rows), "crc32": checksums})

    def finish(self) -> None:
        """Mark the store complete and publish it under its name.

        Raises
        ------
        JobError
            When chunks are missing; it lists them.
        """
        missing, done = self.missing(), self.done()
        if missing or not done:
            total = self.n_chunks if self.n_chunks is not None else len(missing) + len(done)
            listed = atomic.describe_parts(missing) or "all"
            raise JobError(f"{self.path} cannot be finished: chunks {listed} of {total} are not written")
        marks = [self._ledger.read(part) for part in done]
        self._close_shape([mark["rows"] for mark in marks])
        table = np.array([mark["crc32"] for mark in marks], np.uint32)
        self._write_checksums(table)
        digest = hashlib.sha256(table.tobytes() + json.dumps(self._plan.to_json(), sort_keys=True).encode())
        self._group.attrs.update({"complete": True, "content_id": digest.hexdigest()[:32]})
        self._sweep()
        if self.work != self.path:
            atomic.publish(self.work, self.path, overwrite=self._overwrite)

    # -- the parts of a write ----------------------------------------

    def _names(self) -> list[str]:
        return ["activations", *self._plan.aligned]

    def _expected(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if name == "activations":
            return (self.n_features,), self._stored
        spec = self._plan.aligned[name]
        return spec.shape, np.dtype(spec.dtype)

    def _check_chunk(self, i: int, given: Mapping[str, npt.NDArray[Any]]) -> None:
        if set(given) != set(self._names()):
            raise InputError(
                f"chunk {i} came with {sorted(given)}; {self.path} needs {sorted(self._names())}"
            )
        rows = len(given["activations"])
        if i < 0 or rows == 0 or (self.n_chunks is not None and i >= self.n_chunks):
            raise InputError(
                f"chunk {i} of {rows} rows does not exist in {self.path} of {self.n_chunks} chunks"
            )
        if self.n_samples is not None:
            expected = min(self.chunk_rows, self.n_samples - i * self.chunk_rows)
            if rows != expected:
                raise InputError(f"chunk {i} of {self.path} needs {expected} rows, got {rows}")
        elif rows > self.chunk_rows:
            raise InputError(f"chunk {i} of {self.path} has room for {self.chunk_rows} rows, got {rows}")
        for name, block in given.items():
            tail, dtype = self._expected(name)
            if block.shape != (rows, *tail) or block.dtype != dtype:
                raise InputError(
                    f"chunk {i}: `{name}` must be {dtype} of shape {(rows, *tail)}, "
                    f"got {block.dtype} of shape {block.shape}"
                )

    def _write_block(self, name: str, i: int, block: npt.NDArray[Any]) -> None:
        array = self._group[name]
        assert isinstance(array, zarr.Array)
        if self._direct:
            pad = (self.chunk_rows - len(block)) * (block.nbytes // len(block))
            key = array.metadata.encode_chunk_key((i,) + (0,) * (block.ndim - 1))
            target = remote.join(self.work, name, key)
            # the scratch file of a killed run must not stay behind in the published store
            atomic.write_bytes(target, block, bytes(pad), folder=self._parts)
            return
        start = i * self.chunk_rows
        if start + len(block) > array.shape[0]:
            array.resize((start + len(block), *block.shape[1:]))
        array[start : start + len(block)] = block

    def _close_shape(self, rows: list[int]) -> None:
        short = [i for i, n in enumerate(rows[:-1]) if n != self.chunk_rows]
        if short:
            raise JobError(
                f"{self.path} cannot be finished: chunks {atomic.describe_parts(short)} have fewer than "
                f"{self.chunk_rows} rows; only the last chunk may"
            )
        self.n_samples = sum(rows)
        for name in self._names():
            array = self._group[name]
            assert isinstance(array, zarr.Array)
            if array.shape[0] != self.n_samples:
                array.resize((self.n_samples, *array.shape[1:]))

    def _write_checksums(self, table: npt.NDArray[np.uint32]) -> None:
        array = self._group.create_array(
            CHECKSUMS,
            data=table,
            chunks=table.shape,
            compressors=None,
            overwrite=True,
            dimension_names=("chunk", "array"),
            attributes={"arrays": self._names()},
            config={"write_empty_chunks": True, "order": "C"},
        )
        assert array.shape == table.shape

    def _sweep(self) -> None:
        """Remove the markers and whatever scratch files a killed run left."""
        remote.remove(self._parts)
        if remote.is_remote(self.work):
            return
        for name in ["", *self._names(), CHECKSUMS]:
            folder = os.path.join(self.work, name)
            for leftover in os.listdir(folder):
                if leftover.endswith(".partial"):
                    os.unlink(os.path.join(folder, leftover))
            atomic.fsync_path(folder)


def _bytes_of(block: npt.NDArray[Any]) -> memoryview:
    return block.reshape(-1).view(np.uint8).data


def create_activations(
    path: PathLike,
    n_samples: int | None,
    n_features: int,
    dtype: npt.DTypeLike | str,
    *,
    chunk_rows: int | None = None,
    compressor: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    aligned: Mapping[str, Aligned | npt.DTypeLike] | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> ActivationWriter:
    """Begin an activation store.

    Parameters
    ----------
    path : path or fsspec URL
        The name of the store. A local store appears there when it is complete.
    n_samples : int or None
        Number of rows; None when only the writing will tell.
    n_features : int
        Width of a row.
    dtype : dtype or str
        float16, float32, float64 or "bfloat16".
    chunk_rows : int, optional
        Rows per chunk; default: `default_chunk_rows`.
    compressor : {None, "zstd", "blosc"}
        None (default) reads fastest.
    attributes : dict, optional
        Provenance, kept with the store; must be JSON.
    aligned : dict, optional
        Name to dtype or `Aligned` of the arrays that have one entry per sample.
    overwrite : bool
        Replace a store of that name when the new one is complete.
    resume : bool
        Go on with the unfinished store of that name when it has the same description.

    Returns
    -------
    ActivationWriter
    """
    text = remote.normalise(path)
    plan = _make_plan(n_samples, n_features, dtype, chunk_rows, compressor, attributes, aligned)
    work = atomic.aside(text)
    begun = remote.join(work, PARTS, "plan.json")
    if remote.exists(text) and not overwrite and not (work == text and remote.exists(begun)):
        raise StoreError(f"{text} exists already; choose another name or allow overwriting with --force")
    if resume and remote.exists(begun):
        _check_same(text, atomic.read_json(begun), plan.to_json())
        return ActivationWriter(text, plan, overwrite)
    remote.remove(work)
    _create_group(work, plan)
    atomic.write_json(begun, plan.to_json())
    return ActivationWriter(text, plan, overwrite)


def open_writer(path: PathLike, *, overwrite: bool = False) -> ActivationWriter:
    """Open an unfinished store for writing, in a further process."""
    text = remote.normalise(path)
    begun = remote.join(atomic.aside(text), PARTS, "plan.json")
    if not remote.exists(begun):
        raise StoreError(f"no store is being written at {text}; begin one with create_activations")
    return ActivationWriter(text, _Plan.from_json(atomic.read_json(begun)), overwrite)


def _make_plan(
    n_samples: int | None,
    n_features: int,
    dtype: npt.DTypeLike | str,
    chunk_rows: int | None,
    compressor: str | None,
    attributes: Mapping[str, Any] | None,
    aligned: Mapping[str, Aligned | npt.DTypeLike] | None,
) -> _Plan:
    name = dtype_name(dtype)
    if (n_samples is not None and n_samples < 1) or n_features < 1:
        raise InputError(f"a store of shape ({n_samples}, {n_features}) has no content; need at least (1, 1)")
    if compressor not in (None, "zstd", "blosc"):
        raise InputError(f"compressor={compressor!r} is not known; use None, 'zstd' or 'blosc'")
    rows = default_chunk_rows(n_features, stored_dtype(name).itemsize) if chunk_rows is None else chunk_rows
    if rows < 1:
        raise InputError(f"chunk_rows={rows}; need at least 1")
    specs = {key: Aligned.of(value) for key, value in (aligned or {}).items()}
    for key in specs:
        if key in ("activations", CHECKSUMS) or not key.replace("_", "a").replace("-", "a").isalnum():
            raise InputError(f"an aligned array cannot be called {key!r}; use letters, digits, - and _")
    return _Plan(n_samples, n_features, name, rows, compressor, dict(attributes or {}), specs)


def _check_same(path: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    different = [key for key in now if before.get(key) != now[key]]
    if different:
        key = different[0]
        raise MismatchError(
            f"an unfinished store at {atomic.aside(path)} was begun with {key}={before.get(key)!r}, "
            f"now {key}={now[key]!r}; use the same options to go on, or --force to begin again"
        )


def _package_version() -> str:
    try:
        return version("dbksvd-dask")
    except PackageNotFoundError:
        return "unknown"


def _create_group(work: str, plan: _Plan) -> None:
    if not remote.is_remote(work):
        os.makedirs(os.path.join(work, PARTS))
    head = {
        "format": ACTIVATIONS_FORMAT,
        "format_version": ACTIVATIONS_VERSION,
        "package_version": _package_version(),
        "complete": False,
        "provenance": plan.attributes,
    }
    group = zarr.create_group(store=remote.zarr_store(work, read_only=False), zarr_format=3, attributes=head)
    rows = {"dtype": BFLOAT16} if plan.dtype == BFLOAT16 else {}
    _create_array(
        group, plan, "activations", stored_dtype(plan.dtype), (plan.n_features,), ("feature",), rows
    )
    for name, spec in plan.aligned.items():
        dims = tuple(f"{name}_{axis}" for axis in range(len(spec.shape)))
        _create_array(group, plan, name, np.dtype(spec.dtype), spec.shape, dims, spec.attributes)


def _create_array(
    group: zarr.Group,
    plan: _Plan,
    name: str,
    dtype: np.dtype[Any],
    tail: tuple[int, ...],
    dims: tuple[str, ...],
    attributes: dict[str, Any],
) -> None:
    codecs: dict[str | None, Any] = {
        None: None,
        "zstd": ZstdCodec(level=1),
        "blosc": BloscCodec(cname="lz4", shuffle="shuffle", typesize=dtype.itemsize),
    }
    group.create_array(
        name,
        shape=(plan.n_samples or 0, *tail),
        chunks=(plan.chunk_rows, *tail),
        dtype=dtype,
        compressors=codecs[plan.compressor],
        filters=None,
        fill_value=0,
        dimension_names=("sample", *dims),
        attributes=attributes,
        # one flat folder per array: a chunk is one file, not a folder with a file
        chunk_key_encoding={"name": "default", "separator": "."},
        config={"write_empty_chunks": True, "order": "C"},
    )
