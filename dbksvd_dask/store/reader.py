"""Reading rows from a Zarr store, near the speed of the raw files, with damage detected.

Uncompressed whole-row chunks, the default of this package, are read straight from their files (or by byte
range from a remote): Zarr's own path copies more and ran at a fifth of the speed. Everything else goes
through Zarr.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask._words import listed
from dbksvd_dask.base.late import late
from dbksvd_dask.base.safe_text import redacted
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store import paths
from dbksvd_dask.store._system import read_at
from dbksvd_dask.store.checksums import CHECKSUMS, bytes_of
from dbksvd_dask.store.dtypes import BFLOAT16, delivered_dtype, stored_dtype, widen_bfloat16
from dbksvd_dask.store.links import Links, links_of
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.spans import Span, SpanReader

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")

ACTIVATIONS_FORMAT = "dbksvd-activations"
ACTIVATIONS_VERSION = 1
LINKED_VERSION = 2  # of a store whose rows are in other files
LINKED = "linked"  # the attribute that says so
ROWS = "activations"  # the array that holds the rows

_HANDLES: dict[tuple[str, str, str], zarr.Array[Any]] = {}
_HANDLES_LOCK = threading.Lock()


@dataclass(frozen=True)
class RowReader:
    """Rows of a 2-D Zarr array: a small, picklable description that opens the store when it reads.

    Attributes
    ----------
    path : str
        Local path or fsspec URL of the store.
    array : str
        Name of the array in the group; empty for a bare array.
    n_samples, n_features : int
        Shape of the rows.
    dtype : numpy dtype
        What `read` delivers: float16, float32 or float64 (float32 for bfloat16 stores).
    chunk_rows : int
        Rows of one Zarr chunk (of one shard, when sharded): the unit that reads best.
    fingerprint : str
        Identifies the store; see `fingerprint`.
    """

    path: str
    array: str
    n_samples: int
    n_features: int
    dtype: np.dtype[Any]
    chunk_rows: int
    fingerprint: str
    stored: np.dtype[Any] = field(repr=False)
    bfloat16: bool = field(repr=False)
    complete: bool = field(repr=False)
    key_pattern: str = field(repr=False)
    raw: bool = field(repr=False)
    fill_value: Any = field(repr=False)
    row_shape: tuple[int, ...] = field(repr=False)
    attributes: dict[str, Any] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        """Show path and shape, without credentials."""
        return f"RowReader({redacted(self.path)!r}, {self.n_samples} x {self.n_features}, {self.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_samples, n_features)."""
        return self.n_samples, self.n_features

    @property
    def n_chunks(self) -> int:
        """Return the number of chunks along the samples."""
        return -(-self.n_samples // self.chunk_rows)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row as stored."""
        return self.n_features * self.stored.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows as stored."""
        return self.n_samples * self.row_bytes

    def chunk_bounds(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk and the row after its last."""
        start = chunk * self.chunk_rows
        return start, min(start + self.chunk_rows, self.n_samples)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows [start, stop).

        Returns
        -------
        ndarray of shape (stop - start, n_features), C-contiguous, of dtype `self.dtype`

        Raises
        ------
        StoreError
            When a chunk is missing, short or cannot be decoded.
        """
        return self.read_runs([(start, stop)])

    def read_runs(self, runs: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
        """Read runs of rows, each (start, stop), one below the other; from a remote store all at once.

        Returns
        -------
        ndarray of shape (rows of all runs, n_features), as `read` gives them
        """
        ends = list(itertools.accumulate(stop - start for start, stop in itertools.starmap(self._checked, runs)))
        out = np.empty((ends[-1] if ends else 0, self.n_features), self.stored)
        targets = [out[end - (stop - start) : end] for (start, stop), end in zip(runs, ends, strict=True)]
        if self.raw and paths.is_remote(self.path):
            self._read_ranges([(*run, target) for run, target in zip(runs, targets, strict=True)])
        elif not self.raw and len(runs) > 1:
            self._read_by_chunk([(*run, target) for run, target in zip(runs, targets, strict=True)])
        else:
            for (start, stop), target in zip(runs, targets, strict=True):
                self.read_stored(start, stop, target)
        return widen_bfloat16(out) if self.bfloat16 else out

    def read_stored(self, start: int, stop: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Read rows as they are stored: the bits of bfloat16 as uint16, anything else as `read` does.

        Parameters
        ----------
        start, stop : int
            The rows [start, stop).
        out : ndarray of shape (stop - start, n_features), optional
            Where to read to; must be C-contiguous and of dtype `self.stored`.
        """
        self._checked(start, stop)
        if out is None:
            out = np.empty((stop - start, self.n_features), self.stored)
        if self.raw and paths.is_remote(self.path):
            self._read_ranges([(start, stop, out)])
        elif self.raw:
            self._read_files(start, stop, out)
        else:
            self._read_zarr(start, stop, out)
        return out

    def __dask_tokenize__(self) -> tuple[str, str, str]:
        """Identify the rows for Dask by their content, not by the address of the object."""
        return self.path, self.array, self.fingerprint

    def spans(self, start: int, stop: int) -> list[Span] | None:
        """Return where rows [start, stop) are as plain bytes of local files; None if they have to be decoded."""
        if not self.raw or paths.is_remote(self.path):
            return None
        try:
            return [self._span(*piece) for piece in self._pieces(*self._checked(start, stop))]
        except FileNotFoundError:  # a chunk that equals the fill value
            return None

    @property
    def one_file_per_chunk(self) -> bool:
        """Return whether each chunk is a local file of plain bytes; see `open_chunk`."""
        return self.raw and not paths.is_remote(self.path)

    def describe_row(self, row: int) -> str:
        """Say where a row is, for an error message."""
        chunk, inside = divmod(row, self.chunk_rows)
        return f"sample {row} (chunk {chunk}, row {inside} in it) of {self.path}"

    # -- the parts of a read ----------------------------------------

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split rows into (chunk, first row, row after the last), one item per chunk touched."""
        pieces = []
        while start < stop:
            chunk = start // self.chunk_rows
            end = min(stop, (chunk + 1) * self.chunk_rows)
            pieces.append((chunk, start, end))
            start = end
        return pieces

    def _checked(self, start: int, stop: int) -> tuple[int, int]:
        if not 0 <= start <= stop <= self.n_samples:
            raise InputError(f"rows {start} to {stop} asked of {self.path}, which has {self.n_samples} rows")
        return start, stop

    def _span(self, chunk: int, first: int, last: int) -> Span:
        os.close(self.open_chunk(chunk))  # refuses a file of another size
        offset = (first - chunk * self.chunk_rows) * self.row_bytes
        return Span(self.chunk_file(chunk), offset, (last - first) * self.row_bytes)

    def _key(self, chunk: int) -> str:
        return self.key_pattern.format(chunk)

    def _damage(self, chunk: int, what: str) -> StoreError:
        first, last = self.chunk_bounds(chunk)
        return StoreError(
            f"chunk {chunk} of {self.path} (rows {first} to {last - 1}) {what}: "
            f"{paths.join(self.path, self._key(chunk))}; restore this file or write the store again"
        )

    def chunk_file(self, chunk: int) -> str:
        """Return the path of the file of a chunk."""
        return paths.join(self.path, self._key(chunk))

    def open_chunk(self, chunk: int) -> int:
        """Open the file of an uncompressed local chunk for reading; return its descriptor.

        Raises
        ------
        FileNotFoundError
            When it does not exist and may be absent.
        StoreError
            When it must exist and does not, or has the wrong size.
        """
        try:
            fd = os.open(self.chunk_file(chunk), os.O_RDONLY)
        except FileNotFoundError:
            if self.complete:
                raise self._damage(chunk, "is missing") from None
            raise
        size, needed = os.fstat(fd).st_size, self.chunk_rows * self.row_bytes
        if size != needed:
            os.close(fd)
            raise self._damage(chunk, f"has {size} bytes instead of {needed}")
        return fd

    def _read_files(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        for chunk, first, last in self._pieces(start, stop):
            target = out[first - start : last - start]
            try:
                fd = self.open_chunk(chunk)
            except FileNotFoundError:
                target[...] = self.fill_value
                continue
            try:
                self._pread(fd, chunk, target, (first - chunk * self.chunk_rows) * self.row_bytes)
            finally:
                os.close(fd)

    def _pread(self, fd: int, chunk: int, target: npt.NDArray[Any], offset: int) -> None:
        if read_at(fd, bytes_of(target), offset) < target.nbytes:
            raise self._damage(chunk, "ended while it was read")

    def _read_ranges(self, runs: Sequence[tuple[int, int, npt.NDArray[Any]]]) -> None:
        """Read runs of rows, each (start, stop, where to), as byte ranges of a remote store."""
        pieces = [
            (chunk, first, last, out[first - start : last - start])
            for start, stop, out in runs
            for chunk, first, last in self._pieces(start, stop)
        ]
        offsets = [(first - chunk * self.chunk_rows) * self.row_bytes for chunk, first, _, _ in pieces]
        lengths = [(last - first) * self.row_bytes for _, first, last, _ in pieces]
        ends = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
        contents = paths.cat_ranges(self.path, [self._key(piece[0]) for piece in pieces], offsets, ends)
        for (chunk, _, _, target), content, length in zip(pieces, contents, lengths, strict=True):
            if isinstance(content, FileNotFoundError):
                self._fill_absent(chunk, target)
            elif isinstance(content, BaseException):
                raise self._damage(chunk, f"cannot be read ({content})") from content
            elif len(content) != length:
                raise self._damage(chunk, f"gave {len(content)} bytes instead of {length}")
            else:
                target[...] = np.frombuffer(content, self.stored).reshape(target.shape)

    def _fill_absent(self, chunk: int, target: npt.NDArray[Any]) -> None:
        # Zarr may leave out chunks that equal the fill value; this package never does
        if self.complete:
            raise self._damage(chunk, "is missing")
        target[...] = self.fill_value

    def _read_zarr(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        array = _handle(self)
        if self.complete:
            self._require_chunks(start, stop)
        try:
            out[...] = np.asarray(array[start:stop]).reshape(out.shape)
        except Exception as error:  # a codec may fail with anything
            chunk, what = self._find_damage(array, start, stop, error)
            raise self._damage(chunk, f"cannot be decoded ({what})") from error

    def _read_by_chunk(self, runs: Sequence[tuple[int, int, npt.NDArray[Any]]]) -> None:
        """Read runs of rows, each (start, stop, where to); decode every chunk once, however many runs touch it."""
        pieces: dict[int, list[tuple[int, int, npt.NDArray[Any]]]] = {}
        for start, stop, out in runs:
            for chunk, first, last in self._pieces(start, stop):
                pieces.setdefault(chunk, []).append((first, last, out[first - start : last - start]))
        for wanted in pieces.values():
            begin, end = min(first for first, _, _ in wanted), max(last for _, last, _ in wanted)
            rows = np.empty((end - begin, self.n_features), self.stored)
            self._read_zarr(begin, end, rows)
            for first, last, target in wanted:
                target[...] = rows[first - begin : last - begin]

    def _require_chunks(self, start: int, stop: int) -> None:
        for chunk, _, _ in self._pieces(start, stop):
            if not paths.exists(self.chunk_file(chunk)):
                raise self._damage(chunk, "is missing")

    def _find_damage(
        self, array: zarr.Array[Any], start: int, stop: int, error: Exception
    ) -> tuple[int, Exception]:
        pieces = self._pieces(start, stop)
        for chunk, first, last in pieces:
            try:
                array[first:last]
            except Exception as own:
                return chunk, own
        return pieces[0][0], error


class LinkedReader(RowReader):
    """Rows that are byte ranges of other files; every file is compared with its record when it is opened."""

    @property
    def links(self) -> Links:
        """Return the files and ranges."""
        return links_of(self.path, self.row_bytes)

    @property
    def one_file_per_chunk(self) -> bool:
        """Return False: a chunk may be a part of a file, or of several."""
        return False

    def spans(self, start: int, stop: int) -> list[Span] | None:
        """Return where rows [start, stop) are."""
        return self.links.spans(*self._checked(start, stop))

    def describe_row(self, row: int) -> str:
        """Say where a row is, with the linked file, for an error message."""
        return f"{super().describe_row(row)} ({self.links.locate(row)})"

    def _read_files(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        if start < stop:
            with SpanReader(self.links.spans(start, stop)) as reader:
                reader.fill(0, out)

    @property
    def has_checksums(self) -> bool:
        """Return whether checksums of the rows were recorded when they were linked."""
        linked = paths.open_zarr(self.path).attrs.get(LINKED)
        return isinstance(linked, dict) and bool(linked.get("checksums"))

    def require_sound(self) -> None:
        """Refuse links that do not cover the rows, and files that have changed, by name."""
        if paths.is_remote(self.path):
            raise StoreError(f"{self.path} is linked to local files and was moved to a remote; import it there")
        if self.links.n_rows != self.n_samples:
            raise StoreError(
                f"{self.path} has {self.n_samples} rows, but links to {self.links.n_rows}; link it again"
            )
        self.links.require_unchanged()


def _handle(reader: RowReader) -> zarr.Array[Any]:
    """Return the open array of a reader; one per process."""
    key = (reader.path, reader.array, reader.fingerprint)
    with _HANDLES_LOCK:
        if key not in _HANDLES:
            node = paths.open_zarr(reader.path)
            array = paths.get_array(reader.path, node, reader.array) if isinstance(node, zarr.Group) else node
            if array is None:
                raise StoreError(f"{reader.path} no longer has the array `{reader.array}`")
            _HANDLES[key] = array
        return _HANDLES[key]


def open_rows(path: PathLike, array: str = ROWS) -> RowReader:
    """Open the rows of a store for reading.

    Parameters
    ----------
    path : path or fsspec URL
        An activation store of this package, any Zarr group that holds a 2-D array called `array`, or a bare
        2-D Zarr array; format 2 or 3.
    array : str
        Name of the array in a group.

    Returns
    -------
    RowReader

    Raises
    ------
    StoreError
        If the store does not exist, is not Zarr, is incomplete, or has no rows.
    InputError
        When the array is not 2-D or does not hold floating-point numbers.
    """
    text = paths.normalise(path)
    node = paths.open_zarr(text)
    group_attributes: dict[str, Any] = {}
    if isinstance(node, zarr.Group):
        group_attributes = dict(node.attrs)
        check_format(text, group_attributes)
        found = paths.get_array(text, node, array)
        if found is None:
            names = listed(sorted(paths.get_arrays(text, node)))
            raise StoreError(f"the Zarr group {text} has no array `{array}`; its arrays: {names}")
    else:
        found, array = node, ""
    return _describe(text, array, found, group_attributes)


def check_format(path: str, attributes: dict[str, Any]) -> None:
    """Refuse a group of this package that holds something else, is of a later version or is unfinished."""
    name = attributes.get("format")
    if not isinstance(name, str) or not name.startswith("dbksvd-"):
        return
    if name != ACTIVATIONS_FORMAT:
        raise StoreError(f"{path} holds {name}, not {ACTIVATIONS_FORMAT}; give the path of an activation store")
    version = attributes.get("format_version")
    readable = LINKED_VERSION if LINKED in attributes else ACTIVATIONS_VERSION
    if version != readable:
        raise StoreError(
            f"{path} has {ACTIVATIONS_FORMAT} version {version}; this package reads version "
            f"{readable}: install dbksvd-dask {attributes.get('package_version')}, which wrote it"
        )
    if not attributes.get("complete"):
        raise StoreError(f"{path} is not finished; run the command that was writing it again")


def open_aligned(path: PathLike, name: str) -> RowReader:
    """Open an array that has one entry per sample; `read` returns its entries flattened to rows.

    Returns
    -------
    RowReader
        Of shape (n_samples, product of `row_shape`), of the dtype of the array.
    """
    text = paths.normalise(path)
    group = paths.open_zarr(text)
    array = paths.get_array(text, group, name) if isinstance(group, zarr.Group) else None
    if array is None:
        raise StoreError(f"{text} has no aligned array `{name}`")
    return _reader(text, name, array, dict(group.attrs), np.dtype(array.dtype).newbyteorder("=").name)


def aligned_names(reader: RowReader, group: zarr.Group) -> list[str]:
    """Return the sorted names of the arrays of a group that have one entry per row of `reader`."""
    return sorted(
        name
        for name, array in paths.get_arrays(reader.path, group).items()
        if array.shape[:1] == (reader.n_samples,) and name not in (reader.array, CHECKSUMS)
    )


def _describe(path: str, name: str, array: zarr.Array[Any], attributes: dict[str, Any]) -> RowReader:
    what = f"array `{name}` of {path}" if name else path
    if array.ndim != 2:
        raise InputError(f"{what} has shape {array.shape}; need two dimensions (n_samples, n_features)")
    bfloat16 = dict(array.attrs).get("dtype") == BFLOAT16
    native = np.dtype(array.dtype).newbyteorder("=")
    if not (bfloat16 and native == np.uint16) and native not in (np.float16, np.float32, np.float64):
        raise InputError(f"{what} has dtype {native}; need float16, float32, float64 or bfloat16")
    if 0 in array.shape:
        raise StoreError(f"{what} is empty: its shape is {array.shape}")
    return _reader(path, name, array, attributes, BFLOAT16 if bfloat16 else native.name)


def _reader(path: str, name: str, array: zarr.Array[Any], attributes: dict[str, Any], dtype: str) -> RowReader:
    unit = array.shards or array.chunks
    pattern, raw = chunk_layout(array)
    linked = LINKED in attributes and name == ROWS
    reader = (LinkedReader if linked else RowReader)(
        path=path,
        array=name,
        n_samples=array.shape[0],
        n_features=math.prod(array.shape[1:]),
        dtype=delivered_dtype(dtype),
        chunk_rows=int(unit[0]),
        fingerprint=_digest(array, attributes),
        stored=stored_dtype(dtype),
        bfloat16=dtype == BFLOAT16,
        complete=attributes.get("format") == ACTIVATIONS_FORMAT,
        key_pattern=f"{name}/{pattern}" if name else pattern,
        raw=raw,
        fill_value=0 if array.fill_value is None else array.fill_value,
        row_shape=tuple(array.shape[1:]),
        attributes=dict(array.attrs),
    )
    if isinstance(reader, LinkedReader):
        reader.require_sound()
    return reader


def chunk_layout(array: zarr.Array[Any]) -> tuple[str, bool]:
    """Return the pattern of the chunk keys and whether a chunk is just its rows as native bytes."""
    metadata = array.metadata
    pattern = metadata.encode_chunk_key((987654321,) + (0,) * (array.ndim - 1)).replace("987654321", "{}")
    unit = array.shards or array.chunks
    plain = array.shards is None and not array.compressors and not array.filters
    native = np.dtype(array.dtype).isnative and array.order == "C"
    if metadata.zarr_format == 3:
        codecs = [codec.to_dict() for codec in metadata.codecs]
        plain_bytes = [{"name": "bytes", "configuration": {"endian": "little"}}]
        one_byte = array.dtype.itemsize == 1 and codecs == [{"name": "bytes"}]
        native = native and (codecs == plain_bytes or one_byte)
    return pattern, bool(plain and native and unit[1:] == array.shape[1:])


def _digest(array: zarr.Array[Any], attributes: dict[str, Any]) -> str:
    described = {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "chunks": [list(array.chunks), list(array.shards or ())],
        "array": dict(array.attrs),
        "content": attributes.get("content_id", attributes),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]


def fingerprint(path: PathLike, array: str = ROWS) -> str:
    """Return a short text that identifies this store, computed from its metadata alone.

    Covers shape, dtype, chunk grid and attributes. For a store of this package, the digest of the checksums of all
    chunks replaces the attributes, so a copy or a second import of the same data has the same fingerprint.
    """
    return open_rows(path, array).fingerprint
