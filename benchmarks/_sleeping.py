"""A real scheduler and real workers for `benchmarks.cluster_overhead`, whose kernels sleep instead of computing.

Everything but the arithmetic is real: the graph of `graph.batch`, a scheduler process, worker processes over TCP,
and arrays that travel. A share sleeps as long as its slowest thread would compute.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import dask
import numpy as np
import psutil

from dbksvd_dask.graph import load, share
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.lanczos import LanczosState
from dbksvd_dask.kernels.moments import Moments, ResidualMoments

# What a worker does beside its tasks on a machine of its own: hundreds of workers on two cores must not do it.
QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "1h",
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.scheduler.worker-ttl": None,
    "distributed.admin.tick.interval": "1h",
    "distributed.admin.tick.cycle": "1h",
    "distributed.comm.timeouts.connect": "60s",
}


class Planned(NamedTuple):
    """Seconds of one chunk on one thread, and of the steps between rounds.

    Defaults: 8,192 rows, 768 features, 4096 atoms, k=32, eight rounds; `python -m benchmarks.cluster_overhead
    --measure` prints them for the machine that it runs on.
    """

    gram: float = 0.197  # all tiles, on one thread
    assemble: float = 0.031
    encode: float = 0.711
    first: float = 0.0026
    next: float = 0.0037
    refresh: float = 0.0072
    step: float = 0.0018  # one Lanczos step, the last of a round with the new atoms
    close: float = 0.0016
    threads: float = 0.00012  # from one call to eight threads and back; overhead, not compute

    def compute(self, threads: int, n_rounds: int, steps: int) -> float:
        """Return the seconds of a batch with one chunk per thread on a worker that waits for nobody."""
        rounds = n_rounds * (self.first + (steps - 1) * self.next + self.refresh + steps * self.step)
        return self.gram / threads + self.assemble + self.encode + rounds + self.close


def sleeping(planned: Planned, threads: int, n_rounds: int) -> None:
    """Replace the arithmetic of this process by sleeps; processes forked from it inherit them.

    Parameters
    ----------
    threads : of each worker, for the waves in which it computes its chunks
    """

    def waves(states: Any) -> int:
        chunks = states if isinstance(states, list) else states.chunks
        return math.ceil(len(chunks) / threads)

    after = {
        "encode_samples": lambda start, rows, *_: waves(rows) * (planned.encode + planned.first),
        "product": lambda states, *_: waves(states) * planned.next,
        "update": lambda states, *_: waves(states) * (planned.refresh + planned.first),
        "close_last": lambda states, *_: waves(states) * (planned.refresh + planned.close),
        "take_step": lambda *_: planned.step,
    }
    for name, seconds in after.items():
        more = 0.0 if name == "take_step" else planned.threads
        setattr(share, name, _slept(getattr(share, name), seconds, more))
    # eight threads of one worker wait for each other's interpreter if they compute nothing, so they sleep too
    share.each = lambda function, items: map(function, items)  # type: ignore[assignment]
    load.whole_gram = _gram_slept(planned.gram / threads + planned.assemble)
    _without_arithmetic(n_rounds)


def _slept(function: Callable[..., Any], seconds: Callable[..., float], more: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def slept(*args: Any) -> Any:
        began = time.perf_counter()
        out = function(*args)
        time.sleep(max(0.0, seconds(*args) + more - (time.perf_counter() - began)))
        return out

    return slept


def _gram_slept(seconds: float) -> Callable[..., Any]:
    @functools.wraps(load.whole_gram)
    def gram(D: np.ndarray, pairs: Any, compact: bool) -> np.ndarray:
        time.sleep(seconds)
        return np.zeros((1, 1), D.dtype)

    return gram


def _without_arithmetic(n_rounds: int) -> None:
    """Replace the kernels by functions that return arrays of the right shape."""
    empty = np.zeros(0)

    def encode_chunk(Y: Any, D: Any, gram: Any, spec: Any, rounds: Any, weights: Any = None) -> Any:
        codes = np.zeros((len(Y), spec.k), np.int32)
        state = chunk.ChunkState(np.zeros_like(Y), codes, codes.astype(Y.dtype), empty, empty, empty)
        return state, np.ones(D.shape[0], np.int64)

    def chunk_stats(Y: Any, state: Any, counts: Any) -> Any:
        zero = np.zeros(Y.shape[1])
        moments = Moments(len(Y), len(Y), 0.0, zero, zero, zero, zero)
        return chunk.ChunkStats(moments, np.ones(len(Y)), counts, time.time())

    def after_update(state: Any, stats: Any) -> Any:
        zero = np.zeros(state.R.shape[1])
        return ResidualMoments(len(state.R), 0.0, zero, zero)

    @functools.cache  # sixty-four workers that fill arrays on two cores would take longer than they sleep
    def zero_sums(n_local: int, n_features: int, dtype: Any, n_scalars: int) -> Any:
        scalars = tuple(np.zeros(n_local) for _ in range(n_scalars))
        return chunk.RoundSums(np.zeros((n_local, n_features), dtype), scalars)

    def sums(state: Any, n_local: int, n_scalars: int) -> Any:
        return zero_sums(n_local, state.R.shape[1], state.R.dtype, n_scalars)

    def step(parts: Any, *_: Any) -> Any:
        W = parts[0].W
        return LanczosState((W,), W[:, 0], (), (), W[:, 0])

    chunk.encode_chunk, chunk.chunk_stats, chunk.after_update = encode_chunk, chunk_stats, after_update
    chunk.first_product = lambda state, r, n_local: sums(state, n_local, 1)
    chunk.next_product = lambda state, r, lz: sums(state, lz.dv.size, 2)
    chunk.add_sums = lambda parts: parts[0]
    chunk.begin_round = chunk.advance_round = step
    chunk.finish_round = lambda lz, D, members: lz.basis[0]
    chunk.refresh_chunk = lambda state, *_: state
    chunk.coefficient_sums = lambda state, n_atoms: np.zeros(n_atoms)


# ---------------------------------------------------------------------------------------------- processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_scheduler(port: int) -> None:
    from distributed import Scheduler

    async def run() -> None:
        async with Scheduler(host="127.0.0.1", port=port, dashboard=False, dashboard_address=":0") as scheduler:
            await scheduler.finished()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(run())


def _run_workers(address: str, n_workers: int, threads: int) -> None:
    from distributed import Worker

    async def run() -> None:
        how: dict[str, Any] = {"nthreads": threads, "memory_limit": 0, "dashboard": False, "host": "127.0.0.1"}
        workers = [await Worker(address, **how) for _ in range(n_workers)]
        await asyncio.gather(*(worker.finished() for worker in workers))

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(run())


class Processes:
    """The processes of a cluster, and the processor time that they have used."""

    def __init__(self, scheduler: Any, workers: list[Any]) -> None:
        self._scheduler, self._workers = scheduler, workers

    def cpu(self) -> tuple[float, float]:
        """Return the seconds of the scheduler, and of all workers together."""

        def used(process: Any) -> float:
            times = psutil.Process(process.pid).cpu_times()
            return float(times.user + times.system)

        return used(self._scheduler), sum(map(used, self._workers))


@contextmanager
def cluster(n_workers: int, threads: int, per_process: int = 1) -> Iterator[tuple[Any, Processes]]:
    """Start a scheduler and workers by forking this process, which must not have started any thread yet.

    Parameters
    ----------
    per_process : workers in one process; more than 1 saves memory, but they share an interpreter
    """
    import distributed

    logging.getLogger("distributed").setLevel(logging.ERROR)
    fork = multiprocessing.get_context("fork")
    port = _free_port()
    address = f"tcp://127.0.0.1:{port}"
    with dask.config.set(QUIET):
        scheduler = fork.Process(target=_run_scheduler, args=(port,), daemon=True)
        sizes = [min(per_process, n_workers - first) for first in range(0, n_workers, per_process)]
        workers = [fork.Process(target=_run_workers, args=(address, n, threads), daemon=True) for n in sizes]
        for process in (scheduler, *workers):
            process.start()
        try:
            with distributed.Client(address, timeout=60) as client:
                client.wait_for_workers(n_workers, timeout=300)
                yield client, Processes(scheduler, workers)
        finally:
            for process in (*workers, scheduler):
                process.kill()
                process.join()
