"""How well the rows of a store are mixed, in one number: how much the means of batches vary.

Batches are read in order from the store. In a store of fully shuffled rows the variance of their means is the
variance of the rows divided by the batch size; the figure is how many times larger it is. 1 is a full shuffle, a
store in the order of its documents easily has several hundred, below 1 the batches are more alike than chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

# features that are looked at: enough for a steady figure, few enough to cost little beside a copy
N_COLUMNS = 16
RUN = 8


def choose_columns(n_features: int) -> list[slice]:
    """Choose the features to measure: all of a few, or two runs of 8 (a run is in one or two cache lines).

    >>> choose_columns(5), choose_columns(768)
    ([slice(0, 5, None)], [slice(253, 261, None), slice(506, 514, None)])
    """
    if n_features <= N_COLUMNS:
        return [slice(0, n_features)]
    n_runs = N_COLUMNS // RUN
    starts = [(n_features - RUN) * (i + 1) // (n_runs + 1) for i in range(n_runs)]
    if starts[0] + RUN > starts[1]:  # a narrow row: from its start
        starts = [RUN * i for i in range(n_runs)]
    return [slice(start, start + RUN) for start in starts]


def pick_columns(rows: npt.NDArray[Any], columns: list[slice]) -> npt.NDArray[Any]:
    """Return the chosen features of some rows."""
    return np.concatenate([rows[:, run] for run in columns], axis=1)


class BatchMeans:
    """Sums over batches from which the figure follows; those of separate parts can be merged.

    Parameters
    ----------
    n_columns : int
        Number of features looked at.
    """

    def __init__(self, n_columns: int) -> None:
        self.n_rows = 0
        self.n_batches = 0
        self.total = np.zeros(n_columns)
        self.squares = np.zeros(n_columns)
        self.between = np.zeros(n_columns)

    def add(self, batch: npt.NDArray[Any]) -> None:
        """Count one batch.

        Parameters
        ----------
        batch : ndarray of shape (n, n_columns)
            Its rows, only the features looked at.
        """
        wide = batch.astype(np.float64)
        total = wide.sum(axis=0)  # not a product with ones: BLAS would wake its threads
        self.n_rows += len(batch)
        self.n_batches += 1
        self.total += total
        self.squares += np.einsum("ij,ij->j", wide, wide)
        self.between += total * total / len(batch)

    def merge(self, other: BatchMeans) -> None:
        """Count the batches of another part too."""
        self.n_rows += other.n_rows
        self.n_batches += other.n_batches
        self.total += other.total
        self.squares += other.squares
        self.between += other.between

    def ratio(self) -> float | None:
        """Return the variance of batch means relative to a full shuffle; None for fewer than two batches."""
        if self.n_batches < 2 or self.n_rows <= self.n_batches:
            return None
        middle = self.total**2 / self.n_rows
        variance = (self.squares - middle) / (self.n_rows - 1)
        # below this the variance is rounding: the feature is constant
        varies = variance > 1e-12 * self.squares / self.n_rows
        if not varies.any():
            return None
        between = (self.between - middle) / (self.n_batches - 1)
        return float(np.mean(between[varies] / variance[varies]))

    def to_json(self) -> dict[str, Any]:
        """Return the sums as plain JSON values, exactly."""
        return {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in self.__dict__.items()}

    @classmethod
    def from_json(cls, sums: dict[str, Any]) -> BatchMeans:
        """Read sums back."""
        made = cls(len(sums["total"]))
        made.n_rows, made.n_batches = sums["n_rows"], sums["n_batches"]
        for name in ("total", "squares", "between"):
            setattr(made, name, np.array(sums[name]))
        return made

    @classmethod
    def merged(cls, parts: Iterable[dict[str, Any]]) -> BatchMeans:
        """Merge sums that were written as JSON, in the order given."""
        sums = [cls.from_json(part) for part in parts]
        out = cls(len(sums[0].total)) if sums else cls(0)
        for part in sums:
            out.merge(part)
        return out


class MixingSample:
    """The chosen features of rows that come piece by piece, from which the sums over batches follow.

    Parameters
    ----------
    n_rows : int
        How many rows will come.
    columns : list of slice
        The features, as chosen by `choose_columns`.
    dtype : dtype
        Of the rows.
    """

    def __init__(self, n_rows: int, columns: list[slice], dtype: npt.DTypeLike) -> None:
        self._columns = columns
        self._rows = np.empty((n_rows, sum(run.stop - run.start for run in columns)), dtype)

    def add(self, first: int, rows: npt.NDArray[Any]) -> None:
        """Keep the chosen features of rows, the first of which is number `first`."""
        self._rows[first : first + len(rows)] = pick_columns(rows, self._columns)

    def means(
        self, chunk_rows: int, batch_rows: int, widen: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None
    ) -> BatchMeans:
        """Return the sums over batches, none of which reaches from one chunk into the next.

        Parameters
        ----------
        chunk_rows, batch_rows : int
            Rows of a chunk and of a batch.
        widen : callable, optional
            Makes numbers of the rows, when their dtype are only bits.
        """
        means = BatchMeans(self._rows.shape[1])
        for chunk in range(0, len(self._rows), chunk_rows):
            part = self._rows[chunk : chunk + chunk_rows]
            wide = part if widen is None else widen(part)
            for start in range(0, len(wide), batch_rows):
                means.add(wide[start : start + batch_rows])
        return means


def batch_rows(n_samples: int, chunk_rows: int) -> int:
    """Return the batch size of the figure: a chunk, or less when the store has few of them.

    >>> batch_rows(1_000_000, 16384), batch_rows(20_000, 16384)
    (16384, 1250)
    """
    return max(1, min(chunk_rows, n_samples // 16))
