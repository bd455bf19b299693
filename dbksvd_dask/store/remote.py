"""Where a store lives: a local path or any fsspec URL, behind a handful of file operations.

Credentials and endpoints of a remote are taken from fsspec's own configuration (``FSSPEC_S3_ENDPOINT_URL``
and the like, or ``~/.config/fsspec``), so that every worker process finds them without being told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import zarr
from fsspec.core import url_to_fs
from zarr.storage import FsspecStore, LocalStore

from dbksvd_dask.errors import StoreError

PathLike = str | os.PathLike[str]


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
    """Tell whether `path` is an fsspec URL that is not a local file."""
    return "://" in normalise(path)


def join(path: PathLike, *names: str) -> str:
    """Append names to a path or URL."""
    return "/".join([normalise(path), *names])


def filesystem(path: PathLike) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL and the path inside it."""
    try:
        fs, inner = url_to_fs(normalise(path))  # type: ignore[no-untyped-call]
    except (ImportError, ValueError) as error:
        raise StoreError(f"cannot open {path}: {error}") from error
    return fs, str(inner)


@contextlib.contextmanager
def explain_refusal(path: PathLike) -> Iterator[None]:
    """Turn whatever a remote answers to a first write into an error that names the place."""
    try:
        yield
    except Exception as error:  # every protocol has errors of its own
        if not is_remote(path):
            raise
        raise StoreError(
            f"cannot write to {path} ({type(error).__name__}: {error}); does the place exist, and may this user "
            "write there?"
        ) from error


def exists(path: PathLike) -> bool:
    """Tell whether there is a file or folder at `path`."""
    if not is_remote(path):
        return os.path.lexists(normalise(path))
    fs, inner = filesystem(path)
    # an object store keeps its folder listings for a while: a store written since would not be seen
    fs.invalidate_cache()
    return bool(fs.exists(inner))


def read_bytes(path: PathLike) -> bytes:
    """Return the whole content of one file."""
    if not is_remote(path):
        return Path(normalise(path)).read_bytes()
    fs, inner = filesystem(path)
    return bytes(fs.cat_file(inner))


def list_names(path: PathLike) -> list[str]:
    """Return the sorted names inside a folder; an absent folder is an empty one."""
    if not is_remote(path):
        folder = Path(normalise(path))
        return sorted(os.listdir(folder)) if folder.is_dir() else []
    fs, inner = filesystem(path)
    fs.invalidate_cache()
    try:
        entries: list[str] = fs.ls(inner, detail=False)
    except FileNotFoundError:
        return []
    return sorted(name for name in (str(e).rstrip("/").rsplit("/", 1)[-1] for e in entries) if name)


def remove(path: PathLike) -> None:
    """Delete a file or a whole folder; do nothing when it is not there."""
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


def zarr_store(path: PathLike, *, read_only: bool) -> LocalStore | FsspecStore:
    """Return the Zarr store object of a path or URL."""
    if not is_remote(path):
        return LocalStore(normalise(path), read_only=read_only)
    fs, inner = filesystem(path)
    if not fs.async_impl:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        wrapped = AsyncFileSystemWrapper(fs, asynchronous=True)  # type: ignore[no-untyped-call]
        return FsspecStore(wrapped, path=inner, read_only=read_only)
    # Zarr drives the filesystem from its own event loop: it needs an instance not bound to fsspec's
    options = {**fs.storage_options, "asynchronous": True}
    return FsspecStore(type(fs)(*fs.storage_args, **options), path=inner, read_only=read_only)


def open_zarr(path: PathLike, mode: Literal["r", "r+"] = "r") -> zarr.Group | zarr.Array[Any]:
    """Open the Zarr group or array (v2 or v3) at `path`.

    Raises
    ------
    StoreError
        When there is nothing at `path`, or something that is not Zarr.
    """
    if not exists(path):
        hint = f"; an unfinished one is at {path}.partial" if exists(f"{normalise(path)}.partial") else ""
        raise StoreError(f"no store at {path}{hint}; make one with `dbksvd import SOURCE {path}`")
    names = list_names(path)
    if not {"zarr.json", ".zgroup", ".zarray"} & set(names):
        raise StoreError(
            f"{path} is not a Zarr store (no zarr.json, .zgroup or .zarray in it); "
            f"turn it into one with `dbksvd import {path} STORE`"
        )
    try:
        return zarr.open(store=zarr_store(path, read_only=mode == "r"), mode=mode)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise StoreError(f"the Zarr metadata of {path} cannot be read: {error}") from error


def cat_ranges(path: PathLike, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> list[Any]:
    """Read byte ranges of several remote files at once; an item that failed is its exception."""
    fs, inner = filesystem(path)
    paths = [f"{inner}/{key}" for key in keys]
    return list(fs.cat_ranges(paths, list(starts), list(stops), on_error="return"))
