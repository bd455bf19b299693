"""`dbksvd export`: a dictionary for SAELens, Hugging Face, Neuronpedia or Delphi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dbksvd_dask.cli import output
from dbksvd_dask.cli.sections import NEURONPEDIA, SectionedCommand, SuggestingGroup
from dbksvd_dask.plan.params import ENCODES

if TYPE_CHECKING:
    from dbksvd_dask.export.saelens import ExportResult

F = TypeVar("F", bound=Callable[..., Any])


@click.group("export", cls=SuggestingGroup)
def command() -> None:
    """Write a dictionary for another tool.

    RUN is the folder of a fit, or a dictionary. Only `neuronpedia --model` needs torch.

    \b
    dbksvd export saelens run sae --model-name gpt2-small --hook-name blocks.6.hook_resid_post
    dbksvd export hf run folder --repo-id me/gpt2-atoms --license mit
    dbksvd export neuronpedia run folder --codes codes.zarr --model-name gpt2-small
    dbksvd export delphi codes.zarr folder --hook-name layers.6 --model-name gpt2
    """  # noqa: D301 - click needs the backspace character itself


def _shared(function: F) -> F:
    """Add what both exports take."""
    for option in reversed(
        [
            click.option("--k", type=int, help="Most nonzeros per sample.  [default: that of the fit]"),
            click.option(
                "--form",
                type=click.Choice(["builtin", "plugin"]),
                default="builtin",
                show_default=True,
                help="For the encoder that SAELens has, or for the class in dbksvd_dask.export.saelens_plugin.",
            ),
            click.option("--codes", type=click.Path(), help="Codes of this dictionary: densities and figures."),
            click.option("--context-size", type=int, help="Tokens per sequence of the activations."),
            click.option("--dataset", "dataset_path", help="Name of the data the activations came from."),
            click.option(
                "--prepend-bos/--no-prepend-bos",
                default=True,
                show_default=True,
                help="Whether sequences began with the token that marks a beginning.",
            ),
            click.option("--force", is_flag=True, help="Replace OUT if it is an earlier export."),
            output.json_option,
        ]
    ):
        function = option(function)
    return function


def _library_options(options: dict[str, Any]) -> dict[str, Any]:
    """Turn options of a command into arguments of the library."""
    names = ("context_size", "dataset_path", "prepend_bos")
    metadata = {name: options.pop(name) for name in names}
    overwrite = options.pop("force")
    return {**options, "overwrite": overwrite, "metadata": metadata}


@command.command("saelens", short_help="A folder that SAELens opens.")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("path", metavar="OUT", type=click.Path())
@click.option("--model-name", required=True, help="Model of the activations, such as gpt2-small.")
@click.option("--hook-name", required=True, help="Hook of the activations, such as blocks.6.hook_resid_post.")
@click.option(
    "--linear",
    metavar="STORE",
    type=click.Path(),
    help="Fit an encoder of one linear step to the codes of STORE, and write a plain JumpReLU SAE.",
)
@click.option(
    "--encode",
    type=click.Choice(ENCODES),
    help="With --linear: imitate the codes of one pursuit, or those of the groups in order. Default: as fitted.",
)
@_shared
def saelens(run: str, path: str, as_json: bool, linear: str | None, encode: str | None, **options: Any) -> None:
    """Write the dictionary of RUN as the folder OUT, which SAELens opens with SAE.load_from_disk.

    \b
    dbksvd export saelens run sae --model-name gpt2-small --hook-name blocks.6.hook_resid_post
    dbksvd export saelens run sae --model-name ... --hook-name ... --form plugin --codes codes.zarr
    dbksvd export saelens run sae --model-name ... --hook-name ... --linear store.zarr
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.export.saelens import export_saelens
    from dbksvd_dask.store.runs import open_dictionary

    if linear is None:
        if encode is not None:
            raise click.UsageError("--encode is for --linear STORE, which was not given; give it too")
        result = export_saelens(open_dictionary(run), path, **_library_options(options))
    else:
        result = _export_linear(run, linear, path, encode, options)
    output.report(asdict(result), as_json, _describe(result))


def _export_linear(run: str, store: str, path: str, encode: str | None, options: dict[str, Any]) -> ExportResult:
    """Fit a linear encoder to the codes of a store, and write it."""
    from dbksvd_dask.encoding import fit_linear_encoder
    from dbksvd_dask.export.saelens import export_linear
    from dbksvd_dask.store.runs import open_dictionary

    for name, default in (("k", None), ("form", "builtin"), ("codes", None)):
        if options.pop(name) != default:
            raise click.UsageError(
                f"--{name} was given beside --linear, which imitates the codes of RUN; leave it out"
            )
    encoder = fit_linear_encoder(open_dictionary(run), store, encode=encode)
    return export_linear(encoder, path, **_library_options(options))


@command.command("hf", short_help="A folder for the Hugging Face hub.")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("path", metavar="OUT", type=click.Path())
@click.option("--repo-id", required=True, metavar="USER/NAME", help="Where it will be uploaded.")
@click.option("--model-name", help="Model of the activations; with --hook-name, adds the form for SAELens.")
@click.option("--hook-name", help="Their place in the model, such as blocks.6.hook_resid_post.")
@click.option("--license", help="Identifier of a licence for the card, such as mit.")
@_shared
def huggingface(run: str, path: str, as_json: bool, **options: Any) -> None:
    """Write the dictionary of RUN as the folder OUT, ready to upload to Hugging Face, with a model card.

    \b
    dbksvd export hf run folder --repo-id me/gpt2-atoms --license mit
    hf upload me/gpt2-atoms folder
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.export.huggingface import export_huggingface
    from dbksvd_dask.store.runs import open_dictionary

    result = export_huggingface(open_dictionary(run), path, **_library_options(options))
    output.report(asdict(result), as_json, _describe(result))


@command.command(
    "neuronpedia",
    short_help="Files that Neuronpedia imports.",
    cls=SectionedCommand,
    sections=NEURONPEDIA,
)
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("path", metavar="OUT", type=click.Path())
@click.option("--codes", required=True, type=click.Path(), help="Codes of tokens, in the order of their texts.")
@click.option("--model-name", required=True, help="Neuronpedia's name of the model, such as gemma-3-270m.")
@click.option("--hook", help="Place of the activations, such as resid:14.  [default: what the store says]")
@click.option("--set-name", default="", help="Name of the source set.  [default: res-dbksvd for resid]")
@click.option("--release", default="dbksvd", show_default=True, help="Sets that are published together.")
@click.option("--creator", default="", help="Who made it.")
@click.option("--creator-id", default="dbksvd-dask", show_default=True, help="Account that imports it.")
@click.option("--url", default="", help="Where to read about it.")
@click.option("--description", default="", help="What it is, in one line.")
@click.option("--dataset", default="", help="Name of the texts.")
@click.option("--samples", type=click.Path(), help="The captured store.  [default: the one that was encoded]")
@click.option("--explanations", type=click.Path(), help="JSON list of atom, explanation and score.")
@click.option("--logits", type=click.Path(), help="Tokens of each atom, written by `dbksvd logits`.")
@click.option("--model", type=click.Path(), help="The model itself, to compute the logits now.")
@click.option("--keywords/--no-keywords", default=True, help="Keywords where there is no explanation.")
@click.option("--vectors", is_flag=True, help="Write the atoms too, to steer with.")
@click.option("--n-top", type=click.IntRange(1), default=20, show_default=True, help="Strongest texts per atom.")
@click.option(
    "--n-tokens", type=click.IntRange(1), default=128, show_default=True, help="Maximum number of tokens per text."
)
@click.option("--max-samples", type=click.IntRange(1), help="Use only the first N tokens.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of what is drawn at random."
)
@click.option("--force", "overwrite", is_flag=True, help="Replace OUT if it is an earlier export.")
@output.json_option
def neuronpedia(run: str, codes: str, path: str, as_json: bool, model: str | None, **options: Any) -> None:
    """Write the dictionary of RUN, with the texts on which each atom is active, for import into Neuronpedia.

    OUT/MODEL/SOURCE has model, release, sourceset and source.jsonl, and features, activations and explanations in
    files of 1024 features.

    \b
    dbksvd export neuronpedia run out --codes codes.zarr --model-name smollm2-135m --logits logits.json
    """  # noqa: D301 - click needs the backspace character itself
    from datetime import datetime

    from dbksvd_dask.report.neuronpedia import export_neuronpedia

    if model is not None and options["logits"] is not None:
        raise click.UsageError("--model and --logits were both given; one of them is enough")
    if model is not None:
        from dbksvd_dask.lm import logits_content, open_model

        options["logits"] = logits_content(open_model(model), run)
    created = datetime.now().isoformat(timespec="seconds")
    result = export_neuronpedia(run, codes, path, created=created, **options)
    counts = f"{result.n_features} features, {result.n_activations} texts, {result.n_explanations} explanations"
    output.report(asdict(result), as_json, f"{result.path}/{result.source}: {counts}")


@command.command("delphi", short_help="A cache of latents that Delphi explains.")
@click.argument("codes", metavar="CODES", type=click.Path())
@click.argument("path", metavar="OUT", type=click.Path())
@click.option("--hook-name", required=True, help="Name of the hook in Delphi, such as layers.14.")
@click.option("--model-name", required=True, help="Model of the activations.")
@click.option("--store", type=click.Path(), help="The captured store.  [default: the one that was encoded]")
@click.option("--dataset", default="", help="Name of the texts.")
@click.option("--n-splits", type=click.IntRange(1), default=5, show_default=True, help="Files of the latents.")
@click.option("--fill", type=int, default=0, show_default=True, help="Token where a text has no row.")
@click.option("--force", "overwrite", is_flag=True, help="Replace OUT if it is an earlier export.")
@output.json_option
def delphi(codes: str, path: str, store: str | None, as_json: bool, **options: Any) -> None:
    """Write CODES of tokens as the latent cache OUT, from which Delphi explains and scores latents.

    \b
    dbksvd export delphi codes.zarr latents --hook-name layers.14 --model-name HuggingFaceTB/SmolLM2-135M
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.export.delphi import export_delphi
    from dbksvd_dask.store.codes import codes_attributes

    result = export_delphi(codes, store or codes_attributes(codes)["store"]["path"], path, **options)
    left = f"; {result.n_negative} negative coefficients left out" if result.n_negative else ""
    counts = f"{result.n_latents} latents, {result.n_activations} activations on {result.n_texts} texts"
    output.report(asdict(result), as_json, f"{result.path}: {counts}{left}")


def _describe(result: ExportResult) -> str:
    """A line for people, and one per note; what the encoder of SAELens does not do has been warned of."""
    from dbksvd_dask.export.saelens import BUILTIN_ARCHITECTURE

    form = f", SAELens architecture {result.architecture}" if result.architecture else ""
    stacked = " (the positive and the negative part of each atom)" if result.stacked else ""
    lines = [f"{result.path}: {result.n_latents} latents{stacked}{form}"]
    notes = () if result.architecture == BUILTIN_ARCHITECTURE else result.notes
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])
