"""Fill an activation store chunk by chunk, from a function that makes any range of rows."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store import paths
from dbksvd_dask.store.activations import Aligned, create_activations, open_rows

Rows = npt.NDArray[Any]
Chunk = tuple[Rows, dict[str, npt.NDArray[Any]]]
Report = Callable[[str], None]


def fill_store(
    path: str,
    make: Callable[[int, int], Chunk],
    shape: tuple[int, int],
    dtype: str,
    *,
    attributes: dict[str, Any],
    aligned: Mapping[str, Aligned | npt.DTypeLike],
    chunk_rows: int | None = None,
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> bool:
    """Write the store `path`; chunks that an interrupted run has written are not made again.

    Parameters
    ----------
    path : path or fsspec URL
        The store. It appears under its name when it is complete.
    make : callable
        `make(start, stop)` returns rows [start, stop) of shape (stop - start, n_features) with a dict of
        aligned arrays. It must give the same bytes each time, whatever else was made before.
    shape : (n_samples, n_features)
        Shape of the store.
    dtype : str
        dtype of the rows.
    attributes, aligned, chunk_rows
        As for `create_activations`.
    overwrite : bool
        Begin anew, and replace a store of that name when the new one is complete.
    report : callable
        Takes a line of progress.

    Returns
    -------
    bool
        False when the very store was there already.
    """
    if not overwrite and is_made(path, shape, dtype, attributes):
        report(f"{path} is complete; nothing to do")
        return False
    writer = create_activations(
        path,
        *shape,
        dtype,
        chunk_rows=chunk_rows,
        attributes=attributes,
        aligned=aligned,
        overwrite=overwrite,
        resume=not overwrite,
    )
    missing = writer.missing()
    report(f"{path}: {shape[0]} rows of {shape[1]}, {len(missing)} of {writer.n_chunks} chunks to do")
    for i in missing:
        began = time.perf_counter()
        start = i * writer.chunk_rows
        rows, beside = make(start, min(start + writer.chunk_rows, shape[0]))
        writer.write_chunk(i, rows, beside)
        rate = len(rows) / (time.perf_counter() - began)
        report(f"{path}: chunk {i + 1} of {writer.n_chunks} written, {rate:.0f} rows/s")
    writer.finish()
    return True


def is_made(path: str, shape: tuple[int, int], dtype: str, attributes: dict[str, Any]) -> bool:
    """Tell whether `path` holds the complete store that these options make."""
    if not paths.exists(path):
        return False
    rows = open_rows(path)
    made = paths.open_zarr(path).attrs.get("provenance")
    return (rows.shape, rows.dtype, made) == (shape, np.dtype(dtype), attributes)


def say(line: str) -> None:
    """Print a line of progress, at once and apart from any result."""
    print(line, file=sys.stderr, flush=True)
