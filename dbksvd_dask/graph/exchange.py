"""What the shares of a batch send to each other: sums up, new atoms down.

Three ways, chosen by the number of workers (`plan.shares.plan_groups`):

- threads, which share memory: groups of neighbours are added side by side, then one task takes the step;
- a few workers: each sends its sums to all others, and every task begins with the step itself, which takes a
  millisecond; one hop instead of two;
- many workers: about sqrt(W) groups. The first worker of a group adds the sums of its members, receives those of
  the other groups, takes the step and serves its members. No worker sends or receives anything more often than
  about sqrt(W) times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbksvd_dask.graph.share import same
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.plan import shares


class Exchange:
    """The traffic between the shares of a graph.

    Parameters
    ----------
    names : the graph

    Attributes
    ----------
    direct : whether every share receives the sums of all others, and each of its tasks takes the step itself
    """

    def __init__(self, names: Tasks) -> None:
        self._names = names
        self._groups = shares.plan_groups(names.shares)
        self.direct = shares.is_direct(names.shares)

    def collect(
        self, join: Callable[..., Any], label: str, index: tuple[int, ...], parts: list[Any], with_: list[Any]
    ) -> list[Any]:
        """Join the results of the shares of each group; return one reference per group.

        Parameters
        ----------
        join : takes a list of results and one more argument
        parts : per share, its result
        with_ : per share, the other argument of a call at its home
        """
        return [
            parts[a]
            if b - a == 1
            else self._names.call(join, f"{label}-sum", (*index, i), parts[a:b], with_[a], at=a)
            for i, (a, b) in enumerate(self._groups)
        ]

    def step(
        self, function: Callable[..., Any], label: str, index: tuple[int, ...], calls: list[tuple[Any, ...]]
    ) -> list[Any]:
        """Call a function with the sums of all shares; return, per share, what its tasks take as the result.

        Parameters
        ----------
        calls : per share, the arguments of a call at its home
        """
        if self.direct:
            return [self._names.inline(function, *arguments) for arguments in calls]
        return self._per_group(function, label, index, calls)

    def named(
        self, taken: list[Any], function: Callable[..., Any], label: str, index: tuple[int, ...], at_first: Any
    ) -> Any:
        """Return a task with the result of a `step` that returned `taken`, for the driver and its progress.

        Parameters
        ----------
        function, at_first : gives the result, called at the first share with this argument, if no task is the step
        """
        return self._names.call(function, label, index, at_first, at=0) if self.direct else taken[0]

    def broadcast(self, value: Any, label: str, index: tuple[int, ...] = ()) -> list[Any]:
        """Return, per share, a reference to a value of the graph: in large clusters to a copy in its group."""
        if not self._names.has_homes or self.direct:
            return [value] * len(self._names.shares)
        return self._per_group(same, f"{label}-copy", index, [(value,)] * len(self._names.shares))

    def _per_group(
        self, function: Callable[..., Any], label: str, index: tuple[int, ...], calls: list[tuple[Any, ...]]
    ) -> list[Any]:
        """Add one call per group, at its first share, or one call on threads."""
        if not self._names.has_homes:
            return [self._names.call(function, label, index, *calls[0])] * len(calls)
        out: list[Any] = []
        for i, (a, b) in enumerate(self._groups):
            name = label if i == 0 else f"copied-{label}"  # progress counts the tasks of one name
            out += [self._names.call(function, name, (*index, i), *calls[a], at=a)] * (b - a)
        return out
