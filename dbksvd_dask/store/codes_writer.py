"""Writing a codes store: unit by unit, in any order, by any number of threads, processes and machines.

A unit is a run of whole chunks, fixed by the activation store alone. Its chunks are written first, then its
sums, its marker last; each file is there whole or not at all, so a unit can be written twice without harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zarr

import dbksvd_dask
from dbksvd_dask._safe_text import redacted_values
from dbksvd_dask.errors import JobError, MismatchError, StoreError, brief
from dbksvd_dask.evaluate.sums import CodeSums
from dbksvd_dask.kernels.moments import merge_moments
from dbksvd_dask.plan.units import unit_chunks
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.codes import CODES_FORMAT, CODES_VERSION, STATISTIC_DIMS, STATISTICS, statistics_checksums
from dbksvd_dask.store.dictionary import ATTRIBUTES_CRC, attributes_checksum
from dbksvd_dask.store.layout import PARTS, require_layout
from dbksvd_dask.store.reader import CHECKSUMS

ARRAYS = ("atom", "coefficient")


@dataclass(frozen=True)
class CodesPlan:
    """What a codes store will hold, written first.

    Attributes
    ----------
    params : how samples become codes: k, encoder, nonneg, refit, min_coefficient, rtol
    dictionary, store : fingerprints
    about : where both lay and what is known of them; not compared between runs
    """

    n_samples: int
    n_features: int
    n_atoms: int
    chunk_rows: int
    n_top: int
    coefficient_dtype: str
    params: dict[str, Any]
    dictionary: str
    store: str
    about: dict[str, Any]

    @property
    def k(self) -> int:
        """Slots of a sample."""
        return int(self.params["k"])

    @property
    def n_chunks(self) -> int:
        """Chunks along the samples."""
        return -(-self.n_samples // self.chunk_rows)

    @property
    def unit_rows(self) -> int:
        """Rows of a unit; the last may have fewer."""
        return unit_chunks(self.n_chunks) * self.chunk_rows

    @property
    def n_units(self) -> int:
        """Units along the samples."""
        return -(-self.n_samples // self.unit_rows)

    def unit_bounds(self, unit: int) -> tuple[int, int]:
        """First row of a unit and the row after its last."""
        return unit * self.unit_rows, min((unit + 1) * self.unit_rows, self.n_samples)

    def part_units(self, part: int, n_parts: int) -> range:
        """Units of part `part` of 1..n_parts: neighbours, as even as can be."""
        return range((part - 1) * self.n_units // n_parts, part * self.n_units // n_parts)

    def nbytes(self, n_samples: int) -> int:
        """Bytes of the codes of some samples."""
        return n_samples * self.k * (4 + np.dtype(self.coefficient_dtype).itemsize)

    def identity(self) -> dict[str, Any]:
        """What must be the same for two runs to write one store, under the names users know."""
        out = asdict(self)
        del out["about"]
        return {**out.pop("params"), **out}

    @classmethod
    def read(cls, path: str) -> CodesPlan:
        """Read the plan of a store that is being written."""
        try:
            return cls(**atomic.read_sealed(path))
        except TypeError as error:
            raise StoreError(f"{path} does not describe codes: {brief(error)}") from error

    @classmethod
    def of_store(cls, attributes: dict[str, Any]) -> CodesPlan:
        """Give the plan of a finished store from its attributes."""
        names = ("n_samples", "n_features", "n_atoms", "chunk_rows", "n_top", "coefficient_dtype", "params")
        prints = {name: attributes[name]["fingerprint"] for name in ("dictionary", "store")}
        return cls(**{name: attributes[name] for name in names}, **prints, about={})

    def require_same(self, other: CodesPlan, where: str) -> None:
        """Refuse a plan that would give other codes, naming the first difference and both values."""
        mine, theirs = self.identity(), other.identity()
        for name in mine:
            if mine[name] != theirs.get(name):
                raise MismatchError(
                    f"{where} was begun with {name}={theirs.get(name)!r}, this run has {name}={mine[name]!r}; use "
                    "the same to go on, another output, or --force to begin again"
                )


class UnitWritten(NamedTuple):
    """What a task reports of a unit it has written."""

    unit: int
    n_samples: int


class CodesWriter:
    """Writes a codes store; small and picklable, so that it travels to whichever worker encodes a unit."""

    def __init__(self, path: str, plan: CodesPlan) -> None:
        self.path = paths.normalise(path)
        self.plan = plan
        self.work = atomic.aside(self.path)
        self._parts = paths.join(self.work, PARTS)

    @property
    def _ledger(self) -> atomic.Ledger:
        return atomic.Ledger(self._parts, "unit")

    # -- begin ----------------------------------------

    @classmethod
    def begun(cls, path: str) -> CodesWriter | None:
        """Open the unfinished store of that name, if there is one."""
        described = paths.join(atomic.aside(path), PARTS, "plan.json")
        if not paths.exists(described):
            return None
        return cls(path, CodesPlan.read(described))

    def begin(self) -> None:
        """Make the empty store aside, once, however many processes begin at the same time."""
        if paths.is_remote(self.work):
            self._create(self.work)
            return
        os.makedirs(os.path.dirname(os.path.abspath(self.work)), exist_ok=True)
        scratch = f"{self.work}.{os.uname().nodename}-{os.getpid()}.tmp"
        paths.remove(scratch)
        try:
            self._create(scratch)
            # a folder that is not empty cannot be replaced: the first one in stays
            with contextlib.suppress(OSError):
                os.rename(scratch, self.work)
        finally:
            paths.remove(scratch)
        if not paths.exists(paths.join(self._parts, "plan.json")):
            raise StoreError(f"{self.work} is in the way and is no unfinished encode; remove it")

    def _head(self) -> dict[str, Any]:
        """Attributes of the store while it is not complete."""
        plan = self.plan
        head = {
            "format": CODES_FORMAT,
            "format_version": CODES_VERSION,
            "package_version": dbksvd_dask.__version__,
            "complete": False,
            "n_samples": plan.n_samples,
            "n_features": plan.n_features,
            "n_atoms": plan.n_atoms,
            "k": plan.k,
            "chunk_rows": plan.chunk_rows,
            "n_top": plan.n_top,
            "coefficient_dtype": plan.coefficient_dtype,
            "params": plan.params,
            "dictionary": {"fingerprint": plan.dictionary, **plan.about.get("dictionary", {})},
            "store": {"fingerprint": plan.store, **plan.about.get("store", {})},
        }
        return redacted_values(head)

    def _create(self, folder: str) -> None:
        plan = self.plan
        with paths.explain_refusal(folder):
            store = paths.zarr_store(folder, read_only=False)
            group = zarr.create_group(store=store, zarr_format=3, attributes=self._head())
        for name, dtype in zip(ARRAYS, ("int32", plan.coefficient_dtype), strict=True):
            group.create_array(
                name,
                shape=(plan.n_samples, plan.k),
                chunks=(plan.chunk_rows, plan.k),
                dtype=dtype,
                compressors=None,
                filters=None,
                fill_value=0,
                dimension_names=("sample", "slot"),
                chunk_key_encoding={"name": "default", "separator": "."},
                config={"write_empty_chunks": True, "order": "C"},
            )
        if not paths.is_remote(folder):
            os.makedirs(paths.join(folder, PARTS), exist_ok=True)
        atomic.write_sealed(paths.join(folder, PARTS, "plan.json"), asdict(plan))

    # -- units ----------------------------------------

    @property
    def complete(self) -> bool:
        """Tell whether everything is written and only the publishing is left."""
        attributes = dict(paths.open_zarr(self.work).attrs)
        if attributes.get("complete") and attributes.get(ATTRIBUTES_CRC) != attributes_checksum(attributes):
            raise StoreError(
                f"{paths.join(self.work, 'zarr.json')} is damaged: its attributes are not what was written; "
                "begin again with --force"
            )
        return bool(attributes.get("complete"))

    def done(self) -> list[int]:
        """Return the units that are written."""
        return self._ledger.parts()

    def missing(self) -> list[int]:
        """Return the units that are still to be written."""
        return [] if self.complete else self._ledger.missing(self.plan.n_units)

    def write_unit(
        self, unit: int, atom: npt.NDArray[np.int32], coefficient: npt.NDArray[Any], sums: CodeSums
    ) -> UnitWritten:
        """Write the chunks of a unit, then its sums, then its marker.

        Parameters
        ----------
        unit : int
        atom, coefficient : ndarray of shape (rows of the unit, k), of the dtypes of the store
        sums : over the same rows
        """
        rows, checksums = self.plan.chunk_rows, []
        first = unit * (self.plan.unit_rows // rows)
        for i, a in enumerate(range(0, len(atom), rows)):
            blocks = (np.ascontiguousarray(array[a : a + rows]) for array in (atom, coefficient))
            checksums.append([self._write_block(n, first + i, b) for n, b in zip(ARRAYS, blocks, strict=True)])
        atomic.write_bytes(self._sums_path(unit), sums.to_bytes())
        # not Ledger.mark, which makes its folder: a task that ends after the work was discarded must not
        atomic.write_sealed(self._ledger.file(unit), {"rows": len(atom), "crc32": checksums})
        return UnitWritten(unit, len(atom))

    def _write_block(self, name: str, chunk: int, block: npt.NDArray[Any]) -> int:
        pad = bytes((self.plan.chunk_rows - len(block)) * block[0].nbytes)
        # scratch files of a killed run stay in the folder that goes when the store is published
        atomic.write_bytes(paths.join(self.work, name, f"c.{chunk}.0"), block, pad, folder=self._parts)
        return zlib.crc32(block.reshape(-1).view(np.uint8).data)

    def _sums(self, unit: int) -> CodeSums:
        try:
            return CodeSums.from_bytes(paths.read_bytes(self._sums_path(unit)))
        except Exception as error:  # an archive may fail with anything
            raise StoreError(
                f"{self._sums_path(unit)} is damaged ({brief(error)}); remove {self._ledger.file(unit)} to encode "
                "these samples again"
            ) from error

    def _sums_path(self, unit: int) -> str:
        return paths.join(self._parts, f"sums-{unit:08d}.npz")

    def discard(self) -> None:
        """Throw the unfinished work away, even while tasks of this process still write to it.

        It is renamed first: a late task then finds no folder to write to, and nothing new can appear in what is
        being removed. On a remote, which has no rename, the work stays.
        """
        if paths.is_remote(self.work):
            return
        doomed = f"{self.work}.{os.uname().nodename}-{os.getpid()}-discarded.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.work, doomed)
        paths.remove(doomed)

    # -- which parts were asked for ----------------------------------------

    def note_parts(self, n_parts: int) -> None:
        """Remember in how many parts the job is done, for what `finish` says is missing."""
        atomic.write_sealed(paths.join(self._parts, "split.json"), {"n_parts": n_parts})

    def describe_missing(self) -> str:
        """Name what is not encoded, in parts if the job was split, and in samples."""
        missing = set(self.missing())
        spans = [self.plan.unit_bounds(unit) for unit in sorted(missing)]
        rows = f"{sum(b - a for a, b in spans)} of {self.plan.n_samples} samples"
        noted = paths.join(self._parts, "split.json")
        if not paths.exists(noted):
            return f"Chunks not encoded: {atomic.describe_parts(missing)} ({rows})"
        n = int(atomic.read_sealed(noted)["n_parts"])
        parts = [i for i in range(1, n + 1) if missing & set(self.plan.part_units(i, n))]
        return f"Parts not encoded: {atomic.describe_parts(parts)} of {n} ({rows})"

    # -- finish ----------------------------------------

    def finish(self, *, overwrite: bool = False) -> None:
        """Merge the sums in the order of the samples, mark the store complete and publish it.

        Raises
        ------
        JobError
            When units are missing; it lists them.
        """
        if not self.complete:
            if self.missing():
                raise JobError(f"{self.path} cannot be finished. {self.describe_missing()}; encode them first")
            self._complete()
        self._sweep()
        if self.work != self.path:
            atomic.publish(self.work, self.path, overwrite=overwrite)
        paths.remove(paths.join(self.path, PARTS))

    def _complete(self) -> None:
        units = range(self.plan.n_units)
        table = np.array([row for unit in units for row in self._ledger.read(unit)["crc32"]], np.uint32)
        sums = merge_moments(self._sums(unit) for unit in units)
        group = self._group()
        self._require_arrays(group)
        _put(group, CHECKSUMS, table, ("chunk", "array"), {"arrays": list(ARRAYS)})
        below = group.require_group(STATISTICS)
        gathered = statistics(sums)
        below.attrs.update({"l1_sum": sums.codes.l1_sum, CHECKSUMS: statistics_checksums(gathered)})
        for name, values in gathered.items():
            _put(below, name, values, STATISTIC_DIMS[name], {})
        identity = json.dumps(self.plan.identity(), sort_keys=True).encode()
        content_id = hashlib.sha256(identity + table.astype("<u4").tobytes()).hexdigest()[:32]
        added = {"metrics": sums.metrics(), "content_id": content_id}
        # not what the unfinished store says of itself, which nothing has checked
        head = {**self._head(), **added}
        group.attrs.put({**head, ATTRIBUTES_CRC: attributes_checksum({**head, "complete": True})})
        if not paths.is_remote(self.work):
            _sync(self.work)
        group.attrs.update({"complete": True})

    def _group(self) -> zarr.Group:
        with paths.explain_metadata(self.work):
            return zarr.open_group(store=paths.zarr_store(self.work, read_only=False), mode="r+")

    def require_sound(self) -> None:
        """Refuse to go on with an unfinished store whose metadata are not those it was begun with."""
        if not self.complete:
            self._require_arrays(self._group())

    def _require_arrays(self, group: zarr.Group) -> None:
        """Refuse to publish chunks under metadata that do not describe them."""
        for name, dtype in zip(ARRAYS, ("int32", self.plan.coefficient_dtype), strict=True):
            array, place = paths.get_array(self.work, group, name), paths.join(self.work, name)
            if array is None or array.shape[0] != self.plan.n_samples:
                raise StoreError(
                    f"{place} is damaged: it is not the array it was begun as; begin again with --force"
                )
            require_layout(place, array, (self.plan.k,), np.dtype(dtype), self.plan.chunk_rows, True)

    def _sweep(self) -> None:
        """Remove markers, sums and whatever scratch files and folders a killed run left.

        The plan stays until the store is published, to tell what it is.
        """
        for name in paths.list_names(self._parts):
            if name != "plan.json":
                paths.remove(paths.join(self._parts, name))
        if paths.is_remote(self.work):
            return
        for folder, _, names in os.walk(self.work):
            for name in names:
                if name.endswith(".partial"):  # Zarr's own
                    os.unlink(os.path.join(folder, name))
        home, name = os.path.split(os.path.abspath(self.work))
        for found in os.listdir(home):
            if found.startswith(f"{name}.") and found.endswith(".tmp"):
                paths.remove(os.path.join(home, found))


def statistics(sums: CodeSums) -> dict[str, npt.NDArray[Any]]:
    """Give the sums over all samples as the arrays of the group `statistics`."""
    return {
        "count": sums.codes.n_active,
        "positive_count": sums.codes.n_positive,
        "coefficient_sum": sums.codes.total,
        "coefficient_square_sum": sums.codes.square,
        "abs_max": sums.codes.largest,
        "top_sample": sums.largest.sample,
        "top_coefficient": sums.largest.coefficient,
        "l0_histogram": sums.codes.l0_histogram,
        "error_histogram": sums.reconstruction.error_histogram,
    }


def _put(
    group: zarr.Group, name: str, values: npt.NDArray[Any], dims: tuple[str, ...], attributes: dict[str, Any]
) -> None:
    group.create_array(
        name,
        data=values,
        chunks=values.shape,
        compressors=None,
        overwrite=True,
        dimension_names=dims,
        attributes=attributes,
        config={"write_empty_chunks": True, "order": "C"},
    )


def _sync(folder: str) -> None:
    """Force what Zarr wrote to the disk before the store calls itself complete."""
    for name in ("", CHECKSUMS, STATISTICS, *(f"{STATISTICS}/{n}" for n in STATISTIC_DIMS)):
        atomic.fsync_path(os.path.join(folder, name))
        with contextlib.suppress(FileNotFoundError):
            atomic.fsync_path(os.path.join(folder, name, "zarr.json"))
