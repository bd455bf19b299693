"""What `dbksvd info` says about stores, files that can be imported, dictionaries, runs and codes."""

from __future__ import annotations

import math
from typing import Any

import zarr

from dbksvd_dask._words import format_seconds, plain
from dbksvd_dask.dictionary import Dictionary, dictionary_fingerprint
from dbksvd_dask.errors import DBKSVDError, InputError, StoreError
from dbksvd_dask.importers import find_files, open_file
from dbksvd_dask.importers.arrow_files import COLUMNS
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.plan.stopping import is_over
from dbksvd_dask.status import FIGURES, read_status
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.codes import CODES_FORMAT, codes_attributes, verify_codes
from dbksvd_dask.store.codes_writer import CodesPlan, CodesWriter
from dbksvd_dask.store.dictionary import FORMAT as DICTIONARY_FORMAT
from dbksvd_dask.store.dictionary import is_zarr
from dbksvd_dask.store.layout import StorePlan
from dbksvd_dask.store.partial import PARTS
from dbksvd_dask.store.reader import ACTIVATIONS_FORMAT, LinkedReader, RowReader, aligned_names, open_rows
from dbksvd_dask.store.runs import checkpoints, open_dictionary, verify_dictionary
from dbksvd_dask.store.verify import verify_store

# names of linked files that are shown
LISTED_FILES = 20


def describe_unfinished(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe an activation store that is still being written."""
    begun = paths.join(path, PARTS, "plan.json")
    if not paths.exists(begun):
        return None
    if verify:
        raise InputError(
            f"{path} is unfinished and cannot be verified yet; finish it with the command it began with"
        )
    plan = StorePlan.read(begun)
    done = len(atomic.Ledger(paths.join(path, PARTS), "chunk").parts())
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
        node = paths.open_zarr(path)
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
        "chunk_bytes": reader.chunk_rows * reader.row_bytes,
        "layout": _layout(reader),
        **_linked(reader),
        "aligned": {name: _aligned(node, name) for name in names},
        "mixing": attributes.get("mixing"),
        "provenance": attributes.get("provenance"),
        "package_version": attributes.get("package_version"),
        "fingerprint": reader.fingerprint,
    }
    if verify:
        fields["verified"] = _verify(path, own)
    return fields


def _layout(reader: RowReader) -> str:
    if isinstance(reader, LinkedReader):
        return "linked: byte ranges of the files below, nothing copied"
    return "uncompressed, read directly" if reader.raw else "read through Zarr's codecs"


def _linked(reader: RowReader) -> dict[str, Any]:
    """Name the files of a linked store; the first of them where there are many."""
    if not isinstance(reader, LinkedReader):
        return {}
    files = [path for path, _, _ in reader.links.files]
    known = "sizes, times and checksums" if reader.has_checksums else "sizes and times; no checksums"
    return {"linked_files": files[:LISTED_FILES], "n_linked_files": len(files), "linked_by": known}


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
        whole = {COLUMNS} & set(file.arrays)  # one array of hundreds of columns: they need no line each
        arrays = {
            name or "unnamed": f"{i.dtype} {i.shape}"
            for name, i in file.arrays.items()
            if not (whole and len(i.shape) == 1 and i.dtype.startswith("float"))
        }
    finally:
        file.close()
    return {
        "kind": f"{files[0][1]} file{'s' if len(files) > 1 else ''}, can be imported",
        "path": path,
        "files": len(files),
        "arrays": arrays,
    }


# --------------------------------------------------------------------------------------------- dictionaries, codes


def describe_codes(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe a codes store, finished or not."""
    attributes = _attributes(path)
    if attributes.get("format") != CODES_FORMAT:
        return None
    if not attributes.get("complete"):
        if verify:
            raise InputError(
                f"{path} is unfinished and cannot be verified yet; finish it with the command it began with"
            )
        return _unfinished(path, attributes)
    attributes = codes_attributes(path)
    plan = CodesPlan.of_store(attributes)
    fields: dict[str, Any] = {
        "kind": "codes",
        "path": path,
        "n_samples": plan.n_samples,
        "n_atoms": plan.n_atoms,
        "params": plan.params,
        "bytes": plan.nbytes(plan.n_samples),
        "n_chunks": plan.n_chunks,
        "chunk_rows": plan.chunk_rows,
        "coefficient_dtype": plan.coefficient_dtype,
        "metrics": attributes["metrics"],
        "dictionary": {name: attributes["dictionary"].get(name) for name in ("path", "iteration", "fingerprint")},
        "store": {name: attributes["store"].get(name) for name in ("path", "fingerprint")},
        "package_version": attributes["package_version"],
    }
    if verify:
        fields["verified"] = f"{verify_codes(path)} chunks agree with their checksums"
    return fields


def _unfinished(path: str, attributes: dict[str, Any]) -> dict[str, Any]:
    writer = CodesWriter.begun(path.removesuffix(".partial"))
    fields: dict[str, Any] = {"kind": "unfinished codes", "path": path, "n_samples": attributes["n_samples"]}
    fields |= {"n_atoms": attributes["n_atoms"], "params": attributes["params"]}
    if writer is not None and writer.work == path:
        fields |= {"units_written": len(writer.done()), "n_units": writer.plan.n_units}
        fields["missing"] = writer.describe_missing() if writer.missing() else "nothing; run it with --finish"
    return fields


def describe_status(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe a status file, or a run that has no checkpoint yet."""
    found = read_status(path) if path.endswith(".json") or _is_bare_run(path) else None
    if found is None:
        return None
    return {"kind": f"status of a job: {found.get('job') or 'not started'}", "path": path, **_progress(found)}


def _is_bare_run(path: str) -> bool:
    return not is_zarr(path) and not checkpoints(path)


def _progress(status: dict[str, Any]) -> dict[str, Any]:
    """Say how far a job is, for people."""
    told = {"state": status["state"], "message": status.get("message")}
    if status.get("total"):
        told["done"] = f"{status.get('done')} of {status['total']} {status.get('unit', '')}".rstrip()
    names = [*FIGURES, "samples_per_second", "per_second", "seconds_left"]
    told |= {name: status[name] for name in names if status.get(name) is not None}
    return told | {"last_sign": f"{format_seconds(status['age_seconds'])} ago"}


def describe_dictionary(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe a dictionary, a checkpoint, or the folder of a fit by its newest checkpoint."""
    found = [] if is_zarr(path) else checkpoints(path)
    if not found and _attributes(path).get("format") != DICTIONARY_FORMAT:
        return None
    dictionary = open_dictionary(path)
    status = read_status(path) if found and not _is_finished(dictionary) else None
    fields: dict[str, Any] = {
        "kind": "run" if found else "dictionary",
        "path": path,
        **({} if status is None else _progress(status)),
        "n_atoms": dictionary.n_atoms,
        "n_features": dictionary.n_features,
        "dtype": str(dictionary.atoms.dtype),
        "iteration": dictionary.iteration,
        "params": dictionary.params,
        "source": dictionary.source,
        "last": last_record(dictionary),
        "fingerprint": dictionary_fingerprint(dictionary),
    }
    if found:
        fields["checkpoints"] = [paths.base_name(name) for name in found]
        fields["finished"] = _is_finished(dictionary)
    if verify:
        fields["verified"] = f"{verify_dictionary(path)} arrays agree with their checksums"
    return fields | ({"extra": dictionary.extra} if dictionary.extra else {})


def _is_finished(dictionary: Dictionary) -> bool:
    """Whether a fit has no iteration left, by its parameters."""
    try:
        params = FitParams.from_json(dictionary.params)
    except (DBKSVDError, LookupError, TypeError):  # of another version
        return bool(dictionary.iteration >= dictionary.params.get("n_iter", math.inf))
    return is_over(params, dictionary.iteration, dictionary.history)


def last_record(dictionary: Dictionary) -> dict[str, float | None]:
    """Last entry of every column of a history; None for what is not a number."""
    last: dict[str, float | None] = plain({n: values[-1] for n, values in dictionary.history.items() if values})
    return last


def _attributes(path: str) -> dict[str, Any]:
    """Attributes of a Zarr group, empty for anything else."""
    try:
        return dict(paths.open_zarr(path).attrs)
    except StoreError:
        return {}
