"""Checks of what users hand in, each with a message that says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.kernels._jit import kernel_input


def require_integers(dtype: Any) -> None:
    """Refuse indices of atoms that are not integers."""
    if not np.issubdtype(dtype, np.integer):
        raise InputError(f"atom must hold integers, received dtype {dtype}; -1 marks an empty slot")


def check_atoms(atom: NDArray[Any], n_atoms: int, first_sample: int = 0) -> None:
    """Refuse indices outside a dictionary of `n_atoms` atoms: kernels use them unchecked.

    Parameters
    ----------
    atom : integer ndarray of shape (n_samples, n_slots)
    n_atoms : int
    first_sample : int, default 0
        Number of the first of these samples, for the message.
    """
    wrong = describe_wrong_atom(atom, n_atoms, first_sample)
    if wrong is not None:
        raise MismatchError(f"these codes do not fit: {wrong}; pass the dictionary these codes were made with")


def describe_wrong_atom(atom: NDArray[Any], n_atoms: int, first_sample: int = 0) -> str | None:
    """Name the first sample with an index outside -1 to n_atoms - 1; None when there is none.

    Parameters
    ----------
    atom, n_atoms, first_sample
        As in `check_atoms`.
    """
    if atom.size == 0 or (int(atom.min()) >= -1 and int(atom.max()) < n_atoms):
        return None
    row, slot = np.argwhere((atom < -1) | (atom >= n_atoms))[0].tolist()
    return (
        f"sample {first_sample + row} names atom {int(atom[row, slot])}, but the dictionary has {n_atoms} atoms, "
        f"0 to {n_atoms - 1}"
    )


CodeBlock = tuple[NDArray[np.int32], NDArray[Any]]
CodeBlocks = Callable[[], Iterable[tuple[Any, Any]]]

# Training gives norm 1 up to float32 rounding; a decoder that was never normalised is far off.
NORM_TOLERANCE = 1e-3


def check_codes(atom: ArrayLike, coefficient: ArrayLike, n_atoms: int, first_sample: int = 0) -> CodeBlock:
    """Bring one block of codes into kernel form and check that it can belong to `n_atoms` atoms.

    Parameters
    ----------
    atom, coefficient : array_like of shape (n_samples, n_slots)
    n_atoms : int
    first_sample : int, default 0
        Number of the block's first sample, for messages.

    Returns
    -------
    tuple of (int32 ndarray, float ndarray), each of shape (n_samples, n_slots)
    """
    atoms = np.asarray(atom)
    values = np.asarray(coefficient)
    if atoms.ndim != 2 or atoms.shape != values.shape:
        raise InputError(
            f"codes need two arrays of one shape (n_samples, n_slots); "
            f"received atom {atoms.shape} and coefficient {values.shape}"
        )
    require_integers(atoms.dtype)
    check_atoms(atoms, n_atoms, first_sample)
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    return kernel_input(atoms, np.int32), kernel_input(values, dtype)


def iter_codes(blocks: CodeBlocks, n_atoms: int) -> Iterator[CodeBlock]:
    """Walk once over the blocks of codes, checking each."""
    first = 0
    for atom, coefficient in blocks():
        block = check_codes(atom, coefficient, n_atoms, first)
        yield block
        first += block[0].shape[0]


def check_groups(group: NDArray[np.int64], n_groups: int, n_samples: int) -> None:
    """Require one group for each sample, below `n_groups`; a negative one leaves its sample out.

    Parameters
    ----------
    group : int64 ndarray of shape (n_samples,)
    n_groups : int
    n_samples : int
    """
    if group.ndim != 1 or group.size < n_samples:
        raise InputError(f"received groups of shape {group.shape} for {n_samples} samples; pass one per sample")
    if group.size and int(group.max()) >= n_groups:
        sample = int(np.argmax(group))
        raise InputError(f"sample {sample} is in group {int(group[sample])}; groups are 0 to {n_groups - 1}")


def check_dictionary(D: ArrayLike, name: str = "dictionary") -> NDArray[Any]:
    """Require a finite matrix of unit rows.

    Parameters
    ----------
    D : array_like of shape (n_atoms, n_features)
    name : str
        What the message calls it.

    Returns
    -------
    float32 or float64 ndarray of shape (n_atoms, n_features)
    """
    atoms = np.asarray(D)
    if atoms.ndim != 2 or 0 in atoms.shape:
        raise InputError(f"{name} must have shape (n_atoms, n_features), received {atoms.shape}")
    atoms = kernel_input(atoms, np.float64 if atoms.dtype == np.float64 else np.float32)
    norms = np.sqrt(np.einsum("ij,ij->i", atoms, atoms, dtype=np.float64))
    off = np.flatnonzero(~(np.abs(norms - 1.0) <= NORM_TOLERANCE))
    if off.size:
        raise InputError(
            f"{name} has {off.size} rows that are not of norm 1, the first is row {off[0]} with norm "
            f"{norms[off[0]]:.4g}; divide: D / np.linalg.norm(D, axis=1, keepdims=True), and drop zero rows"
        )
    return atoms


def check_same_features(A: NDArray[Any], B: NDArray[Any]) -> None:
    """Require two dictionaries over the same features."""
    if A.shape[1] != B.shape[1]:
        raise MismatchError(
            f"the dictionaries have {A.shape[1]} and {B.shape[1]} features; compare dictionaries of the same "
            "activations"
        )


def encode_labels(labels: Sequence[Any] | NDArray[Any], n_samples: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Turn labels into class numbers.

    Parameters
    ----------
    labels : sequence of length n_samples
        Integers or strings, one per sample.
    n_samples : int

    Returns
    -------
    classes : ndarray of shape (n_classes,)
        Sorted distinct labels.
    codes : int64 ndarray of shape (n_samples,)
        Index of each sample's label in `classes`.
    """
    values = np.asarray(labels)
    if values.ndim != 1 or values.shape[0] != n_samples:
        raise InputError(
            f"received labels of shape {values.shape} for {n_samples} samples; pass one label per sample, "
            "in the order of the samples"
        )
    missing = np.flatnonzero([_is_missing(v) for v in values.tolist()])
    if missing.size:
        raise InputError(
            f"{missing.size} of {n_samples} labels are missing (None, NaN or empty), the first at sample "
            f"{missing[0]}; label every sample, or drop these samples from codes and labels"
        )
    classes, codes = np.unique(values, return_inverse=True)
    if classes.size < 2:
        raise InputError(f"all {n_samples} labels are {str(classes[0])!r}; probing needs at least two classes")
    return classes, codes.astype(np.int64)


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value
