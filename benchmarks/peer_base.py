"""The contract between the comparison and a peer: train on a problem, show dictionaries on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmarks.common import Problem, Stopwatch, score


class OutOfTime(Exception):  # noqa: N818  (the end of a run, not an error)
    """The CPU seconds of a peer are used up."""


@dataclass
class Recorder:
    """Scores dictionaries that a peer shows while it trains; the clocks stand still meanwhile.

    Parameters
    ----------
    budget : CPU seconds of training, after which the next `show` raises `OutOfTime`
    growth : a dictionary is scored when the CPU seconds have grown by this factor since the last
    """

    problem: Problem
    budget: float
    growth: float = 1.4
    clock: Stopwatch = field(default_factory=Stopwatch)
    points: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    latest: np.ndarray | None = None

    def show(self, atoms: Callable[[], np.ndarray], n_rows: int, **extra: Any) -> None:
        """Score ``atoms()``, of shape (n_atoms, n_features), if it is time to; `n_rows` have been seen so far."""
        self.clock.stop()
        over = self.clock.cpu >= self.budget
        last = self.points[-1]["cpu_s"] if self.points else 0.0
        if over or self.clock.cpu >= max(self.budget / 40, last * self.growth):
            self._score(atoms, n_rows, extra)
        if over:
            raise OutOfTime
        self.clock.start()

    def finish(self, atoms: Callable[[], np.ndarray], n_rows: int) -> None:
        """Score the last dictionary of a peer that ends by itself."""
        self.clock.stop()
        self._score(atoms, n_rows, {})

    def _score(self, atoms: Callable[[], np.ndarray], n_rows: int, extra: dict[str, Any]) -> None:
        self.latest = np.array(atoms())
        point = {"cpu_s": self.clock.cpu, "wall_s": self.clock.wall, "rows": n_rows}
        self.points.append(point | score(self.problem, self.latest) | extra)


class Peer(Protocol):
    """Trains on ``recorder.problem`` and calls ``recorder.show`` after every step, until that raises."""

    def __call__(self, recorder: Recorder) -> None:
        """Train."""


def run(peer: Peer, problem: Problem, budget: float, growth: float = 1.4) -> Recorder:
    """Train a peer until its CPU seconds are used up; the rest as in `Recorder`."""
    recorder = Recorder(problem, budget, growth)
    recorder.clock.start()
    try:
        peer(recorder)
    except OutOfTime:
        pass
    recorder.clock.stop()
    return recorder


def minibatches(problem: Problem, size: int) -> Iterator[np.ndarray]:
    """Endless batches of training rows, in a new order each time round."""
    rng = np.random.default_rng(problem.seed)
    size = min(size, len(problem.train))
    while True:
        order = rng.permutation(len(problem.train))
        for start in range(0, len(order) - size + 1, size):
            yield problem.train[order[start : start + size]]


def data_atoms(problem: Problem) -> np.ndarray:
    """First dictionary for peers that need one: training rows of unit norm, (n_atoms, n_features)."""
    rng = np.random.default_rng(problem.seed)
    norms = np.linalg.norm(problem.train, axis=1)
    usable = np.flatnonzero(norms > 0)
    rows = rng.choice(usable, problem.n_atoms, replace=usable.size < problem.n_atoms)
    return np.ascontiguousarray(problem.train[rows] / norms[rows, None])


def mean_norm(rows: np.ndarray) -> float:
    """Mean norm of the rows: penalties are chosen for rows of norm about 1."""
    return float(np.linalg.norm(rows, axis=1).mean())
