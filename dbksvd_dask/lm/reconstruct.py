"""What stands in for an activation: its reconstruction by a dictionary of ours, or by an SAE of another tool.

Arrays only, no torch. A reconstruction is a function from (n, n_features) float32 to the same shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.codes import decode, make_codes
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, MismatchError, StoreError, brief
from dbksvd_dask.export.foreign import load_foreign, read_safetensors
from dbksvd_dask.export.saelens import BUILTIN_ARCHITECTURE, CONFIG, PLUGIN_ARCHITECTURE, WEIGHTS
from dbksvd_dask.graph.backend import require_gram_fits
from dbksvd_dask.kernels.encode import Beside, encode_rows, gram_for
from dbksvd_dask.store.runs import as_dictionary

Rows = npt.NDArray[Any]
Reconstruct = Callable[[Rows], Any]


class Coder:
    """Encodes rows with one dictionary again and again; its gram is computed once.

    Parameters
    ----------
    dictionary : Dictionary, fitted estimator, or path of a dictionary or of the folder of a fit
    k : int, optional
        Most nonzeros per sample; default: as it was fitted.
    """

    def __init__(self, dictionary: Any, k: int | None = None) -> None:
        self.dictionary = as_dictionary(dictionary)
        given = {"k": None if k == self.dictionary.params.get("k") else k}
        self.spec = self.dictionary.encode_spec(given)
        self._weights = self.dictionary.encode_weights(given)
        self._gram = self._compute_gram()

    def _compute_gram(self) -> Beside:
        D = self.dictionary.atoms
        if self.spec.uses_gram(D.shape[0]):
            require_gram_fits(D.shape[0], D.dtype.itemsize, self.spec.encoder)
        return gram_for(D, self.spec, self._weights is not None, self.dictionary.whitening)

    @property
    def n_features(self) -> int:
        """Width of its rows."""
        return self.dictionary.n_features

    def codes(self, rows: Rows) -> tuple[npt.NDArray[np.int32], Rows]:
        """Return atom (n, k), -1 where a slot is empty, and coefficient (n, k) of rows (n, n_features)."""
        D, mean = self.dictionary.atoms, self.dictionary.mean
        Y = rows.astype(D.dtype) if mean is None else (rows - mean).astype(D.dtype)
        return encode_rows(Y, D, self._gram, self.spec, self._weights)

    def __call__(self, rows: Rows) -> Rows:
        """Return the reconstruction of rows (n, n_features)."""
        atom, coefficient = self.codes(rows)
        codes = make_codes(atom, coefficient, {"n_atoms": self.dictionary.n_atoms})
        out: Rows = decode(codes, self.dictionary.atoms, self.dictionary.mean)
        return out


def dictionary_reconstruction(dictionary: Any, k: int | None = None) -> Coder:
    """Return the reconstruction by a dictionary: encode, then decode.

    Parameters
    ----------
    dictionary : Dictionary, fitted estimator, or path of a dictionary or of the folder of a fit
    k : int, optional
        Most nonzeros per sample; default: as it was fitted.
    """
    return Coder(dictionary, k)


# -- SAEs of other tools ---------------------------------------------------------------------------------


class SparseAutoencoder:
    """The forward pass of an SAE from its weights; made by `saelens_reconstruction`."""

    def __init__(self, tensors: Mapping[str, Rows], config: Mapping[str, Any], k: int | None, where: str) -> None:
        self.tensors, self.config = tensors, config
        self.architecture = str(config.get("architecture", "standard"))
        if self.architecture not in _LATENTS:
            raise InputError(
                f"{where} has the architecture {self.architecture!r}; known are {', '.join(sorted(_LATENTS))}: "
                "load it with SAELens and pass its forward as a function"
            )
        if config.get("normalize_activations", "none") not in ("none", False):
            raise InputError(
                f"{where} expects inputs normalised by {config['normalize_activations']!r}; fold the norm into "
                "its weights with SAELens first"
            )
        self.k = k if k is not None else config.get("k")
        if self.architecture == "topk" and not (isinstance(self.k, int | float) and self.k >= 1):
            raise InputError(f"{where} does not say its k; give k")

    @property
    def n_features(self) -> int:
        """Width of its rows."""
        return int(self.tensors["W_dec"].shape[1])

    def latents(self, rows: Rows) -> Rows:
        """Return the latents of rows (n, n_features): (n, n_latents), zero where inactive."""
        x = rows - self.tensors["b_dec"] if self.config.get("apply_b_dec_to_input", True) else rows
        return _LATENTS[self.architecture](self, x.astype(np.float32))

    def __call__(self, rows: Rows) -> Rows:
        """Return the reconstruction of rows (n, n_features)."""
        out: Rows = self.latents(rows) @ self.tensors["W_dec"] + self.tensors["b_dec"]
        return out

    def standard(self, x: Rows) -> Rows:
        """Latents of a ReLU SAE: (n, n_latents)."""
        return np.maximum(x @ self.tensors["W_enc"] + self.tensors["b_enc"], 0)

    def jumprelu(self, x: Rows) -> Rows:
        """Latents above a threshold of their own; a BatchTopK SAE is stored as one."""
        pre = x @ self.tensors["W_enc"] + self.tensors["b_enc"]
        return np.where(pre > self.tensors["threshold"], np.maximum(pre, 0), 0).astype(np.float32)

    def topk(self, x: Rows) -> Rows:
        """The k largest latents, less those below 0."""
        pre = x @ self.tensors["W_enc"] + self.tensors["b_enc"]
        scale = np.ones(pre.shape[1], np.float32)
        if self.config.get("rescale_acts_by_decoder_norm"):
            scale = np.linalg.norm(self.tensors["W_dec"], axis=1).astype(np.float32)
        pre = pre * scale
        k = min(int(self.k or 0), pre.shape[1])
        chosen = np.argpartition(-pre, k - 1, axis=1)[:, :k]
        out = np.zeros_like(pre)
        np.put_along_axis(out, chosen, np.maximum(np.take_along_axis(pre, chosen, 1), 0), 1)
        return out / scale

    def gated(self, x: Rows) -> Rows:
        """Latents whose gate is open, with a magnitude of their own."""
        t, pre = self.tensors, x @ self.tensors["W_enc"]
        magnitude = np.maximum(pre * np.exp(t["r_mag"]) + t["b_mag"], 0)
        return np.where(pre + t["b_gate"] > 0, magnitude, 0).astype(np.float32)


_LATENTS: dict[str, Callable[[SparseAutoencoder, Rows], Rows]] = {
    "standard": SparseAutoencoder.standard,
    "jumprelu": SparseAutoencoder.jumprelu,
    "topk": SparseAutoencoder.topk,
    "gated": SparseAutoencoder.gated,
}


def saelens_reconstruction(path: str | os.PathLike[str], k: int | None = None) -> Coder | SparseAutoencoder:
    """Return the reconstruction by an SAE in a SAELens folder, without SAELens.

    Parameters
    ----------
    path : path
        Folder with `cfg.json` and `sae_weights.safetensors`: standard, topk, jumprelu, gated, or a matching
        pursuit such as `dbksvd export saelens` writes.
    k : int, optional
        Most nonzeros per sample, for a topk or a pursuit; default: what the folder says.
    """
    where = os.fspath(path)
    try:
        with open(os.path.join(where, CONFIG), encoding="utf-8") as file:
            config = json.load(file)
        architecture = config.get("architecture", "standard")
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"{where} is not a SAELens folder: {brief(error)}") from error
    if architecture in (BUILTIN_ARCHITECTURE, PLUGIN_ARCHITECTURE):
        return Coder(load_foreign(where, k=k))
    tensors = read_safetensors(os.path.join(where, WEIGHTS))
    found = SparseAutoencoder(tensors, config, k, where)
    needed = {
        "standard": ("W_enc", "b_enc"),
        "topk": ("W_enc", "b_enc"),
        "jumprelu": ("W_enc", "b_enc", "threshold"),
        "gated": ("W_enc", "b_gate", "r_mag", "b_mag"),
    }[found.architecture]
    missing = [name for name in (*needed, "W_dec", "b_dec") if name not in tensors]
    if missing:
        raise StoreError(f"{where} lacks the tensors {', '.join(missing)} of a {found.architecture} SAE")
    return found


def open_reconstruction(given: Any, k: int | None = None) -> Reconstruct:
    """Return the reconstruction that something stands for.

    Parameters
    ----------
    given : callable, Dictionary, fitted estimator, or path of a run, dictionary or SAELens folder
    k : int, optional
        Most nonzeros per sample.
    """
    if isinstance(given, str | os.PathLike) and os.path.exists(os.path.join(given, CONFIG)):
        return saelens_reconstruction(given, k)
    if callable(given) and not isinstance(given, Dictionary) and not hasattr(given, "to_dictionary"):
        found: Reconstruct = given
        return found
    return Coder(given, k)


def require_width(reconstruct: Any, n_features: int, name: str) -> None:
    """Refuse a dictionary of another width than the activations."""
    width = getattr(reconstruct, "n_features", n_features)
    if width != n_features:
        raise MismatchError(
            f"{name} has {width} features, the activations of this model {n_features}; give a dictionary that was "
            "fitted on this model"
        )
