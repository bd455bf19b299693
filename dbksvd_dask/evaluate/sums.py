"""What an encode job learns about a range of samples besides their codes, mergeable and storable.

The sums of every range are kept apart until the job is finished and are then merged in the order of the
ranges, so they do not depend on who encoded what, nor when.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask._words import plain
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.codes import CodeMoments, code_moments, code_summary
from dbksvd_dask.evaluate.reconstruction import (
    ReconstructionMoments,
    reconstruction_summary,
)
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.codes import insert_largest, merge_largest
from dbksvd_dask.kernels.moments import Moments


@dataclass(frozen=True, eq=False)
class LargestCoefficients:
    """The samples with the largest ``|coefficient|`` of every atom, largest first.

    Attributes
    ----------
    sample : int64 ndarray of shape (n_atoms, n_top)
        Number of the sample in the store, -1 where there are fewer.
    coefficient : float32 ndarray of shape (n_atoms, n_top)
        Signed, 0 where there are fewer.
    """

    sample: NDArray[np.int64]
    coefficient: NDArray[np.float32]

    @classmethod
    def empty(cls, n_atoms: int, n_top: int) -> Self:
        """Return lists without entries."""
        shape = (n_atoms, n_top)
        return cls(np.full(shape, -1, np.int64), np.zeros(shape, np.float32))

    @classmethod
    def of(
        cls, atom: NDArray[np.int32], coefficient: NDArray[Any], first_sample: int, shape: tuple[int, int]
    ) -> Self:
        """Find the largest coefficients of some codes.

        Parameters
        ----------
        atom, coefficient : ndarray of shape (n, k)
        first_sample : int
            Number of the first of these samples in the store.
        shape : (n_atoms, n_top)
        """
        lists = cls.empty(*shape)
        given = kernel_input(coefficient, np.float32)
        insert_largest(kernel_input(atom, np.int32), given, first_sample, lists.sample, lists.coefficient)
        return lists

    def merge(self, other: Self) -> Self:
        """Return the largest of both, which cover different samples; neither is changed."""
        if self.sample.shape != other.sample.shape:
            raise InputError(f"cannot merge lists of shapes {self.sample.shape} and {other.sample.shape}")
        sample, value = np.empty_like(self.sample), np.empty_like(self.coefficient)
        lists = (self.sample, self.coefficient, other.sample, other.coefficient)
        merge_largest(*map(kernel_input, lists), sample, value)
        return type(self)(sample, value)

    def only(self, sign: int) -> Self:
        """Return the entries of one sign, in the same order, followed by empty places."""
        kept = np.sign(self.coefficient) == sign
        first = np.argsort(~kept, axis=1, kind="stable")
        sample, value = np.where(kept, self.sample, -1), np.where(kept, self.coefficient, np.float32(0))
        return type(self)(np.take_along_axis(sample, first, 1), np.take_along_axis(value, first, 1))


@dataclass(frozen=True, eq=False)
class Extremes:
    """The samples with the largest positive and the largest negative coefficients of every atom.

    Attributes
    ----------
    top, bottom : LargestCoefficients
    """

    top: LargestCoefficients
    bottom: LargestCoefficients

    @classmethod
    def of(
        cls, atom: NDArray[np.int32], coefficient: NDArray[Any], first_sample: int, shape: tuple[int, int]
    ) -> Self:
        """Find both of some codes; parameters as for `LargestCoefficients.of`."""
        given = np.asarray(coefficient)
        sides = (np.maximum(given, 0), np.minimum(given, 0))
        return cls(*(LargestCoefficients.of(atom, side, first_sample, shape) for side in sides))

    def merge(self, other: Self) -> Self:
        """Return the largest of both; neither is changed."""
        return type(self)(self.top.merge(other.top), self.bottom.merge(other.bottom))


@dataclass(frozen=True, eq=False)
class CodeSums:
    """Everything summed over a range of samples and their codes.

    Attributes
    ----------
    codes : sums of the coefficients, per atom
    reconstruction : sums of samples and residual, per feature
    extremes : the samples with the largest coefficients of either sign, per atom
    """

    codes: CodeMoments
    reconstruction: ReconstructionMoments
    extremes: Extremes

    @classmethod
    def of(
        cls,
        reconstruction: ReconstructionMoments,
        atom: NDArray[np.int32],
        coefficient: NDArray[Any],
        first_sample: int,
        shape: tuple[int, int],
    ) -> Self:
        """Sum a range of samples.

        Parameters
        ----------
        reconstruction : sums of these samples and their residual
        atom, coefficient : ndarray of shape (n, k)
        first_sample : int
            Number of the first of these samples in the store.
        shape : (n_atoms, n_top)
        """
        moments = code_moments(atom, coefficient, shape[0])  # first: it checks the indices that both use
        return cls(moments, reconstruction, Extremes.of(atom, coefficient, first_sample, shape))

    def merge(self, other: Self) -> Self:
        """Return the sums of both; neither is changed."""
        return type(self)(
            self.codes.merge(other.codes),
            self.reconstruction.merge(other.reconstruction),
            self.extremes.merge(other.extremes),
        )

    def to_bytes(self) -> bytes:
        """Write the sums as an .npz file; the lists without their empty places."""
        arrays = {
            **_pack("codes", self.codes),
            **_pack("reconstruction", self.reconstruction, skip="moments"),
            **_pack("moments", self.reconstruction.moments),
            **_pack_lists("top", self.extremes.top),
            **_pack_lists("bottom", self.extremes.bottom),
        }
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, find_extremes: Callable[[], Extremes]) -> Self:
        """Invert `to_bytes`.

        Parameters
        ----------
        content : bytes
        find_extremes : callable
            Finds the lists in the codes; called where the bytes were written before lists were kept by sign.
        """
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        by_sign = "bottom_shape" in arrays
        sides = (_unpack_lists(name, arrays) for name in ("top", "bottom")) if by_sign else ()
        extremes = Extremes(*sides) if by_sign else find_extremes()
        moments = Moments(**_unpack("moments", arrays))
        reconstruction = ReconstructionMoments(moments=moments, **_unpack("reconstruction", arrays))
        return cls(CodeMoments(**_unpack("codes", arrays)), reconstruction, extremes)

    def metrics(self) -> dict[str, float | int | None]:
        """Sum up in plain numbers, None where one has no meaning, such as the error of samples all zero."""
        codes = code_summary(self.codes)
        numbers: dict[str, Any] = {field.name: getattr(codes, field.name) for field in fields(codes)}
        if self.reconstruction.moments.n_nonzero_rows:
            whole = reconstruction_summary(self.reconstruction)
            explained = whole.variance_explained
            numbers |= {field.name: getattr(whole, field.name) for field in fields(whole)}
            numbers["variance_explained"] = explained.value
            numbers["n_constant_features"] = explained.n_left_out
        return {name: plain(value) for name, value in sorted(numbers.items())}


def _pack(prefix: str, sums: Any, skip: str = "") -> dict[str, Any]:
    return {f"{prefix}_{f.name}": getattr(sums, f.name) for f in fields(sums) if f.name != skip}


def _pack_lists(prefix: str, lists: LargestCoefficients) -> dict[str, Any]:
    """Pack lists without their empty places."""
    filled = lists.sample >= 0
    return {
        f"{prefix}_shape": np.array(filled.shape),
        f"{prefix}_filled": filled.sum(axis=1),
        f"{prefix}_sample": lists.sample[filled],
        f"{prefix}_coefficient": lists.coefficient[filled],
    }


def _unpack_lists(prefix: str, arrays: dict[str, Any]) -> LargestCoefficients:
    lists = LargestCoefficients.empty(*(int(n) for n in arrays[f"{prefix}_shape"]))
    filled = np.arange(lists.sample.shape[1]) < arrays[f"{prefix}_filled"][:, None]
    lists.sample[filled] = arrays[f"{prefix}_sample"]
    lists.coefficient[filled] = arrays[f"{prefix}_coefficient"]
    return lists


def _unpack(prefix: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Collect the fields of one prefix, numbers as plain Python numbers."""
    start = f"{prefix}_"
    found = {name[len(start) :]: array for name, array in arrays.items() if name.startswith(start)}
    return {name: array.item() if array.ndim == 0 else array for name, array in found.items()}
