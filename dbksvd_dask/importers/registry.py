"""Which module reads what: by extension, by the content of a folder, or as the user says."""

from __future__ import annotations

import glob
import importlib
import os
import re
from dataclasses import dataclass

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Hints, SourceFile
from dbksvd_dask.store import atomic, remote
from dbksvd_dask.store.remote import PathLike


@dataclass(frozen=True)
class Format:
    """A format that can be imported.

    Attributes
    ----------
    name : str
        What `--format` calls it.
    extensions : tuple of str
        File names that end so are of this format.
    opener : str
        "module:function" that opens a file; imported when used.
    """

    name: str
    extensions: tuple[str, ...]
    opener: str


_HERE = "dbksvd_dask.importers"
FORMATS = {
    f.name: f
    for f in (
        Format("npy", (".npy",), f"{_HERE}.numpy_files:open_npy"),
        Format("npz", (".npz",), f"{_HERE}.numpy_files:open_npz"),
        Format("safetensors", (".safetensors",), f"{_HERE}.safetensors_file:open_safetensors"),
        Format("hdf5", (".h5", ".hdf5", ".hdf", ".he5"), f"{_HERE}.hdf5_file:open_hdf5"),
        Format("arrow", (".arrow", ".feather", ".ipc"), f"{_HERE}.arrow_files:open_ipc"),
        Format("parquet", (".parquet", ".pq"), f"{_HERE}.arrow_files:open_parquet"),
        Format("torch", (".pt", ".pth"), f"{_HERE}.torch_file:open_torch"),
        Format("raw", (".bin", ".raw", ".dat", ".mmap", ".memmap"), f"{_HERE}.raw_file:open_raw"),
        Format("zarr", (".zarr",), f"{_HERE}.zarr_file:open_zarr_file"),
    )
}
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts shard_2 before shard_10.

    >>> sorted(["shard_10", "shard_2"], key=natural_key)
    ['shard_2', 'shard_10']
    """
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name) if p]


def format_of(path: str) -> str | None:
    """Return the name of the format of a file or folder; None when it cannot be told."""
    if remote.is_remote(path) or any(os.path.exists(os.path.join(path, f)) for f in _ZARR_FILES):
        return "zarr"
    lower = path.lower()
    return next((f.name for f in FORMATS.values() if lower.endswith(f.extensions)), None)


def find_files(source: PathLike, format: str | None = None) -> list[tuple[str, str]]:
    """List the files that a source stands for, in natural order, each with its format.

    Parameters
    ----------
    source : path or glob pattern
        A file, a folder (Zarr, a saved Hugging Face dataset or a folder of shards of one, or files of one
        format), a pattern such as ``acts_*.npy``, or the URL of a Zarr store.
    format : str, optional
        Name of the format when the file name does not tell it; one of `FORMATS`.

    Returns
    -------
    list of (path, format)
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"format={format!r} is not known; use one of {', '.join(FORMATS)}")
    text = remote.normalise(source)
    if remote.is_remote(text) and (format or "zarr") != "zarr":
        raise InputError(f"{text}: only Zarr stores are read from a URL; copy other files to a disk first")
    paths = _expand(text)
    found = [(path, format or format_of(path)) for path in paths]
    unknown = [path for path, name in found if name is None]
    if unknown:
        known = " ".join(e for f in FORMATS.values() for e in f.extensions)
        raise InputError(f"cannot tell the format of {unknown[0]}; known are {known}; or say it with --format")
    return [(path, name) for path, name in found if name is not None]


def _expand(text: str) -> list[str]:
    if remote.is_remote(text):
        return [text]
    if not os.path.lexists(text) and glob.has_magic(text):
        paths = sorted(glob.glob(text, recursive=True), key=natural_key)
        if not paths:
            raise StoreError(f"no file matches {text}")
        return [inner for path in paths for inner in _expand(path)]
    if not os.path.exists(text):
        raise StoreError(f"no file or folder at {text}")
    if not os.path.isdir(text) or format_of(text) == "zarr":
        return [text]
    return _expand_folder(text)


def _expand_folder(folder: str) -> list[str]:
    names = sorted(os.listdir(folder), key=natural_key)
    if "dataset_dict.json" in names:
        splits = atomic.read_json(os.path.join(folder, "dataset_dict.json")).get("splits", [])
        raise InputError(f"{folder} has the splits {', '.join(splits)}; give one of them: {folder}/{splits[0]}")
    if "state.json" in names:  # what Dataset.save_to_disk writes
        state = atomic.read_json(os.path.join(folder, "state.json"))
        return [os.path.join(folder, entry["filename"]) for entry in state["_data_files"]]
    shards = [n for n in names if os.path.isfile(os.path.join(folder, n, "state.json"))]
    if shards:
        return [path for shard in shards for path in _expand_folder(os.path.join(folder, shard))]
    known = [os.path.join(folder, n) for n in names if format_of(os.path.join(folder, n)) is not None]
    formats = sorted({str(format_of(path)) for path in known})
    if not known:
        raise StoreError(f"{folder} holds nothing that can be imported; see `dbksvd import --help`")
    if len(formats) > 1:
        example = FORMATS[formats[0]].extensions[0]
        raise InputError(
            f"{folder} holds files of several formats ({', '.join(formats)}); "
            f"give a pattern such as '{folder}/*{example}'"
        )
    return known


def open_file(path: str, format: str, hints: Hints | None = None) -> SourceFile:
    """Open one file of a known format."""
    if not remote.is_remote(path) and not os.path.isdir(path) and os.path.getsize(path) == 0:
        raise StoreError(f"{path} is empty: 0 bytes")
    module, function = FORMATS[format].opener.split(":")
    opened: SourceFile = getattr(importlib.import_module(module), function)(path, hints or Hints())
    return opened
