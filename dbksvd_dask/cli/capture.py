"""`dbksvd capture`: activations of a language model, to stores."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from dbksvd_dask import _words
from dbksvd_dask.cli import output
from dbksvd_dask.cli.options import model_options, text_options
from dbksvd_dask.cli.sections import CAPTURE, SectionedCommand


@click.command("capture", cls=SectionedCommand, sections=CAPTURE)
@click.argument("model", metavar="MODEL", type=click.Path())
@click.argument("texts", metavar="TEXTS", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.option(
    "--hook", "hooks", multiple=True, required=True, help="resid:8, mlp:8 or attn:8; repeatable, in one pass."
)
@text_options
@click.option("--label", help="Column of the labels.")
@click.option("--n-tokens", type=click.IntRange(1), help="Stop after the window that reaches this many rows.")
@click.option("--seed", type=click.IntRange(0), help="Shuffle the texts with this seed.  [default: no shuffle]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Data type of the stores.",
)
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows per chunk; default: 16 to 32 MiB.")
@model_options
@output.log_option
@output.force_option
@output.json_option
def command(model: str, texts: str, out: str, as_json: bool, log: str | None, **options: Any) -> None:
    """Write the activations of a language model to stores in the folder OUT, one per hook.

    MODEL is a Hugging Face model directory or a .gguf file. TEXTS is a file, a folder or a quoted pattern: .txt
    and .md (one text each), .parquet .tab .tsv .csv .jsonl (one text per row), also compressed (.zst .gz).

    A hook is a place in the model: resid:8 is the residual stream after block 8, counted from 0; mlp:8 and attn:8
    are what the MLP and the attention of that block add to it. Blocks after the last hook are not computed.

    A store appears once it is complete. An interrupted capture resumes: run the same command again.

    \b
    dbksvd capture model/ texts/ acts --hook resid:8
    dbksvd capture model.gguf news.csv.zst acts --hook resid:8 --hook mlp:8 --label topic --dtype bfloat16
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.lm import capture_activations, open_model, read_texts

    reading = {name: options.pop(name) for name in ("column", "label", "lines")}
    given = read_texts(texts, **reading)
    opened = open_model(model, dtype=options.pop("model_dtype"), device=options.pop("device"))
    with output.watching(as_json, log) as callbacks:
        result = capture_activations(opened, given, out, callbacks=callbacks, **options)
    text = "\n".join(f"{path}: {result.n_rows} x {result.n_features} at {h}" for h, path in result.stores.items())
    if result.tokens_run:
        pace = f"{result.tokens_per_second:.0f} tokens/s"
        text += f"\n{result.tokens_run} tokens in {_words.format_seconds(result.seconds)}, {pace}"
    if result.n_empty:
        text += f"; {result.n_empty} texts without a token left out"
    output.report(asdict(result), as_json, text)
