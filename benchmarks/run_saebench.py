"""SAEBench on one of our dictionaries, offline: its core evaluation and its sparse probing, to the end.

    sh benchmarks/saebench_env.sh saebench-env
    saebench-env/bin/python -m benchmarks.run_saebench out --prepare
    dbksvd import out/activations.npy out/store.zarr
    dbksvd fit out/store.zarr out/run --n-atoms 1024 --k 16 --n-iter 20
    saebench-env/bin/python -m benchmarks.run_saebench out --dictionary out/run

The first trains a small language model on the glosses of WordNet (or `--texts`, with `--labels`) and writes
activations; the last lets SAEBench evaluate the dictionary learned from them: the core evaluation on texts that
were held out, sparse probing from activation files that are written beforehand. Its results lie in `out/core` and
`out/sparse_probing`, the figures in `out/figures.json`. Fitting needs numpy >= 2 and SAEBench numpy < 2: hence the
two environments. For published models, with a network and a GPU, see docs/saebench.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAXTYPING_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from sae_bench.evals.core.main import multiple_evals
from sae_bench.evals.sparse_probing import main as sparse_probing
from sae_bench.evals.sparse_probing import probe_training
from sae_bench.evals.sparse_probing.eval_config import SparseProbingEvalConfig
from sae_bench.sae_bench_utils.activation_collection import create_meaned_model_activations
from transformer_lens import HookedTransformer

from benchmarks import tiny_model
from dbksvd_dask.evaluate.metrics import fvu_explained, mean_relative_error, variance_explained
from dbksvd_dask.export.saebench import SAEBenchDictionary
from dbksvd_dask.kernels.moments import moments
from pipelines.corpus import WORDNET, Corpus, choose_texts, read_texts, read_wordnet

MODEL, HOOK, PROBED, N_CTX = "tiny-wordnet", "blocks.1.hook_resid_post", "wordnet", 64


@contextlib.contextmanager
def local_model(model: Any) -> Iterator[None]:
    """Let SAEBench find our model where it would download one."""
    with mock.patch.object(HookedTransformer, "from_pretrained_no_processing", return_value=model):
        yield


def write_dataset(texts: list[str], folder: Path) -> str:
    """Write texts as a dataset of one JSON file, which `datasets` opens by the name of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def run_core(sae: SAEBenchDictionary, model: Any, texts: list[str], out: Path) -> dict[str, Any]:
    """Run its core evaluation; gives the metrics it wrote."""
    with local_model(model):
        multiple_evals(
            selected_saes=[("dbksvd", sae)],
            n_eval_reconstruction_batches=10,
            n_eval_sparsity_variance_batches=10,
            eval_batch_size_prompts=16,
            compute_featurewise_density_statistics=True,
            compute_featurewise_weight_based_metrics=True,
            exclude_special_tokens_from_reconstruction=True,
            dataset=write_dataset(texts, out / "dataset"),
            context_size=N_CTX,
            output_folder=str(out / "core"),
            dtype="float32",
            device="cpu",
            force_rerun=True,
        )
    (result,) = (out / "core").glob("*.json")  # it logs errors and goes on; then there is no file
    metrics: dict[str, Any] = json.loads(result.read_text())["eval_result_metrics"]
    return metrics


def write_probing_activations(
    model: Any, corpus: Corpus, path: Path, n_classes: int, n_each: int
) -> dict[str, Any]:
    """Write what sparse probing reads: activations per class (texts, tokens, features), zero where padded."""
    assert corpus.category is not None
    counts = np.bincount(corpus.category)
    classes = np.argsort(-counts)[:n_classes]
    n_test = n_each // 4
    train, test = {}, {}
    for c in classes:
        texts = [corpus.texts[i] for i in np.flatnonzero(corpus.category == c)[: n_each + n_test]]
        acts = masked_activations(model, texts)
        train[corpus.names[c]], test[corpus.names[c]] = acts[:-n_test], acts[-n_test:]
    path.parent.mkdir(parents=True, exist_ok=True)
    results = llm_probes(train, test)
    torch.save({"train": train, "test": test, "llm_results": results}, path)
    return {"classes": list(train), "train_texts_per_class": n_each, "test_texts_per_class": n_test}


@torch.no_grad()
def masked_activations(model: Any, texts: list[str]) -> torch.Tensor:
    """Activations of texts (texts, tokens, features), zero at special tokens."""
    batch = model.tokenizer(texts, padding="max_length", truncation=True, max_length=32, return_tensors="pt")
    tokens = batch["input_ids"]
    _, cache = model.run_with_cache(tokens, names_filter=HOOK)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = torch.tensor([getattr(model.tokenizer, name) for name in names])
    return cache[HOOK] * ~torch.isin(tokens, special)[..., None]


def llm_probes(train: dict[str, torch.Tensor], test: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train SAEBench's own probes on the model's activations, as it does before it looks at any SAE."""
    means = [create_meaned_model_activations(dict(acts)) for acts in (train, test)]
    options: dict[str, Any] = {"use_sklearn": False, "batch_size": 250, "epochs": 100, "lr": 1e-2}
    _, accuracies = probe_training.train_probe_on_activations(*means, select_top_k=None, **options)
    results = {"llm_test_accuracy": accuracies}
    for k in (1, 2, 5):
        _, results[f"llm_top_{k}_test_accuracy"] = probe_training.train_probe_on_activations(
            *means, select_top_k=k
        )
    return results


def run_sparse_probing(sae: SAEBenchDictionary, model: Any, out: Path) -> dict[str, Any]:
    """Run its sparse probing from the written activations; gives the metrics it wrote."""
    config = SparseProbingEvalConfig(
        model_name=MODEL, dataset_names=[PROBED], llm_batch_size=32, llm_dtype="float32", k_values=[1, 2, 5]
    )
    with local_model(model):
        sparse_probing.run_eval(
            config,
            [("dbksvd", sae)],  # type: ignore[list-item]
            "cpu",
            str(out / "sparse_probing"),
            force_rerun=True,
            artifacts_path=str(out / "artifacts"),
        )
    (result,) = (out / "sparse_probing").glob("*.json")
    metrics: dict[str, Any] = json.loads(result.read_text())["eval_result_metrics"]
    return metrics


def our_figures(sae: SAEBenchDictionary, Y: np.ndarray) -> dict[str, float]:
    """Measure as this package does, under names that SAEBench does not use."""
    sums = moments(Y, Y - sae(torch.from_numpy(Y)).numpy())
    return {
        "dbksvd_variance_explained": float(variance_explained(sums).value),
        "dbksvd_fvu_explained": float(fvu_explained(sums)),
        "dbksvd_mean_relative_error": float(mean_relative_error(sums)),
    }


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Texts to evaluate on, a quarter, and texts to learn from."""
    n_held = len(corpus.texts) // 4
    everything = np.arange(len(corpus.texts))
    return corpus.take(everything[:n_held]), corpus.take(everything[n_held:])


def prepare(corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """Train the model and write activations to learn from."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    _, learned_from = split(corpus)
    tokenizer = tiny_model.make_tokenizer(learned_from.texts, out / "tokenizer")
    model = tiny_model.make_model(tokenizer, d_model=args.d_model, n_ctx=N_CTX)
    tokens = tiny_model.token_rows(tokenizer, learned_from.texts, N_CTX)
    losses = tiny_model.train(model, tokens, steps=args.steps)
    torch.save(model.state_dict(), out / "model.pt")
    Y = tiny_model.activations(model, tokens[: -(-args.n_rows // (N_CTX - 1))], HOOK)[: args.n_rows]
    np.save(out / "activations.npy", Y)
    return {"d_model": args.d_model, "losses": [losses[0], float(np.mean(losses[-10:]))], "activations": Y.shape}


def evaluate(corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """Let SAEBench evaluate a dictionary on the model that was prepared."""
    out: Path = args.out
    tokenizer = tiny_model.load_tokenizer(out / "tokenizer")
    model = tiny_model.make_model(tokenizer, d_model=args.d_model, n_ctx=N_CTX)
    model.load_state_dict(torch.load(out / "model.pt"))
    held, _ = split(corpus)
    sae = SAEBenchDictionary.load(args.dictionary, model_name=MODEL, hook_name=HOOK, context_size=N_CTX)
    rows = tiny_model.activations(model, tiny_model.token_rows(tokenizer, held.texts, N_CTX)[:160], HOOK)
    report: dict[str, Any] = {
        "dictionary": {**sae.spec._asdict(), "n_latents": sae.cfg.d_sae, "stacked": sae.stacked},
        "ours": our_figures(sae, rows),
        "core": run_core(sae, model, held.texts, out),
    }
    if held.category is not None:
        path = out / "artifacts" / "sparse_probing" / MODEL / HOOK / f"{PROBED}_activations.pt"
        report["probed"] = write_probing_activations(model, held, path, args.n_classes, args.n_each)
        report["sparse_probing"] = run_sparse_probing(sae, model, out)
    (out / "figures.json").write_text(json.dumps(report, indent=1))
    return report


def main() -> None:
    """Read arguments, run, write and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for results")
    parser.add_argument("--prepare", action="store_true", help="train the model and write activations")
    parser.add_argument("--dictionary", help="run, dictionary or exported folder to evaluate")
    parser.add_argument("--wordnet", default=WORDNET, help="folder of WordNet")
    parser.add_argument("--texts", help="a text per line, instead of WordNet")
    parser.add_argument("--labels", help="a label per line, for sparse probing")
    parser.add_argument("--limit", type=int, default=20000, help="texts used")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400, help="training steps of the model")
    parser.add_argument("--n-rows", type=int, default=100_000, help="activations to learn from")
    parser.add_argument("--n-classes", type=int, default=5, help="classes probed")
    parser.add_argument("--n-each", type=int, default=200, help="training texts per class")
    args = parser.parse_args()
    if args.prepare == bool(args.dictionary):
        parser.error("say --prepare, or --dictionary RUN")
    corpus = read_texts(args.texts, args.labels) if args.texts else read_wordnet(args.wordnet)
    corpus = choose_texts(corpus, 0, args.limit)
    report = prepare(corpus, args) if args.prepare else evaluate(corpus, args)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
