"""How alike two dictionaries of the same recipe are: of two seeds, and of two halves of the data.

    python -m benchmarks.stability --cache CACHE --threads 1
    python -m benchmarks.stability --cache CACHE --threads 1 --recipes "BatchTopK SAE" "Matryoshka SAE"
    python -m benchmarks.stability --store STORE --k 16 --threads 1 --recipes read "TopK SAE" "Matryoshka SAE"

Samples are those of a small SynthSAEBench model (`benchmarks.synth_model`), or the first rows of a store. "cosine"
is the mean over the atoms of either dictionary of the largest absolute cosine with an atom of the other, "shared"
the share of atoms for which it exceeds 0.9. Atoms of an SAE are the rows of its decoder. Needs the extra `synth`,
to draw the samples, or torch, for SAEs on a store.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from benchmarks import common
from benchmarks.common import Stopwatch, markdown, unit_atoms
from benchmarks.synth_model import SIZES, Samples, load_samples
from dbksvd_dask import DBKSVD
from dbksvd_dask.plan.groups import exponential_groups
from dbksvd_dask.store.activations import open_rows

RECIPES = ("reconstruct", "recover", "read")
SHARED = 0.9
BATCH_ROWS = 20_000
# As in the tables of recovery: samples that an SAE sees, and its learning rate.
SAE_SAMPLES, SAE_RATE = 4_000_000, 3e-3
STORE_SAE_STEPS = 3000
# of the draw of the halves
HALVES_SEED = 5


def alike(D: np.ndarray, E: np.ndarray) -> tuple[float, float]:
    """Return the mean largest cosine of atoms with the other dictionary, and the share of atoms in both."""
    cosine = np.abs(D @ E.T)
    best = np.concatenate([cosine.max(axis=1), cosine.max(axis=0)])
    return float(best.mean()), float((best > SHARED).mean())


def recipe_atoms(recipe: str, rows: np.ndarray, n_atoms: int, k: int, seed: int) -> np.ndarray:
    """Fit a recipe: (n_atoms, n_features), unit rows."""
    how = {"seed": seed, "batch_size": BATCH_ROWS, "validation": 0}
    return np.asarray(DBKSVD.recipe(recipe, n_atoms, k, **how).fit(rows).components_)


def sae_atoms(kind: str, rows: np.ndarray, n_atoms: int, k: int, seed: int) -> np.ndarray:
    """Train an SAE on samples of a model as `benchmarks.synthsaebench` does: (n_atoms, n_features), unit rows."""
    from benchmarks.synthsaebench import Budget, train_sae

    samples = Samples(rows, rows[:0], sp.csr_array((0, 0)), rows[:0])
    sae, _ = train_sae("small", samples, k, seed, kind, Budget(SAE_SAMPLES, SAE_RATE))
    return unit_atoms(sae.W_dec.detach().numpy())


def store_sae_atoms(kind: str, rows: np.ndarray, n_atoms: int, k: int, seed: int) -> np.ndarray:
    """Train an SAE on rows of a store as `benchmarks.wordnet_probing` does: (n_atoms, n_features), unit rows."""
    from benchmarks.sae_torch import train_sae

    scale = np.float32(np.sqrt(rows.shape[1]) / np.linalg.norm(rows, axis=1).mean())
    groups = exponential_groups(n_atoms) if kind == "Matryoshka SAE" else None
    sae = train_sae(rows * scale, n_atoms, k, 1e-3, lambda *_: None, groups, 1024, STORE_SAE_STEPS, seed)
    return unit_atoms(sae.decoder.detach().numpy())


def compare(recipe: str, Y: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    """Fit a recipe or train an SAE with two seeds and on two halves, and compare."""
    learn = recipe_atoms
    if recipe.endswith("SAE"):
        learn = store_sae_atoms if args.store else sae_atoms
    n_atoms = args.atoms if args.store else SIZES["small"].n_atoms

    def atoms(rows: np.ndarray, seed: int) -> np.ndarray:
        return learn(recipe, rows, n_atoms, args.k, seed)

    order = np.random.default_rng(HALVES_SEED).permutation(len(Y))
    clock = Stopwatch()
    clock.start()
    seeds = alike(atoms(Y, 0), atoms(Y, 1))
    halves = alike(*(atoms(Y[np.sort(half)], 0) for half in np.array_split(order, 2)))
    clock.stop()
    names = ("seeds_cosine", "seeds_shared", "halves_cosine", "halves_shared")
    return {"recipe": recipe, **dict(zip(names, (*seeds, *halves), strict=True)), "seconds": clock.cpu}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per model, or for the store, and recipe."""
    for seed in [Path(args.store).name] if args.store else args.seeds:
        if args.store:
            rows = open_rows(args.store)
            Y = np.asarray(rows.read(0, min(args.rows, rows.shape[0])), np.float32)
        else:
            Y = np.array(load_samples(args.cache, "small", seed).train)
        for recipe in args.recipes:
            yield {"seed": seed, "k": args.k} | compare(recipe, Y, args)


def table(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows as Markdown."""
    header = ["samples", "recipe", "two seeds: cosine", "shared", "two halves: cosine", "shared"]
    names = ("seeds_cosine", "seeds_shared", "halves_cosine", "halves_shared")
    return markdown(header, [[r["seed"], r["recipe"], *(f"{r[name]:.3f}" for name in names)] for r in rows])


def main(argv: list[str] | None = None) -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description="Agreement of dictionaries between seeds and halves of the data.")
    samples = parser.add_mutually_exclusive_group(required=True)
    samples.add_argument("--cache", type=Path, help="folder that keeps the samples drawn of models")
    samples.add_argument("--store", help="a store of activations, in place of a model")
    parser.add_argument("--atoms", type=int, default=1024, help="with --store")
    parser.add_argument("--rows", type=int, default=100_000, help="with --store: its first rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the models that make the data")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--k", type=int, default=6)
    common.add_row_output(parser)
    args = parser.parse_args(argv)
    common.emit_rows(run(args), args, table)


if __name__ == "__main__":
    main()
