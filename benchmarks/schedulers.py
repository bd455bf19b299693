"""One outer batch on a plain thread pool, on Dask threads and on a LocalCluster of processes.

    python -m benchmarks.schedulers --json

The plain pool calls the same functions in the same order without Dask, so the differences are what Dask costs.
The runs alternate and the best of each counts: the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import numpy as np

from benchmarks._stores import write_store
from dbksvd_dask import cluster
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.load import load
from dbksvd_dask.graph.sources import Source, as_source
from dbksvd_dask.kernels import chunk, encode
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.dead_atoms import SeedPath, rule_of
from dbksvd_dask.plan import seeds, units
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.groups import plan_groups, plan_rounds
from dbksvd_dask.plan.shares import Node, add_nodes


def add_tree(parts: list[Any]) -> list[Any]:
    """Add parts in the order of a batch's graph."""
    n = len(parts)
    leaves = [Node(c, c + 1, part) for c, part in enumerate(parts)]
    return [node.value for node in add_nodes(leaves, 0, n, n, lambda a, b: chunk.add_sums([a, b]))]


def plain_batch(
    pool: ThreadPoolExecutor, source: Source, rows: np.ndarray, D: np.ndarray, spec: batch.BatchSpec
) -> np.ndarray:
    """One batch of one group without Dask: the updated dictionary, the same bits as `batch.run_batch` gives."""

    def each(function: Callable[..., Any], *columns: Any) -> list[Any]:
        return list(pool.map(function, *columns))

    (group,) = spec.groups
    rounds = chunk.invert_rounds(plan_rounds(group, spec.seed, 0), D.shape[0])
    bounds = encode.gram_bounds(D.shape[0])
    pairs = [(rows_, columns) for i, rows_ in enumerate(bounds) for columns in bounds[i:]]
    tile = one_blas_thread(encode.compact_gram_tile)
    gram = encode.assemble_compact_gram(D.shape[0], each(lambda p: tile(D, *p), pairs))

    def first(span: tuple[int, int]) -> Any:
        Y = load(source.take(rows[slice(*span)]), None, spec.dtype)
        state, counts = chunk.encode_chunk(Y, D, gram, spec.encode, rounds)
        return state, chunk.chunk_stats(Y, state, counts)

    encoded = each(first, units.split_rows(rows.size, spec.chunk_size))
    states, stats = [s for s, _ in encoded], [s for _, s in encoded]
    counts = chunk.add_counts([s.counts for s in stats])
    new_atoms = []
    for r, members in enumerate(rounds.atoms):
        parts = add_tree(each(lambda s: chunk.first_product(s, r, members.size), states))  # noqa: B023
        lz = chunk.begin_round(parts, D, members)
        for _ in range(1, spec.lanczos_steps):
            parts = add_tree(each(lambda s: chunk.next_product(s, r, lz), states))  # noqa: B023
            lz = chunk.advance_round(parts, lz, D, members)
        new = chunk.finish_round(lz, D, members)
        states = each(lambda s: chunk.refresh_chunk(s, r, D, members, new, False), states)  # noqa: B023
        new_atoms.append(new)
    members = list(rounds.atoms)
    worst = each(lambda s: chunk.worst_samples(s, D, members, new_atoms, counts), states)
    each(chunk.after_update, states, stats)
    path = SeedPath(spec.seed, 0, 0)
    return chunk.merge_dictionary(D, members, new_atoms, counts, worst, rule_of("residual"), path)


def digest(D: np.ndarray) -> str:
    """Short digest of the bytes of a dictionary."""
    return hashlib.sha256(np.ascontiguousarray(D).tobytes()).hexdigest()[:16]


def measure(runs: dict[str, Callable[[], np.ndarray]], repeats: int) -> dict[str, dict[str, Any]]:
    """Alternate the runs; per run the best seconds and the digest of what it gave."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    digests: dict[str, set[str]] = {name: set() for name in runs}
    for name, run in runs.items():  # compile, connect, read the store into the page cache
        digests[name].add(digest(run()))
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            D = run()
            seconds[name].append(time.perf_counter() - began)
            digests[name].add(digest(D))
    return {
        name: {"seconds": min(times), "all_seconds": times, "digests": sorted(digests[name])}
        for name, times in seconds.items()
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the comparison; print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--atoms", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dbksvd-schedulers-") as folder:
        result = compare(args, os.path.join(folder, "store.zarr"))
    print(json.dumps(result, indent=1) if args.json else table(result))
    return result


def compare(args: argparse.Namespace, path: str) -> dict[str, Any]:
    """Time the same batch on every scheduler."""
    write_store(path, args.rows, args.features, chunk_rows=min(16384, args.chunk_size))
    source = as_source(path, args.chunk_size)
    rows = np.arange(args.rows, dtype=np.int64)
    D = seeds.random_atoms(args.atoms, args.features, np.float32, 0)
    groups = plan_groups(args.atoms, args.k, None, args.rounds)
    spec = batch.BatchSpec(groups, EncodeSpec(args.k), 2, args.chunk_size, "residual", 0, np.dtype(np.float32))
    pool = ThreadPoolExecutor(args.workers)

    def with_dask(scheduler: Any) -> np.ndarray:
        with dask.config.set(scheduler=scheduler, num_workers=args.workers):
            return batch.run_batch(batch.build_batch(source, rows, D, None, spec, 0)).dictionary

    with cluster.connect(workers=args.workers) as client:
        runs = {
            "plain pool": lambda: plain_batch(pool, source, rows, D, spec),
            "dask threads": lambda: with_dask("threads"),
            "local cluster": lambda: with_dask(client),
        }
        timings = measure(runs, args.repeats)
    base = timings["plain pool"]["seconds"]
    for timing in timings.values():
        timing["against_plain"] = timing["seconds"] / base
    return {
        "setting": {k: v for k, v in vars(args).items() if k != "json"},
        "tasks": batch.count_tasks(batch.build_batch(source, rows, D, None, spec, 0)),
        "same_bits": len({d for t in timings.values() for d in t["digests"]}) == 1,
        "runs": timings,
    }


def table(result: dict[str, Any]) -> str:
    """The comparison as text."""
    lines = [f"{result['tasks']} tasks per batch, same bits: {result['same_bits']}"]
    for name, timing in result["runs"].items():
        every = ", ".join(f"{s:.2f}" for s in timing["all_seconds"])
        lines.append(f"{name:14s} {timing['seconds']:6.2f} s  {timing['against_plain']:5.2f}x  ({every})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
