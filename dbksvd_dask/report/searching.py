"""Searching atoms by words, best first: the order of the page (assets/table.js), for a notebook."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from dbksvd_dask.report.material import Material
from dbksvd_dask.report.samples import Excerpt

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Match:
    """An atom that matches a search.

    Attributes
    ----------
    atom : int
    whole : bool
        Every word of the query is a whole word of its name.
    n_tokens, n_texts : int
        Of its strongest samples: tokens, and texts, that have every word.
    place : int
        Place in `Material.shown` of the strongest sample that matches; -1 where only the name does.
    """

    atom: int
    whole: bool
    n_tokens: int
    n_texts: int
    place: int = -1


def search_atoms(material: Material, query: str) -> list[Match]:
    """Find atoms by words: whole words of the name first, then by how many strongest samples match.

    Parameters
    ----------
    material : Material
    query : str
        Words, all of which must occur in the name of an atom or in the text of one of its strongest samples.
    """
    words = query.lower().split()
    if not words:
        return []
    found = [m for atom in range(material.n_atoms) if (m := _match(material, atom, words)) is not None]
    return sorted(found, key=lambda m: (not m.whole, -m.n_tokens, -m.n_texts, m.atom))


def _match(material: Material, atom: int, words: list[str]) -> Match | None:
    name = f"{material.explanation(atom)} {material.keywords[atom]}".lower()
    whole = set(words) <= set(_WORD.findall(name))
    places = [p for p in material.shown.lists["strongest"][atom].tolist() if p >= 0]
    excerpts = [] if material.excerpts is None else [material.excerpts[p] for p in places]
    tokens = [_has(e.token, words) for e in excerpts]
    texts = [_has(e.text, words) for e in excerpts]
    if not whole and not _has(name, words) and not any(texts):
        return None
    best = next((i for held in (tokens, texts) for i, has in enumerate(held) if has), -1)
    return Match(atom, whole, sum(tokens), sum(texts), places[best] if best >= 0 else -1)


def _has(text: str, words: list[str]) -> bool:
    low = text.lower()
    return all(word in low for word in words)


def marked(text: str, words: list[str]) -> list[tuple[str, bool]]:
    """Cut a text into pieces that are words of a query and pieces that are not.

    >>> marked("Small birds sing", ["bird"])
    [('Small ', False), ('bird', True), ('s sing', False)]
    """
    if not words:
        return [(text, False)]
    found = re.finditer("|".join(map(re.escape, words)), text, re.IGNORECASE)
    edges = [0, *(edge for match in found for edge in match.span()), len(text)]
    pieces = [(text[a:b], i % 2 == 1) for i, (a, b) in enumerate(pairwise(edges))]
    return [piece for piece in pieces if piece[0]]


def around(excerpt: Excerpt, words: list[str], size: int = 120) -> str:
    """Return a piece of a text, around its token or else around the first word of the query that it has."""
    if excerpt.end > excerpt.start:
        at = excerpt.start
    else:
        at = max(0, min((i for w in words if (i := excerpt.text.lower().find(w)) >= 0), default=0))
    first = max(0, min(at - size // 3, len(excerpt.text) - size))
    piece = excerpt.text[first : first + size]
    return ("…" if first else "") + piece + ("…" if first + size < len(excerpt.text) else "")
