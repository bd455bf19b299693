"""A graph as a plain dictionary of named tasks, and a home for the tasks of each chunk.

`dask.delayed` merges the whole graph so far with every call: 262 tasks of a batch took 1.2 s to build. Here a call
adds one entry: 3 ms for 342 tasks (8 chunks, 8 rounds).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from dask.delayed import Delayed

from dbksvd_dask.graph._compat import DataNode, List, Task, TaskRef, delayed_of, placed_delayed


class Tasks:
    """A graph under construction; `call` and `data` return references to pass to later calls.

    Names are readable and unique: the dashboard shows `encode-1f3a9c2e-0-7` as `encode`, and two fits on one
    cluster never share a key.

    Parameters
    ----------
    iteration : part of every name
    n_chunks : chunks that the graph works on
    homes : per chunk, the address of the worker that should hold it; empty if the scheduler decides
    """

    def __init__(self, iteration: int = 0, n_chunks: int = 1, homes: Sequence[str] = ()) -> None:
        self._prefix = f"{uuid.uuid4().hex[:8]}-{iteration}"
        self.n_chunks = n_chunks
        self.graph: dict[Any, Any] = {}
        self._homes = homes
        self._placed: dict[str, str] = {}

    def call(
        self,
        function: Callable[..., Any],
        label: str,
        index: Sequence[int],
        *args: Any,
        chunk: int | None = None,
    ) -> TaskRef:
        """Add a call of `function`, named after `label`.

        Parameters
        ----------
        chunk : the chunk that the call works on, if any; the task then runs on the worker of that chunk
        """
        key = f"{label}-{self._prefix}-{'-'.join(map(str, index))}"
        self.graph[key] = Task(key, function, *map(self._argument, args))
        if self._homes and chunk is not None:
            self._placed[key] = self._homes[chunk]
        return TaskRef(key)

    def once_per_home(
        self, function: Callable[..., Any], label: str, index: Sequence[int], *args: Any
    ) -> list[TaskRef]:
        """Add one call per home, or one call without homes; return, per chunk, the reference at its home."""
        if not self._homes:
            return [self.call(function, label, index, *args)] * self.n_chunks
        made: dict[str, TaskRef] = {}
        for c, home in enumerate(self._homes):
            if home not in made:
                made[home] = self.call(function, label, (*index, len(made)), *args, chunk=c)
        return [made[home] for home in self._homes]

    def beside(self, part: int, n_parts: int) -> int:
        """Return the chunk on whose worker one of several equal parts should run, so that all homes share them."""
        return part * self.n_chunks // n_parts

    def data(self, value: Any, label: str) -> TaskRef:
        """Add a value to the graph once, under a name.

        It is part of the graph, so a lost worker does not lose it. Scattering it to the workers first takes as
        long (35 ms for 12 MB on two local workers), and a value scattered to a worker is lost with it.
        """
        key = f"{label}-{self._prefix}"
        self.graph[key] = DataNode(key, value)
        return TaskRef(key)

    def finish(self, result: TaskRef) -> Delayed:
        """Return the graph as an object that computes to `result`."""
        if not self._placed:
            return delayed_of(result.key, self.graph)
        return placed_delayed(result.key, self.graph, f"tasks-{self._prefix}", _Placed(self._placed))

    def _argument(self, value: Any) -> Any:
        """Return an argument as a task takes it: a reference, a list of arguments or a literal value.

        A reference to another graph adds that graph to this one.
        """
        if isinstance(value, Delayed):
            self.graph.update(value.__dask_graph__())
            return TaskRef(value.key)
        if isinstance(value, list):
            return List(*map(self._argument, value))
        return value


class _Placed:
    """Preferred workers of each task; a class, because it must be picklable."""

    def __init__(self, placed: dict[str, str]) -> None:
        self._placed = placed

    def __call__(self, key: Any) -> list[str]:
        return [self._placed[key]] if key in self._placed else []
