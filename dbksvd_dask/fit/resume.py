"""The folder of a fit: resume from a checkpoint, write checkpoints, report the newest when the fit stops."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dbksvd_dask import events
from dbksvd_dask.base.interrupts import uninterrupted
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import BusyError, ClusterError, InputError, MismatchError, StoreError
from dbksvd_dask.fit.context import Context
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.plan.stopping import is_over
from dbksvd_dask.status import STATUS, StatusFile
from dbksvd_dask.store import paths
from dbksvd_dask.store.lock import FIT_LOCK, Lock, hold
from dbksvd_dask.store.runs import (
    KEEP,
    checkpoints,
    latest_checkpoint,
    readable_checkpoint,
    remove_checkpoints,
    remove_old_checkpoints,
    write_checkpoint,
)

logger = logging.getLogger(__name__)

# A fit may be made longer, and may continue on another device; every other parameter changes the resulting
# dictionary.
MAY_CHANGE = frozenset({"n_iter", "patience", "device"})
# A checkpoint that lacks a parameter is older than it: the default of a new parameter changes nothing.
DEFAULTS = {field.name: field.default for field in fields(FitParams)}


def newest_readable(run: str) -> Dictionary:
    """Read the newest intact checkpoint of a run; skip damaged ones."""
    _, dictionary, damaged = readable_checkpoint(run)
    for error in damaged:
        logger.warning("%s; trying the checkpoint before", error)
    return dictionary


def newest_iteration(run: str) -> int:
    """Return the iterations of the newest checkpoint of a run, from its name; 0 without one."""
    newest = latest_checkpoint(run)
    return int(Path(newest).stem.rpartition("-")[2]) if newest else 0


def tidy(run: str) -> None:
    """Remove the leftovers of a fit that was killed at its end, unless the run is read-only or in use."""
    if os.path.exists(os.path.join(run, FIT_LOCK)) or len(checkpoints(run)) > KEEP:
        with suppress(StoreError), hold(run, "a fit", inside=True):
            remove_old_checkpoints(run)


def require_same_fit(run: str, stored: Dictionary, params: dict[str, Any], source: str) -> None:
    """Refuse to resume from a checkpoint of another fit.

    Parameters
    ----------
    params : parameters of the fit that resumes, from `FitParams.to_json`
    source : identity of its source
    """
    for name, value in params.items():
        before = stored.params.get(name, DEFAULTS.get(name))
        if name not in MAY_CHANGE and before != value:
            raise MismatchError(
                f"the checkpoint in {run} was made with {name}={before!r}, this fit has "
                f"{name}={value!r}; use the same value, or another folder for a new fit"
            )
    if stored.source != source:
        raise MismatchError(
            f"the checkpoint in {run} was fitted on {stored.source}, this fit reads {source}; "
            "give the same store, or another folder for a new fit"
        )


def _intact(run: str) -> str:
    """Return the path of the newest intact checkpoint of a run; empty if there is none."""
    try:
        return readable_checkpoint(run)[0] if latest_checkpoint(run) else ""
    except (StoreError, MismatchError):
        return ""


@contextmanager
def report_checkpoint_on_exit(run: str, emit: Callable[[events.Event], None]) -> Iterator[None]:
    """Report the newest checkpoint when an interruption, a lost cluster or a failing store ends a fit."""
    try:
        yield
    except BusyError:  # the folder belongs to another process
        raise
    except (KeyboardInterrupt, ClusterError, StoreError) as error:
        newest = _intact(run)
        done = int(Path(newest).stem.rpartition("-")[2]) if newest else 0  # the newest intact one
        safe = f"{newest} is intact; continue with resume=True" if newest else "there is no checkpoint yet"
        message = f"{' '.join(str(error).split()) or 'interrupted'}; {safe}"
        logger.info("the fit stopped: %s", message)  # the caller shows the error
        emit(events.FitStopped(done, newest, message))
        raise type(error)(message) from error


class Run:
    """The folder of one fit.

    Parameters
    ----------
    path : the folder; no other process may write to it meanwhile
    context : setting of the fit
    every : iterations between two checkpoints
    """

    def __init__(self, path: str, context: Context, every: int) -> None:
        self.path, self.context, self.every = path, context, every
        self._unsaved: Dictionary | None = None

    def newest(self) -> Dictionary:
        """Return the state of the newest checkpoint; refuse that of another fit."""
        stored, params = newest_readable(self.path), self.context.params.to_json()
        require_same_fit(self.path, stored, params, self.context.source.identity)
        return replace(stored, params=params)  # those in `MAY_CHANGE` may differ

    def finished(self) -> Dictionary | None:
        """Return the last state of a finished fit, whose folder may be read-only; None if iterations remain."""
        params = self.context.params
        if not newest_iteration(self.path) or (
            newest_iteration(self.path) < params.n_iter and not params.patience
        ):
            return None  # without reading a checkpoint
        state = self.newest()
        if not is_over(params, state.iteration, state.history):  # the last checkpoint may be damaged
            return None
        tidy(self.path)
        return state

    @contextmanager
    def held(self, overwrite: bool) -> Iterator[Lock]:
        """Hold the folder; with `overwrite`, delete the fit in it."""
        with ExitStack() as stack:
            with report_checkpoint_on_exit(self.path, self.context.emit):
                lock = stack.enter_context(hold(self.path, "a fit", inside=True))
            if overwrite:
                remove_checkpoints(self.path)
            yield lock

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Keep the status file of the folder up to date."""
        with StatusFile(paths.join(self.path, STATUS), "fit") as status:
            self.context.status = status
            try:
                yield
            finally:
                self.context.status = None

    def resumed(self, resume: bool) -> Dictionary | None:
        """Return the state to resume from, or None; without `resume`, refuse a folder that holds a fit."""
        found = latest_checkpoint(self.path)
        if found is not None and not resume:
            raise StoreError(
                f"{self.path} already holds a fit ({found}); continue with resume=True, choose another "
                "folder, or delete that fit"
            )
        return None if found is None else self.newest()

    def save(self, state: Dictionary, lock: Lock) -> None:
        """Write a checkpoint if this iteration is due for one."""
        self._unsaved = state
        if state.iteration % self.every == 0 or is_over(self.context.params, state.iteration, state.history):
            self._write(state, lock)

    def _write(self, state: Dictionary, lock: Lock) -> None:
        lock.require_held()
        with uninterrupted():
            path = write_checkpoint(self.path, state)
            self._unsaved = None
        self.context.emit(events.CheckpointWritten(path, state.iteration))

    @contextmanager
    def saved_when_interrupted(self, lock: Lock) -> Iterator[None]:
        """Write a checkpoint of the last finished iteration when Ctrl-C or SIGTERM ends a fit."""
        try:
            yield
        except KeyboardInterrupt:
            if self._unsaved is not None:
                self._write(self._unsaved, lock)
            raise


Saver = Callable[[Dictionary], None]


@contextmanager
def open_run(
    path: str | None, context: Context, every: int, resume: bool, overwrite: bool
) -> Iterator[tuple[Dictionary | None, Saver | None]]:
    """Hold the folder of a fit while it runs; yield the state to resume from and a function that saves a state.

    The state is None for a new fit; the function is None for a fit without checkpoints or without iterations left.

    Parameters
    ----------
    path : the folder, or None for a fit without checkpoints
    every : iterations between two checkpoints
    resume : continue from the newest checkpoint
    overwrite : delete the fit that is in the folder
    """
    if path is None:
        if resume:
            raise InputError("resume=True needs the folder of a fit; give checkpoint=PATH")
        yield None, None
        return
    run = Run(path, context, every)
    done = run.finished() if resume else None
    if done is not None:
        yield done, None
        return
    with run.held(overwrite) as lock:
        state = run.resumed(resume)
        with run.followed(), report_checkpoint_on_exit(path, context.emit), run.saved_when_interrupted(lock):
            yield state, lambda current: run.save(current, lock)
