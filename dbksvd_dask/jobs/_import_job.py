"""The steps of an import: which rows are kept, the chunks of the store, and publishing it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.base.safe_text import redacted
from dbksvd_dask.errors import InputError
from dbksvd_dask.events import Callback, JobProgress, Retrying, emit
from dbksvd_dask.importers import Collection, Hints
from dbksvd_dask.importers.linking import linkable_spans
from dbksvd_dask.importers.plausible import Values, look_at
from dbksvd_dask.importers.selection import Rules, Selection, with_mask_of_layout
from dbksvd_dask.importers.texts import file_of_texts, open_texts
from dbksvd_dask.importers.values import nonfinite_rows
from dbksvd_dask.jobs import _workers
from dbksvd_dask.jobs.base import Buffers, begin_or_resume, run_bounded, storing_threads
from dbksvd_dask.plan.units import part_range
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import (
    ActivationWriter,
    Aligned,
    create_activations,
    default_chunk_rows,
    open_rows,
    open_writer,
)
from dbksvd_dask.store.chunk_file import Rows, Stream
from dbksvd_dask.store.dtypes import stored_dtype
from dbksvd_dask.store.job_folder import JobFolder
from dbksvd_dask.store.link_writer import create_links, open_links
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


class ImportJob:
    """An import in steps: `init` scans the files, `run` writes missing chunks, `finish` publishes.

    Every step can be repeated, and several processes can do parts of it; see `import_activations` for the
    parameters.
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
        self.arguments = _arguments(locals())
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
        self._findings = JobFolder(
            atomic.aside(f"{self.path}.scan"),
            f"an unfinished import to {self.path} was begun with other files or options; use the same to resume, "
            "or force=True to begin again",
        )
        self.selection = Selection(self.rows, self.rules, self._findings.path, self.chunk_rows)
        self._linked = linkable_spans(self.rows, self.rules, self.path, compressor) if link else []
        self._writer: ActivationWriter | None = None
        self._scanning = False
        self.blocks_scanned = 0
        self._buffers = Buffers()
        if not self.is_there():
            require_free(self.path, force, "force")
            if self.texts is not None and not force:
                self.texts.require_free(self._texts_file)

    # -- init ----------------------------------------

    def init(self, part: tuple[int, int] | None = None) -> ActivationWriter:
        """Determine which rows are kept, and begin or resume the store.

        Parameters
        ----------
        part : (i, n), optional
            This process does part i of n and others may be at work: discard nothing, and scan the part's own
            share of the files first, then what no other process has scanned.
        """
        job, n_blocks = self._identity(), self.selection.n_blocks
        begin = part_range(n_blocks, *part).start if part else 0
        with atomic.explain_full_disk(self._findings.path):
            self._begin_scan(job)
            self.blocks_scanned = self._scan_on_workers()
            self.blocks_scanned += self.selection.scan(
                lambda n: self._progress("scan", n, n_blocks, "blocks"), begin
            )
        if self.compressor is None:
            require_room(self.path, self.selection.n_kept, self.chunk_rows, self.written_row_bytes)
        with atomic.explain_full_disk(atomic.aside(self.path)):
            self._writer = self._begin_store(job, shared=part is not None)
        if part is not None:
            self._writer.recheck(set(self._writer.done()) & set(self.chunks_of(part)))
        return self._writer

    def chunks_of(self, part: tuple[int, int] | None) -> range:
        """Return the chunks that belong to part i of n, or to the whole job."""
        return part_range(-(-self.selection.n_kept // self.chunk_rows), *(part or (1, 1)))

    @property
    def written_row_bytes(self) -> int:
        """Return the bytes that are written for each row, with all that is aligned to it."""
        aligned = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in self._aligned().values())
        return aligned + (0 if self.link else self.rows.n_features * stored_dtype(self.rows.dtype).itemsize)

    def is_there(self) -> bool:
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
        if not self._findings.settle(job, self.force):
            self._findings.begin(job)
        self._scanning = True

    def _scan_on_workers(self) -> int:
        """Scan missing blocks on the workers of a cluster, if there is one; return how many."""
        client, n_blocks = _workers.current_client(), self.selection.n_blocks
        if client is None or n_blocks == 0:
            return 0
        missing = self.selection.missing_blocks()
        return self._on_workers(client, "scan_piece", missing, self._counting("scan", n_blocks, missing, "blocks"))

    def _begin_store(self, job: dict[str, Any], shared: bool) -> ActivationWriter:
        def begin(resume: bool) -> ActivationWriter:
            shape = (self.selection.n_kept, self.rows.n_features, self.rows.dtype)
            common: dict[str, Any] = {
                "chunk_rows": self.chunk_rows,
                "attributes": self._provenance(),
                "aligned": self._aligned(),
                "overwrite": self.force,
                "resume": resume,
                "shared": shared,
                "job": job,
            }
            if self.link:
                return create_links(self.path, self._linked, *shape, checksums=self.verify, **common)
            return create_activations(self.path, *shape, compressor=self.compressor, **common)

        return begin_or_resume(begin, self.force)

    def _join(self) -> None:
        """Take part in a job that another process has begun."""
        self.selection.scan()
        if self.link:
            self._writer = open_links(self.path, self._linked, checksums=self.verify)
        else:
            self._writer = open_writer(self.path, shared=True)

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
        """Write the missing ones of some chunks, by default of all; return how many."""
        writer, client = self._writer or self.init(), _workers.current_client()
        wanted = self.chunks_of(None) if parts is None else parts
        missing = sorted(set(writer.missing()) & set(wanted))
        total = min(len(wanted) * self.chunk_rows, self.selection.n_kept)
        before = len(wanted) - len(missing)

        def on_done(_: int) -> None:
            nonlocal before
            before += 1
            self._progress("import", min(before * self.chunk_rows, total), total, "rows")

        self._progress("import", min(before * self.chunk_rows, total), total, "rows")
        with atomic.explain_full_disk(writer.work):
            if client is not None and missing:
                return self._on_workers(client, "write_piece", missing, on_done)
            return run_bounded(missing, self._load, self._store, on_done, n_threads or storing_threads())

    def scan_piece(self, block: int) -> None:
        """Scan one block; for the tasks of workers."""
        self.selection.scan_block(block)

    def write_piece(self, chunk: int) -> None:
        """Write one chunk; for the tasks of workers."""
        if self._writer is None:
            self._join()
        self._store(chunk, self._load(chunk))

    def _on_workers(self, client: Any, step: str, pieces: Sequence[int], on_done: Callable[[int], None]) -> int:
        def on_retry(*reason: Any) -> None:
            emit(self.callbacks, Retrying(0, *reason))

        return _workers.run_pieces(client, self, step, pieces, on_done, on_retry)

    def _counting(self, job: str, total: int, missing: Sequence[int], unit: str) -> Callable[[int], None]:
        done = itertools.count(total - len(missing) + 1)
        return lambda _: self._progress(job, next(done), total, unit)

    def missing(self) -> list[int]:
        """Return the chunks of the whole store that are not written."""
        assert self._writer is not None
        return self._writer.missing()

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
        self._findings.remove()

    def tidy(self) -> None:
        """Remove what a run that was killed after publishing left behind."""
        tidy(self.path)
        self._findings.remove()

    def discard(self) -> None:
        """Remove the unfinished work of this job, never that of another under the same name."""
        if self._writer is not None:
            self._writer.discard()
        if self._scanning:
            self._findings.remove()

    def abandon(self) -> None:
        """Remove what this process has begun after another one had published the result."""
        if self._writer is not None:
            self._writer.discard()
        self._findings.remove()

    def close(self) -> None:
        """Close the files."""
        self.rows.close()
        self.selection.close()

    def _progress(self, job: str, done: int, total: int, unit: str) -> None:
        emit(self.callbacks, JobProgress(job, done, total, unit))


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a job as a process in another folder can use them."""
    kept = {name: value for name, value in given.items() if name not in ("self", "callbacks")}
    for name in ("source", "path", "texts"):
        is_column = name == "texts" and kept[name] is not None and not os.path.exists(kept[name])
        kept[name] = kept[name] if is_column else _workers.everywhere(kept[name])
    rules = kept["rules"]
    return kept if rules is None else {**kept, "rules": replace(rules, mask=_workers.everywhere(rules.mask))}


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
