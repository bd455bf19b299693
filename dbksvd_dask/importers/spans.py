"""Rows that files hold just as they are stored: byte ranges, which any thread can read independently."""

from __future__ import annotations

import bisect
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
    """Consecutive bytes of a file."""

    path: str
    offset: int
    nbytes: int


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
            fill_from(self._file(span.path), span.offset + span.nbytes - left, part, span.path)
            target, place, i = target[len(part) :], place + len(part), i + 1

    def _file(self, path: str) -> int:
        if path != self._path:
            self._close()
            self._fd, self._path = os.open(path, os.O_RDONLY), path
        return self._fd

    def _close(self) -> None:
        if self._path:
            os.close(self._fd)
            self._path = ""


def fill_from(fd: int, offset: int, target: npt.NDArray[Any], path: str) -> None:
    """Fill a C-contiguous array with the bytes of an open file, starting at `offset`."""
    n = read_at(fd, bytes_of(target), offset)
    if n < target.nbytes:
        raise StoreError(f"{path} is truncated: it ended at byte {offset + n}")
