"""Encode a whole store: `init / part / finish`, on the current Dask scheduler, restartable and divisible.

The store is cut into units of whole chunks. Tasks encode units and write codes and sums aside; `finish` merges
the sums in the order of the samples and publishes. Parts are ranges of units, so any number of processes or
machines that see the same files can do a part each, and the result does not depend on how many there were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dbksvd_dask import events
from dbksvd_dask.base.safe_text import redacted
from dbksvd_dask.dictionary import dictionary_fingerprint
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.graph import run as graph_run
from dbksvd_dask.graph.encode import place_encoding, plan_encoding
from dbksvd_dask.jobs import _units
from dbksvd_dask.jobs._parts import check_part, run_part
from dbksvd_dask.plan.device import Placement
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.params import DEVICES, check_choice, check_integer
from dbksvd_dask.plan.units import code_chunk_rows, unit_chunks
from dbksvd_dask.progress import with_view
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import open_rows
from dbksvd_dask.store.codes import CODES_FORMAT, COEFFICIENT_DTYPES, codes_attributes
from dbksvd_dask.store.codes_writer import CodesPlan, CodesWriter, UnitWritten
from dbksvd_dask.store.layout import require_replaceable
from dbksvd_dask.store.lock import LOCK_SUFFIX, Lock, hold
from dbksvd_dask.store.partial import leftovers, tidy
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.runs import as_dictionary

N_TOP = 64  # samples kept per atom; a page shows a dozen, autointerpretation asks for some tens


@dataclass(frozen=True)
class EncodeResult:
    """What a run of the encode job did.

    Attributes
    ----------
    path : str
        The codes store.
    n_samples, n_atoms, k : int
    finished : bool
        False while parts are missing.
    samples_written, samples_kept : int
        Samples encoded by this run, and by runs before it (of the part, if one was given).
    nbytes : int
        Bytes of the codes of all samples.
    seconds : float
        Time this run took.
    metrics : dict
        Of the reconstruction and the codes, when finished.
    """

    path: str
    n_samples: int
    n_atoms: int
    k: int
    finished: bool
    samples_written: int
    samples_kept: int
    nbytes: int
    seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)


class EncodeJob:
    """The encode of one store with one dictionary, in steps that can be repeated.

    `init` begins or resumes the codes store, `run` encodes what is missing, `finish` publishes.
    See `encode_store` for the parameters.
    """

    def __init__(
        self,
        store: PathLike,
        dictionary: Any,
        path: PathLike,
        *,
        coefficient_dtype: str = "float32",
        n_top: int = N_TOP,
        force: bool = False,
        callbacks: Iterable[events.Callback] = (),
        device: str = "auto",
        **params: Any,
    ) -> None:
        self.path = paths.normalise(path)
        self.device = check_choice("device", device, DEVICES)
        self.force = force
        self.callbacks = tuple(callbacks)
        self.reader = open_rows(store)
        atomic.require_outside(self.path, self.reader.path)
        self.dictionary = as_dictionary(dictionary)
        self._check_width()
        self.how = plan_encoding(self.dictionary, given=params)
        spec, weighted = self.how.spec, {} if self.how.weights is None else {"frequency_prior": True}
        rows = code_chunk_rows(self.reader.chunk_rows)
        # an object costs a request to write and another to read: there, a unit is one
        pieces = unit_chunks(-(-self.reader.n_samples // rows)) if paths.is_remote(self.path) else 1
        self.plan = CodesPlan(
            n_samples=self.reader.n_samples,
            n_features=self.reader.n_features,
            n_atoms=self.dictionary.n_atoms,
            chunk_rows=pieces * rows,
            n_top=check_integer("n_top", n_top, 1),
            coefficient_dtype=check_choice("coefficient_dtype", coefficient_dtype, COEFFICIENT_DTYPES),
            params={**_stored(spec, self.dictionary.n_atoms), **weighted},
            dictionary=dictionary_fingerprint(self.dictionary),
            store=self.reader.fingerprint,
            about=self._about(dictionary),
            pieces=pieces,
        )
        self.writer = CodesWriter(self.path, self.plan)

    def _check_width(self) -> None:
        if self.reader.n_features != self.dictionary.n_features:
            raise InputError(
                f"{self.reader.path} has {self.reader.n_features} features, but the dictionary has "
                f"{self.dictionary.n_features}; use a dictionary fitted on these activations"
            )

    def _about(self, dictionary: Any) -> dict[str, Any]:
        """Return the provenance kept with the codes."""
        stored = isinstance(dictionary, str | os.PathLike)
        known = {
            "path": redacted(paths.normalise(dictionary)) if stored else "",
            "iteration": self.dictionary.iteration,
            "params": self.dictionary.params,
        }
        return {"dictionary": known, "store": {"path": redacted(self.reader.path)}}

    # -- init ----------------------------------------

    def is_finished(self) -> bool:
        """Return whether these codes already exist; refuse other ones in their place."""
        if not paths.exists(self.path):
            return False
        if self.writer.work == self.path and CodesWriter.begun(self.path) is not None:
            return False
        try:
            there = codes_attributes(self.path)
        except StoreError as error:
            raise StoreError(
                f"{self.path} already exists and is not a codes store; choose another name"
            ) from error
        self.plan.require_same(CodesPlan.of_store(there), self.path)
        return True

    def is_there(self) -> bool:
        """Return whether these codes already exist and are not to be replaced."""
        return not self.force and self.is_finished()

    def is_tidy(self) -> bool:
        """Return whether a killed run left nothing in the existing codes, and no lock beside them."""
        return not leftovers(self.path) and not paths.exists(self.path + LOCK_SUFFIX)

    def tidy(self) -> None:
        """Remove what a run that was killed after publishing left behind."""
        tidy(self.path)

    def abandon(self) -> None:
        """Remove what this process has begun after another one had published the result."""
        self.writer.discard()

    def init(self, *, begin_again: bool = True) -> CodesWriter:
        """Begin the codes store, or resume an unfinished one.

        Parameters
        ----------
        begin_again : bool
            This run does everything. With `force`, discard an unfinished encode with other parameters, which must
            not happen while other processes may be working on it.
        """
        try:
            begun = CodesWriter.begun(self.path)
            if begun is not None:
                self.plan.require_same(begun.plan, f"the unfinished encode at {begun.work}")
                begun.require_sound()
        except (MismatchError, StoreError):
            if not (self.force and begin_again):
                raise
            paths.remove(self.writer.work)
            begun = None
        if begun is None:
            self._require_place(self.plan.n_samples if begin_again else 0)
            with atomic.explain_full_disk(self.writer.work):
                self.writer.begin()
            begun = CodesWriter.begun(self.path)  # another process may have been first
            assert begun is not None
            self.plan.require_same(begun.plan, f"the unfinished encode at {begun.work}")
        self.writer = begun
        return begun

    def _require_place(self, n_samples: int) -> None:
        """Refuse work that cannot be done before anything is written, and clear a remote place.

        Parameters
        ----------
        n_samples : int
            How many samples there must be room for.
        """
        if self.force and paths.exists(self.path):
            require_replaceable(self.path, CODES_FORMAT)
        self._place()
        atomic.require_space(self.writer.work, self.plan.nbytes(n_samples))
        if self.force and self.writer.work == self.path:
            paths.remove(self.path)  # a remote has no rename: the new codes take the place at once

    def _place(self) -> Placement:
        """Decide where the units are encoded; raise if the requested device is missing."""
        return place_encoding(self.dictionary, self.how.spec, self.device, _units.BLOCK_ROWS)

    # -- parts ----------------------------------------

    def run(self, part: tuple[int, int] | None = None) -> tuple[int, int]:
        """Encode what is missing, of one part or of everything.

        Parameters
        ----------
        part : (i, n), optional
            Part i of n, counted from 1.

        Returns
        -------
        written, kept : int
            Samples encoded now and before.
        """
        units = range(self.plan.n_units) if part is None else self.plan.part_units(*part)
        if part is not None:
            self.writer.note_parts(part[1])
        total = self._rows_of(units)
        kept = done = total - self._rows_of(self._missing(units))
        atomic.require_space(self.writer.work, self.plan.nbytes(total - kept))
        self._progress(kept, total)

        def on_done(unit: UnitWritten) -> None:
            nonlocal done
            done += unit.n_samples
            self._progress(done, total)

        def encode_rest() -> None:
            nonlocal done
            left = self._missing(units)
            done = total - self._rows_of(left)
            self._encode(left, on_done)

        if kept < total:
            with atomic.explain_full_disk(self.writer.work):
                graph_run.attempt(encode_rest, self._retrying)
        return total - kept, kept

    def missing(self) -> list[int]:
        """Return the units that are not encoded."""
        return self.writer.missing()

    def _missing(self, units: range) -> list[int]:
        return sorted(set(self.writer.missing()) & set(units))

    def _rows_of(self, units: Iterable[int]) -> int:
        return sum(b - a for a, b in map(self.plan.unit_bounds, units))

    def _retrying(self, attempt: int, attempts: int, reason: str) -> None:
        events.emit(self.callbacks, events.Retrying(0, attempt, attempts, reason))

    def _encode(self, missing: list[int], on_done: Callable[[UnitWritten], None]) -> None:
        how = self.how._replace(place=self._place())
        with graph_run.quiet():
            held = _units.hold_dictionary(self.dictionary.atoms, how)
            _units.run_units(_units.build_units(self.reader, missing, held, how, self.writer), on_done)

    def _progress(self, done: int, total: int) -> None:
        events.emit(self.callbacks, events.JobProgress("encode", done, total, "samples"))

    # -- finish ----------------------------------------

    def finish(self) -> dict[str, Any]:
        """Merge, publish and return the metrics; the error lists what is missing."""
        with atomic.explain_full_disk(self.writer.work):
            self.writer.finish(overwrite=self.force)
        return dict(codes_attributes(self.path)["metrics"])


def _stored(spec: EncodeSpec, n_atoms: int) -> dict[str, Any]:
    """Return what a codes store records of its encoding; `gram` only where there was none."""
    values = {**spec._asdict(), "stages": [list(stage) for stage in spec.stages]}
    del values["gram"]
    return values if spec.uses_gram(n_atoms) else {**values, "gram": "never"}


def encode_store(
    store: PathLike,
    dictionary: Any,
    path: PathLike,
    *,
    k: int | None = None,
    encoder: str | None = None,
    nonneg: bool | None = None,
    refit: bool | None = None,
    min_coefficient: float | None = None,
    rtol: float | None = None,
    encode: str | None = None,
    coefficient_dtype: str = "float32",
    n_top: int = N_TOP,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    resume: bool = False,
    force: bool = False,
    callbacks: Iterable[events.Callback] = (),
    device: str = "auto",
    gram: str | None = None,
    verbose: bool | None = None,
) -> EncodeResult:
    """Encode a whole activation store with a dictionary, to a codes store.

    An interrupted run resumes: call it again with the same arguments.

    Parameters
    ----------
    store : path or URL of the activation store
    dictionary : path of a dictionary or of the folder of a fit, a Dictionary, or a fitted DBKSVD
    path : path or URL of the codes store to write
    k, encoder, nonneg, refit, min_coefficient, rtol, encode, gram : optional
        How to encode; default: as the dictionary was fitted.
    coefficient_dtype : {"float32", "float16"}
        Of the stored coefficients; the metrics describe what is stored.
    n_top : int
        Samples kept per atom, those with the largest absolute coefficients.
    part : (i, n), optional
        Do part i of n, counted from 1. Any process that sees the files may do any part while others do theirs; the
        last one to end publishes the codes.
    finish : bool
        Only finish: publish what the parts have written, or say which are missing.
    resume : bool
        Has no effect: succeeds without work if these codes already exist, with or without it.
    force : bool
        Replace what is at `path` when the new codes are complete, and begin again when an unfinished encode
        there has other parameters.
    callbacks : iterable of callables
        Called with each `JobProgress` event.
    device : {"auto", "cpu", "gpu"}
        Where the products and the pursuit run.
    verbose : bool, optional
        Show live progress or nothing; default: in a notebook only.

    Returns
    -------
    EncodeResult

    Examples
    --------
    >>> from dbksvd_dask import DBKSVD, encode_store, import_activations
    >>> _ = import_activations("activations.npy", "store.zarr")
    >>> _ = DBKSVD(n_atoms=12, k=2, n_iter=2, checkpoint="run").fit("store.zarr")
    >>> encode_store("store.zarr", "run", "codes.zarr").samples_written
    300
    """
    began = time.perf_counter()
    params: dict[str, Any] = {"k": k, "encoder": encoder, "nonneg": nonneg, "refit": refit}
    params |= {"min_coefficient": min_coefficient, "rtol": rtol, "encode": encode, "gram": gram}
    _check_steps(part, finish)
    job = EncodeJob(
        store,
        dictionary,
        path,
        coefficient_dtype=coefficient_dtype,
        n_top=n_top,
        force=force,
        callbacks=with_view(callbacks, verbose),
        device=device,
        **params,
    )
    written, kept, metrics = _drive(job, part, finish)
    return EncodeResult(
        path=job.path,
        n_samples=job.plan.n_samples,
        n_atoms=job.plan.n_atoms,
        k=job.plan.k,
        finished=metrics is not None,
        samples_written=written,
        samples_kept=kept,
        nbytes=job.plan.nbytes(job.plan.n_samples),
        seconds=time.perf_counter() - began,
        metrics=metrics or {},
    )


def _check_steps(part: tuple[int, int] | None, finish: bool) -> None:
    if part is not None:
        check_part(part)
        if finish:
            raise InputError("part and finish were both given; run every part first, then finish alone")


def check_encode(
    store: PathLike,
    dictionary: Any,
    path: PathLike,
    *,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    resume: bool = False,
    **options: Any,
) -> None:
    """Refuse what `encode_store` would refuse, without reading a sample; parameters as of `encode_store`."""
    _check_steps(part, finish)
    job = EncodeJob(store, dictionary, path, **options)
    if not job.is_there():
        begun = CodesWriter.begun(job.path)
        if begun is not None and not job.force:
            job.plan.require_same(begun.plan, f"the unfinished encode at {begun.work}")
        if begun is None and finish:
            raise _not_begun(job)


def _not_begun(job: EncodeJob) -> StoreError:
    return StoreError(f"no encode was begun at {job.path}; run its parts first, such as part=(1, 4)")


# samples written and kept, and the metrics if the job is finished
Done = tuple[int, int, dict[str, Any] | None]


def _drive(job: EncodeJob, part: tuple[int, int] | None, finish: bool) -> Done:
    """Run the requested steps."""
    if job.is_there() and (part is not None or job.is_tidy()):
        return _found(job)
    if part is not None:  # parts share one target, on many machines: whatever two of them write is the same
        return _encode_part(job, part)
    with hold(job.path, "an encode") as lock:
        if job.is_there():  # finished by another process meanwhile, or by one that was killed right after
            job.tidy()
            return _found(job)
        return _encode_all(job, finish, lock)


def _found(job: EncodeJob) -> Done:
    return 0, job.plan.n_samples, dict(codes_attributes(job.path)["metrics"])


def _encode_all(job: EncodeJob, finish: bool, lock: Lock) -> Done:
    """Encode what is missing, unless only `finish` is requested, and publish; this process holds the target."""
    if finish and CodesWriter.begun(job.path) is None:
        raise _not_begun(job)
    job.init(begin_again=not finish)
    try:
        written, kept = (0, job.plan.n_samples) if finish else job.run()
    except InputError:
        job.writer.discard()  # the same call would fail again: nothing to resume
        raise
    lock.require_held()
    return written, kept, job.finish()


def _encode_part(job: EncodeJob, part: tuple[int, int]) -> Done:
    """Encode one part; if another process finishes meanwhile, it did not need this part."""

    def work() -> tuple[int, int] | None:
        job.init(begin_again=False)
        if job.is_there():  # published between the check and the beginning
            return None
        return job.run(part)

    done, finished = run_part(job, "encode", work)
    if done is None:
        return _found(job)
    return *done, dict(codes_attributes(job.path)["metrics"]) if finished else None
