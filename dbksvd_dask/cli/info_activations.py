"""What `dbksvd info` says about activation stores, unfinished ones, and files that can be imported."""

from __future__ import annotations

from typing import Any

import zarr

from dbksvd_dask.errors import DBKSVDError, InputError
from dbksvd_dask.importers import find_files, open_file
from dbksvd_dask.store import atomic, remote
from dbksvd_dask.store.layout import PARTS, StorePlan
from dbksvd_dask.store.rows import ACTIVATIONS_FORMAT, aligned_names, open_rows
from dbksvd_dask.store.verify import verify_store


def describe_unfinished(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe an activation store that is still being written."""
    begun = remote.join(path, PARTS, "plan.json")
    if not remote.exists(begun):
        return None
    if verify:
        raise InputError(
            f"{path} is unfinished and cannot be verified yet; finish it with the command it began with"
        )
    plan = StorePlan.read(begun)
    done = len(atomic.Ledger(remote.join(path, PARTS), "chunk").parts())
    total = None if plan.n_samples is None else -(-plan.n_samples // plan.chunk_rows)
    return {
        "kind": "unfinished activation store",
        "path": path,
        "n_samples": plan.n_samples,
        "n_features": plan.n_features,
        "dtype": plan.dtype,
        "chunks_written": done,
        "n_chunks": total,
        "provenance": plan.attributes,
    }


def describe_activations(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe an activation store, or another Zarr array that can be used as one."""
    try:
        node = remote.open_zarr(path)
    except DBKSVDError:
        return None
    attributes = dict(node.attrs)
    own = attributes.get("format") == ACTIVATIONS_FORMAT
    if not own:
        try:
            open_rows(path)
        except DBKSVDError:
            return None
    reader = open_rows(path)
    names = aligned_names(reader, node) if isinstance(node, zarr.Group) else []
    fields: dict[str, Any] = {
        "kind": "activation store" if own else "Zarr array of rows",
        "path": path,
        "n_samples": reader.n_samples,
        "n_features": reader.n_features,
        "dtype": "bfloat16" if reader.bfloat16 else reader.stored.name,
        "bytes": reader.nbytes,
        "n_chunks": reader.n_chunks,
        "chunk_rows": reader.chunk_rows,
        "chunk_bytes": reader.chunk_rows * reader.n_features * reader.stored.itemsize,
        "layout": "uncompressed, read directly" if reader.raw else "read through Zarr's codecs",
        "aligned": {name: _aligned(node, name) for name in names},
        "mixing": attributes.get("mixing"),
        "provenance": attributes.get("provenance"),
        "package_version": attributes.get("package_version"),
        "fingerprint": reader.fingerprint,
    }
    if verify:
        fields["verified"] = _verify(path, own)
    return fields


def _aligned(node: Any, name: str) -> str:
    array = node[name]
    return f"{array.dtype} {array.shape}"


def _verify(path: str, own: bool) -> str:
    if not own:
        raise InputError(f"{path} was not written by dbksvd and has no checksums to verify")
    return f"{verify_store(path)} chunks agree with their checksums"


def describe_source(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe files that can be imported: the arrays of the first of them."""
    try:
        files = find_files(path)
    except DBKSVDError:
        return None
    if verify:
        raise InputError(
            f"{path} has no checksums to verify; `dbksvd import {path} STORE` makes a store, which has some"
        )
    file = open_file(*files[0])
    try:
        arrays = {name or "unnamed": f"{i.dtype} {i.shape}" for name, i in file.arrays.items()}
    finally:
        file.close()
    return {
        "kind": f"{files[0][1]} file{'s' if len(files) > 1 else ''}, can be imported",
        "path": path,
        "files": len(files),
        "arrays": arrays,
    }
