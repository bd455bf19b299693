"""`dbksvd shuffle`: a store rewritten in random order."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

import click

from dbksvd_dask import _words
from dbksvd_dask.cli import options, output
from dbksvd_dask.cli.sections import SHUFFLE, SectionedCommand


@click.command("shuffle", cls=SectionedCommand, sections=SHUFFLE)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("path", metavar="DST", type=click.Path())
@click.option("--seed", type=click.IntRange(0), required=True, help="Seed of the new order.")
@click.option("--block-bytes", type=output.Size(), help="Size of the blocks shuffled in memory; default: 128MiB.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows per chunk; default: as in SRC.")
@click.option("--compressor", type=click.Choice(["zstd", "blosc"]), help="Default: none, which reads fastest.")
@click.option(
    "--scratch", type=click.Path(), help="Folder for the first pass, shared by all parts; default: beside DST."
)
@options.part_option
@options.worker_options
@output.log_option
@output.status_option
@output.verify_option
@output.force_option
@output.plan_option
@output.json_option
def command(
    source: str, path: str, as_json: bool, show_plan: bool, log: str | None, status: str | None, **given: Any
) -> None:
    """Shuffle the rows of a store, so that every batch of a fit is a sample of the whole.

    Neighbouring rows of most stores come from the same text. A fit reads whole chunks, and learns poorly from
    batches of similar rows. Shuffle once; texts, labels and other aligned arrays stay with their rows. While it
    runs, a shuffle needs disk space for one more copy of the store and half a gigabyte (for two copies, if the
    file system cannot release parts of a file) and memory for about three blocks.

    It prints the variance of batch means relative to a full shuffle: 1 is perfect, and hundreds are common before
    a shuffle. DST appears once it is complete. An interrupted shuffle resumes: run the same command again.

    Machines that share a file system can split the work: each does one part, in any order, and the last one to end
    publishes DST. The second pass needs all of the first. A part does its own share of the first, then whatever no
    other part has done yet, so it pays to run the parts at the same time. With --scheduler or --workers, Dask
    workers do both passes.

    \b
    dbksvd shuffle store.zarr mixed.zarr --seed 0
    dbksvd shuffle store.zarr mixed.zarr --seed 0 --part 3/8    # on eight machines: 1/8 to 8/8
    dbksvd shuffle store.zarr mixed.zarr --seed 0 --part auto   # in an array job of SLURM or Kubernetes
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.jobs.estimate import estimate_shuffle
    from dbksvd_dask.jobs.shuffle import check_shuffle, shuffle_activations

    workers = options.workers_of(given)
    if show_plan:
        output.report(estimate_shuffle(source, path, **given), as_json)
        return
    if workers is not None:
        check_shuffle(source, path, **given)
    with workers or contextlib.nullcontext(), output.watching(as_json, log, status=status) as callbacks:
        result = shuffle_activations(source, path, callbacks=callbacks, **given)
    if not result.finished:
        output.report(asdict(result), as_json, output.describe_part(result, given["part"]))
        return
    text = (
        f"{result.path}: {result.n_samples} x {result.n_features} ({_words.format_bytes(result.nbytes)}) in "
        f"{_words.format_seconds(result.seconds)}; variance of batch means relative to a full shuffle: "
        f"{_figure(result.mixing_after)} (before: {_figure(result.mixing_before)})"
    )
    kept, done = result.chunks_kept + result.blocks_kept, result.chunks_written + result.blocks_written
    if kept and given["part"] is None:
        text += f"; resumed after {kept} of {kept + done} parts"
    output.report(asdict(result), as_json, text)
    recipe = ("--recipe", "read", "--n-atoms", "1024", "--k", "16")
    output.next_step("fit", path, "run", *recipe, as_json=as_json)


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"
