"""The parts of Dask that this package uses although they are not public; tests/graph/test_compat.py covers each.

Graphs are built from Dask's internal task objects, because `dask.delayed` merges the whole graph with every call
(see `graph.tasks`). If a release of Dask moves them, change this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import dask
import dask.threaded
from dask.base import get_scheduler
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dbksvd_dask.base.late import is_instance

try:
    from dask._task_spec import DataNode, List, Task, TaskRef
except ImportError as error:
    raise ImportError(
        f"dask {dask.__version__} has no tasks in dask._task_spec ({error}), from which dbksvd-dask builds its "
        "graphs; install a release that has them, for example with `pip install dask==2026.8.0`"
    ) from error

__all__ = [
    "DataNode",
    "List",
    "Task",
    "TaskRef",
    "compute_graph",
    "delayed_of",
    "keys_of",
    "placed_delayed",
    "scheduler_client",
    "subgraph",
]


def delayed_of(key: str, graph: Mapping[Any, Any]) -> Delayed:
    """Return a graph as an object that computes to one of its keys."""
    return Delayed(key, graph)


def placed_delayed(
    key: str, graph: Mapping[Any, Any], name: str, workers: Callable[[Any], list[str]], elsewhere: bool = True
) -> Delayed:
    """Return the same with a preferred worker per task.

    Parameters
    ----------
    name : unique name of the graph
    workers : given a key, the addresses of workers; must be picklable
    elsewhere : whether the task runs elsewhere if that worker is lost
    """
    layer = MaterializedLayer(graph, {"workers": workers, "allow_other_workers": elsewhere})
    return Delayed(key, HighLevelGraph({name: layer}, {name: set()}), layer=name)


def keys_of(graph: Delayed) -> list[Any]:
    """Return the keys of all tasks of a graph."""
    return list(graph.__dask_graph__())


def subgraph(graph: Delayed, key: Any) -> Delayed:
    """Return the same graph with another of its tasks as the result."""
    return Delayed(key, graph.dask, layer=graph.__dask_layers__()[0])


def scheduler_client() -> Any:
    """Return the client whose scheduler runs computations now; None where that is not a distributed one."""
    if "distributed" not in sys.modules:  # without it no client can be current
        return None
    client = getattr(get_scheduler(), "__self__", None)
    return client if is_instance(client, "distributed", "Client") else None


def compute_graph(graph: Delayed) -> Any:
    """Compute a graph on the current scheduler.

    `dask.compute` loads distributed, only to learn that there is no client; where it is not loaded, there is none.
    """
    known = "distributed" in sys.modules or dask.config.get("scheduler", None)
    return dask.compute(graph, scheduler=None if known else dask.threaded.get)[0]


def borrow_socket(comm: Any) -> Any:
    """Take the socket of a connection out of the event loop, on which it must be called.

    The next call that reads or writes through the connection gives it back to the loop.

    Returns
    -------
    The socket, which does not block; None for a connection that is not plain TCP.

    Raises
    ------
    ConnectionError
        When bytes are under way, or the connection is closed.
    """
    stream: Any = getattr(comm, "stream", None)
    if stream is None and is_instance(comm, "distributed.comm.tcp", "TCP"):
        raise ConnectionError("the connection is closed")
    if type(stream).__name__ != "IOStream":
        return None
    if stream.reading() or stream.writing() or stream._read_buffer_size or stream.socket is None:
        raise ConnectionError("the connection is in use")
    stream.io_loop.remove_handler(stream.socket)
    stream._state = None  # a stream without a handler, which it adds when it needs one
    return stream.socket
