"""Texts with labels, from lists, text files, tables and JSON lines."""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import InputError, StoreError, brief

PLAIN = (".txt", ".md")
TABLES = (".parquet", ".tab", ".tsv", ".csv", ".jsonl")
# Names under which tables keep their texts, in the order in which they are tried.
TEXT_COLUMNS = ("text", "prompt", "content", "sentence", "document", "body")
_ORANGE_TYPES = {"c", "continuous", "d", "discrete", "s", "string", "t", "time", "basket", ""}
_ORANGE_FLAGS = {"class", "meta", "ignore", "weight", "c", "m", "i", "w"}


@dataclass(frozen=True)
class Texts:
    """Texts with an optional label each.

    Attributes
    ----------
    texts : list of str
    label : int32 ndarray of shape (n_texts,), or None
        Number of the label of each text.
    names : list of str
        Name of each label, sorted.
    source : str
        Where the texts came from.
    """

    texts: list[str]
    label: npt.NDArray[np.int32] | None = None
    names: list[str] = field(default_factory=list)
    source: str = "texts"


@dataclass(frozen=True)
class _Table:
    """Rows of a table file; `marked` and `included` are the columns that the file calls label and text."""

    columns: list[str]
    rows: Iterable[Sequence[Any]]
    marked: str | None = None
    included: str | None = None


def read_texts(
    source: str | os.PathLike[str] | Iterable[str],
    *,
    column: str | None = None,
    label: str | None = None,
    lines: bool = False,
) -> Texts:
    """Read texts.

    Parameters
    ----------
    source : iterable of str, path of a file or of a folder, or a pattern such as ``"books/*.txt"``
        A .txt or .md file is one text; .parquet, .tab, .tsv, .csv and .jsonl hold one text per row; all may be
        compressed (.zst, .gz). Of a folder, every such file below it, in natural order.
    column : str, optional
        Column or key of the texts; default: text, prompt, content, sentence, document or body, or the only one.
    label : str, optional
        Column or key of the labels. A .tab file names its own in its header.
    lines : bool
        Take every line of a .txt file as a text of its own.

    Returns
    -------
    Texts
    """
    if not isinstance(source, str | os.PathLike):
        return _of_list(source)
    texts: list[str] = []
    labels: list[Any] = []
    files = find_files(source)
    for file in files:
        more, marks = _read_file(file, column, label, lines)
        texts += more
        labels += marks if marks is not None else []
    if labels and len(labels) != len(texts):
        raise InputError(f"{source}: {len(labels)} of {len(texts)} texts have a label; all must have one, or none")
    name = os.path.basename(os.fspath(source))
    if label is not None and texts and not labels:
        raise InputError(f"{source} is plain text, without labels; label={label!r} is for the columns of a table")
    if not labels:
        return Texts(texts, source=name)
    names, number = np.unique([str(one) for one in labels], return_inverse=True)
    return Texts(texts, number.astype(np.int32), [str(one) for one in names], name)


def _of_list(given: Iterable[str]) -> Texts:
    texts = list(given)
    wrong = next((one for one in texts if not isinstance(one, str)), None)
    if wrong is not None:
        raise InputError(f"texts hold a {type(wrong).__name__}; pass texts (str), or the path of a file or folder")
    return Texts(texts)


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Return the text files and tables that a path or pattern names, in natural order."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [one for one in path.rglob("*") if one.is_file() and _kind(one) is not None]
    else:
        found = [Path(one) for one in glob.glob(os.fspath(source), recursive=True) if Path(one).is_file()]
    if not found:
        known = " ".join((*PLAIN, *TABLES))
        raise StoreError(f"no texts at {source}; give a file or folder with {known} files (also .zst, .gz)")
    return sorted(found, key=lambda one: _natural(str(one)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort part_2 before part_10.

    >>> sorted(["part_10", "part_2"], key=_natural)
    ['part_2', 'part_10']
    """
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _kind(path: Path) -> str | None:
    """Return the suffix that says how a file is read; None for one that cannot be."""
    name = path.name.removesuffix(".zst").removesuffix(".gz")
    return next((suffix for suffix in (*PLAIN, *TABLES) if name.endswith(suffix)), None)


def _read_file(
    path: Path, column: str | None, label: str | None, lines: bool
) -> tuple[list[str], list[Any] | None]:
    """Return the texts of a file, and their labels or None."""
    kind = _kind(path)
    if kind is None:
        raise InputError(f"{path} is not a file of texts; use one of {' '.join((*PLAIN, *TABLES))}")
    with _explained(path):
        if kind in PLAIN:
            return _plain_texts(path, lines), None
        table = _READERS[kind](path)
        return _texts_of(path, table, column, label)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file causes into one line that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); convert it") from error
    except (ValueError, OSError, EOFError, csv.Error) as error:
        if isinstance(error, InputError | StoreError):
            raise
        raise InputError(f"{path} cannot be read: {brief(error)}") from error


def _plain_texts(path: Path, lines: bool) -> list[str]:
    text = _read_text(path)
    if not lines:
        return [text]
    # only a line feed ends a line: a text may hold any other character, U+2028 too
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _read_text(path: Path) -> str:
    """Return the content of a text file, compressed or not."""
    if path.suffix == ".zst":
        with _arrow(path).input_stream(str(path), compression="zstd") as stream:
            return bytes(stream.read()).decode()
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise InputError(f"{path} needs pyarrow; pip install 'dbksvd-dask[importers]'") from error
    return pyarrow


# -- tables ----------------------------------------------------------------------------------------------


def _parquet(path: Path) -> _Table:
    _arrow(path)
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(str(path)).read()
    columns = [column.to_pylist() for column in table.columns]
    return _Table(list(table.column_names), zip(*columns, strict=True))


def _separated(path: Path, delimiter: str) -> _Table:
    before = csv.field_size_limit(sys.maxsize)  # a text may be a book
    try:
        rows = list(csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=delimiter))
    finally:
        csv.field_size_limit(before)
    if not rows:
        raise InputError(f"{path} is empty; it needs a header and one row per text")
    head, marked, included = rows[0], None, None
    if delimiter == "\t" and _is_orange(rows):
        flags = [set(flag.split()) for flag in rows[2]]
        included = next((name for name, flag in zip(head, flags, strict=False) if "include=True" in flag), None)
        marked = next((name for name, flag in zip(head, flags, strict=False) if flag & {"class", "c"}), None)
        rows = rows[2:]
    return _Table(head, [row for row in rows[1:] if row], marked, included)  # without blank lines


def _is_orange(rows: list[list[str]]) -> bool:
    """Tell the three header rows of Orange: names, types, flags."""
    if len(rows) < 3:
        return False
    types = [cell.strip().lower() for cell in rows[1]]
    flags = [word for cell in rows[2] for word in cell.split()]
    # a discrete column may list its values instead of its type: "ham spam"
    named = all(cell in _ORANGE_TYPES or " " in cell for cell in types) and any(
        c in _ORANGE_TYPES - {""} for c in types
    )
    return named and all(word in _ORANGE_FLAGS or "=" in word for word in flags)


def _json_lines(path: Path) -> _Table:
    records = [json.loads(line) for line in _read_text(path).split("\n") if line.strip()]
    if all(isinstance(record, str) for record in records):
        return _Table(["text"], [(record,) for record in records])
    if not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path} mixes kinds of values; every line must be an object, or every line a string")
    columns = list(dict.fromkeys(key for record in records for key in record))
    return _Table(columns, [[record.get(name) for name in columns] for record in records])


_READERS: dict[str, Callable[[Path], _Table]] = {
    ".parquet": _parquet,
    ".tab": lambda path: _separated(path, "\t"),
    ".tsv": lambda path: _separated(path, "\t"),
    ".csv": lambda path: _separated(path, ","),
    ".jsonl": _json_lines,
}


def _texts_of(
    path: Path, table: _Table, column: str | None, label: str | None
) -> tuple[list[str], list[Any] | None]:
    rows = list(table.rows)
    at = _place(path, table.columns, column or table.included or _guess(path, table.columns))
    name = label or table.marked
    mark = None if name is None else _place(path, table.columns, name)
    short = next((i for i, row in enumerate(rows) if len(row) <= max(at, mark or 0)), None)
    if short is not None:
        raise InputError(
            f"{path}: row {short} has {len(rows[short])} columns, its header has {len(table.columns)}"
        )
    wrong = next((row[at] for row in rows if not isinstance(row[at], str | None)), None)
    if wrong is not None:
        raise InputError(f"{path}: column {table.columns[at]!r} holds a {type(wrong).__name__}, not texts")
    return [row[at] or "" for row in rows], None if mark is None else [row[mark] for row in rows]


def _guess(path: Path, columns: list[str]) -> str:
    if len(columns) == 1:
        return columns[0]
    lower = {name.lower(): name for name in reversed(columns)}
    found = next((lower[name] for name in TEXT_COLUMNS if name in lower), None)
    if found is None:
        raise InputError(f"{path} has the columns {', '.join(columns)}; say which holds the texts: column='NAME'")
    return found


def _place(path: Path, columns: list[str], name: str) -> int:
    if name not in columns:
        raise InputError(f"{path} has no column {name!r}; it has {', '.join(columns) or 'none'}")
    return columns.index(name)
