"""Bytes that one batch moves between workers, by a model and as measured, and what that means for many workers.

    python -m benchmarks.scaling --json

Two models, both checked against the bytes that 2 and 4 local workers sent each other. One walks the graph of tasks
of a batch for workers that need not exist, and counts what crosses from one to another. The other is that of
workers that exchange directly, up to 1024 of them: weak scaling, the batch grows with the workers. What a task, a
hop and a batch cost comes from `benchmarks.cluster_overhead`; the speed of the network is an assumption.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.utils import key_split

from benchmarks._sleeping import Planned
from benchmarks._stores import write_store
from dbksvd_dask import cluster
from dbksvd_dask.graph import batch, lines
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.jobs.estimate import BATCH_SECONDS, HOP_SECONDS, NETWORK_SPEED, TASK_SECONDS
from dbksvd_dask.kernels.encode import GRAM_BLOCK
from dbksvd_dask.plan import seeds
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.groups import plan_groups
from dbksvd_dask.plan.pieces import count_pieces, owner, traffic
from dbksvd_dask.plan.shares import Share, covering, plan_shares


class Batch(NamedTuple):
    """Sizes of a batch."""

    n_features: int
    n_atoms: int
    n_chunks: int
    n_rounds: int = 8
    lanczos_steps: int = 2
    itemsize: int = 4

    @property
    def round_bytes(self) -> int:
        """Bytes of the atoms of one round, and of the sums from which they are computed."""
        return -(-self.n_atoms // self.n_rounds) * self.n_features * self.itemsize


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


def shares_of(sizes: Batch, workers: int, threads: int) -> list[Share]:
    """The chunks of workers that need not exist."""
    return plan_shares(sizes.n_chunks, {f"w{w:04d}": threads for w in range(workers)})


def graph_of(sizes: Batch, shares: list[Share]) -> Any:
    """The real graph of a batch of these sizes; its samples and atoms are zeros."""
    rows, D = (np.zeros((n, sizes.n_features), np.float32) for n in (sizes.n_chunks, sizes.n_atoms))
    groups = plan_groups(sizes.n_atoms, 1, None, sizes.n_rounds)
    how = (groups, EncodeSpec(1), sizes.lanczos_steps, 1, "residual", 0, np.dtype(np.float32))
    spec = batch.BatchSpec(*how)
    return batch.build_batch(as_source(rows, 1), np.arange(sizes.n_chunks), D, None, spec, 0, shares=shares)


def crossings(graph: Any) -> Counter[str]:
    """Results of a graph that another worker receives, by the label of the task that gave them.

    A worker that has received a result keeps it for its other tasks. Data of the graph begins with one of those
    that are counted.
    """
    layers = list(graph.dask.layers.values())
    home = layers[0].annotations["workers"] if layers[0].annotations else lambda key: []
    seen = {
        (used, home(key)[0])
        for key, task in dict(graph.__dask_graph__()).items()
        for used in task.dependencies
        if home(key) and home(key) != home(used)
    }
    return Counter(key_split(key) for key, _ in seen)


@cache
def bytes_moved(sizes: Batch, workers: int, threads: int = 8) -> Moved:
    """What a batch moves when every worker has the same number of threads.

    >>> bytes_moved(Batch(768, 4096, 4), 2, threads=1)
    Moved(dictionary=12582912, gram=41058304, sums=50331648, broadcasts=11010048)
    >>> bytes_moved(Batch(768, 4096, 32), 4, threads=8).gram
    0
    """
    shares = shares_of(sizes, workers, threads)
    moved = crossings(graph_of(sizes, shares))
    nodes = max(len(covering(share.start, share.stop, sizes.n_chunks)) for share in shares)
    whole = sizes.n_atoms * sizes.n_features * sizes.itemsize
    together = -(-len(shares) // -(-len(shares) // 8))  # workers that share the tiles of a gram
    up = sum(n for label, n in moved.items() if label in ("lanczos-start", "lanczos-product"))
    across = sum(n for label, n in moved.items() if label.endswith("-sum") and label.startswith("lanczos"))
    down = sum(n for label, n in moved.items() if label in ("round", "copied-round", "lanczos-step"))
    down += moved["copied-lanczos-step"]
    return Moved(
        dictionary=(moved["setting"] - 1 + moved["setting-copy"] + moved["copied-setting-copy"]) * whole,
        gram=moved["gram-tiles"] * _tile_bytes(sizes) // together,
        sums=(up + across) * nodes * sizes.round_bytes,
        broadcasts=down * sizes.round_bytes,
    )


def _tile_bytes(sizes: Batch) -> int:
    """Bytes of the tiles of the upper triangle of a gram."""
    ends = [min(GRAM_BLOCK, sizes.n_atoms - a) for a in range(0, sizes.n_atoms, GRAM_BLOCK)]
    return sum(a * b for i, a in enumerate(ends) for b in ends[i:]) * sizes.itemsize


def barriers(sizes: Batch) -> int:
    """Times in a batch at which every worker waits for all others.

    >>> barriers(Batch(768, 4096, 4))
    17
    """
    return 1 + sizes.n_rounds * sizes.lanczos_steps


class Machine(NamedTuple):
    """Speeds for the simulation; those of Dask from `benchmarks.cluster_overhead` on 2 to 8 workers."""

    planned: Planned = Planned()  # seconds of a chunk of 8,192 rows
    threads: int = 8
    bytes_per_second: float = NETWORK_SPEED  # of one worker: an assumption
    hop: float = HOP_SECONDS
    task_seconds: float = TASK_SECONDS
    batch_seconds: float = BATCH_SECONDS


def pieces_of(sizes: Batch, workers: int) -> int:
    """Pieces into which workers cut the arrays of a round.

    >>> [pieces_of(Batch(d, 4096, 512), n) for d, n in ((768, 2), (768, 64), (48, 64))]
    [2, 16, 1]
    """
    rows = sizes.n_atoms // sizes.n_rounds
    return count_pieces(rows * sizes.n_features * sizes.itemsize, workers, rows)


def sent_bytes(sizes: Batch, workers: int) -> int:
    """Bytes of one batch between workers that exchange directly, all together.

    In any number of pieces, sums join all workers but one to the rest, and results reach all but one. Pieces of
    the dictionary first go to the workers that pass them on.

    >>> sent_bytes(Batch(768, 4096, 16), 2)
    69206016
    >>> sent_bytes(Batch(48, 4096, 16), 2)
    3932160
    """
    whole, n = sizes.n_atoms * sizes.n_features * sizes.itemsize, pieces_of(sizes, workers)
    exchanges = sizes.n_rounds * sizes.lanczos_steps
    handed_out = sum(owner(p, workers, n).bit_count() for p in range(n)) * whole // n if n > 1 else 0
    return (workers - 1) * (whole + 2 * exchanges * sizes.round_bytes) + handed_out


SPENT = ("compute", "network", "waiting", "scheduling")


def simulate(sizes: Batch, workers: int, rows: int, machine: Machine) -> dict[str, float]:
    """Seconds of one batch, by what they are spent on; every worker has cores and a network of its own.

    One task per worker; sums go up and results down, in pieces, one message after the other. The steps between,
    which workers share where there are several pieces, count in full.
    """
    passed = traffic(workers, pieces_of(sizes, workers))
    scale = rows / sizes.n_chunks / 8192
    seconds = machine.planned.compute(machine.threads, sizes.n_rounds, sizes.lanczos_steps)
    fixed = machine.planned.compute(machine.threads, 0, 0) - machine.planned.encode - machine.planned.close
    exchanges = sizes.n_rounds * sizes.lanczos_steps
    whole = sizes.n_atoms * sizes.n_features * sizes.itemsize
    moved = exchanges * passed.arrays * sizes.round_bytes + passed.dictionaries * whole
    hops = exchanges * passed.hops + passed.first_hops + passed.hops // 2
    return {
        "compute": scale * (seconds - fixed) + fixed,
        "network": moved / machine.bytes_per_second,
        "waiting": hops * machine.hop + machine.batch_seconds,
        "scheduling": workers * machine.task_seconds,
    }


def table_of(args: argparse.Namespace, machine: Machine) -> list[dict[str, Any]]:
    """The model over workers, rows per thread and rounds; one chunk per thread."""
    out = []
    for per_thread, n_rounds in ((8192, 8), (65_536, 8), (65_536, 1)):
        for workers in (2, 4, 16, 64, 256, 1024):
            chunks = workers * machine.threads
            sizes, rows = Batch(args.features, args.atoms, chunks, n_rounds), per_thread * chunks
            spent = simulate(sizes, workers, rows, machine)
            seconds = sum(spent.values())
            out.append(
                {"rows": rows, "rows_per_thread": per_thread, "rounds": n_rounds, "workers": workers}
                | {"tasks": workers, "barriers": barriers(sizes)}
                | {"bytes_per_worker": sent_bytes(sizes, workers) // workers, "seconds": seconds}
                | {"efficiency": spent["compute"] / seconds, **spent}
            )
    return out


def line_bytes() -> int:
    """In a worker: bytes of the messages that its tasks have given their lines since the first call."""
    if not hasattr(lines.Line, "counted"):
        real = lines.Line.put

        def put(self: lines.Line, kind: int, values: Sequence[lines.Packed] = ()) -> None:
            lines.Line.counted += sum(len(frame) for packed in values for frame in packed)
            real(self, kind, values)

        lines.Line.counted, lines.Line.put = 0, put
    return int(lines.Line.counted)


def measured(args: argparse.Namespace, workers: int, path: str) -> dict[str, int]:
    """Bytes that local workers sent each other during one batch, by both ways to exchange.

    Those that exchange directly compute without a gram, whose tiles they would share.
    """
    source = as_source(path, args.chunk_size)
    D = seeds.random_atoms(args.atoms, args.features, np.float32, 0)
    groups = plan_groups(args.atoms, args.k, None, 8)
    rows = np.arange(args.rows, dtype=np.int64)

    def sent(client: Any, way: str) -> int:
        if way == "direct":
            return sum(client.run(line_bytes).values())
        return sum(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())

    out = {}
    with cluster.connect(workers=workers) as client:
        for way, gram in (("tasks", "auto"), ("direct", "never")):
            how = (EncodeSpec(args.k, gram=gram), 2, args.chunk_size, "keep", 0, np.dtype(np.float32))
            spec = batch.BatchSpec(groups, *how)
            with dask.config.set({"scheduler": client, batch.EXCHANGE: way}):
                batch.run_batch(batch.build_batch(source, rows, D, None, spec, 0))
                before = sent(client, way)
                batch.run_batch(batch.build_batch(source, rows, D, None, spec, 1))
                out[way] = sent(client, way) - before
    return out


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Model against measurement, and the model for many workers."""
    checks = []
    sizes = Batch(args.features, args.atoms, -(-args.rows // args.chunk_size))
    with tempfile.TemporaryDirectory(prefix="dbksvd-scaling-") as folder:
        path = os.path.join(folder, "store.zarr")
        write_store(path, args.rows, args.features, chunk_rows=args.chunk_size)
        for workers in args.workers:
            models = {"tasks": bytes_moved(sizes, workers, threads=1).total, "direct": sent_bytes(sizes, workers)}
            for way, real in measured(args, workers, path).items():
                found = {"model": models[way], "measured": real, "ratio": real / models[way]}
                checks.append({"workers": workers, "exchange": way, **found})
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
        print(f"{check['workers']} workers, {check['exchange']}: model {check['model']}, measured ", end="")
        print(check["measured"], end="")
        print(f" bytes, ratio {check['ratio']:.3f}")
    for row in result["model"]:
        moved, spent = row["bytes_per_worker"] / 1e6, row["seconds"]
        print(
            f"{row['rows_per_thread']:6d} rows/thread {row['rounds']} rounds {row['workers']:5d} workers "
            f"{row['tasks']:7d} tasks {moved:5.0f} MB/worker {spent:7.2f} s efficiency {row['efficiency']:.2f} ("
            + ", ".join(f"{name} {row[name]:.2f}" for name in SPENT)
            + ")"
        )
    return result


if __name__ == "__main__":
    main()
