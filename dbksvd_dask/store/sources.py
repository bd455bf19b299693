"""Where the samples come from: arrays in memory, Dask arrays, labelled arrays, Zarr stores.

A source knows its shape and hands out references to rows. A reference is small, travels to whichever worker
needs it, and reads there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

import dask.array as da
import numpy as np
import scipy.sparse
import xarray as xr

from dbksvd_dask import plan
from dbksvd_dask.errors import InputError
from dbksvd_dask.store.activations import RowReader, open_rows


class Rows(Protocol):
    """A reference to some rows of a source."""

    rows: np.ndarray

    def load(self) -> np.ndarray:
        """Read the rows: (n, n_features)."""
        ...

    def where(self, index: int) -> str:
        """Say which row of the source row `index` of this reference is, for an error message."""
        ...


class ArrayRows:
    """Rows of an array in memory; crosses a process border as just those rows."""

    def __init__(self, array: np.ndarray, rows: np.ndarray, chunk_size: int, taken: bool = False) -> None:
        self.array, self.rows, self.chunk_size, self._taken = array, rows, chunk_size, taken

    def load(self) -> np.ndarray:
        """Read the rows."""
        return self.array if self._taken else self.array[self.rows]

    def where(self, index: int) -> str:
        """Name the row, and the chunk it would fall into."""
        row = int(self.rows[index])
        return f"sample {row} (chunk {row // self.chunk_size}, row {row % self.chunk_size} in it)"

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayRows, (np.ascontiguousarray(self.load()), self.rows, self.chunk_size, True)


@dataclass(frozen=True)
class StoreRows:
    """Rows of a Zarr store, read where they are needed."""

    reader: RowReader
    rows: np.ndarray

    def load(self) -> np.ndarray:
        """Read the rows, run by run."""
        return self.reader.read_runs(plan.runs(self.rows))

    def where(self, index: int) -> str:
        """Name the row and the store's chunk it lies in."""
        row = int(self.rows[index])
        chunk, inside = divmod(row, self.reader.chunk_rows)
        return f"sample {row} (chunk {chunk}, row {inside} in it) of {self.reader.path}"


class Source:
    """Samples of a fit or an encoding, whatever they came as.

    Attributes
    ----------
    shape : (n_samples, n_features)
    dtype : as stored
    block_rows : rows that an encoding reads together; a fit has a grid of its own (`plan.block_rows`)
    """

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
        """What a checkpoint calls this source."""
        return f"array of shape {self.shape}, {self.dtype}"


class ArraySource(Source):
    """A numpy array."""

    def __init__(self, array: np.ndarray, chunk_size: int) -> None:
        super().__init__(array.shape, array.dtype, chunk_size, chunk_size)
        self.array = array

    def take(self, rows: np.ndarray) -> ArrayRows:
        """Reference to some rows."""
        return ArrayRows(self.array, rows, self.chunk_size)


class StoreSource(Source):
    """A Zarr store; an encoding reads whole chunks of it, as many together as make up chunk_size rows."""

    def __init__(self, reader: RowReader, chunk_size: int) -> None:
        block = -(-chunk_size // reader.chunk_rows) * reader.chunk_rows
        shape = (reader.n_samples, reader.n_features)
        super().__init__(shape, np.dtype(reader.dtype), block, chunk_size)
        self.reader = reader

    @property
    def identity(self) -> str:
        """Fingerprint and place of the store."""
        return f"store {self.reader.fingerprint}"

    def take(self, rows: np.ndarray) -> StoreRows:
        """Reference to some rows."""
        return StoreRows(self.reader, rows)


class LazySource(Source):
    """A Dask array; an encoding reads chunk_size rows together, wherever its own chunks end."""

    def __init__(self, array: da.Array, chunk_size: int) -> None:
        super().__init__(array.shape, array.dtype, chunk_size, chunk_size)
        self.array = array


def check_matrix(shape: tuple[int, ...], dtype: Any, what: str = "Y") -> None:
    """Refuse what is not a matrix of floating-point samples."""
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


def as_source(Y: Any, chunk_size: int) -> Source:
    """Wrap samples of any accepted kind.

    Parameters
    ----------
    Y : ndarray, dask array, xarray.DataArray or path/URL of a Zarr store, (n_samples, n_features)
    """
    if isinstance(Y, Source):
        return Y
    if isinstance(Y, str | os.PathLike):
        return StoreSource(open_rows(os.fspath(Y)), chunk_size)
    if isinstance(Y, xr.Dataset):
        if "activations" not in Y:
            names = ", ".join(map(str, Y.data_vars)) or "none"
            raise InputError(
                f"the Dataset has no variable `activations` (it has: {names}); pass ds['name'] instead"
            )
        Y = Y["activations"]
    if isinstance(Y, xr.DataArray):
        Y = Y.data
    if isinstance(Y, da.Array):
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
        Y = np.asarray(Y)
    check_matrix(Y.shape, Y.dtype)
    return ArraySource(Y, chunk_size)
