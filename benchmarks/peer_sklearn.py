"""scikit-learn's MiniBatchDictionaryLearning, tuned and by its own defaults."""

from __future__ import annotations

import warnings
from typing import Any

from sklearn.decomposition import MiniBatchDictionaryLearning
from sklearn.exceptions import ConvergenceWarning

from benchmarks.peer_base import Recorder, data_atoms, mean_norm, minibatches

# Best of 0.05, 0.1, 0.2 and 0.3 after 8 CPU seconds on 16,384 token rows of mean norm 1.
ALPHA = 0.3


def train(recorder: Recorder, alpha: float = ALPHA, batch_size: int = 512, **options: Any) -> None:
    """Feed minibatches to `partial_fit`; rows are scaled to mean norm 1, for which `alpha` is chosen."""
    problem = recorder.problem
    scale = 1 / mean_norm(problem.train)
    model = MiniBatchDictionaryLearning(
        problem.n_atoms,
        alpha=alpha,
        batch_size=batch_size,
        dict_init=data_atoms(problem),
        random_state=problem.seed,
        **options,
    )
    recorder.notes |= {"alpha": alpha, "batch_size": batch_size} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for step, rows in enumerate(minibatches(problem, batch_size), 1):
            model.partial_fit(rows * rows.dtype.type(scale))
            recorder.show(lambda: model.components_, step * len(rows))


def tuned(recorder: Recorder) -> None:
    """At most 100 steps of the path per sample: as good as the default of 1000, and several times faster."""
    train(recorder, transform_max_iter=100)


def default(recorder: Recorder) -> None:
    """The defaults of the class but for `alpha`, which has no sensible default for unscaled data."""
    train(recorder, batch_size=256)
