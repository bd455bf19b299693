"""Dictionaries and checkpoints on disk.

A dictionary is a Zarr group with `dictionary` (atom, feature) and `mean` (feature,), and in its attributes the
format, the parameters, the source, the iteration and the history. The folder of a fit ("run") holds one such
group per checkpoint, ``checkpoint-000040.zarr``: written aside, then renamed, the one before kept. A run can be
given wherever a dictionary is wanted; its newest checkpoint is meant. Nothing is pickled.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

import dbksvd_dask
from dbksvd_dask.errors import MismatchError, StoreError
from dbksvd_dask.reprs import dictionary_html
from dbksvd_dask.store.atomic import aside, fsync_path, publish

FORMAT = "dbksvd-dictionary"
VERSION = 1
KEEP = 2  # checkpoints of a run that are kept: the newest and the one before

_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.zarr")

_ARRAYS = ("dictionary", "mean", "counts", "previous", "weights")

PathLike = str | os.PathLike[str]


@dataclass
class Dictionary:
    """A dictionary with everything needed to encode with it, or to go on fitting it.

    Attributes
    ----------
    atoms : (n_atoms, n_features), unit rows
    mean : (n_features,) float64 taken off every sample, or None
    params : parameters of the fit (see `params.FitParams.to_json`); at least n_atoms and k
    source : what it was fitted on
    iteration : outer batches done
    history : per iteration, see `DBKSVD.history_`
    counts : (n_atoms,) samples per atom in the last batch, or None
    previous : (n_atoms, n_features) atoms one iteration ago, which a fit with momentum goes on from, or None
    extra : further attributes (thresholds, stages, provenance)
    weights : (n_atoms,) by which the thresholds of atoms differ when encoding, or None
    """

    atoms: np.ndarray
    mean: np.ndarray | None
    params: dict[str, Any]
    source: str = ""
    iteration: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    counts: np.ndarray | None = None
    previous: np.ndarray | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None

    @property
    def n_atoms(self) -> int:
        """Number of atoms."""
        return int(self.atoms.shape[0])

    @property
    def n_features(self) -> int:
        """Number of features."""
        return int(self.atoms.shape[1])

    def to_xarray(self) -> xr.Dataset:
        """Dataset with `dictionary` (atom, feature) and `mean` (feature,)."""
        mean = np.zeros(self.n_features) if self.mean is None else self.mean
        return xr.Dataset(
            {"dictionary": (("atom", "feature"), self.atoms), "mean": (("feature",), mean)},
            attrs={"iteration": self.iteration, **self.params},
        )

    def __repr__(self) -> str:
        """One line: shape, k, batches and source."""
        shape = f"{self.n_atoms} atoms of {self.n_features} features, k={self.params.get('k')}"
        where = f", fitted on {self.source}" if self.source else ""
        return f"<Dictionary: {shape}, {self.iteration} batches{where}>"

    def _repr_html_(self) -> str:
        return dictionary_html(self.atoms, self.params, self.history, self.iteration, self.source)


def _plain(value: Any) -> Any:
    """JSON has no NaN: history values that are not finite travel as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def save_dictionary(path: PathLike, dictionary: Dictionary, *, overwrite: bool = False) -> str:
    """Write a dictionary: aside first, then renamed to `path`."""
    target = os.fspath(path)
    if os.path.exists(target) and not overwrite:
        raise StoreError(f"{target} exists already; choose another path or say overwrite (--force)")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    work = aside(target)
    shutil.rmtree(work, ignore_errors=True)
    try:
        _write(work, dictionary)
        _to_disk(work)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise StoreError(
            f"could not write {target}: {error.strerror or error}; what was there before is untouched"
        ) from error
    publish(work, target, overwrite=overwrite)
    return target


def _to_disk(folder: str) -> None:
    """Force everything in a folder to the disk: a rename must not outlive the files it publishes."""
    for where, _, names in os.walk(folder):
        for name in names:
            fsync_path(os.path.join(where, name))
        fsync_path(where)


def _write(path: str, dictionary: Dictionary) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=3)
    arrays = {
        "dictionary": (dictionary.atoms, ("atom", "feature")),
        "mean": (dictionary.mean, ("feature",)),
        "counts": (dictionary.counts, ("atom",)),
        "previous": (dictionary.previous, ("atom", "feature")),
        "weights": (dictionary.weights, ("atom",)),
    }
    checksums = {
        name: _put(group, name, values, dims) for name, (values, dims) in arrays.items() if values is not None
    }
    group.attrs.update(
        {
            "format": FORMAT,
            "format_version": VERSION,
            "package_version": dbksvd_dask.__version__,
            "params": dictionary.params,
            "source": dictionary.source,
            "iteration": dictionary.iteration,
            "history": {k: [_plain(v) for v in values] for k, values in dictionary.history.items()},
            "extra": dictionary.extra,
            "n_atoms": dictionary.n_atoms,
            "n_features": dictionary.n_features,
            "crc32": checksums,
        }
    )


def _put(group: zarr.Group, name: str, values: np.ndarray, dims: tuple[str, ...]) -> int:
    """Write one array; its checksum."""
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=values.shape,
        compressors=None,
        dimension_names=dims,
        config={"write_empty_chunks": True},
    )
    array[...] = values
    return _checksum(values)


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data)


def open_dictionary(path: PathLike) -> Dictionary:
    """Read a dictionary, or the newest checkpoint of a run.

    Parameters
    ----------
    path : folder written by `save_dictionary`, or the folder of a fit
    """
    where = os.fspath(path)
    if not os.path.exists(where):
        raise StoreError(f"{where} does not exist; give a dictionary or the folder of a fit")
    if not os.path.exists(os.path.join(where, "zarr.json")):
        newest = latest_checkpoint(where)
        if newest is None:
            raise StoreError(f"{where} holds no dictionary and no checkpoint; give the folder of a fit")
        where = newest
    try:
        group = zarr.open_group(where, mode="r")
        attrs = dict(group.attrs)
        _check_format(where, attrs)
        return _read(group, attrs)
    except (KeyError, ValueError, OSError) as error:
        if isinstance(error, StoreError | MismatchError):
            raise
        raise StoreError(f"{where} cannot be read as a dictionary: {error}; it may be truncated") from error


def _check_format(where: str, attrs: dict[str, Any]) -> None:
    if attrs.get("format") != FORMAT:
        raise StoreError(f"{where} is {attrs.get('format', 'of no known format')!r}, not a {FORMAT!r}")
    if attrs.get("format_version") != VERSION:
        raise MismatchError(
            f"{where} has format version {attrs.get('format_version')} (written by dbksvd-dask "
            f"{attrs.get('package_version')}); this is dbksvd-dask {dbksvd_dask.__version__}, which reads version "
            f"{VERSION}; install a matching version"
        )


def _read(group: zarr.Group, attrs: dict[str, Any]) -> Dictionary:
    arrays = {name: np.asarray(group[name][...]) for name in _ARRAYS if name in group}
    for name, expected in attrs.get("crc32", {}).items():
        # Zarr reads a chunk that is not there as zeros, without a word
        if name not in arrays or _checksum(arrays[name]) != expected:
            raise StoreError(f"{group.store_path} is damaged: its array `{name}` is not what was written")
    atoms = arrays["dictionary"]
    if not np.allclose(np.linalg.norm(atoms.astype(np.float64), axis=1), 1.0, atol=1e-3):
        raise StoreError("atoms are not of unit norm, so a chunk of the dictionary is missing or damaged")
    history = {
        name: [math.nan if v is None else float(v) for v in values] for name, values in attrs["history"].items()
    }
    return Dictionary(
        atoms,
        arrays.get("mean"),
        dict(attrs["params"]),
        str(attrs["source"]),
        int(attrs["iteration"]),
        history,
        arrays.get("counts"),
        arrays.get("previous"),
        dict(attrs.get("extra", {})),
        arrays.get("weights"),
    )


# ---------------------------------------------------------------------------------------------- runs


def checkpoints(run: PathLike) -> list[str]:
    """Checkpoints of a run, oldest first."""
    if not os.path.isdir(run):
        return []
    found = [(int(m[1]), name) for name in os.listdir(run) if (m := _CHECKPOINT.fullmatch(name))]
    return [os.path.join(os.fspath(run), name) for _, name in sorted(found)]


def latest_checkpoint(run: PathLike) -> str | None:
    """Newest checkpoint of a run, or None."""
    found = checkpoints(run)
    return found[-1] if found else None


def write_checkpoint(run: PathLike, dictionary: Dictionary) -> str:
    """Publish a checkpoint, then remove all but the newest `KEEP`."""
    path = save_dictionary(
        os.path.join(os.fspath(run), f"checkpoint-{dictionary.iteration:06d}.zarr"),
        dictionary,
        overwrite=True,
    )
    for old in checkpoints(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return path
