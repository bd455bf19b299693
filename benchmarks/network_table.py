"""The results of `benchmarks.networks` laid out: Markdown tables, and figures as the paper has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import markdown
from benchmarks.network_methods import METHODS, RAW
from benchmarks.network_scores import BINS

PARTS = ("variance", "coherence", "probing", "absorption", "loss", "stability")


class Column(NamedTuple):
    """A column of the table: its key in the lines, its head, digits, and whether more is better."""

    key: str
    head: str
    digits: int
    up: bool | None


COLUMNS = (
    Column("l0", "nonzeros", 1, None),
    Column("variance_explained", "variance explained", 3, True),
    Column("total_variance", "of the total", 3, True),
    Column("recovered_zero", "loss recovered, zero", 4, True),
    Column("recovered_mean", "loss recovered, mean", 4, True),
    Column("own_variance", "by its own encoder", 3, True),
    Column("accuracy_1", "probing 1", 3, True),
    Column("accuracy_2", "probing 2", 3, True),
    Column("accuracy_5", "probing 5", 3, True),
    Column("auc_1", "probing 1", 3, True),
    Column("auc_2", "probing 2", 3, True),
    Column("auc_5", "probing 5", 3, True),
    Column("absorption", "absorption", 3, False),
    Column("letter_f1", "first letter F1", 3, True),
    Column("stability", "stability", 3, True),
    Column("coherence", "coherence", 3, False),
    Column("cpu_s", "CPU s", 0, False),
)
# Reference lines, which compete for no column.
BASELINES = ("soft-frozen", "random", RAW)
PANELS = (
    ("total_variance", "variance explained, of the total"),
    ("recovered_mean", "loss recovered (mean ablation)"),
    ("accuracy_1", "sparse probing, 1 atom (balanced accuracy)"),
    ("auc_1", "sparse probing, 1 atom (AUC)"),
    ("absorption", "absorption (lower is better)"),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the results; an unfinished last line is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def merged(lines: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Join the parts of each cell: (model, hook, n_atoms, rows, k, method) to the means over seeds.

    Figures with several seeds have their largest distance from the mean under the key with `_spread`.
    """
    cells: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for line in lines:
        key = tuple(line.get(name) for name in ("model", "hook", "n_atoms", "rows", "k", "method"))
        cell = cells.setdefault(key, {})
        for name, value in line.items():
            cell.setdefault(name, []).append(value)
    return {key: _mean(cell) for key, cell in cells.items()}


def _mean(cell: dict[str, list[Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"histogram": cell.get("histogram", [None])[0]}
    if "fvu" in cell:
        cell = cell | {"total_variance": [1 - value for value in cell["fvu"]]}
    for column in COLUMNS:
        values = cell.get(column.key)
        if values:
            out[column.key] = float(np.mean(values))
            out[f"{column.key}_spread"] = float(np.max(np.abs(np.array(values) - out[column.key])))
            out[f"{column.key}_n"] = len(values)
    return out


def best(rows: dict[str, dict[str, Any]], column: Column) -> str | None:
    """Return the method that leads a column, baselines aside."""
    there = {m: row[column.key] for m, row in rows.items() if column.key in row and m not in BASELINES}
    if column.up is None or not there:
        return None
    return max(there, key=lambda m: there[m] if column.up else -there[m])


def table(lines: list[dict[str, Any]]) -> str:
    """One Markdown table for each model, size and k; the leader of a column is bold."""
    found = merged(lines)
    raw = {key[:4]: cell for key, cell in found.items() if key[5] == RAW}
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for key, cell in found.items():
        if key[5] != RAW and any(column.key in cell for column in COLUMNS):
            groups.setdefault(key[:5], {})[key[5]] = cell
    parts = []
    for key in sorted(groups, key=str):
        model, hook, n_atoms, rows, k = key
        there = groups[key] | ({RAW: raw[key[:4]]} if key[:4] in raw else {})
        here = {method: there[method] for method in (*METHODS, RAW) if method in there}
        columns = [column for column in COLUMNS if any(column.key in cell for cell in here.values())]
        leaders = {column: best(here, column) for column in columns}
        body = [[m, *(_cell(cell, one, leaders[one] == m) for one in columns)] for m, cell in here.items()]
        parts.append(f"{model}, {hook}, {n_atoms} atoms, {rows:,} training rows, k = {k}")
        parts.append(markdown(["", *(column.head for column in columns)], body))
    return "\n\n".join(parts)


def _cell(cell: dict[str, Any], column: Column, leads: bool) -> str:
    if column.key not in cell:
        return ""
    text = f"{cell[column.key]:.{column.digits}f}"
    if cell[f"{column.key}_n"] > 1 and column.up is not None and column.key != "cpu_s":
        text += f" ± {cell[f'{column.key}_spread']:.{column.digits}f}"
    return f"**{text}**" if leads else text


def figure(lines: list[dict[str, Any]], setting: tuple[Any, ...]) -> Figure:
    """Metrics against k, one panel each and one line per method, as the paper's figure of SAEBench."""
    found = {key: cell for key, cell in merged(lines).items() if key[:4] == setting}
    panels = [panel for panel in PANELS if any(panel[0] in cell for cell in found.values())] or [PANELS[0]]
    drawn = Figure(figsize=(3.4 * len(panels) + 1, 3.6), layout="constrained")
    for ax, (name, title) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        methods = list(dict.fromkeys(key[5] for key in found if key[5] != RAW))
        for i, method in enumerate(methods):
            points = sorted((key[4], c[name]) for key, c in found.items() if key[5] == method and name in c)
            if points:
                style = ":" if method in BASELINES else "-" if method.startswith("DB-KSVD") else "--"
                ax.plot(*zip(*points, strict=True), f"{style}o", color=f"C{i % 10}", markersize=4, label=method)
        for key, cell in found.items():
            if key[5] == RAW and name in cell:
                ax.axhline(cell[name], color="0.6", linewidth=1, label="raw activations")
        ax.set(title=title, xlabel="k")
        ax.title.set_fontsize(9)
        ax.grid(alpha=0.3)
    drawn.axes[0].legend(fontsize=6)
    return drawn


def histograms(lines: list[dict[str, Any]], setting: tuple[Any, ...]) -> Figure | None:
    """Coherence of the atoms, one panel per k, as the paper's figure of coherence; None without any."""
    found = {key: c for key, c in merged(lines).items() if key[:4] == setting and c.get("histogram")}
    ks = sorted({key[4] for key in found})
    if not ks:
        return None
    drawn = Figure(figsize=(3.8 * len(ks) + 1, 3), layout="constrained")
    for ax, k in zip(drawn.subplots(1, len(ks), squeeze=False)[0], ks, strict=True):
        for key, cell in found.items():
            if key[4] == k:
                ax.stairs(cell["histogram"], BINS, label=key[5])
        ax.set(title=f"k = {k}", xlabel="largest inner product with another atom", ylabel="atoms")
        ax.legend(fontsize=6)
    return drawn


def settings(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Model, hook, atoms and rows of everything that was measured."""
    return sorted({tuple(line.get(n) for n in ("model", "hook", "n_atoms", "rows")) for line in lines}, key=str)
