"""The passes of a shuffle: two through scratch files, or one that picks rows straight from the source."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.plan.shuffle import MIN_BLOCK_BYTES, ShufflePlan, fits_one_pass
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store._system import can_release
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.picker import RowPicker, can_pick, memory_for_files
from dbksvd_dask.store.reader import RowReader


def scratch_folder(path: str, scratch: PathLike | None) -> str:
    """Return where pass 1 writes its segments: beside the result, or in a local folder for a remote one."""
    if scratch is None and not paths.is_remote(path):
        return f"{path}.scratch{atomic.PARTIAL_SUFFIX}"
    home = tempfile.gettempdir() if scratch is None else os.fspath(scratch)
    # the name follows from the result, so that the next run finds it
    return os.path.join(home, f"dbksvd-shuffle-{hashlib.sha256(path.encode()).hexdigest()[:16]}")


def can_shrink(scratch: str) -> bool:
    """Return whether scratch files can give room back before they are removed."""
    folder = Path(scratch).absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        return can_release(str(folder))
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------- one pass


def may_pick(main: RowReader, aligned: Mapping[str, RowReader]) -> bool:
    """Return whether a store is worth picking rows from, by its kind, its size and the available memory."""
    beside = sum(reader.nbytes for reader in aligned.values())
    return fits_one_pass(main.n_samples, main.row_bytes, beside, memory_for_files()) and can_pick(main)


# a store up to this is mapped: a shuffle of two passes holds that much as well
MOST_MAPPED_BYTES = 3 * MIN_BLOCK_BYTES


class ChunkPicker:
    """Delivers the rows of any chunk in the order of the result; `close` it.

    Holds the order of every block and the aligned arrays in memory; `fits_one_pass` keeps both small.

    Parameters
    ----------
    plan : ShufflePlan
        What goes where.
    counts : ndarray of shape (n_blocks, n_blocks)
        As given by the plan.
    main : RowReader
        The rows, in local uncompressed files.
    aligned : dict of RowReader
        What is aligned to them.
    """

    def __init__(
        self,
        plan: ShufflePlan,
        counts: npt.NDArray[np.int64],
        main: RowReader,
        aligned: Mapping[str, RowReader],
    ) -> None:
        self._plan, self._counts = plan, counts
        self._orders = [plan.block_order(block).astype(np.int32) for block in range(plan.n_blocks)]
        self._aligned = {name: reader.read_stored(0, reader.n_samples) for name, reader in aligned.items()}
        self._bucket, self._of_bucket = -1, np.empty(0, np.int64)
        self._main = RowPicker(main, MOST_MAPPED_BYTES)

    def sources(self, chunk: int) -> npt.NDArray[np.int64]:
        """Return which row of the source each row of a chunk is; from one thread only."""
        bucket, first = self._plan.bucket_of(chunk), chunk * self._plan.chunk_rows
        if bucket != self._bucket:
            self._of_bucket = self._plan.sources(bucket, self._orders, self._counts)
            self._bucket = bucket
        start = first - self._plan.bounds(bucket)[0]
        return self._of_bucket[start : start + self._plan.chunk_rows]

    def fill(self, sources: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Fill an array of shape (len(sources), n_features) with these rows of the source; thread-safe."""
        self._main.pick(sources, rows)

    def aligned(self, sources: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return what is aligned to these rows; thread-safe."""
        return {name: whole[sources] for name, whole in self._aligned.items()}

    def close(self) -> None:
        """Close the files of the source."""
        self._main.close()
