"""Shuffle: a store rewritten in random order, out of core, restartable, with bounded memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dbksvd_dask._late import late
from dbksvd_dask._safe_text import redacted
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.evaluate.mixing import BatchMeans, MixingSample, batch_rows, choose_columns
from dbksvd_dask.events import Callback, JobProgress, emit
from dbksvd_dask.jobs._passes import ChunkPicker, can_shrink, may_pick, scratch_folder
from dbksvd_dask.jobs._segments import Segments
from dbksvd_dask.jobs.base import Buffers, begin_or_go_on, run_bounded, storing_threads
from dbksvd_dask.plan.shuffle import plan_shuffle
from dbksvd_dask.progress import with_view
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import (
    ActivationWriter,
    Aligned,
    RowReader,
    create_activations,
    open_aligned,
    open_rows,
)
from dbksvd_dask.store.chunk_file import Stream, piece_rows
from dbksvd_dask.store.dtypes import BFLOAT16, widen_bfloat16
from dbksvd_dask.store.lock import Lock, hold
from dbksvd_dask.store.partial import PARTS, tidy
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.picker import in_file_cache
from dbksvd_dask.store.reader import aligned_names
from dbksvd_dask.store.writer import JOB_ID, is_finished, job_id, require_free, require_room

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")

MAIN = "activations"
# blocks that are on the disk twice while scratch files shrink: those in memory, and one for the rounding to blocks
IN_BOTH = 4

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]


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
        Parts of both passes done by this run, and by an interrupted one before it.
    nbytes : int
        Bytes of the rows and all aligned arrays.
    seconds : float
        Time this run took.
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


class ShuffleJob:
    """A shuffle in steps: `init`, `scatter` (pass 1), `gather` (pass 2), `finish`; each can be repeated.

    A source that stays in the file cache is shuffled without scratch files: `scatter` then only reads it,
    and `gather` picks rows from it. The result is the same, and either method can resume a run of the other.

    See `shuffle_activations` for the parameters.
    """

    def __init__(
        self,
        source: PathLike,
        path: PathLike,
        *,
        seed: int,
        block_bytes: int | None = None,
        chunk_rows: int | None = None,
        compressor: str | None = None,
        scratch: PathLike | None = None,
        force: bool = False,
        verify: bool = True,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        if seed < 0:
            raise InputError(f"seed={seed}; need 0 or more")
        self.path = paths.normalise(path)
        self.force = force
        self.verify = verify
        self.compressor = compressor
        self.callbacks = tuple(callbacks)
        self.reader = open_rows(source)
        atomic.require_outside(self.path, self.reader.path)
        self._aligned = _aligned_readers(self.reader)
        self.readers = {MAIN: self.reader, **self._aligned}
        row_bytes = sum(r.n_features * r.stored.itemsize for r in self.readers.values())
        self.nbytes = self.reader.n_samples * row_bytes
        rows = chunk_rows or self.reader.chunk_rows
        self.plan = plan_shuffle(self.reader.n_samples, row_bytes, rows, seed, block_bytes)
        self.counts = self.plan.counts()
        self.scratch = scratch_folder(self.path, scratch)
        self._segments = Segments(self.scratch, self.counts, self.readers)
        self._blocks = atomic.Ledger(self.scratch, "block", durable=False)
        self._means = atomic.Ledger(self.scratch, "means", durable=False)
        self._columns = choose_columns(self.reader.n_features)
        self._batch_rows = batch_rows(self.reader.n_samples, rows)
        self._buffers = Buffers()
        self.one_pass = False
        # blocks whose segments are there for all of these buckets
        self._laid: set[int] = set()
        self._laid_for: set[int] = set()
        self._writer: ActivationWriter | None = None

    # -- init ----------------------------------------

    def init(self) -> ActivationWriter:
        """Begin or resume the new store and the scratch folder."""
        require_free(self.path, self.force, "force")
        job = self._identity()
        begun = paths.exists(self._job_file)
        if begun and self._begun_with() != job:
            if not self.force:
                raise MismatchError(
                    f"an unfinished shuffle to {self.path} was begun with another store, seed or size; use the "
                    "same to resume, or force=True to begin again"
                )
            paths.remove(self.scratch)
        self.one_pass = self.fits_one_pass()
        done = set(atomic.Ledger(paths.join(atomic.aside(self.path), PARTS), "chunk").parts())
        self._recheck_blocks(self._buckets_of(set(range(self.plan.n_chunks)) - done))
        self._require_room()
        with atomic.explain_full_disk(self.scratch):
            os.makedirs(self.scratch, exist_ok=True)
            atomic.write_sealed(self._job_file, job)
        with atomic.explain_full_disk(atomic.aside(self.path)):
            self._writer = self._begin_store(job)
        self._recheck_means(self._writer)
        needed = self._buckets_of(self._writer.missing())
        if not needed <= self._laid_for:  # chunks that a power failure has lost
            self._recheck_blocks(needed)
        return self._writer

    def _buckets_of(self, chunks: Iterable[int]) -> set[int]:
        return {self.plan.bucket_of(chunk) for chunk in chunks}

    def _require_room(self) -> None:
        """Refuse to begin what cannot fit on the disk."""
        scratch, row_bytes = self._scratch_needed(), self.nbytes // self.plan.n_samples
        atomic.require_space(self.scratch, scratch)
        if self.compressor is not None:
            return
        if os.path.dirname(self.scratch) != os.path.dirname(self.path):
            require_room(self.path, self.plan.n_samples, self.plan.chunk_rows, row_bytes)
        elif not self.one_pass and can_shrink(self.scratch):
            # scratch files shrink as the store grows; what is in memory is in both
            atomic.require_space(self.path, scratch + min(self.nbytes, IN_BOTH * self.plan.block_rows * row_bytes))
        else:
            require_room(self.path, self.plan.n_samples, self.plan.chunk_rows, row_bytes, scratch)

    @property
    def _job_file(self) -> str:
        return os.path.join(self.scratch, "job.json")

    def _begun_with(self) -> dict[str, Any] | None:
        try:
            return atomic.read_sealed(self._job_file)
        except StoreError:
            if not self.force:
                raise
            return None

    def _recheck_means(self, writer: ActivationWriter) -> None:
        """Count chunks whose sums cannot be read as not written; a chunk that is written always has its sums."""
        for chunk in [] if writer.complete else writer.done():
            try:
                self._means.read(chunk)
            except StoreError:
                writer.forget(chunk)

    def _identity(self) -> dict[str, Any]:
        """Describe what is shuffled and how, so that another run can compare."""
        return {"source": self.reader.fingerprint, "plan": dict(self.plan.__dict__)}

    def _job_id(self) -> str:
        return job_id({"shuffle": self._identity(), "compressor": self.compressor})

    def is_finished(self) -> bool:
        """Return whether the result of this shuffle already exists and is not to be replaced."""
        return not self.force and is_finished(self.path, self._job_id())

    def tidy(self) -> None:
        """Remove what a run that was killed after publishing left behind."""
        tidy(self.path)
        paths.remove(self.scratch)

    def fits_one_pass(self) -> bool:
        """Return whether the rows could be picked out of the source now, without scratch files."""
        return may_pick(self.reader, self._aligned)

    def _begin_store(self, job: dict[str, Any]) -> ActivationWriter:
        def begin(resume: bool) -> ActivationWriter:
            return create_activations(
                self.path,
                self.reader.n_samples,
                self.reader.n_features,
                BFLOAT16 if self.reader.bfloat16 else self.reader.stored,
                chunk_rows=self.plan.chunk_rows,
                compressor=self.compressor,
                attributes=self._provenance(),
                aligned={
                    name: Aligned(r.dtype.name, r.row_shape, r.attributes)
                    for name, r in self.readers.items()
                    if name != MAIN
                },
                overwrite=self.force,
                resume=resume,
                job=job,
            )

        return begin_or_go_on(begin, self.force)

    def _provenance(self) -> dict[str, Any]:
        node = paths.open_zarr(self.reader.path)
        return {
            "command": "shuffle",
            "source": redacted(self.reader.path),
            "source_fingerprint": self.reader.fingerprint,
            "source_provenance": dict(node.attrs).get("provenance", {}),
            "seed": self.plan.seed,
            "block_rows": self.plan.block_rows,
        }

    def _recheck_blocks(self, buckets: set[int]) -> None:
        """Find the blocks that were read, and those whose segments for some buckets are whole.

        A power failure may lose some; those of buckets that were written are released.
        """
        self._laid, self._laid_for = set(), set(buckets)
        for block in self._blocks.parts():
            try:
                mark = self._blocks.read(block)
            except StoreError:
                self._blocks.unmark(block)
                continue
            if not self.one_pass and self._segments.are_whole(block, mark.get("crc32c"), buckets):
                self._laid.add(block)

    def missing_blocks(self) -> list[int]:
        """Return the blocks that pass 1 still has to read."""
        if self.one_pass:
            return self._blocks.missing(self.plan.n_blocks)
        return [block for block in range(self.plan.n_blocks) if block not in self._laid]

    def _scratch_needed(self) -> int:
        if self.one_pass:
            return 0
        written = len(self._laid) * self.plan.block_rows
        return max(0, self.plan.n_samples - written) * (self.nbytes // self.plan.n_samples)

    # -- pass 1 ----------------------------------------

    def scatter(self) -> int:
        """Read every missing block and write its segments; return how many.

        In one pass there are no segments, only the mixing figure of the source; reading also caches the source.
        """
        if self.one_pass:
            read = self._survey()
            if in_file_cache(self.reader):
                return read
            self.one_pass = False  # the cache has lost it: picking rows from the disk would take hours
            self._recheck_blocks(self._laid_for)
            atomic.require_space(self.scratch, self._scratch_needed())
        return self._run_blocks("scatter", self.missing_blocks(), self._load_block, self._store_block)

    def _survey(self) -> int:
        missing = self._blocks.missing(self.plan.n_blocks)
        return self._run_blocks("survey", missing, lambda block: block, self._survey_block)

    def _run_blocks(
        self, step: str, missing: list[int], load: Callable[[int], T], store: Callable[[int, T], None]
    ) -> int:
        done = self.plan.n_blocks - len(missing)

        def on_done(_: int) -> None:
            nonlocal done
            done += 1
            self._progress(step, done, self.plan.n_blocks, "blocks")

        with atomic.explain_full_disk(self.scratch):
            return run_bounded(missing, load, store, on_done)

    def _load_block(self, block: int) -> Arrays:
        start, stop = self.plan.bounds(block)
        arrays = {}
        for name, reader in self.readers.items():
            rows = self._buffers.take((stop - start, reader.n_features), reader.stored)
            arrays[name] = reader.read_stored(start, stop, rows)
        return arrays

    def _store_block(self, block: int, arrays: Arrays) -> None:
        order = self.plan.block_order(block)
        crcs = {name: self._segments.write(block, name, rows, order) for name, rows in arrays.items()}
        sample = self._sample(len(order))
        sample.see(0, arrays[MAIN])
        self._give(arrays)
        self._blocks.mark(block, {"crc32c": crcs, "means": self._means_of(sample)})
        self._laid.add(block)

    def _survey_block(self, block: int, _: int) -> None:
        """Record the batch means of a block, piece by piece, which stays in the processor's cache."""
        first, stop = self.plan.bounds(block)
        row_bytes = self.reader.n_features * self.reader.stored.itemsize
        # what has to be decoded comes as whole chunks
        step = piece_rows(row_bytes) if self.one_pass else self.plan.chunk_rows
        buffer = np.empty((min(step, stop - first), self.reader.n_features), self.reader.stored)
        sample = self._sample(stop - first)
        for start in range(first, stop, step):
            end = min(start + step, stop)
            sample.see(start - first, self.reader.read_stored(start, end, buffer[: end - start]))
        self._blocks.mark(block, {"means": self._means_of(sample)})

    # -- pass 2 ----------------------------------------

    def gather(self) -> int:
        """Write the missing chunks; return how many."""
        writer = self._writer or self.init()
        missing = set(writer.missing())
        buckets = sorted(self._buckets_of(missing))
        if not set(buckets) <= self._laid_for:
            self._recheck_blocks(set(buckets))
        if buckets and self.missing_blocks():
            self.scatter()
        parts = sorted(missing) if self.one_pass else buckets
        total, unit = (self.plan.n_chunks, "chunks") if self.one_pass else (self.plan.n_blocks, "buckets")
        done = total - len(parts)

        def on_done(_: int) -> None:
            nonlocal done
            done += 1
            self._progress("gather", done, total, unit)

        with atomic.explain_full_disk(writer.work):
            if self.one_pass:
                self._pick_chunks(parts, on_done)
            else:
                self._permute_buckets(parts, missing, on_done)
        return len(missing)

    def _pick_chunks(self, missing: list[int], on_done: Callable[[int], None]) -> None:
        picker = ChunkPicker(self.plan, self.counts, self.reader, self._aligned)

        def store(chunk: int, sources: npt.NDArray[np.int64]) -> None:
            def fill(first: int, rows: npt.NDArray[Any]) -> None:
                picker.fill(sources[first : first + len(rows)], rows)

            self._store_chunk(chunk, len(sources), fill, picker.aligned(sources))

        with contextlib.closing(picker):
            run_bounded(missing, picker.sources, store, on_done, storing_threads())

    def _permute_buckets(self, buckets: list[int], missing: set[int], on_done: Callable[[int], None]) -> None:
        def store(bucket: int, arrays: Arrays) -> None:
            self._store_bucket(bucket, arrays, missing, self.plan.bucket_order(bucket))

        def release(bucket: int) -> None:  # buckets come in order: all before this one are written as well
            self._laid_for -= set(range(bucket + 1))
            self._segments.release(bucket + 1)
            on_done(bucket)

        run_bounded(buckets, self._load_bucket, store, release)

    def _load_bucket(self, bucket: int) -> Arrays:
        start, stop = self.plan.bounds(bucket)
        arrays = {}
        for name, reader in self.readers.items():
            rows = self._buffers.take((stop - start, reader.n_features), reader.stored)
            self._segments.load(bucket, name, rows)
            arrays[name] = rows
        return arrays

    def _store_bucket(self, bucket: int, arrays: Arrays, missing: set[int], order: npt.NDArray[np.int64]) -> None:
        """Write the chunks of a bucket that are missing, its rows in `order`."""
        start, stop = self.plan.bounds(bucket)
        for low in range(start, stop, self.plan.chunk_rows):
            chunk, part = low // self.plan.chunk_rows, order[low - start : low - start + self.plan.chunk_rows]
            if chunk not in missing:
                continue

            def fill(first: int, rows: npt.NDArray[Any], part: npt.NDArray[np.int64] = part) -> None:
                # the order is a permutation: "clip" avoids the checked copy that "raise" makes
                np.take(arrays[MAIN], part[first : first + len(rows)], axis=0, out=rows, mode="clip")

            beside = {name: rows[part] for name, rows in arrays.items() if name != MAIN}
            self._store_chunk(chunk, len(part), fill, beside)
        self._give(arrays)

    def _store_chunk(
        self, chunk: int, n_rows: int, fill: Callable[[int, npt.NDArray[Any]], None], aligned: Arrays
    ) -> None:
        assert self._writer is not None
        sample = self._sample(n_rows)
        shaped = {n: rows.reshape(n_rows, *self.readers[n].row_shape) for n, rows in aligned.items()}
        self._writer.write_chunk(
            chunk,
            Stream((n_rows, self.reader.n_features), self.reader.stored, fill),
            shaped,
            verify=self.verify,
            on_rows=sample.see,
            # a chunk that counts as written always has its sums
            before_done=lambda: self._means.mark(chunk, self._means_of(sample)),
        )

    def _give(self, arrays: Arrays) -> None:
        for rows in arrays.values():
            self._buffers.give(rows)

    # -- finish ----------------------------------------

    def mixing(self) -> tuple[float | None, float | None]:
        """Return the figure of `dbksvd_dask.evaluate.mixing` for the source and for the result."""
        before = BatchMeans.merged(self._blocks.read(b)["means"] for b in range(self.plan.n_blocks))
        after = BatchMeans.merged(self._means.read(c) for c in range(self.plan.n_chunks))
        return before.ratio(), after.ratio()

    def finish(self) -> tuple[float | None, float | None]:
        """Publish the store, remove the scratch folder, and return the mixing figures."""
        writer = self._writer or self.init()
        self._survey()  # only what a power failure has lost since
        figures = self.mixing()
        with atomic.explain_full_disk(writer.work):
            known = {"mixing": figures[1], "mixing_before": figures[0], JOB_ID: self._job_id()}
            writer.finish(attributes=known)
        paths.remove(self.scratch)
        return figures

    def _sample(self, n_rows: int) -> MixingSample:
        return MixingSample(n_rows, self._columns, self.reader.stored)

    def _means_of(self, sample: MixingSample) -> dict[str, Any]:
        widen = widen_bfloat16 if self.reader.bfloat16 else None
        return sample.means(self.plan.chunk_rows, self._batch_rows, widen).to_json()

    def _progress(self, job: str, done: int, total: int, unit: str) -> None:
        emit(self.callbacks, JobProgress(job, done, total, unit))


def _aligned_readers(reader: RowReader) -> dict[str, RowReader]:
    node = paths.open_zarr(reader.path)
    names = aligned_names(reader, node) if isinstance(node, zarr.Group) else []
    return {name: open_aligned(reader.path, name) for name in names}


def shuffle_activations(
    source: PathLike,
    path: PathLike,
    *,
    seed: int,
    block_bytes: int | None = None,
    chunk_rows: int | None = None,
    compressor: str | None = None,
    scratch: PathLike | None = None,
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
    again with the same arguments. A finished one succeeds without work.

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
        Local folder for files between the passes; default: beside the result.
    force : bool
        Replace an existing store, and begin again if an unfinished one does not match.
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
    with hold(job.path, "a shuffle") as lock:
        if job.is_finished():
            job.tidy()
            return _found(job, began)
        return _shuffle(job, lock, began)


def _shuffle(job: ShuffleJob, lock: Lock, began: float) -> ShuffleResult:
    """Run a shuffle whose target this process holds."""
    writer = job.init()
    chunks_kept = len(writer.done())
    blocks_kept = job.plan.n_blocks - len(job.missing_blocks())
    blocks_written = job.scatter() if writer.missing() else 0
    chunks_written = job.gather()
    lock.require_held()
    figures = job.finish()
    return _result(job, figures, (blocks_written, blocks_kept), (chunks_written, chunks_kept), began)


def _found(job: ShuffleJob, began: float) -> ShuffleResult:
    """Describe an existing result."""
    attributes: dict[str, Any] = dict(paths.open_zarr(job.path).attrs)
    figures = attributes.get("mixing_before"), attributes.get("mixing")
    return _result(job, figures, (0, job.plan.n_blocks), (0, job.plan.n_chunks), began)


def _result(
    job: ShuffleJob,
    mixing: tuple[float | None, float | None],
    blocks: tuple[int, int],
    chunks: tuple[int, int],
    began: float,
) -> ShuffleResult:
    """Describe a shuffle by its figures before and after, and its parts written and kept."""
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
