"""Reading a whole store and comparing it with the checksums it carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.checksums import crc32c
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.reader import ROW_CHECKSUMS, RowReader, open_aligned, open_rows


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
    expected, names = _checksums(path, reader)
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


def _checksums(path: PathLike, reader: RowReader) -> tuple[NDArray[Any], list[str]]:
    """Read the table of checksums, one row per chunk, and the names of its columns."""
    group = paths.open_group(path)
    table = paths.get_array(path, group, ROW_CHECKSUMS)
    if table is None:
        raise StoreError(f"{path} has no checksums; it was not written by this package")
    expected, names = paths.read_array(path, group, ROW_CHECKSUMS), table.attrs.get("arrays")
    if not isinstance(names, list) or expected.shape != (reader.n_chunks, len(names)):
        raise StoreError(
            f"the checksums of {path} are of shape {expected.shape} for the arrays {names}, not one row for each "
            f"of {reader.n_chunks} chunks; restore {paths.join(path, ROW_CHECKSUMS)} or write the store again"
        )
    return expected, [str(name) for name in names]
