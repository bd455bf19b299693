"""`dbksvd logits`: the tokens that each atom promotes and suppresses."""

from __future__ import annotations

import click

from dbksvd_dask.cli import output


@click.command("logits")
@click.argument("model", metavar="MODEL", type=click.Path())
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path(dir_okay=False))
@click.option("--n", "n", type=click.IntRange(1), default=10, show_default=True, help="Tokens per atom and sign.")
@click.option("--device", default="cpu", show_default=True, help="Device of the model, such as cuda.")
@output.json_option
def command(model: str, run: str, out: str, n: int, device: str, as_json: bool) -> None:
    """For each atom of RUN, write the tokens whose logits it changes most to the JSON file OUT.

    Only the direct path counts: atoms times the scale of the last norm times the output embedding of MODEL. The
    report shows them.

    \b
    dbksvd logits model/ run logits.json
    dbksvd report run --codes codes.zarr --logits logits.json
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.lm import open_model, write_logits
    from dbksvd_dask.store.runs import open_dictionary

    dictionary = open_dictionary(run)
    path = write_logits(out, open_model(model, device=device), dictionary, n)
    fields = {"path": path, "n_atoms": dictionary.n_atoms, "n": n}
    output.report(fields, as_json, f"{path}: {n} tokens of each sign for {dictionary.n_atoms} atoms")
