"""The codes store: a Zarr v3 group with the codes of a whole activation store, and their statistics per atom.

```
CODES/zarr.json            format, version, n_atoms, k, parameters, fingerprints, metrics, `complete`
CODES/atom/                int32 (sample, slot), -1 where a slot is empty
CODES/coefficient/         float32 or float16 (sample, slot)
CODES/crc32c/              checksums of the rows of every chunk of both
CODES/statistics/          over all samples, gathered in the same pass
    count, positive_count              int64 (atom,)    samples on which the atom is active, and positive
    coefficient_sum, coefficient_square_sum, abs_max    float64 (atom,)
    top_sample, top_coefficient        int64 and float32 (atom, rank)  largest positive, -1 and 0 where fewer
    bottom_sample, bottom_coefficient  the same of the negative ones, farthest from zero first
    l0_histogram                       int64 (l0,)      samples with 0, 1, ... k active atoms
    error_histogram                    int64 (error_bin,)  samples by relative error; the last bin is >= 1
```

Codes are in whole-row chunks aligned with those of the activations. The statistics are in a group of their
own because a dimension and a variable of one dataset cannot both be called `atom`. Writing is in `codes_writer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import dbksvd_dask
from dbksvd_dask.base.late import late
from dbksvd_dask.errors import MismatchError, StoreError
from dbksvd_dask.evaluate._check import describe_wrong_atom
from dbksvd_dask.evaluate.codes import CodeMoments
from dbksvd_dask.evaluate.sums import LargestCoefficients
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import RowsAsArray
from dbksvd_dask.store.checksums import CHECKSUMS, KINDS, kind_in
from dbksvd_dask.store.dictionary import ATTRIBUTES_CRC, attributes_checksum
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.reader import RowReader, open_aligned
from dbksvd_dask.store.verify import differing_chunks, read_checksums

if TYPE_CHECKING:
    import xarray as xr
else:
    xr = late("xarray")

CODES_FORMAT = "dbksvd-codes"
# 2: checksums of the attributes and of the statistics; 3: CRC-32C instead of CRC-32; 4: top samples by sign
CODES_VERSION = 4
READABLE_VERSIONS = (2, 3, 4)
BY_SIGN = 4  # before, `top_*` held the largest |coefficient|, and there was no `bottom_*`
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
    "bottom_sample": ("atom", "rank"),
    "bottom_coefficient": ("atom", "rank"),
    "l0_histogram": ("l0",),
    "error_histogram": ("error_bin",),
}


def open_statistics(path: PathLike) -> xr.Dataset:
    """Read the statistics of a codes store: a dataset in memory over `atom`, `rank`, `l0` and `error_bin`.

    Parameters
    ----------
    path : path or fsspec URL

    Returns
    -------
    xarray.Dataset
        `count`, `positive_count`, `coefficient_sum`, `coefficient_square_sum` and `abs_max` of every atom; its
        samples of the largest positive coefficients (`top_sample`, `top_coefficient`) and of the largest negative
        ones (`bottom_sample`, `bottom_coefficient`), -1 where there are fewer; `l0_histogram`,
        `error_histogram`; the attributes of the store, and `l1_sum`. Codes written before format version 4 kept
        one list for both signs: theirs may end early.

    Examples
    --------
    >>> from dbksvd_dask import DBKSVD, encode_store, import_activations, open_statistics
    >>> _ = import_activations("activations.npy", "store.zarr")
    >>> _ = DBKSVD(n_atoms=12, k=2, n_iter=2, checkpoint="run").fit("store.zarr")
    >>> _ = encode_store("store.zarr", "run", "codes.zarr", n_top=5)
    >>> open_statistics("codes.zarr")["top_sample"].shape
    (12, 5)
    """
    text, attributes = checked_codes(path)
    place = paths.join(text, STATISTICS)
    group = paths.open_group(place)
    by_sign = attributes["format_version"] >= BY_SIGN
    names = [name for name in STATISTIC_DIMS if by_sign or not name.startswith("bottom_")]
    arrays = {name: paths.read_array(place, group, name) for name in names}
    _check_statistics(place, arrays, attributes, dict(group.attrs))
    if not by_sign:
        mixed = LargestCoefficients(arrays["top_sample"], arrays["top_coefficient"])
        for name, sign in (("top", 1), ("bottom", -1)):
            one = mixed.only(sign)
            arrays |= {f"{name}_sample": one.sample, f"{name}_coefficient": one.coefficient}
    variables = {name: (dims, arrays[name]) for name, dims in STATISTIC_DIMS.items()}
    return xr.Dataset(variables, attrs={**attributes, "l1_sum": group.attrs["l1_sum"]})


def statistics_checksums(arrays: Mapping[str, npt.NDArray[Any]], kind: str = CHECKSUMS) -> dict[str, int]:
    """Return the checksums of the statistics, kept as an attribute of their group that is named `kind`."""
    return {name: KINDS[kind](array, 0) for name, array in arrays.items()}


def _check_statistics(
    place: str, arrays: dict[str, npt.NDArray[Any]], attributes: dict[str, Any], own: dict[str, Any]
) -> None:
    """Refuse statistics that differ from what was written, or name atoms or samples that do not exist."""
    damaged = f"{place} is damaged"
    advice = "restore this folder or encode again with `dbksvd encode`"
    if not isinstance(own.get("l1_sum"), int | float):
        raise StoreError(f"{damaged}: it has no `l1_sum`; {advice}")
    n_atoms, n_samples = int(attributes["n_atoms"]), int(attributes["n_samples"])
    kind = kind_in(own) or CHECKSUMS
    expected, found = own.get(kind), statistics_checksums(arrays, kind)
    for name, array in arrays.items():
        dims = STATISTIC_DIMS[name]
        if array.ndim != len(dims) or (dims[0] == "atom" and len(array) != n_atoms):
            raise StoreError(f"{damaged}: `{name}` has shape {array.shape} for {n_atoms} atoms; {advice}")
        if not isinstance(expected, dict) or expected.get(name) != found[name]:
            raise StoreError(f"{damaged}: `{name}` differs from its checksum; {advice}")
    for name in (name for name in arrays if name.endswith("_sample")):
        listed = arrays[name]
        if listed.size and not -1 <= int(listed.min()) <= int(listed.max()) < n_samples:
            raise StoreError(f"{damaged}: `{name}` names samples outside 0 to {n_samples - 1}; {advice}")


def stored_code_moments(statistics: xr.Dataset) -> CodeMoments:
    """Return the statistics as `CodeMoments`, for its summaries and histograms.

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
    return checked_codes(path)[1]


def verify_codes(path: PathLike) -> int:
    """Read all codes, compare every chunk with its checksums and return the number of chunks.

    Raises
    ------
    StoreError
        When a chunk is missing or differs; it lists all that differ.
    """
    text, attributes = checked_codes(path)
    readers = codes_readers(text, attributes)
    checksums = read_checksums(text, readers[0].n_chunks)
    if checksums.names != [reader.array for reader in readers]:
        raise StoreError(f"{text} is damaged: its checksums are of the arrays {checksums.names}; encode again")
    open_statistics(text)  # compares their checksums
    bad = differing_chunks(readers, checksums)
    if bad:
        raise StoreError(
            f"chunks {atomic.describe_parts(bad)} of {text} differ from their checksums; restore these files or "
            "encode again"
        )
    return readers[0].n_chunks


def checked_codes(path: PathLike) -> tuple[str, dict[str, Any]]:
    """Refuse what is not a finished codes store that this version reads; return its path and attributes."""
    text = paths.normalise(path)
    if not paths.exists(text):
        begun = f"; an unfinished encode is at {text}.partial" if paths.exists(f"{text}.partial") else ""
        raise StoreError(f"no codes at {text}{begun}; make them with `dbksvd encode STORE RUN {text}`")
    node = paths.open_zarr(text)
    attributes = dict(node.attrs)
    kind = attributes.get("format", "of no known format")
    if kind != CODES_FORMAT:
        raise StoreError(f"{text} is {kind!r}, not {CODES_FORMAT!r}; make codes with `dbksvd encode`")
    found = attributes.get("format_version")
    if found not in READABLE_VERSIONS:
        raise MismatchError(
            f"{text} has {CODES_FORMAT} version {found}, written by dbksvd-dask "
            f"{attributes.get('package_version')}; this is dbksvd-dask {dbksvd_dask.__version__}, which reads "
            f"versions {READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}; install a matching version"
        )
    if not attributes.get("complete"):
        raise StoreError(
            f"{text} is not finished; run `dbksvd encode` again, or `dbksvd encode --finish` if all parts are done"
        )
    if attributes.get(ATTRIBUTES_CRC) != attributes_checksum(attributes):
        raise StoreError(f"{text} is damaged: its attributes are not what was written; encode again")
    for name in ("n_atoms", "n_samples", "k"):
        value = attributes.get(name)
        if type(value) is not int or value < 1:
            raise StoreError(f"{text} is damaged: its attribute `{name}` is {value!r}; encode again")
    return text, attributes


class CheckedAtoms(RowsAsArray):
    """The indices of atoms in a codes store; each block is checked as it is read: kernels use indices unchecked.

    Parameters
    ----------
    reader : RowReader
    n_atoms : int
        Atoms of the dictionary; an index is -1 to n_atoms - 1.
    """

    def __init__(self, reader: RowReader, n_atoms: int) -> None:
        super().__init__(reader)
        self.n_atoms = n_atoms

    def _rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        rows = super()._rows(start, stop)
        wrong = describe_wrong_atom(rows, self.n_atoms, start)
        if wrong is not None:
            raise StoreError(f"{self.reader.path} is damaged: {wrong}; encode again with `dbksvd encode`")
        return rows


def codes_readers(path: str, attributes: dict[str, Any]) -> tuple[RowReader, RowReader]:
    """Open the indices and the coefficients, two arrays of the shape in the attributes."""
    atom, coefficient = (_reader(path, name) for name in ("atom", "coefficient"))
    for reader, kind in ((atom, "i"), (coefficient, "f")):
        if reader.dtype.kind != kind or len(reader.row_shape) != 1:
            raise StoreError(
                f"{path} is damaged: `{reader.array}` has dtype {reader.dtype} and shape "
                f"{(reader.n_samples, *reader.row_shape)}; encode again"
            )
    stated = (attributes["n_samples"], attributes["k"])
    if not atom.shape == coefficient.shape == stated or atom.chunk_rows != coefficient.chunk_rows:
        raise StoreError(
            f"{path} is damaged: `atom` has shape {atom.shape}, `coefficient` {coefficient.shape}, in chunks of "
            f"{atom.chunk_rows} and {coefficient.chunk_rows} rows, its attributes say {stated}; encode again"
        )
    return atom, coefficient


def _reader(path: str, name: str) -> RowReader:
    # a missing chunk is damage, not a chunk of zeros
    return dataclasses.replace(open_aligned(path, name), complete=True)
