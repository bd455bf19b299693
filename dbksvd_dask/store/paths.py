"""Where a store is: a local path or any fsspec URL, behind a few file operations.

Credentials and endpoints of a remote are taken from fsspec's own configuration (``FSSPEC_S3_ENDPOINT_URL``
and the like, or ``~/.config/fsspec``), so that every worker process finds them. `remote` sends the requests.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dbksvd_dask.base.late import late
from dbksvd_dask.base.safe_text import redacted
from dbksvd_dask.errors import StoreError, brief
from dbksvd_dask.store import remote

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")

PathLike = str | os.PathLike[str]

# files that describe a Zarr node, formats 3 and 2
_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")


def normalise(path: PathLike) -> str:
    """Return `path` as text, without a trailing slash and without the scheme of local URLs."""
    text = os.fspath(path)
    if not text:
        raise StoreError("an empty path was given; name a file or folder")
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            text = text[len(scheme) :]
    return text.rstrip("/") or "/"


def is_remote(path: PathLike) -> bool:
    """Return whether `path` is an fsspec URL that is not a local file."""
    return "://" in normalise(path)


def join(path: PathLike, *names: str) -> str:
    """Append names to a path or URL."""
    return "/".join([normalise(path), *names])


def base_name(path: PathLike) -> str:
    """Return the last part of a path or URL."""
    return normalise(path).rsplit("/", 1)[-1]


def filesystem(path: PathLike) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL and the path inside it."""
    from fsspec.core import url_to_fs  # slow to import, and not needed for local paths

    try:
        fs, inner = url_to_fs(normalise(path))  # type: ignore[no-untyped-call]
    except (ImportError, ValueError) as error:
        raise StoreError(f"cannot open {path}: {error}") from error
    return fs, str(inner)


@contextlib.contextmanager
def explain_refusal(path: PathLike) -> Iterator[None]:
    """Turn any refusal of a first write to a remote into an error that names the place."""
    try:
        with remote.explained(normalise(path)):
            yield
    except StoreError:
        raise
    except Exception as error:  # every protocol has errors of its own
        if not is_remote(path):
            raise
        raise StoreError(
            f"cannot write to {path} ({type(error).__name__}: {error}); does the place exist, and may this user "
            "write there?"
        ) from error


def exists(path: PathLike) -> bool:
    """Return whether there is a file or folder at `path`."""
    if not is_remote(path):
        return os.path.lexists(normalise(path))
    fs, inner = filesystem(path)
    # fsspec caches folder listings: a store written since would not be seen
    fs.invalidate_cache()
    with remote.explained(normalise(path)):
        return bool(fs.exists(inner))


def read_bytes(path: PathLike) -> bytes:
    """Return the whole content of one file."""
    if not is_remote(path):
        return Path(normalise(path)).read_bytes()
    fs, inner = filesystem(path)
    with remote.explained(normalise(path)):
        return bytes(remote.retrying(lambda: fs.cat_file(inner), redacted(normalise(path))))


def write_object(path: PathLike, content: bytes) -> None:
    """Write one remote file; it appears whole or not at all."""
    fs, inner = filesystem(path)
    with remote.explained(normalise(path)):
        remote.retrying(lambda: fs.pipe_file(inner, content), redacted(normalise(path)))


def size_of(path: PathLike) -> int:
    """Return the bytes of a file."""
    if not is_remote(path):
        return os.path.getsize(normalise(path))
    fs, inner = filesystem(path)
    with remote.explained(normalise(path)):
        return int(fs.size(inner))


def open_binary(path: PathLike) -> IO[bytes]:
    """Open a file to read its header."""
    if not is_remote(path):
        return open(normalise(path), "rb")
    fs, inner = filesystem(path)
    opened: IO[bytes] = fs.open(inner, "rb", block_size=1 << 16)
    return opened


def read_range(path: PathLike, start: int, stop: int) -> bytes:
    """Read bytes [start, stop) of one remote file, a long range in parts at once."""
    fs, inner = filesystem(path)
    (content,) = remote.read_ranges(fs, [inner], [start], [stop], redacted(normalise(path)))
    if isinstance(content, Exception):
        with remote.explained(normalise(path)):
            raise content
    return content


def find_matches(pattern: str) -> list[str]:
    """Return the URLs of the files that match a pattern on a remote."""
    fs, inner = filesystem(pattern)
    fs.invalidate_cache()
    with remote.explained(pattern):
        return [str(fs.unstrip_protocol(name)) for name in fs.glob(inner)]


def list_names(path: PathLike) -> list[str]:
    """Return the sorted names inside a folder; a missing folder counts as empty."""
    if not is_remote(path):
        folder = Path(normalise(path))
        return sorted(os.listdir(folder)) if folder.is_dir() else []
    fs, inner = filesystem(path)
    fs.invalidate_cache()
    try:
        with remote.explained(normalise(path)):
            entries: list[str] = fs.ls(inner, detail=False)
    except FileNotFoundError:
        return []
    return sorted(name for name in (str(e).rstrip("/").rsplit("/", 1)[-1] for e in entries) if name)


def remove(path: PathLike) -> None:
    """Delete a file or a whole folder; do nothing if it does not exist."""
    if not is_remote(path):
        local = Path(normalise(path))
        if local.is_dir() and not local.is_symlink():
            shutil.rmtree(local)
        else:
            local.unlink(missing_ok=True)
        return
    fs, inner = filesystem(path)
    fs.invalidate_cache()
    if fs.exists(inner):
        fs.rm(inner, recursive=True)
        fs.invalidate_cache()


def zarr_store(path: PathLike, *, read_only: bool) -> zarr.storage.LocalStore | zarr.storage.FsspecStore:
    """Return the Zarr store object of a path or URL."""
    if not is_remote(path):
        return zarr.storage.LocalStore(normalise(path), read_only=read_only)
    fs, inner = filesystem(path)
    if not fs.async_impl:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        wrapped = AsyncFileSystemWrapper(fs, asynchronous=True)  # type: ignore[no-untyped-call]
        return zarr.storage.FsspecStore(wrapped, path=inner, read_only=read_only)
    # Zarr drives the filesystem from its own event loop: it needs an instance not bound to fsspec's
    options = {**fs.storage_options, "asynchronous": True}
    return zarr.storage.FsspecStore(type(fs)(*fs.storage_args, **options), path=inner, read_only=read_only)


def open_zarr(path: PathLike, mode: Literal["r", "r+"] = "r") -> zarr.Group | zarr.Array[Any]:
    """Open the Zarr group or array (v2 or v3) at `path`.

    Raises
    ------
    StoreError
        When `path` does not exist or is not Zarr.
    """
    if not exists(path):
        hint = f"; an unfinished one is at {path}.partial" if exists(f"{normalise(path)}.partial") else ""
        raise StoreError(f"no store at {path}{hint}; make one with `dbksvd import SOURCE {path}`")
    names = list_names(path)
    if not {"zarr.json", ".zgroup", ".zarray"} & set(names):
        raise StoreError(_not_zarr(path, names))
    with explain_metadata(path):
        # a known format saves the requests for files of the other
        known: Literal[2, 3] = 3 if "zarr.json" in names else 2
        node = zarr.open(store=zarr_store(path, read_only=mode == "r"), mode=mode, zarr_format=known)
        _check_node(node)
    return node


def _not_zarr(path: PathLike, names: list[str]) -> str:
    """Say what a path without Zarr metadata is, or how to make a store of it; `names` are those in the folder."""
    if any(name.startswith("checkpoint-") and name.endswith(".zarr") for name in names):
        return (
            f"{path} is the folder of a fit: it holds a dictionary, not samples or codes; give the path of a store"
        )
    return (
        f"{path} is not a Zarr store (no zarr.json, .zgroup or .zarray in it); "
        f"turn it into one with `dbksvd import {path} STORE`"
    )


def open_group(path: PathLike) -> zarr.Group:
    """Open the Zarr group at `path` for reading; refuse a bare array."""
    node = open_zarr(path)
    if not isinstance(node, zarr.Group):
        raise StoreError(f"{path} is a Zarr array, not a group; restore its zarr.json or write the store again")
    return node


def get_array(path: PathLike, group: zarr.Group, name: str) -> zarr.Array[Any] | None:
    """Return one array of the group at `path`; None when there is no such array.

    Raises
    ------
    StoreError
        When the array exists and its metadata cannot be read.
    """
    home = join(path, name)
    with explain_metadata(home):
        node = group.get(name)
        _check_node(node)
        if node is None and _is_described(group, home):
            group[name]  # says which key is missing
    return node if isinstance(node, zarr.Array) else None


def get_arrays(path: PathLike, group: zarr.Group) -> dict[str, zarr.Array[Any]]:
    """Return the arrays of the group at `path` by name; a broken one is an error, not skipped."""
    try:
        found = dict(group.arrays())
    except Exception:  # it does not say which array: find out below
        found = {}
    others = sorted(set(list_names(path)) - found.keys() - set(_METADATA))
    names = [name for name in others if _is_described(group, join(path, name))]
    found |= {name: array for name in names if (array := get_array(path, group, name)) is not None}
    for name, array in found.items():
        with explain_metadata(join(path, name)):
            _check_node(array)
    return found


def read_array(path: PathLike, group: zarr.Group, name: str) -> npt.NDArray[Any]:
    """Read a whole small array of the group at `path`.

    Raises
    ------
    StoreError
        When it is missing or cannot be decoded.
    """
    array = get_array(path, group, name)
    if array is None:
        raise StoreError(f"{path} has no array `{name}`; restore it or write the store again")
    try:
        return np.asarray(array[...])
    except Exception as error:  # a codec may fail with anything
        raise StoreError(f"array `{name}` of {path} cannot be read: {brief(error)}") from error


def _is_described(group: zarr.Group, home: str) -> bool:
    """Return whether a folder describes itself as a Zarr node; consolidated metadata describe the whole group."""
    if group.metadata.consolidated_metadata is not None:
        return False
    return bool(set(_METADATA) & set(list_names(home)))


def _check_node(node: zarr.Group | zarr.Array[Any] | None) -> None:
    """Refuse what Zarr accepts but cannot be read: chunks of no rows, sizes beyond a file, odd attributes."""
    if node is None:
        return
    if not isinstance(node.metadata.attributes, Mapping):
        raise ValueError(f"its attributes are a {type(node.metadata.attributes).__name__}, not an object")
    if isinstance(node, zarr.Array):
        for size, *parts in zip(node.shape, node.chunks, node.shards or node.chunks, strict=True):
            if size and min(parts) < 1:
                raise ValueError(f"shape {node.shape} in chunks of {node.chunks}; chunks need at least 1")
        if math.prod(node.shape) * node.dtype.itemsize >= 1 << 63:
            raise ValueError(f"shape {node.shape} is beyond what a store can hold")


@contextlib.contextmanager
def explain_metadata(home: PathLike) -> Iterator[None]:
    """Turn whatever Zarr raises over the metadata of a node into one error that names the file."""
    try:
        yield
    except Exception as error:  # broken metadata lead Zarr to errors of any class, RecursionError among them
        raise StoreError(
            f"the Zarr metadata in {_broken_file(home)} cannot be read: {brief(error)}; restore this file or "
            "write the store again"
        ) from error


def _broken_file(home: PathLike) -> str:
    """Name the file of a node that is not JSON; the first one where all are."""
    files = [join(home, name) for name in _METADATA if exists(join(home, name))]
    for file in files:
        try:
            json.loads(read_bytes(file))
        except Exception:
            return file
    return files[0] if files else normalise(home)


def cat_ranges(
    path: PathLike, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int]
) -> list[bytes | Exception]:
    """Read byte ranges of several remote files at once; an item that failed is its exception."""
    fs, inner = filesystem(path)
    files = [f"{inner}/{key}" for key in keys]
    return remote.read_ranges(fs, files, starts, stops, redacted(normalise(path)))
