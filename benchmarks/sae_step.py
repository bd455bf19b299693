"""One training step of a sparse autoencoder without automatic differentiation: one dense product, the rest sparse.

Only the latents that a sample keeps have a gradient, k of n_atoms, so its parts are sums over the kept pairs of
sample and latent. The gradient's projection, Adam and the norm are one pass over the rows of the weights.
Everything happens in the memory of the torch module, and gives what `TopKSAE.loss`, `backward` and
`torch.optim.Adam` give (a test compares them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dbksvd_dask.kernels._jit import jit

if TYPE_CHECKING:
    from benchmarks.sae_torch import TopKSAE

BETAS = (0.9, 0.999)
EPSILON = 1e-8
# A latent is dead when it has not fired for this many samples; of the dead ones, this many times k are used.
DEAD_AFTER = 50_000
AUX_LATENTS_PER_K = 8
AUX_WEIGHT = 1 / 32


@jit
def keep_largest(pre: Any, least: Any, most: int, values: Any, latents: Any) -> None:
    """Collect the positive activations that reach the least of their sample, at most `most`; the rest is 0."""
    n, m = pre.shape
    for i in range(n):
        found, low = 0, max(least[i], np.float32(0))
        for j in range(m):
            if pre[i, j] >= low and pre[i, j] > 0 and found < most:
                values[i, found], latents[i, found] = pre[i, j], j
                found += 1
        values[i, found:], latents[i, found:] = 0, 0


@jit
def left_over(y: Any, bias: Any, decoder: Any, values: Any, latents: Any, ends: Any, left: Any) -> None:
    """Write what each prefix of the latents leaves of the samples: left has shape (n_ends, n, d).

    Latents of a sample come in rising order, so every prefix goes on where the one before ended.
    """
    n, d = y.shape
    for i in range(n):
        slot, row = 0, left[0, i]
        for c in range(d):
            row[c] = y[i, c] - bias[c]
        for e in range(len(ends)):
            if e > 0:
                left[e, i, :] = left[e - 1, i]
                row = left[e, i]
            while slot < values.shape[1] and (values[i, slot] == 0 or latents[i, slot] < ends[e]):
                a, atom = values[i, slot], decoder[latents[i, slot]]
                if a > 0:
                    for c in range(d):
                        row[c] -= a * atom[c]
                slot += 1


@jit
def sum_suffixes(left: Any) -> None:
    """Replace each prefix's remainder by the sum over it and the longer ones: all that a latent takes part in."""
    for e in range(len(left) - 2, -1, -1):
        for i in range(left.shape[1]):
            for c in range(left.shape[2]):
                left[e, i, c] += left[e + 1, i, c]


@jit
def value_slopes(decoder: Any, values: Any, latents: Any, ends: Any, left: Any, factor: Any, slopes: Any) -> None:
    """Write the derivative of the loss by each kept value: -factor <remainder, atom>."""
    for i in range(values.shape[0]):
        e = 0
        for slot in range(values.shape[1]):
            if values[i, slot] <= 0:
                slopes[i, slot] = 0
                continue
            j = latents[i, slot]
            while j >= ends[e]:
                e += 1
            row, atom, total = left[e, i], decoder[j], np.float32(0)
            for c in range(row.size):
                total += row[c] * atom[c]
            slopes[i, slot] = -factor * total


@jit
def by_latent(values: Any, latents: Any, m: int) -> tuple[Any, Any]:
    """Sort the kept pairs by latent: offsets (m + 1,) and places in the flattened arrays."""
    offset = np.zeros(m + 1, np.int64)
    n, most = values.shape
    for i in range(n):
        for slot in range(most):
            if values[i, slot] > 0:
                offset[latents[i, slot] + 1] += 1
    for j in range(m):
        offset[j + 1] += offset[j]
    at, places = offset[:-1].copy(), np.empty(offset[m], np.int64)
    for i in range(n):
        for slot in range(most):
            if values[i, slot] > 0:
                places[at[latents[i, slot]]] = i * most + slot
                at[latents[i, slot]] += 1
    return offset, places


@jit
def gradients(offset: Any, places: Any, weights: Any, rows: Any, ends: Any, factor: Any, out: Any) -> None:
    """Add factor times the sum of weight times row over the pairs of each latent: out has shape (m, d).

    `rows` has shape (n_groups, n, d); a latent takes the rows of its group.
    """
    most, flat, e = weights.shape[1], weights.ravel(), 0
    for j in range(len(out)):
        while j >= ends[e]:
            e += 1
        grad = out[j]
        for at in range(offset[j], offset[j + 1]):
            a, row = factor * flat[places[at]], rows[e, places[at] // most]
            for c in range(grad.size):
                grad[c] += a * row[c]


@jit
def adam(weight: Any, grad: Any, first: Any, second: Any, rate: Any, step: int, unit: bool) -> None:
    """Take one step of Adam on rows; with `unit`, rows have unit norm and no gradient along themselves."""
    b1, b2, eps = np.float32(BETAS[0]), np.float32(BETAS[1]), np.float32(EPSILON)
    one = np.float32(1)
    size = np.float32(rate / (1 - BETAS[0] ** step))
    root = np.float32(1 / np.sqrt(1 - BETAS[1] ** step))
    for j in range(len(weight)):
        w, g, p, q = weight[j], grad[j], first[j], second[j]
        if unit:
            along = np.float32(0)
            for c in range(w.size):
                along += w[c] * g[c]
            for c in range(w.size):
                g[c] -= along * w[c]
        for c in range(w.size):
            p[c] = b1 * p[c] + (one - b1) * g[c]
            q[c] = b2 * q[c] + (one - b2) * g[c] * g[c]
            w[c] -= size * p[c] / (np.sqrt(q[c]) * root + eps)
        if unit:
            total = np.float32(0)
            for c in range(w.size):
                total += w[c] * w[c]
            scale = one / np.sqrt(total)
            for c in range(w.size):
                w[c] *= scale


class Stepper:
    """Adam on an autoencoder, in place.

    Parameters
    ----------
    sae : TopKSAE or BatchTopKSAE
    """

    def __init__(self, sae: TopKSAE) -> None:
        self.sae = sae
        self.decoder, self.encoder = sae.decoder.detach().numpy(), sae.encoder.detach().numpy()
        self.bias, self.since = sae.bias.detach().numpy(), sae.since.numpy()
        self.ends = np.array(sae.ends, np.int64)
        self.weights = (self.decoder, self.encoder, self.bias[None])
        self.grads = [np.zeros_like(w) for w in self.weights]
        self._moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self.steps = 0

    def step(self, y: np.ndarray, rate: float) -> None:
        """Learn from one batch, float32 of shape (n, n_features)."""
        self.find_gradients(y)
        self.steps += 1
        for i, (weight, grad, moments) in enumerate(zip(self.weights, self.grads, self._moments, strict=True)):
            adam(weight, grad, *moments, rate, self.steps, i == 0)

    def find_gradients(self, y: np.ndarray) -> None:
        """Write the gradients of the loss of a batch to `grads`: decoder, encoder, bias."""
        for grad in self.grads:
            grad[...] = 0
        centred = y - self.bias
        pre = centred @ self.encoder.T
        values, latents = self.sae.keep(pre)
        left = np.empty((len(self.ends), *y.shape), np.float32)
        left_over(y, self.bias, self.decoder, values, latents, self.ends, left)
        residual = left[-1].copy()
        factor = np.float32(2 / (len(self.ends) * float(np.einsum("ij,ij->", y, y))))
        sum_suffixes(left)
        self.grads[2][0] = -factor * left[0].sum(axis=0)
        self._collect(centred, values, latents, left, self.ends, factor)
        self.since += len(y)
        self.since[latents[values > 0]] = 0
        self._auxiliary(centred, pre, residual)

    def _collect(self, centred: Any, values: Any, latents: Any, left: Any, ends: Any, factor: Any) -> None:
        """Add the gradients by kept values, whose error is `left`."""
        grads, slopes = self.grads, np.empty_like(values)
        value_slopes(self.decoder, values, latents, ends, left, factor, slopes)
        offset, places = by_latent(values, latents, len(self.decoder))
        gradients(offset, places, values, left, ends, -factor, grads[0])
        one = np.array([len(self.decoder)])
        gradients(offset, places, slopes, centred[None], one, np.float32(1), grads[1])
        # by the bias, through the activations: minus the slopes times the encoder's rows
        total = np.bincount(latents.ravel(), slopes.ravel(), len(self.decoder)).astype(np.float32)
        grads[2][0] -= total @ self.encoder

    def _auxiliary(self, centred: np.ndarray, pre: np.ndarray, residual: np.ndarray) -> None:
        """Add the gradients of the dead latents' error on the residual."""
        dead = np.flatnonzero(self.since > DEAD_AFTER)
        if dead.size == 0:
            return
        n = min(dead.size, AUX_LATENTS_PER_K * self.sae.k)
        few = pre[:, dead]
        least = np.partition(few, dead.size - n, axis=1)[:, dead.size - n]
        few = np.where(few >= np.maximum(least, 0)[:, None], few, 0)
        atoms = self.decoder[dead]
        error = residual - few @ atoms
        scale = np.float32(2 * AUX_WEIGHT / float(np.einsum("ij,ij->", residual, residual)))
        slopes = np.where(few > 0, -scale * (error @ atoms.T), 0).astype(np.float32)
        self.grads[0][dead] -= scale * (few.T @ error)
        self.grads[1][dead] += slopes.T @ centred
        self.grads[2][0] -= slopes.sum(axis=0) @ self.encoder[dead]
