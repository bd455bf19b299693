"""What a command shows of its progress: a bar on a terminal, else a line now and then; JSON lines in a file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dbksvd_dask import events
from dbksvd_dask.cli.common import say

# seconds between two lines where there is no terminal; a log of a night then has some thousand
LINE_EVERY = 10.0


@contextlib.contextmanager
def watching(as_json: bool, log: str | None = None) -> Iterator[list[events.Callback]]:
    """Yield the callbacks of a command.

    Parameters
    ----------
    as_json : the result is for machines: no bar and no lines
    log : file for JSON lines, or None
    """
    from dbksvd_dask import progress

    terminal = sys.stderr.isatty()
    with progress.subscribers(bar=terminal and not as_json, log=log) as callbacks:
        yield callbacks if terminal or as_json else [*callbacks, Lines(LINE_EVERY)]


class Lines:
    """Writes where a fit or a job stands to standard error, one line at a time, not too often."""

    def __init__(self, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        from dbksvd_dask.progress import Snapshot

        self._every, self._clock, self._view = every, clock, Snapshot()
        self._last = clock()

    def __call__(self, event: events.Event) -> None:
        """Take an event in, and write a line if it is time for one."""
        self._view.take(event)
        text = self._text(event)
        now = self._clock()
        if text is not None and now - self._last >= self._every:
            self._last = now
            say(text, err=True)

    def _text(self, event: Any) -> str | None:
        from dbksvd_dask.progress import describe

        if isinstance(event, events.JobProgress):
            return f"{event.job}: {event.done} of {event.total} {event.unit}"
        if isinstance(event, events.BatchFinished):
            return f"fit: {self._view.count}, {describe(self._view)}"
        if isinstance(event, events.Retrying):
            self._last = -self._every  # out of the ordinary: at once
            return self._view.note
        return None
