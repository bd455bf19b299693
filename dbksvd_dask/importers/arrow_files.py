"""Arrow (IPC streams and files) and Parquet: numbers, lists of numbers, and lists of lists as columns.

A table with a column per feature has one array, `COLUMNS`, of all its columns of floating-point numbers.

Hugging Face datasets keep an `Array2D` column as lists of lists under an extension type; without that library it
reads as its storage, which is all that is needed here.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError, brief
from dbksvd_dask.importers.base import Array, ArrayInfo, Cursor, Hints, SourceFile, forget_pages

# decoded at once from Parquet; Arrow needs several times as much meanwhile
BLOCK_BYTES = 1 << 20
# Name of the array that columns of single numbers make together, where no column holds lists.
COLUMNS = "columns"


def pyarrow_for(path: str) -> Any:
    """Import pyarrow, or say what to install to read this file."""
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(f"reading {path} needs pyarrow: pip install 'dbksvd-dask[importers]'") from error
    return pyarrow


def damage_of(pa: Any) -> tuple[type[Exception], ...]:
    """Return what Arrow raises over files that are damaged."""
    return pa.ArrowException, OSError, UnicodeDecodeError


def parquet_reader(pa: Any, path: str) -> Any:
    """Open a Parquet file to be read little by little, with checksums of pages compared where it has them."""
    from pyarrow import parquet

    try:
        # by default all of a row group is read at once, and that may be the whole file
        return parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True
        )
    except damage_of(pa) as error:
        raise StoreError(f"{path} is not a readable Parquet file, or truncated: {brief(error)}") from error


def _storage(pa: Any, array: Any) -> Any:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _is_list(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _leaf(pa: Any, kind: Any) -> Any:
    """Return the innermost type of nested lists, or None when it is not plain numbers."""
    while isinstance(kind, pa.BaseExtensionType) or _is_list(pa, kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return kind if numbers else None


def to_numpy(pa: Any, column: Any, label: str) -> Array:
    """Turn an Arrow array of equally long (nested) lists into an array; no copy where Arrow allows it."""
    shape = [len(column)]
    tail = tuple(column.type.shape) if isinstance(column.type, pa.FixedShapeTensorType) else None
    column = _storage(pa, column)
    while _is_list(pa, column.type):
        if column.null_count:
            raise InputError(f"{label} has {column.null_count} empty (null) entries; need a list in each row")
        shape.append(_list_length(pa, column, label))
        column = _storage(pa, column.flatten())
    if column.null_count:
        raise InputError(f"{label} has {column.null_count} empty (null) values; need a number in each place")
    numbers: Array = column.to_numpy(zero_copy_only=False)
    return numbers.reshape(shape[0], *tail) if tail else numbers.reshape(shape)


def _list_length(pa: Any, column: Any, label: str) -> int:
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    lengths = np.diff(column.offsets.to_numpy(zero_copy_only=False))
    if len(lengths) == 0:
        return 0
    odd = np.flatnonzero(lengths != lengths[0])
    if len(odd):
        raise InputError(
            f"{label} has lists of different lengths: {lengths[0]} in its first entry, {lengths[odd[0]]} in "
            f"entry {odd[0]}; need equally long ones, with one row per token"
        )
    return int(lengths[0])


def _strings(column: Any) -> list[str]:
    """Return the texts of a column; none for an empty (null) entry."""
    return [text or "" for text in column.to_pylist()]


class _ArrowSource(SourceFile):
    """Common base of IPC and Parquet: arrays from the types of the columns and the first entry."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.arrays = {}
        self._pa = pyarrow_for(path)
        self._damage = damage_of(self._pa)
        self._wide: list[str] = []
        self._texts: tuple[str, ...] = ()

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns of strings."""
        return self._texts

    def _describe(self, schema: Any, n_items: int) -> None:
        kinds = self._pa.types
        self._texts = tuple(f.name for f in schema if kinds.is_string(f.type) or kinds.is_large_string(f.type))
        for field in schema:
            if _leaf(self._pa, field.type) is None or n_items == 0:
                continue
            try:
                first = self._first(field.name)
            except InputError:
                continue  # a ragged or empty column cannot be imported, but does not block the others
            self.arrays[field.name] = ArrayInfo((n_items, *first.shape[1:]), first.dtype.name)
        self._describe_columns(n_items)

    def _describe_columns(self, n_items: int) -> None:
        """Add an array of all columns of single floating-point numbers, if the table has no other activations."""
        numbers = [name for name, i in self.arrays.items() if len(i.shape) == 1 and i.dtype.startswith("float")]
        if len(numbers) < 2 or COLUMNS in self.arrays or any(i.may_be_rows for i in self.arrays.values()):
            return
        self._wide = numbers
        dtype = np.result_type(*(self.arrays[name].dtype for name in numbers))
        self.arrays[COLUMNS] = ArrayInfo((n_items, len(numbers)), dtype.name)

    def _names(self, name: str) -> list[str]:
        """Return the columns that an array is made of."""
        return self._wide if self._wide and name == COLUMNS else [name]

    def _first(self, name: str) -> Array:
        raise NotImplementedError

    def _convert(self, name: str, column: Any) -> Array:
        """Turn a column into an array; of the array `COLUMNS`, a batch of columns."""
        if self._wide and name == COLUMNS:
            parts = [self._convert(inner, column.column(i)) for i, inner in enumerate(self._wide)]
            return np.stack(parts, axis=1)
        label = f"column {name} of {self.path}"
        block = to_numpy(self._pa, column, label)
        info = self.arrays.get(name)
        if info is not None and len(block) and block.shape[1:] != info.shape[1:]:
            raise InputError(
                f"{label} changes its shape: {info.shape[1:]} in the first entry, {block.shape[1:]} later; "
                "need equally long lists"
            )
        return block


@dataclass
class _Place:
    """The position in a column: its current batch, and no other."""

    reader: Any
    whole: bool  # several columns: the batch itself
    batch: int = -1
    column: Any = None


class IpcFile(_ArrowSource):
    """An Arrow IPC stream (what datasets writes) or file (Feather); batches are decoded when they are needed."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open(path, "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise StoreError(f"{path} is empty: 0 bytes") from error
        self._is_file = self._map[:6] == b"ARROW1"
        self._places: dict[str, _Place] = {}
        try:
            reader = self._open()
            self._schema = reader.schema
            counts = self._count_rows(reader.num_record_batches if self._is_file else None)
            self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
            self._describe(self._schema, int(self._starts[-1]))
        except self._damage as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} is not a readable Arrow file, or truncated: {brief(error)}") from error
        self.close()

    def _open(self, columns: Sequence[int] = ()) -> Any:
        ipc = self._pa.ipc
        options = ipc.IpcReadOptions(included_fields=list(columns))
        opened = ipc.open_file if self._is_file else ipc.open_stream
        return opened(self._pa.py_buffer(self._map), options=options)

    def _count_rows(self, n_batches: int | None) -> list[int]:
        """Return the rows of each batch from the metadata alone; a stream must end properly.

        A file is a stream between its marks, so both are read in the same way.
        """
        ipc, source = self._pa.ipc, self._pa.BufferReader(self._pa.py_buffer(self._map))
        source.seek(8 if self._is_file else 0)
        nothing = self._pa.schema([])
        counts: list[int] = []
        while len(counts) != n_batches:
            place = source.tell()
            try:
                message = ipc.read_message(source)
            except EOFError:
                # also raised at the end of the data: only if there is an end mark has it been read
                if n_batches is None and source.tell() > place:
                    break
                raise StoreError(
                    f"{self.path} has no end mark after {sum(counts)} readable rows: its writer did not "
                    "finish; write it again, and close the writer"
                ) from None
            if message.type == "record batch":
                counts.append(ipc.read_record_batch(message, nothing).num_rows)  # no column: nothing is decoded
        if any(n < 0 for n in counts):
            raise StoreError(f"{self.path} is damaged: it has a batch of {min(counts)} rows")
        return counts

    def _column(self, name: str, batch: int) -> Any:
        place = self._places.get(name)
        if place is None or batch < place.batch:  # a stream goes forward only
            fields = [self._schema.get_field_index(column) for column in self._names(name)]
            place = self._places[name] = _Place(self._open(fields), whole=len(fields) > 1)
        if batch != place.batch:
            place.column = None  # first, or two would be in memory
            try:
                place.column = self._next(place, batch)
                place.column.validate()  # Arrow does not check offsets and crashes where they are wrong
            except self._damage as error:
                first = int(self._starts[batch])
                raise StoreError(
                    f"{self.path} cannot be read after entry {first} of {name}: {brief(error)}"
                ) from error
            place.batch = batch
        return place.column

    def _next(self, place: _Place, batch: int) -> Any:
        if self._is_file:
            found = place.reader.get_batch(batch)
        else:
            for _ in range(batch - place.batch - 1):
                place.reader.read_next_batch()
            found = place.reader.read_next_batch()
        return found if place.whole else found.column(0)

    def _first(self, name: str) -> Array:
        batch = int(np.flatnonzero(np.diff(self._starts))[0])
        return self._convert(name, self._column(name, batch).slice(0, 1))

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        parts = []
        batch = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            first, last = int(self._starts[batch]), min(stop, int(self._starts[batch + 1]))
            if last > start:
                parts.append(self._convert(name, self._column(name, batch).slice(start - first, last - start)))
            start, batch = last, batch + 1
        out = np.concatenate(parts)
        forget_pages(self._map)
        return out

    def read_texts(self, name: str, step: int) -> Iterator[list[str]]:
        """Yield the texts of a column, batch by batch."""
        for batch in range(len(self._starts) - 1):
            yield _strings(self._column(name, batch))

    def close(self) -> None:
        """Release the batches; the map closes with the last of them."""
        self._places = {}


class ParquetFile(_ArrowSource):
    """A Parquet file, decoded a few megabytes at a time; checksums of pages are compared where it has them."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file = parquet_reader(self._pa, path)
        metadata = self._file.metadata
        sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        if sum(sizes) != metadata.num_rows or any(n < 0 for n in sizes):
            raise StoreError(
                f"{path} is damaged: its header promises {metadata.num_rows} rows, its groups hold {sum(sizes)}"
            )
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._cursors: dict[str, Cursor] = {}
        self._describe(self._file.schema_arrow, metadata.num_rows)

    def _first(self, name: str) -> Array:
        return self._convert(name, next(self._columns(name, 0, 1)))

    def _columns(self, name: str, group: int, step: int) -> Iterator[Any]:
        groups = list(range(group, len(self._starts) - 1))
        entry = int(self._starts[group])
        try:
            names = self._names(name)
            for batch in self._file.iter_batches(batch_size=step, row_groups=groups, columns=names):
                yield batch.select(names) if len(names) > 1 else batch.column(0)
                entry += batch.num_rows
        except self._damage as error:
            raise StoreError(
                f"{self.path} cannot be read after entry {entry} of {name}: {brief(error)}"
            ) from error

    def _blocks(self, name: str, entry: int) -> Iterator[tuple[int, Array]]:
        info = self.arrays[name]
        item = int(np.prod(info.shape[1:], dtype=np.int64)) * np.dtype(info.dtype).itemsize
        group = int(np.searchsorted(self._starts, entry, "right")) - 1
        first = int(self._starts[group])
        for column in self._columns(name, group, max(1, BLOCK_BYTES // max(1, item))):
            block = self._convert(name, column)
            if len(block):
                yield first, block
            first += len(block)
        # no caller reads beyond the stated length
        raise StoreError(f"{self.path} is damaged: it ends after entry {first} of {name}, not {info.shape[0]}")

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        if name not in self._cursors:
            self._cursors[name] = Cursor(lambda entry: self._blocks(name, entry))
        return self._cursors[name].read(start, stop)

    def read_texts(self, name: str, step: int) -> Iterator[list[str]]:
        """Yield the texts of a column."""
        for column in self._columns(name, 0, step):
            yield _strings(column)

    def close(self) -> None:
        """Close the file."""
        for cursor in self._cursors.values():
            cursor.close()
        self._file.close()


def open_ipc(path: str, hints: Hints) -> SourceFile:
    """Open an Arrow IPC stream or file."""
    return IpcFile(path)


def open_parquet(path: str, hints: Hints) -> SourceFile:
    """Open a Parquet file."""
    return ParquetFile(path)
