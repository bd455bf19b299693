"""One atom as an object that shows itself in a notebook."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.plots import atom_tiles
from dbksvd_dask.report import cards
from dbksvd_dask.report.cards import Shown
from dbksvd_dask.report.facts import N_QUARTERS, histogram_range
from dbksvd_dask.report.material import Material

QUARTERS = ("strongest quarter", "second quarter", "third quarter", "weakest quarter")


@dataclass(frozen=True)
class Related:
    """Another atom, and how it is related: a cosine, or a share of common samples."""

    atom: int
    value: float
    name: str = ""


@dataclass(frozen=True, eq=False)
class Feature:
    """An atom: its samples, neighbours and numbers; shows itself in a notebook.

    Made by ``features[17]``, see `dbksvd_dask.open_features`.

    Parameters
    ----------
    material : Material
    atom : int
    """

    material: Material
    atom: int

    # -- names ---------------------------------------------------------------

    @property
    def name(self) -> str:
        """The explanation that was given, or else the keywords."""
        return self.material.name(self.atom)

    @property
    def keywords(self) -> str:
        """Words that set its strongest samples apart."""
        return self.material.keywords[self.atom]

    @property
    def explanation(self) -> str:
        """The explanation that was given; empty without one."""
        return self.material.explanation(self.atom)

    @property
    def score(self) -> float:
        """How well the explanation fits; nan where it was not scored."""
        given = self.material.explanations.get(self.atom)
        return math.nan if given is None else given.score

    # -- numbers -------------------------------------------------------------

    @property
    def n_active(self) -> int:
        """Samples on which it is active."""
        return int(self.material.facts.codes.n_active[self.atom])

    @property
    def density(self) -> float:
        """Share of samples on which it is active."""
        return self.n_active / self.material.facts.codes.n_samples

    @property
    def mean(self) -> float:
        """Mean of its nonzero coefficients; nan for one that is never active."""
        return float(self.material.facts.codes.mean_active[self.atom])

    @property
    def largest(self) -> float:
        """Largest absolute coefficient."""
        return float(self.material.facts.codes.largest[self.atom])

    @property
    def positive(self) -> float:
        """Share of its coefficients that are positive; nan for one that is never active."""
        m = self.material.facts.codes
        return float(m.n_positive[self.atom] / m.n_active[self.atom]) if self.n_active else math.nan

    @property
    def coherence(self) -> float:
        """Largest absolute cosine to another atom."""
        return float(self.material.facts.coherence.absolute[self.atom])

    @property
    def histogram(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Counts of its nonzero coefficients, and the edges of the bins, as `numpy.histogram` gives them."""
        low, high = (ends[self.atom] for ends in histogram_range(self.material.facts.codes))
        counts = self.material.facts.histogram[self.atom]
        return counts, np.linspace(low, high, len(counts) + 1)

    @property
    def direction(self) -> NDArray[np.float32]:
        """The atom itself, shape (n_features,)."""
        return np.array(self.material.inputs.dictionary.atoms[self.atom])

    # -- what it is related to -----------------------------------------------

    @property
    def nearest(self) -> list[Related]:
        """Atoms of the largest absolute cosine, largest first."""
        facts = self.material.facts
        return self._related(facts.neighbour[self.atom], facts.similarity[self.atom])

    @property
    def partners(self) -> list[Related]:
        """Atoms that are active on the same samples, by Jaccard index, largest first."""
        pairs = self.material.facts.coactivation
        return self._related(pairs.atom[self.atom], pairs.jaccard[self.atom])

    @property
    def logits(self) -> dict[str, list[tuple[str, float]]] | None:
        """Tokens that it makes likelier (`positive`) and less likely (`negative`); None without logits."""
        return None if self.material.logits is None else self.material.logits[self.atom]

    def _related(self, atoms: NDArray[np.int64], values: NDArray[np.floating]) -> list[Related]:
        pairs = zip(atoms.tolist(), values.tolist(), strict=True)
        return [Related(j, float(x), self.material.name(j)) for j, x in pairs if j >= 0]

    # -- samples -------------------------------------------------------------

    @property
    def strongest(self) -> list[Shown]:
        """Samples of the largest coefficients of its own sign."""
        return self._samples("strongest")

    @property
    def opposite(self) -> list[Shown]:
        """Samples of the largest coefficients of the other sign."""
        return self._samples("opposite")

    @property
    def quarters(self) -> list[list[Shown]]:
        """Samples drawn at random from each quarter of its activations, the strongest quarter first."""
        places = self.material.shown.lists["typical"][self.atom]
        size = len(places) // N_QUARTERS
        return [self._samples("typical", slice(q * size, (q + 1) * size)) for q in range(N_QUARTERS)]

    def _samples(self, name: str, part: slice = slice(None)) -> list[Shown]:
        shown = self.material.shown
        places, values = shown.lists[name][self.atom][part], shown.activation[name][self.atom][part]
        kept = places >= 0
        return show_samples(self.material, places[kept], values[kept])

    # -- shown ---------------------------------------------------------------

    def __repr__(self) -> str:
        """One line: number, name and density."""
        named = f" {self.name!r}" if self.name else ""
        return f"<Feature {self.atom}{named}, active on {self.density:.2%} of {self.n_samples:,} samples>"

    @property
    def n_samples(self) -> int:
        """Samples on which it was measured."""
        return self.material.facts.codes.n_samples

    def _repr_html_(self) -> str:
        title = cards.heading(f"Feature {self.atom}", self.name)
        if not self.n_active:
            return cards.box(title, f"Never active on {self.n_samples:,} samples.")
        counts, edges = self.histogram
        return cards.box(
            title,
            self._tile(),
            self._numbers(),
            cards.section("Strongest samples", cards.samples_html(self.strongest, self.largest)),
            *self._quarters_html(),
            cards.section("Strongest of the other sign", cards.samples_html(self.opposite, self.largest)),
            cards.section("Coefficients", cards.histogram_html(counts, edges[0], edges[-1])),
            self._logits_html(),
            cards.section("Nearest (cosine)", related_html(self.nearest[:5])),
            cards.section("Active together (Jaccard index)", related_html(self.partners[:5])),
        )

    def _tile(self) -> str:
        shape = getattr(self.material.inputs.samples, "shape", None)
        if shape is None or math.prod(shape) != self.direction.size:
            return ""
        return cards.image(atom_tiles(self.direction[None], shape)[0], f"atom {self.atom}", 96)

    def _numbers(self) -> str:
        scored = [] if math.isnan(self.score) else [("score of the explanation", cards.number(self.score))]
        return cards.facts(
            [
                ("of samples", f"{self.density:.2%}"),
                ("mean coefficient", cards.number(self.mean)),
                ("largest", cards.number(self.largest)),
                ("positive", f"{self.positive:.0%}"),
                ("coherence", cards.number(self.coherence)),
                *scored,
            ]
        )

    def _quarters_html(self) -> list[str]:
        edges = self.material.shown.quarter[self.atom]
        out = []
        for q, entries in enumerate(self.quarters):
            low, high = edges[N_QUARTERS - 1 - q], edges[N_QUARTERS - q]
            title = f"Drawn at random, {QUARTERS[q]}: {cards.number(low)} to {cards.number(high)}"
            out.append(cards.section(title, cards.samples_html(entries, self.largest)))
        return out

    def _logits_html(self) -> str:
        if self.logits is None:
            return ""
        titles = (("positive", "Makes likelier"), ("negative", "Makes less likely"))
        listed = [(title, " ".join(repr(token) for token, _ in self.logits[side])) for side, title in titles]
        return "".join(cards.section(title, cards.pieces([(words, False)])) for title, words in listed)


def related_html(atoms: list[Related]) -> str:
    """Write other atoms with a bar each."""
    return cards.table((str(r.atom), cards.bar(r.value, 1.0), cards.pieces([(r.name, False)])) for r in atoms)


def show_samples(material: Material, places: NDArray[np.int64], values: NDArray[np.floating]) -> list[Shown]:
    """Return samples as cards show them.

    Parameters
    ----------
    material : Material
    places : int64 ndarray of shape (n,)
        In `material.shown`.
    values : ndarray of shape (n,)
        Strength of the atom on each.
    """
    ids = material.shown.sample[places]
    texts = material.excerpts
    pictures = pictures_of(material, ids)
    return [
        Shown(int(i), float(x), None if texts is None else texts[p], None if pictures is None else pictures[n])
        for n, (i, p, x) in enumerate(zip(ids, places, values, strict=True))
    ]


def pictures_of(material: Material, ids: NDArray[np.int64]) -> NDArray[np.uint8] | None:
    """Return the pictures of samples in any order, (n, height, width, 3); None where samples are not pictures."""
    draw = getattr(material.inputs.samples, "pixels", None)
    if draw is None or not len(ids):
        return None
    unique, place = np.unique(ids, return_inverse=True)
    pixels: NDArray[np.uint8] = draw(unique)[place]
    return pixels
