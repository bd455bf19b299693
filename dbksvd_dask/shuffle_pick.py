"""A shuffle of one pass: the rows of every bucket of the result, picked straight out of the source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.job_tools import Buffers
from dbksvd_dask.shuffle_plan import ShufflePlan, fits_one_pass
from dbksvd_dask.store.pick import can_pick, memory_for_files, pick_rows
from dbksvd_dask.store.rows import RowReader


def may_pick(main: RowReader, aligned: Mapping[str, RowReader]) -> bool:
    """Tell whether a store is worth picking rows from, by its kind, its size and the memory there is."""
    beside = sum(reader.nbytes for reader in aligned.values())
    row_bytes = main.n_features * main.stored.itemsize
    return fits_one_pass(main.n_samples, row_bytes, beside, memory_for_files()) and can_pick(main)


class BucketPicker:
    """Gives the rows of any bucket in the order of the result; from any thread.

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
    buffers : Buffers
        Where memory for the rows comes from.
    """

    def __init__(
        self,
        plan: ShufflePlan,
        counts: npt.NDArray[np.int64],
        main: RowReader,
        aligned: Mapping[str, RowReader],
        buffers: Buffers,
    ) -> None:
        self._plan, self._counts, self._main, self._buffers = plan, counts, main, buffers
        self._orders = [plan.block_order(block).astype(np.int32) for block in range(plan.n_blocks)]
        self._aligned = {name: reader.read_stored(0, reader.n_samples) for name, reader in aligned.items()}

    def pick(self, bucket: int, main_name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of a bucket, under `main_name`, and what is aligned to them; give the memory back."""
        sources = self._plan.sources(bucket, self._orders, self._counts)
        rows = self._buffers.take((len(sources), self._main.n_features), self._main.stored)
        pick_rows(self._main, sources, rows)
        picked = {main_name: rows}
        for name, whole in self._aligned.items():
            out = self._buffers.take((len(sources), whole.shape[1]), whole.dtype)
            picked[name] = np.take(whole, sources, axis=0, out=out, mode="clip")
        return picked
