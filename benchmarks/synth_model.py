"""SynthSAEBench models of three sizes, and samples of them kept in a folder.

The 16k model has the published settings of SynthSAEBench-16k, made from its configuration and not downloaded, but
its directions are pushed apart in 10 steps instead of 100 (each step takes half a minute on a core); the smaller
ones shrink features, dimensions and trees together, so that superposition and hierarchy stay alike. Needs the
extra `synth` (sae-lens and torch).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp


@dataclass(frozen=True)
class Size:
    """One size of the benchmark."""

    n_features: int
    hidden_dim: int
    n_roots: int
    n_atoms: int
    l0: tuple[int, ...]
    n_train: int
    n_test: int
    orthogonal_steps: int = 100


SIZES = {
    "small": Size(1024, 96, 8, 256, (3, 4, 6), 200_000, 20_000),
    "medium": Size(2048, 192, 16, 512, (4, 6, 9), 200_000, 20_000),
    "16k": Size(16384, 768, 128, 4096, (25,), 300_000, 10_000, orthogonal_steps=10),
}


def make_model(size: Size, seed: int) -> Any:
    """Build the generator: sae-lens' own, with the settings of SynthSAEBench-16k."""
    from sae_lens import synthetic as s

    config = s.SyntheticModelConfig(
        num_features=size.n_features,
        hidden_dim=size.hidden_dim,
        firing_probability=s.ZipfianFiringProbabilityConfig(exponent=0.5, max_prob=0.4, min_prob=5e-4),
        hierarchy=s.HierarchyConfig(
            total_root_nodes=size.n_roots,
            branching_factor=4,
            max_depth=3,
            mutually_exclusive_portion=1.0,
            compensate_probabilities=True,
        ),
        orthogonalization=s.OrthogonalizationConfig(num_steps=size.orthogonal_steps, lr=3e-4),
        correlation=s.LowRankCorrelationConfig(rank=25, correlation_scale=0.1),
        mean_firing_magnitudes=s.LinearMagnitudeConfig(start=5.0, end=4.0),
        std_firing_magnitudes=s.FoldedNormalMagnitudeConfig(mean=0.5, std=0.5),
        bias=True,
        seed=seed,
    )
    return s.SyntheticModel(config)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one model with what made them.

    Attributes
    ----------
    train : float32 (n_train, hidden_dim)
    test : float32 (n_test, hidden_dim)
    test_features : csr (n_test, n_features), the true activations of the test samples
    truth : float32 (n_features, hidden_dim), the true directions
    """

    train: np.ndarray
    test: np.ndarray
    test_features: sp.csr_array
    truth: np.ndarray


def load_samples(cache: Path, name: str, seed: int, n_train: int | None = None) -> Samples:
    """Read the samples of a model, drawing them first where the folder does not have them."""
    size = SIZES[name]
    rows = n_train or size.n_train
    folder = cache / f"{name}-{rows}-seed{seed}"
    if not (folder / "done.json").exists():
        _draw(folder, size, seed, rows)
    csr = np.load(folder / "test_features.npz")
    features = sp.csr_array((csr["data"], csr["indices"], csr["indptr"]), shape=tuple(csr["shape"]))
    arrays = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "test", "truth")}
    return Samples(test_features=features, **arrays)


def _draw(folder: Path, size: Size, seed: int, n_train: int) -> None:
    """Draw samples and write them; the marker comes last, so that half a cache is not taken for a whole one."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(size, seed)
    truth = model.feature_dict.feature_vectors.detach().numpy().astype(np.float32)
    np.save(folder / "truth.npy", truth)
    torch.manual_seed(1000 + seed)
    _write_rows(folder / "train.npy", model, size, n_train)
    features = _write_rows(folder / "test.npy", model, size, size.n_test)
    np.savez(
        folder / "test_features.npz",
        data=features.data,
        indices=features.indices,
        indptr=features.indptr,
        shape=features.shape,
    )
    l0 = features.nnz / size.n_test
    (folder / "done.json").write_text(json.dumps({"seed": seed, "n_train": n_train, "true_l0": l0}))


def _write_rows(path: Path, model: Any, size: Size, n: int, block: int = 2000) -> sp.csr_array:
    """Write samples block by block; returns their true activations."""
    import torch

    out = np.lib.format.open_memmap(path, "w+", np.float32, (n, size.hidden_dim))
    parts = []
    with torch.no_grad():
        for start in range(0, n, block):
            stop = min(start + block, n)
            acts = model.activation_generator(stop - start)
            out[start:stop] = model.feature_dict(acts).numpy()
            parts.append(sp.csr_array(acts.numpy()))
    out.flush()
    return sp.csr_array(sp.vstack(parts, format="csr"))
