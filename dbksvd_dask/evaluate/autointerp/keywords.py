"""Explanations without a language model: the words that set an atom's strongest texts apart."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.autointerp.protocols import Example, Sample
from dbksvd_dask.evaluate.autointerp.selection import AtomSelection


class KeywordExplainer:
    """Class-based tf-idf: frequent in the atom's strongest texts, rare in those of other atoms.

    The weight of word t for one atom is ``tf / n * log(1 + A / f)``: its count and the number of words in the
    atom's texts, the mean number of words per atom, and its count in the texts of all atoms.

    Parameters
    ----------
    groups : sequence of sequence of str
        The strongest texts of every atom that will be explained; see `strongest_texts`.
    n_keywords : int, default 10
    stop_words : str or list of str, optional
        Passed to scikit-learn's `CountVectorizer`; default "english".
    ngram_range : (int, int), default (1, 1)
        Shortest and longest run of words that counts as one.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        *,
        n_keywords: int = 10,
        stop_words: str | list[str] | None = "english",
        ngram_range: tuple[int, int] = (1, 1),
    ) -> None:
        if not groups:
            raise InputError("class-based tf-idf compares atoms; pass the strongest texts of at least one atom")
        self._n_keywords = n_keywords
        self._analyse: Any = CountVectorizer(stop_words=stop_words, ngram_range=ngram_range).build_analyzer()  # type: ignore[no-untyped-call]
        self._frequency = Counter(word for texts in groups for word in self._words(texts))
        self._mean_words = sum(self._frequency.values()) / len(groups)

    def weights(self, texts: Sequence[str]) -> dict[str, float]:
        """Return the weight of every word in the texts of one atom."""
        counts = Counter(self._words(texts))
        n = sum(counts.values())
        return {
            word: count / n * float(np.log1p(self._mean_words / max(self._frequency[word], 1)))
            for word, count in counts.items()
        }

    def explain(self, examples: Sequence[Example]) -> str:
        """Name the heaviest words, heaviest first, joined by commas; equal weights in alphabetical order."""
        weights = self.weights([_text(e.sample) for e in examples])
        ranked = sorted(weights, key=lambda word: (-weights[word], word))
        return ", ".join(ranked[: self._n_keywords])

    def _words(self, texts: Sequence[str]) -> list[str]:
        return [word for text in texts for word in self._analyse(text)]


def strongest_texts(selections: Sequence[AtomSelection], samples: Sequence[Sample]) -> list[list[str]]:
    """Gather the explaining texts of every selected atom, for `KeywordExplainer`."""
    return [[_text(samples[int(i)]) for i in s.explain_samples] for s in selections]


def _text(sample: Sample) -> str:
    if not isinstance(sample, str):
        raise InputError(
            f"keywords need texts, received {type(sample).__name__}; use an explainer that reads images, such as "
            "OpenAIExplainer"
        )
    return sample
