"""`dbksvd report`: the page that shows what a dictionary has found."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import click

from dbksvd_dask import _words
from dbksvd_dask.cli import output


class Shape(click.ParamType):  # type: ignore[type-arg]
    """The shape of a picture, such as 16x16x3."""

    name = "HxWxC"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a shape."""
        if not isinstance(value, str):
            return value
        if not re.fullmatch(r"\d+x\d+(x[13])?", value.lower()):
            self.fail(f"{value!r} is not a shape; write 16x16x3, or 28x28 for grey pictures", param, ctx)
        return tuple(int(size) for size in value.lower().split("x"))


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--codes", type=click.Path(), help="Codes made with this run by `dbksvd encode`.  [required]")
@click.option("--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="The page.")
@click.option(
    "--samples",
    type=click.Path(),
    help="The samples behind the codes: a text file with one line each, or an activation store with texts, tokens "
    "or image patches. Default: the store that was encoded.",
)
@click.option("--activations", type=click.Path(), help="Store to measure errors on, if the codes have none.")
@click.option("--explanations", type=click.Path(), help="JSON list of atom, explanation and score.")
@click.option("--logits", type=click.Path(), help="Tokens of each atom, written by `dbksvd logits`.")
@click.option("--title", help="Heading of the page; default: the name of the run.")
@click.option("--image-shape", type=Shape(), help="Shape of the rows, if they are pictures: 16x16x3.")
@click.option("--max-samples", type=click.IntRange(1), help="Use only the first N samples.")
@click.option("--n-top", type=click.IntRange(1), default=10, show_default=True, help="Strongest samples per atom.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random samples.")
@output.json_option
def command(run: str, codes: str | None, out: str, as_json: bool, **options: Any) -> None:
    """Write a page for browsing a dictionary: one HTML file that opens from disk, without a network.

    RUN is the folder of a fit, or a dictionary. The page has curves and histograms, a searchable table of all
    atoms, and for every atom its strongest samples, its neighbours and the atoms that fire with it.

    \b
    dbksvd fit store.zarr run --recipe read --n-atoms 1024 --k 16
    dbksvd encode store.zarr run codes.zarr
    dbksvd report run --codes codes.zarr --out page.html
    dbksvd report run --codes codes.zarr --samples texts.txt
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.report import write_report

    if codes is None:
        raise click.UsageError(
            f"Missing option '--codes': make codes with `dbksvd encode STORE {run} codes.zarr`, then type "
            f"`dbksvd report {run} --codes codes.zarr`."
        )
    began = time.perf_counter()
    path = write_report(run, codes, out, **options)
    nbytes, seconds = os.path.getsize(path), time.perf_counter() - began
    text = f"{path}: {_words.format_bytes(nbytes)} in {_words.format_seconds(seconds)}"
    output.report({"path": path, "nbytes": nbytes, "seconds": seconds}, as_json, text)
