"""The activation store: a Zarr v3 group with `activations` (sample, feature) in whole-row chunks.

```
STORE/zarr.json            format, version, provenance, `complete`, a digest of the content
STORE/activations/         float16, float32, float64, or bfloat16 as uint16 with an attribute
STORE/<aligned>/           labels, token ids, ...: one entry per sample, in the same row chunks
STORE/crc32c/              checksums of the rows of every chunk of every array
```

An unfinished store is at `STORE.partial`, with a marker per finished chunk; it is renamed when complete. Reading
is in `reader`, writing in `writer`; this module opens a store as xarray and gathers the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.base.late import late
from dbksvd_dask.store import paths
from dbksvd_dask.store.layout import Aligned, default_chunk_rows
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.reader import RowReader, aligned_names, fingerprint, open_aligned, open_rows
from dbksvd_dask.store.writer import ActivationWriter, create_activations, open_writer

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr
    import zarr
else:
    da, xr, zarr = late("dask.array"), late("xarray"), late("zarr")

__all__ = [
    "ActivationWriter",
    "Aligned",
    "RowReader",
    "create_activations",
    "default_chunk_rows",
    "fingerprint",
    "open_activations",
    "open_aligned",
    "open_rows",
    "open_writer",
]


def open_activations(path: PathLike) -> xr.Dataset:
    """Open an activation store as a Dask-backed dataset, one Dask chunk per Zarr chunk.

    Parameters
    ----------
    path : path or fsspec URL
        An activation store, or any Zarr group that holds a 2-D array `activations`, or a bare 2-D Zarr array.

    Returns
    -------
    xarray.Dataset
        `activations` (sample, feature), float16, float32 or float64 as stored, float32 for bfloat16; the
        aligned arrays as coordinates along `sample`; the attributes of the store.

    Examples
    --------
    >>> from dbksvd_dask import import_activations, open_activations
    >>> _ = import_activations("activations.npy", "store.zarr")
    >>> open_activations("store.zarr")["activations"].shape
    (300, 8)
    """
    reader = open_rows(path)
    node = paths.open_zarr(path)
    names = aligned_names(reader, node) if isinstance(node, zarr.Group) else []
    coords = {name: _lazy(open_aligned(path, name), name) for name in names}
    dataset = xr.Dataset({"activations": _lazy(reader, "")}, coords=coords, attrs=dict(node.attrs))
    return dataset


def _lazy(reader: RowReader, name: str) -> tuple[tuple[str, ...], da.Array, dict[str, Any]]:
    dims = tuple(f"{name}_{axis}" for axis in range(len(reader.row_shape))) if name else ("feature",)
    # not Zarr's own array: the reader detects a damaged chunk
    source = RowsAsArray(reader)
    chunks = (reader.chunk_rows, *reader.row_shape)
    rows = da.from_array(source, chunks=chunks, asarray=False)  # type: ignore[no-untyped-call]
    return ("sample", *dims), rows, dict(reader.attributes)


class RowsAsArray:
    """The minimal array interface through which Dask reads rows from a RowReader."""

    def __init__(self, reader: RowReader) -> None:
        self.reader = reader
        self.shape = (reader.n_samples, *reader.row_shape)
        self.ndim = len(self.shape)
        self.dtype = reader.dtype

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        first, *rest = key if isinstance(key, tuple) else (key,)
        if isinstance(first, slice):
            wanted = range(self.shape[0])[first]
            if not wanted:
                return np.empty((0, *self.shape[1:]), self.dtype)[(slice(None), *rest)]
            rows = self._rows(min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1)[:: wanted.step]
            return rows[(slice(None), *rest)]
        index = np.asarray(first) % self.shape[0]
        if index.size == 0:
            return np.empty((0, *self.shape[1:]), self.dtype)[(slice(None), *rest)]
        start = int(index.min())
        rows = self._rows(start, int(index.max()) + 1)[index - start]
        return rows[(slice(None), *rest)] if index.ndim else rows[tuple(rest)]

    def _rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self.reader.read(start, stop).reshape(-1, *self.shape[1:])

    def __dask_tokenize__(self) -> tuple[str, str, str]:
        return self.reader.__dask_tokenize__()
