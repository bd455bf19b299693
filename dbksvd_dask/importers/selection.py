"""Which rows are kept: by mask, by place in the sequence, by value, by norm.

Rules that depend on values need a pass over the data before the first row is written. The pass goes block by
block, stores its findings on disk and can be interrupted like the import itself.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import InputError
from dbksvd_dask.importers.base import Hints
from dbksvd_dask.importers.collection import Collection
from dbksvd_dask.importers.numpy_files import open_npy
from dbksvd_dask.importers.registry import find_files, natural_mask
from dbksvd_dask.importers.values import exact_median, nonfinite_rows, row_norms
from dbksvd_dask.plan.units import turned
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.paths import PathLike

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rules:
    """What to leave out.

    Attributes
    ----------
    mask : str, optional
        A .npy file with one entry per row, or per sequence and token; rows with zero or False are left out.
    mask_array : str, optional
        The same from an array or column of the files themselves, such as an attention mask.
    drop_first_token : bool
        Leave out the first token of each sequence.
    drop_outliers : float, optional
        Leave out rows whose norm exceeds this many times the median norm of the other rules' rows; rows that are
        not finite are left to `nonfinite`.
    nonfinite : {"error", "drop", "keep"}
        What to do about rows with NaN or infinite values.
    """

    mask: str | None = None
    mask_array: str | None = None
    drop_first_token: bool = False
    drop_outliers: float | None = None
    nonfinite: str = "error"

    def __post_init__(self) -> None:
        if self.nonfinite not in ("error", "drop", "keep"):
            raise InputError(f"nonfinite={self.nonfinite!r} is not known; use 'error', 'drop' or 'keep'")
        if self.drop_outliers is not None and not self.drop_outliers > 1:
            raise InputError(f"drop_outliers={self.drop_outliers}; need a factor above 1, such as 10")

    @property
    def keep_all(self) -> bool:
        """Return whether no rule can leave a row out."""
        return not (self.mask or self.mask_array or self.drop_first_token or self.reads_rows)

    @property
    def reads_rows(self) -> bool:
        """Return whether a rule depends on the values of rows."""
        return self.drop_outliers is not None or self.nonfinite == "drop"


def with_mask_of_layout(
    rules: Rules, source: PathLike | Sequence[PathLike], format: str | None, exclude: str, link: bool
) -> Rules:
    """Add the mask that files of a known layout have, unless another one is given.

    Parameters
    ----------
    rules : Rules
    source, format, exclude
        As of `find_files`.
    link : bool
        Whether rows are to be linked, which leaves none out.
    """
    files = [] if rules.mask_array or rules.mask else find_files(source, format, exclude)
    mask = natural_mask(files)
    if mask is not None and link:
        raise InputError(
            f"`{mask}` of {files[0][0]} says which rows count, and a linked store has all rows of its files; "
            "leave out link=True to write a copy, or give format='safetensors' to link all rows"
        )
    return rules if mask is None else replace(rules, mask_array=mask)


class Selection:
    """The kept rows of a collection, in order.

    Parameters
    ----------
    rows : Collection
        The files.
    rules : Rules
        What to leave out.
    folder : str
        Where the findings of the pass are stored.
    block_rows : int
        Rows of one block of the pass.
    """

    def __init__(self, rows: Collection, rules: Rules, folder: str, block_rows: int) -> None:
        self.rows, self.rules, self.folder, self.block_rows = rows, rules, folder, block_rows
        self.dropped: dict[str, int] = {}
        self._limit = np.float32(np.inf)
        self._mask = _open_mask(rules.mask, rows) if rules.mask else None
        if rules.drop_first_token and not rows.in_sequences:
            raise InputError(
                f"{rows.source} holds rows, not sequences of tokens: there is no first token to drop; "
                "need shape (sequence, token, feature)"
            )
        self._ends: npt.NDArray[np.int64] | None = None

    @property
    def n_blocks(self) -> int:
        """Return the number of blocks of the pass; 0 when no rule needs one."""
        return 0 if self.rules.keep_all else -(-self.rows.n_rows // self.block_rows)

    @property
    def n_kept(self) -> int:
        """Return the number of kept rows."""
        return self.rows.n_rows if self._ends is None else int(self._ends[-1])

    # -- the pass ----------------------------------------

    def scan(self, on_block: Callable[[int], None] | None = None, begin: int = 0) -> int:
        """Scan every block that is not scanned yet; return how many.

        Parameters
        ----------
        on_block : callable, optional
            Called with the number of blocks that are done.
        begin : int
            The block to begin with. Processes that begin at different ones share the work.
        """
        scanned = 0
        for count, block in enumerate(turned(range(self.n_blocks), begin)):
            scanned += self.scan_block(block)
            if on_block is not None:
                on_block(count + 1)
        if self.n_blocks:
            ledger = atomic.Ledger(self.folder, "block")
            self._gather([ledger.read(block) for block in range(self.n_blocks)])
        return scanned

    def missing_blocks(self) -> list[int]:
        """Return the blocks that are not scanned yet."""
        ledger = atomic.Ledger(self.folder, "block")
        return [block for block in range(self.n_blocks) if not self._is_scanned(ledger, block)]

    def scan_block(self, block: int) -> bool:
        """Scan one block unless some process already has; return whether it was scanned now."""
        ledger = atomic.Ledger(self.folder, "block")
        if self._is_scanned(ledger, block):
            return False
        if os.path.isdir(ledger.file(block)):  # damaged: a file cannot take its place
            ledger.unmark(block)
        # a marker that has appeared meanwhile stays: another process has scanned the block, too, and relies on it
        ledger.mark(block, self._scan_block(block))
        return True

    def _is_scanned(self, ledger: atomic.Ledger, block: int) -> bool:
        """Return whether the findings of a block exist as they were written."""
        try:
            checksums = ledger.read(block)["crc32"]
            found = {name: zlib.crc32(paths.read_bytes(paths.join(self.folder, name))) for name in checksums}
        except OSError:  # of a part that was not done, or is damaged
            return False
        return bool(found == checksums)

    def _scan_block(self, block: int) -> dict[str, Any]:
        start = block * self.block_rows
        stop = min(start + self.block_rows, self.rows.n_rows)
        keep, dropped = self._cheap_rules(start, stop)
        written: dict[str, int] = {}
        if self.rules.reads_rows:
            rows = self.rows.read(start, stop)
            bad = nonfinite_rows(rows, self.rows.dtype)
            if self.rules.nonfinite == "drop":
                dropped["nonfinite"] = int(keep[bad].sum())
                keep[bad] = False
            if self.rules.drop_outliers is not None:
                norms = row_norms(rows, self.rows.dtype)
                norms[bad] = np.nan  # the norm of an infinite row; that of a finite one may overflow to infinity
                written |= self._save(f"norms-{block:08d}.npy", np.where(keep, norms, np.float32(-1)))
        written |= self._save(f"keep-{block:08d}.npy", np.packbits(keep))
        return {"kept": int(keep.sum()), "dropped": dropped, "crc32": written}

    def _cheap_rules(self, start: int, stop: int) -> tuple[Mask, dict[str, int]]:
        keep = np.ones(stop - start, bool)
        dropped = {}
        masks: dict[str, Mask] = {}
        if self._mask is not None:
            masks["mask"] = self._mask.read(start, stop)
        if self.rules.mask_array:
            masks["mask_array"] = self.rows.read_aligned(self.rules.mask_array, start, stop) != 0
        if self.rules.drop_first_token:
            masks["first_token"] = ~self.rows.first_tokens(start, stop)
        for name, mask in masks.items():
            dropped[name] = int((keep & ~mask).sum())
            keep &= mask
        return keep, dropped

    def _gather(self, findings: list[dict[str, Any]]) -> None:
        for finding in findings:
            for name, count in finding["dropped"].items():
                self.dropped[name] = self.dropped.get(name, 0) + count
        kept = np.array([finding["kept"] for finding in findings], np.int64)
        if self.rules.drop_outliers is not None and kept.sum():
            # without NaN and without rows that were left out
            median = exact_median([n[n >= 0] for n in map(self._norms, range(self.n_blocks))])
            self._limit = np.float32(self.rules.drop_outliers * median)
            final = np.array([self._keep(block).sum() for block in range(self.n_blocks)], np.int64)
            self.dropped["outliers"] = int(kept.sum() - final.sum())
            kept = final
        self._ends = np.cumsum(kept)
        if self.n_kept == 0:
            reasons = ", ".join(f"{name} {count}" for name, count in self.dropped.items())
            raise InputError(f"no row of {self.rows.source} is left: all {self.rows.n_rows} dropped ({reasons})")

    def _norms(self, block: int) -> npt.NDArray[np.float32]:
        return self._load(f"norms-{block:08d}.npy")

    def _keep(self, block: int) -> Mask:
        rows = min(self.block_rows, self.rows.n_rows - block * self.block_rows)
        keep = np.unpackbits(self._load(f"keep-{block:08d}.npy"), count=rows).astype(bool)
        if self.rules.drop_outliers is not None:
            # NaN stays: rows that are not finite have a rule of their own
            keep &= ~(self._norms(block) > self._limit)
        return keep

    def _save(self, name: str, array: npt.NDArray[Any]) -> dict[str, int]:
        """Write a finding; return its name and checksum."""
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        atomic.write_bytes(paths.join(self.folder, name), content.getvalue())
        return {name: zlib.crc32(content.getvalue())}

    def _load(self, name: str) -> npt.NDArray[Any]:
        content = paths.read_bytes(paths.join(self.folder, name))
        loaded: npt.NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        return loaded

    # -- reading what is kept ----------------------------------------

    def source_ranges(self, start: int, stop: int) -> list[tuple[int, int, Mask | None]]:
        """Return which rows of the files are the kept rows [start, stop).

        Returns
        -------
        list of (first row, row after the last, mask or None)
            Ranges of rows of the collection, and which rows in each are kept (None: all).
        """
        if self._ends is None:
            return [(start, stop, None)]
        ranges: list[tuple[int, int, Mask | None]] = []
        block = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            before = int(self._ends[block - 1]) if block else 0
            end = min(stop, int(self._ends[block]))
            if end > start:
                keep = self._keep(block)
                places = np.flatnonzero(keep)[start - before : end - before]
                low, high = int(places[0]), int(places[-1]) + 1
                offset = block * self.block_rows
                ranges.append((offset + low, offset + high, keep[low:high]))
            start, block = end, block + 1
        return ranges

    def close(self) -> None:
        """Close the mask file."""
        if self._mask is not None:
            self._mask.close()

    def describe(self) -> dict[str, Any]:
        """Return the rules that were given and the rows each left out, for the provenance of the store."""
        rules = {k: v for k, v in asdict(self.rules).items() if v not in (None, False)}
        return {"rules": rules, "dropped": self.dropped}


class _MaskFile:
    """A .npy file with one entry per row, read as booleans."""

    def __init__(self, path: str, rows: Collection) -> None:
        self._file = open_npy(path, Hints())
        info = self._file.arrays[""]
        size = int(np.prod(info.shape, dtype=np.int64))
        if size != rows.n_rows or not info.shape or not info.is_mask:
            raise InputError(
                f"the mask {path} is {info.dtype} of shape {info.shape}; need {rows.n_rows} booleans or integers, "
                f"one per row of {rows.source}"
            )
        self._per_item = size // info.shape[0]

    def read(self, start: int, stop: int) -> Mask:
        first, last = start // self._per_item, -(-stop // self._per_item)
        flat = self._file.read_items("", first, last).reshape(-1)
        mask: Mask = flat[start - first * self._per_item : stop - first * self._per_item] != 0
        return mask

    def close(self) -> None:
        self._file.close()


def _open_mask(path: str, rows: Collection) -> _MaskFile:
    if not paths.exists(path):
        raise InputError(f"no mask file at {path}; need a .npy file with one entry per row")
    return _MaskFile(path, rows)
