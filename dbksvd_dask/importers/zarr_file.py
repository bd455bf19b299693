"""Zarr arrays and groups of any chunking, format 2 or 3, local or at a URL: rewritten as an activation store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dbksvd_dask.base.late import late
from dbksvd_dask.errors import StoreError, brief
from dbksvd_dask.importers.base import Array, ArrayInfo, Hints, SourceFile, numeric_name, readable
from dbksvd_dask.importers.identity import fold, of_folder, of_remote
from dbksvd_dask.store import paths
from dbksvd_dask.store.checksums import CHECKSUMS
from dbksvd_dask.store.dtypes import BFLOAT16
from dbksvd_dask.store.reader import (
    ACTIVATIONS_FORMAT,
    RowReader,
    check_format,
    open_aligned,
    open_rows,
)
from dbksvd_dask.store.spans import Span

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")


class ZarrFile(SourceFile):
    """A Zarr store; its arrays are those of the group, by name."""

    def __init__(self, path: str) -> None:
        self.path = path
        node = paths.open_zarr(path)
        found = {"": node} if isinstance(node, zarr.Array) else paths.get_arrays(path, node)
        self._own = isinstance(node, zarr.Group) and node.attrs.get("format") == ACTIVATIONS_FORMAT
        check_format(path, dict(node.attrs))
        self._arrays = {name: array for name, array in found.items() if array.ndim and name != CHECKSUMS}
        self.arrays = {}
        for name, array in self._arrays.items():
            dtype = np.dtype(array.dtype)
            if dtype.kind in "biufV":
                marked = array.attrs.get("dtype") == "bfloat16"
                self.arrays[name] = ArrayInfo(tuple(array.shape), BFLOAT16 if marked else numeric_name(dtype))
        self._readers: dict[str, RowReader] = {}

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        if self._own:  # through the reader, which detects a missing chunk
            reader = self._reader(name)
            return reader.read_stored(start, stop).reshape(-1, *reader.row_shape)
        try:
            block = np.asarray(self._arrays[name][start:stop])
        except Exception as error:  # a codec may fail with anything
            what = f"entries {start} to {stop} of `{name}` in {self.path}"
            raise StoreError(f"{what} cannot be read: {brief(error)}") from error
        block = block.view(readable(block.dtype))
        return block.astype(block.dtype.newbyteorder("="), copy=False)

    def spans(self, name: str, start: int, stop: int) -> list[Span] | None:
        """Return where rows [start, stop) of a 2-D array of uncompressed whole-row chunks are."""
        array = self._arrays[name]
        if array.ndim != 2 or paths.is_remote(self.path) or not np.dtype(array.dtype).isnative:
            return None
        return self._reader(name).spans(start, stop)

    def identity(self) -> tuple[int, int]:
        """Return what identifies the content of this store: the fingerprint of one of ours, else all its files."""
        if self._own:
            return 0, fold(self._reader("activations").fingerprint)
        return of_remote(self.path) if paths.is_remote(self.path) else of_folder(self.path)

    def _reader(self, name: str) -> RowReader:
        if name not in self._readers:
            rows = name == "activations" or not self._own
            opened = open_rows(self.path, name) if rows else open_aligned(self.path, name)
            self._readers[name] = opened
        return self._readers[name]


def open_zarr_file(path: str, hints: Hints) -> SourceFile:
    """Open a Zarr store as a source."""
    return ZarrFile(path)
