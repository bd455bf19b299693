"""HDF5 files, through h5py."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError, brief
from dbksvd_dask.importers.base import Array, ArrayInfo, Hints, SourceFile, numeric_name, readable

# what h5py raises for an inconsistent file
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
        self._outside: dict[str, str] = {}
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise StoreError(f"{path} is not a readable HDF5 file: {brief(error)}") from error

        def visit(name: str, node: Any) -> None:
            if not isinstance(name, str):  # bytes, where the name is not UTF-8
                return
            if isinstance(node, h5py.Dataset) and node.shape and node.dtype.kind in "biufV":
                self.arrays[name] = ArrayInfo(tuple(node.shape), numeric_name(node.dtype))
            if isinstance(node, h5py.Dataset) and (place := _elsewhere(node)):
                self._outside[name] = place

        try:
            self._file.visititems(visit)
            self._add_indirect()
        except _DAMAGE as error:
            raise StoreError(f"{path} is not a readable HDF5 file, or damaged: {brief(error)}") from error

    @property
    def outside(self) -> dict[str, str]:
        """External datasets, and virtual ones of other files, with the first file of each."""
        return self._outside

    def _add_indirect(self) -> None:
        """Add virtual datasets of this file if anything in it refers to another file: they may refer there too."""
        from h5py import ExternalLink

        ways = [link.filename for link in self._links() if isinstance(link, ExternalLink)]
        ways += self._outside.values()
        for name in self.arrays:
            if ways and name not in self._outside and self._file[name].is_virtual:
                self._outside[name] = ways[0]

    def _links(self) -> list[Any]:
        """Yield every link of the file that is not a name of an object in it."""
        found: list[Any] = []
        self._file.visititems_links(lambda _, link: found.append(link))
        return found

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


def _elsewhere(dataset: Any) -> str:
    """Return the other file in which a dataset keeps values, if any: external storage, or a virtual source."""
    names = [entry[0] for entry in dataset.external or ()]
    if dataset.is_virtual:
        names += [source.file_name for source in dataset.virtual_sources() if source.file_name != "."]
    return str(names[0]) if names else ""


def open_hdf5(path: str, hints: Hints) -> SourceFile:
    """Open an HDF5 file."""
    return Hdf5File(path)
