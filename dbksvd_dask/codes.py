"""Codes as labelled arrays and scipy matrices, and back to samples; walked in blocks; opened; summed up.

Dimensions have one name each throughout the package, whatever the input called them: `sample`, `feature`, `atom`
and `slot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import scipy.sparse as sp
import xarray as xr
from numpy.typing import NDArray

from dbksvd_dask._words import facts_html
from dbksvd_dask.base.late import is_instance, late
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import check_atoms, require_integers
from dbksvd_dask.evaluate.codes import CodeMoments, CodeSummary, code_summary, stream_code_moments
from dbksvd_dask.store.activations import RowsAsArray
from dbksvd_dask.store.codes import CheckedAtoms, checked_codes, codes_readers
from dbksvd_dask.store.paths import PathLike

if TYPE_CHECKING:
    import dask.array as da
else:
    da = late("dask.array")


class Codes(xr.Dataset):
    """A Dataset of codes. It is not one array, and says so where scikit-learn wants one."""

    __slots__ = ()

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse to be an array."""
        raise TypeError(
            "codes are an xarray Dataset of `atom` and `coefficient`, not an array; in a scikit-learn Pipeline "
            "use DBKSVD(..., output='sparse'), elsewhere codes_to_csr(codes)"
        )


def make_codes(atom: Any, coefficient: Any, attributes: dict[str, Any], sample: Any = None) -> xr.Dataset:
    """Codes as a Dataset with `atom` and `coefficient` over (`sample`, `slot`).

    Parameters
    ----------
    atom : (n_samples, k) int32, -1 where empty;  coefficient : (n_samples, k)
    attributes : n_atoms at least
    sample : coordinate of the samples, if the input had one
    """
    dims = ("sample", "slot")
    coords = {} if sample is None else {"sample": sample}
    return Codes({"atom": (dims, atom), "coefficient": (dims, coefficient)}, coords=coords, attrs=dict(attributes))


def _pair(codes: xr.Dataset) -> tuple[Any, Any]:
    """Check that a Dataset holds codes, and give its two arrays."""
    require_codes(codes)
    return codes["atom"].data, codes["coefficient"].data


def codes_to_csr(codes: xr.Dataset, n_atoms: int | None = None) -> sp.csr_array:
    """Codes as a scipy matrix, (n_samples, n_atoms); empty slots and zeros are left out.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    n_atoms : columns; read from the codes' attributes when not given

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import codes_to_csr, encode
    >>> codes = encode(np.array([[3.0, 0.0], [1.0, 2.0]], "f4"), np.eye(2, dtype="f4"), k=1)
    >>> codes_to_csr(codes).toarray()
    array([[3., 0.],
           [0., 2.]], dtype=float32)
    """
    if n_atoms is None:
        n_atoms = codes.attrs.get("n_atoms")
        if n_atoms is None:
            raise InputError("these codes do not say how many atoms there are; pass n_atoms=")
    atom, coefficient = (np.asarray(a) for a in _pair(codes))
    check_atoms(atom, int(n_atoms))
    used = (atom >= 0) & (coefficient != 0)
    indptr = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    matrix = sp.csr_array((coefficient[used], atom[used], indptr), shape=(atom.shape[0], int(n_atoms)))
    matrix.sort_indices()
    return matrix


def _decode_block(
    atom: np.ndarray, coefficient: np.ndarray, D: np.ndarray, mean: Any, first_sample: int = 0
) -> np.ndarray:
    """Reconstruct a block of samples: (n, n_features)."""
    check_atoms(atom, D.shape[0], first_sample)
    used = atom >= 0
    indptr = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    X = sp.csr_array((coefficient[used], atom[used], indptr), shape=(atom.shape[0], D.shape[0]))
    Y = np.asarray(X @ D)
    return Y if mean is None else (Y + mean).astype(D.dtype)


def _decode_lazily(atom: Any, coefficient: Any, D: Any, mean: Any, block_info: Any = None) -> np.ndarray:
    first = block_info[0]["array-location"][0][0] if block_info else 0
    return _decode_block(atom, coefficient, D, mean, first)


def decode(codes: xr.Dataset, D: np.ndarray, mean: np.ndarray | None = None) -> Any:
    """Samples from codes, ``X D + mean``: ndarray, or Dask array for lazy codes, (n_samples, n_features).

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    D : ndarray of shape (n_atoms, n_features)
    mean : ndarray of shape (n_features,), or None

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import decode, encode
    >>> atoms = np.eye(2, dtype="f4")
    >>> decode(encode(np.array([[3.0, 0.0], [1.0, 2.0]], "f4"), atoms, k=1), atoms)
    array([[3., 0.],
           [0., 2.]], dtype=float32)
    """
    atom, coefficient = _pair(codes)
    if is_instance(atom, "dask.array", "Array"):
        rows = atom.rechunk({1: -1}), coefficient.rechunk({1: -1})
        return da.map_blocks(
            _decode_lazily, *rows, D=D, mean=mean, dtype=D.dtype, chunks=(rows[0].chunks[0], (D.shape[1],))
        )
    return _decode_block(np.asarray(atom), np.asarray(coefficient), D, mean)


def decode_csr(X: Any, D: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """Samples from codes as a scipy matrix, ``X D + mean``: ndarray of shape (n_samples, n_features).

    Parameters
    ----------
    X : scipy sparse array of shape (n_samples, n_atoms), as `codes_to_csr` gives it
    D : ndarray of shape (n_atoms, n_features)
    mean : ndarray of shape (n_features,), or None
    """
    if X.shape[1] != D.shape[0]:
        raise InputError(
            f"codes have {X.shape[1]} columns but the dictionary has {D.shape[0]} atoms; use those of one fit"
        )
    try:
        X = sp.csr_array(X)
        X.check_format(full_check=True)  # SciPy multiplies whatever its index arrays say
    except ValueError as error:
        raise InputError(f"these codes are not a valid sparse array: {error}") from error
    Y = np.asarray(X @ D)
    return Y if mean is None else (Y + mean).astype(D.dtype)


# ---------------------------------------------------------------------------------------------- labels

# Attribute of codes whose samples came as a labelled array; what is decoded from them is one again.
LABELLED = "labelled"


def label_codes(codes: xr.Dataset, Y: Any) -> xr.Dataset:
    """Give codes the coordinates of the samples of a labelled array, and a note that it was one.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    Y : the samples they were made of, (n_samples, n_features); anything but a DataArray changes nothing
    """
    if not is_instance(Y, "xarray", "DataArray"):
        return codes
    # a coordinate with the name of a variable or dimension of codes would take its place
    coords = _coords_along(Y, 0, "sample").drop_vars(["atom", "coefficient", "slot"], errors="ignore")
    return codes.assign_coords(coords.coords).assign_attrs({LABELLED: True})


def label_samples(Y: Any, codes: xr.Dataset, dictionary: xr.DataArray) -> Any:
    """Give decoded samples the labels of their codes and of the dictionary's features, if they had any.

    Parameters
    ----------
    Y : array of shape (n_samples, n_features)
    codes : Dataset it was decoded from
    dictionary : DataArray of dims (atom, feature)

    Returns
    -------
    DataArray of dims (sample, feature) when the codes are those of a labelled array, else `Y` itself
    """
    if not codes.attrs.get(LABELLED):
        return Y
    of_samples = codes.drop_vars(["atom", "coefficient"]).coords
    out = xr.DataArray(Y, dims=("sample", "feature"), name="reconstruction")
    return out.assign_coords(of_samples).assign_coords(dictionary.coords)


def feature_coords(Y: Any) -> Any:
    """Coordinates of the features of a labelled array, under the name `feature`; none for any other."""
    if not is_instance(Y, "xarray", "DataArray") or Y.ndim != 2:
        return {}
    return _coords_along(Y, 1, "feature").drop_vars("atom", errors="ignore").coords


def _coords_along(Y: xr.DataArray, axis: int, name: str) -> xr.Dataset:
    """Coordinates of a labelled array along one of its two dimensions, which is then called `name`."""
    dim, other = Y.dims[axis], Y.dims[1 - axis]
    coords = Y.coords.to_dataset()
    foreign = [c for c in coords.variables if other in coords[c].dims]
    if axis == 1:  # what belongs to no dimension goes with the samples
        foreign += [c for c in coords.variables if not coords[c].dims]
    coords = coords.drop_vars(foreign)
    if dim == name or dim not in coords.dims:
        return coords
    coords = coords.drop_vars(name, errors="ignore")
    return coords.rename({dim: name}) if dim in coords.variables else coords.rename_dims({dim: name})


# ---------------------------------------------------------------------------------------------- blocks

# Rows of one block of codes in memory; lazy codes come in blocks of whole chunks of about this many rows.
BLOCK_ROWS = 32_768


def code_blocks(codes: xr.Dataset, start: int = 0, stop: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Walk over codes in blocks of rows, holding one block at a time.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`), in memory or Dask-backed
    start, stop : int, optional
        Rows to walk over; all without them.

    Yields
    ------
    atom : int32 ndarray of shape (rows, n_slots)
    coefficient : ndarray of shape (rows, n_slots)
    """
    require_codes(codes)
    end = codes.sizes["sample"] if stop is None else min(stop, codes.sizes["sample"])
    for a, b in _bounds(codes, start, end):
        yield read_codes(codes, slice(a, b))


def read_codes(codes: xr.Dataset, rows: slice | NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read some rows of codes.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    rows : slice, or increasing int64 ndarray of shape (n_rows,)

    Returns
    -------
    atom, coefficient : ndarray of shape (n_rows, n_slots)
    """
    pair = codes["atom"].data[rows], codes["coefficient"].data[rows]
    atom, coefficient = dask.compute(*pair)
    return np.asarray(atom), np.asarray(coefficient)


def require_codes(codes: Any) -> None:
    """Refuse a Dataset that cannot hold codes: missing arrays, wrong dimensions, or atoms that are not integers.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    """
    missing = [name for name in ("atom", "coefficient") if name not in codes]
    if missing:
        raise InputError(f"codes lack {' and '.join(missing)}; pass what transform() or encode() returned")
    for name in ("atom", "coefficient"):
        if codes[name].dims != ("sample", "slot"):
            raise InputError(f"`{name}` of codes has dimensions {codes[name].dims}; need ('sample', 'slot')")
    require_integers(codes["atom"].dtype)


def _bounds(codes: xr.Dataset, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut rows at chunk borders where codes are lazy, so that no chunk is read twice."""
    chunks = getattr(codes["atom"].data, "chunks", None)
    edges = np.concatenate([[0], np.cumsum(chunks[0])]) if chunks else np.arange(0, stop + BLOCK_ROWS, BLOCK_ROWS)
    begin = start
    for edge in edges.tolist():
        last = min(edge, stop)
        if last > begin and (last - begin >= BLOCK_ROWS or edge >= stop):
            yield begin, last
            begin = last


# ---------------------------------------------------------------------------------------------- stores


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

    Examples
    --------
    >>> from dbksvd_dask import DBKSVD, encode_store, import_activations, open_codes
    >>> _ = import_activations("activations.npy", "store.zarr")
    >>> _ = DBKSVD(n_atoms=12, k=2, n_iter=2, checkpoint="run").fit("store.zarr")
    >>> _ = encode_store("store.zarr", "run", "codes.zarr")
    >>> dict(open_codes("codes.zarr").sizes)
    {'sample': 300, 'slot': 2}
    """
    text, attributes = checked_codes(path)
    atom, coefficient = codes_readers(text, attributes)
    rows = {"atom": CheckedAtoms(atom, int(attributes["n_atoms"])), "coefficient": RowsAsArray(coefficient)}
    variables = {name: (("sample", "slot"), _lazy(array)) for name, array in rows.items()}
    return Codes(variables, attrs=attributes)


def _lazy(rows: RowsAsArray) -> da.Array:
    chunks = (rows.reader.chunk_rows, *rows.reader.row_shape)
    array: da.Array = da.from_array(rows, chunks=chunks, asarray=False)  # type: ignore[no-untyped-call]
    return array


# ---------------------------------------------------------------------------------------------- accessor


def codes_html(summary: CodeSummary, k: int) -> str:
    """Codes: how many, how sparse, which atoms are never or too often active."""
    facts = {
        "samples": f"{summary.n_samples:,}",
        "atoms": f"{summary.n_atoms:,}",
        "slots": k,
        "active per sample": f"{summary.l0_mean:.2f} ({summary.l0_min} to {summary.l0_max})",
        "mean sum of |coefficients|": f"{summary.l1_mean:.4g}",
        "dead atoms": f"{summary.n_dead:,} on these samples",
        "over-dense atoms": f"{summary.n_over_dense:,} active on over {summary.over_dense:.0%}",
        "positive share": f"{summary.sign_balance_mean:.1%}",
    }
    return facts_html("Codes", facts)


@xr.register_dataset_accessor("dbksvd")
class CodesAccessor:
    """`codes.dbksvd`: what codes say about their atoms.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`), with `n_atoms` in its attributes
    """

    def __init__(self, codes: xr.Dataset) -> None:
        self._codes = codes
        self._moments: CodeMoments | None = None

    def moments(self) -> CodeMoments:
        """Counts and sums per atom; lazy codes are read once."""
        if self._moments is None:
            if "atom" not in self._codes or "n_atoms" not in self._codes.attrs:
                raise InputError("these are no codes; use what transform(), encode() or open_codes() returned")
            self._moments = stream_code_moments(
                lambda: code_blocks(self._codes), int(self._codes.attrs["n_atoms"])
            )
        return self._moments

    def summary(self) -> CodeSummary:
        """L0, L1, dead and over-dense atoms, sign balance."""
        return code_summary(self.moments())

    def _repr_html_(self) -> str:
        return codes_html(self.summary(), int(self._codes.sizes["slot"]))

    def __repr__(self) -> str:
        return repr(self.summary())
