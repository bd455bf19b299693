"""Bytes, times, numbers and small HTML: one spelling for people and for JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.ASCII)


def read_bytes(value: int | float | str) -> int | None:
    """Read a number of bytes; None if it is not one, or not positive.

    Not `dask.utils.parse_bytes`: that reads "GB" as 1 GB and "" as one byte.

    >>> read_bytes("4GB"), read_bytes("0.5 GiB"), read_bytes(123), read_bytes(4e9), read_bytes("GB")
    (4000000000, 536870912, 123, 4000000000, None)
    """
    match = _SIZE.fullmatch(str(value).lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except (ValueError, OverflowError):
        return None
    return size if size > 0 else None


def parse_bytes(value: int | float | str, name: str = "memory_limit") -> int:
    """Read a number of bytes such as 4e9, "4GB", "0.5 GiB".

    Parameters
    ----------
    value : int, float or str
    name : str
        Parameter that an error names.

    >>> parse_bytes("4GB"), parse_bytes("0.5 GiB")
    (4000000000, 536870912)
    """
    size = read_bytes(value)
    if size is None:
        raise InputError(f"{name}={value!r} is not a number of bytes; use for example '4GB' or 4_000_000_000")
    return size


def format_bytes(n: float) -> str:
    """Write a number of bytes for people, in the decimal units in which limits are given and disks are sold.

    Not `dask.utils.format_bytes`, which writes binary units ("128.00 MiB").

    >>> format_bytes(512), format_bytes(134217728), format_bytes(4.2e12)
    ('512 B', '134.2 MB', '4.20 TB')
    """
    for unit, size, digits in (("TB", 1e12, 2), ("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if n >= size:
            return f"{n / size:.{digits}f} {unit}"
    return f"{int(n)} B"


# From here on days say more than hours.
LONG_HOURS = 48


def format_seconds(seconds: float) -> str:
    """Write a time span for people; "-" if it is unknown.

    >>> format_seconds(0.26), format_seconds(42.3), format_seconds(75), format_seconds(7500)
    ('0.3 s', '42 s', '1 min 15 s', '2 h 5 min')
    >>> format_seconds(9.96), format_seconds(59.7), format_seconds(float("nan"))
    ('10 s', '1 min 0 s', '-')
    >>> format_seconds(5.922e6), format_seconds(4e8)
    ('68 days 13 h', '4629 days')
    """
    if not math.isfinite(seconds):
        return "-"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= LONG_HOURS:
        return f"{hours // 24} days" + (f" {hours % 24} h" if hours < LONG_HOURS * 48 else "")
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# Most names that a message lists.
LISTED = 8


def listed(names: Iterable[Any], none: str = "none") -> str:
    """Write names for a message: the first eight, and how many more there are.

    >>> listed(["a", "b"]), listed(range(2000)), listed([])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 1992 more', 'none')
    """
    texts = [str(name) for name in names]
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return ", ".join(texts[:LISTED]) + more or none


def plain(value: Any) -> Any:
    """Turn a value into plain JSON: arrays and NumPy numbers become Python's, NaN and infinity become None.

    >>> plain({"error": float("nan"), "counts": np.array([1, 2]), "mean": np.float32(0.5)})
    {'error': None, 'counts': [1, 2], 'mean': 0.5}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


# ---------------------------------------------------------------------------------------------- small HTML

_STYLE = "text-align:left;padding:1px 14px 1px 0"
_CURVES = (
    ("validation_variance_explained", "variance explained, held-out"),
    ("variance_explained", "variance explained, {batch}"),
    ("relative_error", "relative error, {batch}"),
)


def facts_html(title: str, facts: Mapping[str, Any], more: str = "") -> str:
    """Lay out a heading and a table of names and values.

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


def history_html(history: Mapping[str, Any], batch: str = "batch") -> str:
    """Draw small curves of a fit with their last values; empty without a history.

    Parameters
    ----------
    history : mapping of name to values per iteration
    batch : what figures of batches are called
    """
    parts = []
    for name, label in _CURVES:
        values = np.asarray(history.get(name, ()), float)
        if values.size and np.isfinite(values[-1]):
            parts.append(f"{sparkline(values)} {escape(label.format(batch=batch))} <b>{values[-1]:.4f}</b>")
    return f"<div>{'<br>'.join(parts)}</div>" if parts else ""


def sparkline(values: Sequence[float] | np.ndarray, width: int = 90, height: int = 18, label: str = "") -> str:
    """Draw a curve without axes as SVG, in the colour of the text around it; skip values that are not finite.

    Parameters
    ----------
    values : array_like of shape (n,)
        At least one of them finite.
    width, height : int
        Size in pixels.
    label : str
        Description for screen readers.
    """
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    low, span = finite.min(), max(float(np.ptp(finite)), 1e-12)
    x = np.linspace(1, width - 1, finite.size)
    y = height - 2 - (finite - low) / span * (height - 4)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    line = f"<polyline points='{points}' fill='none' stroke='currentColor' stroke-width='1.5'/>"
    named = f" aria-label='{escape(label)}'" if label else ""
    return f"<svg width='{width}' height='{height}' style='vertical-align:middle' role='img'{named}>{line}</svg>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "none" if value is None else str(value)
