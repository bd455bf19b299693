"""A store while it is written: chunk by chunk, in any order, by any number of threads, processes and machines.

Activations (`writer`) and codes (`codes_writer`) are both written this way. The unfinished store lies at
``STORE.partial``, on a remote at its final place, with a folder ``.parts`` that is removed when it is published:

```
.parts/plan.json             what the store will hold, written first
.parts/chunk-00000007.json   the marker of a part, written after its chunks: rows, and their checksums as one
                             list per chunk with one entry per array
.parts/*.tmp                 scratch files
```

Each file appears whole or not at all, so a part can be written twice without harm. A killed run leaves markers of
the parts that are done, and the next run writes the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.base.late import late
from dbksvd_dask.errors import JobError, StoreError
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store._system import same_bytes
from dbksvd_dask.store.arrays import ArraySpec, chunk_key, put_array
from dbksvd_dask.store.checksums import CHECKSUMS, KINDS, crc32c, file_crc, kind_in
from dbksvd_dask.store.chunk_file import ReadBackError, Rows, Stream, Watch, write_chunk_file
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.reader import chunk_layout

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")

PARTS = ".parts"
PLAN = "plan.json"
FSYNC_THREADS = 4  # these wait for the disk, not for a core
FORCED = "forced"  # whether a part was forced to the disk when it was written
BEGIN_AGAIN = "begin again with force=True"


class Partial:
    """The unfinished store of one name; small and picklable, so that it travels to the tasks that write chunks.

    Parameters
    ----------
    path : path or fsspec URL
        The name of the store.
    arrays : sequence of ArraySpec
        What is written in chunks.
    n_samples : int or None
        Length of the arrays; None while it is open.
    chunk_rows : int
        Rows of a chunk; only the last one may have fewer.
    part : str
        What a part is called in the names of markers.
    part_chunks : int
        Chunks of a part; only the last one may have fewer.
    compressor : {None, "zstd", "blosc"}
    durable : bool
        Force each chunk and marker to the disk as it is written. Otherwise `seal` does it for all at once, and
        whoever resumes has to `recheck`: a power failure may lose the content of files that had a name.
    """

    def __init__(
        self,
        path: PathLike,
        arrays: Sequence[ArraySpec],
        n_samples: int | None,
        chunk_rows: int,
        *,
        part: str,
        part_chunks: int = 1,
        compressor: str | None = None,
        durable: bool,
    ) -> None:
        self.path = paths.normalise(path)
        self.work = atomic.aside(self.path)
        self.folder = paths.join(self.work, PARTS)
        self.arrays = {spec.name: spec for spec in arrays}
        self.n_samples = n_samples
        self.chunk_rows = chunk_rows
        self.compressor = compressor
        self.direct = compressor is None and not paths.is_remote(self.work)
        self._part_chunks = part_chunks
        self.durable = durable
        self._ledger = atomic.Ledger(self.folder, part, durable=durable)
        self._opened: dict[str, zarr.Array[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    # -- begin ----------------------------------------

    def begin(self, attributes: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        """Make the empty store, once, however many processes begin it at the same time.

        Parameters
        ----------
        attributes : dict
            Of the group, while the store is not complete.
        plan : dict
            What the store will hold, for `read_plan`.
        """
        if paths.is_remote(self.work):
            self._create(self.work, attributes, plan)
            return
        os.makedirs(os.path.dirname(os.path.abspath(self.work)), exist_ok=True)
        scratch = f"{self.work}.{platform.node()}-{os.getpid()}.tmp"
        paths.remove(scratch)
        try:
            self._create(scratch, attributes, plan)
            # a folder that is not empty cannot be replaced: the first one stays
            with contextlib.suppress(OSError):
                os.rename(scratch, self.work)
        finally:
            paths.remove(scratch)
        if begun_plan(self.path) is None:
            raise StoreError(f"{self.work} is in the way and is not an unfinished store; remove it")

    def _create(self, folder: str, attributes: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        if not paths.is_remote(folder):
            os.makedirs(paths.join(folder, PARTS))
        with paths.explain_refusal(folder):
            store = paths.zarr_store(folder, read_only=False)
            group = zarr.create_group(store=store, zarr_format=3, attributes=dict(attributes))
        for spec in self.arrays.values():
            spec.create(group, self.n_samples or 0, self.chunk_rows, self.compressor)
        atomic.write_sealed(paths.join(folder, PARTS, PLAN), plan)

    def attributes(self) -> dict[str, Any]:
        """Read the attributes of the unfinished store, which another process may have completed."""
        return dict(paths.open_zarr(self.work).attrs)

    def group(self) -> zarr.Group:
        """Open the unfinished store for writing."""
        with paths.explain_metadata(self.work):
            return zarr.open_group(store=paths.zarr_store(self.work, read_only=False), mode="r+")

    def require_sound(self) -> None:
        """Refuse to continue with arrays whose metadata are not those they were made with."""
        group = self.group()
        for name in self.arrays:
            self._opened[name] = self._open(group, name)

    def _open(self, group: zarr.Group, name: str) -> zarr.Array[Any]:
        spec, home = self.arrays[name], paths.join(self.work, name)
        # a setting of the process, not kept in the store: without it a chunk of zeros would be left out
        with zarr.config.set({"array.write_empty_chunks": True, "array.order": "C"}):
            array = paths.get_array(self.work, group, name)
        if array is not None and self.n_samples in (None, array.shape[0]):
            layout = ("c.{}" + ".0" * len(spec.tail), self.compressor is None)
            expected = (spec.tail, (self.chunk_rows, *spec.tail), np.dtype(spec.dtype), layout)
            if (array.shape[1:], array.chunks, np.dtype(array.dtype), chunk_layout(array)) == expected:
                return array
        raise StoreError(
            f"the Zarr metadata in {paths.join(home, 'zarr.json')} are not those the store was begun with; "
            f"{BEGIN_AGAIN}"
        )

    def array(self, name: str) -> zarr.Array[Any]:
        """Return an array, opened for writing."""
        if name not in self._opened:
            self._opened[name] = self._open(self.group(), name)
        return self._opened[name]

    def close_shape(self, n_samples: int) -> None:
        """Settle the number of samples, where it was open until all chunks were written."""
        for name, spec in self.arrays.items():
            array = self.array(name)
            if array.shape[0] != n_samples:
                array.resize((n_samples, *spec.tail))
        self.n_samples = n_samples

    # -- chunks ----------------------------------------

    def chunk_file(self, name: str, chunk: int) -> str:
        """Return the path of the file of a chunk of an array."""
        return paths.join(self.work, name, chunk_key(chunk, self.arrays[name].tail))

    def write_block(
        self, name: str, chunk: int, rows: Rows, *, verify: bool = True, on_rows: Watch | None = None
    ) -> int:
        """Write one chunk of one array; return the CRC-32C of its rows.

        Parameters
        ----------
        name, chunk : str, int
        rows : ndarray, or Stream, of shape (n, ...)
            Of the stored dtype; padded to a full chunk on the disk.
        verify : bool
            Read the chunk back and compare it.
        on_rows : callable, optional
            Called before rows are written, with the number of the first and the rows.

        Raises
        ------
        JobError
            When it does not read back as written.
        """
        write = self._write_zarr if self.compressor else self._write_file if self.direct else self._write_object
        try:
            return write(name, chunk, rows, verify, on_rows)
        except ReadBackError as error:
            raise JobError(
                f"chunk {chunk} of `{name}` in {self.work} does not read back as it was written; "
                "is the disk failing?"
            ) from error

    def _pad(self, rows: Rows) -> int:
        return (self.chunk_rows - len(rows)) * (rows.nbytes // len(rows))

    def _write_file(self, name: str, chunk: int, rows: Rows, verify: bool, on_rows: Watch | None) -> int:
        content = rows if isinstance(rows, Stream) else np.ascontiguousarray(rows)
        return write_chunk_file(
            self.chunk_file(name, chunk),
            content,
            self._pad(rows),
            folder=self.folder,  # which goes when the store is published, with scratch files of a killed run
            verify=verify,
            on_rows=on_rows,
            durable=self.durable,
        )

    def _write_object(self, name: str, chunk: int, rows: Rows, verify: bool, on_rows: Watch | None) -> int:
        block, pad, file = _whole(rows, on_rows), bytes(self._pad(rows)), self.chunk_file(name, chunk)
        atomic.write_bytes(file, block, pad)
        if verify and paths.read_bytes(file) != block.tobytes() + pad:
            raise ReadBackError(f"{file} does not read back as it was written")
        return crc32c(block)

    def _write_zarr(self, name: str, chunk: int, rows: Rows, verify: bool, on_rows: Watch | None) -> int:
        block, array, start = _whole(rows, on_rows), self.array(name), chunk * self.chunk_rows
        stop = start + len(block)
        if stop > array.shape[0]:
            array.resize((stop, *block.shape[1:]))
        array[start:stop] = block
        if verify:
            found = np.ascontiguousarray(np.asarray(array[start:stop]))
            both = [a.reshape(-1).view(np.uint8) for a in (found, block)]
            if found.shape != block.shape or not same_bytes(*both):
                raise ReadBackError(f"chunk {chunk} of {name} does not read back as it was written")
        return crc32c(block)

    def _checksum(self, name: str, chunk: int, rows: int, kind: str) -> int:
        spec, file, checksum = self.arrays[name], self.chunk_file(name, chunk), KINDS[kind]
        length, size = rows * spec.row_bytes, self.chunk_rows * spec.row_bytes
        if self.direct:
            return file_crc(file, length, size, checksum=checksum)
        if self.compressor is not None:
            start = chunk * self.chunk_rows
            return checksum(np.asarray(self.array(name)[start : start + rows]), 0)
        content = paths.read_bytes(file)
        if len(content) != size:
            raise StoreError(f"{file} has {len(content)} bytes instead of {size}")
        return checksum(np.frombuffer(content, np.uint8, length), 0)

    # -- parts ----------------------------------------

    def mark(self, part: int, rows: int, checksums: list[list[int]]) -> None:
        """Record that a part is written, after its chunks.

        Parameters
        ----------
        part, rows : int
            The part and how many rows it has.
        checksums : list of list of int
            What `write_block` returned: one list per chunk with one entry per array.
        """
        self._ledger.mark(part, {"rows": rows, CHECKSUMS: checksums, FORCED: self.durable})

    def marker(self, part: int) -> str:
        """Return the path of the marker of a part."""
        return self._ledger.file(part)

    def done(self) -> list[int]:
        """Return the parts that are written, ascending."""
        return self._ledger.parts()

    def missing(self, n_parts: int) -> list[int]:
        """Return the parts of 0..n_parts-1 that are not written."""
        return self._ledger.missing(n_parts)

    def forget(self, part: int) -> None:
        """Count a part as not written."""
        self._ledger.unmark(part)

    def rows_of(self, part: int) -> int:
        """Return the rows of a written part, as its marker says."""
        return int(self._ledger.read(part)["rows"])

    def _computed(self, part: int, rows: int, kind: str) -> list[list[int]]:
        """Read a part and return its checksums, as in a marker."""
        first = part * self._part_chunks
        lengths = [min(self.chunk_rows, rows - start) for start in range(0, rows, self.chunk_rows)]
        return [[self._checksum(name, first + i, n, kind) for name in self.arrays] for i, n in enumerate(lengths)]

    def check(self, part: int) -> bool:
        """Return whether a written part reads back as it was written, by its checksums."""
        try:
            mark = self._ledger.read(part)
            kind = kind_in(mark)
            return kind is not None and self._computed(part, mark["rows"], kind) == _table(mark[kind])
        except (OSError, KeyError, ValueError):
            return False

    def recheck(self, parts: Iterable[int] | None = None, *, trust_forced: bool = False) -> list[int]:
        """Read written parts; those that differ count as not written and are returned.

        Parameters
        ----------
        parts : iterable of int, optional
            Written parts; default: all.
        trust_forced : bool
            Do not read parts that were forced to the disk when they were written.
        """
        written = self.done() if parts is None else parts
        bad = [part for part in written if not (trust_forced and self._is_forced(part)) and not self.check(part)]
        for part in bad:
            self.forget(part)
        return bad

    def _is_forced(self, part: int) -> bool:
        try:
            return bool(self._ledger.read(part).get(FORCED))
        except StoreError:
            return False

    def checksums(self, parts: Iterable[int]) -> npt.NDArray[np.uint32]:
        """Return the checksums in the markers of some parts.

        Returns
        -------
        ndarray of shape (chunks of these parts, arrays)
        """
        return np.array([row for part in parts for row in self._recorded(part)], np.uint32)

    def _recorded(self, part: int) -> list[list[int]]:
        mark = self._ledger.read(part)
        if CHECKSUMS in mark:
            return _table(mark[CHECKSUMS])
        if not self.check(part):  # of another kind, by an earlier version
            self.forget(part)
            raise JobError(
                f"{self.path} cannot be finished: part {part} does not read back as it was written (is the disk "
                "failing?); run again to write it anew"
            )
        return self._computed(part, mark["rows"], CHECKSUMS)

    # -- finish ----------------------------------------

    def write_checksums(self, group: zarr.Group, table: npt.NDArray[np.uint32]) -> None:
        """Write the checksums of all chunks as an array of the store."""
        put_array(group, CHECKSUMS, table, ("chunk", "array"), {"arrays": list(self.arrays)})

    def seal(self, group: zarr.Group, attributes: Mapping[str, Any]) -> None:
        """Force the store to the disk, and then call it complete.

        Parameters
        ----------
        group : zarr.Group
            The unfinished store.
        attributes : dict
            All attributes of the finished store; written at once: it is complete with all of them or not at all.
        """
        self._sync()
        group.attrs.put({**attributes, "complete": True})
        if not paths.is_remote(self.work):
            atomic.fsync_path(os.path.join(self.work, "zarr.json"))
            atomic.fsync_path(self.work)

    def _sync(self) -> None:
        if paths.is_remote(self.work):
            return
        with ThreadPoolExecutor(FSYNC_THREADS) as pool:
            for forced in [pool.submit(atomic.fsync_path, path) for path in self._unforced()]:
                forced.result()

    def _unforced(self) -> Iterator[str]:
        """Yield the files and folders that are not known to be on the disk; Zarr's own scratch files go."""
        forced = self.durable and all(map(self._is_forced, self.done()))
        for home, folders, names in os.walk(self.work):
            if PARTS in folders:
                folders.remove(PARTS)
            chunked = forced and os.path.basename(home) in self.arrays
            for path in (os.path.join(home, name) for name in names):
                if path.endswith(".partial"):
                    os.unlink(path)
                elif not (chunked and os.path.basename(path).startswith("c.")):
                    yield path
            yield home

    def publish(self, overwrite: bool) -> None:
        """Return the complete store its name and remove what the work left; the plan goes last."""
        for name in paths.list_names(self.folder):
            if name != PLAN:
                paths.remove(paths.join(self.folder, name))
        if self.work != self.path:
            atomic.publish(self.work, self.path, overwrite=overwrite)
        tidy(self.path)

    def discard(self) -> None:
        """Throw the unfinished work away, even while tasks of this process still write to it.

        It is renamed first: a late task then finds no folder to write to, and nothing new can appear in what is
        being removed. On a remote, which has no rename, the work stays.
        """
        if paths.is_remote(self.work):
            return
        doomed = f"{self.work}.{platform.node()}-{os.getpid()}-discarded.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.work, doomed)
        paths.remove(doomed)


def begun_plan(path: PathLike) -> str | None:
    """Return the path of the plan of an unfinished store; None if none is begun under that name."""
    plan = paths.join(atomic.aside(path), PARTS, PLAN)
    return plan if paths.exists(plan) else None


def content_id(identity: Any, table: npt.NDArray[np.uint32]) -> str:
    """Identify the content of a store by its description, in plain JSON values, and its checksums."""
    described = json.dumps(identity, sort_keys=True).encode()
    return hashlib.sha256(described + table.astype("<u4").tobytes()).hexdigest()[:32]


def leftovers(path: PathLike) -> list[str]:
    """Return what a run that was killed right after it had published a store left in it and beside it."""
    text = paths.normalise(path)
    inside = paths.join(text, PARTS)
    found = [inside] if paths.exists(inside) else []
    if paths.is_remote(text):
        return found
    home, name = os.path.split(os.path.abspath(text))
    begun = re.compile(re.escape(name + atomic.PARTIAL_SUFFIX) + r"\..*-\d+(-discarded)?\.tmp")
    found += [os.path.join(home, other) for other in paths.list_names(home) if begun.fullmatch(other)]
    return found + atomic.replaced(text)


def tidy(path: PathLike) -> None:
    """Remove the `leftovers` of a published store."""
    for left in leftovers(path):
        paths.remove(left)


def _whole(rows: Rows, on_rows: Watch | None) -> npt.NDArray[Any]:
    block = np.ascontiguousarray(rows.whole() if isinstance(rows, Stream) else rows)
    if on_rows is not None:
        on_rows(0, block)
    return block


def _table(checksums: list[Any]) -> list[list[int]]:
    """Return checksums as one list per chunk; a marker of an earlier version has those of its one chunk alone."""
    return checksums if isinstance(checksums[0], list) else [checksums]
