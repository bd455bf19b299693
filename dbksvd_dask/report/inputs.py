"""What a report is made from: a dictionary, its codes and the samples behind them, checked against each other."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from dbksvd_dask.codes import open_codes
from dbksvd_dask.dictionary import Dictionary, dictionary_fingerprint
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.evaluate.codes import CodeMoments
from dbksvd_dask.evaluate.reconstruction import reconstruction_summary, require_codes_of, stream_reconstruction
from dbksvd_dask.report.facts import CodeReader
from dbksvd_dask.report.images import ArrayImages, FeatureImages, StoreImages, pictures_beside
from dbksvd_dask.report.samples import (
    Samples,
    StoreTexts,
    TextSamples,
    TokenSamples,
    has_array,
    provenance,
    texts_beside,
)
from dbksvd_dask.store import paths
from dbksvd_dask.store.codes import open_statistics, stored_code_moments
from dbksvd_dask.store.reader import fingerprint, open_rows
from dbksvd_dask.store.runs import as_dictionary


def is_store(path: str) -> bool:
    """Tell a Zarr store from a file."""
    return paths.is_remote(path) or Path(path).is_dir()


def open_samples(samples: Any, n_samples: int, image_shape: Sequence[int] | None = None) -> Samples:
    """Open samples, whatever they are.

    Parameters
    ----------
    samples : None, path of a text file or of an activation store, sequence of str, or array of images
        Images of shape (n_samples, height, width) or (n_samples, height, width, 3).
    n_samples : int
        Of the codes.
    image_shape : (height, width) or (height, width, 3), optional
        The rows of the store are pictures of this shape.
    """
    if samples is None:
        return Samples(n_samples)
    if isinstance(samples, str | os.PathLike):
        path = paths.normalise(samples)
        if not is_store(path):
            return TextSamples(path, n_samples)
        return _open_store(path, n_samples, image_shape)
    if hasattr(samples, "ndim") and samples.ndim >= 3:
        return ArrayImages(np.asarray(samples), n_samples)
    return TextSamples(_as_texts(samples), n_samples)


def _open_store(path: str, n_samples: int, image_shape: Sequence[int] | None) -> Samples:
    known = provenance(path)
    if image_shape is not None or known.get("kind") == "image patches":
        return StoreImages(path, n_samples, image_shape)
    pictures = pictures_beside(path)
    if pictures is not None:
        return FeatureImages(path, pictures, n_samples)
    texts = texts_beside(path)
    if texts is None:
        raise InputError(
            f"{path} has no texts{_missing(known)} and is not a store of images; import it with texts=FILE, or "
            "give samples=FILE with one line per sample, or, for pictures, image_shape=(H, W, 3)"
        )
    if all(has_array(path, name) for name in ("text", "start", "end")):
        return TokenSamples(path, texts, n_samples)
    if has_array(path, "text"):
        return StoreTexts(path, texts, n_samples)
    return TextSamples(texts, n_samples)


def _missing(known: Mapping[str, Any]) -> str:
    return f" (its file {known['texts']} is not beside it)" if known.get("texts") else ""


def _as_texts(samples: Iterable[Any]) -> list[str]:
    texts = list(samples)
    wrong = next((t for t in texts if not isinstance(t, str)), None)
    if wrong is not None:
        raise InputError(
            f"samples hold a {type(wrong).__name__}; pass texts, an array of images of shape (n_samples, height, "
            "width, 3), or a path"
        )
    return texts


# ---------------------------------------------------------------------------------------------- inputs

logger = logging.getLogger(__name__)

# Where codes carry no errors of their own, those of this many first samples are measured.
ERROR_SAMPLES = 262_144


@dataclass(frozen=True, eq=False)
class Errors:
    """How well the codes reconstruct the samples.

    Attributes
    ----------
    histogram : int64 ndarray of shape (101,)
        Samples by relative error: 100 equal bins over [0, 1), then those at 1 and above.
    numbers : dict
        Mean relative error, variance explained, FVU, cosine similarity, shrinkage.
    n_samples : int
    """

    histogram: NDArray[np.int64]
    numbers: dict[str, float | None]
    n_samples: int


@dataclass(frozen=True, eq=False)
class Inputs:
    """Everything a report reads."""

    dictionary: Dictionary
    reader: CodeReader
    samples: Samples
    moments: CodeMoments | None  # where the codes' store holds them already
    errors: Errors | None
    codes_about: dict[str, Any]


def open_inputs(
    run: Any,
    codes: Any,
    samples: Any = None,
    activations: Any = None,
    image_shape: Sequence[int] | None = None,
    max_samples: int | None = None,
) -> Inputs:
    """Open everything and refuse what does not belong together; parameters as in `write_report`."""
    dictionary = as_dictionary(run)
    path = paths.normalise(codes) if isinstance(codes, str | os.PathLike) else None
    dataset = codes if path is None else open_codes(path)
    if not isinstance(dataset, xr.Dataset):
        raise InputError(f"codes are a {type(dataset).__name__}; pass a codes store or what transform() returned")
    require_same_dictionary(dataset, dictionary)
    total = int(dataset.sizes["sample"])
    if samples is None:
        found = _recorded(dataset, path, total, image_shape)
    else:
        found = open_samples(samples, total, image_shape)
        if found.kind == "text" and found.store is None:
            _warn_of_shuffle(dataset)
    if image_shape is not None and found.kind != "image":
        raise InputError(
            f"image_shape={tuple(image_shape)} needs the store whose rows are the pictures; give it as "
            "samples=STORE"
        )
    reader = CodeReader(dataset, dictionary.n_atoms, max_samples)
    whole = path is not None and reader.n_samples == total
    statistics = open_statistics(path) if path is not None and whole else None
    moments = None if statistics is None else stored_code_moments(statistics)
    errors = _stored_errors(statistics)
    if activations is not None or (errors is None and found.store is not None):
        errors = measure_errors(reader, dictionary, found.store if activations is None else activations)
    return Inputs(dictionary, reader, found, moments, errors, dict(dataset.attrs))


def require_same_dictionary(codes: xr.Dataset, dictionary: Dictionary) -> None:
    """Refuse stored codes that were made with another dictionary."""
    stated = codes.attrs.get("dictionary")
    known = stated.get("fingerprint") if isinstance(stated, Mapping) else None
    if known is not None and known != dictionary_fingerprint(dictionary):
        raise MismatchError(
            f"{_how_they_differ(dict(codes.attrs), dictionary)}; give the run that made them, or encode again "
            "with `dbksvd encode`"
        )


def _how_they_differ(codes: Mapping[str, Any], dictionary: Dictionary) -> str:
    """Say in what the dictionary of codes differs from another: size, iteration, or only the atoms themselves."""
    made = codes["dictionary"]
    place = f" ({made['path']})" if made.get("path") else ""
    if codes.get("n_atoms") != dictionary.n_atoms:
        sizes = f"of {codes.get('n_atoms')} atoms, this one has {dictionary.n_atoms}"
        return f"the codes were made with another dictionary{place} {sizes}"
    if made.get("iteration") != dictionary.iteration:
        then = f"the codes were made at iteration {made.get('iteration')}{place}"
        return f"{then}, the run is at {dictionary.iteration}"
    return f"the codes were made with another dictionary{place} of as many atoms and iterations"


def _recorded(
    codes: xr.Dataset, codes_path: str | None, n_samples: int, image_shape: Sequence[int] | None
) -> Samples:
    """Open the samples of the store that the codes name, if it exists and says what they are."""
    stated = codes.attrs.get("store")
    if not isinstance(stated, Mapping) or not stated.get("path"):
        return Samples(n_samples)
    try:
        path = _find_store(stated, codes_path)
        return Samples(n_samples) if path is None else open_samples(path, n_samples, image_shape)
    except (StoreError, InputError) as error:
        if image_shape is not None:  # asked for: no page without the pictures
            raise
        logger.warning("the page shows numbers of samples instead of texts: %s", error)
        return Samples(n_samples)


def _find_store(stated: Mapping[str, Any], codes_path: str | None) -> str | None:
    """Find the store that was encoded: where it was, or beside its codes, should both have moved.

    Parameters
    ----------
    stated : what the codes say of the store: path and fingerprint
    codes_path : None for codes that are not on disk
    """
    places = [stated["path"]]
    if codes_path is not None and not paths.is_remote(codes_path) and not paths.is_remote(stated["path"]):
        places.append(os.path.join(os.path.dirname(codes_path), os.path.basename(stated["path"])))
    found = [place for place in places if is_store(place)]
    for place in found:
        if fingerprint(place) == stated["fingerprint"]:
            return place
    logger.warning(
        "the page shows numbers of samples: the store that was encoded, %s, %s; give samples=STORE",
        stated["path"],
        "has other contents now" if found else "is not here",
    )
    return None


def _warn_of_shuffle(codes: xr.Dataset) -> None:
    """Warn that texts by number do not belong to the rows of a shuffled store."""
    stated = codes.attrs.get("store")
    path = stated.get("path") if isinstance(stated, Mapping) else None
    if path and not paths.is_remote(path) and is_store(path) and provenance(path).get("command") == "shuffle":
        logger.warning(
            "%s was shuffled: its row i is not text i, unless the texts were put in the same order; texts that "
            "are imported (import with texts=FILE) stay with their rows",
            path,
        )


_NUMBERS = ("mean_relative_error", "variance_explained", "fvu", "cosine_similarity", "shrinkage")


def _stored_errors(statistics: xr.Dataset | None) -> Errors | None:
    if statistics is None or not int(statistics["error_histogram"].sum()):
        return None
    metrics = statistics.attrs.get("metrics", {})
    numbers = {name: metrics.get(name) for name in _NUMBERS}
    return Errors(np.asarray(statistics["error_histogram"]), numbers, int(statistics.attrs["n_samples"]))


def measure_errors(reader: CodeReader, dictionary: Dictionary, activations: Any) -> Errors:
    """Compare the first samples with their reconstruction from codes.

    Parameters
    ----------
    reader : CodeReader
    dictionary : Dictionary
    activations : path of an activation store, or array_like of shape (n_samples, n_features)
    """
    source = open_rows(activations) if isinstance(activations, str | os.PathLike) else np.asarray(activations)
    if source.shape[0] < reader.n_samples or source.shape[1] != dictionary.n_features:
        raise MismatchError(
            f"activations of shape {tuple(source.shape)} do not fit codes of {reader.n_samples} samples and atoms "
            f"of {dictionary.n_features} features; give the activations that were encoded"
        )

    def blocks() -> Iterator[tuple[Any, Any, Any]]:
        for first, atom, coefficient in reader.placed_blocks():
            stop = min(first + len(atom), ERROR_SAMPLES)
            if stop <= first:
                return
            rows = source[first:stop] if isinstance(source, np.ndarray) else source.read(first, stop)
            if first == 0:
                few = slice(0, 256)
                _require_own_codes(dictionary, rows[few], atom[few], coefficient[few])
            yield rows, atom[: stop - first], coefficient[: stop - first]

    sums = stream_reconstruction(blocks(), dictionary.atoms, dictionary.mean)
    whole = reconstruction_summary(sums)
    numbers = {f.name: getattr(whole, f.name) for f in fields(whole) if f.name in _NUMBERS}
    numbers["variance_explained"] = whole.variance_explained.value
    return Errors(sums.error_histogram, numbers, whole.n_samples)


def _require_own_codes(
    dictionary: Dictionary, rows: NDArray[Any], atom: NDArray[Any], coefficient: NDArray[Any]
) -> None:
    """Refuse codes of another dictionary, by errors in the coordinates in which this one encodes."""
    Y, D, W = _centred(rows, dictionary), dictionary.atoms, dictionary.whitening
    if W is not None:
        Y, D = Y @ W, D @ W
    require_codes_of(Y, D, atom, coefficient)


def _centred(rows: NDArray[Any], dictionary: Dictionary) -> NDArray[Any]:
    return rows.astype(np.float32) - (0.0 if dictionary.mean is None else dictionary.mean.astype(np.float32))
