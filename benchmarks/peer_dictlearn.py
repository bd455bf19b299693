"""`dictlearn` 1.0: online learning with orthogonal matching pursuit, the closest competitor."""

from __future__ import annotations

from benchmarks.peer_base import Recorder, data_atoms, mean_norm, minibatches


def train(recorder: Recorder, batch_size: int = 2048, forgetting_factor: float = 1.0) -> None:
    """Feed minibatches to `partial_fit` of the "mairal" engine; it computes in float64."""
    from dictlearn import MiniBatchDictionaryLearning

    problem = recorder.problem
    scale = 1 / mean_norm(problem.train)
    model = MiniBatchDictionaryLearning(
        problem.n_atoms,
        n_nonzero_coefs=problem.k,
        batch_size=batch_size,
        forgetting_factor=forgetting_factor,
        dict_init=data_atoms(problem).astype("float64"),
        random_state=problem.seed,
    )
    recorder.notes |= {"batch_size": batch_size, "forgetting_factor": forgetting_factor}
    for step, rows in enumerate(minibatches(problem, batch_size), 1):
        model.partial_fit(rows.astype("float64") * scale)
        recorder.show(lambda: model.components_, step * len(rows))


def online(recorder: Recorder) -> None:
    """The default engine with larger batches than its default of 32: the best of 256, 1024 and 2048."""
    train(recorder)
