"""`dbksvd import-dictionary`: a dictionary of another tool as one of ours."""

from __future__ import annotations

from typing import Any

import click

from dbksvd_dask.cli import output


@click.command("import-dictionary")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("path", metavar="DST", type=click.Path())
@click.option("--k", type=int, help="Most nonzeros per sample.  [default: what SRC says]")
@click.option(
    "--orientation",
    type=click.Choice(["auto", "atoms_first", "features_first"]),
    default="auto",
    show_default=True,
    help="Orientation of the matrix; auto: by the name of the tensor, or else by its shape.",
)
@click.option("--drop-zero", is_flag=True, help="Leave out atoms of norm 0.")
@click.option("--force", is_flag=True, help="Replace DST if it is a dictionary.")
@output.json_option
def command(source: str, path: str, force: bool, as_json: bool, **options: Any) -> None:
    """Read a SAELens folder, a .safetensors or a .npy file as the dictionary DST.

    Atoms are normalised. Use DST wherever a dictionary is expected: to encode, to compare with your own, or to
    start a fit from.

    \b
    dbksvd import-dictionary sae_folder sae.zarr --k 32
    dbksvd fit store.zarr run --n-atoms 4096 --k 32 --init sae.zarr
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.export.foreign import load_foreign
    from dbksvd_dask.store.dictionary import save_dictionary

    dictionary = load_foreign(source, **options)
    save_dictionary(path, dictionary, overwrite=force)
    changes: dict[str, Any] = dictionary.extra.get("import", {})
    fields = {
        "path": path,
        "n_atoms": dictionary.n_atoms,
        "n_features": dictionary.n_features,
        "k": dictionary.params.get("k"),
        "mean": dictionary.mean is not None,
        "transposed": changes.get("transposed", False),
        "normalised": changes.get("normalised", False),
        "dropped": None if "kept" not in changes else "atoms of norm 0",
    }
    output.report(fields, as_json)
