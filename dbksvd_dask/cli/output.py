"""What the commands share: options, bars and lines of progress, results as text or JSON."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from dbksvd_dask import events
from dbksvd_dask._words import format_bytes, format_seconds, listed, read_bytes
from dbksvd_dask.base.safe_text import printable, redacted, redacted_values

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes such as 128MiB, 0.5GB or 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size."""
        size = read_bytes(value)
        if size is None:
            self.fail(f"{value!r} is not a size; write 128MiB, 0.5GB or a number of bytes", param, ctx)
        return size


def json_option(function: F) -> F:
    """Add --json: the result as one JSON object on standard output, no bar."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for machines.")(
        function
    )


def force_option(function: F) -> F:
    """Add --force: replace what exists."""
    text = (
        "Replace an existing output of the same kind once the new one is complete (in an object store: at once). "
        "Discard unfinished work that does not match."
    )
    return click.option("--force", is_flag=True, help=text)(function)


def verify_option(function: F) -> F:
    """Add --no-verify: publish without reading back."""
    text = "Read every chunk back and compare it with what was written."
    return click.option("--verify/--no-verify", default=True, show_default=True, help=text)(function)


def plan_option(function: F) -> F:
    """Add --plan: say what would happen, and stop."""
    text = "Show memory, passes, bytes and the estimated time, then stop."
    return click.option("--plan", "show_plan", is_flag=True, help=text)(function)


def log_option(function: F) -> F:
    """Add --log: every event as a line of JSON."""
    text = "Also write every event to this file, as JSON lines."
    return click.option("--log", type=click.Path(dir_okay=False), help=text)(function)


def status_option(function: F) -> F:
    """Add --status: the state of the job as one small file."""
    text = "Keep this JSON file up to date with the state of the job; `dbksvd info FILE` reads it."
    return click.option("--status", type=click.Path(dir_okay=False), help=text)(function)


def report(fields: Mapping[str, Any], as_json: bool, text: str | None = None) -> None:
    """Print a result: as JSON, as the given text, or as lines of name and value.

    Parameters
    ----------
    fields : dict
        The result; values must be JSON.
    as_json : bool
        Whether machines read it.
    text : str, optional
        What people read; default: one line per field.
    """
    if as_json:
        click.echo(json.dumps(redacted_values(fields), indent=1, default=str))
    else:
        say(table(fields) if text is None else text)


def describe_part(result: Any, part: tuple[int, int]) -> str:
    """One line for people about a part of an import or a shuffle that others have to complete."""
    kept = f", {result.chunks_kept} kept from an earlier run" if result.chunks_kept else ""
    from dbksvd_dask.store.atomic import describe_parts

    left = describe_parts(result.parts_missing)
    return (
        f"{result.path}: part {part[0]}/{part[1]} done, {result.chunks_written} chunks in "
        f"{format_seconds(result.seconds)}{kept}; "
        + (
            f"parts not done yet: {left} of {part[1]}; the last one to end publishes the store"
            if left
            else "all parts are done, and another process publishes the store"
        )
    )


def say(text: str, err: bool = False) -> None:
    """Print text for people, whatever the files say that it names: no credentials, no terminal codes."""
    click.echo(printable(redacted(text), keep="\n\t"), err=err)


def warn(text: str) -> None:
    """Print a warning for people, on standard error."""
    say(f"dbksvd: warning: {text}", err=True)


def next_step(command: str, *words: str, as_json: bool) -> None:
    """Say on a terminal which command usually follows; nothing to a log or a machine."""
    if not as_json and sys.stderr.isatty():
        say(f"next: dbksvd {command} {' '.join(shlex.quote(word) for word in words)}", err=True)


def table(fields: Mapping[str, Any]) -> str:
    """Lay out names and values in two columns; None is left out, bytes and seconds are put in words.

    On a terminal, long values continue on lines of their own.
    """
    shown = {_label(name): _plain(value, name) for name, value in fields.items() if value is not None}
    width = max((len(name) for name in shown), default=0)
    room = shutil.get_terminal_size().columns - width - 2 if sys.stdout.isatty() else 0
    return "\n".join(f"{printable(name):<{width}}  {_folded(value, width, room)}" for name, value in shown.items())


def _folded(value: str, width: int, room: int) -> str:
    """Break a long value at spaces, each line below the first; `room` of 0: one line."""
    if room < 20 or len(value) <= room:
        return value
    lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * (width + 2)).join(lines)


def _label(name: str) -> str:
    """Name of a field for people: a time in words is not in seconds."""
    return name.replace("_", " ").replace("seconds", "time")


def _plain(value: Any, name: str = "") -> str:
    if isinstance(value, int | float) and name.endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, int | float) and name.endswith("seconds"):
        return format_seconds(value)
    if isinstance(value, Mapping):
        return _joined([f"{printable(str(k))} {_inner(v)}" for k, v in value.items()])
    if isinstance(value, list | tuple):
        return _joined([_inner(item) for item in value])
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value)) or "''"


def _inner(value: Any) -> str:
    """Put a value within another one in words: brackets show where several items end."""
    several = isinstance(value, Mapping | list | tuple) and len(value) > 1
    return f"({_plain(value)})" if several else _plain(value)


# Longest list that a table shows in full: more than the parameters of a fit, less than the files of a store.
WHOLE_LIST = 64


def _joined(texts: list[str]) -> str:
    return listed(texts) if len(texts) > WHOLE_LIST else ", ".join(texts) or "none"


# ---------------------------------------------------------------------------------------------- watching


@contextlib.contextmanager
def watching(
    as_json: bool, log: str | None = None, track: str | None = None, status: str | None = None
) -> Iterator[list[events.Callback]]:
    """Yield the callbacks of a command: a bar on a terminal, else lines, and a log if asked for.

    Parameters
    ----------
    as_json : bool
        The result is for machines: no bar and no lines.
    log : str, optional
        File for JSON lines.
    track : str, optional
        Experiment tracker and project, TOOL:PROJECT.
    status : str, optional
        File for the state of the job.
    """
    from dbksvd_dask import progress

    with contextlib.ExitStack() as stack:
        callbacks = stack.enter_context(progress.subscribers(bar=False if as_json else None, log=log, track=track))
        if status is not None:
            from dbksvd_dask.status import StatusFile

            callbacks.append(stack.enter_context(StatusFile(status)))
        yield callbacks
