"""Writing an activation store: chunk by chunk, in any order, by any number of threads and processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from dbksvd_dask.errors import InputError, JobError, StoreError
from dbksvd_dask.store import atomic
from dbksvd_dask.store._system import same_bytes
from dbksvd_dask.store.checksums import crc32c, file_crc
from dbksvd_dask.store.chunk_file import ReadBackError, Rows, Stream, Watch, write_chunk_file
from dbksvd_dask.store.dtypes import stored_dtype
from dbksvd_dask.store.layout import (
    PARTS,
    Aligned,
    StorePlan,
    attributes_of,
    check_same,
    create_group,
    make_plan,
    require_layout,
    require_replaceable,
)
from dbksvd_dask.store.paths import (
    PathLike,
    exists,
    explain_metadata,
    is_remote,
    join,
    list_names,
    normalise,
    open_zarr,
    remove,
    zarr_store,
)
from dbksvd_dask.store.reader import ACTIVATIONS_FORMAT, ROW_CHECKSUMS
from dbksvd_dask.store.write_behind import WriteBehind

FSYNC_THREADS = 4
JOB_ID = "job_id"


class ActivationWriter:
    """Writes an activation store chunk by chunk, in any order, from any number of threads and processes.

    Made by `create_activations` and, in further processes, by `open_writer`. Chunk i holds the rows
    [i * chunk_rows, (i + 1) * chunk_rows); only the last chunk may be shorter.
    """

    def __init__(self, path: str, plan: StorePlan, overwrite: bool) -> None:
        self.path = path
        self.work = atomic.aside(path)
        self.chunk_rows = plan.chunk_rows
        self.n_features = plan.n_features
        self.n_samples = plan.n_samples
        self._plan = plan
        self._overwrite = overwrite
        self._stored = stored_dtype(plan.dtype)
        self._parts = join(self.work, PARTS)
        self._ledger = atomic.Ledger(self._parts, "chunk", durable=False)
        self._direct = plan.compressor is None and not is_remote(path)
        self._behind = WriteBehind()
        store = zarr_store(self.work, read_only=False)
        with explain_metadata(self.work):
            self._group = zarr.open_group(store=store, mode="r+")
        self._arrays = {name: self._open_array(store, name) for name in self._names()}

    def _open_array(self, store: Any, name: str) -> zarr.Array[Any]:
        # a setting of the process, not kept in the store: without it a chunk of zeros would be left out
        with (
            zarr.config.set({"array.write_empty_chunks": True, "array.order": "C"}),
            explain_metadata(join(self.work, name)),
        ):
            array = zarr.open_array(store=store, path=name, mode="r+")
        tail, dtype = self._expected(name)
        raw = self._plan.compressor is None
        require_layout(join(self.work, name), array, tail, dtype, self.chunk_rows, raw)
        return array

    @property
    def n_chunks(self) -> int | None:
        """Return the number of chunks; None while the number of samples is open."""
        return None if self.n_samples is None else -(-self.n_samples // self.chunk_rows)

    @property
    def complete(self) -> bool:
        """Tell whether everything is written and only the publishing is left."""
        attributes = self._group.attrs
        if attributes.get("complete") and "content_id" not in attributes:  # both are written at once
            file = join(self.work, "zarr.json")
            raise StoreError(f"{file} is damaged: it calls an unfinished store complete; begin again with --force")
        return bool(attributes.get("complete"))

    def done(self) -> list[int]:
        """Return the chunks that are written."""
        return list(range(self.n_chunks or 0)) if self.complete else self._ledger.parts()

    def missing(self) -> list[int]:
        """Return the chunks that are still to be written."""
        done = self.done()
        n_chunks = self.n_chunks if self.n_chunks is not None else (done[-1] + 1 if done else 0)
        return sorted(set(range(n_chunks)) - set(done))

    def write_chunk(
        self,
        i: int,
        rows: Rows,
        aligned: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        verify: bool = True,
        on_rows: Watch | None = None,
        before_done: Callable[[], None] | None = None,
    ) -> None:
        """Write one whole chunk; a chunk that was written before is replaced.

        Parameters
        ----------
        i : int
            Number of the chunk.
        rows : ndarray, or Stream, of shape (chunk_rows, n_features)
            Its rows, of the dtype of the store (uint16 bits for bfloat16); the last chunk may have fewer.
        aligned : dict of ndarray of shape (len(rows), ...)
            One entry for each aligned array of the store.
        verify : bool
            Read the chunk back and compare it.
        on_rows : callable, optional
            Shown the rows before they are written, as (first row, some rows).
        before_done : callable, optional
            Called when all is written, before the chunk counts as done.

        Raises
        ------
        JobError
            When it does not read back as written.
        """
        given: dict[str, Rows] = {"activations": rows, **(aligned or {})}
        self._check_chunk(i, given)
        checksums = []
        for name in self._names():
            watch = on_rows if name == "activations" else None
            try:
                checksums.append(self._write_block(name, i, given[name], verify, watch))
            except ReadBackError as error:
                raise JobError(
                    f"chunk {i} of `{name}` in {self.work} does not read back as it was written; "
                    "is the disk failing?"
                ) from error
        if before_done is not None:
            before_done()
        self._ledger.mark(i, {"rows": len(rows), "crc32c": checksums})
        if self._direct:
            for name in self._names():
                self._behind.add(self._chunk_file(name, i), given[name].nbytes)

    def check_chunk(self, i: int) -> bool:
        """Tell whether a written chunk reads back as it was written, by its checksums."""
        try:
            mark = self._ledger.read(i)
            read_back = [self._checksum(name, i, mark["rows"]) for name in self._names()]
        except (OSError, KeyError, ValueError):
            return False
        return bool(read_back == mark["crc32c"])

    def forget(self, i: int) -> None:
        """Count a chunk as not written."""
        self._ledger.unmark(i)

    def recheck(self) -> list[int]:
        """Read every written chunk back; those that differ count as missing again and are returned.

        A killed run leaves whole chunks, but a power failure may lose the content of files that had a name.
        """
        bad = [] if self.complete else [i for i in self._ledger.parts() if not self.check_chunk(i)]
        for i in bad:
            self._ledger.unmark(i)
        return bad

    def finish(self, *, verify: bool = False, attributes: Mapping[str, Any] | None = None) -> None:
        """Mark the store complete and publish it under its name.

        Parameters
        ----------
        verify : bool
            Read every chunk once more and compare its checksum first; each was compared when it was written.
        attributes : dict, optional
            Further attributes of the store, known only now.

        Raises
        ------
        JobError
            When chunks are missing or do not read back as written; it lists them.
        """
        if not self.complete:
            self._complete(verify, dict(attributes or {}))
        self._sweep()
        if self.work != self.path:
            atomic.publish(self.work, self.path, overwrite=self._overwrite)
        remove(join(self.path, PARTS))

    def _complete(self, verify: bool, attributes: dict[str, Any]) -> None:
        missing, done = self.missing(), self.done()
        if missing or not done:
            total = self.n_chunks if self.n_chunks is not None else len(missing) + len(done)
            listed = atomic.describe_parts(missing) or "all"
            raise JobError(f"{self.path} cannot be finished: chunks {listed} of {total} are not written")
        marks = [self._ledger.read(part) for part in done]
        self._close_shape([mark["rows"] for mark in marks])
        bad = self.recheck() if verify else []
        if bad:
            raise JobError(
                f"{self.path} cannot be finished: chunks {atomic.describe_parts(bad)} do not read back as they "
                "were written (is the disk failing?); run again to write them anew"
            )
        table = np.array([mark["crc32c"] for mark in marks], np.uint32)
        with ThreadPoolExecutor(FSYNC_THREADS) as pool:  # waiting for the disk, not for a core
            chunks = [pool.submit(atomic.fsync_path, path) for path in self._files(self._names())]
            self._write_checksums(table)  # meanwhile
            rest = [pool.submit(atomic.fsync_path, path) for path in self._files(("", ROW_CHECKSUMS))]
            for forced in (*chunks, *rest):
                forced.result()
        # in one write (attrs.update makes one per key): a store is complete with all its attributes, or not yet
        known = {**attributes_of(self._plan), **attributes}
        self._group.update_attributes({**known, "complete": True, "content_id": self._content_id(table)})
        if not is_remote(self.work):
            atomic.fsync_path(os.path.join(self.work, "zarr.json"))

    def _content_id(self, table: npt.NDArray[np.uint32]) -> str:
        head = [self.n_samples, self.n_features, self._plan.dtype, self.chunk_rows, self._names()]
        return hashlib.sha256(json.dumps(head).encode() + table.astype("<u4").tobytes()).hexdigest()[:32]

    # -- the parts of a write ----------------------------------------

    def _names(self) -> list[str]:
        return ["activations", *self._plan.aligned]

    def _expected(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if name == "activations":
            return (self.n_features,), self._stored
        spec = self._plan.aligned[name]
        return spec.shape, np.dtype(spec.dtype)

    def _check_chunk(self, i: int, given: Mapping[str, Rows]) -> None:
        if set(given) != set(self._names()):
            raise InputError(f"chunk {i} came with {sorted(given)}; {self.path} needs {sorted(self._names())}")
        rows = len(given["activations"])
        if i < 0 or rows == 0 or (self.n_chunks is not None and i >= self.n_chunks):
            raise InputError(f"chunk {i} of {rows} rows does not exist in {self.path} of {self.n_chunks} chunks")
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

    def _write_block(self, name: str, i: int, rows: Rows, verify: bool, on_rows: Watch | None) -> int:
        """Write one array of a chunk; return the checksum of its rows."""
        if not self._direct:
            block = np.ascontiguousarray(rows.whole() if isinstance(rows, Stream) else rows)
            if on_rows is not None:
                on_rows(0, block)
            return self._write_zarr(name, i, block, verify)
        content = rows if isinstance(rows, Stream) else np.ascontiguousarray(rows)
        pad = (self.chunk_rows - len(rows)) * (rows.nbytes // len(rows))
        # the scratch file of a killed run must not stay behind in the published store
        file, scratch = self._chunk_file(name, i), self._parts
        return write_chunk_file(file, content, pad, folder=scratch, verify=verify, on_rows=on_rows)

    def _write_zarr(self, name: str, i: int, block: npt.NDArray[Any], verify: bool) -> int:
        """Write one array of a chunk that is compressed or goes elsewhere; return the checksum of its rows."""
        array, start = self._arrays[name], i * self.chunk_rows
        if start + len(block) > array.shape[0]:
            array.resize((start + len(block), *block.shape[1:]))
        array[start : start + len(block)] = block
        if verify:
            found = np.ascontiguousarray(np.asarray(array[start : start + len(block)]))
            both = [a.reshape(-1).view(np.uint8) for a in (found, block)]
            if found.shape != block.shape or not same_bytes(*both):
                raise ReadBackError(f"chunk {i} of {name} does not read back as it was written")
        return crc32c(block)

    def _chunk_file(self, name: str, i: int) -> str:
        array = self._arrays[name]
        return join(self.work, name, array.metadata.encode_chunk_key((i,) + (0,) * (array.ndim - 1)))

    def _checksum(self, name: str, i: int, rows: int) -> int:
        tail, dtype = self._expected(name)
        array = self._arrays[name]
        start = i * self.chunk_rows
        if not self._direct:
            return crc32c(np.asarray(array[start : start + rows]))
        row_bytes = math.prod(tail) * dtype.itemsize
        return file_crc(self._chunk_file(name, i), rows * row_bytes, self.chunk_rows * row_bytes)

    def _close_shape(self, rows: list[int]) -> None:
        short = [i for i, n in enumerate(rows[:-1]) if n != self.chunk_rows]
        if short:
            raise JobError(
                f"{self.path} cannot be finished: chunks {atomic.describe_parts(short)} have fewer than "
                f"{self.chunk_rows} rows; only the last chunk may"
            )
        self.n_samples = sum(rows)
        for name in self._names():
            array = self._arrays[name]
            if array.shape[0] != self.n_samples:
                array.resize((self.n_samples, *array.shape[1:]))

    def _write_checksums(self, table: npt.NDArray[np.uint32]) -> None:
        array = self._group.create_array(
            ROW_CHECKSUMS,
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
        """Remove the markers; the plan stays until the store is published, to tell what it is."""
        for name in list_names(self._parts):
            if name != "plan.json":
                remove(join(self._parts, name))

    def _files(self, names: Iterable[str]) -> list[str]:
        """Return the files of arrays and their folders, less scratch files of a killed run, which go."""
        if is_remote(self.work):
            return []
        folders = [os.path.join(self.work, name) for name in names]
        paths = []
        for path in (os.path.join(folder, found) for folder in folders for found in os.listdir(folder)):
            if path.endswith(".partial"):
                os.unlink(path)
            elif os.path.isfile(path):
                paths.append(path)
        return [*paths, *folders]


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
    job: Mapping[str, Any] | None = None,
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
        Go on with the unfinished store of that name; refused when it was begun with another description.
    job : dict, optional
        What else must be the same to go on, such as the files that are read; not kept with the store.

    Returns
    -------
    ActivationWriter
    """
    text = normalise(path)
    plan = make_plan(n_samples, n_features, dtype, chunk_rows, compressor, attributes, aligned, job)
    work = atomic.aside(text)
    begun = join(work, PARTS, "plan.json")
    require_free(text, overwrite)
    if resume and exists(begun):
        check_same(text, atomic.read_sealed(begun), plan.to_json())
        writer = ActivationWriter(text, plan, overwrite)
        writer.recheck()
        return writer
    remove(work)
    create_group(work, plan)
    atomic.write_sealed(begun, plan.to_json())
    return ActivationWriter(text, plan, overwrite)


def require_free(path: PathLike, overwrite: bool = False) -> None:
    """Refuse a name that is taken, unless it is an activation store that may be overwritten or is unfinished."""
    text = normalise(path)
    begun = atomic.aside(text) == text and exists(join(text, PARTS, "plan.json"))
    if not exists(text) or begun:
        return
    if not overwrite:
        raise StoreError(f"{text} exists already; choose another name or allow overwriting with --force")
    require_replaceable(text, ACTIVATIONS_FORMAT)


def job_id(description: Mapping[str, Any]) -> str:
    """Identify the job that makes a store: what it reads and how, in plain JSON values."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def is_finished(path: PathLike, identity: str) -> bool:
    """Tell whether the store at `path` is the complete result of a job, as `job_id` gave it."""
    if not exists(path):
        return False
    try:
        attributes = open_zarr(path).attrs
        return bool(attributes.get("complete")) and attributes.get(JOB_ID) == identity
    except StoreError:
        return False


def may_be_finished(path: PathLike) -> bool:
    """Tell whether some job has finished the store at `path`: worth finding out whether it was this one."""
    try:
        return exists(path) and JOB_ID in open_zarr(path).attrs
    except StoreError:
        return False


def tidy(path: PathLike) -> None:
    """Remove what a run that was killed after it had published a store left in it."""
    remove(join(path, PARTS))


def require_room(path: PathLike, n_samples: int, chunk_rows: int, row_bytes: int, extra: int = 0) -> None:
    """Refuse to begin, or go on with, an uncompressed store that cannot fit on its disk.

    Parameters
    ----------
    path : path
        The store; what is written of it already is not asked for again.
    n_samples, chunk_rows, row_bytes : int
        Its rows, the rows of a chunk, and the bytes of a row with all that is aligned to it.
    extra : int
        Further bytes that are needed beside it.
    """
    work = atomic.aside(path)
    done = len(atomic.Ledger(join(work, PARTS), "chunk").parts())
    chunks = max(0, -(-n_samples // chunk_rows) - done)
    atomic.require_space(work, chunks * chunk_rows * row_bytes + extra)


def open_writer(path: PathLike, *, overwrite: bool = False) -> ActivationWriter:
    """Open an unfinished store for writing, in a further process."""
    text = normalise(path)
    begun = join(atomic.aside(text), PARTS, "plan.json")
    if not exists(begun):
        raise StoreError(f"no store is being written at {text}; begin one with create_activations")
    return ActivationWriter(text, StorePlan.read(begun), overwrite)
