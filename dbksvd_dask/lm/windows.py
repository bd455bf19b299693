"""Tokens in windows, windows in blocks and batches: integers only, so a plan is the same on every run.

A window is what the model sees at once: a beginning token, then at most `context` - 1 tokens of one text. Blocks
are runs of windows in their order. Within a block windows are sorted by length and share batches of like length;
the rows of a block come back in the order of its windows. A resumed run begins at
a block, so its batches, and with them the bits of the activations, are those of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import InputError

Ints = npt.NDArray[np.int64]

BOS = ("drop", "keep", "none")
LONG = ("split", "cut")
# Texts that are given to a tokenizer at once.
TOKENISED_AT_ONCE = 512
# Batches of a block: enough to find windows of like length, few enough that a restart repeats little.
BATCHES_PER_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Windows:
    """Tokens of texts, window by window.

    Attributes
    ----------
    ids : int32 ndarray of shape (n_tokens,)
        Token ids of all windows, end to end, beginning tokens included.
    offset : int64 ndarray of shape (n_windows + 1,)
        Window w has the tokens ``offset[w]`` to ``offset[w + 1]``.
    document : int32 ndarray of shape (n_windows,)
        The text that each window is part of.
    start, end : int32 ndarray of shape (n_tokens,), or None
        Characters of the window's piece of text that a token covers.
    pieces : list of str
        The piece of text of each window.
    skip : int
        Tokens at the beginning of each window that have no row: 1 where the beginning token is dropped.
    n_empty : int
        Texts without a token.
    """

    ids: npt.NDArray[np.int32]
    offset: Ints
    document: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32] | None
    end: npt.NDArray[np.int32] | None
    pieces: list[str]
    skip: int
    n_empty: int = 0

    @property
    def lengths(self) -> Ints:
        """Tokens of each window, (n_windows,)."""
        return np.diff(self.offset)

    @property
    def row_offset(self) -> Ints:
        """Rows before each window, (n_windows + 1,)."""
        return self.offset - self.skip * np.arange(len(self.offset))

    @property
    def n_rows(self) -> int:
        """Rows of all windows."""
        return int(self.row_offset[-1])

    def tokens(self, window: int) -> npt.NDArray[np.int32]:
        """Return the token ids of one window."""
        return self.ids[self.offset[window] : self.offset[window + 1]]

    def kept(self, first: int, last: int) -> Ints:
        """Return the places in `ids` of the tokens that have a row, for windows first to last (not included)."""
        places = np.arange(self.offset[first], self.offset[last])
        position = places - np.repeat(self.offset[first:last], self.lengths[first:last])
        return places[position >= self.skip]

    def beside(self, first: int, last: int, label: npt.NDArray[np.int32] | None) -> dict[str, npt.NDArray[Any]]:
        """Return what stands beside each row of windows first to last: (n_rows,) each.

        Parameters
        ----------
        first, last : int
        label : int32 ndarray of shape (n_documents,), or None
        """
        kept, counts = self.kept(first, last), self.lengths[first:last] - self.skip
        window = np.repeat(np.arange(first, last), counts)
        out: dict[str, npt.NDArray[Any]] = {
            "token_id": self.ids[kept],
            "document": self.document[window],
            "position": (kept - self.offset[window]).astype(np.int32),
            "text": window.astype(np.int32),
        }
        if self.start is not None and self.end is not None:
            out |= {"start": self.start[kept], "end": self.end[kept]}
        if label is not None:
            out["label"] = label[self.document[window]]
        return out


# -- texts to windows ------------------------------------------------------------------------------------


def beginning_token(tokenizer: Any, bos: str) -> int | None:
    """Return the id of the token that begins a window; None for none.

    Parameters
    ----------
    tokenizer : Hugging Face tokenizer
    bos : {"drop", "keep", "none"}
    """
    if bos not in BOS:
        raise InputError(f"bos={bos!r} is not known; use one of {', '.join(BOS)}")
    if bos == "none":
        return None
    if tokenizer.bos_token_id is None:
        raise InputError("the tokenizer has no BOS token to put before a text; use bos='none' to do without one")
    return int(tokenizer.bos_token_id)


def make_windows(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    context: int = 256,
    bos: str = "drop",
    long: str = "split",
    n_rows: int | None = None,
    order: Ints | None = None,
) -> Windows:
    """Tokenise texts and cut them into windows.

    Parameters
    ----------
    tokenizer : Hugging Face tokenizer
    texts : sequence of str
    context : int
        Most tokens of a window, beginning token included.
    bos : {"drop", "keep", "none"}
        Put a beginning token before each window and give it no row, give it one, or put none.
    long : {"split", "cut"}
        What becomes of a text with more tokens: several windows, or the first one only.
    n_rows : int, optional
        Take whole windows until there are as many rows.
    order : int64 ndarray, optional
        The texts to take, in this order; default: all as they come.

    Returns
    -------
    Windows
    """
    first = beginning_token(tokenizer, bos)
    room = context - (first is not None)
    if room < 1:
        raise InputError(
            f"context={context} leaves no room for a token; give at least {2 if first is not None else 1}"
        )
    if long not in LONG:
        raise InputError(f"long={long!r} is not known; use one of {', '.join(LONG)}")
    if n_rows is not None and n_rows < 1:
        raise InputError(f"n_tokens={n_rows} asks for nothing; give at least 1")
    builder = _Builder(first, 1 if bos == "drop" else 0, room, long, n_rows)
    numbers = np.arange(len(texts)) if order is None else order
    for at in range(0, len(numbers), TOKENISED_AT_ONCE):
        part = numbers[at : at + TOKENISED_AT_ONCE].tolist()
        for number, (ids, places) in zip(part, _tokenise(tokenizer, [texts[i] for i in part]), strict=True):
            if builder.full:
                return builder.finish()
            builder.add(number, texts[number], ids, places)
    if not builder.pieces:
        raise InputError(f"none of {len(texts)} texts has a token; give texts that are not empty")
    return builder.finish()


def token_ids(tokenizer: Any, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ids of each text, without special tokens."""
    for at in range(0, len(texts), TOKENISED_AT_ONCE):
        for ids, _ in _tokenise(tokenizer, list(texts[at : at + TOKENISED_AT_ONCE])):
            yield ids


def _tokenise(tokenizer: Any, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]] | None]]:
    """Yield the ids of each text and the characters that each token covers; None from a slow tokenizer."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    options = {"return_offsets_mapping": True} if fast else {}
    # a text longer than the model's window is cut here, and needs no warning
    cut = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
    return zip(cut["input_ids"], cut["offset_mapping"] if fast else [None] * len(texts), strict=True)


class _Builder:
    """Collects windows."""

    def __init__(self, first: int | None, skip: int, room: int, long: str, n_rows: int | None) -> None:
        self._first, self._skip, self._room, self._long, self._wanted = first, skip, room, long, n_rows
        self._ids: list[npt.NDArray[np.int32]] = []
        self._places: list[npt.NDArray[np.int32]] = []
        self._document: list[int] = []
        self.pieces: list[str] = []
        self.full = False
        self._rows = self._n_empty = 0
        self._placed = True

    def add(self, document: int, text: str, ids: list[int], places: list[tuple[int, int]] | None) -> None:
        """Take one text, as long as there is room."""
        self._n_empty += not ids
        self._placed = self._placed and places is not None
        tokens = np.array(ids, np.int32)
        spans = np.array(places if places is not None else [(0, len(text))] * len(ids), np.int32).reshape(-1, 2)
        for a in range(0, len(ids), self._room):
            if self.full or (a and self._long == "cut"):
                return
            self._add_window(document, text, tokens[a : a + self._room], spans[a : a + self._room])

    def _add_window(
        self, document: int, text: str, ids: npt.NDArray[np.int32], spans: npt.NDArray[np.int32]
    ) -> None:
        low, high = int(spans[:, 0].min()), int(spans[:, 1].max())
        head = [] if self._first is None else [self._first]
        self._ids.append(np.concatenate([np.array(head, np.int32), ids]))
        self._places.append(np.concatenate([np.zeros((len(head), 2), np.int32), spans - np.int32(low)]))
        self._document.append(document)
        self.pieces.append(text[low:high])
        self._rows += len(self._ids[-1]) - self._skip
        self.full = self._wanted is not None and self._rows >= self._wanted

    def finish(self) -> Windows:
        """Put the windows end to end."""
        offset = np.concatenate([[0], np.cumsum([len(one) for one in self._ids])]).astype(np.int64)
        places = np.concatenate(self._places)
        start, end = (np.ascontiguousarray(places[:, i]) if self._placed else None for i in (0, 1))
        document = np.array(self._document, np.int32)
        ids = np.concatenate(self._ids)
        return Windows(ids, offset, document, start, end, self.pieces, self._skip, self._n_empty)


# -- windows to batches ----------------------------------------------------------------------------------


def plan_blocks(lengths: Sequence[int] | Ints, block_tokens: int) -> list[tuple[int, int]]:
    """Cut windows into runs of at most `block_tokens` tokens, at least one window each: (first, last) pairs.

    >>> plan_blocks([3, 3, 3, 9, 1], 6)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    blocks, first, size = [], 0, 0
    for i, n in enumerate(np.asarray(lengths).tolist()):
        if i > first and size + n > block_tokens:
            blocks.append((first, i))
            first, size = i, 0
        size += n
    return [*blocks, (first, len(lengths))] if len(lengths) else []


def plan_batches(lengths: Sequence[int] | Ints, batch_tokens: int) -> list[list[int]]:
    """Share windows out to batches of at most `batch_tokens` tokens with padding, at least one window each.

    Longest first, so a batch that does not fit in memory fails at once.

    >>> plan_batches([2, 5, 2, 4], 8)
    [[1], [3, 0], [2]]
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    batches: list[list[int]] = []
    for i in order:
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def padded(
    windows: Windows, chosen: Sequence[int], pad: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return token ids and mask of a batch, (n_windows, longest): 1 in the mask for tokens, 0 for padding."""
    lengths = windows.lengths[list(chosen)]
    ids = np.full((len(chosen), int(lengths.max())), pad, np.int64)
    mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    for row, w in enumerate(chosen):
        ids[row, : lengths[row]] = windows.tokens(w)
    return ids, mask
