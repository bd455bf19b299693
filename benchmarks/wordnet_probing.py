"""Sparse probing of labelled embeddings: how well one, two or five atoms tell a category from the rest.

    python -m benchmarks.wordnet_probing STORE --labels category --rows 30000 --seeds 0 1 2 --json results.jsonl

    python -m benchmarks.wordnet_probing STORE --smallest 2 --seeds 0 --sae-steps 3000 \
        --only raw random DB-KSVD "Matryoshka, non-negative" "TopK SAE"       # all 45 categories

STORE is an activation store with an aligned array of labels, as `pipelines` makes of WordNet. Categories
with fewer than 400 of the rows are left out, unless `--smallest` says otherwise. Plain, Matryoshka and growing
dictionaries, signed and non-negative, and the recipes, with their own encoding and in one linear step, against the
raw features, a random dictionary and, with torch (`--sae-steps`), TopK and Matryoshka SAEs with their own encoder
and with our pursuit over their decoder. Balanced accuracy, explained variance (`VE`), and processor seconds of the
training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from benchmarks import common
from benchmarks.common import DOCUMENTED
from dbksvd_dask import DBKSVD, encode, fit_linear_encoder
from dbksvd_dask.evaluate.probing import probe, random_dictionary_codes
from dbksvd_dask.store.activations import open_rows

NESTED = (16, 16, 32, 64, 128, 256, 512)  # for 1024 atoms and k = 16
SMALLEST_CATEGORY = 400


def load(
    store: str, labels: str, rows: int | None, seed: int, smallest: int = SMALLEST_CATEGORY
) -> tuple[np.ndarray, np.ndarray]:
    """Rows in random order with their labels, small categories left out: (n, d) float32 and (n,)."""
    import zarr

    reader = open_rows(store)
    Y = np.concatenate([reader.read(*reader.chunk_bounds(c)) for c in range(reader.n_chunks)])
    tags = np.asarray(zarr.open_group(store, mode="r")[labels][...])
    order = np.random.default_rng(seed).permutation(len(Y))[:rows]
    Y, tags = Y[order].astype(np.float32), tags[order]
    values, counts = np.unique(tags, return_counts=True)
    keep = np.isin(tags, values[counts >= smallest])
    return Y[keep], tags[keep]


class Found(NamedTuple):
    """Codes of one method, and the dictionary to which they belong."""

    name: str
    codes: Any  # csr (n_samples, n_atoms)
    seconds: float  # of the training
    D: np.ndarray  # (n_atoms, n_features)
    mean: np.ndarray  # (n_features,)

    def variance_explained(self, Y: np.ndarray) -> float:
        """One less the share of the variance of samples that is left, over all features together."""
        left = (Y - self.mean - self.codes @ self.D).astype(np.float64)
        return 1.0 - float(np.square(left).sum() / np.square(Y.astype(np.float64) - Y.mean(axis=0)).sum())


def wanted(name: str, only: list[str] | None) -> bool:
    """Tell whether a method is asked for; all are when nothing is said."""
    return only is None or any(part in name for part in only)


def fits(n_atoms: int, k: int) -> dict[str, dict[str, Any]]:
    """Give the settings of every DB-KSVD in the table."""
    nested: Any = NESTED if n_atoms == sum(NESTED) and k >= len(NESTED) else "exponential"
    return {
        "DB-KSVD": {},
        "DB-KSVD, non-negative": {"nonneg": True},
        "Matryoshka": {"groups": nested},
        "Matryoshka, non-negative": {"groups": nested, "nonneg": True},
        "growing, non-negative": {"growth": 1.5, "nonneg": True, "sparsity": "mean"},
        "growing, non-negative, in order": {"growth": 1.5, "nonneg": True, "sparsity": "mean", "encode": "staged"},
        "growing, non-negative, prior": {
            "growth": 1.5,
            "nonneg": True,
            "sparsity": "mean",
            "frequency_prior": True,
        },
    }


def recipe_settings(k: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Give the recipes, and one of them with k as the mean number of nonzeros: name -> recipe and changes."""
    on_average = {"sparsity": "mean", "max_nonzeros": k + k // 4}
    same = {name: (name, {}) for name in ("reconstruct", "recover", "read")}
    return {**same, "read with k on average": ("read", on_average)}


def recipes(Y: np.ndarray, args: argparse.Namespace, seed: int) -> Iterator[Found]:
    """Each recipe for one matrix of samples, with its own encoding and in one linear step."""
    for name, (recipe, changes) in recipe_settings(args.k).items():
        if not wanted(f"recipe {name}", args.only):
            continue
        settings = {"batch_size": 16_384, "validation": 0, "seed": seed, "output": "sparse", **changes}
        model = DBKSVD.recipe(recipe, args.atoms, args.k, **settings)
        began = time.process_time()
        model.fit(Y)
        seconds = time.process_time() - began
        about = (seconds, model.components_, model.mean_)
        yield Found(f"recipe {name}", model.transform(Y), *about)
        yield Found(f"recipe {name}, linear", fit_linear_encoder(model, Y).encode(Y), *about)


def dictionaries(Y: np.ndarray, args: argparse.Namespace, seed: int) -> Iterator[Found]:
    """Each of ours with given settings."""
    from dbksvd_dask.plan import growth

    for name, how in fits(args.atoms, args.k).items():
        if not wanted(name, args.only):
            continue
        n_iter = args.n_iter
        if "growth" in how:
            n_iter = max(n_iter, growth.growth_iterations(growth.growth_sizes(args.atoms, how["growth"])))
        settings = {"n_iter": n_iter, "batch_size": 16_384, "validation": 0, "seed": seed, **DOCUMENTED}
        model = DBKSVD(args.atoms, args.k, **settings, **how)
        began = time.process_time()
        model.fit(Y)
        seconds = time.process_time() - began
        for encoding in ("plain", "staged") if "groups" in how else (how.get("encode", "plain"),):
            codes = model.set_params(encode=encoding, output="sparse").transform(Y)
            yield Found(f"{name}, {encoding}", codes, seconds, model.components_, model.mean_)


def autoencoders(Y: np.ndarray, args: argparse.Namespace, seed: int) -> Iterator[Found]:
    """The same for SAEs: with their own encoder, and with pursuit over their decoder."""
    import torch

    from benchmarks.sae_torch import train_sae

    scale = np.float32(np.sqrt(Y.shape[1]) / np.linalg.norm(Y, axis=1).mean())
    widths = {"TopK SAE": None, "Matryoshka SAE": NESTED if args.atoms == sum(NESTED) else None}
    for name, groups in widths.items():
        if not wanted(name, args.only):
            continue
        began = time.process_time()
        sae = train_sae(Y * scale, args.atoms, args.k, 1e-3, lambda *_: None, groups, 1024, args.sae_steps, seed)
        seconds = time.process_time() - began
        with torch.no_grad():
            _, values, latents = sae.encode(torch.from_numpy(Y * scale))
        starts = np.arange(0, latents.numel() + 1, args.k)
        own = (values.numpy().ravel(), latents.numpy().ravel(), starts)
        D, mean = sae.decoder.detach().numpy(), (sae.bias.detach().numpy() / scale).astype(np.float64)
        own_codes = sp.csr_array(own, shape=(len(Y), args.atoms)) / scale
        yield Found(f"{name}, own encoder", sp.csr_array(own_codes), seconds, D, mean)
        codes = encode(Y, D, args.k, mean=mean, nonneg=True)
        starts = np.arange(0, codes["atom"].size + 1, args.k)
        atom = np.maximum(codes["atom"].values, 0).ravel()  # empty slots have coefficient 0
        found = (codes["coefficient"].values.ravel(), atom, starts)
        yield Found(f"{name}, pursuit", sp.csr_array(found, shape=(len(Y), args.atoms)), seconds, D, mean)


def row_of(features: Any, tags: np.ndarray, seed: int) -> dict[str, float]:
    """Mean balanced accuracy for each number of columns."""
    dense = features.toarray() if sp.issparse(features) else features
    found = probe(dense, tags, k_sp=(1, 2, 5), seed=seed).mean_balanced_accuracy
    return {f"k_sp={k}": value for k, value in found.items()}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per seed and method."""
    for seed in args.seeds:
        Y, tags = load(args.store, args.labels, args.rows, seed, args.smallest)
        about = {"seed": seed, "rows": len(Y), "categories": int(np.unique(tags).size)}
        if wanted("raw features", args.only):
            yield about | {"method": "raw features", "seconds": 0.0} | row_of(Y, tags, seed)
        if wanted("random dictionary", args.only):
            codes = random_dictionary_codes(Y - Y.mean(axis=0), args.atoms, args.k, seed=seed)
            yield about | {"method": "random dictionary", "seconds": 0.0} | row_of(codes, tags, seed)
        for found in methods(Y, args, seed):
            row = about | {"method": found.name, "seconds": found.seconds} | row_of(found.codes, tags, seed)
            yield row | {"VE": found.variance_explained(Y)}


def methods(Y: np.ndarray, args: argparse.Namespace, seed: int) -> Iterator[Found]:
    """All that train."""
    yield from recipes(Y, args, seed)
    yield from dictionaries(Y, args, seed)
    if args.sae_steps:
        yield from autoencoders(Y, args, seed)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean over seeds, and the spread (largest less smallest) where there are several."""
    columns = [name for name in rows[0] if name.startswith("k_sp")] + ["VE"]
    lines = ["| features | seeds | " + " | ".join(columns) + " | seconds |", "|---" * (3 + len(columns)) + "|"]
    for method in dict.fromkeys(r["method"] for r in rows):
        mine = [r for r in rows if r["method"] == method]
        cells = []
        for column in columns:
            values = np.array([r[column] for r in mine if column in r])
            spread = f" ({np.ptp(values):.3f})" if values.size > 1 else ""
            cells.append(f"{values.mean():.3f}{spread}" if values.size else "")
        seconds = np.mean([r["seconds"] for r in mine])
        lines.append(f"| {method} | {len(mine)} | " + " | ".join(cells) + f" | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print rows as they come and the table at the end."""
    parser = argparse.ArgumentParser(description="Sparse probing of labelled embeddings.")
    parser.add_argument("store")
    parser.add_argument("--labels", default="category", help="array of the store that holds a label per row")
    parser.add_argument("--rows", type=int, help="rows to use; all when not given")
    parser.add_argument("--smallest", type=int, default=SMALLEST_CATEGORY, help="rows of the smallest category")
    parser.add_argument("--atoms", type=int, default=1024)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--n-iter", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sae-steps", type=int, default=0, help="steps of 1024 rows an SAE trains; 0 for no SAEs")
    parser.add_argument("--only", nargs="+", help="only methods whose name contains one of these")
    common.add_row_output(parser)
    args = parser.parse_args()
    common.emit_rows(run(args), args, table)


if __name__ == "__main__":
    main()
