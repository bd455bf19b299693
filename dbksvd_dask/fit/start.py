"""What a fit begins with: its precision, checked samples, a given dictionary, momentum."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError
from dbksvd_dask.graph.sources import ArraySource
from dbksvd_dask.kernels.scale import rows_near_one
from dbksvd_dask.plan import units


def working_dtype(dtype: Any) -> np.dtype:
    """Precision of a fit: float64 for float64 samples, float32 for everything else."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def check_finite(source: ArraySource, chunk_size: int, dtype: Any) -> None:
    """Look through an array in memory for NaN and infinity before anything starts."""
    for a, b in units.split_rows(source.n_samples, chunk_size):
        part = source.array[a:b]
        if not np.isfinite(part).all():
            rows = source.take(np.arange(a, b))
            bad = np.flatnonzero(~np.isfinite(part).all(axis=1))
            what = "NaN" if np.isnan(part[bad[0]]).any() else "infinity"
            raise InputError(
                f"Y contains {what}: {rows.where(int(bad[0]))}, {bad.size} such row{'s' * (bad.size > 1)} in that "
                "chunk; drop them with Y[np.isfinite(Y).all(axis=1)]"
            )


def extrapolated(D: np.ndarray, previous: np.ndarray | None, momentum: float) -> np.ndarray:
    """Dictionary a little further along its last change, rows of unit norm: (n_atoms, n_features).

    Atoms drift in the same direction for many iterations; encoding a batch with where they are heading spares
    about a third of the iterations.
    """
    if previous is None or momentum == 0:
        return D
    ahead = D + D.dtype.type(momentum) * (D - previous)
    norms = np.linalg.norm(ahead, axis=1, keepdims=True)
    return np.where(norms > 0, ahead / np.where(norms > 0, norms, 1), D).astype(D.dtype)


def unit_rows(atoms: Any, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Check a given dictionary and normalise its rows: (n_atoms, n_features).

    Rows that are unit vectors to working precision stay as they are, to the bit: a dictionary that a fit returned
    encodes as the fit itself does.
    """
    atoms = np.asarray(atoms)
    if atoms.shape != shape:
        raise InputError(
            f"init has shape {atoms.shape}; it must be (n_atoms, n_features) = {shape}"
            + ("; transpose it with init.T" if atoms.shape == shape[::-1] else "")
        )
    if atoms.dtype.kind != "f" or not np.isfinite(atoms).all():
        raise InputError(f"init must hold finite floating-point values; it has dtype {atoms.dtype}")
    near = rows_near_one(atoms)  # their norms are finite, whatever the scale of the atoms
    norms = np.linalg.norm(near.astype(np.float64), axis=1, keepdims=True)
    if (norms == 0).any():
        row = int(np.flatnonzero(norms == 0)[0])
        raise InputError(f"init row {row} is zero; every atom needs a direction")
    with np.errstate(over="ignore", under="ignore"):  # far from unit norm is far enough
        given = np.linalg.norm(atoms.astype(np.float64), axis=1, keepdims=True)
    unit = np.abs(given - 1) <= 8 * np.finfo(atoms.dtype).eps
    return np.where(unit, atoms, near / norms).astype(dtype)
