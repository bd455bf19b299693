"""`dbksvd demo`: everything once, on two photographs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dbksvd_dask.cli import options, output

if TYPE_CHECKING:
    from dbksvd_dask.demo.run import DemoResult


@click.command("demo")
@click.argument("folder", metavar="[OUT]", type=click.Path(file_okay=False), default="demo-out")
@click.option("--small", is_flag=True, help="Use 8374 patches and 128 atoms, to check an installation.")
@click.option("--force", is_flag=True, help="Replace the results of an earlier demo in OUT.")
@options.scheduler_options
@output.json_option
def command(folder: str, small: bool, force: bool, as_json: bool, **given: Any) -> None:
    """Try it on two photographs: learn a dictionary of their patches and rebuild one from its codes.

    Cuts the two photographs that come with scikit-learn into 172,216 colour patches of 16 x 16 x 3 numbers, in a
    store on disk; learns 1024 atoms, of which each patch may use 12; encodes all patches; rebuilds one photograph
    from its codes; and writes pictures and a page on which to browse the atoms. The results go to OUT (demo-out by
    default) and take about 350 MB. Expect about a minute on two cores.

    \b
    dbksvd demo
    dbksvd demo --small
    dbksvd demo somewhere/else --force
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask import cluster
    from dbksvd_dask.demo.run import SMALL, run_demo

    with cluster.connect(**options.connection(given)), output.watching(as_json) as callbacks:
        result = run_demo(folder, settings=SMALL if small else None, force=force, callbacks=callbacks)
    if as_json:
        output.report(asdict(result), as_json)
    else:
        _show(result)


def _show(result: DemoResult) -> None:
    """Print a short table and where things are."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Dictionary of photograph patches", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)
    for name, path in result.files.items():
        console.print(f"{name:<11} {path}", soft_wrap=True, highlight=False)
    page = result.files["report"]
    console.print(f"Open {page} in a browser to look at the atoms.", soft_wrap=True, highlight=False)


def _rows(result: DemoResult) -> list[tuple[str, str]]:
    metrics, last = result.metrics, result.history
    seconds = result.seconds
    return [
        ("patches", f"{result.n_samples:,} x {result.n_features}"),
        ("atoms, of which each patch uses", f"{result.n_atoms:,}, {metrics['l0_mean']:.3g}"),
        ("mean relative error, all patches", f"{metrics['mean_relative_error']:.4f}"),
        ("variance explained, all patches", f"{metrics['variance_explained']:.4f}"),
        # not new to the dictionary: every pixel of a held-out patch is in patches that were trained on
        ("variance explained, patches set aside", f"{last['validation_variance_explained']:.4f}"),
        ("atoms never used", f"{metrics['n_dead']}"),
        ("photograph from its codes", f"{result.psnr:.1f} dB"),
        (
            "seconds: fit, encode, all",
            f"{seconds['fit']:.0f}, {seconds['encode']:.0f}, {sum(seconds.values()):.0f}",
        ),
    ]
