"""What a job will take: memory, bytes and seconds. `dbksvd fit --plan` and the like print these figures.

Memory and bytes are computed from sizes. Seconds rest on short measurements of this machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.plan.memory import BASE_BYTES, gram_bytes, tile_bytes
from dbksvd_dask.plan.pieces import Traffic, count_pieces, traffic
from dbksvd_dask.plan.screening import n_passes
from dbksvd_dask.plan.shares import computes_gram_alone
from dbksvd_dask.store.paths import PathLike

# Python with NumPy, Zarr and what import and shuffle need, before any data; a process that also loads the kernels
# needs plan.memory.BASE_BYTES
FILES_BASE_BYTES = 250_000_000
# An iteration and an encode cost this many times their bare products (benchmarks.iteration gives 1.6 to 2.4 for
# an iteration, benchmarks.jobs_encode 1.3 to 1.7 for an encode, by k and number of features).
ITERATION_RATIO = 2.0
ENCODE_RATIO = 1.5
# What the estimated seconds leave out: it depends on the machine and not on the data.
START_UP = "start-up: a few seconds, and some ten more the first time, when the kernels are compiled"
# Written to measure a disk: enough to outweigh opening and closing a file.
SAMPLE_BYTES = 1 << 25


# ---------------------------------------------------------------------------------------------- sizes


def import_memory(chunk_bytes: int, threads: int, piece_bytes: int | None) -> int:
    """Return the peak memory of an import.

    Parameters
    ----------
    chunk_bytes : int
        One chunk of the new store.
    threads : int
        Threads that store.
    piece_bytes : int or None
        Size of the pieces in which rows are copied from file to store; None if chunks are put together whole.

    Examples
    --------
    >>> import_memory(32_000_000, 2, None) - import_memory(32_000_000, 2, 1_000_000)
    92000000
    """
    rows = (threads + 1) * chunk_bytes if piece_bytes is None else 2 * threads * piece_bytes
    return FILES_BASE_BYTES + rows


def shuffle_memory(n_samples: int, nbytes: int, block_bytes: float, mapped_bytes: int | None) -> int:
    """Return the peak memory of a shuffle.

    Parameters
    ----------
    n_samples, nbytes : int
        Rows of the store, and their bytes with all aligned arrays.
    block_bytes : float
        Rows that are mixed in memory at a time, with all aligned arrays.
    mapped_bytes : int or None
        In one pass: bytes that are mapped or held beside the order of the rows; None for two passes.

    Examples
    --------
    >>> shuffle_memory(1000, 4_000_000, 1_000_000, None) - FILES_BASE_BYTES
    3000000
    >>> shuffle_memory(1000, 4_000_000, 1_000_000, 4_000_000) - FILES_BASE_BYTES
    4004000
    """
    if mapped_bytes is not None:
        return FILES_BASE_BYTES + mapped_bytes + 4 * n_samples
    return FILES_BASE_BYTES + round(3 * min(block_bytes, nbytes))


class EncodeSizes(NamedTuple):
    """Sizes that decide the memory of an encode."""

    n_features: int
    n_atoms: int
    n_top: int
    chunk_rows: int  # of the codes: read at a time
    block_rows: int  # encoded at a time
    unit_bytes: int  # codes of one unit
    stored_itemsize: int
    read_itemsize: int
    itemsize: int  # of the dictionary
    gram: bool = True  # whether there is one
    whitened: bool = False  # whether samples are encoded in other coordinates


def encode_memory(sizes: EncodeSizes, threads: int) -> int:
    """Return the peak memory of an encode on `threads` threads.

    Examples
    --------
    >>> sizes = EncodeSizes(768, 4096, 64, 8192, 4320, 2_000_000, 2, 4, 4)
    >>> [encode_memory(sizes, threads) - BASE_BYTES for threads in (1, 2)]
    [157156480, 234621184]
    """
    s = sizes
    task = s.chunk_rows * s.n_features * (s.stored_itemsize + s.read_itemsize)  # a chunk as stored and as read
    task += 2 * s.block_rows * s.n_features * s.itemsize  # a block and its residual
    task += tile_bytes(s.n_features, s.n_atoms, s.itemsize, s.gram)  # the products of a tile
    task += s.block_rows * s.n_features * s.itemsize * s.whitened
    task += s.unit_bytes + s.n_atoms * (s.n_top * 12 + 40)  # codes and sums of a unit
    assembled = gram_bytes(s.n_atoms, s.itemsize) if s.gram else 0
    held = s.n_atoms * s.n_atoms * s.itemsize * s.gram
    # the tiles of a gram are gone when the first block is encoded
    dictionary = s.n_atoms * s.n_features * s.itemsize
    if s.whitened:  # the map and its copy; the atoms mapped, and once more meanwhile
        square = s.n_features**2 * s.itemsize
        held += square + dictionary
        assembled = max(assembled + square + dictionary, 2 * (square + dictionary))
    return BASE_BYTES + dictionary + max(assembled, held + threads * task)


class FitWork(NamedTuple):
    """Sizes that decide what a fit reads and computes.

    Examples
    --------
    >>> work = FitWork(n_features=16, n_atoms=24, n_iter=2, trained=512, held=60, mean_rows=540, stored_itemsize=4)
    >>> work.read_bytes, work.flops
    (75008, 522240.0)
    >>> white = work._replace(covariance_rows=540)
    >>> white.read_bytes - work.read_bytes, white.flops - work.flops
    (34560, 600064.0)
    """

    n_features: int
    n_atoms: int
    n_iter: int
    trained: int  # rows of all batches together
    held: int  # validation rows, measured after each batch
    mean_rows: int  # rows that the mean is taken of
    stored_itemsize: int
    passes: int = 1  # products with all atoms per sample
    gram: bool = True  # whether a batch computes one
    covariance_rows: int = 0  # rows that it is taken of, in a pass of its own; 0 without whitening

    @property
    def read_bytes(self) -> int:
        """Bytes read from the store in the whole fit."""
        rows = self.trained + self.n_iter * self.held + self.mean_rows + self.covariance_rows
        return rows * self.n_features * self.stored_itemsize

    @property
    def flops(self) -> float:
        """Operations of the products of all rows with the atoms, of a gram per batch, and of whitening."""
        encoded = self.trained + self.n_iter * self.held
        rows = self.passes * encoded + self.n_iter * self.n_atoms * self.gram
        mapped = encoded + self.covariance_rows if self.covariance_rows else 0
        return 2.0 * self.n_features * (self.n_atoms * rows + self.n_features * mapped)


def fit_seconds(work: FitWork, reader: Any, dtype: Any) -> float:
    """Estimate the seconds of a fit on the cores of this machine.

    Parameters
    ----------
    work : FitWork
    reader : `store.reader.RowReader`
    dtype : dtype
        Of the computation.
    """
    speed = product_speed(work.n_features, work.n_atoms, dtype)
    return ITERATION_RATIO * work.flops / speed + work.read_bytes / read_speed(reader)


class Workers(NamedTuple):
    """Worker processes of a cluster, and threads of each."""

    processes: int
    threads: int


# Assumed of a cluster: bytes per second of a worker's network. Measured by benchmarks.cluster_overhead
# (docs/scaling.md): seconds of a message from one worker to another beside its bytes, of a batch from its
# submission until workers compute and from their last sums to the driver, and of the scheduler per task.
NETWORK_SPEED, HOP_SECONDS, BATCH_SECONDS, TASK_SECONDS = 1.0e9, 0.0004, 0.03, 0.0009
ASSUMED = (
    "cores as fast as those of this machine, 1 GB/s per worker, 0.4 ms per hop, 30 ms per batch and 0.9 ms of the "
    "scheduler per task"
)


class BatchShape(NamedTuple):
    """What decides how a batch is spread over workers."""

    n_chunks: int
    n_rounds: int
    lanczos_steps: int
    atom_bytes: int  # of one atom
    n_tasks: int


def _traffic(work: FitWork, batch: BatchShape, workers: Workers) -> Traffic:
    """Return what workers send each other in a batch."""
    n_workers, rows = min(workers.processes, batch.n_chunks), work.n_atoms // batch.n_rounds
    return traffic(n_workers, count_pieces(rows * batch.atom_bytes, n_workers, rows))


def moved_bytes(work: FitWork, batch: BatchShape, workers: Workers) -> int:
    """Return the bytes that the busiest worker receives in one batch: dictionary, gram, sums and new atoms.

    Examples
    --------
    >>> work, batch = FitWork(768, 4096, 1, 65536, 0, 0, 2), BatchShape(8, 8, 2, 3072, 4)
    >>> moved_bytes(work, batch, Workers(4, 2)), moved_bytes(work, batch, Workers(1, 8))
    (90177536, 0)
    """
    passed = _traffic(work, batch, workers)
    if passed.hops == 0:
        return 0
    sums = (1 + passed.arrays / 2) * batch.lanczos_steps  # what comes up to the busiest worker, and a result
    return int((1 + sums) * work.n_atoms * batch.atom_bytes) + _gram_tiles(work, batch, workers)


def _gram_tiles(work: FitWork, batch: BatchShape, workers: Workers) -> int:
    """Return the bytes of the tiles of a gram that workers share; 0 if each computes all of them."""
    if not work.gram or computes_gram_alone(work.n_features, workers.threads):
        return 0
    return work.n_atoms**2 * batch.atom_bytes // work.n_features // 2


def cluster_seconds(
    work: FitWork, batch: BatchShape, workers: Workers, core_speed: float, read_speed: float
) -> dict[str, float]:
    """Estimate the seconds of a fit on a cluster, by what they are spent on; see docs/scaling.md.

    Parameters
    ----------
    core_speed : float
        Operations per second of one core.
    read_speed : float
        Bytes per second that one worker reads.

    Examples
    --------
    >>> work = FitWork(768, 4096, 10, 655_360, 0, 0, 2)
    >>> spent = cluster_seconds(work, BatchShape(8, 8, 2, 3072, 4), Workers(4, 2), 5e10, 1e9)
    >>> {name: round(seconds, 1) for name, seconds in spent.items()}
    {'compute': 21.9, 'read': 0.3, 'network': 0.9, 'wait': 0.6, 'scheduler': 0.0}
    """
    processes = min(workers.processes, batch.n_chunks)
    slots = min(batch.n_chunks, workers.processes * workers.threads)
    idle = -(-batch.n_chunks // slots) * slots / batch.n_chunks  # threads without a chunk in the last turn
    passed, exchanges = _traffic(work, batch, workers), batch.n_rounds * batch.lanczos_steps
    # the dictionary goes down once, sums and results go up and down in every exchange
    sent = (passed.dictionaries + batch.lanczos_steps * passed.arrays) * work.n_atoms * batch.atom_bytes
    sent += _gram_tiles(work, batch, workers) if passed.hops else 0
    hops = exchanges * passed.hops + passed.first_hops + passed.hops // 2  # the end goes up only
    return {
        "compute": ITERATION_RATIO * work.flops / (core_speed * slots) * idle,
        "read": work.read_bytes / (read_speed * processes),
        "network": work.n_iter * sent / NETWORK_SPEED,
        "wait": work.n_iter * (hops * HOP_SECONDS + BATCH_SECONDS),
        "scheduler": work.n_iter * batch.n_tasks * TASK_SECONDS,
    }


# ---------------------------------------------------------------------------------------------- jobs


def estimate_import(
    source: PathLike | Sequence[PathLike], path: PathLike, *, part: tuple[int, int] | None = None, **options: Any
) -> dict[str, Any]:
    """Estimate what an import, or one part of it, will take.

    Parameters
    ----------
    source, path, part, **options : as of `import_activations`

    Returns
    -------
    dict
        Sizes, passes, bytes and seconds; seconds are None where the target cannot be written to yet.
    """
    from dbksvd_dask.importers.selection import Rules
    from dbksvd_dask.jobs._parts import check_part_alone
    from dbksvd_dask.jobs.import_ import RULES, ImportJob

    rules = Rules(**{name: options.pop(name) for name in RULES if name in options})
    job = ImportJob(source, path, rules=rules, **options)
    try:
        return _estimate_import(job, check_part_alone(part, job.force))
    finally:
        job.close()


def _estimate_import(job: Any, part: tuple[int, int] | None) -> dict[str, Any]:
    from dbksvd_dask.jobs.base import storing_threads
    from dbksvd_dask.store.chunk_file import PIECE_BYTES
    from dbksvd_dask.store.dtypes import stored_dtype

    rows, first = job.rows, min(job.rows.n_rows, job.chunk_rows)
    row_bytes = rows.n_features * stored_dtype(rows.dtype).itemsize
    chunks = job.chunks_of(part)  # of all rows: which are left out is not known yet
    n_rows = min(chunks.stop * job.chunk_rows, rows.n_rows) - min(chunks.start * job.chunk_rows, rows.n_rows)
    # linked rows are read for their checksums only
    passes = int(job.verify) if job.link else 1 + job.rules.reads_rows
    total = n_rows * row_bytes
    # rows that are stored as they are in their files are copied piece by piece
    copied = job.rules.keep_all and rows.spans(0, first) is not None
    read, write = _seconds_per_byte(lambda: rows.read(0, first)), 0.0 if job.link else write_seconds(job.path)
    # reading and writing overlap; a pass of the rules and the read-back come on top
    again = passes if job.link else passes - 1 + job.verify
    return {
        "source": rows.source,
        "files": len(rows.members),
        "rows": n_rows,
        "features": rows.n_features,
        "dtype": rows.dtype,
        "passes": passes,
        "read_bytes": total * passes,
        "written_bytes": n_rows * job.written_row_bytes,
        "memory_bytes": import_memory(
            job.chunk_rows * row_bytes, storing_threads(), PIECE_BYTES if copied else None
        ),
        "estimated_seconds": None if write is None else total * ((not job.link) * max(read, write) + again * read),
    }


def estimate_shuffle(
    source: PathLike, path: PathLike, *, part: tuple[int, int] | None = None, **options: Any
) -> dict[str, Any]:
    """Estimate what a shuffle, or one part of it if all run at the same time, will take.

    Parameters
    ----------
    source, path, part, **options : as of `shuffle_activations`
    """
    from dbksvd_dask.jobs._parts import check_part_alone
    from dbksvd_dask.jobs._passes import MOST_MAPPED_BYTES
    from dbksvd_dask.jobs.shuffle import ShuffleJob
    from dbksvd_dask.store.writer import require_free

    job = ShuffleJob(source, path, **options)
    require_free(job.path, job.force, "force")
    reader, nbytes = job.reader, job.nbytes
    passes = 1 if check_part_alone(part, job.force) is None and job.fits_one_pass() else 2
    rows = sum(stop - start for start, stop in map(job.plan.bounds, job.buckets_of(part)))
    own = nbytes * rows // reader.n_samples
    read = _seconds_per_byte(lambda: reader.read_stored(*reader.chunk_bounds(0)))
    write = write_seconds(job.path)
    beside = nbytes - reader.nbytes  # aligned arrays are held, rows are mapped
    mapped = beside + (reader.nbytes if reader.nbytes <= MOST_MAPPED_BYTES else 0)
    block = job.plan.block_rows * nbytes / job.plan.n_samples
    return {
        "source": reader.path,
        "rows": rows,
        "features": reader.n_features,
        "passes": passes,
        "blocks": len(job.buckets_of(part)),
        "read_bytes": 2 * own,
        "written_bytes": passes * own,
        "scratch": job.scratch if passes == 2 else None,
        "scratch_bytes": nbytes if passes == 2 else 0,
        "memory_bytes": shuffle_memory(job.plan.n_samples, nbytes, block, mapped if passes == 1 else None),
        "estimated_seconds": None if write is None else own * (2 * read + passes * write),
    }


def estimate_encode(
    store: PathLike,
    dictionary: PathLike,
    path: PathLike,
    *,
    part: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Estimate what an encode, or one part of it, will take: on the current workers, or on this machine.

    Parameters
    ----------
    store, dictionary, path, part, **options : as of `encode_store`
    """
    import dask

    from dbksvd_dask.graph.run import worker_threads
    from dbksvd_dask.jobs._units import BLOCK_ROWS
    from dbksvd_dask.jobs.encode import EncodeJob

    job = EncodeJob(store, dictionary, path, **options)
    plan, reader, atoms = job.plan, job.reader, job.dictionary.atoms
    units = range(plan.n_units) if part is None else plan.part_units(*part)
    rows = sum(stop - start for start, stop in map(plan.unit_bounds, units))
    read_bytes = rows * reader.row_bytes
    gram = job.how.spec.uses_gram(plan.n_atoms)
    passes = 1 if gram else n_passes(plan.k, plan.n_atoms)
    whitened = reader.n_features if job.how.whitening is not None else 0
    flops = 2.0 * rows * reader.n_features * (passes * plan.n_atoms + whitened)
    speed = product_speed(reader.n_features, plan.n_atoms, atoms.dtype)
    sizes = EncodeSizes(
        n_features=reader.n_features,
        n_atoms=plan.n_atoms,
        n_top=plan.n_top,
        chunk_rows=plan.read_rows,
        block_rows=BLOCK_ROWS,
        unit_bytes=plan.nbytes(plan.unit_rows),
        stored_itemsize=reader.stored.itemsize,
        read_itemsize=reader.dtype.itemsize,
        itemsize=atoms.itemsize,
        gram=gram,
        whitened=job.how.whitening is not None,
    )
    workers = worker_threads()
    threads = sum(workers.values())
    elsewhere = list(workers) != [""]
    if elsewhere:  # a unit is the least share of a thread
        speed *= min(threads, max(len(units), 1)) / dask.system.CPU_COUNT
    return {
        "store": reader.path,
        "rows": rows,
        "features": reader.n_features,
        "atoms": plan.n_atoms,
        **plan.params,
        "passes": 1,
        "gram_bytes": gram * plan.n_atoms**2 * atoms.itemsize,
        "products_per_sample": passes,
        "units": len(units),
        **({"workers": len(workers), "threads": threads} if elsewhere else {}),
        "read_bytes": read_bytes,
        "written_bytes": plan.nbytes(rows),
        "memory_bytes": encode_memory(sizes, max(workers.values()) if elsewhere else dask.system.CPU_COUNT),
        "estimated_seconds": ENCODE_RATIO * flops / speed + read_bytes / read_speed(reader),
        "estimated_for": f"{'cores as fast as those' if elsewhere else 'the cores'} of this machine",
        "not_estimated": START_UP,
    }


# ---------------------------------------------------------------------------------------------- measurements


def product_speed(n_features: int, n_atoms: int, dtype: Any = np.float32) -> float:
    """Measure the matrix product ``Y D^T`` on all cores, in floating-point operations per second.

    Parameters
    ----------
    n_features, n_atoms : int
        Inner and outer size; capped at 4096 each, to keep it short.
    """
    d, m, n = min(n_features, 4096), min(n_atoms, 4096), 512
    rng = np.random.default_rng(0)
    Y, D = rng.random((n, d)).astype(dtype), rng.random((m, d)).astype(dtype)
    best, began = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - began < 0.2:
        start = time.perf_counter()
        np.dot(Y, D.T)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n * d * m / max(best, 1e-9)


def read_speed(reader: Any) -> float:
    """Measure reading one chunk of a store, in bytes per second.

    Parameters
    ----------
    reader : `store.reader.RowReader`
    """
    best = float("inf")
    for _ in range(3):  # one busy moment must not decide the estimate
        began = time.perf_counter()
        chunk = reader.read_stored(*reader.chunk_bounds(reader.n_chunks - 1))
        best = min(best, time.perf_counter() - began)
    return float(chunk.nbytes / max(best, 1e-9))


def _seconds_per_byte(read: Any) -> float:
    """Measure one call that returns an array."""
    began = time.perf_counter()
    array = read()
    return float((time.perf_counter() - began) / array.nbytes)


def write_seconds(path: str) -> float | None:
    """Measure the seconds until a byte reaches the disk of `path`; None where that cannot be tried."""
    folder = os.path.dirname(os.path.abspath(path))
    if "://" in path or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return None
    content = os.urandom(1 << 20)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(SAMPLE_BYTES >> 20):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # full, or read-only
        return None
    return (time.perf_counter() - began) / SAMPLE_BYTES
