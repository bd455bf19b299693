"""The rows of a linked store: byte ranges of files that stay where they are.

```
STORE/activations/links.json
    files: [[path, size, time of change in ns], ...]
    spans: [[number of the file, offset, rows], ...]
```

Sizes and times of all files are compared when the store is opened, and those of a file again whenever rows are
read from it. The bytes themselves are compared with checksums by `verify_store` if the store was linked with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from dbksvd_dask.errors import StoreError, brief
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.spans import Span, identity_of, require_identity

LINKS = "activations/links.json"  # inside of the array: Zarr warns of other files in a group
File = tuple[str, int, int]  # path, size, time of change
Range = tuple[int, int, int]  # number of the file, offset, rows

_OPENED: dict[str, tuple[tuple[int, int], Links]] = {}
_LOCK = threading.Lock()


class Links:
    """Files, and the ranges of them that hold the rows of a store, in order.

    Parameters
    ----------
    files : list of File
    spans : list of Range
    row_bytes : int
    """

    def __init__(self, files: list[File], spans: list[Range], row_bytes: int) -> None:
        self.files, self.row_bytes = files, row_bytes
        self._table = np.array(spans, np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._table[:, 2])

    @classmethod
    def to(cls, spans: Iterable[Span], row_bytes: int) -> Links:
        """Link to files as they are now; ranges that follow one another in a file become one."""
        numbers: dict[str, int] = {}
        files: list[File] = []
        table: list[Range] = []
        for span in spans:
            path = os.path.abspath(span.path)
            if path not in numbers:
                numbers[path] = len(files)
                files.append((path, *identity_of(os.stat(path))))
            file, rows = numbers[path], span.nbytes // row_bytes
            if table and table[-1][0] == file and table[-1][1] + table[-1][2] * row_bytes == span.offset:
                table[-1] = (file, table[-1][1], table[-1][2] + rows)
            else:
                table.append((file, span.offset, rows))
        return cls(files, table, row_bytes)

    @classmethod
    def read(cls, store: str, row_bytes: int) -> Links:
        """Read the links of a store."""
        path = paths.join(store, LINKS)
        found = atomic.read_sealed(path)
        try:
            files = [(str(name), int(size), int(changed)) for name, size, changed in found["files"]]
            return cls(files, [(int(f), int(o), int(n)) for f, o, n in found["spans"]], row_bytes)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path} does not describe a linked store: {brief(error)}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the links as plain JSON values."""
        return {"files": [list(file) for file in self.files], "spans": self._table.tolist()}

    @property
    def n_rows(self) -> int:
        """Return the rows of all ranges."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def spans(self, start: int, stop: int) -> list[Span]:
        """Return where rows [start, stop) are."""
        found = []
        i = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            file, offset, rows = self._table[i].tolist()
            end = int(self._ends[i])
            first, n = start - (end - rows), min(stop, end) - start
            path, size, changed = self.files[file]
            place = offset + first * self.row_bytes
            found.append(Span(path, place, n * self.row_bytes, (size, changed)))
            start, i = start + n, i + 1
        return found

    def require_unchanged(self) -> None:
        """Refuse files that are missing or are not as they were when they were linked, by name."""
        for path, size, changed in self.files:
            try:
                found = identity_of(os.stat(path))
            except OSError:
                found = None
            require_identity(path, found, (size, changed))

    def locate(self, row: int) -> str:
        """Say where a row comes from, for an error message."""
        span = self.spans(row, row + 1)[0]
        return f"byte {span.offset} of {span.path}"


def links_of(store: str, row_bytes: int) -> Links:
    """Return the links of a store; read once per process, and again when they have changed."""
    try:
        now = identity_of(os.stat(paths.join(store, LINKS)))
    except OSError as error:
        raise StoreError(f"{paths.join(store, LINKS)} cannot be read ({brief(error)}); link it again") from error
    with _LOCK:
        if store not in _OPENED or _OPENED[store][0] != now:
            _OPENED[store] = (now, Links.read(store, row_bytes))
        return _OPENED[store][1]
