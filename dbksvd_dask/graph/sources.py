"""Sources of samples: arrays in memory, Dask arrays, labelled arrays, Zarr stores.

A source has a shape and returns references to rows. A reference is small; the worker that needs the rows reads
them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import scipy.sparse
from dask.delayed import delayed

from dbksvd_dask._words import listed
from dbksvd_dask.base.late import is_instance
from dbksvd_dask.errors import InputError
from dbksvd_dask.plan import stream, units
from dbksvd_dask.store import atomic
from dbksvd_dask.store.activations import RowReader, open_rows

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr


class Rows(Protocol):
    """A reference to some rows of a source."""

    rows: np.ndarray

    def load(self) -> np.ndarray:
        """Read the rows: (n, n_features)."""
        ...

    def where(self, index: int) -> str:
        """Describe row `index` of this reference by its row in the source, for an error message."""
        ...


class ArrayRows:
    """Rows of an array in memory; pickled as those rows only."""

    def __init__(self, array: np.ndarray, rows: np.ndarray, chunk_size: int, taken: bool = False) -> None:
        self.array, self.rows, self.chunk_size, self._taken = array, rows, chunk_size, taken

    def load(self) -> np.ndarray:
        """Read the rows."""
        return self.array if self._taken else self.array[self.rows]

    def where(self, index: int) -> str:
        """Describe a row by its index and the chunk in which it lies."""
        row = int(self.rows[index])
        return f"sample {row} (chunk {row // self.chunk_size}, row {row % self.chunk_size} in it)"

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayRows, (np.ascontiguousarray(self.load()), self.rows, self.chunk_size, True)


@dataclass(frozen=True)
class StoreRows:
    """Rows of a Zarr store, read by the worker that needs them."""

    reader: RowReader
    rows: np.ndarray

    def load(self) -> np.ndarray:
        """Read the rows, one run of consecutive rows after another."""
        return self.reader.read_runs(stream.runs(self.rows))

    def where(self, index: int) -> str:
        """Describe a row by its index and the store's chunk in which it lies."""
        return self.reader.describe_row(int(self.rows[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send runs of consecutive rows by their ends: a graph refers to every row of two batches."""
        ends = np.array(stream.runs(self.rows), np.int64).reshape(-1, 2)
        if ends.size >= self.rows.size:
            return StoreRows, (self.reader, self.rows)
        return _rows_of_runs, (self.reader, ends)


def _rows_of_runs(reader: RowReader, ends: np.ndarray) -> StoreRows:
    return StoreRows(reader, np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in ends]))


class BlockRows:
    """Rows of a Dask array, computed by tasks of the same graph."""

    def __init__(self, picked: list[np.ndarray], rows: np.ndarray, chunk_ends: np.ndarray) -> None:
        self.picked, self.rows, self.chunk_ends = picked, rows, chunk_ends

    def load(self) -> np.ndarray:
        """Join the rows, picked chunk by chunk, in the order of `rows`."""
        order = np.argsort(np.searchsorted(self.chunk_ends, self.rows, side="right"), kind="stable")
        out, n = np.empty((self.rows.size, self.picked[0].shape[1]), self.picked[0].dtype), 0
        for part in self.picked:
            out[order[n : n + len(part)]] = part
            n += len(part)
        return out

    def where(self, index: int) -> str:
        """Describe a row by its index and the chunk of the Dask array in which it lies."""
        row = int(self.rows[index])
        block = int(np.searchsorted(self.chunk_ends, row, side="right"))
        inside = row - (int(self.chunk_ends[block - 1]) if block else 0)
        return f"sample {row} (chunk {block}, row {inside} in it)"


class Source(ABC):
    """Samples of a fit or an encoding.

    Attributes
    ----------
    shape : (n_samples, n_features)
    dtype : as stored
    block_rows : rows that an encoding reads together; a fit uses `plan.stream.block_rows`
    in_memory : whether the samples are an array of this process; their codes are then computed at once
    reads_ahead : whether workers may read the rows of the next batch while they compute this one
    read_copies : copies of a task's rows in memory at once while they are read
    rows_first : whether other tasks bring the rows of a task into memory before it begins
    """

    in_memory = False
    reads_ahead = False
    read_copies = 1
    rows_first = False

    def __init__(self, shape: tuple[int, int], dtype: np.dtype, block_rows: int, chunk_size: int) -> None:
        self.shape, self.dtype, self.block_rows, self.chunk_size = shape, dtype, block_rows, chunk_size

    @property
    def n_samples(self) -> int:
        """Rows."""
        return self.shape[0]

    @property
    def n_features(self) -> int:
        """Columns."""
        return self.shape[1]

    @property
    def identity(self) -> str:
        """The name of this source in a checkpoint."""
        return f"array of shape {self.shape}, {self.dtype}"

    @abstractmethod
    def take(self, rows: np.ndarray) -> Any:
        """Return a reference to some rows: `Rows`, or a Dask task that returns `Rows`."""

    def check_finite(self) -> None:
        """Refuse NaN and infinity before work starts if no file need be read; tasks refuse them when they read."""
        return

    def require_outside(self, folder: str) -> None:
        """Refuse to write to a folder inside the source."""
        return


class ArraySource(Source):
    """A numpy array."""

    in_memory = True

    def __init__(self, array: np.ndarray, chunk_size: int) -> None:
        super().__init__(array.shape, array.dtype, chunk_size, chunk_size)
        self.array = array

    def take(self, rows: np.ndarray) -> ArrayRows:
        """Return a reference to some rows."""
        return ArrayRows(self.array, rows, self.chunk_size)

    def check_finite(self) -> None:
        """Refuse NaN and infinity before work starts."""
        for a, b in units.split_rows(self.n_samples, self.chunk_size):
            part = self.array[a:b]
            if not np.isfinite(part).all():
                bad = np.flatnonzero(~np.isfinite(part).all(axis=1))
                what = "NaN" if np.isnan(part[bad[0]]).any() else "infinity"
                first = self.take(np.arange(a, b)).where(int(bad[0]))
                raise InputError(
                    f"Y contains {what}: {first}, {bad.size} such row{'s' * (bad.size > 1)} in that chunk; drop "
                    "them with Y[np.isfinite(Y).all(axis=1)]"
                )


class StoreSource(Source):
    """A Zarr store; an encoding reads whole chunks of it, enough at a time for chunk_size rows."""

    reads_ahead = True

    def __init__(self, reader: RowReader, chunk_size: int) -> None:
        block = -(-chunk_size // reader.chunk_rows) * reader.chunk_rows
        shape = (reader.n_samples, reader.n_features)
        super().__init__(shape, np.dtype(reader.dtype), block, chunk_size)
        self.reader = reader

    @property
    def identity(self) -> str:
        """Fingerprint of the store."""
        return f"store {self.reader.fingerprint}"

    def take(self, rows: np.ndarray) -> StoreRows:
        """Return a reference to some rows."""
        return StoreRows(self.reader, rows)

    def require_outside(self, folder: str) -> None:
        """Refuse to write to a folder inside the store."""
        atomic.require_outside(folder, self.reader.path)


class LazySource(Source):
    """A Dask array; an encoding reads chunk_size rows at a time, whatever the chunks of the array."""

    read_copies = 2  # whole blocks are in memory before rows are taken from them
    rows_first = True

    def __init__(self, array: da.Array, chunk_size: int) -> None:
        super().__init__(array.shape, array.dtype, chunk_size, chunk_size)
        self.array = array

    def take(self, rows: np.ndarray) -> Any:
        """Return a task that returns a reference to some rows."""
        ends = np.cumsum(self.array.chunks[0])
        starts, chunk = ends - self.array.chunks[0], np.searchsorted(ends, rows, side="right")
        lines = {int(c): list(self.array.blocks[int(c)].to_delayed()[0]) for c in np.unique(chunk)}
        picked = [delayed(_pick, pure=False)(line, rows[chunk == c] - starts[c]) for c, line in lines.items()]
        return delayed(BlockRows, pure=False)(picked, rows, ends)


def _pick(line: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return some rows of one row chunk of a Dask array, from its blocks side by side."""
    return np.concatenate([np.asarray(block)[rows] for block in line], axis=1)


def check_matrix(shape: tuple[int, ...], dtype: Any, what: str = "Y") -> None:
    """Refuse anything but a matrix of floating-point samples."""
    if len(shape) != 2:
        raise InputError(
            f"{what} has {len(shape)} dimension{'s' * (len(shape) != 1)}, shape {tuple(shape)}; it must be 2-D "
            "(samples, features). Reshape your data: Y.reshape(-1, n_features) for a stack of sequences, "
            "Y.reshape(1, -1) for one sample"
        )
    if shape[1] == 0:
        raise InputError(f"{what} has 0 feature(s) (shape={tuple(shape)}) while a minimum of 1 is required.")
    if shape[0] == 0:
        raise InputError(f"{what} has 0 sample(s) (shape={tuple(shape)}) while a minimum of 1 is required.")
    kind = np.dtype(dtype).kind
    if kind != "f":
        hint = (
            "Complex data not supported: use Y.real or stack real and imaginary parts"
            if kind == "c"
            else ("use Y.astype('float32')")
        )
        raise InputError(f"{what} has dtype {np.dtype(dtype)}; it must be float16, float32 or float64; {hint}")


def _check_dims(Y: xr.DataArray) -> None:
    """Refuse an array whose own names say that it lies the other way round."""
    if Y.ndim == 2 and (Y.dims[0] == "feature" or Y.dims[1] == "sample"):
        raise InputError(
            f"Y has the dimensions {Y.dims}; it must be (sample, feature): "
            f"use Y.transpose({Y.dims[1]!r}, {Y.dims[0]!r})"
        )


def as_source(Y: Any, chunk_size: int) -> Source:
    """Return samples of any accepted kind as a source.

    Parameters
    ----------
    Y : ndarray, tensor, dask array, xarray.DataArray, path of a .npy file or path/URL of a Zarr store
        Of shape (n_samples, n_features).
    """
    if isinstance(Y, Source):
        return Y
    if isinstance(Y, str | os.PathLike):
        if os.fspath(Y).endswith(".npy") and os.path.isfile(Y):
            return as_source(np.load(Y, mmap_mode="r", allow_pickle=False), chunk_size)
        return StoreSource(open_rows(os.fspath(Y)), chunk_size)
    if is_instance(Y, "xarray", "Dataset"):
        if "activations" not in Y:
            raise InputError(
                f"the Dataset has no variable `activations` (it has: {listed(Y.data_vars)}); "
                "pass ds['name'] instead"
            )
        Y = Y["activations"]
    if is_instance(Y, "xarray", "DataArray"):
        _check_dims(Y)
        Y = Y.data
    if is_instance(Y, "dask.array", "Array"):
        check_matrix(Y.shape, Y.dtype)
        if any(np.isnan(size) for size in Y.shape):
            raise InputError("Y is a Dask array of unknown length; call Y.compute_chunk_sizes() first")
        return LazySource(Y, chunk_size)
    if scipy.sparse.issparse(Y):
        raise InputError(
            f"Y is a sparse matrix of shape {Y.shape}; sparse input is not supported, samples are dense: "
            "use Y.toarray()"
        )
    if not isinstance(Y, np.ndarray):
        Y = _as_numpy(Y)
    check_matrix(Y.shape, Y.dtype)
    return ArraySource(Y, chunk_size)


def _as_numpy(Y: Any) -> np.ndarray:
    """Return what can be had as an array: tensors of torch, anything with `__dlpack__` or `__array__`, lists."""
    if is_instance(Y, "torch", "Tensor"):
        return _of_tensor(Y)
    if hasattr(Y, "__dlpack__") and not hasattr(Y, "__array__"):
        try:
            return np.from_dlpack(Y)
        except (BufferError, RuntimeError, TypeError) as error:
            raise InputError(f"Y cannot be read through __dlpack__ ({error}); copy it to the CPU first") from error
    return np.asarray(Y)


def _of_tensor(Y: Any) -> np.ndarray:
    """Return a tensor without its gradient; bfloat16, which NumPy does not have, as float32."""
    import torch

    tensor = Y.detach().cpu()
    return np.asarray(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
