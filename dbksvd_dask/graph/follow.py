"""Run a batch that workers compute together: submit it, follow its rounds, notice workers that take no part."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

from dbksvd_dask.graph import run
from dbksvd_dask.graph._compat import subgraph
from dbksvd_dask.graph.outcome import Outcome
from dbksvd_dask.graph.peers import PeersLostError
from dbksvd_dask.graph.together import ROUNDS, Together
from dbksvd_dask.plan.shares import tree_children

FAILED = ("error", "cancelled")
_ROUND = object()
# What waits for news of batches, by their names; clients call the same handler for all of them.
_listening: dict[str, queue.SimpleQueue[Any]] = {}


def compute(batch: Together, on_round: Callable[[], None] | None = None) -> Outcome:
    """Compute a batch on the workers of the current client; call `on_round` after each round.

    Raises
    ------
    PeersLostError
        When workers lost each other, or one of them cannot begin; nothing is wrong with the batch.
    """
    client = run.current_client()
    run.warn_of_mixed_arithmetic(client)
    with run.quiet(), _news_of(client, batch) as news:
        futures = client.compute([subgraph(batch.graph, key) for key in batch.keys])
        # all shares fail together; if the first is lost, its neighbours fail
        for rank in (0, *tree_children(0, len(futures))):
            futures[rank].add_done_callback(news.put)
        try:
            rounds = _wait(client, batch, futures[0], news, on_round or _ignore)
            outcome = _result(client, batch, futures[0])
        finally:
            # an exception keeps this frame and its futures alive, and with them the remaining tasks
            for future in futures:
                future.release()
    for _ in range(batch.n_rounds - rounds):  # news may come later than the result
        (on_round or _ignore)()
    return outcome


def _ignore() -> None:
    pass


@contextlib.contextmanager
def _news_of(client: Any, batch: Together) -> Iterator[queue.SimpleQueue[Any]]:
    """Collect the rounds that the first worker reports, beside anything else that is put there."""
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _listening[batch.name] = news
    # each time: a scheduler that was started again does not know
    client.subscribe_topic(ROUNDS, _on_round_reported)
    try:
        yield news
    finally:
        del _listening[batch.name]


def _on_round_reported(event: tuple[float, str]) -> None:
    news = _listening.get(event[1])
    if news is not None:
        news.put(_ROUND)


def _wait(
    client: Any, batch: Together, first: Any, news: queue.SimpleQueue[Any], on_round: Callable[[], None]
) -> int:
    """Wait for the first share; return the number of rounds that were reported. Raise what ends a share."""
    rounds, waiting = 0, False
    while not first.done():
        try:
            item = news.get(timeout=run.POLL_SECONDS)
        except queue.Empty:
            waiting = _require_homes(client, batch, waiting)
            continue
        if item is _ROUND:
            rounds += 1
            on_round()
        elif item.status in FAILED:  # a share that is "lost" has ended, and then its worker has left
            item.result()
    return rounds


def _result(client: Any, batch: Together, first: Any) -> Outcome:
    """Fetch what the first share returned; raise if its worker leaves before."""
    seconds, waiting = run.POLL_SECONDS, False
    while True:
        try:
            outcome: Outcome = first.result(timeout=seconds)
            return outcome
        except TimeoutError:  # slow, or lost and without a worker that may do it again
            waiting = _require_homes(client, batch, waiting)
            seconds *= 2


def _require_homes(client: Any, batch: Together, waited: bool) -> bool:
    """Return whether shares wait for a lost, closing or paused worker; raise if they already did before."""
    keys = set(batch.keys)

    def waiting(dask_scheduler: Any) -> list[str]:  # local, so a scheduler without this package can run it
        found = [task.key for task in dask_scheduler.unrunnable if task.key in keys]
        for worker in dask_scheduler.workers.values():
            if (
                worker.status.name == "paused"
            ):  # it holds back what has not begun; a share that has is long running
                held = set(worker.processing) - set(worker.long_running)
                found += [task.key for task in held if task.key in keys]
        return found

    stuck = client.run_on_scheduler(waiting)
    if stuck and waited:
        homes = dict(zip(batch.keys, batch.homes, strict=True))
        raise PeersLostError(f"the worker at {homes[stuck[0]]} is gone or takes no tasks")
    return bool(stuck)
