"""The regression guard, `make bench`: small sizes of the benchmarks, their ratios against the stored ones.

    python -m benchmarks.guard              # against benchmarks/baseline.json; ends with 1 if something got worse
    python -m benchmarks.guard --update     # stores what it measures

Only ratios inside one run are compared, never seconds, so that another machine or a busy one says the same within
the tolerance; and qualities, which are the same everywhere. Each line names what it is, before and now.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask

from benchmarks import encoders, paper_timing
from benchmarks.common import DOCUMENTED, Problem, add_output, emit, machine, make_problem, score
from dbksvd_dask import DBKSVD

BASELINE = Path(__file__).with_name("baseline.json")

# What a busy neighbour can do to a ratio of CPU seconds was up to a quarter in repeated runs on a shared machine.
RATIO_TOLERANCE = 0.3
QUALITY_TOLERANCE = 0.005

# size: (rows, features, atoms, k) of an iteration; (features, atoms, k, rows) of an encode; rows, atoms, k,
# iterations of a fit; repeats
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"iteration": [(256, 16, 32, 2)], "encode": [(16, 32, 2, 128)], "fit": (400, 48, 5, 2), "repeats": 1},
    "small": {
        "iteration": [(8192, 384, 2048, 16), (4096, 1536, 1024, 20)],
        "encode": [(384, 2048, 16, 4096), (2304, 4096, 20, 1024)],
        "fit": (8192, 256, 8, 8),
        "repeats": 3,
    },
}


@dataclass(frozen=True)
class Figure:
    """One number of the guard, and whether more of it is better."""

    name: str
    value: float
    more_is_better: bool
    tolerance: float  # share of the stored value for ratios, absolute for qualities
    relative: bool = True

    def worse_than(self, before: float) -> bool:
        """Say whether the value is worse than the stored one by more than the tolerance."""
        margin = self.tolerance * before if self.relative else self.tolerance
        return self.value < before - margin if self.more_is_better else self.value > before + margin


def iteration_figures(size: dict[str, Any]) -> list[Figure]:
    """Iteration over the bare products on the same rows."""
    out = []
    for rows, features, atoms, k in size["iteration"]:
        figures = paper_timing.measure(rows, features, atoms, k, size["repeats"], classic=False)
        name = f"iteration / bare products, n={rows} d={features} m={atoms} k={k}"
        out.append(Figure(name, figures["ratio"], False, RATIO_TOLERANCE))
    return out


def encode_figures(size: dict[str, Any]) -> list[Figure]:
    """Encoders over the bare product, and over those peers that are always installed."""
    out = []
    for features, atoms, k, rows in size["encode"]:
        problem = make_problem(None, 2 * atoms, rows, atoms, k, n_features=features)
        measured = encoders.measure(problem, size["repeats"], peers=("scikit-learn OMP",), gram_inside=False)
        shape = f"d={features} m={atoms} k={k}"
        for e in measured["encoders"]:
            if e["name"] in ("MP, gram given", "OMP, gram given"):
                out.append(Figure(f"{e['name']} / bare product, {shape}", e["of_gemm"], True, RATIO_TOLERANCE))
            if e["name"] == "scikit-learn OMP":
                out.append(Figure(f"MP / {e['name']}, {shape}", e["mp_factor"], True, 2 * RATIO_TOLERANCE))
    return out


def quality_figures(size: dict[str, Any]) -> list[Figure]:
    """Held-out variance explained of short fits on made-up rows."""
    rows, atoms, k, n_iter = size["fit"]
    problem = make_problem(None, rows, max(256, rows // 8), atoms, k, n_features=64)
    out = []
    for name, params in (("plain", {}), ("Matryoshka", {"groups": "exponential"}), ("omp", {"encoder": "omp"})):
        scores = score(problem, _fit(problem, n_iter, params))
        for encoder, value in scores.items():
            label = f"variance explained after {n_iter} iterations, {name}, {encoder[3:]}"
            out.append(Figure(label, value, True, QUALITY_TOLERANCE, relative=False))
    return out


def _fit(problem: Problem, n_iter: int, params: dict[str, Any]) -> Any:
    batch = len(problem.train) // 2
    given = {"n_iter": n_iter, "batch_size": batch, "validation": 0, "center": False, **DOCUMENTED, **params}
    model = DBKSVD(problem.n_atoms, problem.k, **given)
    with dask.config.set(scheduler="synchronous"):
        return model.fit(problem.train).components_


def compare(figures: list[Figure], stored: dict[str, float]) -> list[dict[str, Any]]:
    """Each figure beside the stored one, with a verdict."""
    out = []
    for figure in figures:
        before = stored.get(figure.name)
        verdict = "new" if before is None else "worse" if figure.worse_than(before) else "ok"
        out.append({"name": figure.name, "before": before, "now": figure.value, "verdict": verdict})
    return out


def table(result: dict[str, Any]) -> str:
    """One line per figure, and the verdict."""
    lines = []
    for row in result["figures"]:
        before = "       -" if row["before"] is None else f"{row['before']:8.3f}"
        lines.append(f"{row['verdict']:6s} {before} -> {row['now']:8.3f}  {row['name']}")
    worse = [row["name"] for row in result["figures"] if row["verdict"] == "worse"]
    lines.append("got worse: " + "; ".join(worse) if worse else "nothing got worse")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 1 if something got worse."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--baseline", default=str(BASELINE), help="file of stored figures")
    parser.add_argument("--update", action="store_true", help="store what is measured")
    add_output(parser)
    args = parser.parse_args(argv)
    size, path = SIZES[args.size], Path(args.baseline)
    paper_timing.measure(64, 16, 32, 2, 1)  # compiles, or loads compiled kernels
    figures = [*iteration_figures(size), *encode_figures(size), *quality_figures(size)]
    stored = json.loads(path.read_text())["figures"] if path.exists() else {}
    rows = compare(figures, stored)
    emit({"benchmark": "guard", "size": args.size, "machine": machine(), "figures": rows}, args, table)
    if args.update:
        kept = {"machine": machine(), "figures": {figure.name: round(figure.value, 4) for figure in figures}}
        path.write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    return int(any(row["verdict"] == "worse" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
