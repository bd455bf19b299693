"""TopK and BatchTopK sparse autoencoders and their Matryoshka forms in torch.

The encoder is one linear map; the k largest activations of a sample stay, or as many on average over a batch
(BatchTopK, arXiv 2412.06410). Decoder rows have unit norm. Latents that have not fired for a while reconstruct the
residual (the auxiliary loss of "Scaling and evaluating sparse autoencoders"); the Matryoshka form (arXiv
2503.17547) adds the reconstruction by every prefix of the latents.

`TopKSAE.loss` defines what is minimised; training takes its gradient from `benchmarks.sae_step`, which is faster
than automatic differentiation because it knows which latents have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks import sae_step
from benchmarks.sae_step import AUX_LATENTS_PER_K, AUX_WEIGHT, Stepper, keep_largest

# BatchTopK: the most latents of one sample, in units of k, and how slowly the threshold for single samples moves.
MOST_PER_K = 4
THRESHOLD_DECAY = 0.99
# Steps over which the learning rate rises.
WARM_UP = 50


class TopKSAE(nn.Module):
    """Sparse autoencoder that keeps the k largest activations of each sample.

    Parameters
    ----------
    n_features, n_atoms, k : int
    groups : sizes of the Matryoshka groups, which sum to n_atoms; None for the plain form
    """

    def __init__(self, n_features: int, n_atoms: int, k: int, groups: Sequence[int] | None = None) -> None:
        super().__init__()
        self.k = k
        self.ends = [n_atoms] if groups is None else [int(end) for end in np.cumsum(groups)]
        directions = nn.functional.normalize(torch.randn(n_atoms, n_features), dim=1)
        self.decoder = nn.Parameter(directions)
        self.encoder = nn.Parameter(directions.clone())  # tied at the start, free afterwards
        self.bias = nn.Parameter(torch.zeros(n_features))
        self.register_buffer("since", torch.zeros(n_atoms))

    def encode(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Activations before the choice (n, n_atoms), and values and latents of the k largest (n, k)."""
        pre = (y - self.bias) @ self.encoder.T
        values, latents = pre.topk(self.k, dim=1, sorted=False)
        return pre, torch.relu(values), latents

    def keep(self, pre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose as `encode` does in training, without torch: values (n, most), 0 where unused, and latents.

        Latents of a sample are in rising order.
        """
        return _largest(pre, self.k)

    def decode(self, values: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Samples from the chosen latents: (n, n_features)."""
        return (
            nn.functional.embedding_bag(latents, self.decoder, per_sample_weights=values, mode="sum") + self.bias
        )

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        """Squared error of every prefix, and the auxiliary loss, per unit of the samples' energy."""
        pre, values, latents = self.encode(y)
        scale = y.pow(2).sum(1).mean()
        total = torch.zeros(())
        for end in self.ends:
            part = values if end == self.ends[-1] else values * (latents < end)
            rebuilt = self.decode(part, latents)
            total = total + (y - rebuilt).pow(2).sum(1).mean() / scale
        with torch.no_grad():
            self.since += len(y)
            self.since[latents[values > 0]] = 0
        return total / len(self.ends) + AUX_WEIGHT * self._auxiliary(pre, (y - rebuilt).detach())

    def _auxiliary(self, pre: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Error of the residual as rebuilt by dead latents."""
        dead = torch.nonzero(self.since > sae_step.DEAD_AFTER).flatten()
        if dead.numel() == 0:
            return torch.zeros(())
        n = min(dead.numel(), AUX_LATENTS_PER_K * self.k)
        values, places = pre[:, dead].topk(n, dim=1, sorted=False)
        weights = torch.relu(values)
        rebuilt = nn.functional.embedding_bag(dead[places], self.decoder, per_sample_weights=weights, mode="sum")
        return (residual - rebuilt).pow(2).sum(1).mean() / residual.pow(2).sum(1).mean()


class BatchTopKSAE(TopKSAE):
    """Sparse autoencoder that keeps k activations per sample on average over a batch.

    Outside training a sample keeps the activations above a threshold: the running mean of the smallest that
    batches kept.
    """

    def __init__(self, n_features: int, n_atoms: int, k: int, groups: Sequence[int] | None = None) -> None:
        super().__init__(n_features, n_atoms, k, groups)
        self.register_buffer("threshold", torch.zeros(()))

    def encode(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Activations before the choice (n, n_atoms); values, 0 where not chosen, and latents (n, most)."""
        pre = (y - self.bias) @ self.encoder.T
        most = min(MOST_PER_K * self.k, pre.shape[1]) if self.training else pre.shape[1]
        values, latents = pre.topk(most, dim=1, sorted=False)
        values = torch.relu(values)
        smallest = self._smallest(values.detach()) if self.training else self.threshold
        return pre, values * (values >= smallest), latents

    def keep(self, pre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose as `encode` does in training, without torch; see `TopKSAE.keep`."""
        values, latents = _largest(pre, min(MOST_PER_K * self.k, pre.shape[1]))
        smallest = float(self._smallest(torch.from_numpy(values)))
        return np.where(values >= smallest, values, np.float32(0)), latents

    def _smallest(self, values: torch.Tensor) -> torch.Tensor:
        """Smallest of the n k largest activations of a batch; the threshold moves towards it."""
        kept = values.flatten().topk(self.k * len(values), sorted=False).values.min()
        with torch.no_grad():
            first = bool(self.threshold == 0)
            self.threshold.copy_(kept if first else torch.lerp(kept, self.threshold, THRESHOLD_DECAY))
        return kept


def _largest(pre: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n largest positive activations of each sample, by rising latent, and these latents."""
    least = np.partition(pre, pre.shape[1] - n, axis=1)[:, pre.shape[1] - n]
    values, latents = np.empty((len(pre), n), np.float32), np.empty((len(pre), n), np.int64)
    keep_largest(pre, least, n, values, latents)
    return values, latents


def train_sae(
    rows: np.ndarray,
    n_atoms: int,
    k: int,
    learning_rate: float,
    after_step: Callable[[TopKSAE, int], None],
    groups: Sequence[int] | None = None,
    batch_size: int = 1024,
    n_steps: int = 10**9,
    seed: int = 0,
    kind: type[TopKSAE] = TopKSAE,
    decay: float = 0.0,
) -> TopKSAE:
    """Train with Adam until `after_step` raises, or for `n_steps` batches; the learning rate warms up.

    Parameters
    ----------
    rows : float32 ndarray of shape (n, n_features), scaled so that the mean norm is about sqrt(n_features)
    after_step : called with the model and the rows seen after every step
    kind : TopKSAE or BatchTopKSAE
    decay : share of the steps, the last ones, over which the learning rate falls to 0
    """
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    sae = kind(rows.shape[1], n_atoms, k, groups)
    stepper = Stepper(sae)

    def rate(step: int) -> float:
        left = (n_steps - step) / (decay * n_steps) if decay else 1.0
        return learning_rate * min(1.0, (step + 1) / WARM_UP, left)

    size, step = min(batch_size, len(rows)), 0
    while step < n_steps:
        permutation = order.permutation(len(rows))
        for start in range(0, len(rows) // size * size, size):
            stepper.step(rows[permutation[start : start + size]], rate(step))
            step += 1
            after_step(sae, step * size)
            if step >= n_steps:
                break
    return sae
