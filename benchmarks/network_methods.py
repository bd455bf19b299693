"""The dictionaries that `benchmarks.networks` compares: ours, sparse autoencoders, ITDA, and sanity baselines.

Each method is a function from the same training rows to a folder that `dbksvd loss` can open: a dictionary of
ours, or an autoencoder in SAELens form. The baselines are those that audits of sparse autoencoders ask for: a
random dictionary, and a soft-frozen one, whose atoms are trained but stay near their random start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np

from benchmarks import peer_itda
from benchmarks.common import Stopwatch, unit_atoms
from benchmarks.peer_base import mean_norm
from dbksvd_dask import DBKSVD, Dictionary, fit_linear_encoder, save_dictionary
from dbksvd_dask.evaluate.metrics import variance_explained
from dbksvd_dask.export.saelens import export_linear
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph.sources import ArraySource
from dbksvd_dask.kernels.moments import moments
from dbksvd_dask.plan.groups import exponential_groups
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.store.atomic import write_json

# Cosine of a soft-frozen atom with its random start, at least.
SOFT_FROZEN = 0.8
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
# Rows of ITDA, whose paper needs a hundredth of an autoencoder's; the search for a threshold reads them six times.
ITDA_ROWS = 100_000
# Share of an autoencoder's steps over which its learning rate falls to zero.
DECAY = 0.2
# Seed of the short runs that compare learning rates; no reported run has it.
TRIAL_SEED = 100
# Training rows on which learning rates are compared, a tenth at most; the last ones: no autoencoder sees them.
N_VALIDATION = 4096


@dataclass
class Training:
    """What every method gets.

    Attributes
    ----------
    rows : float32 ndarray of shape (n, n_features)
        Activations in random order.
    n_atoms, k, seed : int
    n_iter : int
        Outer batches of a fit of ours.
    sae_steps, sae_trial_steps : int
        Batches of 1024 rows of an autoencoder, and of each trial of a learning rate.
    rate : callable
        Gives the learning rate of the autoencoders; called only when one is trained.
    notes : dict
        What a method wants to have recorded.
    clock : Stopwatch
        Runs while a method trains; a method may stop it for what is not its training.
    base : Path, optional
        The dictionary that a method starts from, where `Method.base` names one.
    """

    rows: np.ndarray
    n_atoms: int
    k: int
    seed: int
    n_iter: int
    sae_steps: int
    sae_trial_steps: int
    rate: Callable[[], float]
    notes: dict[str, Any] = field(default_factory=dict)
    clock: Stopwatch = field(default_factory=Stopwatch)
    base: Path | None = None

    @property
    def n_fitted(self) -> int:
        """Rows that an autoencoder trains on."""
        return len(self.rows) - min(N_VALIDATION, len(self.rows) // 10)

    def mean(self) -> np.ndarray:
        """Mean of the rows, (n_features,) float64."""
        return self.rows.mean(axis=0, dtype=np.float64)


class Method(NamedTuple):
    """A way to a dictionary.

    Attributes
    ----------
    train : function of Training and the folder to write
    what : one line for the page
    needs : package, or None
    base : method of the dictionary that it starts from, or None; that is trained first, and its seconds count
    """

    train: Callable[[Training, Path], None]
    what: str
    needs: str | None = None
    base: str | None = None


# -- ours ------------------------------------------------------------------------------------------------


def fit_model(training: Training, recipe: str | None = None, **changes: Any) -> DBKSVD:
    """Fit by a recipe or with given parameters, on one thread."""
    common = {"seed": training.seed, "device": "cpu", **changes}
    if recipe != "recover":  # its iterations follow from its growth
        common["n_iter"] = training.n_iter
    shape = (training.n_atoms, training.k)
    model = DBKSVD(*shape, **common) if recipe is None else DBKSVD.recipe(recipe, *shape, **common)
    with dask.config.set(scheduler="synchronous"):
        model.fit(training.rows)
    training.notes |= {"n_iter": model.n_iter_, "recipe": recipe, "changes": {**changes}}
    return model


def fit_ours(training: Training, folder: Path, recipe: str | None = None, **changes: Any) -> None:
    """Fit, and write the dictionary, which encodes as the fit has it."""
    fit_model(training, recipe, **changes).save(folder)


def fit_linear(training: Training, folder: Path) -> None:
    """Fit a linear encoder to the codes of one pursuit; written as SAELens has a JumpReLU autoencoder."""
    with dask.config.set(scheduler="synchronous"):
        encoder = fit_linear_encoder(training.base, training.rows, encode="plain")
    export_linear(encoder, folder, model_name="benchmark", hook_name="benchmark")


def project_to_start(atoms: np.ndarray, start: np.ndarray, least: float = SOFT_FROZEN) -> np.ndarray:
    """Move unit atoms that have left the cone around their start back to its edge; an atom may be negated.

    Parameters
    ----------
    atoms, start : ndarray of shape (n_atoms, n_features)
    least : smallest cosine
    """
    cosine = np.einsum("ij,ij->i", atoms, start)
    towards = start * np.where(cosine < 0, -1, 1)[:, None].astype(start.dtype)
    across = atoms - np.abs(cosine)[:, None] * towards
    length = np.linalg.norm(across, axis=1, keepdims=True)
    edge = least * towards + np.sqrt(1 - least**2) * across / np.where(length > 0, length, 1)
    return unit_atoms(np.where((np.abs(cosine) < least)[:, None], edge, atoms))


def soft_frozen(training: Training, folder: Path) -> None:
    """Our fit from random atoms that are put back after every batch."""
    params = FitParams.checked(
        n_atoms=training.n_atoms,
        k=training.k,
        init="uniform",
        momentum=0.0,
        refit=True,
        n_iter=training.n_iter,
        seed=training.seed,
        device="cpu",
        validation=0,
    )
    trainer = Trainer(ArraySource(training.rows, params.chunk_size), params)
    with dask.config.set(scheduler="synchronous"):
        state = trainer.start()
        first = state.atoms.copy()
        for _ in range(training.n_iter):
            state = trainer.step(state)
            state = replace(state, atoms=project_to_start(state.atoms, first))
    save_dictionary(folder, state)


# -- without optimisation --------------------------------------------------------------------------------


def random_atoms(training: Training, folder: Path) -> None:
    """Random directions and the mean of the rows."""
    rng = np.random.default_rng(training.seed)
    atoms = unit_atoms(rng.standard_normal((training.n_atoms, training.rows.shape[1])))
    save_dictionary(folder, _plain(training, atoms))


def itda(training: Training, folder: Path) -> None:
    """ITDA on the first centred rows; its threshold is searched outside the clock."""
    centred = training.rows[:ITDA_ROWS] - training.mean().astype(np.float32)
    given = (centred, training.n_atoms, training.k)
    training.clock.stop()
    threshold = peer_itda.choose_threshold(*given, training.seed)
    training.clock.start()
    atoms, seen, _ = peer_itda.dictionary(*given, threshold, training.seed)
    training.notes |= {"threshold": threshold, "rows_read": seen}
    save_dictionary(folder, _plain(training, atoms))


def _plain(training: Training, atoms: np.ndarray) -> Dictionary:
    """Return atoms with the encoder of the recipe that they are compared with: a pursuit, then least squares."""
    return Dictionary(atoms, training.mean(), {"n_atoms": len(atoms), "k": training.k, "refit": True})


# -- sparse autoencoders ---------------------------------------------------------------------------------


def train_autoencoder(
    training: Training, learning_rate: float, n_steps: int, kind: str, groups: Sequence[int] | None
) -> tuple[Any, float]:
    """Train on centred rows scaled to a mean norm of sqrt(n_features); return the autoencoder and the scale."""
    import torch

    from benchmarks import sae_torch

    torch.set_num_threads(1)
    centred = training.rows - training.mean().astype(np.float32)
    scale = float(np.sqrt(centred.shape[1]) / mean_norm(centred))
    centred *= np.float32(scale)
    sae = sae_torch.train_sae(
        centred[: training.n_fitted],
        training.n_atoms,
        training.k,
        learning_rate,
        lambda sae, seen: None,
        groups,
        n_steps=n_steps,
        seed=training.seed,
        kind=getattr(sae_torch, kind),
        decay=DECAY,
    )
    return sae.eval(), scale


def fit_autoencoder(training: Training, folder: Path, kind: str = "TopKSAE", matryoshka: bool = False) -> None:
    """Train with the learning rate that was chosen, and write it as SAELens has it."""
    training.clock.stop()
    rate = training.rate()
    training.clock.start()
    groups = exponential_groups(training.n_atoms) if matryoshka else None
    sae, scale = train_autoencoder(training, rate, training.sae_steps, kind, groups)
    training.notes |= {"learning_rate": rate, "steps": training.sae_steps}
    write_autoencoder(folder, sae, scale, training.mean())


def write_autoencoder(folder: Path, sae: Any, scale: float, mean: np.ndarray) -> None:
    """Write an autoencoder for raw rows: of rows that were centred and scaled, latents shrink by the scale."""
    from safetensors.numpy import save_file

    encoder, decoder, bias = (p.detach().numpy() for p in (sae.encoder, sae.decoder, sae.bias))
    tensors = {
        "W_enc": np.ascontiguousarray(encoder.T),
        "b_enc": np.zeros(len(encoder), np.float32),
        "W_dec": np.ascontiguousarray(decoder),
        "b_dec": (mean + bias / scale).astype(np.float32),
    }
    config = {"d_in": decoder.shape[1], "d_sae": decoder.shape[0], "dtype": "float32", "device": "cpu"}
    config |= {"apply_b_dec_to_input": True, "normalize_activations": "none", "metadata": {}}
    if hasattr(sae, "threshold"):
        tensors["threshold"] = np.full(len(encoder), float(sae.threshold) / scale, np.float32)
        config["architecture"] = "jumprelu"
    else:
        config |= {"architecture": "topk", "k": sae.k}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    write_json(folder / "cfg.json", config)


def compare_rates(training: Training) -> dict[str, float]:
    """Variance explained by short TopK runs with each learning rate, on training rows set aside."""
    import torch

    centred = training.rows - training.mean().astype(np.float32)
    found = {}
    training = replace(training, seed=TRIAL_SEED)
    for rate in LEARNING_RATES:
        sae, scale = train_autoencoder(training, rate, training.sae_trial_steps, "TopKSAE", None)
        held = torch.from_numpy(centred[training.n_fitted :] * np.float32(scale))
        with torch.no_grad():
            _, values, latents = sae.encode(held)
            left = held - sae.decode(values, latents)
        found[json.dumps(rate)] = variance_explained(moments(held.numpy(), left.numpy())).value
    return found


METHODS: dict[str, Method] = {
    "DB-KSVD": Method(partial(fit_ours, recipe="reconstruct", whiten=0.0), "recipe reconstruct, not whitened"),
    "DB-KSVD Matryoshka": Method(partial(fit_ours, groups="exponential"), "exponential groups, one pursuit"),
    "DB-KSVD read": Method(partial(fit_ours, recipe="read"), "recipe read: non-negative, staged groups"),
    "DB-KSVD read, linear": Method(
        fit_linear, "recipe read, codes of one pursuit by one linear step and a threshold", base="DB-KSVD read"
    ),
    "DB-KSVD whitened": Method(partial(fit_ours, recipe="reconstruct", whiten=0.5), "the same, whiten=0.5"),
    "DB-KSVD recover": Method(partial(fit_ours, recipe="recover"), "recipe recover: grown, mean sparsity"),
    "TopK SAE": Method(fit_autoencoder, "own encoder", "torch"),
    "BatchTopK SAE": Method(partial(fit_autoencoder, kind="BatchTopKSAE"), "own encoder", "torch"),
    "Matryoshka SAE": Method(
        partial(fit_autoencoder, kind="BatchTopKSAE", matryoshka=True), "BatchTopK, exponential groups", "torch"
    ),
    "ITDA": Method(itda, "activations that matching pursuit explains worst"),
    "soft-frozen": Method(soft_frozen, f"cosine with its random start at least {SOFT_FROZEN}"),
    "random": Method(random_atoms, "random directions, matching pursuit"),
}
# The activations themselves: probing only.
RAW = "raw"
