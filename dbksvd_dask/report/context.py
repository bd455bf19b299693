"""Where else in the same text an atom is active: what colours the words around a marked token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.report.facts import CodeReader
from dbksvd_dask.report.pack import Payload, narrow
from dbksvd_dask.report.samples import TokenSamples, utf16

# All active slots are sorted by atom and sample; beyond this many that is no longer a matter of seconds.
MAX_SLOTS = 64_000_000


@dataclass(frozen=True, eq=False)
class Context:
    """Active tokens of the text of every listed sample, for the atom whose list it is.

    Attributes
    ----------
    offset : int64 ndarray of shape (n_entries + 1,)
        Entry e of the lists has the items ``offset[e]`` to ``offset[e + 1]``.
    sample : int64 ndarray of shape (n_items,)
        The sample that is the active token.
    value : float32 ndarray of shape (n_items,)
    """

    offset: NDArray[np.int64]
    sample: NDArray[np.int64]
    value: NDArray[np.float32]


def find_context(
    reader: CodeReader, samples: TokenSamples, atom: NDArray[np.int64], sample: NDArray[np.int64]
) -> Context | None:
    """Find the active tokens around listed samples.

    Parameters
    ----------
    reader : CodeReader
    samples : TokenSamples
    atom, sample : int64 ndarray of shape (n_entries,)
        An atom and a sample of one of its lists; sample -1 has no items.

    Returns
    -------
    Context, or None when the tokens of a text do not stand together or there are too many codes
    """
    if reader.n_samples * reader.n_slots > MAX_SLOTS:
        return None
    text = samples.tokens(np.arange(reader.n_samples)).text
    if np.any(np.diff(text) < 0):
        return None
    key, value = _sorted_slots(reader)
    base = atom * reader.n_samples
    first, last = (np.searchsorted(text, text[sample], side=side) for side in ("left", "right"))
    low = np.searchsorted(key, base + first)
    high = np.where(sample >= 0, np.searchsorted(key, base + last), low)
    offset = np.concatenate([[0], np.cumsum(high - low)])
    item = np.arange(offset[-1]) - np.repeat(offset[:-1] - low, high - low)
    return Context(offset, key[item] % reader.n_samples, value[item])


def _sorted_slots(reader: CodeReader) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Sort all active slots by atom, then sample: the key ``atom * n_samples + sample``, and the value."""
    keys, values = [], []
    for first, atom, coefficient in reader.placed_blocks():
        i, s = np.nonzero((atom >= 0) & (coefficient != 0))
        keys.append(atom[i, s].astype(np.int64) * reader.n_samples + (i + first))
        values.append(coefficient[i, s].astype(np.float32))
    key, value = np.concatenate(keys), np.concatenate(values)
    order = np.argsort(key, kind="stable")
    return key[order], value[order]


def context_payload(
    context: Context, samples: TokenSamples, ids: NDArray[np.int64], entry: NDArray[np.int64]
) -> Payload:
    """Pack the context for the page: characters of every active token, in UTF-16 units of the entry's piece.

    Parameters
    ----------
    context : Context
    samples : TokenSamples
    ids : int64 ndarray of shape (n_shown,)
        Samples on the page.
    entry : int64 ndarray of shape (n_entries,)
        Place in `ids` of the listed sample of each entry.
    """
    placed = samples.place(ids)
    owner = np.repeat(entry, np.diff(context.offset))
    item, inverse = np.unique(context.sample, return_inverse=True)
    tokens = samples.tokens(item)
    start, end = (where[inverse] - placed.shift[owner] for where in (tokens.start, tokens.end))
    texts = [placed.texts[t] for t in placed.text[owner].tolist()]
    length = np.array([len(text) for text in texts], np.int64)
    inside = (start >= 0) & (end <= length)
    ends = [
        np.array([utf16(t, c) for t, c, ok in zip(texts, where.tolist(), inside, strict=True) if ok], np.int64)
        for where in (start, end)
    ]
    offset = np.concatenate([[0], np.cumsum(inside)])[context.offset]
    arrays = {"offset": offset, "start": ends[0], "end": ends[1]}
    return Payload(
        {},
        {**{f"context_{n}": narrow(a) for n, a in arrays.items()}, "context_value": context.value[inside]},
    )
