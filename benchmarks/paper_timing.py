"""The paper's timing tables: one iteration beside the paper's columns, and how the cost grows with n, m, k and d.

    OMP_NUM_THREADS=1 python -m benchmarks.paper_timing --size paper --json
    OMP_NUM_THREADS=1 python -m benchmarks.paper_timing --size paper --rows 65536     # nothing extrapolated

One iteration is one outer batch: gram, encoding, update of every atom, metrics. It is run on fewer rows than in
the paper and scaled, ``gram + (iteration - gram) * n / rows``: the gram does not depend on the rows, all else is
in proportion to them (the table of exponents checks this). Scaled figures carry a star. Seconds are CPU seconds
with one thread. Classic K-SVD is extrapolated from OMP on the same rows and from the full SVD of one matrix of the
mean number of samples per atom, once per atom.
"""

from __future__ import annotations

import argparse
from typing import Any

import dask
import numpy as np

from benchmarks.common import DOCUMENTED, add_output, best_of, emit, machine, markdown
from benchmarks.iteration import one_iteration
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph.sources import ArraySource
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import encode_rows, gram_for, gram_matrix
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.params import FitParams

# Seconds per iteration that the paper gives (arXiv:2505.18441, its two tables of runtimes), by (rows, atoms, k),
# d = 2304: on 128 vCPUs, on 96 vCPUs with a T4, and classic K-SVD on 128 vCPUs, estimated by its authors.
PAPER = {
    (2**16, 4096, 20): (5.47, 11.43, 6.5e4),
    (2**16, 4096, 40): (10.86, 24.03, 1.0e5),
    (2**16, 4096, 80): (337.63, 486.43, 1.6e5),
    (2**16, 16384, 20): (17.12, 23.23, 7.4e4),
    (2**16, 16384, 40): (21.51, 31.77, 1.3e5),
    (2**16, 16384, 80): (41.95, 72.79, 2.6e5),
    (2**20, 4096, 20): (1428.0, 185.0, 1.0e6),
    (2**20, 4096, 40): (2797.0, 292.0, 1.6e6),
    (2**20, 4096, 80): (5495.0, 536.0, 2.7e6),
    (2**20, 16384, 20): (433.0, 313.0, 1.2e6),
    (2**20, 16384, 40): (2779.0, 649.0, 2.1e6),
    (2**20, 16384, 80): (6156.0, 1243.0, 4.2e6),
}
PAPER_COLUMNS = ("paper_cpus_s", "paper_t4_s", "paper_baseline_s")
TARGET_ROWS = (2**16, 2**20)

# size: features, list of (atoms, k), rows measured, repeats
SIZES: dict[str, tuple[int, list[tuple[int, int]], int, int]] = {
    "tiny": (32, [(64, 4)], 256, 1),
    "small": (768, [(2048, 20), (2048, 40)], 4096, 2),
    "paper": (2304, [(m, k) for m in (4096, 16384) for k in (20, 40, 80)], 8192, 1),
}
# Around this point (rows, features, atoms, k) each number is halved and doubled.
GROWTH = {"tiny": (512, 32, 64, 4), "small": (4096, 384, 1024, 16), "paper": (8192, 768, 2048, 32)}


def measure(
    n_rows: int, n_features: int, n_atoms: int, k: int, repeats: int, classic: bool = True
) -> dict[str, Any]:
    """CPU seconds of one iteration, of the bare products on the same rows, and of the parts of classic K-SVD."""
    rng = np.random.default_rng(0)
    Y = rng.standard_normal((n_rows, n_features), dtype=np.float32)
    whole = {"batch_size": n_rows, "warm_up": False, "validation": 0, "center": False}
    params = FitParams.checked(n_atoms=n_atoms, k=k, device="cpu", **whole, **DOCUMENTED)
    trainer = Trainer(ArraySource(Y, params.chunk_size), params)
    state = trainer.start()
    D = state.atoms
    gram = gram_matrix(D)
    E = rng.standard_normal((max(1, n_rows * k // n_atoms), n_features), dtype=np.float32)
    runs = {
        "product": lambda: np.dot(Y, D.T),
        "gram": lambda: np.dot(D, D.T.copy()),
        "our_gram": lambda: gram_for(D, EncodeSpec(k)),
        "iteration": lambda: one_iteration(trainer, state),
    }
    if classic:
        runs |= {
            "omp": lambda: encode_rows(Y, D, gram, EncodeSpec(k, "omp")),
            "svd": lambda: np.linalg.svd(E, full_matrices=False),
        }
    with single_blas_thread(), dask.config.set(scheduler="synchronous"):
        seconds = {name: best["cpu_s"] for name, best in best_of(runs, repeats).items()}
    shape = {"rows": n_rows, "features": n_features, "atoms": n_atoms, "k": k}
    bare = seconds["product"] + seconds["gram"]
    return shape | {f"{name}_s": s for name, s in seconds.items()} | {"ratio": seconds["iteration"] / bare}


def svd_seconds(n_samples: int, n_features: int) -> float:
    """CPU seconds of the full SVD of one atom's residual."""
    E = np.random.default_rng(0).standard_normal((max(1, n_samples), n_features), dtype=np.float32)
    with single_blas_thread():
        return best_of({"svd": lambda: np.linalg.svd(E, full_matrices=False)}, 1)["svd"]["cpu_s"]


def at_rows(figures: dict[str, Any], n_rows: int) -> dict[str, Any]:
    """One row of the paper's table: the measured iteration scaled to `n_rows`."""
    factor = n_rows / figures["rows"]
    per_row = figures["iteration_s"] - figures["our_gram_s"]
    bare = figures["product_s"] * factor + figures["gram_s"]
    ours = figures["our_gram_s"] + per_row * factor
    # The samples per atom grow with the rows, and an SVD grows in proportion to them once they outnumber the
    # features; beyond 2^16 rows the time of one is scaled from there.
    samples = min(n_rows, 2**16) * figures["k"] // figures["atoms"]
    svd = svd_seconds(samples, figures["features"]) * max(1.0, n_rows / 2**16)
    classic = figures["omp_s"] * factor + svd * figures["atoms"]
    key = (n_rows, figures["atoms"], figures["k"])
    paper = PAPER.get(key) if figures["features"] == 2304 else None
    return {
        "rows": n_rows,
        "atoms": figures["atoms"],
        "k": figures["k"],
        "ours_cpu_s": ours,
        "scaled": n_rows != figures["rows"],
        "ratio": ours / bare,
        "classic_cpu_s": classic,
        "classic_factor": classic / ours,
        **dict(zip(PAPER_COLUMNS, paper or (None, None, None), strict=True)),
    }


def growth(base: tuple[int, int, int, int], repeats: int) -> dict[str, float]:
    """Exponent of the cost in rows, features, atoms and k: slope on log-log axes over a factor of four."""
    exponents = {}
    for axis, name in enumerate(("rows", "features", "atoms", "k")):
        points = []
        for factor in (0.5, 1, 2):
            shape = list(base)
            shape[axis] = int(shape[axis] * factor)
            rows, features, atoms, k = shape
            figures = measure(rows, features, atoms, k, repeats, classic=False)
            points.append((shape[axis], figures["iteration_s"]))
        x, y = np.log(np.asarray(points, dtype=float)).T
        exponents[name] = float(np.polyfit(x, y, 1)[0])
    return exponents


def table(result: dict[str, Any]) -> str:
    """The tables as Markdown."""
    rows = [
        [
            f"{r['rows']:,}",
            f"{r['atoms']:,}",
            r["k"],
            f"{r['ours_cpu_s']:.1f}" + "*" * r["scaled"],
            f"{r['ratio']:.2f}",
            f"{r['classic_cpu_s']:,.0f}*",
            f"{r['classic_factor']:,.0f}",
            *("" if r[paper] is None else f"{r[paper]:,.4g}" for paper in PAPER_COLUMNS),
        ]
        for r in result["table"]
    ]
    header = ["rows", "atoms", "k", "ours, CPU s", "times bare product", "classic K-SVD, CPU s", "factor"]
    paper = ["paper, s (128 vCPUs)", "paper, s (T4 + 96 vCPUs)", "paper's classic K-SVD, s (estimated)"]
    lines = [markdown([*header, *paper], rows)]
    if result["growth"]:
        fits = ", ".join(f"{name}^{value:.2f}" for name, value in result["growth"].items())
        lines.append(f"\ncost of one iteration grows as {fits}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper_timing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, help="rows that are really run")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--atoms", type=int, help="only this number of atoms")
    parser.add_argument("--no-growth", action="store_true", help="leave out the exponents")
    add_output(parser)
    args = parser.parse_args(argv)
    n_features, shapes, n_rows, repeats = SIZES[args.size]
    n_rows, repeats = args.rows or n_rows, args.repeats or repeats
    measure(64, 16, 32, 2, 1)  # compiles, or loads compiled kernels
    measured = [measure(n_rows, n_features, m, k, repeats) for m, k in shapes if args.atoms in (None, m)]
    targets = TARGET_ROWS if args.size == "paper" else (n_rows, 4 * n_rows)
    result = {
        "benchmark": "paper_timing",
        "size": args.size,
        "machine": machine(),
        "measured": measured,
        "table": [at_rows(figures, n) for figures in measured for n in targets],
        "growth": {} if args.no_growth else growth(GROWTH[args.size], repeats),
    }
    emit(result, args, table)
    return result


if __name__ == "__main__":
    main()
