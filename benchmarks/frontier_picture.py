"""The picture of docs/settings.md: which recipe reconstructs, recovers and probes how well, beside SAEs.

    python -m benchmarks.frontier_picture docs/images/frontier.png

Draws rows of `benchmarks/results`: explained variance against MCC and F1 on small SynthSAEBench models at L0 6,
and against one-atom probing of WordNet glosses. Mean over seeds. A filled circle is a recipe with its own
encoding, an empty one the same dictionary in one linear step, a square an SAE.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
RECOVERY, PROBING = RESULTS / "synthsaebench.jsonl", RESULTS / "probing.jsonl"
L0 = 6
SEEDS = (0, 1, 2)  # those of the tables; more are there for some methods
COLOURS = {
    "reconstruct": "#8a8a8a",
    "recover": "#b3261e",
    "read": "#c98a1b",
    "Matryoshka SAE": "#1f5fa8",
    "BatchTopK SAE": "#2f8f5b",
    "TopK SAE": "#2f8f5b",
}


class Point(NamedTuple):
    """One method in one panel."""

    name: str  # a key of COLOURS
    kind: str  # "own", "linear" or "sae"
    x: float  # explained variance
    y: float


def recovery_points(rows: list[dict[str, Any]], figure: str) -> list[Point]:
    """Points of small SynthSAEBench models: explained variance against MCC or F1."""
    mine = [r for r in rows if r["size"] == "small" and r["k"] == L0]
    points = []
    for method, encode in dict.fromkeys((r["method"], r["encode"]) for r in mine):
        name = method.removeprefix("recipe ")
        if name not in COLOURS:
            continue
        same = [r for r in mine if (r["method"], r["encode"]) == (method, encode)]
        kind = encode if method.startswith("recipe") else "sae"
        points.append(Point(name, kind, _mean(same, "EV"), _mean(same, figure)))
    return points


def probing_points(rows: list[dict[str, Any]]) -> list[Point]:
    """Points of WordNet: explained variance against balanced accuracy with one atom."""
    points = []
    for method in dict.fromkeys(r["method"] for r in rows):
        name, _, how = method.removeprefix("recipe ").partition(", ")
        if name not in COLOURS or how == "pursuit":
            continue
        same = [r for r in rows if r["method"] == method]
        kind = ("linear" if how else "own") if method.startswith("recipe") else "sae"
        points.append(Point(name, kind, _mean(same, "VE"), _mean(same, "k_sp=1")))
    return points


def _mean(rows: list[dict[str, Any]], column: str) -> float:
    return float(np.mean([r[column] for r in rows]))


def draw_panel(ax: Axes, points: list[Point], title: str, x: str, y: str) -> None:
    """Draw the points of one panel."""
    for point in points:
        colour = COLOURS[point.name]
        marker = "s" if point.kind == "sae" else "o"
        face = "white" if point.kind == "linear" else colour
        ax.plot(point.x, point.y, marker, color=colour, mfc=face, ms=9)
        label = f"{point.name}, linear" if point.kind == "linear" else point.name
        place = {"sae": (9, -13, "left"), "linear": (4, -17, "center")}.get(point.kind, (0, 8, "center"))
        ax.annotate(label, (point.x, point.y), xytext=place[:2], textcoords="offset points", ha=place[2])
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.margins(0.28, 0.18)  # room for labels
    ax.grid(alpha=0.3)


def draw(recovery: list[dict[str, Any]], probing: list[dict[str, Any]]) -> Figure:
    """Draw the three panels."""
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, name in zip(axes, ("MCC", "F1"), strict=False):
        points = recovery_points(recovery, name)
        if name == "MCC":  # of atoms: the same for any encoding
            points = [point for point in points if point.kind != "linear"]
        draw_panel(ax, points, f"SynthSAEBench, small, L0 {L0}", "EV", name)
    title = "WordNet glosses, 1024 atoms, k=16"
    draw_panel(axes[2], probing_points(probing), title, "explained variance", "balanced accuracy of one atom")
    return figure


def main(argv: list[str] | None = None) -> None:
    """Read rows, write the picture."""
    parser = argparse.ArgumentParser(description="Picture of reconstruction against recovery and probing.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--recovery", type=Path, default=RECOVERY, help="JSON lines of benchmarks.synthsaebench")
    parser.add_argument("--probing", type=Path, default=PROBING, help="JSON lines of benchmarks.wordnet_probing")
    args = parser.parse_args(argv)
    rows = ([json.loads(line) for line in p.read_text().splitlines()] for p in (args.recovery, args.probing))
    draw(*([row for row in found if row.get("seed", 0) in SEEDS] for found in rows)).savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
