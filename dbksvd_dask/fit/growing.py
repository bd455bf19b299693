"""What happens between two batches: in an ordinary fit a threshold is learned; a growing dictionary grows.

A fit has one policy, which it asks `before` a batch and `after` it. `Policy` is that of an ordinary fit, `Growing`
that of a fit with `growth`; the loop in `fit.trainer` knows no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.context import Context
from dbksvd_dask.fit.history import record_of
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.draw import Draw, grow
from dbksvd_dask.graph.encode import EncodePlan, build_evaluation
from dbksvd_dask.graph.signs import turned
from dbksvd_dask.kernels.moments import Moments
from dbksvd_dask.plan import growth
from dbksvd_dask.plan.encoder import AtomWeights, training_spec
from dbksvd_dask.plan.params import FitParams

# Name in the history: nonzeros that one pursuit over all atoms gives a sample at the threshold of the training.
PLAIN_NONZEROS = "plain_nonzeros"
# While they are below this share of k, batches prefer frequent atoms. A higher share finds more and reconstructs
# less: at L0 4 of small SynthSAEBench models, 1.0 had .013 less explained variance and .015 more MCC than 0.9.
PREFERRED_BELOW = 0.9
# Rows on which the nonzeros of a growing dictionary are counted, and steps in which the threshold with which it
# encodes is brought to k of them.
COUNTED_ROWS, THRESHOLD_STEPS = 2048, 4


# ---------------------------------------------------------------------------------------------- policies


class Policy:
    """What an ordinary fit does between two batches.

    Attributes
    ----------
    first_n_atoms : atoms of the first dictionary
    learns_mean : whether the mean starts at zero and follows from the batches
    momentum : share of its last change by which an atom is moved before the next batch is encoded
    dead_atoms : what a batch does about atoms that no sample used
    """

    learns_mean = False

    def __init__(self, context: Context) -> None:
        self.context, params = context, context.params
        self.first_n_atoms, self.momentum, self.dead_atoms = params.n_atoms, params.momentum, params.dead_atoms

    def before(self, state: Dictionary, rows: np.ndarray) -> Dictionary:
        """Return the state with which the next batch starts.

        Parameters
        ----------
        rows : (n,) int64, rows of that batch
        """
        return state

    def preferences(self, state: Dictionary) -> AtomWeights | None:
        """Return in what atoms differ when the next batch is encoded; None for all alike."""
        return None

    def after(self, state: Dictionary, result: batch.BatchResult) -> tuple[Dictionary, dict[str, float]]:
        """Return the state after a batch, without its history, and the batch's record.

        Parameters
        ----------
        state : with which the batch started
        """
        learned = next_training_threshold(self.context.params, state.training_threshold, result)
        return self._successor(state, result, state.mean).with_thresholds(learned, learned), record_of(result)

    def _successor(self, state: Dictionary, result: batch.BatchResult, mean: np.ndarray | None) -> Dictionary:
        """State with the atoms that a batch gave, none of negative mean coefficient."""
        # an atom that was replaced has no direction of travel yet
        previous = np.where((result.counts == 0)[:, None], result.dictionary, state.atoms)
        atoms, previous = turned(result.coefficient_sums, result.dictionary, previous)
        return Dictionary(
            atoms,
            mean,
            self.context.params.to_json(),
            self.context.source.identity,
            state.iteration + 1,
            counts=result.counts,
            previous=previous,
            extra=state.extra,
        )


class Growing(Policy):
    """What a growing dictionary does between two batches.

    Before a batch it gets the atoms that its schedule says, drawn from residuals. After it, its atoms are sorted
    by use, and the mean, the thresholds and, with a frequency prior, the weights follow from what was left over.
    """

    learns_mean = True

    def __init__(self, context: Context, sizes: tuple[int, ...]) -> None:
        super().__init__(context)
        self.sizes, self.first_n_atoms = sizes, sizes[0]
        # while it grows a dictionary settles within a few batches; moved on, it found fewer true features
        self.momentum = 0.0
        # dead atoms are drawn anew like those that it adds
        self._draws_dead = self.dead_atoms == "residual"
        self.dead_atoms = "keep" if self._draws_dead else self.dead_atoms

    def before(self, state: Dictionary, rows: np.ndarray) -> Dictionary:
        """Return the state with the atoms that this iteration should have."""
        if self._draws_dead:
            state = without_dead(state)
        n_new = growth.growth_step(self.sizes, state.iteration).n_atoms - state.n_atoms
        return state if n_new == 0 else self._grown(state, rows, n_new)

    def _grown(self, state: Dictionary, rows: np.ndarray, n_new: int) -> Dictionary:
        """State with new atoms, which have no direction of travel yet."""
        context, size = self.context, self.context.place.chunk_size
        # a quarter of the batch would do as well as all of it; at least some rows to choose from for each atom
        rows = rows[: max(context.params.chunk_size, 16 * n_new)]
        draw, how = Draw(n_new, context.params.seed, state.iteration), self._training_plan(state)
        D = context.attempt(lambda: grow(context.source, rows, state.atoms, how, size, draw), state.iteration)
        previous = None if state.previous is None else np.concatenate([state.previous, D[state.n_atoms :]])
        counts = None if state.counts is None else np.append(state.counts, np.zeros(n_new, state.counts.dtype))
        return replace(state, atoms=D, previous=previous, counts=counts)

    def preferences(self, state: Dictionary) -> AtomWeights | None:
        """Return the weights that let frequent atoms go first, while that is of use."""
        if state.counts is None or not prefers_frequent(state.history, self.context.params.k):
            return None
        return frequent_first(state.counts, self.context.stream.batch_rows(state.iteration - 1))

    def after(self, state: Dictionary, result: batch.BatchResult) -> tuple[Dictionary, dict[str, float]]:
        """Return the state after a batch, sorted by use, and the batch's record with what growth learned."""
        params, now = self.context.params, growth.growth_step(self.sizes, state.iteration)
        # also after its last stage: a lower threshold undoes what growth has found. (A share of the typical
        # coefficient runs away: a higher threshold keeps only samples with larger coefficients, whose typical one
        # is larger again.)
        learned = params.growth_threshold * noise_coefficient(result.after, result.dictionary.shape[0])
        new = self._successor(state, result, moved_mean(state.mean, result)).with_thresholds(learned, learned)
        new = by_frequency(new)
        if params.frequency_prior:
            assert new.counts is not None
            new = replace(new, weights=prior_weights(new.counts, result.before.n_samples))
        new = new.with_thresholds(self._encode_threshold(new, state.threshold or learned), learned)
        plain = self._count_nonzeros(new, self._training_plan(new)._replace(weights=None))
        grown = {"n_atoms": float(now.n_atoms), "stage": float(now.stage), "growth_threshold": learned}
        return new, record_of(result) | grown | {PLAIN_NONZEROS: plain}

    def _encode_threshold(self, state: Dictionary, threshold: float) -> float:
        """Smallest coefficient with which the dictionary encodes.

        With k as the maximum that of its training; with k as the mean, one that gives some rows k nonzeros.
        """
        params = self.context.params
        if params.sparsity == "max":
            return state.training_threshold
        seen: list[tuple[float, float]] = []
        for _ in range(THRESHOLD_STEPS):
            how = self.context.encode_plan(state.with_thresholds(threshold, state.training_threshold))
            seen.append((threshold, self._count_nonzeros(state, how)))
            fall = growth.threshold_fall(*seen[-2:]) if len(seen) > 1 else growth.FALL
            threshold = growth.next_threshold(*seen[-1], params.k, fall)
        return threshold

    def _count_nonzeros(self, state: Dictionary, how: EncodePlan) -> float:
        """Mean number of nonzeros of some rows of the next batch: those just fitted to need fewer than others."""
        context = self.context
        part = context.stream.batch(state.iteration)[: min(context.place.chunk_size, COUNTED_ROWS)]
        arguments = (context.source, part, state.atoms, how, part.size, state.iteration - 1)
        _, n_nonzeros = context.compute(lambda: build_evaluation(*arguments))
        return float(n_nonzeros) / part.size

    def _training_plan(self, state: Dictionary) -> EncodePlan:
        """How the next batch encodes samples."""
        spec = training_spec(self.context.params, state.training_threshold, state.n_atoms)
        return self.context.encode_plan(state)._replace(spec=spec, weights=self.preferences(state))


def policy_of(context: Context) -> Policy:
    """Return the policy of a fit."""
    sizes = context.params.growth_sizes
    return Policy(context) if sizes is None else Growing(context, sizes)


# ---------------------------------------------------------------------------------------------- what is learned


def typical_coefficient(moments: Moments, n_nonzeros: int) -> float:
    """Return the root mean square of the coefficients of a batch.

    Each step of a pursuit takes the square of its coefficient off |r|^2.
    """
    explained = float(moments.y_square_sum.sum() - moments.r_square_sum.sum())
    return math.sqrt(max(explained, 0.0) / n_nonzeros) if n_nonzeros else 0.0


def noise_coefficient(moments: Moments, n_atoms: int) -> float:
    """Return the largest coefficient that chance would give.

    That is of n_atoms directions in noise as strong as the residual.
    The residual of a sample has norm ``sigma * sqrt(n_features)``, and the largest of m normal numbers is about
    ``sigma * sqrt(2 log m)`` (the universal threshold of Donoho and Johnstone).
    """
    per_feature = float(moments.r_square_sum.mean()) / max(moments.n_samples, 1)
    return math.sqrt(2.0 * math.log(max(n_atoms, 2)) * per_feature)


def next_training_threshold(params: FitParams, threshold: float, result: batch.BatchResult) -> float:
    """Return the smallest coefficient for the next batch of an ordinary fit.

    With k as the mean: what brings the mean number of nonzeros to k, starting from half the typical coefficient.
    Otherwise none.
    """
    if params.sparsity == "max":
        return 0.0
    n_nonzeros = int(result.counts.sum())
    if threshold == 0:
        return 0.5 * typical_coefficient(result.before, n_nonzeros)
    return growth.next_threshold(threshold, n_nonzeros / result.before.n_samples, params.k)


def prefers_frequent(history: Mapping[str, Sequence[float]], k: int) -> bool:
    """Tell whether the next batch prefers frequent atoms, or goes by coefficients alone.

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
    """Return the share of samples that used each atom, no less than one sample: (n_atoms,)."""
    return np.clip(counts / n_samples, 1.0 / max(n_samples, 2), MOST_FREQUENT)


def frequent_first(counts: np.ndarray, n_samples: int) -> AtomWeights:
    """Prefer an atom by as much as it is more frequent; one threshold for all.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    """
    return AtomWeights(np.ones(counts.size), shares(counts, n_samples))


def prior_weights(counts: np.ndarray, n_samples: int) -> np.ndarray:
    """Return by how much the threshold of each atom differs from that of all: (n_atoms,) float64 of mean 1.

    In noise of size sigma, a coefficient speaks for an atom that a share q of the samples has when it is above
    ``sigma * sqrt(2 log((1 - q) / q))``: the rarer an atom, the larger a coefficient has to be to be believed.

    Parameters
    ----------
    counts : (n_atoms,) samples that used each atom, of n_samples
    """
    weights = np.sqrt(np.log(1.0 / shares(counts, n_samples)))
    return np.asarray(weights / weights.mean())


# ---------------------------------------------------------------------------------------------- states


def moved_mean(mean: np.ndarray | None, result: batch.BatchResult) -> np.ndarray | None:
    """Add to the mean what the batch left over on average: (n_features,)."""
    return None if mean is None else mean + result.after.r_sum / result.after.n_samples


def without_dead(state: Dictionary) -> Dictionary:
    """Remove the atoms that no sample of the last batch used; the first one always stays."""
    if state.counts is None:
        return state
    n = max(1, int(np.count_nonzero(state.counts)))  # they are sorted by use
    previous = None if state.previous is None else state.previous[:n]
    return replace(state, atoms=state.atoms[:n], previous=previous, counts=state.counts[:n])


def by_frequency(state: Dictionary) -> Dictionary:
    """Sort the atoms by how many samples used them, most first; of equals the earlier one first."""
    assert state.counts is not None
    assert state.previous is not None
    order = np.argsort(-state.counts, kind="stable")
    atoms, previous = (np.ascontiguousarray(D[order]) for D in (state.atoms, state.previous))
    return replace(state, atoms=atoms, previous=previous, counts=state.counts[order])
