"""A folder ready to upload to Hugging Face: the dictionary, its parameters, a SAELens part and a model card."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

import dbksvd_dask
from dbksvd_dask.dictionary import Dictionary, dictionary_fingerprint
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.codes import code_summary
from dbksvd_dask.evaluate.coherence import coherence
from dbksvd_dask.export import saelens
from dbksvd_dask.export.check import check_exportable, encode_spec, encoding_params, new_folder
from dbksvd_dask.export.foreign import HF_CONFIG, HF_WEIGHTS
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store.atomic import write_bytes, write_json
from dbksvd_dask.store.paths import PathLike

if TYPE_CHECKING:
    import xarray as xr

log = logging.getLogger(__name__)

CARD = "README.md"
FORMAT = "dbksvd-huggingface"
VERSION = 1
# What the card reports of a fit, of all that is recorded per iteration.
_SHOWN_PARAMS = (
    "n_atoms",
    "k",
    "encoder",
    "nonneg",
    "refit",
    "groups",
    "center",
    "whiten",
    "batch_size",
    "n_iter",
    "n_rounds",
    "lanczos_steps",
    "init",
    "dead_atoms",
    "min_coefficient",
    "rtol",
    "seed",
)


def export_huggingface(
    dictionary: Dictionary,
    path: PathLike,
    *,
    repo_id: str,
    model_name: str | None = None,
    hook_name: str | None = None,
    k: int | None = None,
    form: str = "builtin",
    codes: xr.Dataset | PathLike | None = None,
    metrics: Mapping[str, float] | None = None,
    license: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> saelens.ExportResult:
    """Write a folder to upload: `README.md`, `config.json`, `dictionary.safetensors` and a SAELens folder.

    Parameters
    ----------
    dictionary : Dictionary
    path : path
        Folder to write; must not exist.
    repo_id : str
        Where it will be uploaded, "user/name"; the card's commands name it.
    model_name, hook_name : str, optional
        Where the activations came from. With both, a folder named after the hook holds the SAELens form, so that
        ``SAE.from_pretrained(repo_id, hook_name)`` opens it.
    k, form, codes, metadata : see `saelens.export_saelens`
    metrics : dict, optional
        Further figures for the card.
    license : str, optional
        Identifier of a licence, such as "mit"; left out of the card when not given.
    overwrite : bool
        Replace an existing folder.

    Returns
    -------
    ExportResult
    """
    check_exportable(dictionary)
    spec = encode_spec(dictionary, k)
    _check_names(repo_id, model_name, hook_name)
    figures = {**_history_figures(dictionary), **_code_figures(codes, dictionary), **_coherence(dictionary)}
    figures.update(metrics or {})
    with new_folder(path, overwrite=overwrite) as folder:
        tensors = {"dictionary": np.ascontiguousarray(dictionary.atoms)}
        if dictionary.mean is not None:
            tensors["mean"] = np.ascontiguousarray(dictionary.mean)
        if dictionary.whitening is not None:
            tensors["whitening"] = np.ascontiguousarray(dictionary.whitening)
        save_file(tensors, folder / HF_WEIGHTS, {"format": FORMAT})
        names = {"repo_id": repo_id, "model_name": model_name, "hook_name": hook_name}
        write_json(folder / HF_CONFIG, _config(dictionary, encoding_params(dictionary, k), names, figures))
        result = saelens.ExportResult(os.fspath(path), "", dictionary.n_atoms, False)
        if model_name and hook_name:
            result = saelens.export_saelens(
                dictionary,
                folder / hook_name,
                model_name=model_name,
                hook_name=hook_name,
                k=k,
                form=form,
                codes=codes,
                metadata=metadata,
            )
        card = model_card(dictionary, spec, repo_id, model_name, hook_name, figures, form=form, license=license)
        write_bytes(folder / CARD, card.encode())
    return saelens.ExportResult(
        os.fspath(path), result.architecture, result.n_latents, result.stacked, result.notes
    )


def _check_names(repo_id: str, model_name: str | None, hook_name: str | None) -> None:
    parts = str(repo_id).split("/")
    if len(parts) != 2 or not all(parts):
        raise InputError(f"repo_id={repo_id!r} is not the name of a repository; use 'user/name'")
    if bool(model_name) != bool(hook_name):
        raise InputError(
            f"model_name={model_name!r} and hook_name={hook_name!r}: give both for a SAELens part, or neither"
        )
    if hook_name and Path(hook_name).name != hook_name:
        raise InputError(f"hook_name={hook_name!r} cannot be the name of a folder; use one without slashes")


def _config(
    dictionary: Dictionary, params: Mapping[str, Any], names: Mapping[str, Any], figures: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "package_version": dbksvd_dask.__version__,
        **names,
        "params": dict(params),
        "iteration": dictionary.iteration,
        "metrics": {name: value for name, value in figures.items() if math.isfinite(value)},
        "fingerprint": dictionary_fingerprint(dictionary),
    }


# ---------------------------------------------------------------------------------------------------- figures


def _history_figures(dictionary: Dictionary) -> dict[str, float]:
    """Return the last value of each series of the fit."""
    return {
        f"last iteration: {name.replace('_', ' ')}": float(values[-1])
        for name, values in dictionary.history.items()
        if values and math.isfinite(values[-1])
    }


def _code_figures(codes: xr.Dataset | PathLike | None, dictionary: Dictionary) -> dict[str, float]:
    """Return the figures of codes: their own metrics if they come from a store, and sums over atoms."""
    if codes is None:
        return {}
    summary = code_summary(saelens.code_sums(codes, dictionary))
    figures = {
        "codes: samples": float(summary.n_samples),
        "codes: mean L0": summary.l0_mean,
        "codes: mean L1": summary.l1_mean,
        "codes: dead atoms": float(summary.n_dead),
        "codes: atoms active on more than a tenth of the samples": float(summary.n_over_dense),
    }
    stored = saelens.stored_metrics(codes)
    figures.update({f"codes: {name.replace('_', ' ')}": value for name, value in stored.items()})
    return figures


def _coherence(dictionary: Dictionary) -> dict[str, float]:
    if dictionary.n_atoms < 2:
        return {}
    return {"mutual coherence": float(coherence(dictionary.atoms).mutual)}


# ------------------------------------------------------------------------------------------------------- card


def model_card(
    dictionary: Dictionary,
    spec: EncodeSpec,
    repo_id: str,
    model_name: str | None,
    hook_name: str | None,
    figures: Mapping[str, float],
    *,
    form: str = "builtin",
    license: str | None = None,
) -> str:
    """Write the model card as Markdown; parameters as in `export_huggingface`."""
    origin = f" of `{model_name}` at `{hook_name}`" if model_name else ""
    signed = "non-negative" if spec.nonneg else "of both signs"
    sections = [
        _front_matter(model_name, license),
        f"# {repo_id.split('/')[1]}",
        f"A sparse dictionary of {dictionary.n_atoms} atoms over {dictionary.n_features} features for activations"
        f"{origin}, learned with Double-Batch K-SVD (dbksvd-dask {dbksvd_dask.__version__}). Each sample is the "
        f"mean plus at most {spec.k} atoms with coefficients {signed}.",
        "## Load it",
        _usage(dictionary, repo_id),
    ]
    if model_name and hook_name:
        sections.append(_saelens_usage(spec, repo_id, hook_name, form))
    sections += ["## Metrics", _table({n: _number(v) for n, v in figures.items()}) or "None were recorded."]
    shown = {name: f"{dictionary.params[name]}" for name in _SHOWN_PARAMS if name in dictionary.params}
    sections += ["## Parameters", _table({**shown, "iterations done": f"{dictionary.iteration}"})]
    tensors = "`dictionary` (n_atoms, n_features), unit rows; `mean` (n_features,)"
    if dictionary.whitening is not None:
        tensors += "; `whitening` (n_features, n_features), by which samples are multiplied to be encoded"
    sections += [
        "## Files",
        _table(
            {
                f"`{HF_WEIGHTS}`": tensors,
                f"`{HF_CONFIG}`": "all parameters and figures",
                **({f"`{hook_name}/`": "the same dictionary for SAELens"} if hook_name else {}),
            },
            ("file", "content"),
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(model_name: str | None, license: str | None) -> str:
    lines = ["---"]
    if license:
        lines.append(f"license: {license}")
    if model_name:
        lines.append("library_name: saelens")
    if model_name and "/" in model_name:  # the hub links only what names a repository
        lines.append(f"base_model: {model_name}")
    lines += ["tags:", "- dictionary-learning", "- sparse-coding", "- k-svd", "- matching-pursuit"]
    if model_name:
        lines += ["- sparse-autoencoder", "- mechanistic-interpretability"]
    return "\n".join([*lines, "---"])


def _usage(dictionary: Dictionary, repo_id: str) -> str:
    return "\n".join(
        [
            "```python",
            "from huggingface_hub import snapshot_download",
            "from dbksvd_dask import decode, encode",
            "from dbksvd_dask.export.foreign import load_foreign",
            "",
            f'dictionary = load_foreign(snapshot_download("{repo_id}"))',
            f"# activations: array of shape (n_samples, {dictionary.n_features})",
            "codes = encode(activations, dictionary)",
            "again = decode(codes, dictionary.atoms, dictionary.mean)",
            "```",
        ]
    )


def _saelens_usage(spec: EncodeSpec, repo_id: str, hook_name: str, form: str) -> str:
    lines = ["With SAELens:", "", "```python", "from sae_lens import SAE"]
    if form == "plugin":
        lines.append(f"import {saelens.PLUGIN_MODULE}  # registers the encoder")
    lines += ["", f'sae = SAE.from_pretrained("{repo_id}", "{hook_name}")', "```"]
    if form == "builtin" and not spec.nonneg:
        lines += [
            "",
            "Coefficients have both signs and the encoder of SAELens has one, so `W_dec` is `[D; -D]` there: "
            "latent j is the positive part of atom j, latent n_atoms + j the negative part.",
        ]
    return "\n".join(lines)


def _table(rows: Mapping[str, str], head: tuple[str, str] = ("name", "value")) -> str:
    if not rows:
        return ""
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows.items())])


def _number(value: float) -> str:
    return f"{int(value)}" if float(value).is_integer() else f"{value:.4g}"
