"""`encode`: samples to codes with any dictionary. `fit_linear_encoder`: an encoder that imitates it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dbksvd_dask.base.late import is_instance
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.linear import LinearEncoder
from dbksvd_dask.plan import seeds, units
from dbksvd_dask.plan.params import DEVICES, ENCODES, check_choice, check_integer
from dbksvd_dask.store.runs import as_dictionary

# What computes (kernels, graphs, codes) is imported in the functions that use it, and loads with the first call.

if TYPE_CHECKING:
    import xarray as xr

    from dbksvd_dask.graph.encode import EncodePlan
    from dbksvd_dask.graph.sources import Source

# Samples to which a linear encoder is fitted: as many as the mean of a fit is computed over.
LINEAR_ROWS = 262_144


def encode(
    Y: Any,
    dictionary: Any,
    k: int | None = None,
    *,
    mean: np.ndarray | None = None,
    encoder: str | None = None,
    nonneg: bool | None = None,
    refit: bool | None = None,
    min_coefficient: float | None = None,
    rtol: float | None = None,
    chunk_size: int = 8192,
    device: str = "auto",
    groups: Any = None,
    gram: str | None = None,
) -> xr.Dataset:
    """Encode samples with a given dictionary; the same as `DBKSVD.transform`.

    Parameters
    ----------
    Y : ndarray, dask array, xarray.DataArray or path/URL of a Zarr store, (n_samples, n_features)
    dictionary : ndarray or DataArray of shape (n_atoms, n_features), whose rows are normalised; or a fitted one
        A fitted one is what `open_dictionary` returned, the path of a dictionary or of the folder of a fit, or a
        fitted `DBKSVD`. It encodes as it was fitted, with its mean, groups, threshold and weights.
    k : most nonzeros per sample
        With a fitted dictionary, None or the k of its fit; another k sets its threshold aside.
    mean : ndarray of shape (n_features,) subtracted from every sample, or None
    encoder, nonneg, refit, min_coefficient, rtol, gram
        As for `DBKSVD`; None for those of the fit, or for an ndarray the defaults of `DBKSVD`.
    device : {"auto", "cpu", "gpu"}; where the heavy work runs
    groups : tuple of int, "exponential" or None
        Sizes of groups that are offered in order, with equal shares of k, as ``DBKSVD(encode="staged")`` does;
        None for one pursuit over all atoms.

    Returns
    -------
    Dataset with `atom` and `coefficient` over (`sample`, `slot`); Dask-backed for lazy input

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import encode
    >>> codes = encode(np.array([[3.0, 0.0], [1.0, 2.0]], "f4"), np.eye(2, dtype="f4"), k=1)
    >>> codes["atom"].values.tolist(), codes["coefficient"].values.tolist()
    ([[0], [1]], [[3.0], [2.0]])
    """
    from dbksvd_dask.codes import label_codes

    given = {
        "encoder": encoder,
        "nonneg": nonneg,
        "refit": refit,
        "min_coefficient": min_coefficient,
        "rtol": rtol,
        "gram": gram,
    }
    source = as_source(Y, chunk_size)
    if isinstance(dictionary, Dictionary | str | os.PathLike) or hasattr(dictionary, "to_dictionary"):
        _require_own(mean=mean, groups=groups)
        found = as_dictionary(dictionary)
        given |= {"k": None if k == found.params.get("k") else k}
    else:
        found, given = _of_atoms(dictionary, source, mean, {"k": k, "groups": groups, **given}), {}
    check_width(source, found.n_features, "Y")
    plan = placed_plan(found, check_choice("device", device, DEVICES), chunk_size, given)
    return label_codes(encode_source(source, found.atoms, plan), Y)


def fit_linear_encoder(
    dictionary: Any,
    Y: Any,
    *,
    n_rows: int = LINEAR_ROWS,
    chunk_size: int = 8192,
    seed: int = 0,
    encode: str | None = None,
) -> LinearEncoder:
    """Fit an encoder of one linear step and a threshold to the codes of a dictionary.

    It imitates how the dictionary encodes (`encode` without changes), at the cost of a matrix product per sample.
    Two passes over the rows, on the current scheduler, on the CPU; the same bits on any scheduler.

    Parameters
    ----------
    dictionary : Dictionary, fitted `DBKSVD`, or path of a dictionary or of the folder of a fit
    Y : ndarray, dask array, xarray.DataArray or path/URL of a Zarr store, (n_samples, n_features)
        Samples like those that it was fitted on.
    n_rows : int, default 262144
        Most samples to fit to, drawn at random; at least as many as there are features.
    chunk_size : int, default 8192
        Samples per task. The last bits of the result depend on it.
    seed : int, default 0
        Of the draw.
    encode : {"plain", "staged"}, optional
        The codes to imitate: those of one pursuit over all atoms, or of the groups in order; default: as fitted.

    Returns
    -------
    LinearEncoder

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import DBKSVD, fit_linear_encoder
    >>> Y = np.random.default_rng(0).standard_normal((500, 16)).astype("float32")
    >>> model = DBKSVD(n_atoms=32, k=4, n_iter=3, nonneg=True).fit(Y)
    >>> encoder = fit_linear_encoder(model, Y)
    >>> encoder
    <LinearEncoder: 32 latents of 16 features, fitted to the codes of 500 samples>
    >>> encoder.encode(Y).shape
    (500, 32)
    """
    from dbksvd_dask.graph.linear import fit_linear

    found = as_dictionary(dictionary)
    if encode is not None:
        check_choice("encode", encode, ENCODES)
    source = as_source(Y, check_integer("chunk_size", chunk_size, 1))
    check_width(source, found.n_features, "Y")
    n = min(check_integer("n_rows", n_rows, 1), source.n_samples)
    if n < found.n_features:
        raise InputError(
            f"{n} samples are fewer than the {found.n_features} features: no linear map follows from them; use "
            f"{found.n_features} or more, better ten times as many"
        )
    rows = np.sort(seeds.generator(seed, seeds.LINEAR).permutation(source.n_samples)[:n])
    linear = fit_linear(source, rows, found, chunk_size, {"encode": encode})
    return LinearEncoder(found, *linear, n_rows=n)


def _require_own(**given: Any) -> None:
    """Refuse what a fitted dictionary has of its own."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} was given beside a fitted dictionary, which has its own; leave it out")


def _of_atoms(atoms: Any, source: Source, mean: np.ndarray | None, given: dict[str, Any]) -> Dictionary:
    """Return a dictionary of given atoms in the precision of the samples, with what is given as its parameters."""
    from dbksvd_dask.fit import start

    if given["k"] is None:
        raise InputError("k is missing: an array of atoms does not say how many nonzeros a sample has; give k")
    atoms = plain_array(atoms)
    if atoms.ndim != 2:
        raise InputError(f"dictionary has shape {atoms.shape}; it must be (n_atoms, n_features)")
    D = start.unit_rows(atoms, atoms.shape, start.working_dtype(source.dtype))
    params = {name: value for name, value in given.items() if value is not None}
    staged = "staged" if "groups" in params else "plain"
    return Dictionary(D, mean, {"n_atoms": D.shape[0], "encode": staged, **params})


def placed_plan(
    dictionary: Dictionary, device: str, chunk_size: int, given: Mapping[str, Any] | None = None
) -> EncodePlan:
    """How a dictionary encodes blocks of at most `chunk_size` rows on a device."""
    from dbksvd_dask.graph.encode import place_encoding, plan_encoding

    plan = plan_encoding(dictionary, given=given)
    return plan._replace(place=place_encoding(dictionary, plan.spec, device, chunk_size))


def encode_source(source: Source, D: np.ndarray, how: EncodePlan) -> xr.Dataset:
    """Encode all samples of a source, lazily if it is not in memory."""
    from dbksvd_dask.codes import make_codes
    from dbksvd_dask.graph.encode import encode_lazily, encode_now

    attributes = {"n_atoms": int(D.shape[0]), "k": how.spec.k, "encoder": how.spec.encoder}
    if source.in_memory:
        size = units.part_rows(source.n_samples, source.chunk_size)
        atom, coefficient = encode_now(source, D, how, size)
        return make_codes(atom, coefficient, attributes)
    return make_codes(*encode_lazily(source, D, how, source.block_rows), attributes)


def as_source(Y: Any, chunk_size: int) -> Source:
    """Return the samples of an array, a labelled array or a store."""
    from dbksvd_dask.graph import sources

    return sources.as_source(Y, chunk_size)


def check_width(source: Source, n_features: int, what: str) -> None:
    """Refuse samples of another width than that of the dictionary."""
    if source.n_features != n_features:
        raise InputError(
            f"{what} has {source.n_features} features, but DBKSVD is expecting {n_features} features as input"
        )


def plain_array(array: Any) -> np.ndarray:
    """Return an array, or the values of a labelled one."""
    return np.asarray(array.data if is_instance(array, "xarray", "DataArray") else array)
