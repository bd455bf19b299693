"""SynthSAEBench: how many of the features that made the data a dictionary finds.

    python -m benchmarks.synthsaebench --size small --seeds 0 1 2 --cache CACHE --json results.jsonl

For each seed (of the model that makes the data, of the samples and of the training) and each L0: plain, Matryoshka
and growing DB-KSVD, signed and non-negative, and the recipes with their own encoding and in one linear step,
against BatchTopK and Matryoshka SAEs that sae-lens trains on the same rows. The scorer is sae-lens' own. Nobody
sees labels: everyone has a threshold that training has brought to the wanted mean number of nonzeros (a BatchTopK
SAE its running threshold, DB-KSVD ``sparsity="mean"``), and is scored at the L0 that it then has on the test rows.
Seconds are processor seconds. Needs the extra `synth`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from benchmarks import common
from benchmarks.common import DOCUMENTED
from benchmarks.synth_model import SIZES, Samples, load_samples
from dbksvd_dask import DBKSVD, fit_linear_encoder

# ---------------------------------------------------------------------------------------------- scoring


def score(D: np.ndarray, codes: sp.csr_array, bias: np.ndarray, samples: Samples) -> dict[str, float]:
    """Scores of sae-lens, and the explained variance of the reconstruction.

    Parameters
    ----------
    D : (n_atoms, hidden_dim), unit rows
    codes : csr (n_test, n_atoms)
    bias : (hidden_dim,)
    """
    import torch
    from sae_lens.synthetic import evals

    decoder, truth = torch.tensor(np.array(D)), torch.tensor(np.array(samples.truth))
    table = evals.ClassificationMetricsCalculator(decoder, truth)
    missed = total = 0.0
    centre = samples.test.mean(axis=0)
    for a in range(0, codes.shape[0], 1000):
        part = codes[a : a + 1000]
        Y = np.asarray(samples.test[a : a + 1000])
        missed += float(np.square(Y - part @ D - bias).sum())
        total += float(np.square(Y - centre).sum())
        features = samples.test_features[a : a + 1000].toarray()
        table.add_batch(torch.tensor(part.toarray()), torch.tensor(features))
    found = table.compute()
    return {
        "EV": 1.0 - missed / total,
        "MCC": evals.mean_correlation_coefficient(decoder, truth),
        "uniqueness": evals.feature_uniqueness(decoder, truth),
        "precision": found.precision,
        "recall": found.recall,
        "F1": found.f1_score,
        "L0": codes.nnz / codes.shape[0],
        "dead": float(np.count_nonzero(np.diff(codes.tocsc().indptr) == 0)),
    }


# ---------------------------------------------------------------------------------------------- DB-KSVD

# Rows of a batch, and what else is not as by default. With 25 nonzeros a sample has three atoms in each of 8
# rounds, which then fit the same residual twice; and a rare atom has too few samples for a singular vector.
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"batch_size": 20_000},
    "medium": {"batch_size": 20_000},
    "16k": {"batch_size": 200_000, "n_rounds": 64, "lanczos_steps": 1},
}


def fits(name: str, growth: float) -> dict[str, dict[str, Any]]:
    """Give the settings of every DB-KSVD in the table."""
    n_atoms = SIZES[name].n_atoms
    nested = (n_atoms // 16, n_atoms * 3 // 16, n_atoms * 3 // 4)
    return {
        "DB-KSVD": {},
        "DB-KSVD, non-negative": {"nonneg": True},
        "Matryoshka DB-KSVD": {"groups": nested},
        "Matryoshka DB-KSVD, non-negative": {"groups": nested, "nonneg": True},
        "growing DB-KSVD": {"growth": growth},
        "growing DB-KSVD, non-negative": {"growth": growth, "nonneg": True},
        "growing DB-KSVD, non-negative, prior": {"growth": growth, "nonneg": True, "frequency_prior": True},
        "growing DB-KSVD, non-negative, staged": {"growth": growth, "nonneg": True, "encode": "staged"},
    }


def fit_dbksvd(name: str, samples: Samples, l0: int, seed: int, how: dict[str, Any]) -> tuple[DBKSVD, float]:
    """Fit one dictionary; growing ones take as many iterations as their stages need."""
    from dbksvd_dask.plan.growth import growth_iterations, growth_sizes

    n_atoms = SIZES[name].n_atoms
    n_iter = 40
    if "growth" in how:
        n_iter = growth_iterations(growth_sizes(n_atoms, how["growth"]))
    settings = {"n_iter": n_iter, "validation": 0, "sparsity": "mean", "seed": seed}
    model = DBKSVD(n_atoms, l0, **{**DOCUMENTED, **settings, **SETTINGS[name], **how})
    began = time.process_time()
    model.fit(np.asarray(samples.train))
    return model, time.process_time() - began


def dbksvd_rows(
    name: str, samples: Samples, l0: int, seed: int, growth: float, only: str, keep: str | None = None
) -> Iterator[dict[str, Any]]:
    """Score every DB-KSVD, encoded plainly and, where it has groups, staged; coefficients are refitted."""
    for method, how in fits(name, growth).items():
        if only not in method:
            continue
        # a threshold is learned for one way to encode
        for encode in ("plain", "staged") if "groups" in how else (how.get("encode", "plain"),):
            model, seconds = fit_dbksvd(name, samples, l0, seed, {**how, "encode": encode, "refit": True})
            if keep is not None:
                model.save(keep, overwrite=True)
            model.set_params(output="sparse")
            codes = model.transform(np.asarray(samples.test))
            scores = score(model.components_, codes, model.mean_, samples)
            yield {"method": method, "encode": encode, "seconds": seconds, **scores}


RECIPES = ("reconstruct", "recover", "read")


def recipe_rows(name: str, samples: Samples, l0: int, seed: int, only: str) -> Iterator[dict[str, Any]]:
    """Score the recipes as a user gets them, with their own encoding and in one linear step."""
    for recipe in RECIPES:
        if only not in f"recipe {recipe}":
            continue
        settings = {"validation": 0, "seed": seed, "output": "sparse", **SETTINGS[name]}
        model = DBKSVD.recipe(recipe, SIZES[name].n_atoms, l0, **settings)
        began = time.process_time()
        model.fit(np.asarray(samples.train))
        seconds = time.process_time() - began
        linear = fit_linear_encoder(model, np.asarray(samples.train))
        test = np.asarray(samples.test)
        for encode, codes in (("own", model.transform(test)), ("linear", linear.encode(test))):
            scores = score(model.components_, codes, model.mean_, samples)
            yield {"method": f"recipe {recipe}", "encode": encode, "seconds": seconds, **scores}


# ---------------------------------------------------------------------------------------------- SAEs


class Budget(NamedTuple):
    """What an SAE gets: samples that it sees, and its learning rate."""

    n_samples: int
    rate: float


def train_sae(name: str, samples: Samples, l0: int, seed: int, kind: str, budget: Budget) -> tuple[Any, float]:
    """Let sae-lens train an SAE on the same rows, reused as often as its budget needs."""
    import torch
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
    from sae_lens.saes.matryoshka_batchtopk_sae import (
        MatryoshkaBatchTopKTrainingSAE,
        MatryoshkaBatchTopKTrainingSAEConfig,
    )
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(seed)
    n_atoms = SIZES[name].n_atoms
    shape = {"d_in": SIZES[name].hidden_dim, "d_sae": n_atoms, "k": l0}
    if kind == "Matryoshka SAE":
        widths = [n_atoms // 16, n_atoms // 4, n_atoms]
        sae: Any = MatryoshkaBatchTopKTrainingSAE(
            MatryoshkaBatchTopKTrainingSAEConfig(matryoshka_widths=widths, **shape)
        )
    else:
        sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**shape))
    config = SAETrainerConfig(
        total_training_samples=budget.n_samples,
        train_batch_size_samples=1024,
        lr=budget.rate,
        lr_end=budget.rate / 10,
        lr_decay_steps=budget.n_samples // 1024 // 3,
        logger=LoggingConfig(log_to_wandb=False, eval_every_n_wandb_logs=2**31 - 1),
    )
    began = time.process_time()
    SAETrainer(cfg=config, sae=sae, data_provider=_batches(samples, seed)).fit()
    return sae.eval(), time.process_time() - began


def _batches(samples: Samples, seed: int, size: int = 1024) -> Iterator[Any]:
    """Rows in a new order in every epoch, without end."""
    import torch

    rng = np.random.default_rng(seed)
    train = torch.tensor(np.asarray(samples.train))
    while True:
        order = rng.permutation(len(train))
        for a in range(0, len(order) - size + 1, size):
            yield train[order[a : a + size]]


def sae_row(name: str, samples: Samples, l0: int, seed: int, kind: str, budget: Budget) -> dict[str, Any]:
    """Train and score one SAE with its own encoder, at the threshold that its training has learned."""
    import torch

    sae, seconds = train_sae(name, samples, l0, seed, kind, budget)
    threshold = float(sae.topk_threshold)
    with torch.no_grad():
        decoder = sae.W_dec.numpy()
        norms = np.linalg.norm(decoder, axis=1)
        parts = []
        for a in range(0, len(samples.test), 2000):
            Y = torch.tensor(np.asarray(samples.test[a : a + 2000]))
            _, pre = sae.encode_with_hidden_pre(Y)
            # as the inference form of a BatchTopK SAE does it: a JumpReLU at the learned threshold
            parts.append(sp.csr_array((pre * (pre > threshold)).numpy()))
        codes = sp.csr_array(sp.vstack(parts, format="csr"))
    scores = score(decoder / norms[:, None], codes, sae.b_dec.detach().numpy(), samples)
    return {"method": kind, "encode": "own", "seconds": seconds, **scores}


# ---------------------------------------------------------------------------------------------- table

COLUMNS = ("EV", "MCC", "uniqueness", "precision", "recall", "F1", "L0", "dead", "seconds")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean over seeds, and the spread (largest less smallest) where there are several."""
    lines = ["| k | method | encode | seeds | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (4 + len(COLUMNS))]
    for key in dict.fromkeys((r["k"], r["method"], r["encode"]) for r in rows):
        mine = [r for r in rows if (r["k"], r["method"], r["encode"]) == key]
        cells = []
        for column in COLUMNS:
            values = np.array([r[column] for r in mine])
            digits = 0 if column in ("dead", "seconds") else 2 if column == "L0" else 3
            spread = f" ({np.ptp(values):.{digits}f})" if len(mine) > 1 else ""
            cells.append(f"{values.mean():.{digits}f}{spread}")
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per seed, L0, method and encoding."""
    size = SIZES[args.size]
    for seed in args.seeds:
        samples = load_samples(args.cache, args.size, seed, args.rows)
        for l0 in args.l0 or size.l0:
            about = {"size": args.size, "seed": seed, "k": l0}
            if args.only != "SAE":
                for row in recipe_rows(args.size, samples, l0, seed, args.only):
                    yield about | row
                for row in dbksvd_rows(args.size, samples, l0, seed, args.growth, args.only, args.keep):
                    yield about | row
            for kind in ("BatchTopK SAE", "Matryoshka SAE"):
                if args.sae_samples and args.only in kind:
                    budget = Budget(args.sae_samples, args.sae_rate)
                    yield about | sae_row(args.size, samples, l0, seed, kind, budget)


def main() -> None:
    """Read the command line, run, print rows as they come and the table at the end."""
    parser = argparse.ArgumentParser(description="Recovery of true features: SynthSAEBench.")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the drawn samples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--l0", type=int, nargs="+", help="mean numbers of nonzeros; some by size when not given")
    parser.add_argument("--rows", type=int, help="training rows, when not those of the size")
    parser.add_argument("--growth", type=float, default=1.5)
    parser.add_argument("--sae-samples", type=int, default=4_000_000, help="samples an SAE sees; 0 for no SAEs")
    parser.add_argument("--sae-rate", type=float, default=3e-3, help="learning rate of the SAEs")
    parser.add_argument("--keep", help="where to save the last dictionary, for benchmarks.l0_sweep")
    parser.add_argument("--only", default="", help="only methods whose name contains this")
    common.add_row_output(parser)
    args = parser.parse_args()
    common.emit_rows(run(args), args, table)


if __name__ == "__main__":
    main()
