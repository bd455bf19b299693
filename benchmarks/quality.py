"""The paper's quality results on data that can be had anywhere: convergence, coherence, and its vision table.

    python -m benchmarks.quality --size small --tokens wordnet_tokens_l4.zarr --sentences wordnet_sentences.zarr \
        --patches photo_patches.zarr --out quality.json

- convergence: held-out variance explained after each iteration, for k in 20, 40, 80 (tokens);
- coherence of the same dictionaries, plain and Matryoshka, as histograms;
- table: variance explained, sparse probing with 1, 2 and 5 atoms and autointerpretation with the offline pair
  (keywords, embedding of texts), DB-KSVD against a TopK SAE at k = 16, 32, 64, both encoded by the same matching
  pursuit, for sentence embeddings and for image patches. Patches have no words, so no autointerpretation, and
  their only label is which photograph they are from.

The SAE gets three times the CPU seconds of DB-KSVD. Without a store the rows are made up, and only the shape of
the result means anything. docs/data.md says how to make the stores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np

from benchmarks import peer_sae
from benchmarks.common import (
    DOCUMENTED,
    Problem,
    Stopwatch,
    add_output,
    emit,
    explained,
    installed,
    machine,
    make_problem,
    markdown,
    unit_atoms,
)
from benchmarks.peer_base import run
from dbksvd_dask import DBKSVD
from dbksvd_dask.evaluate import autointerp
from dbksvd_dask.evaluate.coherence import coherence
from dbksvd_dask.evaluate.features import CodeFeatures
from dbksvd_dask.evaluate.probing import probe
from dbksvd_dask.kernels.encode import encode_rows, gram_for
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store.activations import open_activations

BINS = np.linspace(0, 1, 51)
# CPU seconds of the SAE in those of DB-KSVD, and its learning rate, which is not tuned here.
SAE_SHARE, SAE_RATE = 3.0, 1e-3


@dataclass(frozen=True)
class Size:
    """Rows, atoms, iterations and sparsities of one size."""

    train: int
    test: int
    atoms: int
    n_iter: int
    batch: int
    k_coherence: tuple[int, ...]
    k_table: tuple[int, ...]


SIZES = {
    "tiny": Size(512, 256, 48, 2, 256, (5,), (5,)),
    "small": Size(32_768, 8192, 1024, 40, 16_384, (20, 40, 80), (16, 32, 64)),
    "paper": Size(98_304, 16_384, 2048, 40, 32_768, (20, 40, 80), (16, 32, 64)),
}


def fit(problem: Problem, size: Size, groups: str | None = None) -> DBKSVD:
    """Fit with the held-out rows as validation, one thread; rows are centred already."""
    model = DBKSVD(
        problem.n_atoms,
        problem.k,
        n_iter=size.n_iter,
        batch_size=size.batch,
        groups=groups,
        center=False,
        validation=problem.test,
        seed=problem.seed,
        **DOCUMENTED,
    )
    with dask.config.set(scheduler="synchronous"):
        return model.fit(problem.train)


def convergence_and_coherence(data: str | None, size: Size) -> list[dict[str, Any]]:
    """Curves and histograms of plain and Matryoshka dictionaries for each k."""
    out = []
    for k in size.k_coherence:
        problem = make_problem(data, size.train, size.test, size.atoms, k)
        for groups in (None, "exponential"):
            model = fit(problem, size, groups)
            measured = coherence(model.components_)
            curve = model.history_["validation_variance_explained"].values
            out.append(
                {
                    "k": k,
                    "matryoshka": groups is not None,
                    "variance_explained": curve.tolist(),
                    "relative_error": model.history_["validation_relative_error"].values.tolist(),
                    "mean_coherence": float(measured.absolute.mean()),
                    "mutual_coherence": measured.mutual,
                    "above_0.9": measured.n_near_duplicates / size.atoms,
                    "histogram": np.histogram(measured.absolute, BINS)[0].tolist(),
                }
            )
            print(f"k={k} matryoshka={groups is not None}: {curve[-1]:.4f}", file=sys.stderr)
    return out


@dataclass(frozen=True)
class Labelled:
    """Samples with a label each, and a text each if there are any."""

    problem: Problem
    labels: np.ndarray
    texts: list[str] | None


def load_labelled(data: str | None, size: Size, k: int, label: str) -> Labelled:
    """Held-out rows with their labels; made-up ones belong to the class of their largest feature."""
    problem = make_problem(data, size.train, size.test, size.atoms, k)
    if data is None:
        labels = np.argmax(np.abs(problem.test[:, :4]), axis=1)
        return Labelled(problem, labels, [f"sample of class {c}" for c in labels])
    rows = open_activations(data).isel(sample=slice(-size.test, None))
    texts = None
    if "text" in rows:
        lines = Path(data).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
        texts = [lines[i] for i in rows["text"].values]
    return Labelled(problem, rows[label].values, texts)


def assess(D: np.ndarray, samples: Labelled) -> dict[str, Any]:
    """Variance explained, probing and autointerpretation of one dictionary, by one matching pursuit."""
    problem, atoms = samples.problem, unit_atoms(D)
    spec = EncodeSpec(problem.k)
    atom, coefficient = encode_rows(problem.test, atoms, gram_for(atoms, spec), spec)
    probed = probe(CodeFeatures.from_arrays(atom, coefficient, len(atoms)), samples.labels, small_classes="skip")
    result: dict[str, Any] = {
        "ve_mp": explained(problem.test, atoms, problem.k),
        "probing": probed.mean_accuracy,
        "probing_balanced": probed.mean_balanced_accuracy,
        "majority": float(probed.majority.mean()),
        "coherence": float(coherence(atoms).absolute.mean()),
    }
    if samples.texts is not None:
        chosen = autointerp.select_samples(lambda: [(atom, coefficient)], len(atoms), seed=0)
        explainer = autointerp.KeywordExplainer(autointerp.strongest_texts(chosen, samples.texts))
        scorer = autointerp.EmbeddingScorer(autointerp.HashingEmbedding())
        result["autointerp"] = autointerp.autointerpret(chosen, samples.texts, explainer, scorer).mean_score
    return result


def table_rows(name: str, data: str | None, size: Size, label: str) -> list[dict[str, Any]]:
    """DB-KSVD and a TopK SAE on one data set, for each k."""
    out = []
    for k in size.k_table:
        samples = load_labelled(data, size, k, label)
        contenders = dictionaries(samples.problem, size)
        for method, (D, cpu) in contenders.items():
            out.append({"data": name, "k": k, "method": method, "cpu_s": cpu} | assess(D, samples))
            print(f"{name} k={k} {method}: {out[-1]['ve_mp']:.4f}", file=sys.stderr)
    return out


def dictionaries(problem: Problem, size: Size) -> dict[str, tuple[np.ndarray, float]]:
    """Train both: the dictionary and its CPU seconds."""
    clock = Stopwatch()
    clock.start()
    model = fit(problem, size)
    clock.stop()
    out = {"DB-KSVD": (model.components_, clock.cpu)}
    if installed("torch") is not None:
        recorder = run(lambda r: peer_sae.train(r, SAE_RATE), problem, SAE_SHARE * clock.cpu, growth=1e9)
        assert recorder.latest is not None  # the end of a run is always scored
        out["TopK SAE"] = (recorder.latest, recorder.clock.cpu)
    return out


def table(result: dict[str, Any]) -> str:
    """Coherence and the table as Markdown."""
    first = [
        [
            r["k"],
            "yes" if r["matryoshka"] else "no",
            f"{r['variance_explained'][-1]:.4f}",
            f"{r['mean_coherence']:.3f}",
            f"{r['mutual_coherence']:.3f}",
            f"{100 * r['above_0.9']:.1f} %",
        ]
        for r in result["convergence"]
    ]
    header = ["k", "Matryoshka", "variance explained", "mean coherence", "mutual coherence", "atoms above 0.9"]
    second = []
    for r in result["table"]:
        cells: list[Any] = [r["data"], r["k"], r["method"], f"{r['ve_mp']:.4f}"]
        cells += [f"{value:.4f}" for value in r["probing_balanced"].values()]
        second.append([*cells, f"{r['autointerp']:.3f}" if "autointerp" in r else "", f"{r['cpu_s']:.0f}"])
    columns = ["data", "k", "method", "variance explained", "probe 1", "probe 2", "probe 5", "autointerp", "CPU s"]
    return markdown(header, first) + "\n\n" + markdown(columns, second)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--tokens", help="store of token activations")
    parser.add_argument("--sentences", help="store of sentence embeddings, with `category` and `text`")
    parser.add_argument("--patches", help="store of image patches, with `image`")
    parser.add_argument("--parts", nargs="+", choices=("tokens", "sentences", "patches"))
    add_output(parser)
    args = parser.parse_args(argv)
    size, parts = SIZES[args.size], args.parts or ("tokens", "sentences", "patches")
    rows: list[dict[str, Any]] = []
    if "sentences" in parts:
        rows += table_rows("sentences", args.sentences, size, "category")
    if "patches" in parts:
        rows += table_rows("patches", args.patches, size, "image")
    result = {
        "benchmark": "quality",
        "size": args.size,
        "machine": machine(),
        "bins": BINS.tolist(),
        "convergence": convergence_and_coherence(args.tokens, size) if "tokens" in parts else [],
        "table": rows,
    }
    emit(result, args, table)
    return result


if __name__ == "__main__":
    main()
