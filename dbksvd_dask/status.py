"""The state of a fit or a job in one small file, for whoever watches many of them.

A fit keeps ``RUN/status.json`` up to date; any other job keeps one with a `StatusFile`. It is replaced as a whole,
at most every few seconds and at the end, so that a reader always finds valid JSON. `prometheus` turns such files
into the text that Prometheus collects.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import dbksvd_dask
from dbksvd_dask import events
from dbksvd_dask._words import plain
from dbksvd_dask.base.safe_text import redacted_values
from dbksvd_dask.errors import StoreError
from dbksvd_dask.progress import Snapshot
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.lock import FIT_LOCK, PATIENCE_SECONDS, Owner

STATUS = "status.json"
FORMAT, VERSION = "dbksvd-status", 1
# seconds between two versions of a file on a disk, and of one that is an object somewhere
EVERY, EVERY_REMOTE = 2.0, 30.0

RUNNING, FINISHED, STOPPED, LOST = "running", "finished", "stopped", "lost"
STATES = (RUNNING, FINISHED, STOPPED, LOST)


class StatusFile:
    """Keeps a file up to date with what events say; a subscriber, and a context that notices how a job ends.

    Parameters
    ----------
    path : path or fsspec URL
    job : str
        What runs, until events say it.
    every : float, optional
        Seconds between two versions; default: 2, and 30 where the file is on a remote.
    clock, now : callable
        Return the time in seconds: one that never jumps, and one since 1970.

    Examples
    --------
    >>> from dbksvd_dask import import_activations
    >>> from dbksvd_dask.status import StatusFile, read_status
    >>> with StatusFile("import.json") as status:
    ...     _ = import_activations("activations.npy", "store.zarr", callbacks=[status])
    >>> read_status("import.json")["state"]
    'finished'
    """

    def __init__(
        self,
        path: paths.PathLike,
        job: str = "",
        every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = paths.normalise(path)
        self._every = every if every is not None else EVERY_REMOTE if paths.is_remote(self.path) else EVERY
        self._clock, self._now = clock, now
        self._view = Snapshot()
        self._first: dict[str, tuple[float, int]] = {}  # by job: time and progress at its first event
        self._written = -math.inf
        self._fields: dict[str, Any] = {
            "format": FORMAT,
            "format_version": VERSION,
            "package_version": dbksvd_dask.__version__,
            "job": job,
            "state": RUNNING,
            "started": now(),
            "owner": asdict(Owner.current("a job")),
        }

    def __enter__(self) -> Self:
        self._write_or_warn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._fields |= {"state": FINISHED, "seconds_left": 0.0}
            self._write_or_warn()
            return
        if self._fields["state"] == RUNNING:
            self._fields |= {"state": STOPPED, "message": " ".join(str(error).split()) or type(error).__name__}
        self._write_last()

    def _write_or_warn(self) -> None:
        """Write the file; an error is logged and never ends a run."""
        events.emit([lambda _: self.write()], events.Event())

    def _write_last(self) -> None:
        """Write the file after an error; on a full disk, that error says enough."""
        with contextlib.suppress(OSError):
            self.write()

    def __call__(self, event: events.Event) -> None:
        """Take an event, and write the file if it is due or nothing follows."""
        self._view.take(event)
        if isinstance(event, events.JobProgress):
            self._take_job(event)
        elif isinstance(event, events.FitStarted):
            self._take_start(event)
        else:
            self._take_fit(event)
        if isinstance(event, events.FitStopped):
            self._write_last()
        elif isinstance(event, events.FitStarted | events.FitFinished):
            self.write()
        elif self._clock() - self._written >= self._every:
            self.write()

    def _take_start(self, event: events.FitStarted) -> None:
        sizes = {name: getattr(event, name) for name in ("n_samples", "n_features", "n_atoms", "k", "batch_size")}
        self._fields |= {"job": "fit", "state": RUNNING, "planned_bytes": event.planned_bytes, **sizes}
        self._fields |= {"done": event.first_iteration, "total": event.n_iter, "unit": "iterations", "retries": 0}

    def _take_fit(self, event: events.Event) -> None:
        view = self._view
        if isinstance(event, events.BatchFinished):
            self._fields |= {"done": view.iteration, "total": view.n_iter, "seconds_left": view.seconds_left}
            self._fields |= {"samples_per_second": view.samples_per_second, "bytes_read": view.bytes_read}
            self._fields |= {name: value for name, value in event.record.items() if name in FIGURES}
        elif isinstance(event, events.CheckpointWritten):
            self._fields["checkpoint"] = event.iteration
        elif isinstance(event, events.Retrying):
            self._fields |= {"retries": self._fields.get("retries", 0) + 1, "message": view.note}
        elif isinstance(event, events.FitStopped):
            self._fields |= {"state": STOPPED, "message": event.message}
        elif isinstance(event, events.FitFinished):
            self._fields |= {"state": FINISHED, "done": view.iteration, "seconds_left": 0.0}

    def _take_job(self, event: events.JobProgress) -> None:
        now = self._clock()
        began, before = self._first.setdefault(event.job, (now, event.done))
        pace = event.per_second or ((event.done - before) / (now - began) if now > began else 0.0)
        left = (event.total - event.done) / pace if pace else math.nan
        self._fields |= {"job": event.job, "done": event.done, "total": event.total, "unit": event.unit}
        self._fields |= {"per_second": pace or math.nan, "seconds_left": left}

    def write(self) -> None:
        """Write the file now."""
        self._written = self._clock()
        content = {**self._fields, "updated": self._now()}
        if not paths.is_remote(self.path):
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        atomic.write_json(self.path, plain(redacted_values(content)), durable=False)


# ---------------------------------------------------------------------------------------------- reading


def status_path(path: paths.PathLike) -> str:
    """Return where the status of a run lies; of a file, that file."""
    text = paths.normalise(path)
    return text if text.endswith(".json") else paths.join(text, STATUS)


def read_status(path: paths.PathLike, now: float | None = None) -> dict[str, Any] | None:
    """Read the status of a run, or a status file; None if there is none.

    A job whose process ended without notice, or that gave no sign for two minutes, is "lost".

    Parameters
    ----------
    path : path or fsspec URL
    now : float, optional
        Seconds since 1970.

    Returns
    -------
    dict or None
        What the file says, and `age_seconds`.
    """
    where = status_path(path)
    if not paths.exists(where):
        return None
    found = atomic.read_json(where)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    if found.get("format_version") != VERSION or not isinstance(found.get("updated"), int | float):
        raise StoreError(f"{where} cannot be read: it was written by another version, or is damaged; delete it")
    age = max(0.0, (time.time() if now is None else now) - _last_sign(where, float(found["updated"])))
    state = found.get("state") if found.get("state") in STATES else LOST
    if state == RUNNING and not _is_alive(found.get("owner"), age):
        state = LOST
    return {**found, "state": state, "age_seconds": age}


def _last_sign(where: str, updated: float) -> float:
    """Return the time of a job's last sign of life: its file, or the lock that a fit touches in a long batch."""
    lock = os.path.join(os.path.dirname(where), FIT_LOCK)
    try:
        return max(updated, os.stat(lock).st_mtime)
    except OSError:
        return updated


def _is_alive(owner: Any, age: float) -> bool:
    try:
        known = Owner(**owner)
    except TypeError:
        return age < PATIENCE_SECONDS
    return known.is_alive() if known.is_local() else age < PATIENCE_SECONDS


# ---------------------------------------------------------------------------------------------- Prometheus


@dataclass(frozen=True)
class Metric:
    """A figure for Prometheus."""

    field: str
    name: str
    help: str


FIGURES = (
    "relative_error",
    "variance_explained",
    "validation_relative_error",
    "validation_variance_explained",
)
METRICS = (
    Metric("done", "done", "Iterations of a fit, or units of a job, that are done."),
    Metric("total", "total", "Iterations or units in all."),
    Metric("samples_per_second", "samples_per_second", "Rows per second of the last batch."),
    Metric("per_second", "units_per_second", "Units of a job per second."),
    Metric("seconds_left", "seconds_left", "Estimated seconds until the end."),
    *(Metric(name, name, f"{name.replace('_', ' ').capitalize()} of the last batch.") for name in FIGURES),
    Metric("checkpoint", "checkpoint_iteration", "Iteration of the newest checkpoint."),
    Metric("retries", "retries", "Batches that ran again after a lost worker or connection."),
    Metric("bytes_read", "read_bytes", "Bytes of rows read."),
    Metric("planned_bytes", "planned_memory_bytes", "Planned peak memory per process."),
    Metric("started", "started_timestamp_seconds", "When the job began, in seconds since 1970."),
    Metric("updated", "updated_timestamp_seconds", "When the status was written, in seconds since 1970."),
)


def prometheus(statuses: Mapping[str, Mapping[str, Any]]) -> str:
    """Return statuses in the text format of Prometheus, every figure as a gauge.

    Parameters
    ----------
    statuses : dict of str to dict
        What `read_status` returned, by the path it was read from.

    Examples
    --------
    >>> status = {"job": "fit", "state": "running", "done": 12, "total": 40}
    >>> print(prometheus({"run": status}))  # doctest: +ELLIPSIS
    # HELP dbksvd_state 1 for the state of the job, 0 for the others.
    # TYPE dbksvd_state gauge
    dbksvd_state{path="run",job="fit",state="running"} 1
    ...
    # HELP dbksvd_done Iterations of a fit, or units of a job, that are done.
    # TYPE dbksvd_done gauge
    dbksvd_done{path="run",job="fit"} 12
    ...
    """
    lines = _head("state", "1 for the state of the job, 0 for the others.")
    for path, status in statuses.items():
        for state in STATES:
            lines.append(f"dbksvd_state{_labels(path, status, state)} {int(status.get('state') == state)}")
    for metric in METRICS:
        samples = [
            f"dbksvd_{metric.name}{_labels(path, status)} {value!r}"
            for path, status in statuses.items()
            if isinstance(value := status.get(metric.field), int | float)
        ]
        lines += [*_head(metric.name, metric.help), *samples] if samples else []
    return "\n".join(lines)


def _head(name: str, text: str) -> list[str]:
    return [f"# HELP dbksvd_{name} {text}", f"# TYPE dbksvd_{name} gauge"]


def _labels(path: str, status: Mapping[str, Any], state: str | None = None) -> str:
    pairs = {"path": path, "job": str(status.get("job", ""))} | ({} if state is None else {"state": state})
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in pairs.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def read_all(found: Iterable[paths.PathLike]) -> dict[str, dict[str, Any]]:
    """Read the status of several runs or files; leave out those that have none."""
    read = {paths.normalise(path): read_status(path) for path in found}
    return {path: status for path, status in read.items() if status is not None}
