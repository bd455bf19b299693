"""What every export requires of a dictionary and of its target folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store._system import NO_ROOM
from dbksvd_dask.store.atomic import REFUSED, aside, cannot_write, publish
from dbksvd_dask.store.paths import PathLike

# Readers do not normalise: they use the product with an atom as its coefficient. SAEBench warns from 2e-5.
UNIT_TOLERANCE = 1e-5
EXPORT_DTYPES = ("float32", "float64")


def check_exportable(dictionary: Dictionary) -> None:
    """Refuse a dictionary that another tool would misread.

    Raises
    ------
    InputError
        When the atoms are not a matrix of float32 or float64, not finite or not of unit norm, or when the mean
        does not fit them.
    """
    atoms, mean = np.asarray(dictionary.atoms), dictionary.mean
    if atoms.ndim != 2 or 0 in atoms.shape:
        raise InputError(f"the dictionary has shape {atoms.shape}; it must be (n_atoms, n_features), not empty")
    if atoms.dtype.name not in EXPORT_DTYPES:
        raise InputError(
            f"the dictionary is of dtype {atoms.dtype}; an export needs {' or '.join(EXPORT_DTYPES)}: "
            "convert with atoms.astype('float32') and normalise again"
        )
    if not np.isfinite(atoms).all():
        bad = int(np.flatnonzero(~np.isfinite(atoms).all(axis=1))[0])
        raise InputError(f"atom {bad} holds values that are not finite; this dictionary is damaged")
    norms = np.linalg.norm(atoms.astype(np.float64), axis=1)
    worst = int(np.abs(norms - 1.0).argmax())
    if abs(norms[worst] - 1.0) > UNIT_TOLERANCE:
        raise InputError(
            f"atom {worst} has norm {norms[worst]:.6g}; an export needs atoms of unit norm: divide by "
            "np.linalg.norm(atoms, axis=1, keepdims=True), or read the file with `dbksvd import-dictionary`"
        )
    if mean is not None and (np.shape(mean) != atoms.shape[1:] or not np.isfinite(mean).all()):
        raise InputError(
            f"the mean has shape {np.shape(mean)}; it must be {atoms.shape[1:]} and finite, like one sample"
        )


def encode_spec(dictionary: Dictionary, k: int | None = None) -> EncodeSpec:
    """Return the encoder that belongs to a dictionary, from the parameters of its fit.

    Parameters
    ----------
    dictionary : Dictionary
    k : most nonzeros per sample; default: that of the fit
    """
    if dictionary.weights is not None and k is None:
        raise InputError(
            "this dictionary encodes with frequency_prior=True, which other tools do not support; "
            "give k=N to export it with at most N nonzeros per sample instead"
        )
    return dictionary.encode_spec({"k": k})


def encoding_params(dictionary: Dictionary, k: int | None = None) -> dict[str, Any]:
    """Return parameters and, under `threshold`, what the fit learned, from which `encode_spec` follows."""
    params = dict(dictionary.params)
    if k is not None:
        params |= {"k": k, "sparsity": "max", "max_nonzeros": None, "frequency_prior": False}
    elif "threshold" in dictionary.extra:
        params["threshold"] = dictionary.extra["threshold"]
    return params


def mean_of(dictionary: Dictionary) -> npt.NDArray[Any]:
    """Return the mean in the dtype of the atoms, zeros where there is none: (n_features,)."""
    if dictionary.mean is None:
        return np.zeros(dictionary.n_features, dictionary.atoms.dtype)
    return np.asarray(dictionary.mean, dictionary.atoms.dtype)


@contextlib.contextmanager
def new_folder(path: PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the block succeeds.

    Raises
    ------
    StoreError
        When `path` exists and `overwrite` is not set, or it holds anything else than an export.
    """
    target = Path(os.fspath(path))
    if os.path.lexists(target) and not overwrite:
        raise StoreError(f"{target} already exists; choose another folder, or replace it with overwrite=True")
    work = Path(aside(target))
    shutil.rmtree(work, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        yield work
        _require_replaceable(target, set(os.listdir(work)))
        publish(work, target, overwrite=overwrite)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        if error.errno not in (*NO_ROOM, *REFUSED):
            raise
        raise cannot_write(target, error) from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _require_replaceable(target: Path, names: set[str]) -> None:
    """Refuse to replace a file, or a folder with other content than `names`: a wrong name must not cost files."""
    if not os.path.lexists(target):
        return
    other = sorted(set(os.listdir(target)) - names) if target.is_dir() else [target.name]
    if other:
        raise StoreError(
            f"{target} holds {other[0]}, which is not part of an export; it is not replaced, even with "
            "overwrite=True; choose another folder, or remove it yourself"
        )
