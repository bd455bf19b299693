"""Arrow (IPC streams and files) and Parquet: numbers, lists of numbers, and lists of lists as columns.

Hugging Face datasets keep an `Array2D` column as lists of lists under an extension type; without that library it
reads as its storage, which is all that is needed here.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Array, ArrayInfo, Cursor, Hints, SourceFile, forget_pages

# decoded at once from Parquet; Arrow needs several times as much while it does
BLOCK_BYTES = 1 << 20


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(f"reading {path} needs pyarrow: pip install 'dbksvd-dask[importers]'") from error
    return pyarrow


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


class _ArrowSource(SourceFile):
    """What IPC and Parquet share: arrays from the types of the columns and the first entry."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.arrays = {}
        self._pa = _pyarrow(path)

    def _describe(self, schema: Any, n_items: int) -> None:
        for field in schema:
            if _leaf(self._pa, field.type) is None or n_items == 0:
                continue
            try:
                first = self._first(field.name)
            except InputError:
                continue  # a ragged or empty column cannot be imported, but need not be in the way
            self.arrays[field.name] = ArrayInfo((n_items, *first.shape[1:]), first.dtype.name)

    def _first(self, name: str) -> Array:
        raise NotImplementedError

    def _convert(self, name: str, column: Any) -> Array:
        label = f"column {name} of {self.path}"
        block = to_numpy(self._pa, column, label)
        info = self.arrays.get(name)
        if info is not None and len(block) and block.shape[1:] != info.shape[1:]:
            raise InputError(
                f"{label} changes its shape: {info.shape[1:]} in the first entry, {block.shape[1:]} later; "
                "need equally long lists"
            )
        return block


class IpcFile(_ArrowSource):
    """An Arrow IPC stream (what datasets writes) or file (Feather)."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        ipc = self._pa.ipc
        with open(path, "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise StoreError(f"{path} is empty: 0 bytes") from error
        try:
            buffer = self._pa.py_buffer(self._map)
            if self._map[:6] == b"ARROW1":
                reader = ipc.open_file(buffer)
                self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            else:
                reader = ipc.open_stream(buffer)
                self._batches = list(reader)
        except (self._pa.ArrowInvalid, OSError) as error:
            raise StoreError(f"{path} is not a readable Arrow file, or truncated: {error}") from error
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])
        self._describe(reader.schema, int(self._ends[-1]) if len(self._ends) else 0)

    def _first(self, name: str) -> Array:
        batch = next(b for b in self._batches if b.num_rows)
        return self._convert(name, batch.column(name).slice(0, 1))

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        parts = []
        for i in range(int(np.searchsorted(self._ends, start, "right")), len(self._batches)):
            first = int(self._ends[i]) - self._batches[i].num_rows
            if first >= stop:
                break
            low = max(0, start - first)
            column = self._batches[i].column(name).slice(low, stop - first - low)
            parts.append(self._convert(name, column))
        out = np.concatenate(parts)
        forget_pages(self._map)
        return out

    def close(self) -> None:
        """Let go of the batches; the map closes with the last of them."""
        self._batches = []


class ParquetFile(_ArrowSource):
    """A Parquet file, decoded a few megabytes at a time."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        from pyarrow import parquet

        try:
            # by default all of a row group is read at once, and that may be the whole file
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES)
        except (self._pa.ArrowInvalid, OSError) as error:
            raise StoreError(f"{path} is not a readable Parquet file, or truncated: {error}") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._cursors: dict[str, Cursor] = {}
        self._describe(self._file.schema_arrow, metadata.num_rows)

    def _first(self, name: str) -> Array:
        batch = next(self._file.iter_batches(batch_size=1, columns=[name]))
        return self._convert(name, batch.column(0))

    def _blocks(self, name: str, entry: int) -> Iterator[tuple[int, Array]]:
        info = self.arrays[name]
        item = int(np.prod(info.shape[1:], dtype=np.int64)) * np.dtype(info.dtype).itemsize
        step = max(1, BLOCK_BYTES // item)
        group = int(np.searchsorted(self._starts, entry, "right")) - 1
        groups = list(range(group, len(self._starts) - 1))
        first = int(self._starts[group])
        try:
            for batch in self._file.iter_batches(batch_size=step, row_groups=groups, columns=[name]):
                block = self._convert(name, batch.column(0))
                if len(block):
                    yield first, block
                first += len(block)
        except (self._pa.ArrowInvalid, OSError) as error:
            if isinstance(error, StoreError | InputError):
                raise
            raise StoreError(f"{self.path} cannot be read after entry {first}: {error}") from error

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        if name not in self._cursors:
            self._cursors[name] = Cursor(lambda entry: self._blocks(name, entry))
        return self._cursors[name].read(start, stop)

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
