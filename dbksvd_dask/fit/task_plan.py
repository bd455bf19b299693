"""How a batch is spread over workers: chunks, tasks, and what would keep every thread busy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dbksvd_dask.fit.context import Context
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.run import current_client, worker_threads
from dbksvd_dask.plan.encoder import training_groups, training_spec
from dbksvd_dask.plan.shares import plan_shares
from dbksvd_dask.plan.units import split_rows


class TaskPlan(NamedTuple):
    """The graph of one batch on a cluster or on threads."""

    workers: int  # worker processes; 0 on threads
    threads: int  # of all workers together
    chunks: int
    tasks: int
    batch_size: int
    chunk_size: int
    n_train: int  # samples that a batch can have at most

    @property
    def tasks_per_worker(self) -> float | None:
        """Tasks that a worker runs in one batch; None on threads."""
        return self.tasks / self.workers if self.workers else None

    @property
    def advice(self) -> str:
        """What to change for every thread to have a chunk; empty if every thread has one.

        Examples
        --------
        >>> TaskPlan(8, 64, 8, 290, 65536, 8192, 10**6).advice
        '56 of 64 threads have no chunk; use batch_size=524288 or more, or chunk_size=1024 or less'
        >>> TaskPlan(0, 2, 1, 56, 5400, 8192, 5400).advice
        '1 of 2 threads have no chunk; use chunk_size=2700 or less'
        >>> TaskPlan(0, 2, 8, 342, 65536, 8192, 10**6).advice
        ''
        """
        idle = self.threads - self.chunks
        if idle <= 0:
            return ""
        larger = self.threads * self.chunk_size
        ways = [f"batch_size={larger} or more"] if larger <= self.n_train else []
        ways.append(f"chunk_size={-(-self.batch_size // self.threads)} or less")
        return f"{idle} of {self.threads} threads have no chunk; use {', or '.join(ways)}"


def plan_tasks(context: Context, workers: Mapping[str, int] | None = None) -> TaskPlan:
    """Count the tasks of one batch without running any; chunk sizes are as given, since bits depend on them.

    Parameters
    ----------
    workers : threads of each worker, by any name; None for those of the current scheduler
    """
    p, place, rows = context.params, context.place, context.stream.rows_per_batch
    if workers is None and current_client() is not None:
        workers = worker_threads()
    spec = batch.BatchSpec(
        groups=training_groups(p, p.n_atoms),
        encode=training_spec(p, 0.0, p.n_atoms),
        lanczos_steps=p.lanczos_steps,
        chunk_size=place.chunk_size,
        dead_atoms=p.dead_atoms,
        seed=p.seed,
        dtype=context.dtype,
        place=place.placement,
    )
    chunks = len(split_rows(rows, place.chunk_size))
    shares = plan_shares(chunks, workers or {}, together=place.placement.device == "cpu")
    D = np.zeros((p.n_atoms, context.source.n_features), context.dtype)
    by_tasks = batch.exchanges_by_tasks()
    first = context.stream.batch(0)
    graph = batch.build_batch(context.source, first, D, None, spec, 0, shares=shares, by_tasks=by_tasks)
    threads = sum((workers or worker_threads()).values())
    tasks = batch.count_tasks(graph)
    n_train = context.stream.n_train
    return TaskPlan(len(workers or ()), threads, chunks, tasks, rows, place.chunk_size, n_train)
