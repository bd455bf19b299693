"""The codes store: a Zarr v3 group with the codes of a whole activation store, and what they say per atom.

```
CODES/zarr.json            format, version, n_atoms, k, parameters, fingerprints, metrics, `complete`
CODES/atom/                int32 (sample, slot), -1 where a slot is empty
CODES/coefficient/         float32 or float16 (sample, slot)
CODES/crc32/               checksums of the rows of every chunk of both
CODES/statistics/          over all samples, gathered in the same pass
    count, positive_count              int64 (atom,)    samples on which the atom is active, and positive
    coefficient_sum, coefficient_square_sum, abs_max    float64 (atom,)
    top_sample, top_coefficient        int64 and float32 (atom, rank)  by |coefficient|, -1 and 0 where fewer
    l0_histogram                       int64 (l0,)      samples with 0, 1, ... k active atoms
    error_histogram                    int64 (error_bin,)  samples by relative error; the last bin is >= 1
```

Codes are in whole-row chunks aligned with those of the activations. The statistics lie in a group of their
own because a dimension and a variable of one dataset cannot both be called `atom`. Writing is in `code_writer`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
import zarr

import dbksvd_dask
from dbksvd_dask.errors import MismatchError, StoreError
from dbksvd_dask.evaluate.codes import CodeMoments
from dbksvd_dask.store import atomic, remote
from dbksvd_dask.store.activations import RowsAsArray
from dbksvd_dask.store.dictionary import Dictionary
from dbksvd_dask.store.remote import PathLike
from dbksvd_dask.store.rows import CHECKSUMS, RowReader, open_aligned

CODES_FORMAT = "dbksvd-codes"
CODES_VERSION = 1
STATISTICS = "statistics"
COEFFICIENT_DTYPES = ("float32", "float16")

# dims of the arrays of the statistics
STATISTIC_DIMS: dict[str, tuple[str, ...]] = {
    "count": ("atom",),
    "positive_count": ("atom",),
    "coefficient_sum": ("atom",),
    "coefficient_square_sum": ("atom",),
    "abs_max": ("atom",),
    "top_sample": ("atom", "rank"),
    "top_coefficient": ("atom", "rank"),
    "l0_histogram": ("l0",),
    "error_histogram": ("error_bin",),
}


def dictionary_fingerprint(dictionary: Dictionary) -> str:
    """Return a short text that tells this dictionary from others: a digest of its atoms, mean and weights."""
    digest = hashlib.sha256()
    for array in (dictionary.atoms, dictionary.mean, dictionary.weights):
        if array is not None:
            digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def open_codes(path: PathLike) -> xr.Dataset:
    """Open a codes store as a Dask-backed dataset, one Dask chunk per Zarr chunk.

    Parameters
    ----------
    path : path or fsspec URL

    Returns
    -------
    xarray.Dataset
        `atom` int32 and `coefficient` over (`sample`, `slot`), as `DBKSVD.transform` gives them; the attributes
        of the store: `n_atoms`, `k`, `params`, `dictionary`, `store` and `metrics` among them.
    """
    text, attributes = _checked(path)
    variables = {name: (("sample", "slot"), _lazy(text, name)) for name in ("atom", "coefficient")}
    return xr.Dataset(variables, attrs=attributes)


def open_statistics(path: PathLike) -> xr.Dataset:
    """Read the statistics of a codes store: a dataset in memory over `atom`, `rank`, `l0` and `error_bin`.

    Parameters
    ----------
    path : path or fsspec URL

    Returns
    -------
    xarray.Dataset
        See the head of this module; the attributes of the store, and `l1_sum`.
    """
    text, attributes = _checked(path)
    group = remote.open_zarr(remote.join(text, STATISTICS))
    assert isinstance(group, zarr.Group)
    variables = {name: (dims, np.asarray(group[name][...])) for name, dims in STATISTIC_DIMS.items()}
    return xr.Dataset(variables, attrs={**attributes, **group.attrs})


def stored_code_moments(statistics: xr.Dataset) -> CodeMoments:
    """Give the statistics as `evaluate.codes` knows them, for its summaries and histograms.

    Parameters
    ----------
    statistics : what `open_statistics` returned
    """
    values = {name: np.asarray(statistics[name]) for name in STATISTIC_DIMS}
    return CodeMoments(
        n_samples=int(statistics.attrs["n_samples"]),
        l1_sum=float(statistics.attrs["l1_sum"]),
        l0_histogram=values["l0_histogram"],
        n_active=values["count"],
        n_positive=values["positive_count"],
        total=values["coefficient_sum"],
        square=values["coefficient_square_sum"],
        largest=values["abs_max"],
    )


def codes_attributes(path: PathLike) -> dict[str, Any]:
    """Read the attributes of a finished codes store."""
    return _checked(path)[1]


def verify_codes(path: PathLike) -> int:
    """Read all codes, compare every chunk with its checksums and return the number of chunks.

    Raises
    ------
    StoreError
        When a chunk is missing or differs; it lists all that differ.
    """
    text, _ = _checked(path)
    group = remote.open_zarr(text)
    assert isinstance(group, zarr.Group)
    expected = np.asarray(group[CHECKSUMS][...])
    readers = [_reader(text, name) for name in ("atom", "coefficient")]
    bad = []
    for chunk in range(len(expected)):
        blocks = (reader.read_stored(*reader.chunk_bounds(chunk)) for reader in readers)
        if [zlib.crc32(block.reshape(-1).view(np.uint8).data) for block in blocks] != expected[chunk].tolist():
            bad.append(chunk)
    if bad:
        raise StoreError(
            f"chunks {atomic.describe_parts(bad)} of {text} differ from their checksums; restore these files or "
            "encode again"
        )
    return len(expected)


def _checked(path: PathLike) -> tuple[str, dict[str, Any]]:
    """Refuse what is no finished codes store of this version; give its place and attributes."""
    text = remote.normalise(path)
    if not remote.exists(text):
        begun = f"; an unfinished encode is at {text}.partial" if remote.exists(f"{text}.partial") else ""
        raise StoreError(f"no codes at {text}{begun}; make them with `dbksvd encode STORE RUN {text}`")
    node = remote.open_zarr(text)
    attributes = dict(node.attrs)
    kind = attributes.get("format", "of no known format")
    if kind != CODES_FORMAT:
        raise StoreError(f"{text} is {kind!r}, not {CODES_FORMAT!r}; make codes with `dbksvd encode`")
    found = attributes.get("format_version")
    if found != CODES_VERSION:
        raise MismatchError(
            f"{text} has {CODES_FORMAT} version {found}, written by dbksvd-dask "
            f"{attributes.get('package_version')}; this is dbksvd-dask {dbksvd_dask.__version__}, which reads "
            f"version {CODES_VERSION}; install a matching version"
        )
    if not attributes.get("complete"):
        raise StoreError(
            f"{text} is not finished; run `dbksvd encode` again, or with --finish if all parts are done"
        )
    return text, attributes


def _lazy(path: str, name: str) -> da.Array:
    reader = _reader(path, name)
    chunks = (reader.chunk_rows, *reader.row_shape)
    rows: da.Array = da.from_array(RowsAsArray(reader), chunks=chunks, asarray=False)  # type: ignore[no-untyped-call]
    return rows


def _reader(path: str, name: str) -> RowReader:
    # a chunk that is not there is damage, not a chunk of zeros
    return dataclasses.replace(open_aligned(path, name), complete=True)
