"""Progress as typed events: the library emits, bars, logs and notebook views subscribe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("dbksvd_dask")


@dataclass(frozen=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True)
class FitStarted(Event):
    """A fit begins, or resumes from a checkpoint."""

    n_samples: int
    n_features: int
    n_atoms: int
    k: int
    n_iter: int
    first_iteration: int
    batch_size: int
    planned_bytes: int  # peak memory per worker as planned
    dashboard: str = ""  # link to Dask's dashboard; empty on threads, and for a scheduler without bokeh
    n_workers: int = 0  # worker processes; 0 on threads


@dataclass(frozen=True)
class BatchStarted(Event):
    """The graph of one outer batch is about to run."""

    iteration: int
    n_tasks: int


@dataclass(frozen=True)
class RoundFinished(Event):
    """One round of dictionary updates is done."""

    iteration: int
    round: int
    n_rounds: int


@dataclass(frozen=True)
class BatchFinished(Event):
    """One outer batch is done; `record` is its row of the history."""

    iteration: int
    n_iter: int
    n_samples: int
    seconds: float
    samples_per_second: float
    seconds_left: float
    bytes_read: int
    record: dict[str, float]


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint was published."""

    path: str
    iteration: int


@dataclass(frozen=True)
class Retrying(Event):
    """A batch failed for a temporary reason (a lost worker or connection) and runs again."""

    iteration: int
    attempt: int
    attempts: int
    reason: str


@dataclass(frozen=True)
class FitStopped(Event):
    """A fit ends early: interrupted, or by an error; `message` says what to do next."""

    iteration: int  # outer batches done
    checkpoint: str  # newest checkpoint, empty if there is none
    message: str


@dataclass(frozen=True)
class FitFinished(Event):
    """All iterations are done."""

    n_iter: int
    seconds: float


@dataclass(frozen=True)
class JobProgress(Event):
    """A restartable job (import, shuffle, encode) has done another part."""

    job: str
    done: int
    total: int
    unit: str
    per_second: float = 0.0  # pace of this run; 0 where it is not measured


Callback = Callable[[Any], None]


# Callbacks that have failed in the current run, by identity; kept alive, so that no other can get the same id.
_failed: dict[int, Callback] = {}


def emit(callbacks: Iterable[Callback], event: Event) -> None:
    """Pass an event to every subscriber; an error in one is logged and never ends a long run.

    Log one line per failing subscriber, the first time in a fit; the traceback goes to DEBUG.
    """
    for callback in callbacks:
        if isinstance(event, FitStarted):
            _failed.pop(id(callback), None)
        try:
            callback(event)
        except Exception as error:
            kind = type(event).__name__
            logger.debug("a progress callback failed on %s", kind, exc_info=True)
            if id(callback) not in _failed:
                _failed[id(callback)] = callback
                what = " ".join(f"{type(error).__name__}: {error}".split())
                logger.warning("a progress callback failed on %s (%s); the work continues", kind, what)
