"""A shuffle of one pass: the rows of every chunk of the result, picked straight out of the source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.shuffle_plan import MIN_BLOCK_BYTES, ShufflePlan, fits_one_pass
from dbksvd_dask.store.pick import RowPicker, can_pick, memory_for_files
from dbksvd_dask.store.rows import RowReader


def may_pick(main: RowReader, aligned: Mapping[str, RowReader]) -> bool:
    """Tell whether a store is worth picking rows from, by its kind, its size and the memory there is."""
    beside = sum(reader.nbytes for reader in aligned.values())
    row_bytes = main.n_features * main.stored.itemsize
    return fits_one_pass(main.n_samples, row_bytes, beside, memory_for_files()) and can_pick(main)


# a store up to this is mapped: a shuffle of two passes holds that much as well
MOST_MAPPED_BYTES = 3 * MIN_BLOCK_BYTES


class ChunkPicker:
    """Gives the rows of any chunk in the order of the result; `close` it.

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
        """Return which row of the source each row of a chunk is; from one thread."""
        bucket, first = self._plan.bucket_of(chunk), chunk * self._plan.chunk_rows
        if bucket != self._bucket:
            self._of_bucket = self._plan.sources(bucket, self._orders, self._counts)
            self._bucket = bucket
        start = first - self._plan.bounds(bucket)[0]
        return self._of_bucket[start : start + self._plan.chunk_rows]

    def fill(self, sources: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Put those rows of the source into an array of shape (len(sources), n_features); from any thread."""
        self._main.pick(sources, rows)

    def aligned(self, sources: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return what is aligned to those rows; from any thread."""
        return {name: whole[sources] for name, whole in self._aligned.items()}

    def close(self) -> None:
        """Close the files of the source."""
        self._main.close()
