"""Importing this module registers the encoder of this package with SAELens.

    from sae_lens import SAE
    import dbksvd_dask.export.saelens_plugin

    sae = SAE.load_from_disk("folder")   # written by `dbksvd export saelens ... --form plugin`

`DBKSVDSAE` encodes with coefficients of both signs (or non-negative ones, if the dictionary is), with the
stopping rule of `dbksvd_dask.encode`, and fires every hook. The class that SAELens has does not fire
`hook_sae_acts_post`, so that cached activations and steering miss its latents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sae_lens.registry import SAE_CLASS_REGISTRY, register_sae_class
from sae_lens.saes.sae import SAE, SAEConfig

from dbksvd_dask.export.saelens import PLUGIN_ARCHITECTURE
from dbksvd_dask.export.torch_pursuit import TorchPursuit
from dbksvd_dask.plan.encoder import EncodeSpec


@dataclass
class DBKSVDSAEConfig(SAEConfig):
    """Configuration of `DBKSVDSAE`: that of every SAE, and how samples become codes.

    Attributes
    ----------
    k : most nonzeros per sample
    encoder : one of `plan.encoders.ENCODERS`
    nonneg : non-negative coefficients only
    refit : least squares on the support
    min_coefficient : stop when the next coefficient is below this
    rtol : stop when the residual norm falls to this part of the sample's
    stages : groups offered in order, each [first atom, end, most nonzeros]; empty: all atoms at once
    whitened : encode in the coordinates to which the weight `whitening` maps samples
    """

    k: int = 32
    encoder: str = "mp"
    nonneg: bool = False
    refit: bool = False
    min_coefficient: float = 0.0
    rtol: float = 0.0
    stages: list[list[int]] = field(default_factory=list)
    whitened: bool = False

    @classmethod
    def architecture(cls) -> str:
        """Name of the encoder in `cfg.json`."""
        return PLUGIN_ARCHITECTURE


class DBKSVDSAE(SAE[DBKSVDSAEConfig]):
    """A dictionary with a greedy encoder, for inference.

    `W_dec` has shape (n_atoms, n_features) and unit rows, `b_dec` (n_features,) is the mean; a whitened one has
    `whitening` (n_features, n_features) too. Latents are coefficients and may be negative.
    """

    def __init__(self, cfg: DBKSVDSAEConfig, use_error_term: bool = False) -> None:
        stages = tuple((first, end, most) for first, end, most in cfg.stages)
        spec = EncodeSpec(cfg.k, cfg.encoder, cfg.nonneg, cfg.refit, cfg.min_coefficient, cfg.rtol, stages)
        super().__init__(cfg, use_error_term)
        self.pursuit = TorchPursuit(spec)

    def initialize_weights(self) -> None:
        """Make `W_dec` and `b_dec`; unit rows, to be replaced by loaded weights."""
        shape = (self.cfg.d_sae, self.cfg.d_in)
        W_dec = torch.nn.functional.normalize(torch.randn(shape, dtype=self.dtype, device=self.device))
        self.W_dec = torch.nn.Parameter(W_dec)
        self.b_dec = torch.nn.Parameter(torch.zeros(self.cfg.d_in, dtype=self.dtype, device=self.device))
        self.whitening = None
        if self.cfg.whitened:
            unit = torch.eye(self.cfg.d_in, dtype=self.dtype, device=self.device)
            self.whitening = torch.nn.Parameter(unit, requires_grad=False)

    @property
    def W_enc(self) -> torch.Tensor:  # noqa: N802 - the name that SAELens gives it
        """Products with the atoms: `W_dec` transposed, (n_features, n_atoms)."""
        return self.W_dec.T

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of samples.

        Parameters
        ----------
        x : tensor of shape (..., n_features)

        Returns
        -------
        tensor of shape (..., n_atoms)
        """
        centred = self.process_sae_in(x)
        return self.hook_sae_acts_post(self.pursuit(centred, self.W_dec, self.whitening))

    def decode(self, feature_acts: torch.Tensor) -> torch.Tensor:
        """Reconstruct samples: (..., n_atoms) to (..., n_features)."""
        out = feature_acts @ self.W_dec
        if self.cfg.apply_b_dec_to_input:
            out = out + self.b_dec
        out = self.run_time_activation_norm_fn_out(self.hook_sae_recons(out))
        return self.reshape_fn_out(out, self.d_head)

    def fold_W_dec_norm(self) -> None:  # noqa: N802
        """Refuse: rows are of unit norm, and the encoder is tied to them."""
        raise NotImplementedError("a dictionary has unit rows; there is no norm to fold")

    def fold_activation_norm_scaling_factor(self, scaling_factor: float) -> None:
        """Refuse: rows would no longer have unit norm."""
        raise NotImplementedError("a dictionary keeps unit rows; scale the activations before encoding")

    def fold_activation_whitening(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: rows would no longer have unit norm."""
        raise NotImplementedError("a dictionary keeps unit rows; whiten the activations before encoding")


if PLUGIN_ARCHITECTURE not in SAE_CLASS_REGISTRY:
    register_sae_class(PLUGIN_ARCHITECTURE, DBKSVDSAE, DBKSVDSAEConfig)
