"""Jobs on the workers of a cluster: tasks that each do one numbered piece, a bounded number at a time."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dbksvd_dask.store import paths

if TYPE_CHECKING:
    from dask.delayed import Delayed


class Piecework(Protocol):
    """A job whose pieces any process that sees its files can do; made again on a worker from its arguments."""

    arguments: dict[str, Any]

    def close(self) -> None:
        """Close the files."""


def current_client() -> Any:
    """Return the client of the current cluster; None without one, and then without loading Dask."""
    if "distributed" not in sys.modules:
        return None
    from dbksvd_dask.graph import run

    return run.current_client()


def everywhere(path: Any) -> Any:
    """Return a path, or several, as a process in another folder finds them."""
    if path is None or (not isinstance(path, str | os.PathLike) and not isinstance(path, Sequence)):
        return path
    if isinstance(path, str | os.PathLike):
        return os.fspath(path) if paths.is_remote(path) else os.path.abspath(path)
    return [everywhere(one) for one in path]


def run_pieces(
    client: Any,
    job: Piecework,
    step: str,
    pieces: Iterable[int],
    on_done: Callable[[int], None],
    on_retry: Callable[[int, int, str], None],
) -> int:
    """Do pieces of a job on the workers of a cluster; return how many.

    Parameters
    ----------
    client : distributed.Client
    job : Piecework
    step : str
        Name of the method of the job that does one piece, called with its number.
    pieces : iterable of int
    on_done : callable
        Called with each finished piece.
    on_retry : callable
        Called with (attempt, attempts, reason) when a lost worker or connection is the reason to try again.
    """
    from dbksvd_dask.graph import run

    left = dict.fromkeys(pieces)
    total, token = len(left), uuid.uuid4().hex

    def finished(piece: int) -> None:
        left.pop(piece, None)
        on_done(piece)

    run.require_same_package(client)
    with run.quiet():
        run.attempt(lambda: run_on_client(client, _tasks(token, job, step, list(left)), finished), on_retry)
        client.run(close_jobs, token, on_error="ignore")
    return total


def _tasks(token: str, job: Piecework, step: str, pieces: list[int]) -> Iterator[Delayed]:
    import dask

    from dbksvd_dask.graph.tasks import Tasks

    once = Tasks()
    held = dask.persist(once.finish(once.data((type(job), job.arguments), "job")))[0]
    for piece in pieces:
        names = Tasks()
        yield names.finish(names.call(do_piece, step, (piece,), token, held, step, piece))


def run_on_client(client: Any, tasks: Iterator[Delayed], on_done: Callable[[Any], None]) -> None:
    """Compute tasks, a bounded number at a time; call `on_done` with each result."""
    from distributed import as_completed

    # two per thread: one at work and one whose data are next
    in_flight = max(8, 2 * sum(client.nthreads().values()))
    running = as_completed([client.compute(task) for task in itertools.islice(tasks, in_flight)])
    try:
        for future in running:
            on_done(future.result())
            for task in itertools.islice(tasks, 1):
                running.add(client.compute(task))
    except BaseException:
        client.cancel(list(running.futures))  # an exception keeps this frame: the rest would keep running
        raise


# ---------------------------------------------------------------------------------------------- on a worker

# Opened jobs by token and thread: the readers of many formats serve one thread only.
_OPENED: dict[tuple[str, int], Any] = {}
_LOCK = threading.Lock()


def do_piece(token: str, job: tuple[type[Any], dict[str, Any]], step: str, piece: int) -> int:
    """Do one piece of a job; doing it twice writes the same bytes twice."""
    key = (token, threading.get_ident())
    with _LOCK:
        opened = _OPENED.get(key)
    if opened is None:
        make, arguments = job
        opened = make(**arguments)
        with _LOCK:
            _OPENED[key] = opened
    getattr(opened, step)(piece)
    return piece


def close_jobs(token: str) -> None:
    """Close what the tasks of a job have opened in this process."""
    with _LOCK:
        ours = [_OPENED.pop(key) for key in list(_OPENED) if key[0] == token]
    for job in ours:
        job.close()
