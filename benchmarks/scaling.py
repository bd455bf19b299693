"""Bytes that one batch moves between workers, by a model and as measured, and what that means for many workers.

    python -m benchmarks.scaling --json

The model walks the graph's own tree of sums in integers. It is checked against the bytes that 2 and 4 local
workers really sent each other, then extended to 1024 workers with the speeds given: weak scaling, the batch grows
with the workers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any, NamedTuple

import dask
import numpy as np

from benchmarks._stores import write_store
from dbksvd_dask import cluster
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.kernels.encode import gram_bounds
from dbksvd_dask.plan import seeds, units
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.groups import plan_groups


class Batch(NamedTuple):
    """Sizes of a batch."""

    n_features: int
    n_atoms: int
    n_chunks: int
    n_rounds: int = 8
    lanczos_steps: int = 2
    itemsize: int = 4


class Moved(NamedTuple):
    """Bytes between workers in one batch, all workers together."""

    dictionary: int
    gram: int
    sums: int
    broadcasts: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def crossings(homes: list[int]) -> int:
    """Partial sums that travel in one sum over all chunks.

    >>> crossings([0, 0, 1, 1]), crossings([0, 1, 0, 1]), crossings([0, 0, 1, 1, 2, 2, 3, 3])
    (1, 2, 3)
    """
    moved = 0
    for spans in units.tree_levels(len(homes), batch.FAN_IN):
        moved += sum(homes[i] != homes[a] for a, b in spans for i in range(a, b))
        homes = [homes[a] for a, _ in spans]
    return moved


def bytes_moved(sizes: Batch, workers: int) -> Moved:
    """What a batch moves when every worker has the same number of threads.

    >>> bytes_moved(Batch(768, 4096, 4), 2)
    Moved(dictionary=12582912, gram=41943040, sums=25165824, broadcasts=25165824)
    """
    homes = units.spread(sizes.n_chunks, [1] * workers)
    others = len(set(homes)) - 1
    atoms = sizes.n_features * sizes.itemsize
    bounds = gram_bounds(sizes.n_atoms)
    tiles = sum((b - a) * (d - c) for i, (a, b) in enumerate(bounds) for c, d in bounds[i:]) * sizes.itemsize
    every_round = sizes.n_atoms * atoms  # the atoms of all rounds together
    return Moved(
        dictionary=others * sizes.n_atoms * atoms,
        gram=others * tiles,
        sums=sizes.lanczos_steps * crossings(homes) * every_round,
        broadcasts=sizes.lanczos_steps * others * every_round,
    )


def barriers(sizes: Batch) -> int:
    """Times in a batch at which every worker waits for all others.

    >>> barriers(Batch(768, 4096, 4))
    17
    """
    return 1 + sizes.n_rounds * sizes.lanczos_steps


class Machine(NamedTuple):
    """Speeds for the simulation."""

    core_seconds_per_row: float = 1.7e-4  # d=768, 4096 atoms, k=32: 5.6 core seconds for 32,768 rows
    threads: int = 8
    bytes_per_second: float = 1.0e9  # of one worker's network
    latency: float = 0.01  # from the end of a task to the start of one that waited for it, elsewhere
    task_seconds: float = 0.0005  # of the scheduler, per task


def n_tasks(sizes: Batch, homes: int) -> int:
    """Tasks of a batch."""
    c = sizes.n_chunks
    sums = sum(len(level) for level in units.tree_levels(c, batch.FAN_IN)[:-1])
    tiles = len(gram_bounds(sizes.n_atoms)) * (len(gram_bounds(sizes.n_atoms)) + 1) // 2
    per_round = sizes.lanczos_steps * (c + sums + 1) + c
    return tiles + homes + 4 * c + 4 + sizes.n_rounds * per_round


def simulate(sizes: Batch, workers: int, rows: int, machine: Machine) -> dict[str, float]:
    """Seconds of one batch, by what they are spent on."""
    homes = len(set(units.spread(sizes.n_chunks, [machine.threads] * workers)))
    depth = max(1, (homes - 1).bit_length())
    part = -(-sizes.n_atoms // sizes.n_rounds) * sizes.n_features * sizes.itemsize
    hop = machine.latency + part / machine.bytes_per_second
    gram = bytes_moved(sizes, homes).gram / max(1, homes) / machine.bytes_per_second
    slots = min(sizes.n_chunks, workers * machine.threads)
    waves = -(-sizes.n_chunks // slots)
    compute = machine.core_seconds_per_row * rows / sizes.n_chunks * waves
    # a sum goes up the tree, the result down again
    sync = (barriers(sizes) - 1) * 2 * depth * hop if homes > 1 else 0.0
    scheduler = n_tasks(sizes, homes) * machine.task_seconds
    return {"compute": compute, "gram": gram, "sync": sync, "scheduler": scheduler}


def table_of(args: argparse.Namespace, machine: Machine) -> list[dict[str, Any]]:
    """The model over workers, rows per thread and rounds; one chunk per thread."""
    out = []
    for per_thread, n_rounds in ((8192, 8), (65_536, 8), (65_536, 1)):
        for workers in (2, 4, 16, 64, 256, 1024):
            chunks = workers * machine.threads
            sizes, rows = Batch(args.features, args.atoms, chunks, n_rounds), per_thread * chunks
            spent = simulate(sizes, workers, rows, machine)
            seconds, moved = sum(spent.values()), bytes_moved(sizes, workers)
            out.append(
                {"rows": rows, "rows_per_thread": per_thread, "rounds": n_rounds, "workers": workers}
                | {"tasks": n_tasks(sizes, workers), "barriers": barriers(sizes)}
                | {"bytes_per_worker": moved.total // workers, "seconds": seconds}
                | {"efficiency": machine.core_seconds_per_row * per_thread / seconds, **spent}
            )
    return out


def measured(args: argparse.Namespace, workers: int, path: str) -> int:
    """Bytes that local workers sent each other during one batch."""
    source = as_source(path, args.chunk_size)
    D = seeds.random_atoms(args.atoms, args.features, np.float32, 0)
    groups = plan_groups(args.atoms, args.k, None, 8)
    spec = batch.BatchSpec(groups, EncodeSpec(args.k), 2, args.chunk_size, "keep", 0, np.dtype(np.float32))
    rows = np.arange(args.rows, dtype=np.int64)

    def sent(client: Any) -> int:
        return sum(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())

    with cluster.connect(workers=workers) as client, dask.config.set(scheduler=client):
        batch.run_batch(batch.build_batch(source, rows, D, None, spec, 0))
        before = sent(client)
        batch.run_batch(batch.build_batch(source, rows, D, None, spec, 1))
        return sent(client) - before


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Model against measurement, and the model for many workers."""
    checks = []
    sizes = Batch(args.features, args.atoms, -(-args.rows // args.chunk_size))
    with tempfile.TemporaryDirectory(prefix="dbksvd-scaling-") as folder:
        path = os.path.join(folder, "store.zarr")
        write_store(path, args.rows, args.features, chunk_rows=args.chunk_size)
        for workers in args.workers:
            model, real = bytes_moved(sizes, workers).total, measured(args, workers, path)
            checks.append({"workers": workers, "model": model, "measured": real, "ratio": real / model})
    setting = {"features": args.features, "atoms": args.atoms, "rows": args.rows, "chunks": sizes.n_chunks}
    return {"setting": setting, "checks": checks, "model": table_of(args, Machine())}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the comparison; print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--atoms", type=int, default=4096)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", action="store_true")
    result = compare(args := parser.parse_args(argv))
    if args.json:
        print(json.dumps(result, indent=1))
        return result
    for check in result["checks"]:
        print(f"{check['workers']} workers: model {check['model']}, measured {check['measured']}", end="")
        print(f" bytes, ratio {check['ratio']:.3f}")
    for row in result["model"]:
        moved, spent = row["bytes_per_worker"] / 1e6, row["seconds"]
        print(
            f"{row['rows_per_thread']:6d} rows/thread {row['rounds']} rounds {row['workers']:5d} workers "
            f"{row['tasks']:7d} tasks {moved:5.0f} MB/worker {row['barriers']:3d} barriers {spent:7.2f} s "
            f"efficiency {row['efficiency']:.2f}"
        )
    return result


if __name__ == "__main__":
    main()
