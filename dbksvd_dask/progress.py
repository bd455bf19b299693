"""Subscribers to progress events: a bar on the terminal, a view in a notebook, lines of JSON in a file.

Each is a callable that takes events, so any of them can be given as `callbacks=[...]`::

    with progress.TerminalBar() as bar, progress.JsonLines("run.jsonl") as log:
        DBKSVD(4096, 32, callbacks=[bar, log]).fit("store.zarr")
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from dbksvd_dask import events
from dbksvd_dask._words import format_bytes, format_seconds, plain, sparkline
from dbksvd_dask.base.safe_text import printable, redacted
from dbksvd_dask.errors import InputError
from dbksvd_dask.store.atomic import cannot_write, write_all

logger = logging.getLogger(__name__)


@dataclass
class Snapshot:
    """The state of a fit, gathered from its events, as the bar and the notebook view show it."""

    n_iter: int = 0
    iteration: int = 0  # outer batches done
    round: int = 0  # rounds done of the current batch
    n_rounds: int = 0
    relative_error: float = math.nan
    validation_error: float = math.nan
    samples_per_second: float = math.nan
    seconds_left: float = math.nan
    bytes_read: int = 0
    planned_bytes: int = 0
    checkpoint: str = ""
    note: str = ""  # the last unusual event: a retry, a stop
    seconds: float = 0.0  # how long it took, once it is done
    errors: list[float] = field(default_factory=list)  # relative error after each batch seen

    @property
    def done(self) -> float:
        """Batches done, counting rounds of the current one as fractions."""
        part = self.round / self.n_rounds if self.n_rounds else 0.0
        return min(self.n_iter, self.iteration + part)

    @property
    def count(self) -> str:
        """Batches and rounds in words."""
        rounds = f", round {self.round} of {self.n_rounds} of the next" if self.round else ""
        return f"{self.iteration} of {self.n_iter} batches{rounds}"

    def take(self, event: events.Event) -> None:
        """Process one event; ignore unknown ones."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)


def _started(view: Snapshot, event: events.FitStarted) -> None:
    view.n_iter, view.iteration, view.planned_bytes = event.n_iter, event.first_iteration, event.planned_bytes


def _batch_started(view: Snapshot, event: events.BatchStarted) -> None:
    view.iteration, view.round, view.n_rounds = event.iteration, 0, 0


def _round(view: Snapshot, event: events.RoundFinished) -> None:
    view.round, view.n_rounds = event.round + 1, event.n_rounds


def _batch(view: Snapshot, event: events.BatchFinished) -> None:
    view.iteration, view.n_iter, view.round = event.iteration + 1, event.n_iter, 0
    view.samples_per_second, view.seconds_left = event.samples_per_second, event.seconds_left
    view.bytes_read += event.bytes_read
    view.relative_error = event.record.get("relative_error", math.nan)
    view.validation_error = event.record.get("validation_relative_error", math.nan)
    view.errors.append(view.relative_error)
    view.note = ""


def _checkpoint(view: Snapshot, event: events.CheckpointWritten) -> None:
    view.checkpoint = event.path


def _retrying(view: Snapshot, event: events.Retrying) -> None:
    view.note = f"attempt {event.attempt} of {event.attempts} failed ({event.reason}); trying again"


def _stopped(view: Snapshot, event: events.FitStopped) -> None:
    view.note = event.message


def _finished(view: Snapshot, event: events.FitFinished) -> None:
    view.iteration, view.round, view.seconds_left, view.seconds = event.n_iter, 0, 0.0, event.seconds


_HANDLERS: dict[type[events.Event], Callable[[Snapshot, Any], None]] = {
    events.FitStarted: _started,
    events.BatchStarted: _batch_started,
    events.RoundFinished: _round,
    events.BatchFinished: _batch,
    events.CheckpointWritten: _checkpoint,
    events.Retrying: _retrying,
    events.FitStopped: _stopped,
    events.FitFinished: _finished,
}


# ---------------------------------------------------------------------------------------------- words


def describe_start(event: events.FitStarted) -> str:
    """Say what is known before the first batch: planned memory, and where to watch."""
    watch = f"; dashboard: {event.dashboard}" if event.dashboard else ""
    if event.n_workers:
        none = "; no dashboard: it needs bokeh where the scheduler runs (pip install bokeh)"
        watch = f"; {event.n_workers} worker{'s' * (event.n_workers != 1)}{watch or none}"
    return f"planned peak memory per process: {format_bytes(event.planned_bytes)}{watch}"


def describe(view: Snapshot, short: bool = False) -> str:
    """Say error, speed, time left (at the end: taken) and bytes read in one line; short: error and time only."""
    parts = []
    if math.isfinite(view.relative_error):
        parts.append(f"error {view.relative_error:.4f}")
    if math.isfinite(view.validation_error):
        parts.append(f"held-out {view.validation_error:.4f}")
    if math.isfinite(view.samples_per_second) and not short:
        parts.append(f"{view.samples_per_second:,.0f} samples/s")
    if view.seconds:
        parts.append(f"took {format_seconds(view.seconds)}")
    elif math.isfinite(view.seconds_left):
        parts.append(f"{format_seconds(view.seconds_left)} left")
    if view.bytes_read and not short:
        parts.append(f"{format_bytes(view.bytes_read)} read")
    return ", ".join(parts)


class JobPace:
    """Estimate the time left of restartable jobs from their events.

    What an earlier, interrupted run has done does not count: the pace is measured from the first event on.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds.

    Examples
    --------
    >>> now = [0.0]
    >>> pace = JobPace(lambda: now[0])
    >>> pace.left(events.JobProgress("import", 90, 100, "chunks"))
    ''
    >>> now[0] = 10.0
    >>> pace.left(events.JobProgress("import", 95, 100, "chunks"))
    '10 s left'
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[str, tuple[float, int]] = {}

    def left(self, event: events.JobProgress) -> str:
        """Return the time left in words, after the pace where it is known; empty while it is unknown."""
        now = self._clock()
        began, before = self._first.setdefault(event.job, (now, event.done))
        if event.done <= before:
            return ""
        left = f"{format_seconds((event.total - event.done) * (now - began) / (event.done - before))} left"
        return f"{event.per_second:.0f} {event.unit}/s, {left}" if event.per_second else left


# ---------------------------------------------------------------------------------------------- terminal

# columns that the whole line of a bar needs
WIDE = 110


class TerminalBar:
    """A bar for a fit, and one for each restartable job, on standard error.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to draw.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = console or Console(stderr=True)
        self.view = Snapshot()
        self._narrow = console.width < WIDE
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8 if self._narrow else 24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._tasks: dict[str, Any] = {}
        self._pace = JobPace()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, event: events.Event) -> None:
        """Process an event and draw."""
        if isinstance(event, events.JobProgress):
            count = f"{event.done}/{event.total} {event.unit}"
            self._draw(event.job, event.done, event.total, count, self._pace.left(event))
            return
        self.view.take(event)
        view = self.view
        if isinstance(event, events.FitStarted):
            self._bars.console.print(describe_start(event), highlight=False, markup=False)
        if isinstance(event, events.Retrying):  # a stop is an error, which is shown anyway
            self._bars.console.print(view.note, highlight=False, markup=False)
        if view.n_iter:
            self._draw("fit", view.done, view.n_iter, view.count, describe(view, short=self._narrow))

    def _draw(self, name: str, done: float, total: float, count: str, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, count=count, text=text)
        self._bars.update(self._tasks[name], completed=done, total=total, count=count, text=text)


# ---------------------------------------------------------------------------------------------- lines

# Seconds between two lines without a terminal: a few thousand lines in a night.
LINE_EVERY = 10.0


class Lines:
    """Write the state of a fit or a job to standard error: at its start, then a line every few seconds.

    What goes wrong, such as a lost worker, is written at once.

    Parameters
    ----------
    every : float
        Seconds between two lines; infinity for only what goes wrong.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, every: float = LINE_EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock, self._view, self._pace = every, clock, Snapshot(), JobPace(clock)
        self._last = clock()

    def __call__(self, event: events.Event) -> None:
        """Take an event, and write a line if one is due."""
        self._view.take(event)
        text, now = self._text(event), self._clock()
        begins = isinstance(event, events.FitStarted) and math.isfinite(self._every)
        if text and (begins or isinstance(event, events.Retrying) or now - self._last >= self._every):
            self._last = now
            sys.stderr.write(printable(redacted(text)) + "\n")
            sys.stderr.flush()

    def _text(self, event: Any) -> str:
        if isinstance(event, events.JobProgress):
            left = self._pace.left(event)
            return f"{event.job}: {event.done} of {event.total} {event.unit}" + (f", {left}" if left else "")
        if isinstance(event, events.FitStarted):
            return f"fit: {event.n_samples} x {event.n_features}, {event.n_iter} batches; {describe_start(event)}"
        if isinstance(event, events.RoundFinished | events.BatchFinished):
            return ", ".join(filter(None, [f"fit: {self._view.count}", describe(self._view)]))
        return self._view.note if isinstance(event, events.Retrying) else ""


# ---------------------------------------------------------------------------------------------- file


class JsonLines:
    """Appends every event to a file, one JSON object per line, complete at any time.

    A line has `time` (seconds since 1970), `event` (the name of its class) and the fields of the event; numbers
    that JSON cannot express (NaN, infinity) are null. A resumed fit appends to the same file. An event that cannot
    be written, as on a full disk, is left out, and the first is reported in the log of the library: it never
    ends a run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise cannot_write(f"the log {self.path}", error) from error
        self._complete = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:  # a network drive may fail only now
            self._tell(error)

    def __call__(self, event: events.Event) -> None:
        """Write one event."""
        line = {"time": time.time(), "event": type(event).__name__, **dataclasses.asdict(event)}
        text = (json.dumps(plain(line), allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            write_all(self._file, memoryview(text))
        except OSError as error:
            with suppress(OSError):  # no half line stays; a pipe cannot be cut
                self._file.truncate(end)
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Warn once that events are missing."""
        if self._complete:
            self._complete = False
            reason = error.strerror or error
            logger.warning("the log %s is incomplete: %s; the run is not affected", self.path, reason)


# ---------------------------------------------------------------------------------------------- tracking

TRACKERS = ("trackio", "wandb", "tensorboard")


class _TensorBoard:
    """TensorBoard by the calls of trackio: a folder in place of a project."""

    def __init__(self) -> None:
        try:
            self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            self._make = importlib.import_module("tensorboardX").SummaryWriter

    def init(self, project: str, config: dict[str, Any], **options: Any) -> None:
        self._writer = self._make(project, **options)
        self._writer.add_text("config", "\n".join(f"- {name}: {value}" for name, value in config.items()))

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class Tracker:
    """Sends the history of a fit to an experiment tracker: trackio or TensorBoard (local), or Weights & Biases.

    A fit is a run of `project` with its sizes as the configuration, and every iteration logs its row of the
    history. A resumed fit is another run, which continues the steps of the first.

    Parameters
    ----------
    tool : {"trackio", "wandb", "tensorboard"}
        Must be installed; "tensorboard" needs torch and tensorboard, or tensorboardX.
    project : str
        Name under which the tool groups runs; for TensorBoard, the folder of the run.
    **options
        Further arguments of the tool's `init`, such as `name`, or of TensorBoard's `SummaryWriter`.

    Examples
    --------
    >>> from dbksvd_dask import DBKSVD
    >>> from dbksvd_dask.progress import Tracker
    >>> def fit_and_track(Y):
    ...     return DBKSVD(4096, 32, callbacks=[Tracker("trackio", "atoms")]).fit(Y)
    """

    def __init__(self, tool: str, project: str, **options: Any) -> None:
        if tool not in TRACKERS or not project:
            raise InputError(
                f"tracker {tool!r} with project {project!r} is not known; use 'trackio' or 'wandb' and the name "
                "of a project, or 'tensorboard' and a folder"
            )
        try:
            self._tool: Any = _TensorBoard() if tool == "tensorboard" else importlib.import_module(tool)
        except ImportError as error:
            package = "tensorboardX" if tool == "tensorboard" else tool
            raise InputError(
                f"{tool} is not installed ({error}); install it with `pip install {package}`"
            ) from error
        self.project, self.options = project, options
        self._open = False

    @classmethod
    def named(cls, text: str) -> Tracker:
        """Make a tracker of ``TOOL:PROJECT``, as `dbksvd fit --track` takes it."""
        tool, _, project = text.partition(":")
        return cls(tool, project)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def __call__(self, event: events.Event) -> None:
        """Send one event."""
        if isinstance(event, events.FitStarted):
            self._finish()
            self._tool.init(project=self.project, config=dataclasses.asdict(event), **self.options)
            self._open = True
        elif isinstance(event, events.BatchFinished) and self._open:
            pace = {"seconds": event.seconds, "samples_per_second": event.samples_per_second}
            figures = {name: value for name, value in (event.record | pace).items() if math.isfinite(value)}
            self._tool.log(figures, step=event.iteration)
        elif isinstance(event, events.FitFinished | events.FitStopped):
            self._finish()

    def _finish(self) -> None:
        if self._open:
            self._open = False
            self._tool.finish()


# ---------------------------------------------------------------------------------------------- notebook


# Seconds between two drawings in a notebook: as often as an eye follows, whatever the rounds of a batch take.
DRAW_EVERY = 0.1


class NotebookView:
    """A bar with the state of a fit, and one for each job, redrawn in place in a notebook cell.

    In a notebook, `fit` and the jobs show one by themselves, unless they are called with ``verbose=False``.

    Parameters
    ----------
    display : callable, optional
        Called once with HTML to show; returns a callable that replaces it; default: IPython's.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        display: Callable[[str], Callable[[str], None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = Snapshot()
        self.jobs: dict[str, tuple[events.JobProgress, str]] = {}
        self._pace = JobPace(clock)
        self._display = display or _ipython_display
        self._update: Callable[[str], None] | None = None
        self._clock, self._drawn = clock, -math.inf

    def __call__(self, event: events.Event) -> None:
        """Process an event and redraw."""
        self.view.take(event)
        often = isinstance(event, events.RoundFinished | events.BatchStarted | events.CheckpointWritten)
        if isinstance(event, events.JobProgress):
            self.jobs[event.job] = (event, self._pace.left(event))
            often = event.done < event.total
        now = self._clock()
        if often and now - self._drawn < DRAW_EVERY:
            return
        self._drawn = now
        text = render(self.view, self.jobs)
        if self._update is None:
            self._update = self._display(text)
        else:
            self._update(text)


def _ipython_display(text: str) -> Callable[[str], None]:
    from IPython.display import HTML, display

    handle = display(HTML(text), display_id=True)
    return lambda newer: handle.update(HTML(newer))


def in_notebook() -> bool:
    """Tell whether this code runs in the kernel of a notebook, without importing IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def with_view(callbacks: Iterable[events.Callback], verbose: bool | None = None) -> tuple[events.Callback, ...]:
    """Add a live view to callbacks: by default in a notebook, unless one of them is a view.

    Parameters
    ----------
    callbacks : iterable of callables
    verbose : bool, optional
        Show progress, in a notebook as a view and elsewhere as lines, or nothing; default: in a notebook only.
    """
    given, shown = tuple(callbacks), in_notebook()
    if verbose is False or not (verbose or shown):
        return given
    if any(isinstance(callback, NotebookView | TerminalBar | Lines) for callback in given):
        return given
    return (*given, NotebookView() if shown else Lines())


# Colours that can be read on light and on dark.
_TRACK, _FILL, _QUIET = "rgba(128,128,128,.25)", "#3f7fe8", "opacity:.7"


def render(view: Snapshot, jobs: Mapping[str, tuple[events.JobProgress, str]] | None = None) -> str:
    """Render a fit and jobs as HTML, each with its bar."""
    parts = []
    if view.n_iter:
        parts.append(_bar("fit", view.done / view.n_iter, view.count, describe(view)))
    for job, left in (jobs or {}).values():
        words = left if job.done < job.total else ""
        parts.append(
            _bar(job.job, job.done / max(job.total, 1), f"{job.done:,} of {job.total:,} {job.unit}", words)
        )
    note = f"<div>{html.escape(view.note)}</div>" if view.note else ""
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums">'
        f"{''.join(parts)}{note}{_curve(view.errors)}</div>"
    )


def _bar(name: str, share: float, count: str, words: str) -> str:
    """Draw a bar with a name before it and words after it."""
    fill = f'<span style="display:block;height:100%;width:{100 * share:.1f}%;background:{_FILL}"></span>'
    track = f"display:inline-block;width:180px;height:8px;border-radius:4px;overflow:hidden;background:{_TRACK}"
    return (
        f'<div role="progressbar" aria-label="{html.escape(name)}" aria-valuenow="{100 * share:.0f}">'
        f'<b style="display:inline-block;min-width:4em">{html.escape(name)}</b> '
        f'<span style="{track}">{fill}</span> {html.escape(count)} '
        f'<span style="{_QUIET}">{html.escape(words)}</span></div>'
    )


def _curve(errors: list[float]) -> str:
    """Draw the relative error over batches; empty before the second."""
    shown = [error for error in errors if math.isfinite(error)]
    if len(shown) < 2:
        return ""
    label = f"relative error per batch, {shown[0]:.4f} to {shown[-1]:.4f}"
    return f'<div style="{_QUIET}">{sparkline(shown, 240, 36, label)} {label}</div>'


@contextmanager
def subscribers(
    bar: bool | None = None, log: str | os.PathLike[str] | None = None, track: str | None = None
) -> Iterator[list[events.Callback]]:
    """Yield the callbacks of a command.

    Parameters
    ----------
    bar : bool, optional
        Draw bars, or show nothing; default: bars on a terminal, and lines where there is none.
    log : path, optional
        File for JSON lines.
    track : str, optional
        Name of a tracker; see `Tracker.named`.
    """
    with ExitStack() as stack:
        callbacks: list[events.Callback] = []
        if bar or (bar is None and sys.stderr.isatty()):
            callbacks.append(stack.enter_context(TerminalBar()))
        elif bar is None:
            callbacks.append(Lines(LINE_EVERY))
        if log is not None:
            callbacks.append(stack.enter_context(JsonLines(log)))
        if track is not None:
            callbacks.append(stack.enter_context(Tracker.named(track)))
        yield callbacks
