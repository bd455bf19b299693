"""The policy of a fit: the settings of a batch, and the changes to the dictionary before and after it.

The loop in `fit.trainer` calls the policy before and after every batch. `Policy` is that of an ordinary fit;
`fit.growing.Growing` is that of a fit with `growth`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.context import Context
from dbksvd_dask.fit.history import record_of
from dbksvd_dask.fit.threshold import encode_threshold
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.signs import turned
from dbksvd_dask.kernels.moments import Moments
from dbksvd_dask.plan import growth
from dbksvd_dask.plan.encoder import AtomWeights, training_groups, training_spec
from dbksvd_dask.plan.params import FitParams


class Policy:
    """The policy of an ordinary fit.

    Attributes
    ----------
    first_n_atoms : atoms of the first dictionary
    learns_mean : whether the mean starts at zero and is learned from the batches
    momentum : share of its last change by which an atom moves before the next batch is encoded
    dead_atoms : rule for atoms that no sample of a batch used, see `plan.dead_atoms`
    """

    learns_mean = False

    def __init__(self, context: Context) -> None:
        self.context, params = context, context.params
        self.first_n_atoms, self.momentum, self.dead_atoms = params.n_atoms, params.momentum, params.dead_atoms

    def before(self, state: Dictionary, rows: np.ndarray) -> Dictionary:
        """Return the state at the start of the next batch.

        Parameters
        ----------
        rows : (n,) int64, rows of that batch
        """
        return state

    def preferences(self, state: Dictionary) -> AtomWeights | None:
        """Return the weights of the atoms in the encoding of the next batch; None for equal weights."""
        return None

    def half_weight(self, state: Dictionary) -> float:
        """Return the norm of the residual that halves a sample in the next update; 0 if all count alike."""
        return 0.0

    def batch_spec(self, state: Dictionary) -> batch.BatchSpec:
        """Return the settings of the next batch."""
        p, plan = self.context.params, self.context.place
        return batch.BatchSpec(
            groups=training_groups(p, state.n_atoms),
            encode=training_spec(p, state.training_threshold, state.n_atoms),
            lanczos_steps=p.lanczos_steps,
            chunk_size=plan.chunk_size,
            dead_atoms=self.dead_atoms,
            seed=p.seed,
            dtype=self.context.dtype,
            place=plan.placement,
            weights=self.preferences(state),
            half_weight=self.half_weight(state),
            whiten=state.whitening,
        )

    def after(self, state: Dictionary, result: batch.BatchResult) -> tuple[Dictionary, dict[str, float]]:
        """Return the state after a batch, without its history, and the batch's record.

        Parameters
        ----------
        state : at the start of the batch
        """
        params = self.context.params
        learned = next_training_threshold(params, state.training_threshold, result)
        new = self._successor(state, result, state.mean).with_thresholds(learned, learned)
        if params.sparsity == "mean":
            new = encode_threshold(self.context, with_threshold(new, learned), state.threshold, learned)
        return new, record_of(result)

    def _successor(self, state: Dictionary, result: batch.BatchResult, mean: np.ndarray | None) -> Dictionary:
        """Return the state with the atoms of a batch, negated where their mean coefficient is negative."""
        # a replaced atom has no previous position for momentum to start from
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
            whitening=state.whitening,
        )


def extrapolated(D: np.ndarray, previous: np.ndarray | None, momentum: float) -> np.ndarray:
    """Return a dictionary moved further along its last change, with unit rows: (n_atoms, n_features).

    Atoms drift in one direction for many iterations; encoding a batch with extrapolated atoms saves about a third
    of the iterations.
    """
    if previous is None or momentum == 0:
        return D
    ahead = D + D.dtype.type(momentum) * (D - previous)
    norms = np.linalg.norm(ahead, axis=1, keepdims=True)
    return np.where(norms > 0, ahead / np.where(norms > 0, norms, 1), D).astype(D.dtype)


def with_threshold(state: Dictionary, learned: float) -> Callable[[float], Dictionary]:
    """Return the function that gives a state the threshold of its encoding; `learned` is that of training."""
    return lambda threshold: state.with_thresholds(threshold, learned)


def typical_coefficient(moments: Moments, n_nonzeros: int) -> float:
    """Return the root mean square of the coefficients of a batch.

    Each step of a pursuit reduces |r|^2 by the square of its coefficient.
    """
    explained = float(moments.y_square_sum.sum() - moments.r_square_sum.sum())
    return math.sqrt(max(explained, 0.0) / n_nonzeros) if n_nonzeros else 0.0


def next_training_threshold(params: FitParams, threshold: float, result: batch.BatchResult) -> float:
    """Return the smallest coefficient for the next batch of an ordinary fit.

    If k is the mean, that is the threshold that moves the mean number of nonzeros towards k, starting from half
    the typical coefficient; otherwise 0.
    """
    if params.sparsity == "max":
        return 0.0
    n_nonzeros = int(result.counts.sum())
    if threshold == 0:
        return 0.5 * typical_coefficient(result.before, n_nonzeros)
    return growth.next_threshold(threshold, n_nonzeros / result.before.n_samples, params.k)
