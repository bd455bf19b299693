"""Coherence of plain and Matryoshka dictionaries on activations.

    python -m benchmarks.coherence STORE --atoms 2048 --k 20 40 80

Per k and kind: mean and largest coherence (each atom's largest |<d_j, d_l>|), the share of atoms with a neighbour
above 0.9, and the variance explained on held-out rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import DOCUMENTED
from dbksvd_dask import DBKSVD
from dbksvd_dask.evaluate.coherence import coherence


def measure(D: np.ndarray, threshold: float = 0.9, tile: int = 512) -> dict[str, float]:
    """Mean and largest coherence of unit atoms (n_atoms, n_features), and the share above a threshold."""
    found = coherence(D, duplicate_threshold=threshold, tile=tile)
    return {
        "mean": float(found.absolute.mean()),
        "max": found.mutual,
        "near": found.n_near_duplicates / len(D),
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per k and kind of dictionary."""
    for k in args.k:
        for kind, groups in (("plain", None), ("Matryoshka", "exponential")):
            settings = {"groups": groups, "n_iter": args.n_iter, "batch_size": args.batch_size}
            model = DBKSVD(args.atoms, k, **settings, **DOCUMENTED)
            began = time.perf_counter()
            model.fit(args.store)
            found = measure(model.components_)
            explained = float(model.history_["validation_variance_explained"][-1])
            yield {"k": k, "kind": kind, **found, "VE": explained, "seconds": time.perf_counter() - began}


def table(rows: list[dict[str, Any]]) -> str:
    """Lay out rows as Markdown."""
    lines = ["| k | dictionary | mean coherence | largest | neighbour above 0.9 | held-out VE | seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in rows:
        lines.append(
            f"| {r['k']} | {r['kind']} | {r['mean']:.3f} | {r['max']:.3f} | {100 * r['near']:.1f} % | "
            f"{r['VE']:.3f} | {r['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print rows as they come and the table at the end."""
    parser = argparse.ArgumentParser(description="Coherence of plain and Matryoshka dictionaries.")
    parser.add_argument("store")
    parser.add_argument("--atoms", type=int, default=2048)
    parser.add_argument("--k", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--n-iter", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32_768)
    common.add_row_output(parser)
    args = parser.parse_args()
    common.emit_rows(run(args), args, table)


if __name__ == "__main__":
    main()
