"""Texts of imported rows: a column of the files, or a file with one line per row.

They are written to a file beside the store, and the store records the line of each row, so a report shows them,
also after a shuffle.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np

from dbksvd_dask._words import listed
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Array
from dbksvd_dask.importers.collection import Collection
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.paths import PathLike

# Columns that hold the text of a row, if the user names none, the first of them that there is.
COLUMNS = ("text", "sentence", "prompt", "content", "document")
# texts read at a time from a column
BLOCK = 8192
# the token that a row belongs to, in a line of its context
_MARKED = re.compile(r"<<(.+?)>>")
# one character for another: places in a text stay as they are
_ONE_LINE = str.maketrans({"\n": "\u21b5", "\r": "\u21b5"})


class RowTexts(ABC):
    """The texts of a collection.

    Attributes
    ----------
    arrays : dict of str to str
        Name and dtype of what is stored for each row: `text`, the number of its line; for tokens also `start` and
        `end`, the characters of that line that are the token.
    identity : list
        Changes when the texts do.
    """

    arrays: dict[str, str]
    identity: list[Any]

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield the texts in order, each in one line."""

    @abstractmethod
    def read(self, low: int, high: int) -> dict[str, Array]:
        """Return the stored arrays of rows [low, high) of the collection."""

    def write(self, path: str) -> None:
        """Write the texts to a file, whole or not at all."""
        with atomic.staged(path) as scratch, open(scratch, "w", encoding="utf-8", newline="\n") as file:
            for line in self.lines():
                file.write(f"{line}\n")

    def require_free(self, path: str) -> None:
        """Refuse a file that holds other texts."""
        if os.path.exists(path) and any(a != b for a, b in zip_longest(self.lines(), read_lines(path))):
            raise InputError(
                f"{path} already exists and holds other texts; choose another name for the store, or replace it "
                "with force=True"
            )


class ColumnTexts(RowTexts):
    """A column of the files with one text per row, or per sequence."""

    def __init__(self, rows: Collection, column: str) -> None:
        self._rows, self.column = rows, column
        self.arrays = {"text": "int64"}
        self.identity = ["column", column]

    def lines(self) -> Iterator[str]:
        """Yield the texts of all files."""
        for text in self._rows.read_texts(self.column, BLOCK):
            yield text.translate(_ONE_LINE)

    def read(self, low: int, high: int) -> dict[str, Array]:
        """Return the number of each row's text."""
        return {"text": self._rows.entries(low, high)}


class LineTexts(RowTexts):
    """A file with one line per row, or per sequence."""

    def __init__(self, rows: Collection, path: str) -> None:
        self._rows, self.path = rows, path
        self.arrays = {"text": "int64"}
        status = os.stat(path)
        self.identity = ["lines", os.path.abspath(path), status.st_size, status.st_mtime_ns]
        n_lines = sum(1 for _ in self.lines())
        self._per_row = n_lines == rows.n_rows
        if not self._per_row and n_lines != rows.n_entries:
            sequences = f", or {rows.n_entries}, one per sequence" if rows.in_sequences else ""
            raise InputError(
                f"{path} has {n_lines} lines for {rows.n_rows} rows; need one line per row, in order{sequences}"
            )

    def lines(self) -> Iterator[str]:
        """Yield the lines."""
        yield from read_lines(self.path)

    def read(self, low: int, high: int) -> dict[str, Array]:
        """Return the number of each row's line."""
        numbers = np.arange(low, high, dtype=np.int64) if self._per_row else self._rows.entries(low, high)
        return {"text": numbers}


class TokenTexts(RowTexts):
    """A file with one line per row, in which ``<<token>>`` marks the token of the row in its context."""

    def __init__(self, whole: LineTexts) -> None:
        self._whole = whole
        self.identity = ["tokens", *whole.identity[1:]]
        self.arrays = {"text": "int64", "start": "int32", "end": "int32"}
        places, number, before = array("q"), -1, None
        for text, start, end in self._split():
            number, before = number + (text != before), text
            places.extend((number, start, end))
        columns = np.frombuffer(places, np.int64).reshape(-1, 3).T
        self._found = {
            name: column.astype(self.arrays[name]) for name, column in zip(self.arrays, columns, strict=True)
        }

    def _split(self) -> Iterator[tuple[str, int, int]]:
        """Yield each line without the marks, and the characters that they enclosed."""
        for line in self._whole.lines():
            mark = _MARKED.search(line)
            assert mark is not None
            yield line[: mark.start()] + mark[1] + line[mark.end() :], mark.start(), mark.start() + len(mark[1])

    def lines(self) -> Iterator[str]:
        """Yield the texts without marks; neighbouring rows of one text have one line."""
        before = None
        for text, _, _ in self._split():
            if text != before:
                yield text
            before = text

    def read(self, low: int, high: int) -> dict[str, Array]:
        """Return the number of each row's line, and its token there."""
        return {name: values[low:high] for name, values in self._found.items()}


def file_of_texts(store: str) -> str:
    """Return the file beside a store that holds the texts of its rows.

    >>> file_of_texts("data/acts.zarr")
    'data/acts.texts.txt'
    """
    return store.removesuffix(".zarr") + ".texts.txt"


def open_texts(rows: Collection, store: str, texts: PathLike | None) -> RowTexts | None:
    """Find the texts of a collection.

    Parameters
    ----------
    rows : Collection
    store : str
        The store that is written; texts can be beside a local one only.
    texts : path or str, optional
        A file of lines or a column; default: the first of `COLUMNS` that there is.
    """
    if texts is None:
        column = next((name for name in COLUMNS if name in rows.text_columns), None)
        return None if column is None or paths.is_remote(store) else ColumnTexts(rows, column)
    texts = os.fspath(texts)
    if paths.is_remote(store):
        raise InputError(f"texts={texts!r}: texts go beside a local store, and {store} is a URL; leave them out")
    if texts in rows.text_columns:
        return ColumnTexts(rows, texts)
    if not os.path.isfile(texts):
        columns = f"which has {listed(rows.text_columns)}" if rows.text_columns else "which has none"
        raise InputError(
            f"texts={texts!r} is neither a file nor a column of texts in {rows.source}, {columns}; give a text "
            "file with one line per row"
        )
    whole = LineTexts(rows, texts)
    marked = whole._per_row and all(len(_MARKED.findall(line)) == 1 for line in whole.lines())
    return TokenTexts(whole) if marked else whole


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a text file; only line feeds separate them."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); convert it, one line per row") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
