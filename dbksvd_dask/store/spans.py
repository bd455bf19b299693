"""Rows that files hold just as they are stored: byte ranges, which any thread can read independently."""

from __future__ import annotations

import bisect
import datetime
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store._system import read_at
from dbksvd_dask.store.checksums import bytes_of


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of a file.

    Attributes
    ----------
    path : str
    offset, nbytes : int
    identity : (int, int), optional
        Size and time of change (ns) of the file; one that has others is refused when it is opened.
    """

    path: str
    offset: int
    nbytes: int
    identity: tuple[int, int] | None = None


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Return what changes when a file is written to: its size and its time of change (ns)."""
    return status.st_size, status.st_mtime_ns


def require_identity(path: str, found: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    """Refuse a linked file that is missing (`found` is None) or is not as it was when it was linked."""
    advice = "restore this file, or import it again with link=True and force=True"
    if found is None:
        raise StoreError(f"{path}, to which a store is linked, does not exist or cannot be read; {advice}")
    if found != expected:
        raise StoreError(
            f"{path} has changed since a store was linked to it: {_described(expected)} then, {_described(found)} "
            f"now; {advice}"
        )


def _described(identity: tuple[int, int]) -> str:
    when = datetime.datetime.fromtimestamp(identity[1] / 1e9, datetime.UTC)
    return f"{identity[0]} bytes of {when:%Y-%m-%d %H:%M:%S.%f} UTC"


class SpanReader:
    """Reads spans as one sequence of bytes, in a `with` block, from one thread.

    Parameters
    ----------
    spans : sequence of Span
        In the order in which they follow one another.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = tuple(spans)
        self._ends = list(itertools.accumulate(span.nbytes for span in spans))
        # one at a time: reading goes forward, and there may be thousands
        self._path, self._fd = "", -1

    def __enter__(self) -> SpanReader:
        """Begin; files are opened when they are needed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is open."""
        self._close()

    def fill(self, first: int, rows: npt.NDArray[Any]) -> None:
        """Fill a C-contiguous array of shape (n, ...) with the rows from `first`.

        Raises
        ------
        StoreError
            When a file ends before its span does.
        """
        target = rows.reshape(-1).view(np.uint8)
        place = first * (len(target) // len(rows))
        i = bisect.bisect_right(self._ends, place)
        while len(target):
            span, left = self._spans[i], self._ends[i] - place
            part = target[:left]
            fill_from(self._file(span), span.offset + span.nbytes - left, part, span.path)
            target, place, i = target[len(part) :], place + len(part), i + 1

    def _file(self, span: Span) -> int:
        if span.path != self._path:
            self._close()
            self._fd, self._path = _open(span), span.path
        return self._fd

    def _close(self) -> None:
        if self._path:
            os.close(self._fd)
            self._path = ""


def _open(span: Span) -> int:
    """Open the file of a span for reading; refuse one that is not as it was when it was linked."""
    if span.identity is None:
        return os.open(span.path, os.O_RDONLY)
    try:
        fd = os.open(span.path, os.O_RDONLY)
    except OSError as error:
        require_identity(span.path, None, span.identity)
        raise AssertionError from error
    try:
        require_identity(span.path, identity_of(os.fstat(fd)), span.identity)
    except StoreError:
        os.close(fd)
        raise
    return fd


def fill_from(fd: int, offset: int, target: npt.NDArray[Any], path: str) -> None:
    """Fill a C-contiguous array with the bytes of an open file, starting at `offset`."""
    n = read_at(fd, bytes_of(target), offset)
    if n < target.nbytes:
        raise StoreError(f"{path} is truncated: it ended at byte {offset + n}")
