"""What `dbksvd info` says about dictionaries, the folders of fits, and codes."""

from __future__ import annotations

import math
import os
from typing import Any

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store import remote
from dbksvd_dask.store.code_writer import CodesPlan, CodesWriter
from dbksvd_dask.store.codes import CODES_FORMAT, codes_attributes, dictionary_fingerprint, verify_codes
from dbksvd_dask.store.dictionary import FORMAT as DICTIONARY_FORMAT
from dbksvd_dask.store.dictionary import (
    Dictionary,
    checkpoints,
    is_zarr,
    open_dictionary,
    verify_dictionary,
)


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


def describe_dictionary(path: str, verify: bool) -> dict[str, Any] | None:
    """Describe a dictionary, a checkpoint, or the folder of a fit by its newest checkpoint."""
    found = [] if remote.is_remote(path) or is_zarr(path) else checkpoints(path)
    if not found and _attributes(path).get("format") != DICTIONARY_FORMAT:
        return None
    dictionary = open_dictionary(path)
    fields: dict[str, Any] = {
        "kind": "run" if found else "dictionary",
        "path": path,
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
        fields["checkpoints"] = [os.path.basename(name) for name in found]
        fields["finished"] = dictionary.iteration >= dictionary.params.get("n_iter", math.inf)
    if verify:
        fields["verified"] = f"{verify_dictionary(path)} arrays agree with their checksums"
    return fields | ({"extra": dictionary.extra} if dictionary.extra else {})


def last_record(dictionary: Dictionary) -> dict[str, float | None]:
    """Last entry of every column of a history; None for what is not a number."""
    last = {name: values[-1] for name, values in dictionary.history.items() if values}
    return {name: value if math.isfinite(value) else None for name, value in last.items()}


def _attributes(path: str) -> dict[str, Any]:
    """Attributes of a Zarr group, empty for anything else."""
    try:
        return dict(remote.open_zarr(path).attrs)
    except StoreError:
        return {}
