"""Finding out what the samples behind some codes are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError
from dbksvd_dask.report.images import ArrayImages, StoreImages
from dbksvd_dask.report.samples import (
    Samples,
    StoreTexts,
    TextSamples,
    TokenSamples,
    has_array,
    provenance,
    texts_beside,
)
from dbksvd_dask.store import remote


def is_store(path: str) -> bool:
    """Tell a Zarr store from a file."""
    return remote.is_remote(path) or Path(path).is_dir()


def open_samples(samples: Any, n_samples: int, image_shape: Sequence[int] | None = None) -> Samples:
    """Find out what samples are.

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
        path = remote.normalise(samples)
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
    texts = texts_beside(path)
    if texts is None:
        raise InputError(
            f"{path} does not say what its samples are: {known.get('texts', 'no file of texts')} is not beside it "
            "and it is no store of images; give a text file with one line per sample, or, for pictures, "
            "image_shape=(height, width, 3) (--image-shape HxWx3)"
        )
    if all(has_array(path, name) for name in ("text", "start", "end")):
        return TokenSamples(path, texts, n_samples)
    if has_array(path, "text"):
        return StoreTexts(path, texts, n_samples)
    return TextSamples(texts, n_samples)


def _as_texts(samples: Iterable[Any]) -> list[str]:
    texts = list(samples)
    wrong = next((t for t in texts if not isinstance(t, str)), None)
    if wrong is not None:
        raise InputError(
            f"samples hold a {type(wrong).__name__}; pass texts, an array of images of shape (n_samples, height, "
            "width, 3), or a path"
        )
    return texts
