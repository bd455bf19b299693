"""SPAMS (`spams-bin`): online dictionary learning of Mairal et al. in C++."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peer_base import Recorder, data_atoms, mean_norm, minibatches

# Best of 0.05, 0.1, 0.2 and 0.3 after 8 CPU seconds on 16,384 token rows of mean norm 1; 0.1 is slower at first
# and a little better later.
ALPHA = 0.2
# Rows per call of trainDL: its model (A, B, iterations) carries over from one call to the next.
ROWS_PER_CALL = 4096


def train(recorder: Recorder, alpha: float = ALPHA, batch_size: int = 512, mode: int = 2) -> None:
    """Train in stretches of `ROWS_PER_CALL` rows; mode 2 is the lasso with penalty `alpha`, 3 has k nonzeros."""
    import spams

    problem = recorder.problem
    scale = np.float32(1 / mean_norm(problem.train))
    D = np.asfortranarray(data_atoms(problem).T)
    model: Any = None
    options = {"lambda1": alpha if mode == 2 else problem.k, "mode": mode, "batchsize": batch_size}
    recorder.notes |= options
    for step, rows in enumerate(minibatches(problem, ROWS_PER_CALL), 1):
        D, model = spams.trainDL(
            np.asfortranarray(rows.T * scale),
            return_model=True,
            model=model,
            D=np.asfortranarray(D),
            iter=max(1, len(rows) // batch_size),
            numThreads=1,
            verbose=False,
            **options,
        )
        recorder.show(lambda: np.asarray(D.T), step * len(rows))  # noqa: B023  (called at once)


def lasso(recorder: Recorder) -> None:
    """The lasso form, which SPAMS is known for."""
    train(recorder)


def counted(recorder: Recorder) -> None:
    """The form with at most k nonzeros, by orthogonal matching pursuit."""
    train(recorder, mode=3)
