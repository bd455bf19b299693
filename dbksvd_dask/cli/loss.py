"""`dbksvd loss`: what a model loses when its activations are replaced by their reconstructions."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dbksvd_dask.cli import output
from dbksvd_dask.cli.options import model_options, text_options
from dbksvd_dask.cli.sections import LOSS, SectionedCommand

if TYPE_CHECKING:
    from dbksvd_dask.lm.loss import LossRecovered


@click.command("loss", cls=SectionedCommand, sections=LOSS)
@click.argument("model", metavar="MODEL", type=click.Path())
@click.argument("texts", metavar="TEXTS", type=click.Path())
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option("--hook", required=True, help="Where the dictionary was fitted, such as resid:8.")
@click.option(
    "--k", "ks", multiple=True, type=click.IntRange(1), help="Maximum number of nonzeros per token; repeatable."
)
@text_options
@click.option("--n-tokens", type=click.IntRange(1), help="Stop after the window that reaches this many tokens.")
@click.option("--seed", type=click.IntRange(0), help="Shuffle the texts with this seed.  [default: no shuffle]")
@model_options
@output.log_option
@output.json_option
def command(
    model: str,
    texts: str,
    runs: tuple[str, ...],
    ks: tuple[int, ...],
    as_json: bool,
    log: str | None,
    **options: Any,
) -> None:
    """Measure how much of the loss of MODEL is recovered with the dictionary of RUN in place of its activations.

    RUN is the folder of a fit, a dictionary, or a SAELens folder; several are measured in one pass. TEXTS as for
    `dbksvd capture`: use texts that the dictionary was not fitted on. Zero ablation is the lenient reference,
    mean ablation the strict one. Errors are standard errors over windows.

    \b
    dbksvd loss model/ held-out/ run --hook resid:8 --k 20 --k 40 --k 80
    dbksvd loss model/ held-out/ run sae/ --hook resid:8 --n-tokens 8192 --json
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.lm import loss_recovered, open_model, read_texts
    from dbksvd_dask.lm.reconstruct import open_reconstruction

    wanted: list[int | None] = list(ks) or [None]
    named = {_name(run, k): open_reconstruction(run, k) for run in runs for k in wanted}
    given = read_texts(texts, column=options.pop("column"), lines=options.pop("lines"))
    opened = open_model(model, dtype=options.pop("model_dtype"), device=options.pop("device"))
    with output.watching(as_json, log) as callbacks:
        result = loss_recovered(opened, given, options.pop("hook"), named, callbacks=callbacks, **options)
    output.report(asdict(result) | {"doubtful": result.doubtful}, as_json, _describe(result))


def _name(run: str, k: int | None) -> str:
    name = os.path.basename(os.path.normpath(run))
    return name if k is None else f"{name} k={k}"


def _describe(result: LossRecovered) -> str:
    """A table: a line for the intact model, one for each replacement."""
    rows = {"zero": result.zero, "mean": result.mean, **result.reconstructions}
    width = max(len(name) for name in (*rows, "intact"))
    head = f"{'':<{width}}  {'loss':>17}  {'KL':>17}  {'of zero ablation':>17}  {'of mean ablation':>17}"
    lines = [f"{result.hook}, {result.n_tokens} tokens in {result.n_windows} windows", head]
    lines.append(f"{'intact':<{width}}  {result.intact!s:>17}")
    for name, row in rows.items():
        cells = [row.loss, row.kl, *([row.of_zero, row.of_mean] if name in result.reconstructions else [])]
        lines.append("  ".join([f"{name:<{width}}", *(f"{cell!s:>17}" for cell in cells)]))
    return "\n".join(lines)
