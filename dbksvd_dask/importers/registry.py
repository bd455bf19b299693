"""Which module reads what: by extension, by the content of a folder, or as the user states."""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dbksvd_dask._words import listed
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Hints, SourceFile
from dbksvd_dask.importers.layers import with_layer
from dbksvd_dask.store import atomic
from dbksvd_dask.store.paths import PathLike, find_matches, is_remote, normalise


@dataclass(frozen=True)
class Format:
    """A format that can be imported.

    Attributes
    ----------
    name : str
        Its name as a `format`.
    extensions : tuple of str
        Endings of file names of this format.
    opener : str
        "module:function" that opens a file; imported when used.
    pattern : str
        Regular expression of the names of files that a tool writes in a folder of their own; these are told by
        name, not by their ending, and other files of the folder are ignored.
    beside : str
        Name of a file that has to lie beside them.
    complete : str
        "module:function" that is called with all files of a folder and refuses it if some are missing.
    mask_array : str
        Array of these files that says which rows count: others are padding, and are left out.
    """

    name: str
    extensions: tuple[str, ...]
    opener: str
    pattern: str = ""
    beside: str = ""
    complete: str = ""
    mask_array: str = ""

    def knows(self, path: str) -> bool:
        """Return whether a file is one of a layout: by its name and what lies beside it."""
        folder, name = os.path.split(path)
        return bool(
            self.pattern
            and re.fullmatch(self.pattern, name)
            and (not self.beside or os.path.isfile(os.path.join(folder, self.beside)))
        )


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
        Format(
            "saev",
            (),
            f"{_HERE}.saev_shards:open_shard",
            pattern=r"acts\d{6,}\.bin",
            beside="metadata.json",
            complete=f"{_HERE}.saev_shards:require_all",
        ),
        Format(
            "bionemo",
            (),
            f"{_HERE}.bionemo_shards:open_shard",
            pattern=r"shard_\d{5,}\.parquet",
            beside="metadata.json",
            complete=f"{_HERE}.bionemo_shards:require_all",
        ),
        Format(
            "llamascopium",
            (),
            f"{_HERE}.safetensors_file:open_safetensors",
            pattern=r"(shard-\d+-)?chunk-\d+\.safetensors",
            mask_array="mask",
        ),
    )
}
# what a stopped run may leave: unfinished work, and a store that was replaced
_LEFT_OVER = (atomic.PARTIAL_SUFFIX, atomic.REPLACED_SUFFIX)
# read in ranges: others would have to be copied first
REMOTE = ("npy", "safetensors", "raw", "zarr")
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts shard_2 before shard_10.

    >>> sorted(["shard_10", "shard_2"], key=natural_key)
    ['shard_2', 'shard_10']
    """
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", name) if p]


def format_of(path: str) -> str | None:
    """Return the name of the format of a file or folder; None if unknown."""
    if is_remote(path):
        return _by_extension(path.partition("?")[0]) or "zarr"
    if any(os.path.exists(os.path.join(path, f)) for f in _ZARR_FILES):
        return "zarr"
    return _by_layout(path) or _by_extension(path)


def _by_layout(path: str) -> str | None:
    return next((f.name for f in FORMATS.values() if f.knows(path)), None)


def _by_extension(path: str) -> str | None:
    lower = path.lower()
    return next((f.name for f in FORMATS.values() if lower.endswith(f.extensions)), None)


def name_of(source: PathLike | Sequence[PathLike]) -> str:
    """Return a source as messages name it.

    >>> name_of("acts.npy"), name_of(["shards/a_0.npy", "shards/a_1.npy"])
    ('acts.npy', 'shards/a_0.npy and 1 more')
    """
    if isinstance(source, str | os.PathLike):
        return normalise(source)
    more = f" and {len(source) - 1} more" if len(source) > 1 else ""
    return normalise(source[0]) + more


def find_files(
    source: PathLike | Sequence[PathLike], format: str | None = None, exclude: PathLike | None = None
) -> list[tuple[str, str]]:
    """List the files of a source, in natural order, each with its format.

    Parameters
    ----------
    source : path, glob pattern, or several
        A file, a folder (Zarr, a saved Hugging Face dataset or a folder of shards of one, shards of saev, BioNeMo
        or Llamascopium, or files of one format), a pattern such as ``acts_*.npy``, or a URL or pattern of
        URLs of Zarr stores, .npy, .safetensors or raw files.
    format : str, optional
        Name of the format when the file name does not show it; one of `FORMATS`.
    exclude : path, optional
        A store that is being written: skipped in folders and patterns, with all its content. Unfinished
        work (`*.partial`) is always skipped.

    Returns
    -------
    list of (path, format)
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"format={format!r} is not known; use one of {', '.join(FORMATS)}")
    if not isinstance(source, str | os.PathLike):
        one_each = sorted(dict.fromkeys(normalise(path) for path in source), key=natural_key)
        return [found for path in one_each for found in find_files(path, format, exclude)]
    text = normalise(source)
    if is_remote(text) and (format or format_of(text)) not in REMOTE:
        raise InputError(
            f"{text}: only {', '.join(REMOTE)} are read from a URL; download this file, then import the copy"
        )
    paths = _expand(text, None if exclude is None else os.path.realpath(normalise(exclude)))
    found = [(path, format or format_of(path)) for path in paths]
    unknown = [path for path, name in found if name is None]
    if unknown:
        known = " ".join(e for f in FORMATS.values() for e in f.extensions)
        raise InputError(f"cannot tell the format of {unknown[0]}; known are {known}; or say it with format=NAME")
    return [(path, name) for path, name in found if name is not None]


def _expand(text: str, exclude: str | None) -> list[str]:
    if is_remote(text):
        return _expand_remote(text)
    if not os.path.lexists(text) and glob.has_magic(text):
        matches = [path for path in glob.glob(text, recursive=True) if not _is_ours(path, exclude)]
        if not matches:
            hint = "; in a pattern the character [ is written [[]" if "[" in text else ""
            raise StoreError(f"no file matches {text}{hint}")
        return [inner for path in sorted(matches, key=natural_key) for inner in _expand(path, exclude)]
    if not os.path.exists(text):
        raise StoreError(f"no file or folder at {text}")
    if not os.path.isdir(text) or format_of(text) == "zarr":
        return [text]
    return _expand_folder(text, exclude)


def _expand_remote(text: str) -> list[str]:
    """Return the URLs of a pattern such as s3://bucket/acts_*.npy; of anything else, itself."""
    if not glob.has_magic(text.partition("?")[0] if text.startswith("http") else text):
        return [text]
    found = [url for url in find_matches(text) if not url.rstrip("/").endswith(_LEFT_OVER)]
    if not found:
        raise StoreError(f"no file matches {text}")
    return sorted(found, key=natural_key)


def _is_ours(path: str, exclude: str | None) -> bool:
    """Return whether a path is left over from unfinished work, or is (in) the store that is being written."""
    if path.rstrip("/").endswith(_LEFT_OVER):
        return True
    real = os.path.realpath(path)
    if exclude is None or not real.startswith(exclude):
        return False
    # its unfinished work is beside it: EXCLUDE.partial, EXCLUDE.scan.partial
    beside = real[len(exclude) :].split("/")[0]
    return beside == "" or (beside.startswith(".") and beside.endswith(_LEFT_OVER))


def _expand_folder(folder: str, exclude: str | None) -> list[str]:
    names = sorted(os.listdir(folder), key=natural_key)
    if "dataset_dict.json" in names:
        _ask_for_split(folder)
    if "state.json" in names:
        return _dataset_files(folder)
    names = [name for name in names if not _is_ours(os.path.join(folder, name), exclude)]
    shards = [n for n in names if os.path.isfile(os.path.join(folder, n, "state.json"))]
    if shards:
        return [path for shard in shards for path in _dataset_files(os.path.join(folder, shard))]
    laid_out = _laid_out(folder, names)
    if laid_out:
        return laid_out
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


def _laid_out(folder: str, names: list[str]) -> list[str]:
    """Return the files of a folder that a tool has laid out, without what lies beside them; else nothing.

    A folder of such folders, as Llamascopium writes one for each hook, is one of them if it has only one.
    """
    found = {name: layout for name in names if (layout := _by_layout(os.path.join(folder, name)))}
    if found:
        layout = next(iter(found.values()))
        paths = [os.path.join(folder, name) for name in found if found[name] == layout]
        if FORMATS[layout].complete:
            _load(FORMATS[layout].complete)(paths)
        return paths
    inner = {name: os.path.join(folder, name) for name in names if os.path.isdir(os.path.join(folder, name))}
    hooks = [
        name for name, path in inner.items() if any(_by_layout(os.path.join(path, n)) for n in os.listdir(path))
    ]
    if len(hooks) > 1:
        raise InputError(f"{folder} holds {listed(hooks)}; give one of them: {inner[hooks[0]]}")
    return _laid_out(inner[hooks[0]], sorted(os.listdir(inner[hooks[0]]), key=natural_key)) if hooks else []


def natural_mask(files: list[tuple[str, str]]) -> str | None:
    """Return the array that says which rows of files count, by their layout; None if there is none."""
    name = FORMATS[files[0][1]].mask_array if files else ""
    if not name:
        return None
    file = open_file(*files[0])
    try:
        return name if name in file.arrays else None
    finally:
        file.close()


def _ask_for_split(folder: str) -> NoReturn:
    described = os.path.join(folder, "dataset_dict.json")
    found = atomic.read_json(described)
    splits = found.get("splits") if isinstance(found, dict) else None
    if not splits or not isinstance(splits, list):
        raise StoreError(f"{described} names no splits; give the folder of one split of the dataset in {folder}")
    raise InputError(
        f"{folder} has the splits {', '.join(map(str, splits))}; give one of them: {folder}/{splits[0]}"
    )


def _dataset_files(folder: str) -> list[str]:
    """Return the data files of a folder that `Dataset.save_to_disk` of Hugging Face wrote, in their order."""
    described = os.path.join(folder, "state.json")
    found = atomic.read_json(described)
    try:
        names = [str(os.fspath(entry["filename"])) for entry in found["_data_files"]]
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{described} does not list the data files of a dataset (`_data_files`); save the dataset again, or "
            f"give its files as a pattern such as '{folder}/*.arrow'"
        ) from error
    outside = [name for name in names if os.path.isabs(name) or ".." in name.split(os.sep) or "\0" in name]
    if outside:
        raise InputError(
            f"{described} lists {outside[0]!r}, which lies outside of {folder}; import that file itself, or "
            "save the dataset again"
        )
    paths = [os.path.join(folder, name) for name in names]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise StoreError(f"no file at {missing[0]}, which {described} lists; copy the dataset again")
    return paths


def open_file(path: str, format: str, hints: Hints | None = None) -> SourceFile:
    """Open one file of a known format."""
    if not is_remote(path) and not os.path.isdir(path) and os.path.getsize(path) == 0:
        raise StoreError(f"{path} is empty: 0 bytes")
    given = hints or Hints()
    opened: SourceFile = _load(FORMATS[format].opener)(path, given)
    try:
        return with_layer(opened, given.layer)
    except InputError:
        opened.close()
        raise


def _load(entry: str) -> Callable[..., Any]:
    module, function = entry.split(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
