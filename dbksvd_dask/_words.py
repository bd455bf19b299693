"""Bytes, times and small HTML: how the package writes them for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}


def in_bytes(n: float) -> str:
    """Write a number of bytes for people.

    >>> in_bytes(950), in_bytes(50_331_648), in_bytes(4.2e12)
    ('950 B', '50.3 MB', '4.2 TB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n:.0f} B"


def parse_bytes(value: int | float | str) -> int:
    """Read a number of bytes such as 4e9, "4GB", "0.5 GiB".

    >>> parse_bytes("4GB"), parse_bytes("0.5 GiB"), parse_bytes(123)
    (4000000000, 536870912, 123)
    """
    text = str(value).strip().lower().removesuffix("b").strip()
    number = text.rstrip("kmgti").strip()
    try:
        size = int(float(number) * _UNITS[text[len(number) :].strip()])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise InputError(
            f"memory_limit={value!r} is not a number of bytes; use for example '4GB' or 4_000_000_000"
        )
    return size


def format_bytes(n: float) -> str:
    """Write a number of bytes for people.

    >>> format_bytes(512), format_bytes(134217728), format_bytes(4.2e12)
    ('512 B', '134.2 MB', '4.20 TB')
    """
    for unit, size, digits in (("TB", 1e12, 2), ("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if n >= size:
            return f"{n / size:.{digits}f} {unit}"
    return f"{int(n)} B"


def format_seconds(seconds: float) -> str:
    """Write a time span for people.

    >>> format_seconds(0.26), format_seconds(75), format_seconds(7500)
    ('0.3 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def in_time(seconds: float) -> str:
    """Write a time span for people.

    >>> in_time(8.4), in_time(75), in_time(7500), in_time(float("nan"))
    ('8 s', '1:15 min', '2:05 h', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


# ---------------------------------------------------------------------------------------------- small HTML

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


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "none" if value is None else str(value)
