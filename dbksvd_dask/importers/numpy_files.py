"""`.npy` and `.npz` files; nothing is unpickled."""

from __future__ import annotations

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError, brief
from dbksvd_dask.importers.base import (
    Array,
    ArrayInfo,
    Cursor,
    Hints,
    Region,
    RegionFile,
    SourceFile,
    forget_pages,
    numeric_name,
    readable,
    require_bytes,
)
from dbksvd_dask.store import paths
from dbksvd_dask.store.spans import Span

# what an archive raises when it is damaged, encrypted or of a kind that Python cannot unpack
_UNPACKING = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, EOFError)
# one read of a compressed member; large enough to be fast, small compared to a chunk
BLOCK_BYTES = 1 << 22


def read_header(file: IO[bytes], path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy stream: shape, Fortran order, dtype."""
    try:
        version = np.lib.format.read_magic(file)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
            (3, 0): np.lib.format.read_array_header_2_0,  # differs only in the encoding of field names
        }
        shape, fortran, dtype = readers[version](file)
        if any(n < 0 for n in shape):
            raise ValueError(f"its shape is {shape}")
    except (*_UNPACKING, ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError) as error:
        size = f", {os.path.getsize(path)} bytes" if os.path.exists(path) else ""
        raise StoreError(f"{path} is not a readable .npy file{size}: {brief(error)}") from error
    return shape, fortran, dtype


class FortranFile(SourceFile):
    """A .npy file in column order: its rows are scattered, so it is mapped."""

    def __init__(self, path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        require_bytes(path, offset, shape, dtype)
        self.path, self._offset, self._dtype = path, offset, readable(dtype)
        self.arrays = {"": ArrayInfo(shape, numeric_name(dtype))}
        self._map: Any = None

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        if self._map is None:
            shape = self.arrays[name].shape
            self._map = np.memmap(self.path, self._dtype, "r", self._offset, shape, "F")
        rows: Array = np.array(self._map[start:stop], order="C")
        forget_pages(self._map._mmap)
        return rows.astype(rows.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        """Release the map; it is recreated when needed."""
        self._map = None


def open_npy(path: str, hints: Hints) -> SourceFile:
    """Open a .npy file."""
    with paths.open_binary(path) as file:
        shape, fortran, dtype = read_header(file, path)
        offset = file.tell()
    if not _is_plain(dtype):
        raise InputError(f"{path} holds dtype {dtype}; need an array of plain numbers")
    if fortran and len(shape) > 1:
        if paths.is_remote(path):
            raise InputError(
                f"{path} is in column order, which is not read from a URL; download it, or save its rows"
            )
        return FortranFile(path, offset, shape, dtype)
    return RegionFile(path, {"": (Region(path, offset, shape, readable(dtype)), numeric_name(dtype))})


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return not dtype.hasobject and dtype.names is None


class NpzFile(SourceFile):
    """A .npz file: stored members are read by position, compressed ones forward."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.arrays = {}
        self._regions: dict[str, Region] = {}
        self._cursors: dict[str, Cursor] = {}
        try:
            self._zip = zipfile.ZipFile(path)
        except _UNPACKING as error:
            raise StoreError(f"{path} is not a readable .npz file: {brief(error)}") from error
        for member in self._zip.infolist():
            if member.filename.endswith(".npy"):
                self._add(member)

    def _add(self, member: zipfile.ZipInfo) -> None:
        name = member.filename.removesuffix(".npy")
        label = f"{self.path}:{name}"
        try:
            with self._zip.open(member) as stream:
                shape, fortran, dtype = read_header(stream, label)
                header = stream.tell()
        except _UNPACKING as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{label} cannot be read: {brief(error)}") from error
        self.arrays[name] = ArrayInfo(shape, numeric_name(dtype))
        bits = readable(dtype)
        if not _is_plain(dtype):
            return  # listed, but never read
        if fortran and len(shape) > 1:
            self._cursors[name] = Cursor(lambda _: self._fortran_block(member, bits))
        elif member.compress_type == zipfile.ZIP_STORED:
            self._regions[name] = Region(self.path, self._data_offset(member) + header, shape, bits)
        else:
            self._cursors[name] = Cursor(lambda _: self._blocks(member, shape, bits), seekable=False)

    def _data_offset(self, member: zipfile.ZipInfo) -> int:
        # the length of the local header may differ from that in the directory: zip format, section 4.3.7
        with open(self.path, "rb") as file:
            file.seek(member.header_offset)
            n_name, n_extra = struct.unpack("<26xHH", file.read(30))
        return member.header_offset + 30 + int(n_name) + int(n_extra)

    def _blocks(
        self, member: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Iterator[tuple[int, Array]]:
        label = f"{self.path}:{member.filename}"
        item = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, item))
        with self._zip.open(member) as stream:
            read_header(stream, label)
            for first in range(0, shape[0], step):
                n = min(step, shape[0] - first)
                try:
                    content = stream.read(n * item)
                except _UNPACKING as error:
                    raise StoreError(f"{label} cannot be read: {brief(error)}") from error
                if len(content) != n * item:
                    raise StoreError(f"{label} is truncated: it ends in row {first + len(content) // item}")
                block = np.frombuffer(content, dtype).reshape(n, *shape[1:])
                yield first, block.astype(dtype.newbyteorder("="), copy=False)

    def _fortran_block(self, member: zipfile.ZipInfo, dtype: np.dtype[Any]) -> Iterator[tuple[int, Array]]:
        try:
            with self._zip.open(member) as stream:
                whole = np.lib.format.read_array(stream, allow_pickle=False)
        except (*_UNPACKING, ValueError) as error:
            raise StoreError(f"{self.path}:{member.filename} cannot be read: {brief(error)}") from error
        block = np.ascontiguousarray(whole).view(dtype)
        yield 0, block.astype(dtype.newbyteorder("="), copy=False)

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        if name in self._regions:
            region = self._regions[name]
            return region.read(start, stop, region.shape[1:])
        return self._cursors[name].read(start, stop)

    def read_rows(self, name: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Read flattened rows [start, stop)."""
        if name in self._regions:
            region = self._regions[name]
            return region.read(start, stop, region.shape[-1:], out)
        return super().read_rows(name, start, stop, out)

    def spans(self, name: str, start: int, stop: int) -> list[Span] | None:
        """Return where flattened rows [start, stop) are; None in a compressed member."""
        return self._regions[name].spans(start, stop) if name in self._regions else None

    def close(self) -> None:
        """Close the archive."""
        for region in self._regions.values():
            region.close()
        for cursor in self._cursors.values():
            cursor.close()
        self._zip.close()


def open_npz(path: str, hints: Hints) -> SourceFile:
    """Open a .npz file."""
    return NpzFile(path)
