"""The policy of a growing dictionary: add atoms before a batch; sort them and learn a threshold after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.context import Context
from dbksvd_dask.fit.history import record_of
from dbksvd_dask.fit.policy import Policy, with_threshold
from dbksvd_dask.fit.threshold import encode_threshold, mean_nonzeros
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.draw import Draw, grow
from dbksvd_dask.graph.encode import EncodePlan
from dbksvd_dask.kernels.moments import Moments
from dbksvd_dask.plan import growth
from dbksvd_dask.plan.dead_atoms import DEAD_ATOM_RULES
from dbksvd_dask.plan.encoder import AtomWeights, training_spec

# Name in the history: mean nonzeros of a sample in one pursuit over all atoms, at the threshold of the training.
PLAIN_NONZEROS = "plain_nonzeros"
# While they are below this share of k, batches prefer frequent atoms. A higher share finds more and reconstructs
# less: at L0 4 of small SynthSAEBench models, 1.0 had .013 less explained variance and .015 more MCC than 0.9.
PREFERRED_BELOW = 0.9
# Rows on which they are counted.
PLAIN_ROWS = 2048
# Name in the history: root mean square of the norms of the residuals after a batch.
RESIDUAL_NORM = "residual_norm"
# A residual norm of this share of it halves a sample in the update: samples with much that no atom explains pull
# atoms towards features that merely occur with theirs. On small SynthSAEBench models (seeds 10 and 11), MCC rose
# from .770 and .774 to .790 and .794 at equal explained variance.
HALF_WEIGHT = 0.3


class Growing(Policy):
    """The policy of a fit with `growth`.

    Before a batch, add the atoms that the schedule asks for, drawn from residuals. After it, sort the atoms by
    use, and learn the mean, the thresholds and, with a frequency prior, the weights from the residuals.
    """

    learns_mean = True

    def __init__(self, context: Context, sizes: tuple[int, ...]) -> None:
        super().__init__(context)
        self.sizes, self.first_n_atoms = sizes, sizes[0]
        # a growing dictionary settles within a few batches; with momentum it found fewer true features
        self.momentum = 0.0
        # dead atoms are dropped and drawn again with the atoms that are added
        self._draws_dead = DEAD_ATOM_RULES[self.dead_atoms].redrawn_by_growth
        self.dead_atoms = "keep" if self._draws_dead else self.dead_atoms

    def before(self, state: Dictionary, rows: np.ndarray) -> Dictionary:
        """Return the state with as many atoms as the schedule has for this iteration."""
        if self._draws_dead:
            state = without_dead(state)
        n_new = growth.growth_step(self.sizes, state.iteration).n_atoms - state.n_atoms
        return state if n_new == 0 else self._grown(state, rows, n_new)

    def _grown(self, state: Dictionary, rows: np.ndarray, n_new: int) -> Dictionary:
        """Return the state with new atoms, for which momentum has no previous position."""
        context, size = self.context, self.context.place.chunk_size
        # a quarter of the batch serves as well as all of it; at least 16 rows to choose from per atom
        rows = rows[: max(context.params.chunk_size, 16 * n_new)]
        draw, how = Draw(n_new, context.params.seed, state.iteration), self._training_plan(state)
        D = context.attempt(lambda: grow(context.source, rows, state.atoms, how, size, draw), state.iteration)
        previous = None if state.previous is None else np.concatenate([state.previous, D[state.n_atoms :]])
        counts = None if state.counts is None else np.append(state.counts, np.zeros(n_new, state.counts.dtype))
        return replace(state, atoms=D, previous=previous, counts=counts)

    def preferences(self, state: Dictionary) -> AtomWeights | None:
        """Return the weights that prefer frequent atoms, while `prefers_frequent` says so."""
        if state.counts is None or not prefers_frequent(state.history, self.context.params.k):
            return None
        return frequent_first(state.counts, self.context.stream.batch_rows(state.iteration - 1))

    def half_weight(self, state: Dictionary) -> float:
        """Return `HALF_WEIGHT` of the residual norm of the last batch; 0 for the first one."""
        found = state.history.get(RESIDUAL_NORM)
        return HALF_WEIGHT * found[-1] if found else 0.0

    def after(self, state: Dictionary, result: batch.BatchResult) -> tuple[Dictionary, dict[str, float]]:
        """Return the state after a batch, sorted by use, and the batch's record with the figures of growth."""
        params, now = self.context.params, growth.growth_step(self.sizes, state.iteration)
        # also after the last stage: a lower threshold loses features that growth has found. (A share of the
        # typical coefficient diverges: a higher threshold keeps only larger coefficients, which raise the typical
        # one.)
        learned = params.growth_threshold * noise_coefficient(result.after, result.dictionary.shape[0])
        new = self._successor(state, result, moved_mean(state.mean, result)).with_thresholds(learned, learned)
        new = by_frequency(new)
        if params.sparsity == "mean":
            at = with_prior(new, learned, result) if params.frequency_prior else with_threshold(new, learned)
            new = encode_threshold(self.context, at, state.threshold, learned)
        grown = {"n_atoms": float(now.n_atoms), "stage": float(now.stage), "growth_threshold": learned}
        grown[RESIDUAL_NORM] = math.sqrt(residual_variance(result.after) * new.n_features)
        return new, record_of(result) | grown | {PLAIN_NONZEROS: self._plain_nonzeros(new)}

    def _plain_nonzeros(self, state: Dictionary) -> float:
        """Return the mean nonzeros of one pursuit over all atoms; rows just fitted would need fewer."""
        rows = self.context.stream.batch(state.iteration)[: min(self.context.place.chunk_size, PLAIN_ROWS)]
        return mean_nonzeros(self.context, state, self._training_plan(state)._replace(weights=None), rows)

    def _training_plan(self, state: Dictionary) -> EncodePlan:
        """Return how the next batch encodes samples."""
        spec = training_spec(self.context.params, state.training_threshold, state.n_atoms)
        return self.context.encode_plan(state)._replace(spec=spec, weights=self.preferences(state))


def policy_of(context: Context) -> Policy:
    """Return the policy of a fit."""
    sizes = context.params.growth_sizes
    return Policy(context) if sizes is None else Growing(context, sizes)


# ---------------------------------------------------------------------------------------------- what is learned


def noise_coefficient(moments: Moments, n_atoms: int) -> float:
    """Return the largest coefficient to expect by chance, in noise as strong as the residual.

    The residual of a sample has norm ``sigma * sqrt(n_features)``, and the largest of m normal numbers is about
    ``sigma * sqrt(2 log m)`` (the universal threshold of Donoho and Johnstone).
    """
    return math.sqrt(2.0 * math.log(max(n_atoms, 2)) * residual_variance(moments))


def residual_variance(moments: Moments) -> float:
    """Return the mean square of the residual per feature."""
    return float(moments.r_square_sum.mean()) / max(moments.n_samples, 1)


def prefers_frequent(history: Mapping[str, Sequence[float]], k: int) -> bool:
    """Return whether the next batch prefers frequent atoms, instead of choosing by coefficients alone.

    If one feature occurs only with another, an atom for the sum of both saves a nonzero, and plain pursuit drifts
    there: atoms become sums, and samples have fewer nonzeros than features. If the frequent atom is chosen first,
    the rare one is fitted to the residual. So a batch prefers frequent atoms while a plain pursuit gives fewer
    nonzeros than k, and chooses by coefficients while it gives more.
    """
    found = history.get(PLAIN_NONZEROS)
    return not found or found[-1] < PREFERRED_BELOW * k


# Larger shares of samples count as this one: the more frequent an atom, the lower its threshold, but never 0.
MOST_FREQUENT = 0.5
# The noise of a coefficient, relative to the residual per feature: features without an atom make its tails heavy.
# Chosen with the two limits on small SynthSAEBench models (seeds 10 and 11) at L0 3, 4 and 6.
NOISE_TAILS = 1.5
# Largest spread of the squared thresholds, so that any number of nonzeros can be reached, and the lowest square.
STEEPEST, LOWEST = 1.5, 0.05


def shares(counts: np.ndarray, n_samples: int) -> np.ndarray:
    """Return the share of samples that used each atom, at least one sample: (n_atoms,)."""
    return np.clip(counts / n_samples, 1.0 / max(n_samples, 2), MOST_FREQUENT)


def frequent_first(counts: np.ndarray, n_samples: int) -> AtomWeights:
    """Return weights that prefer each atom in proportion to its frequency, with one threshold for all.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    """
    return AtomWeights(np.ones(counts.size), shares(counts, n_samples))


def prior_weights(counts: np.ndarray, n_samples: int, noise: float) -> np.ndarray:
    """Return the threshold of each atom relative to the common one: (n_atoms,) float64.

    In noise of size sigma, an atom that a share q of the samples has is more likely there than not if its
    coefficient exceeds ``sigma * sqrt(2 log((1 - q) / q))``. Another price per nonzero adds a constant to the
    logarithm. So, with the common threshold t for an atom of mean log odds, the squares of the thresholds differ
    by ``2 sigma^2`` times the log odds: much where t is near the noise, little where it is far above.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    noise : sigma / t
    """
    q = shares(counts, n_samples)
    odds = np.log((1.0 - q) / q)
    mean = max(float(odds.mean()), 1e-12)
    spread = min(2.0 * mean * (NOISE_TAILS * noise) ** 2, STEEPEST)
    return np.asarray(np.sqrt(np.maximum(1.0 + spread * (odds / mean - 1.0), LOWEST)))


# ---------------------------------------------------------------------------------------------- states


def with_prior(state: Dictionary, learned: float, result: batch.BatchResult) -> Callable[[float], Dictionary]:
    """Return the function that gives a state its threshold, and the atoms those that follow from it."""
    counts, n_samples = state.counts, result.before.n_samples
    sigma = math.sqrt(residual_variance(result.after))
    assert counts is not None

    def at(threshold: float) -> Dictionary:
        weights = prior_weights(counts, n_samples, sigma / threshold if threshold > 0 else 0.0)
        return replace(state.with_thresholds(threshold, learned), weights=weights)

    return at


def moved_mean(mean: np.ndarray | None, result: batch.BatchResult) -> np.ndarray | None:
    """Return the mean plus the mean residual of the batch: (n_features,)."""
    return None if mean is None else mean + result.after.r_sum / result.after.n_samples


def without_dead(state: Dictionary) -> Dictionary:
    """Remove the atoms that no sample of the last batch used, except the first atom."""
    if state.counts is None:
        return state
    n = max(1, int(np.count_nonzero(state.counts)))  # atoms are sorted by use
    previous = None if state.previous is None else state.previous[:n]
    return replace(state, atoms=state.atoms[:n], previous=previous, counts=state.counts[:n])


def by_frequency(state: Dictionary) -> Dictionary:
    """Sort the atoms by how many samples used them, most first; of equals the earlier one first."""
    assert state.counts is not None
    assert state.previous is not None
    order = np.argsort(-state.counts, kind="stable")
    atoms, previous = (np.ascontiguousarray(D[order]) for D in (state.atoms, state.previous))
    return replace(state, atoms=atoms, previous=previous, counts=state.counts[order])
