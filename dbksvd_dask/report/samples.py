"""What the samples behind the codes were: texts, tokens of texts, or images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray

from dbksvd_dask.base.safe_text import redacted_values
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.texts import read_lines
from dbksvd_dask.report.pack import Payload, narrow
from dbksvd_dask.store import paths
from dbksvd_dask.store.reader import RowReader, open_aligned

# A text longer than this many characters is cut there, or around its token: a page is not an archive.
MAX_CHARACTERS = 600
# Aligned arrays that may hold the class of a sample.
LABELS = ("category", "label")
# More classes than this are not classes if they have no names.
MAX_NAMES = 100_000
# With more samples than this, near-duplicates are not searched for.
MAX_GROUPED = 50_000_000
Ids = NDArray[np.int64]


class Excerpt(NamedTuple):
    """A text short enough to show, and the characters of it that are the sample: none of a whole text."""

    text: str
    start: int = 0
    end: int = 0

    @property
    def token(self) -> str:
        """The marked characters."""
        return self.text[self.start : self.end]


class Samples:
    """The samples behind some codes; here only their number is known.

    Attributes
    ----------
    kind : {"none", "text", "token", "image"}
    n_samples : int
    provenance : what is known of their origin
    store : activation store they came from, or None
    """

    kind = "none"
    one_per = ""  # what a group is called where only the strongest sample of each is shown

    def __init__(self, n_samples: int, store: str | None = None) -> None:
        self.n_samples, self.store = n_samples, store
        self.provenance: dict[str, Any] = {} if store is None else provenance(store)

    def labels(self) -> tuple[NDArray[np.int64], list[str]] | None:
        """Return the class of every sample, shape (n_samples,), and the names of the classes; None without any."""
        name = None if self.store is None else next((n for n in LABELS if has_array(self.store, n)), None)
        if self.store is None or name is None:
            return None
        reader = open_aligned(self.store, name)
        values = reader.read(0, self.n_samples).ravel().astype(np.int64)
        highest = int(values.max(initial=0))
        stated = reader.attributes.get("names")
        known = stated if isinstance(stated, list) else range(min(highest, MAX_NAMES) + 1)
        names = [str(name) for name in known]
        return (values, names) if values.min(initial=0) >= 0 and highest < len(names) else None

    def groups(self) -> NDArray[np.int64] | None:
        """Return the group of every sample, shape (n_samples,), or None; lists show the strongest of each."""
        return None

    def also(self) -> Ids | None:
        """Return the samples that the page needs besides those of the lists."""
        return None

    def payload(self, ids: Ids) -> Payload:
        """Build what the page shows of these samples."""
        return Payload({"kind": self.kind})

    def words(self, ids: Ids) -> list[str] | None:
        """Return the text from which an atom's name is made, for each of these samples; None if there is none."""
        return None

    def excerpts(self, ids: Ids) -> list[Excerpt] | None:
        """Return the text to show for each of these samples, increasing; None if there is none."""
        return None


# -- texts -----------------------------------------------------------------------------------------------


class TextSamples(Samples):
    """One text per sample.

    Parameters
    ----------
    texts : sequence of str, or path of a file with one text per line
    n_samples : int
    """

    kind = "text"

    def __init__(self, texts: Sequence[str] | str, n_samples: int) -> None:
        super().__init__(n_samples)
        self._texts = texts
        n_texts = len(texts) if not isinstance(texts, str) else sum(1 for _ in read_lines(texts))
        if n_texts != n_samples:
            where = f"{texts} has" if isinstance(texts, str) else "received"
            raise InputError(
                f"{where} {n_texts} texts for {n_samples} samples; give one text per sample, in their order, or "
                "for tokens the activation store that says which text each token came from"
            )

    def payload(self, ids: Ids) -> Payload:
        """Pack the texts, cut where they are long."""
        return Payload({"kind": self.kind, "texts": [excerpt.text for excerpt in self.excerpts(ids)]})

    def words(self, ids: Ids) -> list[str]:
        """Return the texts."""
        return pick_texts(self._texts, ids)

    def excerpts(self, ids: Ids) -> list[Excerpt]:
        """Return the texts, cut where they are long."""
        return [Excerpt(_cut(text)) for text in self.words(ids)]


class StoreTexts(TextSamples):
    """Texts of an activation store that says for each sample which one is its own.

    Parameters
    ----------
    store : activation store with the aligned array `text`
    texts : path of the file with one text per line
    n_samples : int
    """

    def __init__(self, store: str, texts: str, n_samples: int) -> None:
        Samples.__init__(self, n_samples, store)
        self._texts = texts
        self._column = open_aligned(store, "text")
        require_rows(self._column, n_samples)

    def words(self, ids: Ids) -> list[str]:
        """Return the text of each sample, wherever a shuffle has moved it."""
        number, place = np.unique(read_rows(self._column, ids).ravel().astype(np.int64), return_inverse=True)
        texts = pick_texts(self._texts, number)
        return [texts[i] for i in place.tolist()]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Where some tokens stand: each array of shape (n,)."""

    text: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlacedTokens:
    """Tokens in pieces of text short enough for a page.

    Attributes
    ----------
    texts : list of str
    text, start, end, shift, units, source : int64 ndarray of shape (n,)
        Piece of each token, the characters it covers there, how many were cut off before the piece (also in UTF-16
        units), and the number of the whole text.
    """

    texts: list[str]
    text: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    shift: NDArray[np.int64]
    units: NDArray[np.int64]
    source: NDArray[np.int64]


class TokenSamples(Samples):
    """Tokens of texts: the store says for each sample its text and the characters it covers.

    Parameters
    ----------
    store : activation store with aligned arrays `text`, `start` and `end`
    texts : path of the file with one text per line, or the texts
    n_samples : int
    """

    kind = "token"
    one_per = "text"

    def __init__(self, store: str, texts: Sequence[str] | str, n_samples: int) -> None:
        super().__init__(n_samples, store)
        self.texts = texts
        self._columns = {name: open_aligned(store, name) for name in ("text", "start", "end")}
        require_rows(self._columns["text"], n_samples)

    def groups(self) -> NDArray[np.int64] | None:
        """Return the text of each token."""
        if self.n_samples > MAX_GROUPED:
            return None
        return self._columns["text"].read(0, self.n_samples).ravel().astype(np.int64)

    def tokens(self, ids: Ids) -> Tokens:
        """Return the text and characters of some samples, increasing."""
        found = {name: read_rows(r, ids).ravel().astype(np.int64) for name, r in self._columns.items()}
        wrong = np.flatnonzero((found["text"] < 0) | (found["start"] < 0) | (found["end"] < found["start"]))
        if wrong.size:
            i = int(wrong[0])
            raise StoreError(
                f"sample {int(ids[i])} of {self.store} is characters {found['start'][i]} to {found['end'][i]} of "
                f"text {found['text'][i]}, which cannot be; restore the store or write it again"
            )
        return Tokens(**found)

    def _whole_texts(self, ids: Ids, tokens: Tokens) -> dict[int, str]:
        """Read the texts of some tokens, by number; refuse a text that ends before its token does."""
        numbers = np.unique(tokens.text)
        whole = dict(zip(numbers.tolist(), pick_texts(self.texts, numbers), strict=True))
        for i, (text, end) in enumerate(zip(tokens.text.tolist(), tokens.end.tolist(), strict=True)):
            if end > len(whole[text]):
                raise InputError(
                    f"sample {int(ids[i])} of {self.store} ends at character {end} of text {text}, which has "
                    f"{len(whole[text])}; give the texts that were written with the store"
                )
        return whole

    def place(self, ids: Ids) -> PlacedTokens:
        """Return pieces of text that contain some samples, and the place of each sample in its piece."""
        tokens = self.tokens(ids)
        whole = self._whole_texts(ids, tokens)
        texts = [text for text in whole.values() if len(text) <= MAX_CHARACTERS]
        short = {t: i for i, t in enumerate(t for t, text in whole.items() if len(text) <= MAX_CHARACTERS)}
        text, shift, units = (np.zeros(len(ids), np.int64) for _ in range(3))
        spans = zip(tokens.text.tolist(), tokens.start.tolist(), tokens.end.tolist(), strict=True)
        for i, (t, a, b) in enumerate(spans):
            if t in short:
                text[i] = short[t]
            else:
                piece, shift[i] = _window(whole[t], a, b)
                units[i] = utf16(whole[t], int(shift[i]))
                text[i] = len(texts)
                texts.append(piece)
        return PlacedTokens(texts, text, tokens.start - shift, tokens.end - shift, shift, units, tokens.text)

    def payload(self, ids: Ids) -> Payload:
        """Pack each text once, and for each sample its text and the place of its token in UTF-16 units."""
        placed = self.place(ids)
        ends = {
            name: np.array([utf16(placed.texts[t], c) for t, c in zip(placed.text, where, strict=True)], np.int64)
            for name, where in (("sample_start", placed.start), ("sample_end", placed.end))
        }
        arrays = {"sample_text": placed.text, "sample_source": placed.source, "sample_shift": placed.units, **ends}
        return Payload({"kind": self.kind, "texts": placed.texts}, {n: narrow(a) for n, a in arrays.items()})

    def words(self, ids: Ids) -> list[str]:
        """Return the whole word around each token."""
        tokens = self.tokens(ids)
        whole = self._whole_texts(ids, tokens)
        spans = zip(tokens.text.tolist(), tokens.start.tolist(), tokens.end.tolist(), strict=True)
        return [_word(whole[t], a, b) for t, a, b in spans]

    def excerpts(self, ids: Ids) -> list[Excerpt]:
        """Return pieces of text that contain the samples, with the characters of each token."""
        placed = self.place(ids)
        spans = zip(placed.text.tolist(), placed.start.tolist(), placed.end.tolist(), strict=True)
        return [Excerpt(placed.texts[t], a, b) for t, a, b in spans]


def utf16(text: str, place: int) -> int:
    r"""Return the place of a character as JavaScript counts: characters beyond the basic plane take two units.

    >>> utf16("a\U0001f600b", 2)
    3
    """
    return place if text.isascii() else len(text[:place].encode("utf-16-le", "surrogatepass")) // 2


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


def _window(text: str, start: int, end: int) -> tuple[str, int]:
    """Return a piece of a long text around characters start to end, and the place where the piece begins."""
    room = (MAX_CHARACTERS - (end - start)) // 2
    first, last = max(0, start - room), min(len(text), end + room)
    piece = text[first:last]
    if first > 0:
        piece = "…" + piece[1:]
    if last < len(text):
        piece = piece[:-1] + "…"
    return piece, first


def _word(text: str, start: int, end: int) -> str:
    while start > 0 and text[start - 1].isalnum() and text[start : start + 1].isalnum():
        start -= 1
    while end < len(text) and text[end].isalnum() and text[end - 1 : end].isalnum():
        end += 1
    return text[start:end].strip().lower()


def pick_texts(texts: Sequence[str] | str, ids: Ids) -> list[str]:
    """Return some of the texts, by increasing number; a file is read once and only these lines are kept."""
    if not isinstance(texts, str):
        return [str(texts[int(i)]) for i in ids]
    wanted = iter(ids.tolist())
    out: list[str] = []
    following = next(wanted, None)
    for number, line in enumerate(read_lines(texts)):
        while following == number:
            out.append(line)
            following = next(wanted, None)
        if following is None:
            return out
    raise InputError(f"{texts} ends before text {following}; give the file that was written with the store")


# -- stores ----------------------------------------------------------------------------------------------


def provenance(store: str) -> dict[str, Any]:
    """Return what the store says about its origin; of a shuffled store also what its source said."""
    known: dict[str, Any] = {}
    for stated in _origins(store):
        known = {**stated, **known}
    known.pop("source_provenance", None)
    return {str(k): redacted_values(v) for k, v in known.items()}


def _origins(store: str) -> Iterator[dict[str, Any]]:
    """Yield what a store says about its origin, then what the store that it was made from said, and so on."""
    attributes = dict(paths.open_zarr(store).attrs)
    held = attributes.get("provenance", attributes)
    while isinstance(held, dict):
        yield held
        held = held.get("source_provenance")


def texts_beside(store: str) -> str | None:
    """Return the file of the texts that were written with a store, or with the one that it was made from."""
    stated = list(_origins(store))
    names = [Path(str(held["texts"])).name for held in stated if held.get("texts")]
    names.append(Path(store).name.removesuffix(".zarr") + ".txt")
    # beside the store, wherever the store says it is, else beside its source
    sources = [Path(str(held["source"])) for held in stated if held.get("command") == "shuffle"]
    folders = [Path(store).parent, *(path.parent for path in sources)]
    return next((str(folder / n) for folder in folders for n in names if (folder / n).is_file()), None)


def require_rows(reader: RowReader, n_samples: int) -> None:
    """Refuse a store that cannot be the one that was encoded."""
    if reader.n_samples != n_samples:
        raise InputError(
            f"{reader.path} has {reader.n_samples} samples but the codes {n_samples}; give the store that was "
            "encoded"
        )


def read_rows(reader: RowReader, ids: Ids) -> NDArray[Any]:
    """Read some rows, by increasing number, chunk by chunk: (n, n_features)."""
    chunk = ids // reader.chunk_rows
    parts = [np.empty((0, reader.n_features), reader.dtype)]
    for number in np.unique(chunk).tolist():
        rows = ids[chunk == number]
        first = int(rows[0])
        parts.append(reader.read(first, int(rows[-1]) + 1)[rows - first])
    return np.concatenate(parts)


def has_array(store: str, name: str) -> bool:
    """Return whether a store holds an array of this name."""
    node = paths.open_zarr(store)
    return isinstance(node, zarr.Group) and paths.get_array(store, node, name) is not None
