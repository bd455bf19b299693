"""DB-KSVD of this package: its defaults, another start, other encoder, smaller batches, Matryoshka groups."""

from __future__ import annotations

from typing import Any

import dask

from benchmarks.common import DOCUMENTED
from benchmarks.peer_base import Recorder
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph.sources import ArraySource
from dbksvd_dask.plan.params import FitParams


def train(recorder: Recorder, **params: Any) -> None:
    """Fit with one thread, as every other peer; the estimator's own loop, one outer batch at a time."""
    problem = recorder.problem
    given = {"validation": 0, "center": False, "seed": problem.seed, "device": "cpu", **params}
    checked = FitParams.checked(n_atoms=problem.n_atoms, k=problem.k, **given)
    trainer = Trainer(ArraySource(problem.train, checked.chunk_size), checked)
    recorder.notes |= {"batch_size": trainer.stream.rows_per_batch, "params": params}
    with dask.config.set(scheduler="synchronous"):
        state = trainer.start()
        while True:
            state = trainer.step(state)
            seen = trainer.stream.rows_before(state.iteration)
            recorder.show(lambda: state.atoms, seen)  # noqa: B023  (called at once)


def plain(recorder: Recorder) -> None:
    """The defaults."""
    train(recorder)


def small_batches(recorder: Recorder) -> None:
    """The same but for smaller outer batches: more updates per second, a noisier end."""
    train(recorder, batch_size=16384)


def whole_batches(recorder: Recorder) -> None:
    """Every batch has all its rows from the start."""
    train(recorder, warm_up=False)


def random_start(recorder: Recorder) -> None:
    """The first atoms are random, with 8 rounds and 2 Lanczos steps: the defaults of older tables."""
    train(recorder, **DOCUMENTED)


def orthogonal(recorder: Recorder) -> None:
    """Train with orthogonal matching pursuit, as most peers do."""
    train(recorder, encoder="omp")


def matryoshka(recorder: Recorder) -> None:
    """Exponential groups; one pursuit over the whole dictionary at evaluation."""
    train(recorder, groups="exponential")
