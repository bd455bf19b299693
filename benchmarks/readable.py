"""Random atoms of two dictionaries for judging by hand, in random order, and what words alone say about them.

    python -m benchmarks.readable STORE CODES CODES [--atoms 30] [--seed 0] [--key]

STORE is what was encoded, a store of tokens with texts; CODES are the codes of two dictionaries. Prints the eight
strongest tokens of each atom in their contexts without saying which dictionary it is from, so that whoever judges
"do they share one meaning or word family?" does not know. With --key it prints which is which instead, and three
figures: the mean over all pairs of eight strongest tokens, averaged over the atoms, of

- same word: 1 if the two tokens are equal, else 0;
- spelling: the share of character trigrams that both words have (Jaccard);
- context: the cosine of word vectors, the 64 leading singular vectors of a word-by-word matrix of positive
  pointwise mutual information, counted in the texts themselves, five words to either side.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.linalg

from dbksvd_dask import open_statistics
from dbksvd_dask.report.samples import TokenSamples, texts_beside
from dbksvd_dask.store.activations import open_rows

N_STRONGEST = 8
WINDOW, N_DIMENSIONS = 5, 64


def main() -> None:
    """Print the atoms, or the key and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("codes", nargs=2)
    parser.add_argument("--atoms", type=int, default=30, help="of each dictionary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", action="store_true")
    args = parser.parse_args()
    texts = texts_beside(args.store)
    if texts is None:
        parser.error(f"{args.store} has no texts")
    samples = TokenSamples(args.store, texts, open_rows(args.store).n_samples)
    drawn = draw(args.codes, args.atoms, args.seed)
    strongest = [strongest_samples(path, atom) for path, atom in drawn]
    shown = [samples.excerpts(rows) or [] for rows in strongest]
    if not args.key:
        for i, excerpts in enumerate(shown):
            print(f"\n# {i}")
            for excerpt in excerpts:
                a, b = excerpt.start, excerpt.end
                print(f"  {excerpt.text[max(0, a - 40) : a]}<<{excerpt.text[a:b]}>>{excerpt.text[b : b + 40]}")
        return
    vectors = word_vectors(samples)
    for path in args.codes:
        ours = [i for i, (of, _) in enumerate(drawn) if of == path]
        figures = np.mean([agreement(words_of(shown[i]), vectors) for i in ours], axis=0)
        print(f"{path}: numbers {ours}")
        print("  same word {:.3f}, spelling {:.3f}, context {:.3f}".format(*figures))


def draw(codes: list[str], n: int, seed: int) -> list[tuple[str, int]]:
    """Draw n used atoms of each dictionary, in random order."""
    rng = np.random.default_rng(seed)
    pairs = []
    for path in codes:
        used = np.flatnonzero((open_statistics(path).top_sample.values >= 0).sum(axis=1) >= N_STRONGEST)
        pairs += [(path, int(atom)) for atom in rng.choice(used, n, replace=False)]
    return [pairs[i] for i in rng.permutation(len(pairs))]


def strongest_samples(path: str, atom: int) -> npt.NDArray[np.int64]:
    """Return the samples with the largest positive coefficients of an atom, in the order of the store."""
    return np.sort(open_statistics(path).top_sample.values[atom, :N_STRONGEST].astype(np.int64))


def words_of(excerpts: list[Any]) -> list[str]:
    """Return the tokens of excerpts, each as the word that it is part of."""
    words = []
    for excerpt in excerpts:
        a, b = excerpt.start, excerpt.end
        while a > 0 and excerpt.text[a - 1].isalpha():
            a -= 1
        while b < len(excerpt.text) and excerpt.text[b].isalpha():
            b += 1
        words.append(excerpt.text[a:b].lower())
    return words


def agreement(words: list[str], vectors: dict[str, npt.NDArray[np.float64]]) -> list[float]:
    """Return how much words agree: same word, spelling, context; the mean over all pairs."""
    pairs = list(itertools.combinations(words, 2))
    zero = np.zeros(N_DIMENSIONS)
    return [
        float(np.mean([a == b for a, b in pairs])),
        float(np.mean([_jaccard(_trigrams(a), _trigrams(b)) for a, b in pairs])),
        float(np.mean([vectors.get(a, zero) @ vectors.get(b, zero) for a, b in pairs])),
    ]


def _trigrams(word: str) -> set[str]:
    padded = f"^{word}$"
    return {padded[i : i + 3] for i in range(max(1, len(padded) - 2))}


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b)


def word_vectors(samples: Any) -> dict[str, npt.NDArray[np.float64]]:
    """Return unit vectors of the words of all texts, from the words around them."""
    numbers: dict[str, int] = {}
    texts = [[numbers.setdefault(word, len(numbers)) for word in split(text)] for text in all_texts(samples)]
    near: list[tuple[int, int]] = []
    for text in texts:
        for i, word in enumerate(text):
            near += [(word, other) for other in text[i + 1 : i + 1 + WINDOW]]
    rows, columns = np.array(near).T
    ones, size = np.ones(len(near)), (len(numbers), len(numbers))
    counts = scipy.sparse.coo_array((ones, (rows, columns)), size).tocsr()
    counts = (counts + counts.T).tocoo()
    total, each = counts.sum(), np.asarray(counts.sum(axis=0)).ravel()
    pmi = np.log(counts.data * total / (each[counts.row] * each[counts.col]))
    positive = scipy.sparse.csr_array((np.maximum(pmi, 0), (counts.row, counts.col)), size)
    U, s, _ = scipy.sparse.linalg.svds(positive, N_DIMENSIONS, rng=np.random.default_rng(0))
    vectors = U * np.sqrt(s)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return {word: vectors[i] for word, i in numbers.items()}


def all_texts(samples: Any) -> Iterator[str]:
    """Yield every text once."""
    seen: set[str] = set()
    for start in range(0, samples.n_samples, 4096):
        for excerpt in samples.excerpts(np.arange(start, min(start + 4096, samples.n_samples))) or []:
            if excerpt.text not in seen:
                seen.add(excerpt.text)
                yield excerpt.text


def split(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return "".join(c if c.isalpha() else " " for c in text.lower()).split()


if __name__ == "__main__":
    main()
