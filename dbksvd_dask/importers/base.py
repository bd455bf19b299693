"""The interface of every source file: named arrays, and their rows in any order, a bounded number at a time."""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError
from dbksvd_dask.importers import identity
from dbksvd_dask.store import paths
from dbksvd_dask.store.dtypes import BFLOAT16, ROW_DTYPES
from dbksvd_dask.store.spans import Span, fill_from

Array = npt.NDArray[Any]
# two bytes that NumPy cannot name: how it saves bfloat16
NAMELESS = "void16"


@dataclass(frozen=True)
class Hints:
    """What the user states about files that do not describe themselves.

    Attributes
    ----------
    dtype : str, optional
        Of raw files; also "bfloat16" for two-byte numbers that NumPy cannot name.
    n_features : int, optional
        Width of the rows of a raw file.
    layer : int, optional
        Which layer of arrays of shape (example, layer, token, feature).
    """

    dtype: str | None = None
    n_features: int | None = None
    layer: int | None = None


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype of one array of a file.

    The dtype is a NumPy name, "bfloat16", `NAMELESS`, or what cannot be imported ("object", "structured").
    `layers` are the numbers of the layers along the second of four axes, where the file says them.
    """

    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] = ()

    @property
    def is_rows(self) -> bool:
        """Return whether this can be activations: 2-D or 3-D floating-point numbers, of one feature or more."""
        return self._has_rows and self.dtype in ROW_DTYPES

    @property
    def may_be_rows(self) -> bool:
        """Return whether this can be activations once the user has stated what its numbers are."""
        return self._has_rows and self.dtype in (*ROW_DTYPES, NAMELESS)

    @property
    def has_layers(self) -> bool:
        """Return whether this is (example, layer, token, feature); see `importers.layers`."""
        return len(self.shape) == 4 and self.shape[-1] > 0 and self.dtype in (*ROW_DTYPES, NAMELESS)

    @property
    def is_mask(self) -> bool:
        """Return whether this holds booleans or integers."""
        return self.dtype.startswith(("bool", "int", "uint"))

    @property
    def is_numbers(self) -> bool:
        """Return whether this holds plain numbers."""
        return self.is_mask or self.dtype.startswith("float") or self.dtype == BFLOAT16

    @property
    def _has_rows(self) -> bool:
        return len(self.shape) in (2, 3) and self.shape[-1] > 0


class SourceFile(ABC):
    """One file, or one folder treated as one, with named arrays.

    Attributes
    ----------
    path : str
        Where it is.
    arrays : dict of str to ArrayInfo
        Its arrays; the key is "" when the format has no names.
    """

    path: str
    arrays: dict[str, ArrayInfo]

    @property
    def outside(self) -> dict[str, str]:
        """Arrays whose values are in other files, which are not read, each with the name of that file."""
        return {}

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns that hold a text per entry."""
        return ()

    def read_texts(self, name: str, step: int) -> Iterator[list[str]]:
        """Yield the texts of a column, about `step` at a time."""
        raise NotImplementedError

    @abstractmethod
    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis, in native byte order.

        Deliver bfloat16 and `NAMELESS` as uint16 bits.
        """

    def read_rows(self, name: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Read rows [start, stop) of an array whose leading axes are flattened to leave the last one.

        Parameters
        ----------
        name : str
            An array of shape (rows, n_features) or (sequences, tokens, n_features).
        start, stop : int
            Range of rows after flattening.
        out : ndarray of shape (stop - start, n_features), optional
            Filled with them.
        """
        shape = self.arrays[name].shape
        per_item = math.prod(shape[1:-1])
        first, last = start // per_item, -(-stop // per_item)
        rows = self.read_items(name, first, last).reshape(-1, shape[-1])
        rows = rows[start - first * per_item : stop - first * per_item]
        if out is None:
            return rows
        out[...] = rows
        return out

    def spans(self, name: str, start: int, stop: int) -> list[Span] | None:
        """Return where flattened rows [start, stop) are as plain bytes; None if they have to be decoded."""
        return None

    def identity(self) -> tuple[int, int]:
        """Return two numbers that change when the content does: the size, and the time of change or a tag."""
        if paths.is_remote(self.path):
            return identity.of_remote(self.path)
        status = os.stat(self.path)
        return status.st_size, status.st_mtime_ns

    def close(self) -> None:  # noqa: B027 - most formats hold nothing open
        """Release open files."""


class Region:
    """An array that is plain bytes of a file, in C order, read by position.

    Not a memory map: mapped pages count as memory of the process, which is promised to be bounded. A file on a
    remote is read in ranges.
    """

    def __init__(self, path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.path, self.offset, self.shape, self.dtype = path, offset, shape, dtype
        self.row_bytes = (shape[-1] if len(shape) > 1 else 1) * dtype.itemsize
        require_bytes(path, offset, shape, dtype)
        self._file: Any = None

    def read(self, start: int, stop: int, row_shape: tuple[int, ...], out: Array | None = None) -> Array:
        """Read rows [start, stop) of `row_shape` each."""
        if out is None or self.dtype != out.dtype or not out.flags.c_contiguous:
            target = np.empty((stop - start, *row_shape), self.dtype)
        else:
            target = out
        self._fill(self.offset + start * math.prod(row_shape) * self.dtype.itemsize, target)
        if not self.dtype.isnative:
            target = target.astype(self.dtype.newbyteorder("="))
        if out is None or target is out:
            return target
        out[...] = target
        return out

    def _fill(self, offset: int, target: Array) -> None:
        if paths.is_remote(self.path):
            content = paths.read_range(self.path, offset, offset + target.nbytes)
            if len(content) != target.nbytes:
                raise StoreError(f"{self.path} is truncated: it ended at byte {offset + len(content)}")
            target[...] = np.frombuffer(content, target.dtype).reshape(target.shape)
            return
        if self._file is None:
            self._file = open(self.path, "rb", buffering=0)
        fill_from(self._file.fileno(), offset, target, self.path)

    def spans(self, start: int, stop: int) -> list[Span] | None:
        """Return where rows [start, stop) are; None if their byte order is not native, or on a remote."""
        if not self.dtype.isnative or paths.is_remote(self.path):
            return None
        return [Span(self.path, self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)]

    def close(self) -> None:
        """Close the file; it opens again when needed."""
        if self._file is not None:
            self._file.close()
            self._file = None


def require_bytes(path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse a file that is shorter than its header says."""
    needed, size = offset + math.prod(shape) * dtype.itemsize, paths.size_of(path)
    if size < needed:
        raise StoreError(f"{path} is truncated: it has {size} bytes, its header promises {needed}")


def forget_pages(mapped: mmap.mmap) -> None:
    """Release the pages of a map that were read: until then they count as memory of this process."""
    if hasattr(mapped, "madvise"):  # the file cache keeps them anyway
        mapped.madvise(mmap.MADV_DONTNEED)


class RegionFile(SourceFile):
    """A file whose arrays are all plain regions."""

    def __init__(self, path: str, regions: dict[str, tuple[Region, str]]) -> None:
        self.path = path
        self._regions = {name: region for name, (region, _) in regions.items()}
        self.arrays = {name: ArrayInfo(region.shape, dtype) for name, (region, dtype) in regions.items()}

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        region = self._regions[name]
        return region.read(start, stop, region.shape[1:])

    def read_rows(self, name: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Read flattened rows [start, stop); any range starts at a known byte."""
        region = self._regions[name]
        return region.read(start, stop, region.shape[-1:], out)

    def spans(self, name: str, start: int, stop: int) -> list[Span] | None:
        """Return where flattened rows [start, stop) are."""
        return self._regions[name].spans(start, stop)

    def close(self) -> None:
        """Close the regions."""
        for region in self._regions.values():
            region.close()


class Cursor:
    """Reads entries forward from a source that comes in blocks; keeps the current block.

    Parameters
    ----------
    open_at : callable
        Called with an entry; returns an iterator of (first entry, block) that starts at or before it.
    seekable : bool
        Whether `open_at` starts near an entry without reading what precedes it.
    """

    def __init__(self, open_at: Callable[[int], Iterator[tuple[int, Array]]], seekable: bool = True) -> None:
        self._open_at, self._seekable = open_at, seekable
        self._blocks: Iterator[tuple[int, Array]] | None = None
        self._first, self._block = 0, np.empty(0)

    def read(self, start: int, stop: int) -> Array:
        """Read entries [start, stop)."""
        parts = []
        while True:
            self._go_to(start)
            part = self._block[start - self._first : stop - self._first]
            parts.append(part)
            start += len(part)
            if start >= stop:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Stop reading."""
        if isinstance(self._blocks, Generator):
            self._blocks.close()
        self._blocks, self._first, self._block = None, 0, np.empty(0)

    def _go_to(self, entry: int) -> None:
        end = self._first + len(self._block)
        if self._blocks is None or entry < self._first or (self._seekable and entry > end):
            self.close()
            self._blocks = self._open_at(entry)
            self._first, self._block = next(self._blocks)
        while entry >= self._first + len(self._block):
            self._first, self._block = next(self._blocks)


def numeric_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in an `ArrayInfo`, whatever its byte order."""
    if dtype.names is not None or dtype.subdtype is not None:
        return "structured"
    return dtype.newbyteorder("=").name


def readable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype as which numbers are read: itself, or the bits of what has no name."""
    return np.dtype(np.uint16) if numeric_name(dtype) == NAMELESS else dtype


def plain_name(dtype: str) -> str:
    """Return what a user calls a dtype (torch.float16, f2, <f2) as the name of an `ArrayInfo`.

    >>> plain_name("torch.bfloat16"), plain_name(">f4"), plain_name("nonsense")
    ('bfloat16', 'float32', 'nonsense')
    """
    name = dtype.removeprefix("torch.")
    try:
        return numeric_name(np.dtype(name))
    except (TypeError, ValueError, SyntaxError):
        return name
