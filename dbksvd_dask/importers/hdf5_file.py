"""HDF5 files, through h5py."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError, brief
from dbksvd_dask.importers.base import Array, ArrayInfo, Hints, SourceFile, numeric_name, readable

# what h5py raises when the file contradicts itself
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError)


class Hdf5File(SourceFile):
    """An HDF5 file; its arrays are all its datasets, by path."""

    def __init__(self, path: str) -> None:
        try:
            import h5py
        except ImportError as error:
            raise InputError(f"reading {path} needs h5py: pip install 'dbksvd-dask[importers]'") from error
        self.path = path
        self.arrays = {}
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise StoreError(f"{path} is not a readable HDF5 file: {brief(error)}") from error

        def visit(name: str, node: Any) -> None:
            if not isinstance(name, str):  # bytes, where the name is not UTF-8
                return
            if isinstance(node, h5py.Dataset) and node.shape and node.dtype.kind in "biufV":
                self.arrays[name] = ArrayInfo(tuple(node.shape), numeric_name(node.dtype))

        try:
            self._file.visititems(visit)
        except _DAMAGE as error:
            raise StoreError(f"{path} is not a readable HDF5 file, or damaged: {brief(error)}") from error

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        try:
            block: Array = np.asarray(self._file[name][start:stop])
        except _DAMAGE as error:
            raise StoreError(
                f"{self.path}: rows {start} to {stop} of {name} cannot be read: {brief(error)}"
            ) from error
        block = block.view(readable(block.dtype))
        return block.astype(block.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_hdf5(path: str, hints: Hints) -> SourceFile:
    """Open an HDF5 file."""
    return Hdf5File(path)
