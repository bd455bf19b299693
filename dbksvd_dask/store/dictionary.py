"""Dictionaries and checkpoints on disk.

A dictionary is a Zarr group with `dictionary` (atom, feature) and `mean` (feature,), and in its attributes the
format, the parameters, the source, the iteration and the history. The folder of a fit ("run") holds one such
group per checkpoint, ``checkpoint-000040.zarr``: written aside, then renamed, the one before kept. Arrays and
attributes have checksums, which are compared whenever a dictionary is opened. A run can be
given wherever a dictionary is wanted; its newest checkpoint is meant. Both are local folders. Nothing is pickled.
"""

from __future__ import annotations

import json
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
from dbksvd_dask.errors import MismatchError, StoreError, brief
from dbksvd_dask.reprs import dictionary_html
from dbksvd_dask.safe_text import redacted, redacted_values
from dbksvd_dask.store import remote
from dbksvd_dask.store.atomic import aside, fsync_path, publish
from dbksvd_dask.store.layout import require_replaceable

FORMAT = "dbksvd-dictionary"
VERSION = 2  # 2: a checksum of the attributes
KEEP = 2  # checkpoints of a run that are kept: the newest and the one before

_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.zarr")
_ZARR_NAMES = ("zarr.json", ".zgroup", ".zarray")

_ARRAYS = ("dictionary", "mean", "counts", "previous", "weights")
ATTRIBUTES_CRC = "attributes_crc32"

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
    target = _local(path, "a dictionary")
    if os.path.exists(target) and not overwrite:
        raise StoreError(f"{target} exists already; choose another path or say overwrite (--force)")
    if os.path.exists(target):
        require_replaceable(target, FORMAT)
    return _publish(target, dictionary)


def _publish(target: str, dictionary: Dictionary) -> str:
    """Write a dictionary, in place of what is there."""
    work = aside(target)
    shutil.rmtree(work, ignore_errors=True)
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        _write(work, dictionary)
        _to_disk(work)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise StoreError(
            f"could not write {target}: {error.strerror or error}; what was there before is untouched"
        ) from error
    publish(work, target, overwrite=True)
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
    attributes = {
        "format": FORMAT,
        "format_version": VERSION,
        "package_version": dbksvd_dask.__version__,
        "params": dictionary.params,
        "source": redacted(dictionary.source),
        "iteration": dictionary.iteration,
        "history": {k: [_plain(v) for v in values] for k, values in dictionary.history.items()},
        "extra": redacted_values(dictionary.extra),
        "n_atoms": dictionary.n_atoms,
        "n_features": dictionary.n_features,
        "crc32": checksums,
    }
    group.update_attributes({**attributes, ATTRIBUTES_CRC: attributes_checksum(attributes)})


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
    """CRC-32 of an array: of its dtype and shape, which the metadata of Zarr tell, and of its bytes."""
    head = zlib.crc32(f"{values.dtype.str} {values.shape}".encode())
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, head)


def attributes_checksum(attributes: dict[str, Any]) -> int:
    """CRC-32 of all attributes but this checksum itself, however JSON spells and orders them."""
    known = {name: value for name, value in attributes.items() if name != ATTRIBUTES_CRC}
    plain = json.loads(json.dumps(known))  # as they will be read: names are texts, tuples are lists
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def open_dictionary(path: PathLike) -> Dictionary:
    """Read a dictionary, or the newest checkpoint of a run.

    Parameters
    ----------
    path : folder written by `save_dictionary`, or the folder of a fit
    """
    where = _local(path, "a dictionary or a run")
    if not os.path.exists(where):
        raise StoreError(f"{where} does not exist; give a dictionary or the folder of a fit")
    if is_zarr(where):
        return _open(where)
    if not checkpoints(where):
        raise StoreError(f"{where} holds no dictionary and no checkpoint; give the folder of a fit")
    readable, dictionary, damaged = readable_checkpoint(where)
    if damaged:
        raise StoreError(
            f"{damaged[0]}; {readable} can be read: give that one, or go on from it with resume=True (--resume)"
        )
    return dictionary


def _open(where: str) -> Dictionary:
    """Read the dictionary in the Zarr group `where`."""
    try:
        group = remote.open_group(where)
        attrs = dict(group.attrs)
        _check_format(where, attrs)
        return _read(where, group, attrs)
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        if isinstance(error, StoreError | MismatchError):
            raise
        raise StoreError(f"{where} cannot be read as a dictionary: {brief(error)}; it may be truncated") from error


def verify_dictionary(path: PathLike) -> int:
    """Compare every array of a dictionary, or of all checkpoints of a run, with its checksum.

    Returns
    -------
    int
        The number of arrays that were compared.

    Raises
    ------
    StoreError
        When one is missing or differs, or there are no checksums.
    """
    where = _local(path, "a dictionary or a run")
    count = 0
    for one in [where] if is_zarr(where) else checkpoints(where):
        _open(one)  # compares them
        checksums = remote.open_group(one).attrs.get("crc32")
        if not isinstance(checksums, dict) or not checksums:
            raise StoreError(f"{one} has no checksums to verify; it was not written by this package")
        count += len(checksums)
    return count


def _check_format(where: str, attrs: dict[str, Any]) -> None:
    if attrs.get("format") != FORMAT:
        raise StoreError(f"{where} is {attrs.get('format', 'of no known format')!r}, not a {FORMAT!r}")
    if attrs.get("format_version") != VERSION:
        raise MismatchError(
            f"{where} has format version {attrs.get('format_version')} (written by dbksvd-dask "
            f"{attrs.get('package_version')}); this is dbksvd-dask {dbksvd_dask.__version__}, which reads version "
            f"{VERSION}; install a matching version"
        )


def _read(where: str, group: zarr.Group, attrs: dict[str, Any]) -> Dictionary:
    if attrs.get(ATTRIBUTES_CRC) != attributes_checksum(attrs):
        raise StoreError(f"{where} is damaged: its attributes are not what was written")
    present = [name for name in _ARRAYS if remote.get_array(where, group, name) is not None]
    arrays = {name: remote.read_array(where, group, name) for name in present}
    for name, expected in attrs["crc32"].items():
        # Zarr reads a chunk that is not there as zeros, without a word
        if name not in arrays or _checksum(arrays[name]) != expected:
            raise StoreError(f"{where} is damaged: its array `{name}` is not what was written")
    atoms = arrays["dictionary"]
    if atoms.ndim != 2 or atoms.dtype not in (np.float32, np.float64):
        raise StoreError(f"{where} is damaged: `dictionary` has dtype {atoms.dtype} and shape {atoms.shape}")
    if not np.allclose(np.linalg.norm(atoms.astype(np.float64), axis=1), 1.0, atol=1e-3):
        raise StoreError("atoms are not of unit norm, so a chunk of the dictionary is missing or damaged")
    _check_shapes(where, arrays)
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


def _check_shapes(where: str, arrays: dict[str, np.ndarray]) -> None:
    """Refuse arrays whose shapes do not follow from that of the atoms: kernels take them as they are."""
    n_atoms, n_features = arrays["dictionary"].shape
    shapes = {
        "mean": (n_features,),
        "counts": (n_atoms,),
        "previous": (n_atoms, n_features),
        "weights": (n_atoms,),
    }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise StoreError(f"{where} is damaged: `{name}` has shape {arrays[name].shape} instead of {shape}")


# ---------------------------------------------------------------------------------------------- places


def is_zarr(folder: PathLike) -> bool:
    """Whether a folder is itself a Zarr group or array."""
    return any(os.path.exists(os.path.join(folder, name)) for name in _ZARR_NAMES)


def _local(path: PathLike, what: str) -> str:
    """Path in the local file system; URLs of others are refused."""
    if remote.is_remote(path):
        raise StoreError(f"{what} must be a local folder, got {path}; use a local path and copy the folder")
    return remote.normalise(path)


def run_folder(path: PathLike) -> str:
    """Path of a folder that holds a fit or may take one; what else lies in it, logs or notes, is left alone.

    Raises
    ------
    StoreError
        When it is on a remote, or is something else already: a file or a store.
    """
    run = _local(path, "a run")
    if not os.path.lexists(run):
        return run
    if not os.path.isdir(run):
        raise StoreError(f"{run} is a file, and a run is a folder; choose another name for the run")
    if is_zarr(run):
        raise StoreError(f"{run} is a Zarr store, not the folder of a fit; choose another folder for the run")
    return run


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


def readable_checkpoint(run: PathLike) -> tuple[str, Dictionary, list[StoreError]]:
    """Newest checkpoint of a run that can be read, and what is wrong with those after it.

    Raises
    ------
    StoreError
        When none can be read: what is wrong with the newest.
    """
    damaged: list[StoreError] = []
    for path in reversed(checkpoints(run)):
        try:
            return path, _open_checkpoint(path), damaged
        except StoreError as error:
            damaged.append(error)
    raise damaged[0]


def _open_checkpoint(path: str) -> Dictionary:
    """Read a checkpoint; one under the name of another iteration would be taken for the wrong one."""
    dictionary = _open(path)
    if os.path.basename(path) != _checkpoint_name(dictionary.iteration):
        raise StoreError(f"{path} is damaged: it holds iteration {dictionary.iteration}")
    return dictionary


def _checkpoint_name(iteration: int) -> str:
    return f"checkpoint-{iteration:06d}.zarr"


def remove_checkpoints(run: PathLike) -> None:
    """Delete the fit in a folder; what is deleted in part only goes no more by the name of a checkpoint."""
    for path in checkpoints(run):
        doomed = f"{path}.replaced"
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise StoreError(
                f"could not delete {path}: {error.strerror or error}; make it writable or choose another folder"
            ) from error


def write_checkpoint(run: PathLike, dictionary: Dictionary) -> str:
    """Publish a checkpoint, then remove all but the newest `KEEP`."""
    name = _checkpoint_name(dictionary.iteration)
    path = _publish(os.path.join(_local(run, "a run"), name), dictionary)  # also in place of a damaged one
    remove_old_checkpoints(run)
    return path


def remove_old_checkpoints(run: PathLike) -> None:
    """Remove all but the newest `KEEP` checkpoints."""
    for old in checkpoints(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
