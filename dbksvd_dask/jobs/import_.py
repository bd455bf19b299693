"""Import: files of many layouts to one activation store, restartable, with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dbksvd_dask.errors import InputError
from dbksvd_dask.events import Callback
from dbksvd_dask.importers.plausible import Values
from dbksvd_dask.importers.selection import Rules
from dbksvd_dask.jobs._import_job import ImportJob
from dbksvd_dask.jobs._parts import Part, check_part_alone, found_by_part, parts_missing, run_part
from dbksvd_dask.progress import with_view
from dbksvd_dask.store import paths
from dbksvd_dask.store.activations import open_rows
from dbksvd_dask.store.dtypes import stored_dtype
from dbksvd_dask.store.lock import Lock, hold
from dbksvd_dask.store.paths import PathLike

__all__ = ["RULES", "ImportJob", "ImportResult", "check_import", "import_activations"]

# parameters that say which rows are left out
RULES = ("mask", "mask_array", "drop_first_token", "drop_outliers", "nonfinite")


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
        Chunks written by this run, and by an interrupted one before it (of the part, if one was given).
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
    finished : bool
        False while parts are missing.
    parts_missing : tuple of int
        Their numbers.
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
    finished: bool = True
    parts_missing: tuple[int, ...] = ()


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
    part: tuple[int, int] | None = None,
    force: bool = False,
    verify: bool | None = None,
    callbacks: Iterable[Callback] = (),
    verbose: bool | None = None,
) -> ImportResult:
    """Write the activations of one or many files to an activation store.

    An interrupted run resumes: call it again with the same arguments. A finished one succeeds without work. With a
    Dask client, its workers do the work; they have to see the same files.

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
    part : (i, n), optional
        Do part i of n, counted from 1. Any process that sees the files may do any part while others do theirs; the
        last one to end publishes the store. A call without `part` finishes the remaining work.
    force : bool
        Replace an existing store, and begin again if an unfinished one does not match. Not with `part`.
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
    part = check_part_alone(part, force)
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
        if part is not None:
            return _import_part(job, part, began)
        with hold(job.path, "an import") as lock:
            return _import(job, lock, began)
    finally:
        job.close()


def check_import(
    source: PathLike | Sequence[PathLike], path: PathLike, *, part: Part | None = None, **options: Any
) -> None:
    """Refuse what `import_activations` would refuse, without reading a row; parameters as of that function."""
    check_part_alone(part, options.get("force", False))
    rules = Rules(**{name: options.pop(name) for name in RULES if name in options})
    ImportJob(source, path, rules=rules, **options).close()


def _import_part(job: ImportJob, part: Part, began: float) -> ImportResult:
    """Do one part; others may be at work on the same store."""
    if found_by_part(job, "import"):
        return _found(job, time.perf_counter() - began)

    def work() -> tuple[int, int] | None:
        job.init(part)
        if job.is_there():  # published between the check and the beginning
            return None
        chunks = job.chunks_of(part)
        written = job.run(chunks)
        return written, len(chunks) - written

    done, finished = run_part(job, "import", work)
    if done is None:
        return _found(job, time.perf_counter() - began)
    written, kept = done
    result = _result(job, kept, written, time.perf_counter() - began, finished)
    if finished:
        return result
    return replace(result, parts_missing=parts_missing(job, len(job.chunks_of(None)), part[1]))


def _import(job: ImportJob, lock: Lock, began: float) -> ImportResult:
    """Run an import whose target this process holds; succeed without work if it is finished."""
    if job.is_there():
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


def _result(job: ImportJob, kept: int, written: int, seconds: float, finished: bool = True) -> ImportResult:
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
        values=job.values() if finished else None,
        texts=job.texts_file if finished else None,
        finished=finished,
    )
