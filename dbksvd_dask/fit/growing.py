"""The policy of a growing dictionary: add atoms before a batch; sort them and learn a threshold after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.context import Context
from dbksvd_dask.fit.history import record_of
from dbksvd_dask.fit.policy import Policy
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

    def after(self, state: Dictionary, result: batch.BatchResult) -> tuple[Dictionary, dict[str, float]]:
        """Return the state after a batch, sorted by use, and the batch's record with the figures of growth."""
        params, now = self.context.params, growth.growth_step(self.sizes, state.iteration)
        # also after the last stage: a lower threshold loses features that growth has found. (A share of the
        # typical coefficient diverges: a higher threshold keeps only larger coefficients, which raise the typical
        # one.)
        learned = params.growth_threshold * noise_coefficient(result.after, result.dictionary.shape[0])
        new = self._successor(state, result, moved_mean(state.mean, result)).with_thresholds(learned, learned)
        new = by_frequency(new)
        if params.frequency_prior:
            assert new.counts is not None
            new = replace(new, weights=prior_weights(new.counts, result.before.n_samples))
        if params.sparsity == "mean":
            new = new.with_thresholds(encode_threshold(self.context, new, state.threshold, learned), learned)
        grown = {"n_atoms": float(now.n_atoms), "stage": float(now.stage), "growth_threshold": learned}
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
    per_feature = float(moments.r_square_sum.mean()) / max(moments.n_samples, 1)
    return math.sqrt(2.0 * math.log(max(n_atoms, 2)) * per_feature)


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


def prior_weights(counts: np.ndarray, n_samples: int) -> np.ndarray:
    """Return the threshold of each atom relative to the common one: (n_atoms,) float64 of mean 1.

    In noise of size sigma, a coefficient is evidence for an atom that a share q of the samples has if it exceeds
    ``sigma * sqrt(2 log((1 - q) / q))``: the rarer the atom, the larger the coefficient must be.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    """
    weights = np.sqrt(np.log(1.0 / shares(counts, n_samples)))
    return np.asarray(weights / weights.mean())


# ---------------------------------------------------------------------------------------------- states


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
