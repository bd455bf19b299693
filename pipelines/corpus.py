"""Texts with categories: the glosses of WordNet, or any text file."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import InputError, StoreError

WORDNET = "/usr/share/wordnet"
WORDNET_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
# The lexicographer files by number, from lexnames(5WN); a synset line carries only the number.
WORDNET_CATEGORIES = (
    "adj.all adj.pert adv.all noun.Tops noun.act noun.animal noun.artifact noun.attribute noun.body "
    "noun.cognition noun.communication noun.event noun.feeling noun.food noun.group noun.location "
    "noun.motive noun.object noun.person noun.phenomenon noun.plant noun.possession noun.process "
    "noun.quantity noun.relation noun.shape noun.state noun.substance noun.time verb.body verb.change "
    "verb.cognition verb.communication verb.competition verb.consumption verb.contact verb.creation "
    "verb.emotion verb.motion verb.perception verb.possession verb.social verb.stative verb.weather "
    "adj.ppl"
).split()


@dataclass(frozen=True)
class Corpus:
    """Texts with an optional category each.

    Attributes
    ----------
    texts : list of str
        One line each.
    category : ndarray of shape (n_texts,), int16, or None
        Number of the category of each text.
    names : list of str
        Name of each category.
    source : str
        Where the texts came from.
    """

    texts: list[str]
    category: npt.NDArray[np.int16] | None = None
    names: list[str] = field(default_factory=list)
    source: str = "texts"

    def take(self, order: npt.NDArray[np.integer]) -> "Corpus":
        """Return the texts of these numbers, in this order."""
        category = None if self.category is None else self.category[order]
        return Corpus([self.texts[i] for i in order], category, self.names, self.source)


def parse_wordnet(lines: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the gloss and the lexicographer file number of every synset line of a WordNet data file.

    Examples
    --------
    >>> parse_wordnet(["  1 licence text", "00001740 03 n 01 entity 0 000 | that which is perceived  "])
    (['that which is perceived'], [3])
    """
    texts, categories = [], []
    for line in lines:
        if line.startswith(" ") or not line.strip():  # the licence at the top is indented
            continue
        head, bar, gloss = line.partition("|")
        if not bar:
            raise InputError(f"not a WordNet data line, it has no gloss: {line[:60]!r}")
        texts.append(" ".join(gloss.split()))
        categories.append(int(head.split()[1]))
    return texts, categories


def read_wordnet(folder: str | Path) -> Corpus:
    """Read every gloss of a WordNet folder: 117,659 in WordNet 3.0."""
    texts: list[str] = []
    categories: list[int] = []
    for name in WORDNET_FILES:
        path = Path(folder) / name
        if not path.exists():
            raise StoreError(f"no file at {path}; install WordNet (apt-get install wordnet-base) or use --texts")
        with path.open(encoding="utf-8") as lines:
            more_texts, more_categories = parse_wordnet(lines)
        texts += more_texts
        categories += more_categories
    return Corpus(texts, np.array(categories, np.int16), list(WORDNET_CATEGORIES), "WordNet glosses")


def _lines(path: str | Path) -> list[str]:
    """Lines of a file. Only a line feed ends one: a text may hold any other character, U+2028 too."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_texts(path: str | Path, labels: str | Path | None = None) -> Corpus:
    """Read texts, one per line, and labels, one per line, named in sorted order."""
    texts = _lines(path)
    if labels is None:
        return Corpus(texts, source=Path(path).name)
    given = [line.strip() for line in _lines(labels)]
    if len(given) != len(texts):
        raise InputError(f"{labels} has {len(given)} lines, {path} has {len(texts)}; one label per text is needed")
    names, category = np.unique(given, return_inverse=True)
    if len(names) > np.iinfo(np.int16).max:
        raise InputError(
            f"{labels} has {len(names)} different labels; at most {np.iinfo(np.int16).max} can be kept"
        )
    return Corpus(texts, category.astype(np.int16), [str(n) for n in names], Path(path).name)


def choose_texts(corpus: Corpus, seed: int | None, limit: int | None) -> Corpus:
    """Mix the texts by a seed (None: keep their order) and keep the first `limit`."""
    n_texts = len(corpus.texts)
    order = np.arange(n_texts) if seed is None else np.random.default_rng(seed).permutation(n_texts)
    chosen = order[: n_texts if limit is None else limit]
    if not len(chosen):
        raise InputError(f"no texts left of {n_texts} with --limit {limit}; at least one is needed")
    return corpus.take(chosen)
