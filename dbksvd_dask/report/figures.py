"""The plots of the overview, as SVG that takes its colours from the page's theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from dbksvd_dask import plots
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.report.facts import AtomFacts

_THEME = {
    plots.INK: "currentColor",
    plots.GRID: "var(--line)",
    plots.BLUE: "var(--blue)",
    plots.ORANGE: "var(--orange)",
    plots.GREEN: "var(--green)",
    plots.RED: "var(--red)",
}


# Share of the samples in one bar from which a histogram is left out.
_ONE_BAR = 0.98


def overview_figures(
    dictionary: Dictionary, facts: AtomFacts, errors: NDArray[np.int64] | None
) -> list[tuple[str, str]]:
    """Draw the overview.

    Parameters
    ----------
    dictionary : Dictionary
    facts : AtomFacts
    errors : int64 ndarray of shape (n_bins + 1,), or None
        Histogram of the relative errors.

    Returns
    -------
    list of (name, SVG)
    """
    wanted: list[tuple[str, str, Callable[[], Any]]] = []
    if any(dictionary.history.values()):
        wanted.append(
            ("history", "Error and variance explained per iteration", lambda: plots.plot_history(dictionary))
        )
    wanted += [
        ("coherence", "Histogram of the coherence of the atoms", lambda: plots.plot_coherence(facts.coherence)),
        ("density", "Histogram of the density of the atoms", lambda: plots.plot_density(facts.codes)),
    ]
    # one bar would say no more than the number at the head of the page
    counts = facts.codes.l0_histogram
    if counts.max() < _ONE_BAR * counts.sum():
        wanted.append(("l0", "Histogram of active atoms per sample", lambda: plots.plot_l0(facts.codes)))
    balance = facts.codes.sign_balance
    if np.unique(balance[np.isfinite(balance)]).size > 1:
        wanted.append(
            ("balance", "Histogram of the sign balance of the atoms", lambda: plots.plot_sign_balance(facts.codes))
        )
    if errors is not None:
        wanted.append(("errors", "Histogram of the relative error", lambda: plots.plot_errors(errors)))
    return [(name, themed_svg(draw(), name, label)) for name, label, draw in wanted]


def themed_svg(figure: Any, name: str, label: str) -> str:
    """Render a figure as SVG: text as text, colours of `plots` as colours of the page, identifiers of its own.

    Parameters
    ----------
    figure : matplotlib figure
    name : str
        Different for every figure of a page: SVG identifiers are made from it.
    label : str
        What a screen reader says.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    for color, theme in _THEME.items():
        svg = svg.replace(color, theme)
    # matplotlib gives every group a name, the same in each figure; only names that are referred to are kept
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    return svg.replace(
        "<svg", f'<svg class="chart" role="img" aria-label="{escape(label, quote=True)}"', 1
    ).strip()
