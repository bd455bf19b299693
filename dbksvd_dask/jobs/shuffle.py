"""Shuffle: a store rewritten in random order, out of core, restartable, with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dbksvd_dask.events import Callback
from dbksvd_dask.jobs._parts import Part, check_part_alone, found_by_part, parts_missing, run_part
from dbksvd_dask.jobs._shuffle_job import ShuffleJob
from dbksvd_dask.progress import with_view
from dbksvd_dask.store.lock import Lock, hold
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.writer import require_free

__all__ = ["ShuffleJob", "ShuffleResult", "check_shuffle", "shuffle_activations"]

Figures = tuple[float | None, float | None]  # of the source and of the result
Counts = tuple[int, int]  # written and kept


@dataclass(frozen=True)
class ShuffleResult:
    """What a shuffle did.

    Attributes
    ----------
    path : str
        The shuffled store.
    n_samples, n_features : int
        Its shape.
    mixing_before, mixing_after : float or None
        Variance of batch means relative to a full shuffle, of the source and of the result; see
        `dbksvd_dask.evaluate.mixing`.
    blocks_written, blocks_kept, chunks_written, chunks_kept : int
        Blocks of pass 1 and chunks of pass 2 that this run wrote, and that were there before (chunks: of the part,
        if one was given).
    nbytes : int
        Bytes of the rows and all aligned arrays.
    seconds : float
        Time this run took.
    finished : bool
        False while parts are missing.
    parts_missing : tuple of int
        Their numbers.
    """

    path: str
    n_samples: int
    n_features: int
    mixing_before: float | None
    mixing_after: float | None
    blocks_written: int
    blocks_kept: int
    chunks_written: int
    chunks_kept: int
    nbytes: int
    seconds: float
    finished: bool = True
    parts_missing: tuple[int, ...] = ()


def shuffle_activations(
    source: PathLike,
    path: PathLike,
    *,
    seed: int,
    block_bytes: int | None = None,
    chunk_rows: int | None = None,
    compressor: str | None = None,
    scratch: PathLike | None = None,
    part: tuple[int, int] | None = None,
    force: bool = False,
    verify: bool = True,
    callbacks: Iterable[Callback] = (),
    verbose: bool | None = None,
) -> ShuffleResult:
    """Write the rows of a store in random order to another; aligned arrays follow.

    Two passes over the data: the first spreads the rows of each block over buckets in a scratch folder, the
    second shuffles each bucket. Needs room for one further copy of the store and a few blocks (for two copies
    where the filesystem cannot release parts of a file), and memory for about three blocks. A local uncompressed
    source that takes at most half of the free memory of the machine is read once, and the rows are then picked
    from the file cache, in the same order: that needs room for one copy. An interrupted run resumes: call it
    again with the same arguments. A finished one succeeds without work. With a Dask client, its workers do the
    work; they have to see the same files.

    Parameters
    ----------
    source : path or fsspec URL
        The store to read; anything that `open_rows` takes.
    path : path or fsspec URL
        The store to write.
    seed : int
        Decides the order, together with `block_bytes`.
    block_bytes : int, optional
        Bytes of the rows that are mixed in memory at a time; default: 128 MiB, more above 256 GB.
    chunk_rows, compressor
        As for `create_activations`; default: the chunks of the source, uncompressed.
    scratch : path, optional
        Folder for files between the passes; default: beside the result. Parts share the work of pass 1 if they
        all see it.
    part : (i, n), optional
        Do part i of n, counted from 1. Any process that sees the files may do any part while others do theirs; the
        last one to end publishes the store. A call without `part` finishes the remaining work.
    force : bool
        Replace an existing store, and begin again if an unfinished one does not match. Not with `part`.
    verify : bool
        Read every chunk back after it was written and compare it.
    callbacks : iterable of callable
        Called with each `JobProgress` event.
    verbose : bool, optional
        Show live progress or nothing; default: in a notebook only.

    Returns
    -------
    ShuffleResult

    Examples
    --------
    >>> from dbksvd_dask import import_activations, shuffle_activations
    >>> _ = import_activations("activations.npy", "raw.zarr")
    >>> shuffle_activations("raw.zarr", "store.zarr", seed=0).n_samples
    300
    """
    began = time.perf_counter()
    part = check_part_alone(part, force)
    job = ShuffleJob(
        source,
        path,
        seed=seed,
        block_bytes=block_bytes,
        chunk_rows=chunk_rows,
        compressor=compressor,
        scratch=scratch,
        force=force,
        verify=verify,
        callbacks=with_view(callbacks, verbose),
    )
    if part is not None:
        return _shuffle_part(job, part, began)
    with hold(job.path, "a shuffle") as lock:
        if job.is_there():
            job.tidy()
            return _found(job, began)
        return _shuffle(job, lock, began)


def check_shuffle(source: PathLike, path: PathLike, *, part: Part | None = None, **options: Any) -> None:
    """Refuse what `shuffle_activations` would refuse on workers, without reading a row; parameters as of that."""
    check_part_alone(part, options.get("force", False))
    job = ShuffleJob(source, path, **options)
    job.require_shared_scratch()
    if not job.is_there():
        require_free(job.path, job.force, "force")


def _shuffle_part(job: ShuffleJob, part: Part, began: float) -> ShuffleResult:
    """Do one part; others may be at work on the same store."""
    if found_by_part(job, "shuffle"):
        return _found(job, began)

    def work() -> tuple[Counts, Counts] | None:
        chunks, writer = set(job.chunks_of(part)), job.init(part)
        if job.is_there():  # published between the check and the beginning
            return None
        missing = chunks & set(writer.missing())
        blocks_kept = job.plan.n_blocks - len(job.missing_blocks())
        blocks_written = job.scatter(part) if missing else 0
        return (blocks_written, blocks_kept), (job.gather(part), len(chunks) - len(missing))

    done, finished = run_part(job, "shuffle", work)
    if done is None:
        return _found(job, began)
    if finished:
        return _result(job, job.figures(), *done, began)
    missing = parts_missing(job, job.plan.n_blocks, part[1])
    return replace(_result(job, (None, None), *done, began), finished=False, parts_missing=missing)


def _shuffle(job: ShuffleJob, lock: Lock, began: float) -> ShuffleResult:
    """Run a shuffle whose target this process holds."""
    writer = job.init()
    chunks_kept = len(writer.done())
    blocks_kept = job.plan.n_blocks - len(job.missing_blocks())
    blocks_written = job.scatter() if writer.missing() else 0
    chunks_written = job.gather()
    lock.require_held()
    figures = job.finish()
    blocks = blocks_written + job.blocks_repaired, blocks_kept - job.blocks_repaired
    return _result(job, figures, blocks, (chunks_written, chunks_kept), began)


def _found(job: ShuffleJob, began: float) -> ShuffleResult:
    """Describe an existing result."""
    return _result(job, job.figures(), (0, job.plan.n_blocks), (0, job.plan.n_chunks), began)


def _result(job: ShuffleJob, mixing: Figures, blocks: Counts, chunks: Counts, began: float) -> ShuffleResult:
    """Describe a shuffle by its figures before and after, and its blocks and chunks written and kept."""
    return ShuffleResult(
        path=job.path,
        n_samples=job.reader.n_samples,
        n_features=job.reader.n_features,
        mixing_before=mixing[0],
        mixing_after=mixing[1],
        blocks_written=blocks[0],
        blocks_kept=blocks[1],
        chunks_written=chunks[0],
        chunks_kept=chunks[1],
        nbytes=job.nbytes,
        seconds=time.perf_counter() - began,
    )
