"""Atoms and lists of atoms as small pieces of HTML for a notebook, light or dark.

Colours are those of the text around them, at some strength, so that any theme of a notebook will do. There is no
script and no style sheet: what a notebook keeps of a file that it does not trust looks the same.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.report.samples import Excerpt
from dbksvd_dask.report.sprites import encode_image

BLUE, ORANGE = "#3f7fe8", "#d9731a"
_SOFT = "opacity:.65"
_LINE = "1px solid rgba(128,128,128,.3)"
_CELL = f"text-align:left;vertical-align:top;padding:3px 10px 3px 0;border-top:{_LINE}"
_MARK = "background:rgba(240,170,40,.35);color:inherit;border-radius:3px;padding:0 1px"


@dataclass(frozen=True)
class Shown:
    """A sample as a card shows it: a text with its token, a picture, or only a number."""

    sample: int
    value: float
    excerpt: Excerpt | None = None
    pixels: NDArray[np.uint8] | None = None


def number(x: float) -> str:
    """Write a number with three digits.

    >>> number(-12.345), number(0.5), number(0)
    ('-12.3', '0.5', '0')
    """
    return f"{x:.3g}"


def box(*parts: str) -> str:
    """Put pieces one below the other, in the font of a page."""
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;max-width:60em"
    return f'<div style="{style}">{"".join(parts)}</div>'


def heading(title: str, note: str = "") -> str:
    """Write a heading, and a note beside it."""
    beside = f' <span style="{_SOFT}">{escape(note)}</span>' if note else ""
    return f'<div style="font-size:16px;font-weight:600;margin:2px 0 4px">{escape(title)}{beside}</div>'


def section(title: str, body: str) -> str:
    """Write a part of a card; empty without a body."""
    if not body:
        return ""
    return f'<div style="margin:8px 0 2px;{_SOFT};font-weight:600">{escape(title)}</div>{body}'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Write numbers with their names, side by side."""
    cells = "".join(
        f'<div style="margin-right:22px"><b>{escape(value)}</b> <span style="{_SOFT}">{escape(name)}</span></div>'
        for name, value in pairs
    )
    return f'<div style="display:flex;flex-wrap:wrap">{cells}</div>'


def bar(value: float, most: float) -> str:
    """Draw a bar with its number: blue for positive, orange for negative."""
    share = 0.0 if most <= 0 else min(1.0, abs(value) / most)
    color = ORANGE if value < 0 else BLUE
    inner = f'<div style="width:{100 * share:.0f}%;height:5px;border-radius:3px;background:{color}"></div>'
    track = f'<div style="width:56px;background:rgba(128,128,128,.25);border-radius:3px">{inner}</div>'
    words = f'<span style="min-width:42px;text-align:right">{number(value)}</span>'
    return f'<div style="display:flex;align-items:center;gap:8px">{track}{words}</div>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Lay out rows whose cells are HTML; empty without any row."""
    lines = [
        "".join(f'<td style="{_CELL}{_wide(row, i)}">{cell}</td>' for i, cell in enumerate(row)) for row in rows
    ]
    if not lines:
        return ""
    named = "".join(f'<th style="{_CELL};border-top:0;font-weight:600;{_SOFT}">{escape(n)}</th>' for n in head)
    top = f"<thead><tr>{named}</tr></thead>" if head else ""
    # JupyterLab lays tables out with columns of equal width, whatever is in them
    style = "border-collapse:collapse;width:100%;margin:0;table-layout:auto;font-size:inherit"
    return f'<table style="{style}">{top}<tbody>{"".join(f"<tr>{x}</tr>" for x in lines)}</tbody></table>'


def _wide(row: Sequence[str], i: int) -> str:
    """Give the last column all the room that is left."""
    return ";width:99%" if i == len(row) - 1 else ""


def pieces(parts: Iterable[tuple[str, bool]]) -> str:
    """Write a text whose second-named pieces are marked."""
    return "".join(f'<span style="{_MARK}">{escape(p)}</span>' if on else escape(p) for p, on in parts)


def quoted(prompt: str, added: str, marked: bool) -> str:
    """Write a prompt and its continuation, with their line ends; the continuation may be marked."""
    text = pieces([(added, marked)])
    return f'<span style="white-space:pre-wrap"><span style="{_SOFT}">{escape(prompt)}</span>{text}</span>'


def small(text: str) -> str:
    """Write a remark."""
    return f'<div style="{_SOFT};font-size:11px;margin-top:6px">{escape(text)}</div>'


def excerpt_html(excerpt: Excerpt, size: int = 400) -> str:
    """Write a text with its token marked, cut to `size` characters around the token."""
    text, start, end = excerpt
    first = max(0, min(start - size // 2, len(text) - size))
    last = min(len(text), first + size)
    before = ("…" if first else "") + text[first:start]
    after = text[end:last] + ("…" if last < len(text) else "")
    return pieces([(before, False), (text[start:end], end > start), (after, False)])


def samples_html(entries: Sequence[Shown], most: float) -> str:
    """Write samples with the strength of an atom on each: texts as rows, pictures side by side."""
    if any(e.pixels is not None for e in entries):
        return f'<div style="display:flex;flex-wrap:wrap;gap:10px">{"".join(_picture(e) for e in entries)}</div>'
    return table((bar(e.value, most), f"{_text(e)}") for e in entries)


def _text(entry: Shown) -> str:
    beside = f'<span style="{_SOFT};font-size:11px;white-space:nowrap"> sample {entry.sample}</span>'
    return beside if entry.excerpt is None else excerpt_html(entry.excerpt) + beside


def _picture(entry: Shown) -> str:
    pixels = np.zeros((1, 1, 3), np.uint8) if entry.pixels is None else entry.pixels
    note = f'<div style="{_SOFT};font-size:11px;text-align:center">{number(entry.value)}</div>'
    return f"<div>{image(pixels, f'sample {entry.sample}', 56)}{note}</div>"


def image(pixels: NDArray[np.uint8], label: str, width: int) -> str:
    """Draw a small picture, (height, width, 3), enlarged without smoothing."""
    data = base64.b64encode(encode_image(pixels, "PNG")).decode()
    style = f"width:{width}px;image-rendering:pixelated;border-radius:3px"
    return f'<img alt="{escape(label)}" src="data:image/png;base64,{data}" style="{style}">'


def histogram_html(counts: NDArray[np.int64], low: float, high: float) -> str:
    """Draw a histogram of coefficients: orange below zero, blue above."""
    most = max(int(counts.max(initial=0)), 1)
    step = (high - low) / len(counts)
    bars = "".join(
        f'<div title="{number(low + i * step)} to {number(low + (i + 1) * step)}: {n:,}" style="flex:1;'
        f"height:{max(2 if n else 0, round(56 * n / most))}px;"
        f'background:{ORANGE if low + (i + 0.5) * step < 0 else BLUE}"></div>'
        for i, n in enumerate(counts.tolist())
    )
    ends = f"<span>{number(low)}</span><span>{number(high)}</span>"
    return (
        f'<div style="display:flex;align-items:flex-end;gap:1px;width:300px;height:58px">{bars}</div>'
        f'<div style="display:flex;justify-content:space-between;width:300px;border-top:{_LINE};{_SOFT};'
        f'font-size:11px">{ends}</div>'
    )


def tokens_html(text: str, spans: Sequence[tuple[int, int, float]]) -> str:
    """Write a text whose tokens are coloured by strength.

    Parameters
    ----------
    text : str
    spans : sequence of (start, end, value)
        In the order of the text.
    """
    most = max((abs(value) for *_, value in spans), default=0.0) or 1.0
    parts, at = [], 0
    for start, end, value in spans:
        if start < at:
            continue
        color = f"rgba({'217,115,26' if value < 0 else '63,127,232'},{0.6 * abs(value) / most:.2f})"
        style = f"background:{color};border-radius:3px"
        parts.append(escape(text[at:start]))
        parts.append(f'<span title="{number(value)}" style="{style}">{escape(text[start:end])}</span>')
        at = end
    return "".join(parts) + escape(text[at:])
