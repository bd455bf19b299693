"""`dbksvd import`: files of many layouts to an activation store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from dbksvd_dask import _words
from dbksvd_dask.cli import output

# what to say of the rows by (link, verify)
CHECKED = {
    (False, None): ", read back and compared",
    (False, True): ", read back and compared",
    (True, None): ", nothing copied or read",
    (True, False): ", nothing copied or read",
    (True, True): ", nothing copied; checksums recorded",
}


@click.command("import")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("path", metavar="DST", type=click.Path())
@click.option("--array", help="Name of the array, dataset, tensor or column with the activations.")
@click.option("--aligned", multiple=True, metavar="NAME", help="Keep this array beside the rows; repeatable.")
@click.option(
    "--format",
    "format",
    help="npy, npz, safetensors, hdf5, arrow, parquet, torch, raw, zarr, saev, bionemo or llamascopium.",
)
@click.option("--dtype", help="dtype of a raw file; bfloat16 also for two-byte numbers saved by NumPy.")
@click.option("--n-features", type=int, help="Width of the rows of a raw file.")
@click.option("--layer", type=int, help="Which layer of arrays (example, layer, token, feature).")
@click.option("--mask", type=click.Path(), help="A .npy file: rows with 0 or False in it are left out.")
@click.option("--mask-array", metavar="NAME", help="The same from an array of the files, as attention_mask.")
@click.option("--drop-first-token", is_flag=True, help="Leave out the first token of each sequence.")
@click.option("--drop-outliers", type=float, metavar="FACTOR", help="Leave out rows above FACTOR x median norm.")
@click.option(
    "--nonfinite",
    type=click.Choice(["error", "drop", "keep"]),
    default="error",
    show_default=True,
    help="Rows with NaN or infinite values.",
)
@click.option("--source-row", is_flag=True, help="Keep the number that each row had in the files.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows per chunk; default: 16 to 32 MiB.")
@click.option("--compressor", type=click.Choice(["zstd", "blosc"]), help="Default: none, which reads fastest.")
@click.option("--link", is_flag=True, help="Copy nothing: refer to the files, which have to stay as they are.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Read every chunk back and compare it; default, except with --link, where it records checksums.",
)
@output.log_option
@output.status_option
@output.force_option
@output.plan_option
@output.json_option
def command(
    source: str, path: str, as_json: bool, show_plan: bool, log: str | None, status: str | None, **options: Any
) -> None:
    """Turn activations on disk into a store that `fit` and `encode` read at full speed.

    SRC is a file, a folder or a quoted pattern: .npy .npz .safetensors .h5 .parquet .arrow .pt, raw memory maps
    (.bin .raw .dat .mmap), Zarr, a saved Hugging Face dataset such as an activation cache of SAELens, or shards of
    saev, BioNeMo or Llamascopium. Arrays of shape (sequence, token, feature) become rows; of four dimensions
    (example, layer, token, feature), --layer chooses one. Many files go in natural order: shard_2 before shard_10.
    A raw file is described by FILE.json beside it (shape, dtype), or by --dtype and --n-features.

    With --link the store holds byte ranges of the files instead of a copy. It takes a moment, and works where
    rows are plain bytes (.npy, .safetensors, raw, uncompressed Zarr) and none is left out. A file that changes
    later is refused by name.

    DST appears when it is complete. If the import is interrupted, the same command goes on where it stopped.

    \b
    dbksvd import activations.npy store.zarr
    dbksvd import 'shards/*.safetensors' store.zarr --array layer_12 --aligned token_ids
    dbksvd import cache/ store.zarr --drop-first-token --drop-outliers 10
    dbksvd import acts.bin store.zarr --dtype bfloat16 --n-features 2304
    dbksvd import 'shards/*.safetensors' store.zarr --link
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.jobs.estimate import estimate_import
    from dbksvd_dask.jobs.import_ import import_activations

    if show_plan:
        output.report(estimate_import(source, path, **options), as_json)
        return
    with output.watching(as_json, log, status=status) as callbacks:
        result = import_activations(source, path, callbacks=callbacks, **options)
    text = (
        f"{result.path}: {result.n_samples} x {result.n_features} {result.dtype} "
        f"({_words.format_bytes(result.nbytes)}) {'linked to' if options['link'] else 'from'} {result.n_files} "
        f"file(s) in {_words.format_seconds(result.seconds)}"
    ) + CHECKED.get((options["link"], options["verify"]), "")
    if result.chunks_kept:
        text += f"; went on after {result.chunks_kept} of {result.chunks_kept + result.chunks_written} chunks"
    if any(result.dropped.values()):
        text += "; rows left out: " + ", ".join(f"{k} {v}" for k, v in result.dropped.items() if v)
    output.report(asdict(result), as_json, text)
