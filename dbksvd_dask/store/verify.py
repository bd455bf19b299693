"""Reading a whole store and comparing it with the checksums it carries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import zarr

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import atomic, remote
from dbksvd_dask.store.checksums import crc32c
from dbksvd_dask.store.remote import PathLike
from dbksvd_dask.store.rows import ROW_CHECKSUMS, open_aligned, open_rows


def verify_store(path: PathLike, on_chunk: Callable[[int], None] | None = None) -> int:
    """Compare every chunk of every array with its checksum.

    Parameters
    ----------
    path : path or fsspec URL
        An activation store of this package.
    on_chunk : callable, optional
        Told how many chunks are done.

    Returns
    -------
    int
        The number of chunks along the samples.

    Raises
    ------
    StoreError
        When one is missing or differs; it lists all that differ.
    """
    reader = open_rows(path)
    group = remote.open_zarr(path)
    assert isinstance(group, zarr.Group)
    table = group.get(ROW_CHECKSUMS)
    if not isinstance(table, zarr.Array):
        raise StoreError(f"{path} has no checksums; it was not written by this package")
    expected = np.asarray(table[...])
    names = [str(name) for name in table.attrs["arrays"]]  # type: ignore[union-attr]
    readers = [reader if name == reader.array else open_aligned(path, name) for name in names]
    bad = []
    for chunk in range(reader.n_chunks):
        blocks = (r.read_stored(*r.chunk_bounds(chunk)) for r in readers)
        found = [crc32c(block) for block in blocks]
        if found != expected[chunk].tolist():
            bad.append(chunk)
        if on_chunk is not None:
            on_chunk(chunk + 1)
    if bad:
        raise StoreError(
            f"chunks {atomic.describe_parts(bad)} of {path} differ from their checksums; "
            "restore these files or write the store again"
        )
    return reader.n_chunks
