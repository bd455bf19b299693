"""Integers in, integers out: the most memory that a fit takes in one process, stated before it runs.

The plan is an upper bound: it adds up what can be alive at the same time in the worst order of tasks, and a test
measures that real runs stay below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dbksvd_dask._words import format_bytes
from dbksvd_dask.errors import MemoryPlanError
from dbksvd_dask.plan.encoders import ENCODERS, able
from dbksvd_dask.plan.screening import uses_gram
from dbksvd_dask.plan.units import part_rows, tile_rows

# A process with numpy, numba, scikit-learn, Dask and Zarr loaded: 360 MiB measured, 421 MiB when it is the first
# to run and compiles the kernels.
BASE_BYTES = 440 << 20
# Columns per tile of the gram, as in kernels.encode; a test compares.
GRAM_BLOCK = 960
# Dictionaries alive at once besides the new atoms: the state's, the previous one, the one extrapolated from
# them, the graph's copy, the merged one and the result on its way.
_DICTIONARIES = 6
# What the allocator holds between arrays that come and go.
_SLACK = 1.1
# Most of the memory of a process that a gram may take; dictionary, samples and libraries need the rest.
_GRAM_SHARE = 0.8


class FitSizes(NamedTuple):
    """Everything about a fit that decides its memory.

    Attributes
    ----------
    n_features, n_atoms, k, batch_size, chunk_size, n_rounds, lanczos_steps : as in `dbksvd_dask.DBKSVD`
    groups : sizes of the Matryoshka groups; empty for one
    validation : rows set aside
    itemsize : bytes of a number while computing: 4, or 8 for float64 samples
    read_itemsize : bytes of a number as it is read
    reads_ahead : the next batch may be read while this one is computed (stores)
    encoder, gram : as in `dbksvd_dask.DBKSVD`
    rows_first : other tasks bring the rows of a task into memory before it begins (Dask arrays)
    whitened : samples and atoms are multiplied by a matrix of n_features x n_features
    """

    n_features: int
    n_atoms: int
    k: int
    batch_size: int
    chunk_size: int
    n_rounds: int = 8
    lanczos_steps: int = 2
    groups: tuple[int, ...] = ()
    validation: int = 0
    itemsize: int = 4
    read_itemsize: int = 4
    reads_ahead: bool = False
    encoder: str = "mp"
    gram: str = "auto"
    rows_first: bool = False
    whitened: bool = False


class MemoryPlan(NamedTuple):
    """Peak bytes of one worker process, by what they are for."""

    base: int  # Python and its libraries
    dictionary: int  # copies of the dictionary
    gram: int  # the gram and its tiles
    states: int  # residuals and codes of the chunks this worker holds
    working: int  # chunks being encoded or refreshed, one per thread
    sums: int  # partial sums of a round, and new atoms
    ahead: int  # chunks of the next batch, where reading is slow

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)

    def describe(self) -> str:
        """The plan in one line, largest part first."""
        parts = sorted(
            ((name, value) for name, value in self._asdict().items() if value), key=lambda item: -item[1]
        )
        shares = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts)
        return f"{format_bytes(self.total)} ({shares})"


def state_bytes(sizes: FitSizes, n: int) -> int:
    """Bytes of one chunk of n samples between two rounds.

    >>> state_bytes(FitSizes(768, 4096, 32, 65536, 8192), 8192)
    30998592
    """
    residual = n * sizes.n_features * sizes.itemsize
    codes = n * sizes.k * (4 + sizes.itemsize)
    by_round = sizes.n_rounds * (n + 1) * 8 + n * sizes.k * 12
    return residual + codes + by_round + n * 8


def _uses_gram(sizes: FitSizes, n_atoms: int) -> bool:
    return uses_gram(sizes.gram, sizes.encoder, n_atoms)


def tile_bytes(n_features: int, n_atoms: int, itemsize: int, gram: bool) -> int:
    """Bytes of the products of one tile and, without a gram, of its residuals and the search for candidates.

    >>> tile_bytes(640, 65536, 4, True), tile_bytes(640, 65536, 4, False)
    (125829120, 129335296)
    """
    rows = tile_rows(n_atoms)
    searching = 0 if gram else 2 * rows * n_features * itemsize + n_atoms * (8 + 2 * itemsize)
    return rows * n_atoms * itemsize + searching


def _encoding_bytes(sizes: FitSizes, n: int) -> int:
    """Bytes of one task that encodes n samples, besides the state that it makes."""
    rows = n * sizes.n_features
    # as read, in pieces and put together; widened; and the products of a tile
    tile = tile_bytes(sizes.n_features, sizes.n_atoms, sizes.itemsize, _uses_gram(sizes, sizes.n_atoms))
    white = (rows + sizes.n_features**2) * sizes.itemsize if sizes.whitened else 0
    return rows * (2 * sizes.read_itemsize + sizes.itemsize) + tile + n * 16 + white


def gram_bytes(n_atoms: int, itemsize: int) -> int:
    """Bytes of a gram while it is assembled from the tiles of its upper triangle.

    >>> gram_bytes(16384, 4), gram_bytes(65536, 4)
    (1642070016, 25895632896)
    """
    tiles = (n_atoms * n_atoms + n_atoms * min(n_atoms, GRAM_BLOCK)) // 2
    return (n_atoms * n_atoms + tiles) * itemsize


def _gram_bytes(sizes: FitSizes) -> int:
    """Bytes of the grams of a batch or, if more, of the gram of the whole dictionary, which held-out rows need."""
    groups = sum(gram_bytes(m, sizes.itemsize) for m in sizes.groups if _uses_gram(sizes, m))
    if sizes.groups and not sizes.validation:
        return groups
    whole = gram_bytes(sizes.n_atoms, sizes.itemsize) if _uses_gram(sizes, sizes.n_atoms) else 0
    return max(groups, whole)


def plan_fit(sizes: FitSizes, workers: int = 1, threads: int = 1, together: bool = False) -> MemoryPlan:
    """Peak memory of a fit per worker process.

    Parameters
    ----------
    workers : worker processes; 1 also for a fit on threads
    threads : threads of each
    together : whether one task takes all chunks of a worker, as on a cluster; old and new states of all of them
        are then in memory at once

    Examples
    --------
    >>> plan = plan_fit(FitSizes(768, 4096, 32, 65536, 8192, read_itemsize=2), workers=1, threads=2)
    >>> plan.describe()
    '1.20 GB (base 461.4 MB, states 272.8 MB, working 192.9 MB, gram 119.4 MB, dictionary 110.7 MB, sums 46.7 MB)'
    """
    n = min(sizes.chunk_size, sizes.batch_size)
    n_chunks = -(-sizes.batch_size // n)
    own = -(-n_chunks // workers)  # chunks of the worker that has most
    busy = min(threads, own)
    atoms = sizes.n_features * sizes.itemsize
    round_atoms = -(-sizes.n_atoms // sizes.n_rounds) * atoms
    # a chunk being encoded, and the residual of one being refreshed: its memory is kept for the next
    renewed = n * (sizes.n_features + sizes.k) * sizes.itemsize + 2 * round_atoms
    working = busy * (_encoding_bytes(sizes, n) + renewed)
    if sizes.whitened:  # while the covariance is summed: samples twice and a matrix per thread in float64
        summing = n * sizes.n_features * (2 * sizes.read_itemsize + sizes.itemsize + 16) + 8 * sizes.n_features**2
        working = max(working, busy * summing + 48 * sizes.n_features**2)
    if together:
        waiting = n * (sizes.n_features + sizes.k) * sizes.itemsize
        waiting += n * sizes.n_features * sizes.read_itemsize * sizes.rows_first
        working += (own - busy) * waiting
    if sizes.validation:
        part = part_rows(sizes.validation, sizes.validation)
        measuring = _encoding_bytes(sizes, part) + part * sizes.n_features * sizes.itemsize
        working = max(working, min(threads, 4) * measuring)
    # the parts of every chunk and the pairs that they are added up to, the Lanczos vectors, all new atoms
    sums = (2 * own + sizes.lanczos_steps + 1) * round_atoms + sizes.n_atoms * atoms
    mapped = 0
    if sizes.whitened:  # both maps and a copy; the atoms in their coordinates, and once more while they are mapped
        mapped = 24 * sizes.n_features**2 + 2 * sizes.n_atoms * atoms
    parts = (
        (_DICTIONARIES + busy) * sizes.n_atoms * atoms + mapped,
        _gram_bytes(sizes),
        own * state_bytes(sizes, n),
        working,
        sums,
        own * n * sizes.n_features * sizes.read_itemsize * sizes.reads_ahead,
    )
    return MemoryPlan(BASE_BYTES, *(int(_SLACK * part) for part in parts))


def largest_batch(sizes: FitSizes, limit: int, workers: int = 1, threads: int = 1, together: bool = False) -> int:
    """Largest batch_size, in whole chunks, whose plan stays within `limit` bytes; 0 if there is none.

    >>> largest_batch(FitSizes(768, 4096, 32, 65536, 8192), 1_000_000_000)
    32768
    """
    low, high = 0, -(-sizes.batch_size // sizes.chunk_size)
    while low < high:
        middle = (low + high + 1) // 2
        tried = sizes._replace(batch_size=middle * sizes.chunk_size)
        if plan_fit(tried, workers, threads, together).total <= limit:
            low = middle
        else:
            high = middle - 1
    return low * sizes.chunk_size


def check_limit(
    sizes: FitSizes, limit: int, workers: int = 1, threads: int = 1, together: bool = False
) -> MemoryPlan:
    """The plan of a fit, refused when it exceeds a limit; parameters as of `plan_fit`.

    Raises
    ------
    MemoryPlanError
        Naming both numbers and what would fit.
    """
    plan = plan_fit(sizes, workers, threads, together)
    if plan.total <= limit:
        return plan
    advice = _advice(sizes, limit, workers, threads, together)
    raise MemoryPlanError(
        f"this fit is planned to take {plan.describe()} in each of {workers} worker process"
        f"{'es' * (workers > 1)}, more than memory_limit={format_bytes(limit)}; {advice}"
    )


def _advice(sizes: FitSizes, limit: int, workers: int, threads: int, together: bool) -> str:
    """Say what would bring a fit within `limit` bytes."""
    if fits := largest_batch(sizes, limit, workers, threads, together):
        return f"batch_size={fits} would fit"
    without = sizes._replace(encoder="mp", gram="never")
    if fits := largest_batch(without, limit, workers, threads, together):
        smaller = f" with batch_size={fits}" if fits < sizes.batch_size else ""
        return f"{_without_gram(sizes.encoder)}{smaller} would fit"
    return "use a smaller chunk_size, fewer threads or fewer atoms"


def _without_gram(encoder: str) -> str:
    """Parameters that do without a gram."""
    return "gram='never'" if ENCODERS[encoder].screened else f"{able('screened')} with gram='never'"


def check_gram(n_atoms: int, itemsize: int, encoder: str, available: int) -> None:
    """Refuse a dictionary whose gram exceeds four fifths of the memory of a process.

    Parameters
    ----------
    available : bytes that a process may use

    >>> check_gram(65536, 4, "omp", 16 << 30)
    Traceback (most recent call last):
    dbksvd_dask.errors.MemoryPlanError: encoder='omp' was asked to encode with the gram of 65536 atoms, which \
takes 25.90 GB of the 17.18 GB that a process has; use encoder='mp' with gram='never', or at most 47000 atoms
    """
    needed = gram_bytes(n_atoms, itemsize)
    most = _GRAM_SHARE * available
    if needed <= most:
        return
    fits = n_atoms
    while gram_bytes(fits, itemsize) > most:
        fits -= max(1, fits // 100)
    raise MemoryPlanError(
        f"encoder={encoder!r} was asked to encode with the gram of {n_atoms} atoms, which takes "
        f"{format_bytes(needed)} of the {format_bytes(available)} that a process has; use "
        f"{_without_gram(encoder)}, or at most {fits // 1000 * 1000 or fits} atoms"
    )


def uneven_workers(threads: Sequence[int]) -> tuple[int, int]:
    """Workers and threads to plan with when workers differ: as many equal ones as the strongest would share with.

    >>> uneven_workers([2, 2, 2]), uneven_workers([8, 1, 1])
    ((3, 2), (1, 8))
    """
    most = max(threads, default=1)
    return max(1, sum(threads) // most), most
