"""Writing a codes store: unit by unit, in any order, by any number of threads, processes and machines.

A unit is a run of whole chunks, fixed by the activation store alone. Its chunks are written first, then its
sums, its marker last; see `partial`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import dbksvd_dask
from dbksvd_dask.base.safe_text import redacted_values
from dbksvd_dask.errors import JobError, MismatchError, StoreError, brief
from dbksvd_dask.evaluate.sums import CodeSums, Extremes
from dbksvd_dask.kernels.moments import merge_moments
from dbksvd_dask.plan.units import part_range, parts_with, unit_chunks
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.arrays import ArraySpec, put_array
from dbksvd_dask.store.checksums import CHECKSUMS
from dbksvd_dask.store.codes import CODES_FORMAT, CODES_VERSION, STATISTIC_DIMS, STATISTICS, statistics_checksums
from dbksvd_dask.store.dictionary import ATTRIBUTES_CRC, attributes_checksum
from dbksvd_dask.store.partial import BEGIN_AGAIN, Partial, begun_plan, content_id


@dataclass(frozen=True)
class CodesPlan:
    """What a codes store will hold, written first.

    Attributes
    ----------
    params : how samples become codes: k, encoder, nonneg, refit, min_coefficient, rtol
    dictionary, store : fingerprints
    about : where both were and what is known of them; not compared between runs
    pieces : chunks of activations that make one chunk of codes, which is then a unit; 1 where files cost nothing
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
    pieces: int = 1

    @property
    def k(self) -> int:
        """Slots of a sample."""
        return int(self.params["k"])

    @property
    def n_chunks(self) -> int:
        """Chunks along the samples."""
        return -(-self.n_samples // self.chunk_rows)

    @property
    def read_rows(self) -> int:
        """Rows that are read and encoded at a time."""
        return self.chunk_rows // self.pieces

    @property
    def unit_rows(self) -> int:
        """Rows of a unit; the last may have fewer."""
        return self.chunk_rows if self.pieces > 1 else unit_chunks(self.n_chunks) * self.chunk_rows

    @property
    def n_units(self) -> int:
        """Units along the samples."""
        return -(-self.n_samples // self.unit_rows)

    def unit_bounds(self, unit: int) -> tuple[int, int]:
        """Return the first row of a unit and the row after its last."""
        return unit * self.unit_rows, min((unit + 1) * self.unit_rows, self.n_samples)

    def part_units(self, part: int, n_parts: int) -> range:
        """Return the units of part `part` of 1..n_parts: neighbours, as evenly split as possible."""
        return part_range(self.n_units, part, n_parts)

    def arrays(self) -> list[ArraySpec]:
        """Describe the two arrays that are written in chunks."""
        dtypes = {"atom": "int32", "coefficient": self.coefficient_dtype}
        return [ArraySpec(name, dtype, (self.k,), ("slot",)) for name, dtype in dtypes.items()]

    def nbytes(self, n_samples: int) -> int:
        """Return the bytes of the codes of some samples."""
        return n_samples * self.k * (4 + np.dtype(self.coefficient_dtype).itemsize)

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for two runs to write one store, under the names users know."""
        out = asdict(self)
        del out["about"], out["pieces"]
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
        """Return the plan of a finished store from its attributes."""
        names = ("n_samples", "n_features", "n_atoms", "chunk_rows", "n_top", "coefficient_dtype", "params")
        prints = {name: attributes[name]["fingerprint"] for name in ("dictionary", "store")}
        about = {"dictionary": attributes["dictionary"]}
        return cls(**{name: attributes[name] for name in names}, **prints, about=about)

    def require_same(self, other: CodesPlan, where: str) -> None:
        """Refuse a plan that would give other codes, naming the first difference and both values."""
        mine, theirs = self.identity(), other.identity()
        for name in mine:
            if mine[name] != theirs.get(name):
                raise MismatchError(
                    f"{where} was begun with {name}={theirs.get(name)!r}{other._when(name)}, this run has "
                    f"{name}={mine[name]!r}{self._when(name)}; use the same to resume, another output, or "
                    "force=True to begin again"
                )

    def _when(self, name: str) -> str:
        """Say how long the dictionary had been fitted: its fingerprint means nothing to people."""
        iteration = self.about.get("dictionary", {}).get("iteration") if name == "dictionary" else None
        return "" if iteration is None else f" (iteration {iteration})"


class UnitWritten(NamedTuple):
    """What a task reports of a unit it has written."""

    unit: int
    n_samples: int


class CodesWriter:
    """Writes a codes store; small and picklable, so that it can be sent to the workers."""

    def __init__(self, path: str, plan: CodesPlan) -> None:
        self.plan = plan
        self._partial = Partial(
            path,
            plan.arrays(),
            plan.n_samples,
            plan.chunk_rows,
            part="unit",
            part_chunks=plan.unit_rows // plan.chunk_rows,
            durable=True,  # another machine may finish, and it cannot force files to the disk of this one
        )
        self.path, self.work = self._partial.path, self._partial.work

    # -- begin ----------------------------------------

    @classmethod
    def begun(cls, path: str) -> CodesWriter | None:
        """Open the unfinished store of that name, if there is one."""
        described = begun_plan(path)
        return None if described is None else cls(path, CodesPlan.read(described))

    def begin(self) -> None:
        """Make the empty store aside, once, however many processes begin at the same time."""
        self._partial.begin(self._head(), asdict(self.plan))

    def _head(self) -> dict[str, Any]:
        """Return the attributes of the store while it is not complete."""
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

    # -- units ----------------------------------------

    @property
    def complete(self) -> bool:
        """Return whether everything is written and only the publishing is left."""
        attributes = self._partial.attributes()
        if attributes.get("complete") and attributes.get(ATTRIBUTES_CRC) != attributes_checksum(attributes):
            raise StoreError(
                f"{paths.join(self.work, 'zarr.json')} is damaged: its attributes are not what was written; "
                f"{BEGIN_AGAIN}"
            )
        return bool(attributes.get("complete"))

    def done(self) -> list[int]:
        """Return the units that are written."""
        return self._partial.done()

    def missing(self) -> list[int]:
        """Return the units that are still to be written."""
        return [] if self.complete else self._partial.missing(self.plan.n_units)

    def write_unit(
        self, unit: int, atom: npt.NDArray[np.int32], coefficient: npt.NDArray[Any], sums: CodeSums
    ) -> UnitWritten:
        """Write the chunks of a unit, then its sums, then its marker.

        Parameters
        ----------
        unit : int
        atom, coefficient : ndarray of shape (rows of the unit, k), of the dtypes of the store
        sums : CodeSums
            Over the same rows.
        """
        rows, arrays = self.plan.chunk_rows, {"atom": atom, "coefficient": coefficient}
        first = unit * (self.plan.unit_rows // rows)
        checksums = [
            [self._partial.write_block(name, first + i, arrays[name][a : a + rows]) for name in arrays]
            for i, a in enumerate(range(0, len(atom), rows))
        ]
        atomic.write_bytes(self._sums_path(unit), sums.to_bytes())
        self._partial.mark(unit, len(atom), checksums)
        return UnitWritten(unit, len(atom))

    def _sums(self, unit: int) -> CodeSums:
        try:
            return CodeSums.from_bytes(paths.read_bytes(self._sums_path(unit)), lambda: self._extremes(unit))
        except Exception as error:  # an archive may fail with anything
            raise StoreError(
                f"{self._sums_path(unit)} is damaged ({brief(error)}); remove {self._partial.marker(unit)} to "
                "encode these samples again"
            ) from error

    def _extremes(self, unit: int) -> Extremes:
        """Find the largest coefficients of a unit in its codes."""
        first, stop = self.plan.unit_bounds(unit)
        atom, coefficient = (np.asarray(self._partial.array(n)[first:stop]) for n in ("atom", "coefficient"))
        return Extremes.of(atom, coefficient, first, (self.plan.n_atoms, self.plan.n_top))

    def _sums_path(self, unit: int) -> str:
        return paths.join(self._partial.folder, f"sums-{unit:08d}.npz")

    def discard(self) -> None:
        """Throw the unfinished work away, even while tasks of this process still write to it."""
        self._partial.discard()

    # -- which parts were asked for ----------------------------------------

    @property
    def _split(self) -> str:
        return paths.join(self._partial.folder, "split.json")

    def note_parts(self, n_parts: int) -> None:
        """Record in how many parts the job is done, for what `finish` says is missing."""
        atomic.write_sealed(self._split, {"n_parts": n_parts})

    def describe_missing(self) -> str:
        """Name what is not encoded, in parts if the job was split, and in samples."""
        missing = set(self.missing())
        spans = [self.plan.unit_bounds(unit) for unit in sorted(missing)]
        rows = f"{sum(b - a for a, b in spans)} of {self.plan.n_samples} samples"
        if not paths.exists(self._split):
            return f"Chunks not encoded: {atomic.describe_parts(missing)} ({rows})"
        n = int(atomic.read_sealed(self._split)["n_parts"])
        parts = parts_with(missing, self.plan.n_units, n)
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
        self._partial.publish(overwrite)

    def _complete(self) -> None:
        units = range(self.plan.n_units)
        table = self._partial.checksums(units)
        sums = merge_moments(self._sums(unit) for unit in units)
        self._partial.require_sound()  # chunks must not be published under metadata that do not describe them
        group = self._partial.group()
        self._partial.write_checksums(group, table)
        below = group.require_group(STATISTICS)
        gathered = statistics(sums)
        below.attrs.update({"l1_sum": sums.codes.l1_sum, CHECKSUMS: statistics_checksums(gathered)})
        for name, values in gathered.items():
            put_array(below, name, values, STATISTIC_DIMS[name], {})
        added = {"metrics": sums.metrics(), "content_id": content_id(self.plan.identity(), table)}
        # not what the unfinished store says of itself, which nothing has checked
        head = {**self._head(), **added, "complete": True}
        self._partial.seal(group, {**head, ATTRIBUTES_CRC: attributes_checksum(head)})

    def require_sound(self) -> None:
        """Refuse to continue with an unfinished store whose metadata are not those it was begun with."""
        if not self.complete:
            self._partial.require_sound()


def statistics(sums: CodeSums) -> dict[str, npt.NDArray[Any]]:
    """Return the sums over all samples as the arrays of the group `statistics`."""
    return {
        "count": sums.codes.n_active,
        "positive_count": sums.codes.n_positive,
        "coefficient_sum": sums.codes.total,
        "coefficient_square_sum": sums.codes.square,
        "abs_max": sums.codes.largest,
        "top_sample": sums.extremes.top.sample,
        "top_coefficient": sums.extremes.top.coefficient,
        "bottom_sample": sums.extremes.bottom.sample,
        "bottom_coefficient": sums.extremes.bottom.coefficient,
        "l0_histogram": sums.codes.l0_histogram,
        "error_histogram": sums.reconstruction.error_histogram,
    }
