"""Import: files of many layouts to one activation store, restartable, with bounded memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask._safe_text import redacted
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.events import Callback, JobProgress, emit
from dbksvd_dask.importers import Collection, Hints
from dbksvd_dask.importers.linking import linkable_spans
from dbksvd_dask.importers.plausible import Values, look_at
from dbksvd_dask.importers.selection import Rules, Selection, with_mask_of_layout
from dbksvd_dask.importers.texts import file_of_texts, open_texts
from dbksvd_dask.importers.values import nonfinite_rows
from dbksvd_dask.jobs.base import Buffers, begin_or_go_on, run_bounded, storing_threads
from dbksvd_dask.progress import with_view
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import (
    ActivationWriter,
    Aligned,
    create_activations,
    default_chunk_rows,
    open_rows,
)
from dbksvd_dask.store.chunk_file import Rows, Stream
from dbksvd_dask.store.dtypes import stored_dtype
from dbksvd_dask.store.link_writer import create_links
from dbksvd_dask.store.lock import Lock, hold
from dbksvd_dask.store.partial import tidy
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.spans import Span, SpanReader
from dbksvd_dask.store.writer import (
    JOB_ID,
    is_finished,
    job_id,
    may_be_finished,
    require_free,
    require_room,
)

SOURCE_ROW = "source_row"
# names of files kept in the attributes; all of them are in the unfinished job
LISTED_FILES = 100
# places of a new store whose values are looked at, and rows of each
LOOKED_AT, LOOKED_AT_ROWS = 4, 1024

# the rows, or where they lie, and what is aligned to them
Loaded = tuple[npt.NDArray[Any] | list[Span], dict[str, npt.NDArray[Any]]]
Ranges = list[tuple[int, int, npt.NDArray[np.bool_] | None]]


@dataclass(frozen=True)
class ImportResult:
    """What an import did.

    Attributes
    ----------
    path : str
        The store.
    n_samples, n_features, dtype
        What it holds.
    n_files : int
        Files that were read.
    dropped : dict
        Rows left out, by reason.
    chunks_written, chunks_kept : int
        Chunks written by this run, and by an interrupted one before it.
    blocks_scanned : int
        Blocks this run scanned to decide which rows are kept; 0 when no rule requires it.
    nbytes : int
        Bytes of the rows.
    seconds : float
        Time this run took.
    values : Values, optional
        Smallest, largest and mean norm of some rows, and whether they look right.
    texts : str, optional
        File of the texts beside the store.
    """

    path: str
    n_samples: int
    n_features: int
    dtype: str
    n_files: int
    dropped: dict[str, int] = field(default_factory=dict)
    chunks_written: int = 0
    chunks_kept: int = 0
    blocks_scanned: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    values: Values | None = None
    texts: str | None = None


class ImportJob:
    """An import in steps: `init` scans the files, `run` writes missing chunks, `finish` publishes.

    Every step can be repeated; see `import_activations` for the parameters.
    """

    def __init__(
        self,
        source: PathLike | Sequence[PathLike],
        path: PathLike,
        *,
        array: str | None = None,
        aligned: Sequence[str] = (),
        texts: PathLike | None = None,
        format: str | None = None,
        dtype: str | None = None,
        n_features: int | None = None,
        layer: int | None = None,
        rules: Rules | None = None,
        source_row: bool = False,
        chunk_rows: int | None = None,
        compressor: str | None = None,
        link: bool = False,
        force: bool = False,
        verify: bool | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.path = paths.normalise(path)
        if force or not may_be_finished(self.path):
            require_free(self.path, force, "force")
        self.rules = with_mask_of_layout(rules or Rules(), source, format, self.path, link)
        self.source_row = source_row
        self._layer = layer
        self.compressor = compressor
        self.force = force
        self.link = link
        self.verify = not link if verify is None else verify
        self.callbacks = tuple(callbacks)
        self._kept_arrays = tuple(aligned)
        beside = dict.fromkeys((*aligned, *((self.rules.mask_array,) if self.rules.mask_array else ())))
        hints = Hints(dtype, n_features, layer)
        self.rows = Collection(
            source, array=array, aligned=tuple(beside), hints=hints, format=format, exclude=self.path
        )
        self.texts = open_texts(self.rows, self.path, texts)
        self._texts_file = file_of_texts(self.path)
        width, itemsize = self.rows.n_features, stored_dtype(self.rows.dtype).itemsize
        self.chunk_rows = chunk_rows or min(default_chunk_rows(width, itemsize), self.rows.n_rows)
        self._scan_folder = atomic.aside(f"{self.path}.scan")
        self.selection = Selection(self.rows, self.rules, self._scan_folder, self.chunk_rows)
        self._linked = linkable_spans(self.rows, self.rules, self.path, compressor) if link else []
        self._writer: ActivationWriter | None = None
        self._scanning = False
        self.blocks_scanned = 0
        self._buffers = Buffers()
        if not self.is_finished():
            require_free(self.path, force, "force")
            if self.texts is not None and not force:
                self.texts.require_free(self._texts_file)

    # -- init ----------------------------------------

    def init(self) -> ActivationWriter:
        """Determine which rows are kept, and begin or resume the store."""
        job = self._identity()
        n_blocks = self.selection.n_blocks
        with atomic.explain_full_disk(self._scan_folder):
            self._begin_scan(job)
            self.blocks_scanned = self.selection.scan(lambda n: self._progress("scan", n, n_blocks, "blocks"))
        if self.compressor is None:
            require_room(self.path, self.selection.n_kept, self.chunk_rows, self.written_row_bytes)
        with atomic.explain_full_disk(atomic.aside(self.path)):
            self._writer = self._begin_store(job)
        return self._writer

    @property
    def written_row_bytes(self) -> int:
        """Return the bytes that are written for each row, with all that is aligned to it."""
        aligned = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in self._aligned().values())
        return aligned + (0 if self.link else self.rows.n_features * stored_dtype(self.rows.dtype).itemsize)

    def is_finished(self) -> bool:
        """Return whether the result of this import already exists and is not to be replaced."""
        return not self.force and is_finished(self.path, self._job_id())

    def _job_id(self) -> str:
        aligned = {name: asdict(spec) for name, spec in self._aligned().items()}
        return job_id({"import": self._identity(), "aligned": aligned, "compressor": self.compressor})

    def _identity(self) -> dict[str, Any]:
        """Describe what is imported and how, so that another run can compare."""
        linked = {"link": True, "checksums": self.verify} if self.link else {}
        texts = {} if self.texts is None else {"texts": self.texts.identity}
        return {
            **linked,
            **texts,
            "files": [[_absolute(m.path), list(m.shape), *m.identity] for m in self.rows.members],
            "array": self.rows.array,
            **({} if self._layer is None else {"layer": self._layer}),
            "dtype": self.rows.dtype,
            "rules": asdict(self.rules),
            "mask": None if self.rules.mask is None else _status(self.rules.mask),
            "chunk_rows": self.chunk_rows,
        }

    def _begin_scan(self, job: dict[str, Any]) -> None:
        if self.rules.keep_all:
            return
        described = paths.join(self._scan_folder, "job.json")
        if paths.exists(described):
            if self._scan_begun_with(described) == job:
                self._scanning = True
                return
            if not self.force:
                raise MismatchError(
                    f"an unfinished import to {self.path} was begun with other files or options; use the same to "
                    "resume, or force=True to begin again"
                )
        paths.remove(self._scan_folder)
        if not paths.is_remote(self._scan_folder):
            os.makedirs(self._scan_folder)
        atomic.write_sealed(described, job)
        self._scanning = True

    def _scan_begun_with(self, described: str) -> dict[str, Any] | None:
        try:
            return atomic.read_sealed(described)
        except StoreError:
            if not self.force:
                raise
            return None

    def _begin_store(self, job: dict[str, Any]) -> ActivationWriter:
        def begin(resume: bool) -> ActivationWriter:
            shape = (self.selection.n_kept, self.rows.n_features, self.rows.dtype)
            common: dict[str, Any] = {
                "chunk_rows": self.chunk_rows,
                "attributes": self._provenance(),
                "aligned": self._aligned(),
                "overwrite": self.force,
                "resume": resume,
                "job": job,
            }
            if self.link:
                return create_links(self.path, self._linked, *shape, checksums=self.verify, **common)
            return create_activations(self.path, *shape, compressor=self.compressor, **common)

        return begin_or_go_on(begin, self.force)

    def _aligned(self) -> dict[str, Aligned]:
        aligned = {}
        for name in self._kept_arrays:
            info = self.rows.aligned[name]
            aligned[_stored_name(name)] = Aligned(info.dtype, info.shape[1:])
        if self.source_row:
            aligned[SOURCE_ROW] = Aligned("int64")
        for name, dtype in ({} if self.texts is None else self.texts.arrays).items():
            aligned[name] = Aligned(dtype)
        return aligned

    def _provenance(self) -> dict[str, Any]:
        names = [os.path.basename(_absolute(m.path)) for m in self.rows.members]
        return {
            "command": "import",
            "source": _absolute(self.rows.source),
            "files": names[:LISTED_FILES],
            "n_files": len(names),
            "array": self.rows.array,
            **({} if self._layer is None else {"layer": self._layer}),
            "source_rows": self.rows.n_rows,
            **({} if self.texts is None else {"texts": os.path.basename(self._texts_file)}),
            **self.selection.describe(),
        }

    # -- parts ----------------------------------------

    def run(self, parts: Sequence[int] | None = None, n_threads: int | None = None) -> int:
        """Write chunks, by default all that are missing; return how many."""
        writer = self._writer or self.init()
        missing = writer.missing() if parts is None else list(parts)
        total, before = self.selection.n_kept, len(writer.done())

        def on_done(_: int) -> None:
            nonlocal before
            before += 1
            self._progress("import", min(before * self.chunk_rows, total), total, "rows")

        self._progress("import", min(before * self.chunk_rows, total), total, "rows")
        with atomic.explain_full_disk(writer.work):
            return run_bounded(missing, self._load, self._store, on_done, n_threads or storing_threads())

    def _load(self, i: int) -> Loaded:
        start = i * self.chunk_rows
        stop = min(start + self.chunk_rows, self.selection.n_kept)
        ranges = self.selection.source_ranges(start, stop)
        beside: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in self._aligned()}
        for low, high, keep in ranges:
            for name, part in self._load_aligned(low, high).items():
                beside[name].append(part if keep is None else part[keep])
        aligned = {name: np.concatenate(parts) for name, parts in beside.items()}
        return self._spans(ranges) or self._load_rows(stop - start, ranges), aligned

    def _spans(self, ranges: Ranges) -> list[Span] | None:
        """Return where the rows are as plain bytes, if all are and none is left out; read nothing yet."""
        if any(keep is not None for _, _, keep in ranges):
            return None
        found = [self.rows.spans(low, high) for low, high, _ in ranges]
        return None if None in found else [span for spans in found for span in spans or ()]

    def _load_rows(self, n: int, ranges: Ranges) -> npt.NDArray[Any]:
        rows = self._buffers.take((n, self.rows.n_features), stored_dtype(self.rows.dtype))
        done = 0
        for low, high, keep in ranges:
            n = high - low if keep is None else int(keep.sum())
            if keep is None:
                self.rows.read(low, high, rows[done : done + n])
            else:
                np.compress(keep, self.rows.read(low, high), axis=0, out=rows[done : done + n])
            done += n
        return rows

    def _load_aligned(self, low: int, high: int) -> dict[str, npt.NDArray[Any]]:
        found = {_stored_name(name): self.rows.read_aligned(name, low, high) for name in self._kept_arrays}
        if self.source_row:
            found[SOURCE_ROW] = np.arange(low, high, dtype=np.int64)
        return found if self.texts is None else found | self.texts.read(low, high)

    def _store(self, i: int, loaded: Loaded) -> None:
        content, aligned = loaded
        if isinstance(content, np.ndarray):
            self._write(i, content, aligned)
            self._buffers.give(content)
            return
        n = min(self.chunk_rows, self.selection.n_kept - i * self.chunk_rows)
        with SpanReader(content) as reader:
            shape = (n, self.rows.n_features)
            self._write(i, Stream(shape, stored_dtype(self.rows.dtype), reader.fill), aligned)

    def _write(self, i: int, rows: Rows, aligned: dict[str, npt.NDArray[Any]]) -> None:
        assert self._writer is not None

        def check(first: int, piece: npt.NDArray[Any]) -> None:
            bad = nonfinite_rows(piece, self.rows.dtype)
            if len(bad):
                raise InputError(
                    f"{self._locate(i * self.chunk_rows + first + int(bad[0]))} holds a value that is NaN or "
                    "infinite; leave such rows out with nonfinite='drop', or import them with nonfinite='keep'"
                    f"{self._other_dtype()}"
                )

        on_rows = check if self.rules.nonfinite == "error" else None
        self._writer.write_chunk(i, rows, aligned, verify=self.verify, on_rows=on_rows)

    def _other_dtype(self) -> str:
        raw = any(member.format == "raw" for member in self.rows.members)
        return f"; or is {self.rows.dtype} the wrong dtype?" if raw else ""

    def _locate(self, kept_row: int) -> str:
        low, _, keep = self.selection.source_ranges(kept_row, kept_row + 1)[0]
        return self.rows.locate(low if keep is None else low + int(np.flatnonzero(keep)[0]))

    def values(self) -> Values:
        """Look at some rows from all over the store."""
        reader, raw = open_rows(self.path), any(member.format == "raw" for member in self.rows.members)
        places = 1 if paths.is_remote(self.path) else min(LOOKED_AT, -(-reader.n_samples // LOOKED_AT_ROWS))
        starts = np.linspace(0, reader.n_samples, places, endpoint=False).astype(int).tolist()
        ends = [
            min(start + LOOKED_AT_ROWS, end)
            for start, end in zip(starts, [*starts[1:], reader.n_samples], strict=True)
        ]
        rows = [reader.read_stored(start, end) for start, end in zip(starts, ends, strict=True)]
        return look_at(np.concatenate(rows), self.rows.dtype, raw)

    @property
    def texts_file(self) -> str | None:
        """Return the file of the texts beside the store, if there are texts."""
        return None if self.texts is None else self._texts_file

    # -- finish ----------------------------------------

    def finish(self) -> None:
        """Mark the store complete and publish it."""
        writer = self._writer or self.init()
        with atomic.explain_full_disk(writer.work):
            if self.texts is not None:
                self.texts.write(self._texts_file)
            writer.finish(attributes={JOB_ID: self._job_id()})
        paths.remove(self._scan_folder)

    def tidy(self) -> None:
        """Remove what a run that was killed after publishing left behind."""
        tidy(self.path)
        paths.remove(self._scan_folder)

    def discard(self) -> None:
        """Remove the unfinished work of this job, never that of another under the same name."""
        if self._writer is not None:
            paths.remove(atomic.aside(self.path))
        if self._scanning:
            paths.remove(self._scan_folder)

    def close(self) -> None:
        """Close the files."""
        self.rows.close()
        self.selection.close()

    def _progress(self, job: str, done: int, total: int, unit: str) -> None:
        emit(self.callbacks, JobProgress(job, done, total, unit))


def import_activations(
    source: PathLike | Sequence[PathLike],
    path: PathLike,
    *,
    array: str | None = None,
    aligned: Sequence[str] = (),
    texts: PathLike | None = None,
    format: str | None = None,
    dtype: str | None = None,
    n_features: int | None = None,
    layer: int | None = None,
    mask: str | None = None,
    mask_array: str | None = None,
    drop_first_token: bool = False,
    drop_outliers: float | None = None,
    nonfinite: str = "error",
    source_row: bool = False,
    chunk_rows: int | None = None,
    compressor: str | None = None,
    link: bool = False,
    force: bool = False,
    verify: bool | None = None,
    callbacks: Iterable[Callback] = (),
    verbose: bool | None = None,
) -> ImportResult:
    """Write the activations of one or many files to an activation store.

    An interrupted run resumes: call it again with the same arguments. A finished one succeeds without work.

    Parameters
    ----------
    source : path, glob pattern, or several
        A file, a folder or a pattern; see `dbksvd_dask.importers.find_files`. Arrays (sequence, token, feature)
        are flattened to rows. Several files are read in natural order: shard_2 before shard_10.
    path : path or fsspec URL
        The store to write.
    array : str, optional
        Name of the array, dataset, tensor or column that holds the activations.
    aligned : sequence of str
        Names of further arrays with one entry per row (or per sequence), kept beside the rows.
    texts : path or str, optional
        What the rows are: a text file with one line per row (or per sequence), or a column of the files; default:
        a column called text, if there is one. Where each line marks a token, as in ``the small <<bird>> sings``,
        the rows are those tokens. Texts are written beside the store, and a shuffle keeps them with their rows.
    format : str, optional
        When file names do not show it; one of `dbksvd_dask.importers.FORMATS`.
    dtype, n_features : str, int, optional
        Of raw files; dtype="bfloat16" also names two-byte numbers saved by NumPy.
    layer : int, optional
        Which layer of arrays (example, layer, token, feature): by its number in the model where the files say it,
        else from 0.
    mask, mask_array, drop_first_token, drop_outliers, nonfinite
        Rows to leave out; see `dbksvd_dask.importers.selection.Rules`.
    source_row : bool
        Keep an aligned array `source_row`: the number of each row in the files before any was left out.
    chunk_rows, compressor
        As for `create_activations`.
    link : bool
        Copy nothing but aligned arrays: the store refers to byte ranges of the files, which have to stay as they
        are. Works where rows are plain bytes of local files (.npy, stored .npz, safetensors, raw files,
        uncompressed Zarr) and none is left out.
    force : bool
        Replace an existing store, and begin again if an unfinished one does not match.
    verify : bool, optional
        Read every chunk back after it was written and compare it; on by default. With `link`, off by default:
        read all rows once, check that they are finite, and record their checksums.
    callbacks : iterable of callable
        Called with each `JobProgress` event.
    verbose : bool, optional
        Show live progress or nothing; default: in a notebook only.

    Returns
    -------
    ImportResult

    Examples
    --------
    >>> from dbksvd_dask import import_activations
    >>> import_activations("activations.npy", "store.zarr").n_samples
    300
    """
    began = time.perf_counter()
    rules = Rules(mask, mask_array, drop_first_token, drop_outliers, nonfinite)
    job = ImportJob(
        source,
        path,
        array=array,
        aligned=aligned,
        texts=texts,
        format=format,
        dtype=dtype,
        n_features=n_features,
        layer=layer,
        rules=rules,
        source_row=source_row,
        chunk_rows=chunk_rows,
        compressor=compressor,
        link=link,
        force=force,
        verify=verify,
        callbacks=with_view(callbacks, verbose),
    )
    try:
        with hold(job.path, "an import") as lock:
            return _import(job, lock, began)
    finally:
        job.close()


def _import(job: ImportJob, lock: Lock, began: float) -> ImportResult:
    """Run an import whose target this process holds; succeed without work if it is finished."""
    if job.is_finished():
        job.tidy()
        return _found(job, time.perf_counter() - began)
    try:
        kept = len(job.init().done())
        written = job.run()
        lock.require_held()
        job.finish()
    except InputError:
        job.discard()  # the same call would fail again: nothing to resume
        raise
    return _result(job, kept, written, time.perf_counter() - began)


def _absolute(path: str) -> str:
    """Return one spelling of a path, independent of the working directory."""
    return redacted(path) if paths.is_remote(path) else os.path.abspath(path)


def _status(path: str) -> list[int]:
    """Return size and time of change: old and new rows of a changed file must not be mixed."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _stored_name(name: str) -> str:
    """Return the name under which an array of a file is kept in the store."""
    return name.replace(".", "_").replace("/", "_")


def _found(job: ImportJob, seconds: float) -> ImportResult:
    """Describe an existing result."""
    n_samples, width = open_rows(job.path).n_samples, job.rows.n_features
    return ImportResult(
        path=job.path,
        n_samples=n_samples,
        n_features=width,
        dtype=job.rows.dtype,
        n_files=len(job.rows.members),
        dropped=dict(paths.open_zarr(job.path).attrs["provenance"]["dropped"]),  # type: ignore[index,call-overload,arg-type]
        chunks_kept=-(-n_samples // job.chunk_rows),
        nbytes=n_samples * width * stored_dtype(job.rows.dtype).itemsize,
        seconds=seconds,
        values=job.values(),
        texts=job.texts_file,
    )


def _result(job: ImportJob, kept: int, written: int, seconds: float) -> ImportResult:
    n_samples, width = job.selection.n_kept, job.rows.n_features
    return ImportResult(
        path=job.path,
        n_samples=n_samples,
        n_features=width,
        dtype=job.rows.dtype,
        n_files=len(job.rows.members),
        dropped=dict(job.selection.dropped),
        chunks_written=written,
        chunks_kept=kept,
        blocks_scanned=job.blocks_scanned,
        nbytes=n_samples * width * stored_dtype(job.rows.dtype).itemsize,
        seconds=seconds,
        values=job.values(),
        texts=job.texts_file,
    )
