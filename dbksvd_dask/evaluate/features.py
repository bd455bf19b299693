"""What a probe reads: columns of sparse codes or of a dense matrix, block by block.

Both kinds answer the same two questions without ever forming an array of samples by atoms: the sum of every
column within each class, and a handful of columns as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import CodeBlocks, check_codes, check_groups, iter_codes
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.codes import class_sums
from dbksvd_dask.kernels.moments import Float64Array

DenseBlocks = Callable[[], Iterable[ArrayLike]]


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of the features; rows that are zero in all of them may be left out.

    Attributes
    ----------
    rows : int64 ndarray of shape (n_rows,)
        Increasing numbers of the samples.
    values : float64 ndarray of shape (n_rows, n_columns)
    """

    rows: NDArray[np.int64]
    values: Float64Array


class Features(Protocol):
    """A feature matrix of shape (n_samples, n_columns), held or streamed."""

    @property
    def n_columns(self) -> int:
        """Number of columns: atoms or features."""
        ...

    def count(self) -> int:
        """Count the samples."""
        ...

    def sums(self, group: NDArray[np.int64], n_groups: int) -> Float64Array:
        """Sum of every column within each group, shape (n_groups, n_columns); group -1 is skipped."""
        ...

    def select(self, columns: list[NDArray[np.int64]]) -> Iterator[Columns]:
        """Yield the requested sets of columns, one after the other."""
        ...


class CodeFeatures:
    """Sparse codes as features: a sample's value in column j is the coefficient of atom j.

    Parameters
    ----------
    blocks : callable returning an iterable of (atom, coefficient)
        Called once per pass; each pair has shape (rows, n_slots).
    n_atoms : int
    """

    def __init__(self, blocks: CodeBlocks, n_atoms: int) -> None:
        self._blocks = blocks
        self._n_atoms = n_atoms

    @classmethod
    def from_arrays(cls, atom: ArrayLike, coefficient: ArrayLike, n_atoms: int) -> "CodeFeatures":
        """Wrap codes held in memory, each array of shape (n_samples, n_slots)."""
        pair = check_codes(atom, coefficient, n_atoms)
        return cls(lambda: [pair], n_atoms)

    @property
    def n_columns(self) -> int:
        """Number of atoms."""
        return self._n_atoms

    def count(self) -> int:
        """Count the samples."""
        return sum(atom.shape[0] for atom, _ in iter_codes(self._blocks, self._n_atoms))

    def sums(self, group: NDArray[np.int64], n_groups: int) -> Float64Array:
        """Sum of every column within each group, shape (n_groups, n_atoms)."""
        out = np.zeros((n_groups, self._n_atoms))
        groups, first = kernel_input(group, np.int64), 0
        for atom, coefficient in iter_codes(self._blocks, self._n_atoms):
            check_groups(groups, n_groups, first + atom.shape[0])
            class_sums(atom, coefficient, groups[first : first + atom.shape[0]], out)
            first += atom.shape[0]
        return out

    def select(self, columns: list[NDArray[np.int64]]) -> Iterator[Columns]:
        """Return sets of columns, each on the samples where one of its atoms is active."""
        wanted = np.unique(np.concatenate(columns))
        rows, places, values = self._entries(wanted)
        starts = np.searchsorted(places, np.arange(wanted.size + 1))
        for asked in columns:
            parts = [slice(starts[p], starts[p + 1]) for p in np.searchsorted(wanted, asked)]
            held = np.unique(np.concatenate([rows[p] for p in parts]))
            out = np.zeros((held.size, asked.size))
            for c, part in enumerate(parts):
                # an atom that a row names twice contributes both coefficients
                np.add.at(out[:, c], np.searchsorted(held, rows[part]), values[part])
            yield Columns(held, out)

    def _entries(self, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        """Return sample, position in `wanted` and coefficient of the active slots of wanted atoms, by position."""
        position = np.full(self._n_atoms + 1, -1, np.int64)  # the last place serves atom -1
        position[wanted] = np.arange(wanted.size)
        rows, places, values = [], [], []
        first = 0
        for atom, coefficient in iter_codes(self._blocks, self._n_atoms):
            place = position[atom]
            i, s = np.nonzero((place >= 0) & (coefficient != 0))
            rows.append(i + first)
            places.append(place[i, s])
            values.append(coefficient[i, s])
            first += atom.shape[0]
        order = np.argsort(np.concatenate(places), kind="stable")
        return np.concatenate(rows)[order], np.concatenate(places)[order], np.concatenate(values)[order]


class DenseFeatures:
    """A dense matrix as features, such as the raw activations.

    Parameters
    ----------
    blocks : callable returning an iterable of array_like of shape (rows, n_columns)
        Called once per pass.
    n_columns : int
    """

    def __init__(self, blocks: DenseBlocks, n_columns: int) -> None:
        self._blocks = blocks
        self._n_columns = n_columns

    @classmethod
    def from_array(cls, Y: ArrayLike) -> "DenseFeatures":
        """Wrap a matrix held in memory, shape (n_samples, n_columns)."""
        held = np.asarray(Y)
        if held.ndim != 2:
            raise InputError(f"features must have shape (n_samples, n_columns), received {held.shape}")
        return cls(lambda: [held], held.shape[1])

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return self._n_columns

    def count(self) -> int:
        """Count the samples."""
        return sum(block.shape[0] for block in self._iterate())

    def sums(self, group: NDArray[np.int64], n_groups: int) -> Float64Array:
        """Sum of every column within each group, shape (n_groups, n_columns)."""
        out = np.zeros((n_groups, self._n_columns))
        first = 0
        for block in self._iterate():
            groups = group[first : first + block.shape[0]]
            for g in np.unique(groups[groups >= 0]):
                out[g] += block[groups == g].sum(axis=0, dtype=np.float64)
            first += block.shape[0]
        return out

    def select(self, columns: list[NDArray[np.int64]]) -> Iterator[Columns]:
        """Return sets of columns on all samples."""
        wanted = np.unique(np.concatenate(columns))
        held = np.concatenate([block[:, wanted] for block in self._iterate()])
        rows = np.arange(held.shape[0])
        for asked in columns:
            yield Columns(rows, held[:, np.searchsorted(wanted, asked)].astype(np.float64))

    def _iterate(self) -> Iterator[NDArray[Any]]:
        for block in self._blocks():
            array = np.asarray(block)
            if array.ndim != 2 or array.shape[1] != self._n_columns:
                raise InputError(f"expected blocks of {self._n_columns} columns, received shape {array.shape}")
            yield array
