"""`dbksvd import`: files of many layouts to an activation store."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from typing import Any

import click

from dbksvd_dask import _words
from dbksvd_dask.cli import options, output
from dbksvd_dask.cli.sections import IMPORT, SectionedCommand
from dbksvd_dask.errors import InputError

# what to say of the rows by (link, verify)
CHECKED = {
    (False, None): ", read back and compared",
    (False, True): ", read back and compared",
    (True, None): ", nothing copied",
    (True, False): ", nothing copied",
    (True, True): ", nothing copied; checksums recorded",
}


@click.command("import", cls=SectionedCommand, sections=IMPORT)
@click.argument("source", metavar="SRC...", type=click.Path(), nargs=-1, required=True)
@click.argument("path", metavar="DST", type=click.Path())
@click.option("--array", help="Name of the array, dataset, tensor or column with the activations.")
@click.option("--aligned", multiple=True, metavar="NAME", help="Keep this array beside the rows; repeatable.")
@click.option(
    "--texts",
    metavar="FILE|COLUMN",
    help="Text of each row: a file with one line per row, or a column of the files. Lines may mark the "
    "token of their row: the small <<bird>> sings. Default: a column called text, if there is one.",
)
@click.option(
    "--format",
    "format",
    help="npy, npz, safetensors, hdf5, arrow, parquet, torch, raw, zarr, saev, bionemo or llamascopium.",
)
@click.option("--dtype", help="dtype of a raw file; bfloat16 also for two-byte numbers saved by NumPy.")
@click.option("--n-features", type=int, help="Width of the rows of a raw file.")
@click.option("--layer", type=int, help="Which layer of arrays (example, layer, token, feature).")
@click.option("--mask", type=click.Path(), help="A .npy file: rows whose entry is 0 or False are left out.")
@click.option("--mask-array", metavar="NAME", help="The same, from an array of the files such as attention_mask.")
@click.option("--drop-first-token", is_flag=True, help="Leave out the first token of each sequence.")
@click.option("--drop-outliers", type=float, metavar="FACTOR", help="Leave out rows above FACTOR x median norm.")
@click.option(
    "--nonfinite",
    type=click.Choice(["error", "drop", "keep"]),
    default="error",
    show_default=True,
    help="Rows with NaN or infinite values.",
)
@click.option("--source-row", is_flag=True, help="Record the number of each row in the source files.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows per chunk; default: 16 to 32 MiB.")
@click.option("--compressor", type=click.Choice(["zstd", "blosc"]), help="Default: none, which reads fastest.")
@click.option("--link", is_flag=True, help="Refer to the files instead of copying them; they must stay unchanged.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Read every chunk back and compare it; default, except with --link, where it records checksums.",
)
@options.part_option
@options.worker_options
@output.log_option
@output.status_option
@output.force_option
@output.plan_option
@output.json_option
def command(
    source: tuple[str, ...],
    path: str,
    as_json: bool,
    show_plan: bool,
    log: str | None,
    status: str | None,
    **given: Any,
) -> None:
    """Turn activations on disk into a store that `fit` and `encode` read at full speed.

    SRC is one or more files, a folder or a pattern: .npy .npz .safetensors .h5 .parquet .arrow .pt, raw memory
    maps (.bin .raw .dat .mmap), Zarr, a saved Hugging Face dataset such as an activation cache of SAELens, or
    shards of saev, BioNeMo or Llamascopium. Arrays of shape (sequence, token, feature) become rows; --layer
    chooses one of (example, layer, token, feature). Files are read in natural order: shard_2 before shard_10. A
    raw file is described by FILE.json beside it (shape, dtype), or by --dtype and --n-features.

    With --link the store holds byte ranges of the files instead of a copy. This takes a moment, and works where
    rows are plain bytes (.npy, .safetensors, raw, uncompressed Zarr) and none are left out. A file that changes
    later is refused by name.

    DST appears once it is complete. An interrupted import resumes: run the same command again. Machines that share
    a file system can split the work: each does one part, in any order, and the last one to end publishes DST. With
    --scheduler or --workers, Dask workers read and write.

    \b
    dbksvd import activations.npy store.zarr --texts texts.txt
    dbksvd import shards/*.npy store.zarr
    dbksvd import 'shards/*.safetensors' store.zarr --array layer_12 --aligned token_ids
    dbksvd import cache/ store.zarr --drop-first-token --drop-outliers 10
    dbksvd import acts.bin store.zarr --dtype bfloat16 --n-features 2304
    dbksvd import 'shards/*.safetensors' store.zarr --link
    dbksvd import 'shards/*.npy' store.zarr --part 3/8     # on eight machines: 1/8 to 8/8
    dbksvd import 'shards/*.npy' store.zarr --part auto    # in an array job of SLURM or Kubernetes
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.jobs.estimate import estimate_import
    from dbksvd_dask.jobs.import_ import check_import, import_activations

    if os.path.isfile(path) and len(source) > 1:  # an unquoted pattern, and no store after it
        raise InputError(
            f"{path} is a file, and the last argument is the store to write: "
            f"dbksvd import {source[0]} ... store.zarr"
        )
    workers = options.workers_of(given)
    if show_plan:
        output.report(estimate_import(source, path, **given), as_json)
        return
    if workers is not None:
        check_import(source, path, **given)
    with workers or contextlib.nullcontext(), output.watching(as_json, log, status=status) as callbacks:
        result = import_activations(source, path, callbacks=callbacks, **given)
    if not result.finished:
        output.report(asdict(result), as_json, output.describe_part(result, given["part"]))
        return
    text = (
        f"{result.path}: {result.n_samples} x {result.n_features} {result.dtype} "
        f"({_words.format_bytes(result.nbytes)}) {'linked to' if given['link'] else 'from'} {result.n_files} "
        f"file{'s' * (result.n_files != 1)} in {_words.format_seconds(result.seconds)}"
    ) + CHECKED.get((given["link"], given["verify"]), "")
    if result.chunks_kept:
        text += f"; resumed after {result.chunks_kept} of {result.chunks_kept + result.chunks_written} chunks"
    if any(result.dropped.values()):
        text += "; rows left out: " + ", ".join(f"{k} {v}" for k, v in result.dropped.items() if v)
    if result.texts:
        text += f"; texts in {result.texts}"
    if result.values is not None:
        seen = result.values
        text += f"; values from {seen.smallest:.4g} to {seen.largest:.4g}, mean norm {seen.mean_norm:.4g}"
        if seen.doubt:
            output.warn(f"these values do not look like activations: {seen.doubt}")
    output.report(asdict(result), as_json, text)
    output.next_step("shuffle", path, "shuffled.zarr", "--seed", "0", as_json=as_json)
