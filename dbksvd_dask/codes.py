"""Codes as labelled arrays, as scipy matrices, and back to samples."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
import xarray as xr

from dbksvd_dask.blocks import check_atoms, require_codes
from dbksvd_dask.errors import InputError


def make_codes(atom: Any, coefficient: Any, attributes: dict[str, Any], sample: Any = None) -> xr.Dataset:
    """Codes as a Dataset with `atom` and `coefficient` over (`sample`, `slot`).

    Parameters
    ----------
    atom : (n_samples, k) int32, -1 where empty;  coefficient : (n_samples, k)
    attributes : n_atoms at least
    sample : coordinate of the samples, if the input had one
    """
    dims = ("sample", "slot")
    coords = {} if sample is None else {"sample": sample}
    return xr.Dataset(
        {"atom": (dims, atom), "coefficient": (dims, coefficient)}, coords=coords, attrs=dict(attributes)
    )


def _pair(codes: xr.Dataset) -> tuple[Any, Any]:
    """Check that a Dataset holds codes, and give its two arrays."""
    require_codes(codes)
    return codes["atom"].data, codes["coefficient"].data


def codes_to_csr(codes: xr.Dataset, n_atoms: int | None = None) -> sp.csr_array:
    """Codes as a scipy matrix, (n_samples, n_atoms); empty slots and zeros are left out.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    n_atoms : columns; read from the codes' attributes when not given
    """
    if n_atoms is None:
        n_atoms = codes.attrs.get("n_atoms")
        if n_atoms is None:
            raise InputError("these codes do not say how many atoms there are; pass n_atoms=")
    atom, coefficient = (np.asarray(a) for a in _pair(codes))
    check_atoms(atom, int(n_atoms))
    used = (atom >= 0) & (coefficient != 0)
    indptr = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    matrix = sp.csr_array((coefficient[used], atom[used], indptr), shape=(atom.shape[0], int(n_atoms)))
    matrix.sort_indices()
    return matrix


def _decode_block(
    atom: np.ndarray, coefficient: np.ndarray, D: np.ndarray, mean: Any, first_sample: int = 0
) -> np.ndarray:
    """Reconstruct a block of samples: (n, n_features)."""
    check_atoms(atom, D.shape[0], first_sample)
    used = atom >= 0
    indptr = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    X = sp.csr_array((coefficient[used], atom[used], indptr), shape=(atom.shape[0], D.shape[0]))
    Y = np.asarray(X @ D)
    return Y if mean is None else (Y + mean).astype(D.dtype)


def _decode_lazily(atom: Any, coefficient: Any, D: Any, mean: Any, block_info: Any = None) -> np.ndarray:
    first = block_info[0]["array-location"][0][0] if block_info else 0
    return _decode_block(atom, coefficient, D, mean, first)


def decode(codes: xr.Dataset, D: np.ndarray, mean: np.ndarray | None = None) -> Any:
    """Samples from codes, ``X D + mean``: ndarray, or Dask array for lazy codes, (n_samples, n_features).

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    D : ndarray of shape (n_atoms, n_features)
    mean : ndarray of shape (n_features,), or None
    """
    atom, coefficient = _pair(codes)
    if isinstance(atom, da.Array):
        rows = atom.rechunk({1: -1}), coefficient.rechunk({1: -1})
        return da.map_blocks(
            _decode_lazily, *rows, D=D, mean=mean, dtype=D.dtype, chunks=(rows[0].chunks[0], (D.shape[1],))
        )
    return _decode_block(np.asarray(atom), np.asarray(coefficient), D, mean)


def decode_csr(X: Any, D: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """Samples from codes as a scipy matrix, ``X D + mean``: ndarray of shape (n_samples, n_features).

    Parameters
    ----------
    X : scipy sparse array of shape (n_samples, n_atoms), as `codes_to_csr` gives it
    D : ndarray of shape (n_atoms, n_features)
    mean : ndarray of shape (n_features,), or None
    """
    if X.shape[1] != D.shape[0]:
        raise InputError(
            f"codes have {X.shape[1]} columns but the dictionary has {D.shape[0]} atoms; use those of one fit"
        )
    try:
        X = sp.csr_array(X)
        X.check_format(full_check=True)  # SciPy multiplies whatever its index arrays say
    except ValueError as error:
        raise InputError(f"these codes are not a valid sparse array: {error}") from error
    Y = np.asarray(X @ D)
    return Y if mean is None else (Y + mean).astype(D.dtype)
