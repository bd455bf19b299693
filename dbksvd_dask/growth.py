"""Growing dictionaries, the driver's side: which atoms are added, and what a batch teaches about thresholds.

A new atom is the residual of a sample, drawn with a probability proportional to its squared norm. Drawing is a
race: sample i gets the key ``log(u_i) / |r_i|^2`` with u_i uniform, and the largest keys win, which is an exact
draw without replacement. Each chunk sends its own winners only, and the result depends on the seed, the iteration
and the chunk size, not on where or in which order the chunks ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.delayed import Delayed

from dbksvd_dask import batch, chunk, encoding, plan
from dbksvd_dask.encoding import EncodePlan, prepare, rows_of
from dbksvd_dask.gpu import device
from dbksvd_dask.kernels.encode import AtomWeights
from dbksvd_dask.kernels.scale import rows_near_one
from dbksvd_dask.metrics import Moments, row_norms
from dbksvd_dask.params import FitParams
from dbksvd_dask.store.sources import Source
from dbksvd_dask.tasks import Tasks

# Name in the history: nonzeros that one pursuit over all atoms gives a sample at the threshold of the training.
PLAIN_NONZEROS = "plain_nonzeros"
# While they are below this share of k, batches prefer frequent atoms. A higher share finds more and reconstructs
# less: at L0 4 of small SynthSAEBench models, 1.0 had .013 less explained variance and .015 more MCC than 0.9.
PREFERRED_BELOW = 0.9


class Draw(NamedTuple):
    """How many residuals are drawn, and from which random numbers."""

    n_new: int
    seed: int
    iteration: int


def race_keys(norms: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Keys of a draw proportional to norms squared, largest first; minus infinity for a residual of zero.

    Parameters
    ----------
    norms : (n,) float64;  uniform : (n,) float64 from [0, 1)
    """
    with np.errstate(divide="ignore"):
        keys: np.ndarray = np.log1p(-uniform) / np.square(norms)
    return np.where(norms > 0, keys, -np.inf)


def draw_residuals(
    rows: Any, D: np.ndarray, gram: np.ndarray, how: EncodePlan, draw: Draw, c: int
) -> chunk.Candidates:
    """Winners of one chunk: keys and residuals, at most n_new of them, best first."""
    raw = rows.load()
    with device.turn(how.place.pursuit):
        Y = prepare(raw, rows.where, how.mean, how.dtype, how.place.device)
        R = chunk.residual_of(Y, *chunk.codes_of(Y, D, gram, how.spec, how.weights), D)
    uniform: Any = plan.generator(draw.seed, plan.GROWTH, draw.iteration, c).random(R.shape[0])
    keys = race_keys(row_norms(R), uniform)
    best = np.argsort(-keys, kind="stable")[: draw.n_new]
    best = best[np.isfinite(keys[best])]
    return chunk.Candidates(keys[best], R[best])


def _merge(parts: list[chunk.Candidates], n_new: int) -> np.ndarray:
    """Winners of all chunks: (at most n_new, d)."""
    keys = np.concatenate([part.error for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    return rows[np.argsort(-keys, kind="stable")[:n_new]]


def build_draw(source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, size: int, draw: Draw) -> Delayed:
    """Graph that encodes rows and draws residuals: computing it gives (at most n_new, n_features)."""
    names = Tasks(draw.iteration)
    dictionary, gram = encoding.dictionary_and_gram(names, D, how.place)
    parts = [
        names.call(draw_residuals, "grow", (c,), rows_of(source, rows[a:b]), dictionary, gram, how, draw, c)
        for c, (a, b) in enumerate(plan.split_rows(rows.size, size))
    ]
    return names.finish(names.call(_merge, "grown", (), parts, draw.n_new))


def grow(source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, size: int, draw: Draw) -> np.ndarray:
    """Dictionary with n_new more atoms: (n_atoms + n_new, n_features).

    Where there are fewer residuals than new atoms, random directions take the rest.
    """
    (residuals,) = dask.compute(build_draw(source, rows, D, how, size, draw))
    residuals = rows_near_one(residuals)
    norms = np.linalg.norm(residuals.astype(np.float64), axis=1, keepdims=True)
    atoms = (residuals / norms).astype(D.dtype)
    missing = draw.n_new - atoms.shape[0]
    if missing:
        fresh = plan.random_atoms(missing, D.shape[1], D.dtype, draw.seed, draw.iteration, D.shape[0])
        atoms = np.concatenate([atoms, fresh])
    return np.concatenate([D, atoms])


# ---------------------------------------------------------------------------------------------- after a batch


def typical_coefficient(moments: Moments, n_nonzeros: int) -> float:
    """Root mean square of the coefficients of a batch; each step of a pursuit takes its square off |r|^2."""
    explained = float(moments.y_square_sum.sum() - moments.r_square_sum.sum())
    return math.sqrt(max(explained, 0.0) / n_nonzeros) if n_nonzeros else 0.0


def noise_coefficient(moments: Moments, n_atoms: int) -> float:
    """Largest coefficient that chance would give: of n_atoms directions in noise as strong as the residual.

    The residual of a sample has norm ``sigma * sqrt(n_features)``, and the largest of m normal numbers is about
    ``sigma * sqrt(2 log m)`` (the universal threshold of Donoho and Johnstone).
    """
    per_feature = float(moments.r_square_sum.mean()) / max(moments.n_samples, 1)
    return math.sqrt(2.0 * math.log(max(n_atoms, 2)) * per_feature)


def training_threshold(params: FitParams, threshold: float, result: batch.BatchResult) -> float:
    """Smallest coefficient for the next batch, from what this batch had.

    A growing dictionary: a multiple of what chance would give, also after its last stage; a lower one undoes what
    growth has found. (A share of the typical coefficient runs away: a higher threshold keeps only samples with
    larger coefficients, whose typical one is larger again.) With k as the mean: what brings the mean number of
    nonzeros to k, starting from half the typical coefficient. Otherwise none.
    """
    n_nonzeros = int(result.counts.sum())
    if params.growth is not None:
        return params.growth_threshold * noise_coefficient(result.after, result.dictionary.shape[0])
    if params.sparsity == "max":
        return 0.0
    if threshold == 0:
        return 0.5 * typical_coefficient(result.before, n_nonzeros)
    return plan.next_threshold(threshold, n_nonzeros / result.before.n_samples, params.k)


def prefers_frequent(history: Mapping[str, Sequence[float]], k: int) -> bool:
    """Whether the next batch prefers frequent atoms, or goes by coefficients alone.

    Where one feature comes only with another, an atom for the sum of both saves a nonzero, and plain pursuits
    drift there: atoms become sums, and samples take fewer nonzeros than they have features. Where the frequent
    atom goes first it takes its part, and the rare one is fitted to what is left. So a batch prefers frequent
    atoms while a plain pursuit takes fewer nonzeros than k, and goes by coefficients while it takes more.
    """
    found = history.get(PLAIN_NONZEROS)
    return not found or found[-1] < PREFERRED_BELOW * k


# A share of samples above this counts as this: the more frequent an atom, the lower its threshold, but never 0.
MOST_FREQUENT = 0.5


def shares(counts: np.ndarray, n_samples: int) -> np.ndarray:
    """Share of the samples that used each atom, no less than one sample: (n_atoms,)."""
    return np.clip(counts / n_samples, 1.0 / max(n_samples, 2), MOST_FREQUENT)


def frequent_first(counts: np.ndarray, n_samples: int) -> AtomWeights:
    """Let an atom be preferred by as much as it is more frequent; one threshold for all.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    """
    return AtomWeights(np.ones(counts.size), shares(counts, n_samples))


def prior_weights(counts: np.ndarray, n_samples: int) -> np.ndarray:
    """By how much the threshold of each atom differs from that of all: (n_atoms,) float64 of mean 1.

    In noise of size sigma, a coefficient speaks for an atom that a share q of the samples has when it is above
    ``sigma * sqrt(2 log((1 - q) / q))``: the rarer an atom, the larger a coefficient has to be to be believed.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    """
    weights = np.sqrt(np.log(1.0 / shares(counts, n_samples)))
    return np.asarray(weights / weights.mean())


def moved_mean(mean: np.ndarray | None, result: batch.BatchResult) -> np.ndarray | None:
    """Mean of a growing dictionary: what the batch leaves over on average is added to it."""
    return None if mean is None else mean + result.after.r_sum / result.after.n_samples
