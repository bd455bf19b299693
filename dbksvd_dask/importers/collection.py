"""Many files as one table of rows: the main array, the aligned arrays, and refusal of what does not fit."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dbksvd_dask._words import listed
from dbksvd_dask.errors import InputError
from dbksvd_dask.importers.base import NAMELESS, Array, ArrayInfo, Hints, SourceFile, plain_name
from dbksvd_dask.importers.layers import numbers_of
from dbksvd_dask.importers.registry import find_files, name_of, open_file
from dbksvd_dask.store.dtypes import BFLOAT16, stored_dtype, widen_bfloat16
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.spans import Span

# files kept open; reading goes forward, so more would not help
OPEN_FILES = 4


@dataclass(frozen=True)
class Member:
    """One file of a collection: where it is, the shape of its main array, and its identity.

    The identity is two integers, which go into the description of an unfinished job: rows of a file that changed
    must not be mixed with those it had before. See `SourceFile.identity`.
    """

    path: str
    format: str
    shape: tuple[int, ...]
    identity: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Return the rows of one sequence; 1 when rows are not in sequences."""
        return self.shape[1] if len(self.shape) == 3 else 1

    @property
    def n_rows(self) -> int:
        """Return the number of rows after flattening."""
        return math.prod(self.shape[:-1])


class Collection:
    """The rows of one or many files of the same width and dtype, in order.

    Parameters
    ----------
    source : path, glob pattern, or several
        See `find_files`.
    array : str, optional
        Name of the main array in files that hold several; default: the only candidate.
    aligned : sequence of str
        Names of arrays of the same files with one entry per row (or per sequence: repeated for its rows).
    hints : Hints
        For files that do not describe themselves.
    format : str, optional
        When file names do not show it.
    exclude : path, optional
        A store that is being written; see `find_files`.

    Attributes
    ----------
    n_rows, n_features : int
        Shape after flattening.
    dtype : str
        Of the main array; a NumPy name or "bfloat16".
    in_sequences : bool
        Whether the main array is (sequence, token, feature).
    aligned : dict of str to ArrayInfo
        Shape (n_rows, ...) and dtype of each aligned array.
    text_columns : tuple of str
        Columns that hold a text per row (or sequence) in all files.
    """

    def __init__(
        self,
        source: PathLike | Sequence[PathLike],
        *,
        array: str | None = None,
        aligned: Sequence[str] = (),
        hints: Hints | None = None,
        format: str | None = None,
        exclude: PathLike | None = None,
    ) -> None:
        self.source = name_of(source)
        self._hints = hints or Hints()
        self._open: dict[int, SourceFile] = {}
        self.members: list[Member] = []
        self.aligned: dict[str, ArrayInfo] = {}
        self.text_columns: tuple[str, ...] = ()
        self.dtype = ""
        self.array = array
        self._wanted = tuple(aligned)
        self._dtypes: set[str] = set()
        for path, kind in find_files(source, format, exclude):
            self._add(path, kind)
        if self.n_rows == 0:
            raise InputError(f"{self.source} has no rows")
        self._check_hints()
        self._starts, self._first_entry = [0], [0]
        for member in self.members:
            self._starts.append(self._starts[-1] + member.n_rows)
            self._first_entry.append(self._first_entry[-1] + member.shape[0])

    @property
    def n_rows(self) -> int:
        """Return the number of rows of all files."""
        return sum(member.n_rows for member in self.members)

    @property
    def n_entries(self) -> int:
        """Return the number of rows before flattening: of sequences where rows are in sequences."""
        return self._first_entry[-1]

    @property
    def n_features(self) -> int:
        """Return the width of the rows."""
        return self.members[0].shape[-1]

    @property
    def in_sequences(self) -> bool:
        """Return whether the main array has a token axis."""
        return len(self.members[0].shape) == 3

    # -- opening ----------------------------------------

    def _add(self, path: str, kind: str) -> None:
        file = open_file(path, kind, self._hints)
        try:
            arrays = {name: self._hinted(info, "Vui") for name, info in file.arrays.items()}
            name = _choose(path, arrays, self.array)
            _refuse_outside(file, (name, *self._wanted))
            info = arrays[name]
            if self.members:
                self._check_fits(path, info)
            self.array, self.dtype = name, info.dtype
            self._dtypes.add(info.dtype)
            in_all = self.text_columns if self.members else file.text_columns
            self.text_columns = tuple(column for column in in_all if column in file.text_columns)
            member = Member(path, kind, info.shape, file.identity())
            for wanted in self._wanted:
                self._check_aligned(file, wanted, member)
            self.members.append(member)
        finally:
            file.close()

    def _check_fits(self, path: str, info: ArrayInfo) -> None:
        first = self.members[0]
        for what, before, now in (
            ("width", first.shape[-1], info.shape[-1]),
            ("dtype", self.dtype, info.dtype),
            ("dimensions", len(first.shape), len(info.shape)),
        ):
            if before != now:
                raise InputError(
                    f"files of different {what} cannot be mixed: {before} in {first.path}, {now} in {path}"
                )

    def _hinted(self, info: ArrayInfo, kinds: str) -> ArrayInfo:
        """Treat two-byte numbers of these kinds as bfloat16 if the user says so."""
        said = self._hints.dtype is not None and plain_name(self._hints.dtype) == BFLOAT16
        two_bytes = {NAMELESS: "V", "uint16": "u", "int16": "i"}
        return replace(info, dtype=BFLOAT16) if said and two_bytes.get(info.dtype, "-") in kinds else info

    def _check_hints(self) -> None:
        """Refuse wrong statements of the user about the files, which would otherwise be ignored."""
        kinds = " and ".join(dict.fromkeys(member.format for member in self.members))
        dtype, width = self._hints.dtype, self._hints.n_features
        if dtype is not None and plain_name(dtype) not in self._dtypes:
            raise InputError(
                f"dtype={dtype!r} does not fit: {self.source} ({kinds}) holds {self.dtype} and says so itself; "
                "leave it out: it is for raw files and for bfloat16 saved by NumPy"
            )
        if width is not None and width != self.n_features:
            raise InputError(
                f"n_features={width} does not fit: {self.source} ({kinds}) has rows of {self.n_features} and says "
                "so itself; leave it out: it is for raw files"
            )

    def _check_aligned(self, file: SourceFile, name: str, member: Member) -> None:
        natural = file.arrays.get(name)
        if natural is None:
            known = listed(sorted(n for n in file.arrays if n != self.array))
            raise InputError(f"{member.path} has no array `{name}` to align; it has: {known}")
        info = self._hinted(natural, "V")  # integers beside the rows stay integers: labels, token ids
        label = f"`{name}` of {member.path}"
        _refuse_nameless(label, info)
        if not info.is_numbers:
            raise InputError(f"{label} is {info.dtype}; to be aligned it needs to hold numbers or booleans")
        tail = _aligned_tail(info.shape, member)
        if tail is None:
            raise InputError(
                f"{label} has shape {info.shape}; to be aligned with {member.shape} it needs "
                f"one entry per row ({member.n_rows}) or per sequence ({member.shape[0]})"
            )
        if info != natural:
            self._dtypes.add(info.dtype)
        found = ArrayInfo((-1, *tail), "float32" if info.dtype == BFLOAT16 else info.dtype)
        if self.aligned.setdefault(name, found) != found:
            before = self.aligned[name]
            raise InputError(
                f"`{name}` differs between files: {before.dtype} {before.shape[1:]} in {self.members[0].path}, "
                f"{found.dtype} {found.shape[1:]} in {member.path}"
            )

    # -- reading ----------------------------------------

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split rows [start, stop) into (file, first row in it, row after the last in it)."""
        pieces = []
        file = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[file + 1])
            if end > start:
                pieces.append((file, start - self._starts[file], end - self._starts[file]))
            start, file = end, file + 1
        return pieces

    def locate(self, row: int) -> str:
        """Say where a row comes from, for an error message."""
        file, first, _ = self.pieces(row, row + 1)[0]
        member = self.members[file]
        token = f" (sequence {first // member.tokens}, token {first % member.tokens})" if self.in_sequences else ""
        return f"row {first}{token} of {member.path}"

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Read rows [start, stop) of the main array, bfloat16 as its bits.

        Returns
        -------
        ndarray of shape (stop - start, n_features)
        """
        if out is None:
            out = np.empty((stop - start, self.n_features), stored_dtype(self.dtype))
        done = 0
        for file, first, last in self.pieces(start, stop):
            target = out[done : done + last - first]
            self._file(file).read_rows(str(self.array), first, last, target)
            done += last - first
        return out

    def spans(self, start: int, stop: int) -> list[Span] | None:
        """Return where rows [start, stop) of the main array are as plain bytes; None if some need decoding."""
        spans: list[Span] = []
        for file, first, last in self.pieces(start, stop):
            found = self._file(file).spans(str(self.array), first, last)
            if found is None:
                return None
            spans += found
        return spans

    def member_spans(self) -> Iterator[tuple[Member, list[Span] | None]]:
        """Yield every file and where its rows of the main array are; None if they need decoding."""
        for index, member in enumerate(self.members):
            yield member, self._file(index).spans(str(self.array), 0, member.n_rows)

    def read_aligned(self, name: str, start: int, stop: int) -> Array:
        """Read the entries of an aligned array for rows [start, stop), bfloat16 widened to float32."""
        parts = [self._read_entries(name, *piece) for piece in self.pieces(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def first_tokens(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Mark the rows [start, stop) that are the first token of their sequence."""
        parts = [np.arange(a, b) % self.members[f].tokens == 0 for f, a, b in self.pieces(start, stop)]
        return np.concatenate(parts)

    def entries(self, start: int, stop: int) -> Array:
        """Return for rows [start, stop) the number of their entry: of their sequence, or their own."""
        parts = [
            self._first_entry[f] + np.arange(a, b, dtype=np.int64) // self.members[f].tokens
            for f, a, b in self.pieces(start, stop)
        ]
        return np.concatenate(parts)

    def read_texts(self, column: str, step: int) -> Iterator[str]:
        """Yield the texts of a column of all files, read about `step` at a time."""
        for index in range(len(self.members)):
            for texts in self._file(index).read_texts(column, step):
                yield from texts

    def close(self) -> None:
        """Close every file."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def _read_entries(self, name: str, file: int, first: int, last: int) -> Array:
        member, source = self.members[file], self._file(file)
        info, tail = self._hinted(source.arrays[name], "V"), self.aligned[name].shape[1:]
        per_token = _is_per_token(info.shape, member)
        tokens = 1 if info.shape[0] == member.n_rows and not per_token else member.tokens
        low, high = first // tokens, -(-last // tokens)
        block = source.read_items(name, low, high)
        if per_token:
            block = block.reshape(-1, *tail)
        elif tokens > 1:
            block = np.repeat(block, tokens, axis=0)
        block = block[first - low * tokens : last - low * tokens]
        return widen_bfloat16(block) if info.dtype == BFLOAT16 else block

    def _file(self, index: int) -> SourceFile:
        if index not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            member = self.members[index]
            self._open[index] = open_file(member.path, member.format, self._hints)
        return self._open[index]


def _is_per_token(shape: tuple[int, ...], member: Member) -> bool:
    return len(member.shape) == 3 and shape[:2] == member.shape[:2]


def _aligned_tail(shape: tuple[int, ...], member: Member) -> tuple[int, ...] | None:
    """Return the shape of one entry of an aligned array, or None when it does not fit."""
    if _is_per_token(shape, member):
        return shape[2:]
    if shape and shape[0] in (member.n_rows, member.shape[0]):
        return shape[1:]
    return None


def _choose(path: str, arrays: dict[str, ArrayInfo], wanted: str | None) -> str:
    """Return the name of the main array of a file."""
    if wanted is not None and wanted in arrays:
        return _require_rows(path, arrays, wanted)
    candidates = [name for name, info in arrays.items() if info.may_be_rows or info.has_layers]
    known = listed((f"{n or 'unnamed'} {i.dtype} {i.shape}" for n, i in arrays.items()), "nothing")
    if wanted is not None:
        raise InputError(f"{path} has no array `{wanted}`; it has: {known}")
    if "activations" in candidates:
        return _require_rows(path, arrays, "activations")
    if len(candidates) == 1:
        return _require_rows(path, arrays, candidates[0])
    if len(arrays) == 1:
        return _require_rows(path, arrays, next(iter(arrays)))
    if not candidates:
        raise InputError(f"{path} has no 2-D or 3-D array of floating-point numbers; it has: {known}")
    raise InputError(f"{path} has several arrays; name one with array=NAME: {known}")


def _require_rows(path: str, arrays: dict[str, ArrayInfo], name: str) -> str:
    info, label = arrays[name], f"array `{name}` of {path}" if name else path
    _refuse_nameless(label, info)
    if info.has_layers:
        known = listed(map(str, numbers_of(info)))
        raise InputError(
            f"{label} has shape {info.shape}, which is (example, layer, token, feature); choose one with layer=N: "
            f"{known}"
        )
    if not info.is_rows:
        raise InputError(
            f"{label} is {info.dtype} of shape {info.shape}; need float16, float32, float64 or bfloat16 of shape "
            "(n_samples, n_features) or (sequence, token, feature), with one feature or more"
        )
    return name


def _refuse_outside(file: SourceFile, names: Sequence[str]) -> None:
    """Refuse arrays that would make an import read files that were not named."""
    for name in names:
        if name in file.outside:
            raise InputError(
                f"the values of `{name}` lie outside of {file.path}, in {file.outside[name]}; import that file "
                "itself, or copy the values into one file"
            )


def _refuse_nameless(label: str, info: ArrayInfo) -> None:
    if info.dtype == NAMELESS:
        raise InputError(
            f"{label} holds two-byte numbers without a name (bfloat16 saved by NumPy looks like this); "
            "say dtype='bfloat16' if that is what they are"
        )
