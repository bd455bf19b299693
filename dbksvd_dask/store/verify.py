"""Reading a whole store and comparing it with the checksums it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.checksums import KINDS, Checksum, kind_in
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.reader import LinkedReader, RowReader, open_aligned, open_rows


def verify_store(path: PathLike, on_chunk: Callable[[int], None] | None = None) -> int:
    """Compare every chunk of every array with its checksum.

    Parameters
    ----------
    path : path or fsspec URL
        An activation store of this package.
    on_chunk : callable, optional
        Called with the number of chunks that are done.

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
    checksums = _of_rows(reader)
    readers = [reader if name == reader.array else open_aligned(path, name) for name in checksums.names]
    bad = differing_chunks(readers, checksums, on_chunk)
    if bad:
        named = f" ({', '.join(sorted(_files(reader, bad)))})" if isinstance(reader, LinkedReader) else ""
        raise StoreError(
            f"chunks {atomic.describe_parts(bad)} of {path}{named} differ from their checksums; "
            "restore these files or write the store again"
        )
    return reader.n_chunks


def _of_rows(reader: RowReader) -> Checksums:
    """Return the checksums of an activation store; refuse one that was linked without those of its rows."""
    if isinstance(reader, LinkedReader) and not reader.has_checksums:
        raise StoreError(
            f"{reader.path} was linked without checksums: only sizes and times of its files are compared, and "
            "they agree; record checksums by importing again with link=True, verify=True and force=True"
        )
    return read_checksums(reader.path, reader.n_chunks)


def _files(reader: LinkedReader, chunks: Sequence[int]) -> set[str]:
    """Return the linked files that hold some chunks."""
    return {span.path for chunk in chunks for span in reader.links.spans(*reader.chunk_bounds(chunk))}


class Checksums(NamedTuple):
    """The checksums that a store carries: a table of shape (n_chunks, arrays), its columns and their function."""

    table: NDArray[Any]
    names: list[str]
    function: Checksum


def read_checksums(path: PathLike, n_chunks: int) -> Checksums:
    """Read the checksums of a store of activations or codes."""
    group = paths.open_group(path)
    kind = kind_in(paths.get_arrays(path, group))
    if kind is None:
        raise StoreError(f"{path} has no checksums; it was not written by this package")
    table, names = paths.read_array(path, group, kind), group[kind].attrs.get("arrays")
    if not isinstance(names, list) or table.shape != (n_chunks, len(names)):
        raise StoreError(
            f"the checksums of {path} are of shape {table.shape} for the arrays {names}, not one row for each "
            f"of {n_chunks} chunks; restore {paths.join(path, kind)} or write the store again"
        )
    return Checksums(table, [str(name) for name in names], KINDS[kind])


def differing_chunks(
    readers: Sequence[RowReader], checksums: Checksums, on_chunk: Callable[[int], None] | None = None
) -> list[int]:
    """Read all chunks and return the numbers of those that differ from their checksums.

    Parameters
    ----------
    readers : sequence of RowReader
        One per column of the checksums.
    checksums : Checksums
    on_chunk : callable, optional
        Called with the number of chunks that are done.
    """
    bad = []
    for chunk, expected in enumerate(checksums.table.tolist()):
        blocks = (reader.read_stored(*reader.chunk_bounds(chunk)) for reader in readers)
        if [checksums.function(block, 0) for block in blocks] != expected:
            bad.append(chunk)
        if on_chunk is not None:
            on_chunk(chunk + 1)
    return bad
