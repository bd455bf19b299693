"""A dictionary as a SAELens folder: `cfg.json` and `sae_weights.safetensors`.

SAELens has an architecture of its own for dictionaries with a greedy encoder, `matching_pursuit`. Its encoder
supports positive coefficients only, so a signed dictionary is written as ``[D; -D]``: latent j is the positive
part of atom j's coefficient, latent n_atoms + j the negative part. Its stopping rule is not quite ours: see
docs/saelens.md, and ``form="plugin"`` for the class that has our rule.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

import dbksvd_dask
from dbksvd_dask.base.late import late
from dbksvd_dask.codes import code_blocks
from dbksvd_dask.dictionary import Dictionary, dictionary_fingerprint
from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate.codes import CodeMoments, stream_code_moments
from dbksvd_dask.export.check import check_exportable, encode_spec, encoding_params, mean_of, new_folder
from dbksvd_dask.linear import LinearEncoder
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.params import check_choice
from dbksvd_dask.store.atomic import write_json
from dbksvd_dask.store.codes import codes_attributes, open_statistics, stored_code_moments
from dbksvd_dask.store.paths import PathLike

if TYPE_CHECKING:
    import xarray as xr
else:
    xr = late("xarray")

log = logging.getLogger(__name__)

# The version of SAELens whose format this is. Its loader treats a folder without a version, or below 6.0.0, as an
# old one and drops the names of the model and the hook.
SAELENS_VERSION = "6.54.12"
CONFIG, WEIGHTS, SPARSITY = "cfg.json", "sae_weights.safetensors", "sparsity.safetensors"
FORMS = ("builtin", "plugin")
PLUGIN_ARCHITECTURE = "dbksvd_pursuit"
BUILTIN_ARCHITECTURE = "matching_pursuit"
PLUGIN_MODULE = "dbksvd_dask.export.saelens_plugin"
# What SAELens adds to a density before the logarithm: a dead latent then reads -10.
DENSITY_FLOOR = 1e-10


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote.

    Attributes
    ----------
    path : folder
    architecture : name of the encoder in SAELens, or "" without a SAELens part
    n_latents : rows of `W_dec`: n_atoms, or twice as many in the stacked form
    stacked : whether `W_dec` is ``[D; -D]``
    notes : how the reader's codes will differ from ours
    """

    path: str
    architecture: str
    n_latents: int
    stacked: bool
    notes: tuple[str, ...] = ()


def stack(atoms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Write a signed dictionary for a non-negative encoder: (n_atoms, d) to (2 n_atoms, d), ``[D; -D]``."""
    return np.concatenate([atoms, -atoms])


def export_saelens(
    dictionary: Dictionary,
    path: PathLike,
    *,
    model_name: str,
    hook_name: str,
    k: int | None = None,
    form: str = "builtin",
    codes: xr.Dataset | PathLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> ExportResult:
    """Write a dictionary as a folder that SAELens opens with ``SAE.load_from_disk``.

    Parameters
    ----------
    dictionary : Dictionary
        From `open_dictionary`; unit rows, float32 or float64.
    path : path
        Folder to write; must not exist.
    model_name, hook_name : str
        Where the activations came from, as SAELens names it: "gpt2-small", "blocks.6.hook_resid_post".
    k : int, optional
        Most nonzeros per sample; default: that of the fit.
    form : {"builtin", "plugin"}
        For the encoder that SAELens has, stacked when the dictionary is signed; or for the class of
        `saelens_plugin`, which has our stopping rule and fires `hook_sae_acts_post`.
    codes : Dataset or path of a codes store, optional
        Codes of this dictionary; their densities are written as `sparsity.safetensors`.
    metadata : dict, optional
        Further entries of the metadata, such as context_size, prepend_bos or dataset_path.
    overwrite : bool
        Replace an existing folder.

    Returns
    -------
    ExportResult
    """
    check_exportable(dictionary)
    spec = encode_spec(dictionary, k)
    stacked = check_choice("form", form, FORMS) == "builtin" and not spec.nonneg
    names = _checked_names(model_name, hook_name)
    density = None if codes is None else log10_density(codes, dictionary, stacked=stacked)
    config = saelens_config(dictionary, spec, form, names, encoding_params(dictionary, k))
    config["metadata"].update(metadata or {})
    kept = {} if dictionary.whitening is None or form != "plugin" else {"whitening": dictionary.whitening}
    with new_folder(path, overwrite=overwrite) as folder:
        write_weights(folder, dictionary, config, density, stacked=stacked, encoder=kept)
    notes = _notes(dictionary, spec, form)
    for note in notes if form == "builtin" else ():
        log.warning("%s: %s", os.fspath(path), note)
    return ExportResult(os.fspath(path), config["architecture"], config["d_sae"], stacked, notes)


def export_linear(
    encoder: LinearEncoder,
    path: PathLike,
    *,
    model_name: str,
    hook_name: str,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> ExportResult:
    """Write a linear encoder with its dictionary as an SAE of the architecture `jumprelu` of SAELens.

    Nothing of this package is needed to use it: the encoder is one matrix product and a threshold per latent.

    Parameters
    ----------
    encoder : LinearEncoder
        From `dbksvd_dask.fit_linear_encoder`.
    path, model_name, hook_name, metadata, overwrite : see `export_saelens`

    Returns
    -------
    ExportResult
    """
    dictionary, stacked = encoder.dictionary, encoder.stacked
    check_exportable(dictionary)
    names = _checked_names(model_name, hook_name)
    config = {
        **_common_config(dictionary, "linear", names, encoding_params(dictionary), stacked=stacked),
        "architecture": "jumprelu",
    }
    config["metadata"].update(metadata or {})
    dtype = dictionary.atoms.dtype
    tensors = {
        "W_enc": np.ascontiguousarray(encoder.W.T, dtype),
        "b_enc": encoder.b.astype(dtype),
        "threshold": encoder.threshold.astype(dtype),
    }
    with new_folder(path, overwrite=overwrite) as folder:
        write_weights(folder, dictionary, config, None, stacked=stacked, encoder=tensors)
    note = "one linear step in place of the pursuit; docs/settings.md has what that costs"
    return ExportResult(os.fspath(path), config["architecture"], config["d_sae"], stacked, (note,))


def _checked_names(model_name: str, hook_name: str) -> dict[str, str]:
    """Return the names of model and hook; refuse those that are none."""
    names = {"model_name": model_name, "hook_name": hook_name}
    for name, value in names.items():
        if not value or not isinstance(value, str):
            raise InputError(f"{name}={value!r} is not a name; SAELens needs one, such as 'gpt2-small'")
    return names


def write_weights(
    folder: Path,
    dictionary: Dictionary,
    config: Mapping[str, Any],
    density: npt.NDArray[np.float32] | None,
    *,
    stacked: bool,
    encoder: Mapping[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Write `cfg.json`, `sae_weights.safetensors` and, with densities, `sparsity.safetensors` into a folder.

    Parameters
    ----------
    encoder : the weights of an encoder that is not the pursuit, by their names in SAELens
    """
    atoms = np.ascontiguousarray(dictionary.atoms)
    tensors = {"W_dec": stack(atoms) if stacked else atoms, "b_dec": mean_of(dictionary), **(encoder or {})}
    save_file(tensors, folder / WEIGHTS)
    if density is not None:
        save_file({"sparsity": density}, folder / SPARSITY)
    write_json(folder / CONFIG, config)


def saelens_config(
    dictionary: Dictionary, spec: EncodeSpec, form: str, names: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill the content of `cfg.json`.

    Parameters
    ----------
    dictionary : Dictionary
    spec : the encoder of its codes
    form : see `export_saelens`
    names : model_name and hook_name
    params : what `check.encoding_params` gave
    """
    stacked = form == "builtin" and not spec.nonneg
    common = _common_config(dictionary, form, names, params, stacked=stacked)
    if form == "plugin":
        whitened = dictionary.whitening is not None
        return {**common, "architecture": PLUGIN_ARCHITECTURE, **spec._asdict(), "whitened": whitened}
    return {
        **common,
        "architecture": BUILTIN_ARCHITECTURE,
        "residual_threshold": 0.0,  # an absolute norm there; 0 turns it off
        "max_iterations": min(spec.k, int(params["k"])),  # where k is a mean, more slots than that
        "stop_on_duplicate_support": False,  # choosing an atom again improves a code; True would end it there
    }


def _common_config(
    dictionary: Dictionary, form: str, names: Mapping[str, Any], params: Mapping[str, Any], *, stacked: bool
) -> dict[str, Any]:
    """Fill what `cfg.json` has in every form."""
    return {
        "d_in": dictionary.n_features,
        "d_sae": dictionary.n_atoms * (2 if stacked else 1),
        "dtype": dictionary.atoms.dtype.name,
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        # activations per head are rows of n_heads * d_head features here
        "reshape_activations": "hook_z" if str(names["hook_name"]).endswith("hook_z") else "none",
        "metadata": {**_metadata(names), "dbksvd": _provenance(dictionary, form, params, stacked=stacked)},
    }


def _metadata(names: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the part of `cfg.json` that says how to run the model."""
    return {
        "sae_lens_version": SAELENS_VERSION,
        "sae_lens_training_version": None,
        **names,
        "hook_head_index": None,
        "prepend_bos": True,
        "context_size": None,
        "dataset_path": None,
        "model_from_pretrained_kwargs": {},
    }


def _provenance(dictionary: Dictionary, form: str, params: Mapping[str, Any], *, stacked: bool) -> dict[str, Any]:
    """Fill what SAELens passes through and `load_foreign` reads."""
    return {
        "package_version": dbksvd_dask.__version__,
        "form": form,
        "stacked": stacked,
        "plugin": PLUGIN_MODULE if form == "plugin" else None,
        "params": dict(params),
        "iteration": dictionary.iteration,
        "has_mean": dictionary.mean is not None,
        "fingerprint": dictionary_fingerprint(dictionary),
    }


def _notes(dictionary: Dictionary, spec: EncodeSpec, form: str) -> tuple[str, ...]:
    """Say how the encoder of SAELens differs from the one the dictionary was fitted with."""
    if form == "plugin":
        return (f"before SAE.load_from_disk, import {PLUGIN_MODULE}: it registers the encoder",)
    plain = "; use form='plugin' to keep it"
    notes = []
    if dictionary.whitening is not None:
        notes.append(
            "SAELens encodes samples as they are, this dictionary whitened ones: its codes are less accurate"
            + plain
            + ", or a linear encoder (fit_linear_encoder)"
        )
    if spec.encoder != "mp":
        fitted = f"this dictionary was fitted with {spec.encoder!r}"
        notes.append(f"SAELens encodes with plain matching pursuit, {fitted}" + plain)
    if spec.stages:
        notes.append(
            "SAELens offers all atoms at once, this dictionary was fitted to be encoded in stages" + plain
        )
    if spec.refit:
        notes.append("SAELens does not refit coefficients on the support" + plain)
    if spec.rtol > 0:
        notes.append(f"SAELens does not stop at a relative residual (rtol={spec.rtol:g})" + plain)
    if spec.min_coefficient > 0:
        notes.append(f"SAELens has no smallest coefficient ({spec.min_coefficient:g})" + plain)
    return tuple(notes)


# ------------------------------------------------------------------------------------------------ densities


def log10_density(
    codes: xr.Dataset | PathLike, dictionary: Dictionary, *, stacked: bool
) -> npt.NDArray[np.float32]:
    """Return log10 of the fraction of samples on which each latent is active, as SAELens stores it.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`), or path of a codes store
    dictionary : the one they belong to
    stacked : give the positive parts, then the negative parts

    Returns
    -------
    float32 ndarray of shape (n_atoms,) or, stacked, (2 n_atoms,); -10 for a latent that is never active
    """
    moments = code_sums(codes, dictionary)
    n_samples = max(moments.n_samples, 1)
    counts = moments.n_active
    if stacked:
        counts = np.concatenate([moments.n_positive, moments.n_active - moments.n_positive])
    return np.log10(counts / n_samples + DENSITY_FLOOR).astype(np.float32)


def code_sums(codes: xr.Dataset | PathLike, dictionary: Dictionary) -> CodeMoments:
    """Sum over codes, after checking that they belong to the dictionary; parameters as in `log10_density`."""
    if isinstance(codes, xr.Dataset):
        n_atoms = codes.attrs.get("n_atoms", dictionary.n_atoms)
        _check_codes(n_atoms, dictionary, codes.attrs.get("dictionary"))
        return stream_code_moments(lambda: code_blocks(codes), dictionary.n_atoms)
    statistics = open_statistics(codes)
    _check_codes(statistics.attrs["n_atoms"], dictionary, statistics.attrs.get("dictionary"))
    return stored_code_moments(statistics)


def stored_metrics(codes: xr.Dataset | PathLike) -> dict[str, float]:
    """Return the metrics that a codes store carries; empty for codes in memory."""
    attributes = codes.attrs if isinstance(codes, xr.Dataset) else codes_attributes(codes)
    metrics = attributes.get("metrics", {})
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _check_codes(n_atoms: int, dictionary: Dictionary, written_with: Any) -> None:
    if n_atoms != dictionary.n_atoms:
        raise MismatchError(
            f"these codes are over {n_atoms} atoms, the dictionary has {dictionary.n_atoms}; "
            "pass the codes of this dictionary"
        )
    mine = dictionary_fingerprint(dictionary)
    written_with = written_with.get("fingerprint") if isinstance(written_with, dict) else None
    if written_with is not None and written_with != mine:
        raise MismatchError(
            f"these codes were written with dictionary {written_with}, this one is {mine}; "
            "pass the codes of this dictionary"
        )
