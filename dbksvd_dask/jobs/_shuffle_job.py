"""The steps of a shuffle: two passes, or one over a source that stays in memory, and publishing the result."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dbksvd_dask.base.late import late
from dbksvd_dask.base.safe_text import redacted
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.evaluate.mixing import BatchMeans, MixingSample, batch_rows, choose_columns
from dbksvd_dask.events import Callback, JobProgress, Retrying, emit
from dbksvd_dask.jobs import _workers
from dbksvd_dask.jobs._passes import ChunkPicker, can_shrink, may_pick, scratch_folder
from dbksvd_dask.jobs._segments import SegmentLostError, Segments
from dbksvd_dask.jobs.base import Buffers, begin_or_resume, run_bounded, storing_threads
from dbksvd_dask.plan.shuffle import plan_shuffle
from dbksvd_dask.plan.units import part_range, turned
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import (
    ActivationWriter,
    Aligned,
    RowReader,
    create_activations,
    open_aligned,
    open_rows,
    open_writer,
)
from dbksvd_dask.store.chunk_file import Stream, piece_rows
from dbksvd_dask.store.dtypes import BFLOAT16, widen_bfloat16
from dbksvd_dask.store.job_folder import JobFolder
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
SEGMENTS = "segments"  # in the marker of a block whose segments are written
# blocks that are on the disk twice while scratch files shrink: those in memory, and one for the rounding to blocks
IN_BOTH = 4

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]


class ShuffleJob:
    """A shuffle in steps: `init`, `scatter` (pass 1), `gather` (pass 2), `finish`; each can be repeated.

    A source that stays in the file cache is shuffled without scratch files: `scatter` then only reads it,
    and `gather` picks rows from it. The result is the same, and either method can resume a run of the other.

    Several processes can do parts: of both passes, each does its own share first. Pass 2 needs all of pass 1, so a
    process that has done its share of pass 1 does what no other one has done yet, instead of waiting.

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
        self.arguments = _arguments(locals())
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
        row_bytes = sum(r.row_bytes for r in self.readers.values())
        self.nbytes = self.reader.n_samples * row_bytes
        rows = chunk_rows or self.reader.chunk_rows
        self.plan = plan_shuffle(self.reader.n_samples, row_bytes, rows, seed, block_bytes)
        self.counts = self.plan.counts()
        self.scratch = scratch_folder(self.path, scratch)
        self._has_scratch = scratch is not None or not paths.is_remote(self.path)
        self._folder = JobFolder(
            self.scratch,
            f"an unfinished shuffle to {self.path} was begun with another store, seed or size; use the same to "
            "resume, or force=True to begin again",
        )
        self._segments = Segments(self.scratch, self.counts, self.readers)
        self._blocks = atomic.Ledger(self.scratch, "block", durable=False)
        self._means = atomic.Ledger(paths.join(atomic.aside(self.path), PARTS), "means", durable=False)
        self._columns = choose_columns(self.reader.n_features)
        self._batch_rows = batch_rows(self.reader.n_samples, rows)
        self._buffers = Buffers()
        self.one_pass = False
        self.blocks_repaired = 0  # whose segments were damaged or released when they were needed
        self._writer: ActivationWriter | None = None

    # -- init ----------------------------------------

    def init(self, part: tuple[int, int] | None = None) -> ActivationWriter:
        """Begin or resume the new store and the scratch folder.

        Parameters
        ----------
        part : (i, n), optional
            This process does part i of n and others may be at work: discard nothing, and take two passes.
        """
        if _workers.current_client() is not None:
            self.require_shared_scratch()
        require_free(self.path, self.force, "force")
        job, shared = self._identity(), part is not None
        begun = self._folder.settle(job, self.force)
        self.one_pass = not shared and _workers.current_client() is None and self.fits_one_pass()
        self._require_room()
        if not begun:
            with atomic.explain_full_disk(self.scratch):
                self._folder.begin(job)
        with atomic.explain_full_disk(atomic.aside(self.path)):
            self._writer = self._begin_store(job, shared)
        own = set(self.chunks_of(part))
        if shared:
            self._writer.recheck(own & set(self._writer.done()))
        self._recheck_means(self._writer, own)
        return self._writer

    def require_shared_scratch(self) -> None:
        """Refuse a target on a remote without a folder that all workers see."""
        if not self._has_scratch:
            raise InputError(
                f"a shuffle to {self.path} on a cluster needs a folder between the passes that all workers see; "
                "give scratch=FOLDER"
            )

    def buckets_of(self, part: tuple[int, int] | None) -> range:
        """Return the buckets, or blocks, that belong to part i of n, or to the whole job."""
        return part_range(self.plan.n_blocks, *(part or (1, 1)))

    def chunks_of(self, part: tuple[int, int] | None) -> list[int]:
        """Return the chunks that belong to part i of n, or to the whole job."""
        return [chunk for bucket in self.buckets_of(part) for chunk in self._chunks_of(bucket)]

    def _chunks_of(self, bucket: int) -> range:
        start, stop = self.plan.bounds(bucket)
        return range(start // self.plan.chunk_rows, -(-stop // self.plan.chunk_rows))

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

    def _recheck_means(self, writer: ActivationWriter, chunks: set[int]) -> None:
        """Count chunks whose sums cannot be read as not written; a chunk that is written always has its sums."""
        for chunk in sorted(set() if writer.complete else chunks & set(writer.done())):
            try:
                self._means.read(chunk)
            except StoreError:
                writer.forget(chunk)

    def _identity(self) -> dict[str, Any]:
        """Describe what is shuffled and how, so that another run can compare."""
        return {"source": self.reader.fingerprint, "plan": dict(self.plan.__dict__)}

    def _job_id(self) -> str:
        return job_id({"shuffle": self._identity(), "compressor": self.compressor})

    def is_there(self) -> bool:
        """Return whether the result of this shuffle already exists and is not to be replaced."""
        return not self.force and is_finished(self.path, self._job_id())

    def tidy(self) -> None:
        """Remove what a run that was killed after publishing left behind."""
        tidy(self.path)
        self._folder.remove()

    def fits_one_pass(self) -> bool:
        """Return whether the rows could be picked out of the source now, without scratch files."""
        return may_pick(self.reader, self._aligned)

    def _begin_store(self, job: dict[str, Any], shared: bool) -> ActivationWriter:
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
                shared=shared,
                job=job,
            )

        return begin_or_resume(begin, self.force)

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

    def missing_blocks(self) -> list[int]:
        """Return the blocks that pass 1 still has to read."""
        return [block for block in range(self.plan.n_blocks) if not self._is_read(block)]

    def _is_read(self, block: int) -> bool:
        """Return whether a block was read, and its segments written where there are some."""
        mark = self._mark(block)
        return mark is not None and (self.one_pass or SEGMENTS in mark)

    def _mark(self, block: int) -> dict[str, Any] | None:
        try:
            return self._blocks.read(block)
        except StoreError:  # missing, or lost to a power failure
            return None

    def _scratch_needed(self) -> int:
        if self.one_pass:
            return 0
        left = len(self.missing_blocks()) * self.plan.block_rows
        return min(self.plan.n_samples, left) * (self.nbytes // self.plan.n_samples)

    # -- pass 1 ----------------------------------------

    def scatter(self, part: tuple[int, int] | None = None) -> int:
        """Read every missing block and write its segments; return how many.

        In one pass there are no segments, only the mixing figure of the source; reading also caches the source.

        Parameters
        ----------
        part : (i, n), optional
            Begin with the blocks of this part, and leave out what other processes do meanwhile.
        """
        if self.one_pass:
            read = self._survey()
            if in_file_cache(self.reader):
                return read
            self.one_pass = False  # the cache has lost it: picking rows from the disk would take hours
            atomic.require_space(self.scratch, self._scratch_needed())
        missing = turned(self.missing_blocks(), self.buckets_of(part).start)
        client = _workers.current_client()
        if client is not None and missing:
            return self._on_workers(client, "scatter_piece", missing, self._counting("scatter", missing))
        return self._run_blocks("scatter", missing, self._load_block, self._store_block)

    def _survey(self) -> int:
        missing = [block for block in range(self.plan.n_blocks) if self._mark(block) is None]
        return self._run_blocks("survey", missing, lambda block: block, self._survey_block)

    def _run_blocks(
        self, step: str, missing: list[int], load: Callable[[int], T], store: Callable[[int, T], None]
    ) -> int:
        def left() -> Iterator[int]:  # other processes may be doing blocks as well
            return (block for block in missing if not self._is_read(block))

        with atomic.explain_full_disk(self.scratch):
            return run_bounded(left(), load, store, self._counting(step, missing))

    def scatter_piece(self, block: int) -> None:
        """Read one block and write its segments; for the tasks of workers."""
        self._store_block(block, self._load_block(block))

    def _load_block(self, block: int) -> Arrays:
        start, stop = self.plan.bounds(block)
        arrays = {}
        for name, reader in self.readers.items():
            rows = self._buffers.take((stop - start, reader.n_features), reader.stored)
            arrays[name] = reader.read_stored(start, stop, rows)
        return arrays

    def _store_block(self, block: int, arrays: Arrays) -> None:
        order = self.plan.block_order(block)
        for name, rows in arrays.items():
            self._segments.write(block, name, rows, order)
        sample = self._sample(len(order))
        sample.add(0, arrays[MAIN])
        self._give(arrays)
        self._blocks.mark(block, {SEGMENTS: True, "means": self._means_of(sample)})

    def _survey_block(self, block: int, _: int) -> None:
        """Record the batch means of a block, piece by piece, which stays in the processor's cache."""
        first, stop = self.plan.bounds(block)
        row_bytes = self.reader.row_bytes
        # what has to be decoded comes as whole chunks
        step = piece_rows(row_bytes) if self.one_pass else self.plan.chunk_rows
        buffer = np.empty((min(step, stop - first), self.reader.n_features), self.reader.stored)
        sample = self._sample(stop - first)
        for start in range(first, stop, step):
            end = min(start + step, stop)
            sample.add(start - first, self.reader.read_stored(start, end, buffer[: end - start]))
        self._blocks.mark(block, {"means": self._means_of(sample)})

    # -- pass 2 ----------------------------------------

    def gather(self, part: tuple[int, int] | None = None) -> int:
        """Write the missing chunks, of one part or of all; return how many."""
        writer, client = self._writer or self.init(part), _workers.current_client()
        own = self.buckets_of(part)
        missing = {chunk for chunk in writer.missing() if self.plan.bucket_of(chunk) in own}
        buckets = sorted({self.plan.bucket_of(chunk) for chunk in missing})
        if buckets and self.missing_blocks():
            self.scatter(part)
        with atomic.explain_full_disk(writer.work):
            if self.one_pass:
                done = self._counting("gather", sorted(missing), self.plan.n_chunks, "chunks")
                self._pick_chunks(sorted(missing), done)
                return len(missing)
            done = self._counting("gather", buckets, len(own), "buckets")
            if client is not None and buckets:
                self._on_workers(client, "gather_piece", buckets, done)
            else:
                run_bounded(buckets, self._load_bucket, self._store_bucket, done)
        return len(missing)

    def _pick_chunks(self, missing: list[int], on_done: Callable[[int], None]) -> None:
        picker = ChunkPicker(self.plan, self.counts, self.reader, self._aligned)

        def store(chunk: int, sources: npt.NDArray[np.int64]) -> None:
            def fill(first: int, rows: npt.NDArray[Any]) -> None:
                picker.fill(sources[first : first + len(rows)], rows)

            self._store_chunk(chunk, len(sources), fill, picker.aligned(sources))

        with contextlib.closing(picker):
            run_bounded(missing, picker.sources, store, on_done, storing_threads())

    def gather_piece(self, bucket: int) -> None:
        """Write the chunks of one bucket; for the tasks of workers."""
        if self._writer is None:
            self._writer = open_writer(self.path, shared=True)
        self._store_bucket(bucket, self._load_bucket(bucket))

    def _missing_in(self, bucket: int) -> set[int]:
        assert self._writer is not None
        return {chunk for chunk in self._chunks_of(bucket) if not self._writer.is_written(chunk)}

    def _load_bucket(self, bucket: int) -> Arrays:
        """Return the rows of a bucket; none if some process has already written its chunks."""
        if not self._missing_in(bucket):
            return {}
        while True:
            try:
                return self._load_segments(bucket)
            except SegmentLostError as lost:
                # a process that has written the chunks may have given the room of the segments back
                if not self._missing_in(bucket):
                    return {}
                self.blocks_repaired += 1
                self._store_block(lost.block, self._load_block(lost.block))

    def _load_segments(self, bucket: int) -> Arrays:
        start, stop = self.plan.bounds(bucket)
        arrays = {}
        for name, reader in self.readers.items():
            rows = self._buffers.take((stop - start, reader.n_features), reader.stored)
            self._segments.load(bucket, name, rows)
            arrays[name] = rows
        return arrays

    def _store_bucket(self, bucket: int, arrays: Arrays) -> None:
        """Write the chunks of a bucket that are missing, and give the room of its segments back."""
        if not arrays:
            return
        start, stop = self.plan.bounds(bucket)
        order, missing = self.plan.bucket_order(bucket), self._missing_in(bucket)
        for low in range(start, stop, self.plan.chunk_rows):
            chunk, part = low // self.plan.chunk_rows, order[low - start : low - start + self.plan.chunk_rows]
            if chunk not in missing:
                continue

            def fill(first: int, rows: npt.NDArray[Any], part: npt.NDArray[np.int64] = part) -> None:
                # the order is a permutation: "clip" avoids the checked copy that "raise" makes
                np.take(arrays[MAIN], part[first : first + len(rows)], axis=0, out=rows, mode="clip")

            beside = {name: rows[part] for name, rows in arrays.items() if name != MAIN}
            self._store_chunk(chunk, len(part), fill, beside)
        self._segments.release(bucket)
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
            on_rows=sample.add,
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
        writer, known = self._writer or self.init(), {}
        if not writer.complete:
            self._survey()  # only what a power failure has lost since
            before, after = self.mixing()
            known = {"mixing": after, "mixing_before": before, JOB_ID: self._job_id()}
        with atomic.explain_full_disk(writer.work):
            writer.finish(attributes=known)
        self._folder.remove()
        return self.figures()

    def figures(self) -> tuple[float | None, float | None]:
        """Return the mixing figures of the source and of the published result."""
        attributes: dict[str, Any] = dict(paths.open_zarr(self.path).attrs)
        return attributes.get("mixing_before"), attributes.get("mixing")

    def missing(self) -> list[int]:
        """Return the buckets of the whole store that are not written."""
        assert self._writer is not None
        return sorted({self.plan.bucket_of(chunk) for chunk in self._writer.missing()})

    def abandon(self) -> None:
        """Remove what this process has begun after another one had published the result."""
        if self._writer is not None:
            self._writer.discard()
        self._folder.remove()

    def close(self) -> None:
        """Do nothing: files are opened for each read."""

    def _sample(self, n_rows: int) -> MixingSample:
        return MixingSample(n_rows, self._columns, self.reader.stored)

    def _means_of(self, sample: MixingSample) -> dict[str, Any]:
        widen = widen_bfloat16 if self.reader.bfloat16 else None
        return sample.means(self.plan.chunk_rows, self._batch_rows, widen).to_json()

    def _counting(
        self, step: str, missing: Sequence[int], total: int | None = None, unit: str = "blocks"
    ) -> Callable[[int], None]:
        """Return what emits the progress of a step, when called once for each of the missing pieces."""
        whole = self.plan.n_blocks if total is None else total
        done = itertools.count(whole - len(missing) + 1)
        return lambda _: emit(self.callbacks, JobProgress(step, next(done), whole, unit))

    def _on_workers(self, client: Any, step: str, pieces: Sequence[int], on_done: Callable[[int], None]) -> int:
        def on_retry(*reason: Any) -> None:
            emit(self.callbacks, Retrying(0, *reason))

        return _workers.run_pieces(client, self, step, pieces, on_done, on_retry)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a job as a process in another folder can use them."""
    kept = {name: value for name, value in given.items() if name not in ("self", "callbacks")}
    return kept | {name: _workers.everywhere(kept[name]) for name in ("source", "path", "scratch")}


def _aligned_readers(reader: RowReader) -> dict[str, RowReader]:
    node = paths.open_zarr(reader.path)
    names = aligned_names(reader, node) if isinstance(node, zarr.Group) else []
    return {name: open_aligned(reader.path, name) for name in names}
