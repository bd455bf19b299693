"""A dictionary as the object that SAEBench evaluates.

Several measurements of SAEBench use positive activations only, so a signed dictionary takes the stacked form
here: latent j is the positive part of atom j's coefficient, latent n_atoms + j the negative part. Codes come from
the encoder of this package, with its stopping rule. docs/saebench.md has the commands.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from sae_bench.custom_saes.custom_sae_config import CustomSAEConfig
from torch import nn

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.export.check import check_exportable, encode_spec, mean_of
from dbksvd_dask.export.foreign import load_foreign
from dbksvd_dask.export.saelens import stack
from dbksvd_dask.export.torch_pursuit import TorchPursuit
from dbksvd_dask.store.paths import PathLike


class SAEBenchDictionary(nn.Module):
    """The interface that SAEBench requires of a custom SAE, around one of our dictionaries.

    Parameters
    ----------
    dictionary : Dictionary
    model_name : str
        Name under which TransformerLens loads the model.
    hook_name : str
        Where the activations come from, such as "blocks.8.hook_resid_post"; its first number is the layer.
    k : int, optional
        Most nonzeros per sample; default: that of the fit.
    context_size : int
        Tokens per sequence, for its evaluations that read it from the SAE.

    Attributes
    ----------
    W_enc : (n_features, n_latents);  W_dec : (n_latents, n_features), unit rows
    b_enc : (n_latents,) zeros;  b_dec : (n_features,) the mean
    cfg, dtype, device : as SAEBench reads them
    """

    def __init__(
        self,
        dictionary: Dictionary,
        *,
        model_name: str,
        hook_name: str,
        k: int | None = None,
        context_size: int = 128,
    ) -> None:
        super().__init__()
        check_exportable(dictionary)
        layer = re.search(r"\d+", hook_name)
        if layer is None:
            raise InputError(f"hook_name={hook_name!r} names no layer; use one such as 'blocks.8.hook_resid_post'")
        self.spec = encode_spec(dictionary, k)
        self.stacked = not self.spec.nonneg
        self.pursuit = TorchPursuit(self.spec)
        # SAEBench casts weights to the dtype of the model; the encoder keeps the exact ones
        atoms = np.ascontiguousarray(dictionary.atoms)
        self._atoms, self._mean = torch.from_numpy(atoms.copy()), torch.from_numpy(mean_of(dictionary).copy())
        white = dictionary.whitening
        self._whitening = None if white is None else torch.from_numpy(white.copy())
        W_dec = torch.from_numpy(stack(atoms) if self.stacked else atoms.copy())
        self.W_dec = nn.Parameter(W_dec, requires_grad=False)
        self.W_enc = nn.Parameter(W_dec.T.contiguous(), requires_grad=False)
        self.b_enc = nn.Parameter(torch.zeros(W_dec.shape[0], dtype=W_dec.dtype), requires_grad=False)
        self.b_dec = nn.Parameter(self._mean.clone(), requires_grad=False)
        self.device: Any = torch.device("cpu")
        self.dtype: torch.dtype = W_dec.dtype
        self.cfg = self._config(model_name, hook_name, int(layer[0]), context_size)

    def _config(self, model_name: str, hook_name: str, layer: int, context_size: int) -> Any:
        n_latents, d_in = self.W_dec.shape
        cfg = CustomSAEConfig(model_name, d_in=d_in, d_sae=n_latents, hook_layer=layer, hook_name=hook_name)
        cfg.architecture = "matching_pursuit"
        cfg.context_size = context_size
        cfg.apply_b_dec_to_input = True
        cfg.dtype = str(self.dtype).removeprefix("torch.")
        cfg.activation_fn_str = f"dbksvd, k={self.spec.k}" + (", stacked" if self.stacked else "")
        return cfg

    @classmethod
    def load(cls, path: PathLike, **options: Any) -> SAEBenchDictionary:
        """Read a run, a dictionary, an exported folder or a foreign file; options as for the class."""
        return cls(load_foreign(path), **options)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode samples: (..., n_features) to (..., n_latents), none negative."""
        self._atoms, self._mean = self._atoms.to(x.device), self._mean.to(x.device)
        acts = self.pursuit(x.to(self._atoms.dtype) - self._mean, self._atoms, self._whitening)
        if self.stacked:
            acts = torch.cat([acts.clamp(min=0), (-acts).clamp(min=0)], dim=-1)
        return acts.to(self.dtype)

    def decode(self, feature_acts: torch.Tensor) -> torch.Tensor:
        """Reconstruct samples: (..., n_latents) to (..., n_features)."""
        return feature_acts @ self.W_dec + self.b_dec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Encode and decode."""
        return self.decode(self.encode(x))

    def to(self, *args: Any, **kwargs: Any) -> SAEBenchDictionary:
        """Move and cast the weights, and update `device`, `dtype` and `cfg`."""
        super().to(*args, **kwargs)
        self.device, self.dtype = self.W_dec.device, self.W_dec.dtype
        self.cfg.device, self.cfg.dtype = str(self.device), str(self.dtype).removeprefix("torch.")
        return self
