"""Dictionaries of other tools, read as ours: SAELens folders, safetensors files, .npy files.

A foreign dictionary may be transposed (KSVD.jl saves (features, atoms)) and need not have unit rows. It is
transposed and normalised here; the changes are logged and kept in `Dictionary.extra["import"]`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import DBKSVDError, InputError, StoreError, brief
from dbksvd_dask.export.check import UNIT_TOLERANCE
from dbksvd_dask.export.saelens import CONFIG, WEIGHTS
from dbksvd_dask.plan.params import check_choice, check_k
from dbksvd_dask.store.atomic import read_json
from dbksvd_dask.store.dtypes import widen_bfloat16
from dbksvd_dask.store.paths import PathLike, is_remote
from dbksvd_dask.store.runs import open_dictionary

log = logging.getLogger(__name__)

ORIENTATIONS = ("auto", "atoms_first", "features_first")
# Names under which a decoder is found in a safetensors file, by tool: SAELens, this package, sparsify and
# dictionary_learning. Those of torch.nn.Linear are (features, atoms).
DECODERS = {
    "W_dec": "atoms_first",
    "dictionary": "atoms_first",
    "decoder.weight": "features_first",
    "D": "auto",
}
WHITENING = "whitening"
BIASES = ("b_dec", "mean", "decoder.bias", "bias")
# Our own folder for Hugging Face.
HF_CONFIG, HF_WEIGHTS = "config.json", "dictionary.safetensors"

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass
class _Found:
    """The content of a file, before it is transposed and normalised."""

    atoms: npt.NDArray[Any]
    mean: npt.NDArray[Any] | None = None
    whitening: npt.NDArray[Any] | None = None
    orientation: str = "auto"
    params: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0


def load_foreign(
    path: PathLike, *, k: int | None = None, orientation: str = "auto", drop_zero: bool = False
) -> Dictionary:
    """Read a dictionary of another tool.

    Parameters
    ----------
    path : path
        A SAELens folder (`cfg.json` and `sae_weights.safetensors`), a folder written by `dbksvd export hf`, a
        `.safetensors` or `.npy` file; also a dictionary or run of this package.
    k : int, optional
        Most nonzeros per sample; default: as stated in the file, if it is.
    orientation : {"auto", "atoms_first", "features_first"}
        Layout of the matrix. "auto" goes by the name of the tensor, else by the shape: an overcomplete dictionary
        has more atoms than features.
    drop_zero : bool
        Leave out atoms of norm 0, which cannot be normalised; `extra["import"]["kept"]` then lists the others.

    Returns
    -------
    Dictionary
        float32 (or float64) unit rows; `extra["import"]` records what was changed.
    """
    where = os.fspath(path)
    check_choice("orientation", orientation, ORIENTATIONS)
    found = _find(where)
    if isinstance(found, Dictionary):
        return found
    how = found.orientation if orientation == "auto" else orientation
    atoms, changes = _unit_rows(*_turned(found.atoms, how, where), where, drop_zero)
    if found.mean is not None and found.mean.shape != atoms.shape[1:]:
        raise InputError(
            f"{where}: the bias has shape {found.mean.shape}, but the atoms have {atoms.shape[1]} features; "
            "these do not belong together, or the matrix is transposed: say "
            "orientation='atoms_first' or orientation='features_first'"
        )
    extra: dict[str, Any] = {"import": {**found.about, **changes}}
    params = {"n_atoms": atoms.shape[0], **found.params}
    if "threshold" in params:
        extra["threshold"] = params.pop("threshold")
    if k is not None:
        params["k"] = check_k(k, atoms.shape[0])
    mean = None if found.mean is None else found.mean.astype(np.float64)
    params["center"] = mean is not None
    white = found.whitening
    if white is not None:
        if white.shape != 2 * atoms.shape[1:] or not np.isfinite(white).all():
            raise StoreError(f"{where}: `whitening` has shape {white.shape}, or values that are not finite")
        white = white.astype(atoms.dtype)
    elif params.get("whiten"):
        params["whiten"] = 0.0  # the form for the encoder of SAELens has no map: what is read encodes without
    name = os.path.basename(where)
    return Dictionary(atoms, mean, params, name, found.iteration, extra=extra, whitening=white)


def _find(where: str) -> _Found | Dictionary:
    """Detect what is at a path, and read it."""
    if is_remote(where):
        return open_dictionary(where)
    if not os.path.exists(where):
        raise StoreError(f"{where} does not exist; give a SAELens folder, a .safetensors or a .npy file")
    if os.path.isdir(where):
        if os.path.exists(os.path.join(where, CONFIG)):
            return _from_saelens(where)
        if os.path.exists(os.path.join(where, HF_WEIGHTS)):
            return _from_huggingface(where)
        return open_dictionary(where)
    if where.endswith(".safetensors"):
        return _from_tensors(where)
    if where.endswith(".npy"):
        return _Found(_floats(_load_npy(where), where), about={"format": "npy"})
    raise InputError(
        f"{where} is not of a known kind; give a SAELens folder, a .safetensors or a .npy file, or save the "
        "matrix with numpy.save"
    )


def _load_npy(where: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(np.load(where, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise StoreError(f"{where} cannot be read as a .npy file: {brief(error)}") from error


def _floats(array: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """Widen a matrix or vector to float32, or keep float64."""
    if array.dtype.kind != "f":
        raise InputError(f"{where} holds numbers of dtype {array.dtype}; a dictionary needs floating point")
    return array if array.dtype == np.float64 else array.astype(np.float32)


# ---------------------------------------------------------------------------------------------- safetensors


def read_safetensors(path: PathLike) -> dict[str, npt.NDArray[Any]]:
    """Read the floating-point tensors of a safetensors file; bfloat16, which NumPy lacks, as float32.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict of name to ndarray
    """
    where = os.fspath(path)
    try:
        entries = deserialize(Path(where).read_bytes())  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        reason = brief(error)
        raise StoreError(f"{where} is not a readable safetensors file ({reason}); it may be truncated") from error
    return {name: _tensor(entry, where) for name, entry in entries if entry["dtype"] in _DTYPES}


def _tensor(entry: Mapping[str, Any], where: str) -> npt.NDArray[Any]:
    raw = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return widen_bfloat16(raw) if entry["dtype"] == "BF16" else _floats(raw, where)


def _from_tensors(where: str) -> _Found:
    tensors = read_safetensors(where)
    name = next((name for name in DECODERS if name in tensors), None)
    if name is None:
        matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2 and name != WHITENING]
        if len(matrices) != 1:
            raise InputError(
                f"{where} holds the tensors {', '.join(sorted(tensors)) or '(none)'}; a dictionary is looked for "
                f"under {', '.join(DECODERS)}, or must be the only matrix: save it as W_dec"
            )
        name = matrices[0]
    bias = next((tensors[b] for b in BIASES if b in tensors and tensors[b].ndim == 1), None)
    about = {"format": "safetensors", "tensor": name}
    return _Found(tensors[name], bias, tensors.get(WHITENING), DECODERS.get(name, "auto"), about=about)


# -------------------------------------------------------------------------------------------------- folders


def _from_saelens(where: str) -> _Found:
    """Read a SAELens folder of any architecture; the stacked form of our own export is unstacked."""
    with _explained(os.path.join(where, CONFIG)) as config:
        return _saelens_found(where, config)


@contextlib.contextmanager
def _explained(file: str) -> Iterator[Any]:
    """Return a configuration; anything unexpected in it is an error that names the file."""
    config = read_json(file)
    try:
        yield config
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        if isinstance(error, DBKSVDError):
            raise
        raise StoreError(f"{file} is not a configuration that can be used: {brief(error)}") from error


def _saelens_found(where: str, config: Mapping[str, Any]) -> _Found:
    weights = os.path.join(where, WEIGHTS)
    if not os.path.exists(weights):
        raise StoreError(f"{where} holds {CONFIG} but no {WEIGHTS}; it is not a whole SAELens folder")
    tensors = read_safetensors(weights)
    if "W_dec" not in tensors:
        raise InputError(f"{weights} holds no W_dec but {', '.join(sorted(tensors))}; it has no dictionary")
    metadata = config.get("metadata") or config
    about = {
        "format": "saelens",
        "architecture": config.get("architecture", "standard"),
        "model_name": metadata.get("model_name"),
        "hook_name": metadata.get("hook_name"),
    }
    if config.get("normalize_activations", "none") not in ("none", False):
        log.warning("%s expects inputs normalised by %r", where, config["normalize_activations"])
        about["normalize_activations"] = config["normalize_activations"]
    ours = metadata.get("dbksvd") or {}
    atoms = tensors["W_dec"]
    if ours.get("stacked"):
        atoms = _unstacked(atoms, where)
    mean = tensors.get("b_dec") if ours.get("has_mean", True) else None
    params = dict(ours.get("params") or _params_of(config))
    return _Found(atoms, mean, tensors.get(WHITENING), "atoms_first", params, about, int(ours.get("iteration", 0)))


def _params_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Guess the parameters of an encoder from a SAELens config: its k, and that it is non-negative."""
    params: dict[str, Any] = {"nonneg": True, "encoder": "mp"}
    k = config.get("k", config.get("max_iterations"))
    if isinstance(k, int | float) and k >= 1:
        params["k"] = int(k)
    return params


def _unstacked(W: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    n_atoms = W.shape[0] // 2
    if W.shape[0] % 2 or not np.array_equal(W[:n_atoms], -W[n_atoms:]):
        raise StoreError(f"{where} says that W_dec is [D; -D], but it is not; the folder was changed")
    return W[:n_atoms].copy()


def _from_huggingface(where: str) -> _Found:
    """Read a folder written by `export_huggingface`."""
    with _explained(os.path.join(where, HF_CONFIG)) as config:
        found = _from_tensors(os.path.join(where, HF_WEIGHTS))
        found.params, found.iteration = dict(config["params"]), int(config["iteration"])
        found.about = {"format": "huggingface", "repo_id": config.get("repo_id")}
        return found


# ------------------------------------------------------------------------------------------ turn, normalise


def _turned(matrix: npt.NDArray[Any], orientation: str, where: str) -> tuple[npt.NDArray[Any], bool]:
    """Bring a matrix to (n_atoms, n_features); also return whether it was transposed."""
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise InputError(f"{where} holds an array of shape {matrix.shape}; a dictionary is a matrix, not empty")
    if orientation == "auto":
        if matrix.shape[0] == matrix.shape[1]:
            raise InputError(
                f"{where} holds a square matrix {matrix.shape}, which may be either way round; "
                "say orientation='atoms_first' or orientation='features_first'"
            )
        orientation = "atoms_first" if matrix.shape[0] > matrix.shape[1] else "features_first"
    turned = orientation == "features_first"
    return np.ascontiguousarray(matrix.T if turned else matrix), turned


def _unit_rows(
    atoms: npt.NDArray[Any], turned: bool, where: str, drop_zero: bool
) -> tuple[npt.NDArray[Any], dict[str, Any]]:
    """Normalise rows, in float64; also return what was changed."""
    if not np.isfinite(atoms).all():
        raise InputError(f"{where} holds values that are not finite; this is not a usable dictionary")
    norms = np.linalg.norm(atoms.astype(np.float64), axis=1)
    changes: dict[str, Any] = {"transposed": turned}
    if (norms == 0).any():
        n_zero = int(np.count_nonzero(norms == 0))
        if not drop_zero or n_zero == norms.size:
            raise InputError(
                f"{where} has {n_zero} atoms of norm 0 (the first is {int(norms.argmin())}), which cannot be "
                "normalised; leave them out with drop_zero=True"
            )
        changes["kept"] = np.flatnonzero(norms > 0).tolist()
        atoms, norms = atoms[norms > 0], norms[norms > 0]
    changes["norms"] = {"least": float(norms.min()), "largest": float(norms.max())}
    changes["normalised"] = bool(np.abs(norms - 1.0).max() > UNIT_TOLERANCE)
    if changes["normalised"]:
        log.warning("%s: atoms had norms from %.4g to %.4g; normalised to 1", where, norms.min(), norms.max())
        atoms = (atoms / norms[:, None]).astype(atoms.dtype)
    return atoms, changes
