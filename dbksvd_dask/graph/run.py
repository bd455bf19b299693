"""Run graphs on the current scheduler: progress callbacks, bounded retries, readable errors."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import Any, TypeVar

import dask
from dask.callbacks import Callback as DaskCallback
from dask.delayed import Delayed
from dask.system import CPU_COUNT

from dbksvd_dask.base.safe_text import printable, redacted
from dbksvd_dask.errors import ClusterError, DBKSVDError, MixedArithmeticWarning, StoreError
from dbksvd_dask.graph import peers
from dbksvd_dask.graph._compat import compute_graph, keys_of, scheduler_client, subgraph
from dbksvd_dask.kernels.blas import arithmetic
from dbksvd_dask.plan import shares

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3  # runs of a batch that fails for a transient reason, before giving up
POLL_SECONDS = 5.0  # between two checks for workers
NO_WORKERS_SECONDS = 300.0  # without any worker, before giving up: a queue may need minutes to start new ones
RECONNECT_SECONDS = 120.0  # longer than a client tries by itself

# The dictionary is part of the graph on purpose (see `graph.tasks.Tasks.data`); Dask warns above 10 MB.
_QUIET = {"distributed.admin.large-graph-warning-threshold": "1 TB"}


def quiet() -> Any:
    """Keep Dask from warning about a graph that holds a dictionary, for the time of a block.

    Before distributed is loaded there is nothing to set: leaving the block would take away the whole configuration
    of a distributed that was loaded inside, and the next `compute` of the process would fail.
    """
    return dask.config.set(_QUIET if "distributed" in dask.config.config else {})


def compute(graph: Delayed, prefix: str = "", on_task: Callable[[], None] | None = None) -> Any:
    """Compute a graph on the current scheduler.

    Parameters
    ----------
    graph : from `graph.tasks.Tasks.finish`
    prefix, on_task : call `on_task` after each task whose name starts with `prefix`
    """
    client = current_client()
    with quiet():
        if client is not None:
            return _on_client(client, graph, prefix, on_task)
        if on_task is None:
            return compute_graph(graph)
        callback = on_task

        def posttask(key: Any, *_: Any) -> None:
            if isinstance(key, str) and key.startswith(prefix):
                callback()

        with DaskCallback(posttask=posttask):
            return compute_graph(graph)


def _on_client(client: Any, graph: Delayed, prefix: str, on_task: Callable[[], None] | None) -> Any:
    """Submit a graph; watch its tasks by holding futures of them, which costs the cluster nothing."""
    warn_of_mixed_arithmetic(client)
    keys = [] if on_task is None else [key for key in keys_of(graph) if str(key).startswith(prefix)]
    futures = client.compute([graph, *(subgraph(graph, key) for key in keys)])
    try:
        return _wait(client, futures[0], futures[1:], on_task)
    finally:
        # an exception keeps this frame and its futures alive, and with them the remaining tasks
        for future in futures:
            future.release()


# The kind of arithmetic of each client's workers, by address.
_ARITHMETIC: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def warn_of_mixed_arithmetic(client: Any) -> None:
    """Warn once when workers of a cluster round differently, and name them; only new workers are queried.

    New workers also get ready to compute batches together.
    """
    known = _ARITHMETIC.setdefault(client, {})
    new = [worker for worker in client.nthreads() if worker not in known]
    if not new:
        return
    require_same_package(client, new)
    before = set(known.values())
    known.update(client.run(_introduce, workers=new, on_error="ignore"))
    if len(set(known.values())) > max(1, len(before)):
        kinds: dict[str, list[str]] = {}
        for worker, kind in known.items():
            kinds.setdefault(kind, []).append(worker)
        listed = "; ".join(f"{kind} on {', '.join(workers[:3])}" for kind, workers in kinds.items())
        warnings.warn(
            f"the workers of this cluster round differently ({listed}), so the last bits of the result depend on "
            "which worker computes what; use workers of one kind, or set OPENBLAS_CORETYPE and NUMBA_CPU_NAME to "
            "the same values on all of them",
            MixedArithmeticWarning,
            stacklevel=2,
        )


def _introduce(dask_worker: Any) -> str:
    """In a worker: get ready to work with others; return the kind of its arithmetic."""
    peers.install(dask_worker)
    return arithmetic()


def require_same_package(client: Any, workers: list[str] | None = None) -> None:
    """Refuse workers, by default all, that have another version of this package or cannot import it."""

    def version() -> str:  # a local function is pickled by value, so a worker of any version can run it
        import dbksvd_dask

        return dbksvd_dask.__version__

    own = version()
    for worker, found in sorted(client.run(version, workers=workers, on_error="return").items()):
        if isinstance(found, ImportError):
            raise ClusterError(
                f"the worker at {worker} cannot import dbksvd-dask ({found}); install it there, for example with "
                f"`pip install dbksvd-dask=={own}`"
            )
        if isinstance(found, str) and found != own:
            raise ClusterError(
                f"the worker at {worker} has dbksvd-dask {found}, this process {own}; install one version on both"
            )


def _wait(client: Any, result: Any, watched: list[Any], on_task: Callable[[], None] | None) -> Any:
    from distributed import wait

    left, workers_seen = set(watched), time.monotonic()
    while not result.done():
        try:
            wait([result, *left], timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
        except TimeoutError:
            workers_seen = _check_workers(client, workers_seen)
        for future in [f for f in left if f.done()]:
            left.discard(future)
            if on_task is not None and future.status == "finished":
                on_task()
    return result.result()


def _check_workers(client: Any, seen: float) -> float:
    """Return the time at which workers that take tasks were last seen; raise if that is too long ago.

    Dask pauses a worker at 80 % of its memory limit: it stays but takes no task, and if the limit is below what it
    needs to start it never will.
    """
    workers = client.run_on_scheduler(_states_of_workers())
    if any(state != "paused" for state in workers):
        return time.monotonic()
    gone = time.monotonic() - seen
    if gone > NO_WORKERS_SECONDS and workers:
        raise ClusterError(
            f"all workers of the scheduler at {address(client)} have been paused for {gone:.0f} s, as they use "
            "most of their memory limit; start them with a higher one (`dask worker --memory-limit`)"
        )
    if gone > NO_WORKERS_SECONDS:
        raise ClusterError(
            f"the scheduler at {address(client)} has had no worker for {gone:.0f} s; start workers "
            f"(`dask worker {address(client)}`)"
        )
    what = "only paused workers" if workers else "no workers"
    logger.warning("the scheduler has %s; waiting for some since %.0f s", what, gone)
    return seen


def _states_of_workers() -> Callable[..., list[str]]:
    """Return a function that lists the state of every worker; `client.scheduler_info` lists five."""

    def states(dask_scheduler: Any) -> list[str]:  # local, so a scheduler without this package can run it
        return [worker.status.name for worker in dask_scheduler.workers.values()]

    return states


def address(client: Any) -> str:
    """Return the address of a client's scheduler."""
    scheduler = getattr(client, "scheduler", None)
    return str(getattr(scheduler, "address", "an unknown address"))


def dashboard() -> str:
    """Return the link to the dashboard of the current scheduler; empty on threads, and where it has no bokeh."""
    client = current_client()
    if client is None or not client.run_on_scheduler(_has_bokeh_here()):
        return ""
    return str(client.dashboard_link or "")


def _has_bokeh_here() -> Callable[[], bool]:
    """Return a function that checks whether its process can draw a dashboard."""

    def has_bokeh() -> bool:  # a local function is pickled by value, so any scheduler can run it
        from importlib.util import find_spec

        return find_spec("bokeh") is not None

    return has_bokeh


def count_workers() -> int:
    """Return the number of worker processes of the current scheduler; 0 on threads."""
    client = current_client()
    return 0 if client is None else len(client.nthreads())


# ---------------------------------------------------------------------------------------------- retries


def attempt(run: Callable[[], T], on_retry: Callable[[int, int, str], None], attempts: int = ATTEMPTS) -> T:
    """Call `run` until it succeeds, at most `attempts` times; retry only transient failures.

    Parameters
    ----------
    run : builds and computes a graph, anew each time because the workers may have changed
    on_retry : called with (number of the failed attempt, attempts, reason) before the next one

    Raises
    ------
    ClusterError
        When the last attempt failed, the scheduler is gone, or tasks keep killing their workers.
    """
    client = current_client()
    where = "" if client is None else address(client)
    for number in range(1, attempts + 1):
        try:
            return run()
        except (Exception, CancelledError) as error:
            _raise_killed(error)
            reason = passing_reason(error)
            if reason is None:
                raise
            if client is not None and not _reconnected(client):
                raise ClusterError(
                    f"the connection to the scheduler at {where} was lost and not found again; see whether it runs"
                ) from error
            if number == attempts:
                raise ClusterError(f"failed {attempts} times, last: {reason}") from error
            logger.warning("attempt %d of %d failed: %s; trying again", number, attempts, reason)
            on_retry(number, attempts, reason)
            time.sleep(2.0 ** (number - 1))
    raise AssertionError("unreachable")


def passing_reason(error: BaseException) -> str | None:
    """Return why a failure is transient, such as a lost worker or connection; None for any other failure."""
    comm = sys.modules.get("distributed.comm")
    lost = (comm.CommClosedError,) if comm is not None else ()
    passing = (CancelledError, ConnectionError, TimeoutError, *lost)
    # a remote store that did not answer raises a `StoreError` from such an error; other errors of ours are final
    cause = error.__cause__ if isinstance(error, StoreError) else None if isinstance(error, DBKSVDError) else error
    if not isinstance(cause, passing):
        return None
    return printable(redacted(" ".join(f"{type(error).__name__}: {error}".split())))


def _raise_killed(error: BaseException) -> None:
    """Explain Dask's error for a task whose workers keep dying."""
    scheduler = sys.modules.get("distributed.scheduler")
    if scheduler is None or not isinstance(error, scheduler.KilledWorker):
        return
    label, died = dask.utils.key_split(error.task), error.allowed_failures + 1
    raise ClusterError(
        f"{died} worker{'s' * (died > 1)} in turn died while running a `{label}` task, the last at "
        f"{error.last_worker.address}; most often they ran out of memory: give workers more, or use a smaller "
        "chunk_size or batch_size"
    ) from error


def _reconnected(client: Any) -> bool:
    """Wait until a client has reconnected to its scheduler or given up; return whether it has reconnected."""
    end = time.monotonic() + RECONNECT_SECONDS
    while client.status == "connecting" and time.monotonic() < end:
        time.sleep(0.1)
    return bool(client.status == "running")


def current_client() -> Any:
    """Return the client whose scheduler runs computations now; None where that is not a distributed one."""
    return scheduler_client()


_PLANNED: ContextVar[dict[str, int] | None] = ContextVar("planned workers", default=None)


@contextlib.contextmanager
def planned_workers(n_workers: int, threads: int) -> Iterator[None]:
    """Let plans in this block be made for workers that do not run yet; nothing may be computed in it."""
    token = _PLANNED.set({f"planned-{i}": threads for i in range(n_workers)})
    try:
        yield
    finally:
        _PLANNED.reset(token)


def worker_threads() -> dict[str, int]:
    """Return the threads of each process that computations run on, by its address; this process is ''."""
    planned = _PLANNED.get()
    if planned is not None:
        return planned
    client = current_client()
    if client is not None:
        return dict(client.nthreads())
    if str(dask.config.get("scheduler", "")) in ("sync", "synchronous", "single-threaded"):
        return {"": 1}
    return {"": int(dask.config.get("num_workers", None) or CPU_COUNT)}


def plan_shares(n_chunks: int, together: bool = True) -> list[shares.Share]:
    """Return the chunks that tasks take together: those of each worker of a cluster; one each on threads.

    By default the scheduler spreads neighbouring chunks over different workers and moves states of tens of
    megabytes between them: 4.8 s instead of 3.6 s for a batch on two processes. Homes are preferences
    (`allow_other_workers`): the chunks of a lost worker are recomputed elsewhere.

    Parameters
    ----------
    together : whether a task takes all chunks of its worker; if not, it takes one
    """
    threads = {} if current_client() is None else worker_threads()
    return shares.plan_shares(n_chunks, threads, together)
