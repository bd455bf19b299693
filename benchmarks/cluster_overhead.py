"""What Dask costs a batch on many workers: the real graph, a real scheduler, real workers, kernels that sleep.

    python -m benchmarks.cluster_overhead --workers 2 16 64

Two cores cannot compute for 64 workers, but they can schedule for them: kernels are replaced by sleeps of the
length that they were measured to take, one chunk per thread. Arrays that travel have 1/`--fraction` of their real
size. All workers and the scheduler share this machine's cores, so the overhead holds what a real cluster would do
in parallel; the processor seconds of scheduler and workers are printed beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import numpy as np

from benchmarks import _sleeping
from benchmarks._sleeping import Planned
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.kernels import chunk, encode
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.plan import seeds
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.groups import plan_groups, plan_rounds

_ROWS = 8  # of a chunk: its residual does not travel, and nothing is computed with it


def one_cluster(args: argparse.Namespace, n_workers: int) -> dict[str, Any]:
    """Run batches on a cluster of one size; return the best of them."""
    planned = Planned()
    _sleeping.sleeping(planned, args.threads, args.rounds)
    n_chunks = n_workers * args.threads
    samples = np.ones((n_chunks * _ROWS, args.features // args.fraction), np.float32)
    source, rows = as_source(samples, _ROWS), np.arange(len(samples), dtype=np.int64)
    D = np.ones((args.atoms, samples.shape[1]), np.float32)
    groups = plan_groups(args.atoms, args.k, None, args.rounds)
    how = (groups, EncodeSpec(args.k), args.steps, _ROWS, "residual", 0, np.dtype(np.float32))
    runs = []
    with _sleeping.cluster(n_workers, args.threads, args.per_process) as (client, processes):
        with dask.config.set({"scheduler": client, batch.EXCHANGE: args.exchange}):
            for iteration in range(args.repeats + 1):
                before, began = processes.cpu(), time.perf_counter()
                graph = batch.build_batch(source, rows, D, None, batch.BatchSpec(*how), iteration)
                batch.run_batch(graph)
                seconds, after = time.perf_counter() - began, processes.cpu()
                time.sleep(0.5)  # workers forget the last batch
                runs.append((seconds, after[0] - before[0], after[1] - before[1]))
    seconds, scheduler, workers = min(runs[1:])
    tasks, compute = batch.count_tasks(graph), planned.compute(args.threads, args.rounds, args.steps)
    return {
        "workers": n_workers,
        "tasks": tasks,
        "tasks_per_worker": tasks / n_workers,
        "compute_seconds": compute,
        "seconds": seconds,
        "overhead": seconds - compute,
        "efficiency": compute / seconds,
        "scheduler_cpu": scheduler,
        "scheduler_ms_per_task": 1e3 * scheduler / tasks,
        "workers_cpu": workers,
        "all_seconds": [run[0] for run in runs],
    }


def measure_kernels(rows: int = 8192, n_features: int = 768, n_atoms: int = 4096, k: int = 32) -> Planned:
    """Measure the kernels on one thread, in processor seconds, best of three."""
    Y = np.random.default_rng(0).standard_normal((rows, n_features)).astype(np.float32)
    D = seeds.random_atoms(n_atoms, n_features, np.float32, 0)
    (group,) = plan_groups(n_atoms, k, None, 8)
    rounds = chunk.invert_rounds(plan_rounds(group, 0, 0), n_atoms)
    members, bounds = rounds.atoms[0], encode.gram_bounds(n_atoms)
    pairs = [(a, b) for i, a in enumerate(bounds) for b in bounds[i:]]

    def best(call: Callable[[], Any]) -> tuple[float, Any]:
        times = []
        for _ in range(3):
            began = time.thread_time()
            out = call()
            times.append(time.thread_time() - began)
        return min(times), out

    with single_blas_thread():
        gram, tiles = best(lambda: [encode.compact_gram_tile(D, *pair) for pair in pairs])
        assemble, whole = best(lambda: encode.assemble_compact_gram(n_atoms, tiles))
        seconds, (state, counts) = best(lambda: chunk.encode_chunk(Y, D, whole, EncodeSpec(k), rounds))
    more, stats = best(lambda: chunk.chunk_stats(Y, state, counts))
    state = state._replace(stats=stats)
    first, part = best(lambda: chunk.first_product(state, 0, members.size))
    begin, lz = best(lambda: chunk.begin_round([part], D, members))
    further, part = best(lambda: chunk.next_product(state, 0, lz))
    advance, lz2 = best(lambda: chunk.advance_round([part], lz, D, members))
    finish, new = best(lambda: chunk.finish_round(lz2, D, members))
    refresh, _ = best(lambda: chunk.refresh_chunk(state, 0, D, members, new, False))
    close, _ = best(lambda: (chunk.after_update(state, stats), chunk.coefficient_sums(state, n_atoms)))
    step = (begin + advance + finish) / 2
    return Planned(gram, assemble, seconds + more, first, further, refresh, step, close, _thread_seconds())


def _thread_seconds(threads: int = 8, repeats: int = 200) -> float:
    """Measure the way from one call to as many threads as a worker has, and back."""
    pool = ThreadPoolExecutor(threads)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for future in [pool.submit(int) for _ in range(threads)]:
            future.result()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def line(row: dict[str, Any]) -> str:
    """Return one result as text."""
    return (
        f"{row['workers']:4d} workers {row['tasks']:6d} tasks ({row['tasks_per_worker']:.0f} per worker) "
        f"compute {row['compute_seconds']:.2f} s, batch {row['seconds']:.2f} s, "
        f"efficiency {row['efficiency']:.2f}; "
        f"CPU: scheduler {row['scheduler_cpu']:.2f} s ({row['scheduler_ms_per_task']:.2f} ms per task), "
        f"workers {row['workers_cpu']:.2f} s"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; print it. Every size runs in a process of its own, which forks its cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--per-process", type=int, default=1)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--atoms", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--fraction", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--exchange", choices=("direct", "tasks"), default="direct")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help="only measure the kernels of this machine")
    args = parser.parse_args(argv)
    if args.measure:
        measured = measure_kernels()._asdict()
        print(json.dumps(measured, indent=1))
        return measured
    if len(args.workers) == 1:
        rows = [one_cluster(args, args.workers[0])]
    else:
        given = sys.argv[1:] if argv is None else argv
        rows = []
        for n in args.workers:
            command = [sys.executable, "-m", "benchmarks.cluster_overhead", *given, "--json", "--workers", str(n)]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows += json.loads(answer)["rows"]
            if not args.json:
                print(line(rows[-1]), flush=True)
    result = {"setting": {k: v for k, v in vars(args).items() if k != "json"}, "rows": rows}
    if args.json:
        print(json.dumps(result, indent=1))
    elif len(args.workers) == 1:
        print(line(rows[0]))
    return result


if __name__ == "__main__":
    main()
