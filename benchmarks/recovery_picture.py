"""The picture of docs/settings.md: recovery of true features against the mean number of nonzeros.

    python -m benchmarks.recovery_picture docs/images/recovery.png

Draws the rows of `benchmarks/results/synthsaebench.jsonl` (mean over seeds, bars from the lowest to the highest
seed), and beside our one dictionary of the 16k model, encoded at several L0, the published curves of others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "synthsaebench.jsonl"
RECOVER = "growing DB-KSVD, non-negative, prior"
SWEPT = f"one dictionary, {RECOVER}"  # benchmarks.l0_sweep
# Name in the rows -> name in the picture and colour.
METHODS = {
    RECOVER: ('recipe "recover"', "#b3261e"),
    "DB-KSVD, non-negative": ("plain DB-KSVD, non-negative", "#8a8a8a"),
    "Matryoshka SAE": ("Matryoshka SAE", "#1f5fa8"),
    "BatchTopK SAE": ("BatchTopK SAE", "#2f8f5b"),
}
FIGURES = ("EV", "MCC", "F1")
# SynthSAEBench-16k as published, at L0 15, 20, ..., 45.
PUBLISHED_L0 = tuple(range(15, 50, 5))
PUBLISHED = {
    "LISTA-Matryoshka": {
        "F1": (0.78, 0.89, 0.98, 0.93, 0.885, 0.85, 0.82),
        "MCC": (0.73, 0.80, 0.818, 0.816, 0.814, 0.812, 0.811),
    },
    "Matryoshka SAE": {
        "F1": (0.61, 0.86, 0.88, 0.83, 0.80, 0.77, 0.75),
        "MCC": (0.56, 0.746, 0.793, 0.794, 0.794, 0.793, 0.791),
    },
    "BatchTopK SAE": {
        "F1": (0.745, 0.82, 0.73, 0.66, 0.615, 0.58, 0.555),
        "MCC": (0.677, 0.753, 0.757, 0.762, 0.763, 0.763, 0.762),
    },
    "MP-SAE": {
        "F1": (0.49, 0.44, 0.45, 0.43, 0.405, 0.37, 0.35),
        "MCC": (0.679, 0.675, 0.693, 0.708, 0.713, 0.713, 0.714),
    },
}
_PUBLISHED_COLOURS = {"LISTA-Matryoshka": "#6a3d9a", "MP-SAE": "#c98a1b"}


def curve(
    rows: list[dict[str, Any]], size: str, method: str, figure: str
) -> list[tuple[float, float, float, float]]:
    """Points of one method: (mean L0 reached, mean, lowest, highest) for every L0 asked for."""
    mine = [r for r in rows if r["size"] == size and r["method"] == method and r["encode"] in ("plain", "own")]
    points = []
    for k in sorted({r["k"] for r in mine}):
        values = np.array([r[figure] for r in mine if r["k"] == k])
        l0 = float(np.mean([r["L0"] for r in mine if r["k"] == k]))
        points.append((l0, float(values.mean()), float(values.min()), float(values.max())))
    return points


def draw_measured(ax: Axes, rows: list[dict[str, Any]], size: str, figure: str) -> None:
    """Draw one figure of merit of our own runs on one size."""
    for method, (name, colour) in METHODS.items():
        points = np.array(curve(rows, size, method, figure))
        if len(points):
            bars = np.abs(points[:, 2:].T - points[:, 1])
            ax.errorbar(points[:, 0], points[:, 1], bars, label=name, color=colour, marker="o", ms=4, capsize=2)


def draw_published(ax: Axes, rows: list[dict[str, Any]], figure: str) -> None:
    """Draw the published curves of the 16k model, and our run of it."""
    colours = {name: colour for name, colour in METHODS.values()} | _PUBLISHED_COLOURS
    for name, figures in PUBLISHED.items():
        ax.plot(PUBLISHED_L0, figures[figure], "--", color=colours[name], label=f"{name} (published)")
    swept = curve(rows, "16k", SWEPT, figure) or curve(rows, "16k", RECOVER, figure)
    ax.plot([point[0] for point in swept], [point[1] for point in swept], "o-", color=METHODS[RECOVER][1], ms=4)


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw one row per size and one column per figure of merit."""
    sizes = ("small", "medium", "16k")
    figure = Figure(figsize=(11, 9), layout="constrained")
    for i, size in enumerate(sizes):
        for j, name in enumerate(FIGURES):
            ax = figure.add_subplot(len(sizes), len(FIGURES), i * len(FIGURES) + j + 1)
            if size == "16k" and name == "EV":
                ax.axis("off")  # not published; the legend takes its place
                continue
            if size == "16k":
                draw_published(ax, rows, name)
            else:
                draw_measured(ax, rows, size, name)
            ax.set(title=f"{size}: {name}", xlabel="nonzeros per sample (L0)")
            ax.grid(alpha=0.3)
    ax = figure.axes[2 * len(FIGURES)]
    ax.legend(*_legend(figure), loc="center", frameon=False)
    return figure


def _legend(figure: Figure) -> tuple[list[Any], list[str]]:
    """Return one handle for each name that any axis has."""
    named: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    return list(named.values()), list(named)


def main(argv: list[str] | None = None) -> None:
    """Read rows, write the picture."""
    parser = argparse.ArgumentParser(description="Picture of recovery against the number of nonzeros.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="JSON lines of benchmarks.synthsaebench")
    args = parser.parse_args(argv)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    draw(rows).savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
