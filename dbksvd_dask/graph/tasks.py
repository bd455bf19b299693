"""A graph as a plain dictionary of named tasks, and a home for the tasks of each share of a batch.

`dask.delayed` merges the whole graph so far with every call: 262 tasks of a batch took 1.2 s to build. Here a call
adds one entry: 2 ms for 280 tasks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from dask.delayed import Delayed

from dbksvd_dask.graph._compat import DataNode, List, Task, TaskRef, delayed_of, placed_delayed
from dbksvd_dask.plan.shares import Share

_ALONE = (Share(0, 1),)


class Tasks:
    """A graph under construction; `call` and `data` return references to pass to later calls.

    Names are readable and unique: the dashboard shows `encode-1f3a9c2e-0-7` as `encode`, and two fits on one
    cluster never share a key.

    Parameters
    ----------
    iteration : part of every name
    shares : the chunks that tasks take together, and the workers that should run them

    Attributes
    ----------
    prefix : unique part of every name
    """

    def __init__(self, iteration: int = 0, shares: Sequence[Share] = _ALONE) -> None:
        self.prefix = f"{uuid.uuid4().hex[:8]}-{iteration}"
        self.shares = list(shares)
        self.graph: dict[Any, Any] = {}
        self._placed: dict[str, str] = {}

    @property
    def n_chunks(self) -> int:
        """Chunks of all shares together."""
        return self.shares[-1].stop

    @property
    def has_homes(self) -> bool:
        """Whether shares have workers of their own."""
        return bool(self.shares[0].home)

    def call(
        self,
        function: Callable[..., Any],
        label: str,
        index: Sequence[int | str],
        *args: Any,
        at: int | None = None,
    ) -> TaskRef:
        """Add a call of `function`, named after `label`.

        Parameters
        ----------
        at : the share on whose worker the call should run, if any
        """
        key = f"{label}-{self.prefix}-{'-'.join(map(str, index))}"
        self.graph[key] = Task(key, function, *map(self._argument, args))
        self._place(key, at)
        return TaskRef(key)

    def inline(self, function: Callable[..., Any], *args: Any) -> Task:
        """Return a call that is part of every task that takes it as an argument."""
        return Task(None, function, *map(self._argument, args))

    def once_per_home(
        self, function: Callable[..., Any], label: str, index: Sequence[int | str], *args: Any
    ) -> list[TaskRef]:
        """Add one call per home, or one call without homes; return, per share, the reference at its home."""
        made: dict[str, TaskRef] = {}
        for i, share in enumerate(self.shares):
            if share.home not in made:
                made[share.home] = self.call(function, label, (*index, len(made)), *args, at=i)
        return [made[share.home] for share in self.shares]

    def _place(self, key: str, at: int | None) -> None:
        if at is not None and self.shares[at].home:
            self._placed[key] = self.shares[at].home

    def data(self, value: Any, label: str) -> TaskRef:
        """Add a value to the graph once, under a name.

        It is part of the graph, so a lost worker does not lose it. Scattering it to the workers first takes as
        long (35 ms for 12 MB on two local workers), and a value scattered to a worker is lost with it.
        """
        key = f"{label}-{self.prefix}"
        self.graph[key] = DataNode(
            key, value
        )  # has no home: without any worker, Dask would wait for that very one
        return TaskRef(key)

    def finish(self, result: TaskRef, only_home: bool = False) -> Delayed:
        """Return the graph as an object that computes to `result`.

        Parameters
        ----------
        only_home : whether tasks may run at their homes only, and wait for them otherwise
        """
        if not self._placed:
            return delayed_of(result.key, self.graph)
        return placed_delayed(result.key, self.graph, f"tasks-{self.prefix}", _Placed(self._placed), not only_home)

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
