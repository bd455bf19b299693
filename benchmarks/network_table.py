"""The results of `benchmarks.networks` laid out: Markdown tables, and figures as the paper has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
RAW_LABEL = "raw activations"
# Reference lines, which compete for no column.
BASELINES = ("soft-frozen", "random", RAW)
# Line, marker and colour of a method in every figure: one hue for a family.
LOOKS = {
    "DB-KSVD": ("-", "o", "#08519c"),
    "DB-KSVD Matryoshka": ("-", "s", "#4292c6"),
    "DB-KSVD read": ("-", "^", "#74c476"),
    "DB-KSVD read, linear": ("-", "v", "#238b45"),
    "DB-KSVD whitened": ("-", "P", "#54278f"),
    "DB-KSVD recover": ("-", "D", "#00876c"),
    "TopK SAE": ("--", "o", "#d94801"),
    "BatchTopK SAE": ("--", "s", "#a50f15"),
    "Matryoshka SAE": ("--", "^", "#f768a1"),
    "ITDA": ("-.", "v", "#6a51a3"),
    "soft-frozen": (":", "x", "0.35"),
    "random": (":", "+", "0.6"),
}
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


def in_order(names: Iterable[str]) -> list[str]:
    """Methods as the tables list them; others after them."""
    there = dict.fromkeys(names)
    return [m for m in METHODS if m in there] + [m for m in there if m not in METHODS and m != RAW]


def look(method: str) -> dict[str, Any]:
    """Give a method the same line in every panel: ours solid, autoencoders dashed, the others dotted and grey."""
    style, marker, color = LOOKS.get(method, (":", "x", "0.5"))
    return {"linestyle": style, "marker": marker, "color": color, "markersize": 5, "linewidth": 1.4}


def figure(lines: list[dict[str, Any]], setting: tuple[Any, ...]) -> Figure:
    """Metrics against k, one panel each and one line per method, as the paper's figure of SAEBench.

    A panel shows the range of the methods that compete; a baseline far below it is named at the edge. Bars are the
    largest distance of a seed from the mean.
    """
    found = {key: cell for key, cell in merged(lines).items() if key[:4] == setting and _measured(cell)}
    panels = [panel for panel in PANELS if any(panel[0] in cell for cell in found.values())] or [PANELS[0]]
    methods, ks = in_order(key[5] for key in found), sorted({key[4] for key in found if key[5] != RAW})
    drawn = Figure(figsize=(3.2 * len(panels) + 0.4, 4.2), layout="constrained")
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    for ax, (name, title) in zip(axes, panels, strict=True):
        for i, method in enumerate(methods):
            points = sorted(
                (key[4], c[name], c[f"{name}_spread"])
                for key, c in found.items()
                if key[5] == method and name in c
            )
            if points:
                k, value, spread = map(np.array, zip(*points, strict=True))
                if len(ks) == 1:  # side by side, or they hide one another
                    k = k + (i - (len(methods) - 1) / 2)
                ax.errorbar(k, value, yerr=spread, capsize=2, label=method, **look(method))
        raw = [cell[name] for key, cell in found.items() if key[5] == RAW and name in cell]
        if raw:
            ax.axhline(raw[0], color="0.2", linewidth=1, linestyle=(0, (1, 1)), label=RAW_LABEL)
        _limit(ax, found, name, raw)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("k")
        ax.set_xticks(ks)
        if len(ks) == 1:
            ax.set_xlim(ks[0] - len(methods) / 2 - 1, ks[0] + len(methods) / 2 + 1)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
    _legend(drawn)
    return drawn


def _legend(drawn: Figure) -> None:
    """One legend below all panels, in the order of the tables, in as many columns as fit."""
    pairs = (zip(*ax.get_legend_handles_labels(), strict=True) for ax in drawn.axes)
    named = {text: handle for some in pairs for handle, text in some}
    order = [
        *in_order(text for text in named if text != RAW_LABEL),
        *(text for text in named if text == RAW_LABEL),
    ]
    columns = max(1, min(6, len(named), int(drawn.get_figwidth() / 1.9)))
    handles = [named[text] for text in order]
    drawn.legend(handles, order, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _measured(cell: dict[str, Any]) -> bool:
    """Whether a cell has anything to draw; a comparison of learning rates has not."""
    return any(name in cell for name, _ in PANELS)


def _limit(ax: Any, found: Mapping[tuple[Any, ...], dict[str, Any]], name: str, raw: list[float]) -> None:
    """Let the methods that compete set the range, and say which baselines lie outside."""
    values = [cell[name] for key, cell in found.items() if name in cell and key[5] not in BASELINES] + raw
    if not values:
        return
    margin = 0.08 * (max(values) - min(values)) or 0.01
    low, high = min(values) - margin, max(values) + margin
    below = {
        (key[5], key[4]): c[name]
        for key, c in found.items()
        if key[5] in BASELINES and name in c and c[name] < low
    }
    # one that is near may widen the range by half
    near = [value for value in below.values() if value > low - 0.5 * (high - low)]
    low = min([low, *(value - margin for value in near)])
    outside = in_order(method for (method, _), value in below.items() if value < low)
    ax.set_ylim(low - 0.07 * len(outside) * (high - low), high)  # room for the words
    said = []
    for method in outside:
        values = [f"{value:.2f}" for (name, _), value in sorted(below.items()) if name == method and value < low]
        said.append(f"below: {method} {', '.join(values)}")
    ax.text(0.02, 0.02, "\n".join(said), transform=ax.transAxes, fontsize=7, color="0.35")


def histograms(lines: list[dict[str, Any]], setting: tuple[Any, ...]) -> Figure | None:
    """Coherence of the atoms, one panel per k, as the paper's figure of coherence; None without any."""
    found = {key: c for key, c in merged(lines).items() if key[:4] == setting and c.get("histogram")}
    ks = sorted({key[4] for key in found})
    if not ks:
        return None
    drawn = Figure(figsize=(3.8 * max(len(ks), 2) + 0.4, 3.6), layout="constrained")
    axes = drawn.subplots(1, len(ks), squeeze=False, sharey=True)[0]
    middle = (BINS[1:] + BINS[:-1]) / 2
    for ax, k in zip(axes, ks, strict=True):
        for method in in_order(key[5] for key in found if key[4] == k):
            cell = next(c for key, c in found.items() if key[4:] == (k, method))
            kept = look(method)
            ax.plot(middle, cell["histogram"], label=method, **(kept | {"marker": "", "linewidth": 1.3}))
        ax.set_title(f"k = {k}", fontsize=9)
        ax.set_xlabel("largest inner product with another atom")
        # a spike of random directions must not flatten the others
        tops = [max(c["histogram"]) for key, c in found.items() if key[5] not in BASELINES]
        ax.set_ylim(0, 1.1 * max(tops, default=1))
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("atoms")
    _legend(drawn)
    return drawn


def setting_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Model, hook, atoms and rows of a line."""
    return tuple(line.get(name) for name in ("model", "hook", "n_atoms", "rows"))


def settings(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Model, hook, atoms and rows of everything that was measured."""
    return sorted({setting_of(line) for line in lines}, key=str)
