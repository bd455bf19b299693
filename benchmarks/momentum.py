"""What momentum between outer batches brings: true atoms found, and variance explained of held-out samples.

``python -m benchmarks.momentum [--size tiny|small] [--store TOKENS.zarr] [--json]``

Without a store: d=128, 512 random unit atoms, k=8, 10 % noise, 4 batches of 20,000 in turn, 16 iterations; the
share of atoms found (cosine above 0.95). With a store: 2048 atoms, k=16, batches of 32,768 rows, 10 iterations;
held-out variance explained. Each value of the momentum sees the same batches in the same order.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from benchmarks.common import DOCUMENTED
from dbksvd_dask import DBKSVD
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph.sources import ArraySource
from dbksvd_dask.plan.params import FitParams

VALUES = (0.0, 0.3, 0.6, 0.8)
SIZES = {"tiny": (16, 32, 3, 400, 1), "small": (128, 512, 8, 20_000, 3)}


def planted(d: int, m: int, k: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples with k of m true atoms each and 10 % noise: (n, d), (m, d)."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal((m, d))
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    X = np.zeros((n, m), np.float32)
    for row in X:
        row[rng.choice(m, k, replace=False)] = rng.standard_normal(k)
    Y = X @ truth.astype(np.float32)
    return (Y + 0.1 * Y.std() * rng.standard_normal(Y.shape)).astype(np.float32), truth


def found(size: str, momentum: float, seed: int, n_iter: int = 16) -> float:
    """Share of the true atoms that a fit finds."""
    d, m, k, n, _ = SIZES[size]
    Y, truth = planted(d, m, k, 4 * n, seed)
    settings = {"validation": 0, "momentum": momentum, "warm_up": False, **DOCUMENTED}
    params = FitParams.checked(n_atoms=m, k=k, **settings)
    trainer = Trainer(ArraySource(Y, params.chunk_size), params)
    state = trainer.start()
    for t in range(n_iter):
        state = trainer.step(state, np.arange(t % 4 * n, (t % 4 + 1) * n))
    return float((np.abs(state.atoms @ truth.T).max(axis=0) > 0.95).mean())


def explained(store: str, momentum: float) -> float:
    """Held-out variance explained after 10 iterations on a store."""
    settings = {"batch_size": 32_768, "n_iter": 10, "momentum": momentum, "warm_up": False, **DOCUMENTED}
    model = DBKSVD(2048, 16, **settings).fit(store)
    return float(model.history_["validation_variance_explained"][-1])


def measure(size: str = "small", store: str | None = None) -> dict[str, list[float]]:
    """One entry per value of the momentum: the share found per seed, or the variance explained."""
    if store is not None:
        return {str(value): [explained(store, value)] for value in VALUES}
    seeds = range(SIZES[size][-1])
    return {str(value): [found(size, value, seed) for seed in seeds] for value in VALUES}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--store")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.size, args.store)
    if args.json:
        print(json.dumps({value: [round(f, 4) for f in row] for value, row in figures.items()}))
    else:
        for value, row in figures.items():
            print(f"momentum {value:>4}  {np.mean(row):.4f}  " + " ".join(f"{f:.4f}" for f in row))


if __name__ == "__main__":
    main()
