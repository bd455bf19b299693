"""What dictionaries, codes and fitted estimators show of themselves in a notebook.

Codes are a plain xarray Dataset, so theirs hangs on the accessor `codes.dbksvd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import xarray as xr

from dbksvd_dask.blocks import code_blocks
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.codes import CodeMoments, CodeSummary, code_summary, stream_code_moments

_STYLE = "text-align:left;padding:1px 14px 1px 0"
_CURVES = (
    ("validation_variance_explained", "variance explained, held-out"),
    ("variance_explained", "variance explained, batch"),
    ("relative_error", "relative error, batch"),
)


def facts_html(title: str, facts: Mapping[str, Any], more: str = "") -> str:
    """A heading and a table of names and values.

    Parameters
    ----------
    title : str
    facts : mapping of name to value; None is left out
    more : str
        HTML that follows.
    """
    rows = "".join(
        f"<tr><th style='{_STYLE};font-weight:normal;opacity:.7'>{escape(name)}</th>"
        f"<td style='{_STYLE}'>{escape(_text(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<div><strong>{escape(title)}</strong><table>{rows}</table>{more}</div>"


def dictionary_html(
    atoms: np.ndarray, params: Mapping[str, Any], history: Mapping[str, Any], iteration: int, source: str = ""
) -> str:
    """A dictionary: its size, how it was fitted, how far it came.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
    params : parameters of the fit
    history : mapping of name to values per iteration
    iteration : int
    source : str
        What it was fitted on.
    """
    facts = {
        "atoms": f"{atoms.shape[0]:,}",
        "features": f"{atoms.shape[1]:,}",
        "dtype": str(atoms.dtype),
        "k": params.get("k"),
        "iterations": iteration,
        "fitted on": source or None,
    }
    plain = {name: value for name, value in params.items() if name not in ("n_atoms", "k")}
    folded = f"<details><summary>parameters</summary>{facts_html('', plain)}</details>" if plain else ""
    return facts_html("Dictionary", facts, history_html(history) + folded)


def fit_html(atoms: np.ndarray, history: xr.Dataset, iteration: int) -> str:
    """A fitted estimator, below the diagram of its parameters.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
    history : Dataset over `iteration`
    iteration : int
    """
    curves = history_html({str(name): np.asarray(values) for name, values in history.data_vars.items()})
    facts = {"dictionary": f"{atoms.shape[0]:,} atoms x {atoms.shape[1]:,} features", "iterations": iteration}
    return facts_html("Fitted", facts, curves)


def history_html(history: Mapping[str, Any]) -> str:
    """Small curves of a fit with their last values; empty without a history."""
    parts = []
    for name, label in _CURVES:
        values = np.asarray(history.get(name, ()), float)
        if values.size and np.isfinite(values[-1]):
            parts.append(f"{sparkline(values)} {escape(label)} <b>{values[-1]:.4f}</b>")
    return f"<div>{'<br>'.join(parts)}</div>" if parts else ""


def sparkline(values: Sequence[float] | np.ndarray, width: int = 90, height: int = 18) -> str:
    """SVG of a curve without axes, in the colour of the text around it."""
    held = np.asarray(values, float)
    held = held[np.isfinite(held)]
    low, span = held.min(), max(float(np.ptp(held)), 1e-12)
    x = np.linspace(1, width - 1, held.size)
    y = height - 2 - (held - low) / span * (height - 4)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    line = f"<polyline points='{points}' fill='none' stroke='currentColor' stroke-width='1.5'/>"
    return f"<svg width='{width}' height='{height}' style='vertical-align:middle' role='img'>{line}</svg>"


def codes_html(summary: CodeSummary, k: int) -> str:
    """Codes: how many, how sparse, which atoms are never or too often active."""
    facts = {
        "samples": f"{summary.n_samples:,}",
        "atoms": f"{summary.n_atoms:,}",
        "slots": k,
        "active per sample": f"{summary.l0_mean:.2f} ({summary.l0_min} to {summary.l0_max})",
        "mean sum of |coefficients|": f"{summary.l1_mean:.4g}",
        "dead atoms": f"{summary.n_dead:,} on these samples",
        "over-dense atoms": f"{summary.n_over_dense:,} active on over {summary.over_dense:.0%}",
        "positive share": f"{summary.sign_balance_mean:.1%}",
    }
    return facts_html("Codes", facts)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "none" if value is None else str(value)


@xr.register_dataset_accessor("dbksvd")
class CodesAccessor:
    """`codes.dbksvd`: what codes say about their atoms.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`), with `n_atoms` in its attributes
    """

    def __init__(self, codes: xr.Dataset) -> None:
        self._codes = codes
        self._moments: CodeMoments | None = None

    def moments(self) -> CodeMoments:
        """Counts and sums per atom; lazy codes are read once."""
        if self._moments is None:
            if "atom" not in self._codes or "n_atoms" not in self._codes.attrs:
                raise InputError("these are no codes; use what transform(), encode() or open_codes() returned")
            self._moments = stream_code_moments(
                lambda: code_blocks(self._codes), int(self._codes.attrs["n_atoms"])
            )
        return self._moments

    def summary(self) -> CodeSummary:
        """L0, L1, dead and over-dense atoms, sign balance."""
        return code_summary(self.moments())

    def _repr_html_(self) -> str:
        return codes_html(self.summary(), int(self._codes.sizes["slot"]))

    def __repr__(self) -> str:
        return repr(self.summary())
