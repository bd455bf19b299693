"""One outer iteration against the bare matrix products it cannot do without.

``python -m benchmarks.iteration --features 2304 --atoms 4096 --k 20 --batch 16384 --json`` prints one line:
`gemm_s` (the products ``Y D^T`` and ``D D^T`` on the same rows, all cores), `encode_s`, `update_s`,
`iteration_s` and ``ratio = iteration_s / gemm_s``. Products and iterations alternate inside the run and the best
of each counts, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import dask
import numpy as np

from benchmarks.common import DOCUMENTED
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.sources import ArraySource
from dbksvd_dask.plan.params import FitParams


def bare_products(Y: np.ndarray, D: np.ndarray, prods: np.ndarray, gram: np.ndarray) -> float:
    """Seconds of the two products with every core, into arrays that are there already."""
    began = time.perf_counter()
    np.dot(Y, D.T, out=prods)
    np.dot(D, D.T, out=gram)
    return time.perf_counter() - began


def one_iteration(trainer: Trainer, state: Dictionary) -> tuple[float, batch.BatchResult]:
    """Seconds of one outer batch: graph, encoding, update, metrics."""
    began = time.perf_counter()
    graph = batch.build_batch(
        trainer.source,
        trainer.stream.batch(state.iteration),
        state.atoms,
        None,
        trainer.policy.batch_spec(state),
        0,
    )
    result = batch.run_batch(graph)
    return time.perf_counter() - began, result


def measure(
    n_features: int,
    n_atoms: int,
    k: int,
    n_rows: int,
    repeats: int = 5,
    threads: int | None = None,
    **params: object,
) -> dict[str, float]:
    """Best of several repeats of products and iteration on the same random samples."""
    rng = np.random.default_rng(0)
    Y = rng.standard_normal((n_rows, n_features), dtype=np.float32)
    whole = {"batch_size": n_rows, "warm_up": False, "validation": 0, "center": False}
    checked = FitParams.checked(n_atoms=n_atoms, k=k, **{**DOCUMENTED, **whole, **params})
    trainer = Trainer(ArraySource(Y, checked.chunk_size), checked)
    state = trainer.start()
    prods, gram = np.empty((n_rows, n_atoms), np.float32), np.empty((n_atoms, n_atoms), np.float32)
    gemm, runs = [], []
    with dask.config.set(scheduler="threads", **({} if threads is None else {"num_workers": threads})):
        one_iteration(trainer, state)  # compiles, or loads compiled kernels
        for _ in range(repeats):
            gemm.append(bare_products(Y, state.atoms, prods, gram))
            runs.append(one_iteration(trainer, state))
    seconds, result = min(runs, key=lambda run: run[0])
    return {
        "features": n_features,
        "atoms": n_atoms,
        "k": k,
        "batch": n_rows,
        "gemm_s": min(gemm),
        "encode_s": result.encode_seconds,
        "update_s": result.update_seconds,
        "iteration_s": seconds,
        "ratio": seconds / min(gemm),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=2304)
    parser.add_argument("--atoms", type=int, default=4096)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="Dask threads; default: one per core")
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = parser.parse_args()
    figures = measure(
        args.features, args.atoms, args.k, args.batch, args.repeats, args.threads, chunk_size=args.chunk_size
    )
    if args.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    else:
        for name, value in figures.items():
            print(f"{name:>12}  {value:,.4g}")


if __name__ == "__main__":
    main()
