"""`dbksvd info`: what lies at a path.

A describer is a function that takes a path and returns the fields to show, or None when the path holds something
else. It is listed below by name, so that nothing is imported before it is asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import click

from dbksvd_dask.cli import output
from dbksvd_dask.errors import InputError
from dbksvd_dask.store import paths

Describer = Callable[[str, bool], dict[str, Any] | None]

# asked in this order; "module:function" with the signature of `Describer` (path, verify)
DESCRIBERS: list[str] = [
    "dbksvd_dask.cli.describe:describe_status",
    "dbksvd_dask.cli.describe:describe_codes",
    "dbksvd_dask.cli.describe:describe_dictionary",
    "dbksvd_dask.cli.describe:describe_unfinished",
    "dbksvd_dask.cli.describe:describe_activations",
    "dbksvd_dask.cli.describe:describe_source",
]


def describe(path: str, verify: bool = False) -> dict[str, Any]:
    """Return what is known about a path, from the first describer that knows it.

    Parameters
    ----------
    path : path or fsspec URL
        A store, a dictionary, codes, a checkpoint, or files that can be imported.
    verify : bool
        Also read everything and compare checksums; what has none is refused.
    """
    if not paths.exists(path):
        unfinished = paths.exists(f"{paths.normalise(path)}.partial")
        hint = f"; unfinished work is at {path}.partial" if unfinished else ""
        raise InputError(f"nothing at {path}{hint}")
    for entry in DESCRIBERS:
        module, function = entry.split(":")
        describer: Describer = getattr(importlib.import_module(module), function)
        found = describer(paths.normalise(path), verify)
        if found is not None:
            return found
    raise InputError(f"dbksvd does not recognise {path}; `dbksvd import --help` lists what can be imported")


@click.command("info")
@click.argument("path", nargs=-1, required=True, type=click.Path())
@click.option("--verify", is_flag=True, help="Read everything and compare it with the checksums.")
@click.option(
    "--prometheus", is_flag=True, help="Print the state of runs and status files as Prometheus collects it."
)
@output.json_option
def command(path: tuple[str, ...], verify: bool, prometheus: bool, as_json: bool) -> None:
    """Describe a store, a run, a dictionary, codes, or files that can be imported.

    For a running fit, show the iteration, the error, rows per second and the time left; for a file written
    with --status, the progress of the job.

    \b
    dbksvd info store.zarr
    dbksvd info store.zarr --verify
    dbksvd info activations.safetensors
    dbksvd info run
    dbksvd info runs/* --prometheus
    """  # noqa: D301 - click needs the backspace character itself
    if prometheus:
        from dbksvd_dask import status

        output.say(status.prometheus(status.read_all(path)))
        return
    if len(path) > 1:
        raise InputError(f"{len(path)} paths were given; describe them one at a time (several: with --prometheus)")
    output.report(describe(path[0], verify), as_json)
