"""Writing an activation store: chunk by chunk, in any order, from any number of threads and processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt

from dbksvd_dask.errors import InputError, JobError, StoreError
from dbksvd_dask.store import atomic
from dbksvd_dask.store.chunk_file import Rows, Watch
from dbksvd_dask.store.layout import (
    Aligned,
    StorePlan,
    array_specs,
    attributes_of,
    check_same,
    make_plan,
    require_replaceable,
)
from dbksvd_dask.store.partial import BEGIN_AGAIN, PARTS, Partial, begun_plan, content_id
from dbksvd_dask.store.paths import PathLike, exists, is_remote, join, normalise, open_zarr, remove
from dbksvd_dask.store.reader import ACTIVATIONS_FORMAT, ROWS
from dbksvd_dask.store.write_behind import WriteBehind

JOB_ID = "job_id"


class ActivationWriter:
    """Writes an activation store chunk by chunk, in any order, from any number of threads and processes.

    Made by `create_activations` and, in further processes, by `open_writer`. Chunk i holds the rows
    [i * chunk_rows, (i + 1) * chunk_rows); only the last chunk may be shorter.
    """

    def __init__(self, path: str, plan: StorePlan, overwrite: bool, durable: bool = False) -> None:
        self._partial = self._partial_of(path, plan, durable)
        self.path, self.work = self._partial.path, self._partial.work
        self.chunk_rows = plan.chunk_rows
        self.n_features = plan.n_features
        self._plan = plan
        self._overwrite = overwrite
        self._behind = WriteBehind()
        self._partial.require_sound()

    @classmethod
    def begin(cls, path: PathLike, plan: StorePlan) -> None:
        """Make the empty store."""
        cls._partial_of(path, plan).begin(attributes_of(plan), plan.to_json())

    @staticmethod
    def _partial_of(path: PathLike, plan: StorePlan, durable: bool = False) -> Partial:
        return Partial(
            path,
            array_specs(plan),
            plan.n_samples,
            plan.chunk_rows,
            part="chunk",
            compressor=plan.compressor,
            durable=durable,  # by default forced to the disk at the end, all at once
        )

    @property
    def n_samples(self) -> int | None:
        """Return the number of rows; None while it is open."""
        return self._partial.n_samples

    @property
    def n_chunks(self) -> int | None:
        """Return the number of chunks; None while the number of samples is open."""
        return None if self.n_samples is None else -(-self.n_samples // self.chunk_rows)

    @property
    def complete(self) -> bool:
        """Return whether everything is written and only the publishing is left."""
        attributes = self._partial.attributes()
        if attributes.get("complete") and "content_id" not in attributes:  # both are written at once
            file = join(self.work, "zarr.json")
            raise StoreError(f"{file} is damaged: it calls an unfinished store complete; {BEGIN_AGAIN}")
        return bool(attributes.get("complete"))

    def done(self) -> list[int]:
        """Return the chunks that are written."""
        return list(range(self.n_chunks or 0)) if self.complete else self._partial.done()

    def is_written(self, i: int) -> bool:
        """Return whether some process has written one chunk."""
        return exists(self._partial.marker(i))

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
            Called with (first row, some rows) before rows are written.
        before_done : callable, optional
            Called when all is written, before the chunk counts as done.

        Raises
        ------
        JobError
            When it does not read back as written.
        """
        given: dict[str, Rows] = {ROWS: rows, **(aligned or {})}
        self._check_chunk(i, given)
        checksums = [
            self._partial.write_block(
                name, i, given[name], verify=verify, on_rows=on_rows if name == ROWS else None
            )
            for name in self._partial.arrays
        ]
        if before_done is not None:
            before_done()
        self._partial.mark(i, len(rows), [checksums])
        if self._partial.direct and not self._partial.durable:
            for name in self._partial.arrays:
                self._behind.add(self._partial.chunk_file(name, i), given[name].nbytes)

    def forget(self, i: int) -> None:
        """Count a chunk as not written."""
        self._partial.forget(i)

    def discard(self) -> None:
        """Throw the unfinished store away, even while tasks of this job still write to it."""
        self._partial.discard()
        if is_remote(self.work):
            remove(self.work)

    def recheck(self, chunks: Iterable[int] | None = None) -> list[int]:
        """Read written chunks back; those that differ count as missing again and are returned.

        A killed run leaves whole chunks, but a power failure may lose the content of files that had a name, unless
        they were forced to the disk.

        Parameters
        ----------
        chunks : iterable of int, optional
            Written chunks; default: all.
        """
        return [] if self.complete else self._partial.recheck(chunks, trust_forced=True)

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
        self._partial.publish(self._overwrite)

    def _all_done(self) -> list[int]:
        """Return all chunks; refuse if some are not written."""
        missing, done = self.missing(), self.done()
        if missing or not done:
            total = self.n_chunks if self.n_chunks is not None else len(missing) + len(done)
            listed = atomic.describe_parts(missing) or "all"
            raise JobError(f"{self.path} cannot be finished: chunks {listed} of {total} are not written")
        return done

    def _complete(self, verify: bool, attributes: dict[str, Any]) -> None:
        done = self._all_done()
        self._close_shape([self._partial.rows_of(part) for part in done])
        # parts may have been begun by a run that forces nothing until its end
        bad = self._partial.recheck(trust_forced=not verify) if verify or self._partial.durable else []
        if bad:
            raise JobError(
                f"{self.path} cannot be finished: chunks {atomic.describe_parts(bad)} do not read back as they "
                "were written (is the disk failing?); run again to write them anew"
            )
        table, group = self._partial.checksums(done), self._partial.group()
        self._partial.write_checksums(group, table)
        names = list(self._partial.arrays)
        head = [self.n_samples, self.n_features, self._plan.dtype, self.chunk_rows, names]
        known = {**attributes_of(self._plan), **attributes, "content_id": content_id(head, table)}
        self._partial.seal(group, known)

    # -- the parts of a write ----------------------------------------

    def _check_chunk(self, i: int, given: Mapping[str, Rows]) -> None:
        names = sorted(self._partial.arrays)
        if sorted(given) != names:
            raise InputError(f"chunk {i} came with {sorted(given)}; {self.path} needs {names}")
        rows = len(given[ROWS])
        if i < 0 or rows == 0 or (self.n_chunks is not None and i >= self.n_chunks):
            raise InputError(f"chunk {i} of {rows} rows does not exist in {self.path} of {self.n_chunks} chunks")
        if self.n_samples is not None:
            expected = min(self.chunk_rows, self.n_samples - i * self.chunk_rows)
            if rows != expected:
                raise InputError(f"chunk {i} of {self.path} needs {expected} rows, got {rows}")
        elif rows > self.chunk_rows:
            raise InputError(f"chunk {i} of {self.path} has room for {self.chunk_rows} rows, got {rows}")
        for name, block in given.items():
            spec = self._partial.arrays[name]
            if block.shape != (rows, *spec.tail) or block.dtype != spec.dtype:
                raise InputError(
                    f"chunk {i}: `{name}` must be {spec.dtype} of shape {(rows, *spec.tail)}, "
                    f"got {block.dtype} of shape {block.shape}"
                )

    def _close_shape(self, rows: list[int]) -> None:
        short = [i for i, n in enumerate(rows[:-1]) if n != self.chunk_rows]
        if short:
            raise JobError(
                f"{self.path} cannot be finished: chunks {atomic.describe_parts(short)} have fewer than "
                f"{self.chunk_rows} rows; only the last chunk may"
            )
        self._partial.close_shape(sum(rows))


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
    shared: bool = False,
    job: Mapping[str, Any] | None = None,
) -> ActivationWriter:
    """Begin an activation store.

    Parameters
    ----------
    path : path or fsspec URL
        The name of the store. A local store appears there when it is complete.
    n_samples : int or None
        Number of rows; None if it is known only at the end.
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
        Resume the unfinished store of that name; refused if it was begun with another description. Where an
        error of this function suggests `force=True`, which is the parameter of the jobs, pass ``resume=False``.
    shared : bool
        Several processes may write this store at the same time: resume what any of them began, and force each
        chunk to the disk as it is written.
    job : dict, optional
        What else must be the same to resume, such as the files that are read; not kept with the store.

    Returns
    -------
    ActivationWriter

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import create_activations, open_activations
    >>> rows = np.load("activations.npy")
    >>> writer = create_activations("store.zarr", 300, 8, "float32", chunk_rows=100)
    >>> for chunk in range(3):
    ...     writer.write_chunk(chunk, rows[100 * chunk : 100 * (chunk + 1)])
    >>> writer.finish()
    >>> open_activations("store.zarr").sizes["sample"]
    300
    """
    text = normalise(path)
    plan = make_plan(n_samples, n_features, dtype, chunk_rows, compressor, attributes, aligned, job)
    begin_or_resume(ActivationWriter, text, plan, overwrite, resume, shared)
    writer = ActivationWriter(text, plan, overwrite, durable=shared)
    if not shared:
        writer.recheck()
    return writer


def begin_or_resume(
    writer: type[ActivationWriter], path: str, plan: StorePlan, overwrite: bool, resume: bool, shared: bool = False
) -> None:
    """Make the empty store of a writer; with `resume` or `shared`, keep an unfinished one of the same description.

    With `shared`, remove nothing: another process may have begun it just now.
    """
    require_free(path, overwrite)
    begun = begun_plan(path) if resume or shared else None
    if begun is None:
        if not shared:
            remove(atomic.aside(path))
        writer.begin(path, plan)
        begun = begun_plan(path)
        assert begun is not None
    check_same(path, atomic.read_sealed(begun), plan.to_json())


def require_free(path: PathLike, overwrite: bool = False, parameter: str = "overwrite") -> None:
    """Refuse a name that is taken, unless it is an activation store that may be overwritten or is unfinished.

    Parameters
    ----------
    path : path
    overwrite : bool
    parameter : str
        What the caller calls `overwrite`, for the message.
    """
    text = normalise(path)
    begun = atomic.aside(text) == text and begun_plan(text) is not None
    if not exists(text) or begun:
        return
    if not overwrite:
        raise StoreError(f"{text} already exists; choose another name, or replace it with {parameter}=True")
    require_replaceable(text, ACTIVATIONS_FORMAT)


def job_id(description: Mapping[str, Any]) -> str:
    """Identify the job that makes a store: what it reads and how, in plain JSON values."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def is_finished(path: PathLike, identity: str) -> bool:
    """Return whether the store at `path` is the complete result of a job, as `job_id` gave it."""
    if not exists(path):
        return False
    try:
        attributes = open_zarr(path).attrs
        return bool(attributes.get("complete")) and attributes.get(JOB_ID) == identity
    except StoreError:
        return False


def may_be_finished(path: PathLike) -> bool:
    """Return whether some job has finished the store at `path`, so that comparing it with this one is useful."""
    try:
        return exists(path) and JOB_ID in open_zarr(path).attrs
    except StoreError:
        return False


def require_room(path: PathLike, n_samples: int, chunk_rows: int, row_bytes: int, extra: int = 0) -> None:
    """Refuse to begin or resume an uncompressed store that cannot fit on its disk.

    Parameters
    ----------
    path : path
        The store; what is already written needs no further space.
    n_samples, chunk_rows, row_bytes : int
        Its rows, the rows of a chunk, and the bytes of a row with all that is aligned to it.
    extra : int
        Further bytes that are needed beside it.
    """
    work = atomic.aside(path)
    done = len(atomic.Ledger(join(work, PARTS), "chunk").parts())
    chunks = max(0, -(-n_samples // chunk_rows) - done)
    atomic.require_space(work, chunks * chunk_rows * row_bytes + extra)


def open_writer(path: PathLike, *, overwrite: bool = False, shared: bool = False) -> ActivationWriter:
    """Open an unfinished store for writing, in a further process; parameters as of `create_activations`."""
    text = normalise(path)
    return ActivationWriter(text, plan_of(text), overwrite, durable=shared)


def plan_of(path: str) -> StorePlan:
    """Return what an unfinished store will hold."""
    begun = begun_plan(path)
    if begun is None:
        raise StoreError(f"no store is being written at {path}; begin one with create_activations")
    return StorePlan.read(begun)
