"""What the commands share: options, progress bars, sizes in words, results as text or JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from dbksvd_dask.events import Callback, JobProgress
from dbksvd_dask.safe_text import printable, redacted, redacted_values

F = TypeVar("F", bound=Callable[..., Any])

# Python with NumPy, Zarr and what a job of files needs, before any data; kernels bring more, see memory.BASE_BYTES
BASE_BYTES = 250_000_000

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes such as 128MiB, 0.5GB or 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", str(value).lower())
        try:
            number = float(match.group(1)) if match else -1.0
        except ValueError:
            number = -1.0
        if match is None or number <= 0:
            self.fail(f"{value!r} is not a size; write 128MiB, 0.5GB or a number of bytes", param, ctx)
        return int(number * _UNITS[match.group(2) or ""])


def json_option(function: F) -> F:
    """Add --json: the result as one JSON object on standard output, no bar."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for machines.")(
        function
    )


def force_option(function: F) -> F:
    """Add --force: replace what exists."""
    text = (
        "Replace an existing output of the same kind when the new one is complete (on a remote: at once); begin "
        "again when unfinished work does not fit."
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


def format_bytes(n: float) -> str:
    """Write a number of bytes for people.

    >>> format_bytes(512), format_bytes(134217728), format_bytes(4.2e12)
    ('512 B', '134.2 MB', '4.20 TB')
    """
    for unit, size, digits in (("TB", 1e12, 2), ("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if n >= size:
            return f"{n / size:.{digits}f} {unit}"
    return f"{int(n)} B"


def format_seconds(seconds: float) -> str:
    """Write a time span for people.

    >>> format_seconds(0.26), format_seconds(75), format_seconds(7500)
    ('0.3 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@contextlib.contextmanager
def progress(as_json: bool = False) -> Iterator[list[Callback]]:
    """Yield callbacks that draw a bar per `JobProgress` job on standard error, when that is a terminal."""
    if as_json or not sys.stderr.isatty():
        yield []
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def show(event: Any) -> None:
            if not isinstance(event, JobProgress):
                return
            if event.job not in tasks:
                tasks[event.job] = bars.add_task(event.job, total=event.total, unit=event.unit)
            bars.update(tasks[event.job], completed=event.done, total=event.total)

        yield [show]


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


def say(text: str, err: bool = False) -> None:
    """Print text for people, whatever the files say that it names: no credentials, no terminal codes."""
    click.echo(printable(redacted(text), keep="\n\t"), err=err)


def table(fields: Mapping[str, Any]) -> str:
    """Lay out names and values in two columns; None is left out, bytes and seconds are put in words."""
    shown = {name.replace("_", " "): value for name, value in fields.items() if value is not None}
    width = max((len(name) for name in shown), default=0)
    return "\n".join(f"{printable(name):<{width}}  {_plain(value, name)}" for name, value in shown.items())


def _plain(value: Any, name: str = "") -> str:
    if isinstance(value, int | float) and name.endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, int | float) and name.endswith("seconds"):
        return format_seconds(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(k))} {_plain(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))


def write_seconds(path: str, nbytes: int = 1 << 25) -> float | None:
    """Measure how long `nbytes` take to reach the disk of `path`; None when that cannot be tried."""
    folder = os.path.dirname(os.path.abspath(path))
    if "://" in path or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return None
    content = os.urandom(1 << 20)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(nbytes >> 20):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # full, or not to be written to
        return None
    return time.perf_counter() - began
