"""The figures of `benchmarks.readable` on words whose agreement is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import readable
from dbksvd_dask.report.samples import Excerpt


class Texts:
    """Samples whose excerpts are whole texts."""

    def __init__(self, texts):
        self.texts, self.n_samples = texts, len(texts)

    def excerpts(self, ids):
        return [Excerpt(self.texts[i]) for i in ids]


def test_words_of_equal_contexts_have_similar_vectors(monkeypatch):
    monkeypatch.setattr(readable, "N_DIMENSIONS", 4)
    animals, tools = ["cat", "dog", "cow"], ["saw", "axe", "awl"]
    rng = np.random.default_rng(0)
    filler = [f"w{chr(97 + i)}{chr(97 + j)}" for i in range(10) for j in range(10)]
    texts = [f"the {w} eats some {rng.choice(filler)}" for w in animals for _ in range(40)]
    texts += [f"cut wood with {w} or {rng.choice(filler)}" for w in tools for _ in range(40)]
    vectors = readable.word_vectors(Texts(texts))
    assert vectors["cat"] @ vectors["dog"] > 0.2 + vectors["cat"] @ vectors["saw"]
    near, far = (readable.agreement(words, vectors) for words in (animals, ["cat", "saw"]))
    assert near[2] > far[2]


def test_same_word_and_spelling():
    assert readable.agreement(["bird", "bird"], {})[:2] == [1.0, 1.0]
    same, spelling, _ = readable.agreement(["bird", "birds"], {})
    assert same == 0
    assert spelling == pytest.approx(3 / 6)  # ^bi bir ird are shared; rd$ rds ds$ are not


def test_a_token_is_extended_to_its_word():
    assert readable.words_of([Excerpt("the Cerebrum.", 4, 6)]) == ["cerebrum"]
