"""A dictionary on disk.

A Zarr group with `dictionary` (atom, feature) and `mean` (feature,), and in its attributes the format, the
parameters, the source, the iteration and the history; nothing is pickled. On a remote, which has no rename, the
attributes come last: without them a folder is not a dictionary.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dbksvd_dask
from dbksvd_dask._words import plain
from dbksvd_dask.base.late import late
from dbksvd_dask.base.safe_text import redacted, redacted_values
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import MismatchError, StoreError, brief
from dbksvd_dask.store import paths
from dbksvd_dask.store.atomic import aside, fsync_path, publish
from dbksvd_dask.store.layout import require_replaceable
from dbksvd_dask.store.paths import PathLike

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")

FORMAT = "dbksvd-dictionary"
VERSION = 2  # 2: a checksum of the attributes
_ZARR_NAMES = ("zarr.json", ".zgroup", ".zarray")

# a dictionary without whitening is of version 2 still, and opens in older releases
WHITENED_VERSION = 3
_ARRAYS = ("dictionary", "mean", "counts", "previous", "weights", "whitening")
ATTRIBUTES_CRC = "attributes_crc32"


def save_dictionary(path: PathLike, dictionary: Dictionary, *, overwrite: bool = False) -> str:
    """Write a dictionary aside, then rename it to `path`.

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import Dictionary, open_dictionary, save_dictionary
    >>> rows = np.load("activations.npy")[:4]
    >>> atoms = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    >>> _ = save_dictionary("atoms.zarr", Dictionary(atoms, None, {"n_atoms": 4, "k": 2}))
    >>> open_dictionary("atoms.zarr").n_atoms
    4
    """
    target = paths.normalise(path)
    if paths.exists(target) and not overwrite:
        raise StoreError(f"{target} already exists; choose another path, or replace it with overwrite=True")
    if paths.exists(target):
        require_replaceable(target, FORMAT)
    return publish_dictionary(target, dictionary)


def publish_dictionary(target: str, dictionary: Dictionary) -> str:
    """Write a dictionary and replace what is at `target`."""
    if paths.is_remote(target):
        with paths.explain_refusal(target):
            _upload(target, dictionary)
        return target
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


def _upload(target: str, dictionary: Dictionary) -> None:
    """Write a dictionary to a remote, file by file; what makes it a dictionary comes last."""
    paths.remove(target)
    with tempfile.TemporaryDirectory(prefix="dbksvd-") as scratch:
        _write(scratch, dictionary)
        files = [file for file in Path(scratch).rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file == Path(scratch, "zarr.json")):
            paths.write_object(paths.join(target, *file.relative_to(scratch).parts), file.read_bytes())


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
        "whitening": (dictionary.whitening, ("feature", "whitened")),
    }
    checksums = {
        name: _put(group, name, values, dims) for name, (values, dims) in arrays.items() if values is not None
    }
    attributes = {
        "format": FORMAT,
        "format_version": VERSION if dictionary.whitening is None else WHITENED_VERSION,
        "package_version": dbksvd_dask.__version__,
        "params": dictionary.params,
        "source": redacted(dictionary.source),
        "iteration": dictionary.iteration,
        "history": plain(dictionary.history),
        "extra": redacted_values(dictionary.extra),
        "n_atoms": dictionary.n_atoms,
        "n_features": dictionary.n_features,
        "crc32": checksums,
    }
    group.update_attributes({**attributes, ATTRIBUTES_CRC: attributes_checksum(attributes)})


def _put(group: zarr.Group, name: str, values: np.ndarray, dims: tuple[str, ...]) -> int:
    """Write one array; return its checksum."""
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
    """Return the CRC-32 of an array: of its dtype and shape, which Zarr's metadata state, and of its bytes."""
    head = zlib.crc32(f"{values.dtype.str} {values.shape}".encode())
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, head)


def attributes_checksum(attributes: dict[str, Any]) -> int:
    """Return the CRC-32 of all attributes but this checksum itself, however JSON spells and orders them."""
    known = {name: value for name, value in attributes.items() if name != ATTRIBUTES_CRC}
    plain = json.loads(json.dumps(known))  # as they will be read: keys become strings, tuples become lists
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def read_dictionary(where: str) -> Dictionary:
    """Read the dictionary in the Zarr group `where`."""
    try:
        group = paths.open_group(where)
        attrs = dict(group.attrs)
        _check_format(where, attrs)
        return _read(where, group, attrs)
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        if isinstance(error, StoreError | MismatchError):
            raise
        raise StoreError(f"{where} cannot be read as a dictionary: {brief(error)}; it may be truncated") from error


def _check_format(where: str, attrs: dict[str, Any]) -> None:
    if attrs.get("format") != FORMAT:
        raise StoreError(f"{where} is {attrs.get('format', 'of no known format')!r}, not a {FORMAT!r}")
    if attrs.get("format_version") not in (VERSION, WHITENED_VERSION):
        raise MismatchError(
            f"{where} has format version {attrs.get('format_version')} (written by dbksvd-dask "
            f"{attrs.get('package_version')}); this is dbksvd-dask {dbksvd_dask.__version__}, which reads "
            f"versions {VERSION} and {WHITENED_VERSION}; install a matching version"
        )


def _read(where: str, group: zarr.Group, attrs: dict[str, Any]) -> Dictionary:
    if attrs.get(ATTRIBUTES_CRC) != attributes_checksum(attrs):
        raise StoreError(f"{where} is damaged: its attributes are not what was written")
    present = [name for name in _ARRAYS if paths.get_array(where, group, name) is not None]
    arrays = {name: paths.read_array(where, group, name) for name in present}
    for name, expected in attrs["crc32"].items():
        # Zarr silently reads a missing chunk as zeros
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
        arrays.get("whitening"),
    )


def _check_shapes(where: str, arrays: dict[str, np.ndarray]) -> None:
    """Refuse arrays whose shapes do not match the atoms: kernels do not check them."""
    n_atoms, n_features = arrays["dictionary"].shape
    shapes = {
        "mean": (n_features,),
        "counts": (n_atoms,),
        "previous": (n_atoms, n_features),
        "weights": (n_atoms,),
        "whitening": (n_features, n_features),
    }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise StoreError(f"{where} is damaged: `{name}` has shape {arrays[name].shape} instead of {shape}")


# ---------------------------------------------------------------------------------------------- places


def is_zarr(folder: PathLike) -> bool:
    """Return whether a folder is itself a Zarr group or array."""
    return any(paths.exists(paths.join(folder, name)) for name in _ZARR_NAMES)
