"""Detecting whether a folder or a remote store has changed, without reading its content.

The result is two integers that JSON preserves: the total bytes, and a hash folded into an integer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

from dbksvd_dask.store import paths

# what the filesystems of fsspec call the version or the time of change of a file
_VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "updated", "created")
_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")


def fold(text: str) -> int:
    """Fold a text into an integer of 48 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def of_folder(path: str) -> tuple[int, int]:
    """Identify a local folder by the name, size and time of change of every file in it."""
    entries = []
    for folder, _, names in os.walk(path):
        for name in names:
            status = os.stat(os.path.join(folder, name))
            inner = os.path.relpath(os.path.join(folder, name), path)
            entries.append((inner, status.st_size, str(status.st_mtime_ns)))
    return _combine(entries)


def of_remote(path: str) -> tuple[int, int]:
    """Identify a remote store by what its filesystem reports of every object: name, size, tag or time.

    A server that lists names only is asked about the metadata of the store one by one.
    """
    fs, inner = paths.filesystem(path)
    fs.invalidate_cache()
    listed = dict(fs.find(inner, detail=True))
    for name in list(listed):
        if name.rsplit("/", 1)[-1] in _METADATA and _version(listed[name]) == "":
            listed[name] = fs.info(name)
    return _combine((name, int(info.get("size") or 0), _version(info)) for name, info in listed.items())


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")


def _combine(entries: Iterable[tuple[str, int, str]]) -> tuple[int, int]:
    ordered = sorted(entries)
    return sum(size for _, size, _ in ordered), fold(repr(ordered))
