"""Answers to questions about features: what a search, a vector or a text leads to, shown in a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.report import cards
from dbksvd_dask.report.feature import Feature, Related, related_html
from dbksvd_dask.report.material import Material
from dbksvd_dask.report.samples import Excerpt
from dbksvd_dask.report.searching import Match, around, marked

Rows = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Matches:
    """Features that match a search, best first.

    Attributes
    ----------
    material : Material
    query : str
    matches : tuple of Match
    """

    material: Material
    query: str
    matches: tuple[Match, ...]

    @property
    def atoms(self) -> list[int]:
        """Numbers of the features, best first."""
        return [m.atom for m in self.matches]

    def __len__(self) -> int:
        """How many were found."""
        return len(self.matches)

    def __iter__(self) -> Iterator[Feature]:
        """Walk over the features."""
        return (Feature(self.material, j) for j in self.atoms)

    def __getitem__(self, i: int) -> Feature:
        """The feature at a place of the list."""
        return Feature(self.material, self.matches[i].atom)

    def __repr__(self) -> str:
        """One line per feature."""
        lines = [f"{m.atom:6d}  {self.material.name(m.atom)}" for m in self.matches]
        return "\n".join([f"{len(self)} features match {self.query!r}", *lines])

    def _repr_html_(self) -> str:
        words = self.query.lower().split()
        rows = [self._row(m, words) for m in self.matches]
        body = cards.table(rows, ("feature", "name", "samples", "match")) or "Nothing matches."
        return cards.box(cards.heading(f"{len(self)} features", f"for “{self.query}”"), body)

    def _row(self, m: Match, words: list[str]) -> tuple[str, ...]:
        excerpts = self.material.excerpts
        shown = "" if excerpts is None or m.place < 0 else around(excerpts[m.place], words)
        # the last column takes what room it can, down to one word per line of this one
        name = f'<div style="min-width:16em">{cards.pieces(marked(self.material.name(m.atom), words))}</div>'
        return str(m.atom), name, str(m.n_texts), cards.pieces(marked(shown, words))


@dataclass(frozen=True)
class Nearest:
    """Features near one, nearest first.

    Attributes
    ----------
    related : tuple of Related
        With `atom`, `value` (the cosine) and `name`.
    """

    related: tuple[Related, ...]

    @property
    def atoms(self) -> list[int]:
        """Numbers of the features, nearest first."""
        return [r.atom for r in self.related]

    def __repr__(self) -> str:
        """One line per feature."""
        return "\n".join(f"{r.atom:6d}  {r.value:6.3f}  {r.name}" for r in self.related)

    def _repr_html_(self) -> str:
        return cards.box(related_html(list(self.related)))


@dataclass(frozen=True, eq=False)
class Active:
    """The features that are active on a sample or on the tokens of a text, the most telling first.

    Dense features have large coefficients on every sample and say little about this one. Features are therefore
    ranked by the size of the coefficient times ``log(1 / density)``; the density is the share of samples that use
    it. The coefficient itself is shown.

    Attributes
    ----------
    material : Material
    atom, coefficient : ndarray of shape (n_tokens, k)
        Codes; -1 where a slot is empty.
    excerpt : Excerpt, or None
        The text.
    picture : uint8 ndarray of shape (height, width, 3), or None
    spans : tuple of (start, end), one per token
        Characters of the text; empty where it is one sample.
    """

    material: Material
    atom: Rows
    coefficient: Rows
    excerpt: Excerpt | None = None
    picture: npt.NDArray[np.uint8] | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def strength(self) -> dict[int, float]:
        """Coefficient of each active feature, of the largest size over the tokens; the most telling first."""
        order = np.argsort(-np.abs(self.coefficient), axis=None, kind="stable")
        pairs = zip(self.atom.ravel()[order].tolist(), self.coefficient.ravel()[order].tolist(), strict=True)
        found: dict[int, float] = {}
        for j, x in pairs:
            if j >= 0 and x != 0:
                found.setdefault(j, x)
        ranked = sorted(found, key=lambda j: -abs(found[j]) * self._rarity(j))
        return {j: found[j] for j in ranked}

    def _rarity(self, atom: int) -> float:
        """Return log(1 / density) of a feature; finite also where no sample, or every sample, uses it."""
        counted = self.material.facts.codes
        return math.log((counted.n_samples + 1) / (float(counted.n_active[atom]) + 0.5))

    @property
    def atoms(self) -> list[int]:
        """Numbers of the features, the most telling first."""
        return list(self.strength)

    def along(self, atom: int) -> Rows:
        """Return the coefficient of one feature on each token, (n_tokens,)."""
        return np.where(self.atom == atom, self.coefficient, 0).sum(axis=1)

    def to_pandas(self) -> Any:
        """Return the active features as a pandas DataFrame, the most telling first."""
        import pandas as pd

        strength = self.strength
        names = [self.material.name(j) for j in strength]
        density = [float(self.material.facts.codes.density[j]) for j in strength]
        columns = {"coefficient": list(strength.values()), "density": density, "name": names}
        return pd.DataFrame(columns, index=pd.Index(list(strength), name="feature"))

    def __repr__(self) -> str:
        """One line per feature: number, coefficient, density, name."""
        density = self.material.facts.codes.density
        return "\n".join(
            f"{j:6d}  {x:8.3g}  {density[j]:7.2%}  {self.material.name(j)}" for j, x in self.strength.items()
        )

    def _repr_html_(self) -> str:
        strength = self.strength
        most = max(map(abs, strength.values()), default=0.0)
        rows = [self._row(j, x, most) for j, x in list(strength.items())[:12]]
        more = f"{len(strength)} features are active, ranked by coefficient times log(1 / density)"
        more += "; the first 12:" if len(strength) > 12 else ":"
        head = ("feature", "coefficient", "density", "name", *(("text",) if self._has_tokens else ()))
        return cards.box(self._shown(), cards.section(more, cards.table(rows, head)))

    @property
    def _has_tokens(self) -> bool:
        return bool(self.spans) and self.excerpt is not None

    def _shown(self) -> str:
        if self.picture is not None:
            return cards.image(self.picture, "sample", 96)
        return "" if self.excerpt is None or self.spans else cards.excerpt_html(self.excerpt)

    def _row(self, atom: int, value: float, most: float) -> tuple[str, ...]:
        density = f"{float(self.material.facts.codes.density[atom]):.2%}"
        cells = (str(atom), cards.bar(value, most), density, escape(self.material.name(atom)))
        if not self.spans or self.excerpt is None:
            return cells
        values = self.along(atom).tolist()
        spans = [(a, b, x) for (a, b), x in zip(self.spans, values, strict=True)]
        return (*cells, cards.tokens_html(self.excerpt.text, spans))


@dataclass(frozen=True)
class Steered:
    """A text continued with and without a feature.

    Attributes
    ----------
    atom : int
    name : str
    strength : float
    prompt, plain, steered : str
    temperature, seed
        How tokens were chosen: the likeliest at temperature 0, else drawn by the seed.
    """

    atom: int
    name: str
    strength: float
    prompt: str
    plain: str
    steered: str
    temperature: float = 0.0
    seed: int = 0

    @property
    def choice(self) -> str:
        """How tokens were chosen, in words."""
        if self.temperature <= 0:
            return "the likeliest token each time"
        return f"temperature {self.temperature:g}, seed {self.seed}"

    def __repr__(self) -> str:
        """Both continuations."""
        named = f"feature {self.atom} x {self.strength:g}"
        return f"({self.choice})\nas it is: {self.prompt}{self.plain}\n{named}: {self.prompt}{self.steered}"

    def _repr_html_(self) -> str:
        named = f"feature {self.atom} times {cards.number(self.strength)}"
        rows = [
            (escape(title), cards.quoted(self.prompt, text, title != "as it is"))
            for title, text in (("as it is", self.plain), (named, self.steered))
        ]
        heading = cards.heading(f"Steered by feature {self.atom}", self.name)
        return cards.box(heading, cards.table(rows), cards.small(self.choice))


@dataclass(frozen=True, eq=False)
class Explorer:
    """The report page in a frame of a notebook.

    Attributes
    ----------
    page : str
        The whole page, HTML.
    height : int
        In pixels.
    """

    page: str
    height: int

    def __repr__(self) -> str:
        """What it is where no HTML is shown."""
        return f"<Explorer: a page of {len(self.page) / 1e6:.1f} MB, shown in a notebook>"

    def _repr_html_(self) -> str:
        border = "border:1px solid rgba(128,128,128,.3);border-radius:6px;box-sizing:border-box;display:block"
        style = f"width:100%;height:{self.height}px;{border}"
        # scripts of the page run in an origin of their own, out of reach of the notebook's
        frame = f'<iframe title="features" sandbox="allow-scripts" style="{style}"'
        return f'{frame} srcdoc="{escape(self.page)}"></iframe>'
