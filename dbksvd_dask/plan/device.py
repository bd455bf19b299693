"""Integers in, integers out: what a chunk needs of a device's memory, and what fits into it.

When a batch does not fit, the plan gives up three things, in this order: large chunks, residuals that stay on the
device between tasks, and the pursuit on the device (which needs the gram there, if there is one). The plan
depends on the size of the card alone, so the same fit on the same kind of card is cut in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

from dbksvd_dask._words import format_bytes
from dbksvd_dask.errors import MemoryPlanError
from dbksvd_dask.plan.encoders import ENCODERS
from dbksvd_dask.plan.screening import n_candidates, uses_gram
from dbksvd_dask.plan.units import TILE_ROWS

# Products per matrix product on the device: enough rows to keep every multiprocessor busy, little memory.
TILE_BYTES = 128 << 20
# Rows widened to float64 at a time by the metrics, with three such arrays alive.
_SUM_ROWS = 1024
# Smaller chunks leave a device idle between launches. Chunks are cut down to the first number before residuals are
# sent to the host, since thousands of chunks make a graph of too many tasks.
_RESIDENT_CHUNK_ROWS = 2048
MIN_CHUNK_ROWS = 256
# Partial sums of a round that may be on the device at once.
_PARTIAL_SUMS = 8


class Placement(NamedTuple):
    """Where the heavy work of a batch runs.

    Attributes
    ----------
    device : "cpu" or "gpu"
    gram_on_device : the pursuit runs on the device; otherwise only the products do
    resident : residuals stay on the device between tasks; otherwise they wait on the host
    """

    device: str = "cpu"
    gram_on_device: bool = True
    resident: bool = True

    @property
    def pursuit(self) -> str:
        """Where the pursuit itself runs: "cpu" or "gpu"."""
        return self.device if self.gram_on_device else "cpu"


CPU = Placement()


class Sizes(NamedTuple):
    """The sizes of one outer batch on one device."""

    n_rows: int  # samples of the batch that fall to this device
    chunk_size: int
    n_features: int
    n_atoms: int
    k: int
    n_rounds: int = 8
    lanczos_steps: int = 2
    itemsize: int = 4
    groups: tuple[int, ...] = ()  # sizes of the groups of a training batch; empty for one


class DevicePlan(NamedTuple):
    """How a batch is cut for a device."""

    placement: Placement
    chunk_size: int
    device_bytes: int  # planned peak


def product_tile_rows(n_rows: int, n_atoms: int, itemsize: int) -> int:
    """Rows per matrix product on the device.

    >>> product_tile_rows(65536, 4096, 4), product_tile_rows(1000, 4096, 4), product_tile_rows(65536, 1 << 20, 4)
    (8192, 1000, 64)
    """
    return min(n_rows, max(64, TILE_BYTES // (n_atoms * itemsize)))


def screened_tile_rows(n_rows: int, n_atoms: int, itemsize: int) -> int:
    """Rows per matrix product of a pursuit without a gram, which needs scratch for each row.

    >>> screened_tile_rows(65536, 65536, 4), screened_tile_rows(65536, 1000, 4)
    (512, 4096)
    """
    return min(product_tile_rows(n_rows, n_atoms, itemsize), 4096)


def gram_entries(sizes: Sizes, encoder: str, gram: str) -> int:
    """Numbers in the grams that a device holds at once: of all groups, or of the whole dictionary.

    >>> sizes = Sizes(65536, 8192, 768, 32768, 32, groups=(16384, 16384))
    >>> gram_entries(sizes, "mp", "auto") == 2 * 16384**2, gram_entries(sizes, "mp", "never")
    (True, 0)
    """
    groups = sum(m * m for m in sizes.groups if uses_gram(gram, encoder, m))
    return max(groups, sizes.n_atoms**2 if uses_gram(gram, encoder, sizes.n_atoms) else 0)


def scratch_bytes(sizes: Sizes, n_rows: int) -> int:
    """Bytes of a pursuit without a gram besides the products of a tile: residuals, candidates, a gram per support.

    >>> scratch_bytes(Sizes(65536, 8192, 640, 65536, 32), 8192) // 2**10
    4244
    """
    tile = screened_tile_rows(n_rows, sizes.n_atoms, sizes.itemsize)
    candidates = (sizes.k + n_candidates(sizes.k)) * (4 + sizes.itemsize)
    return tile * (sizes.n_features * sizes.itemsize + candidates + sizes.k**2 * sizes.itemsize + 40)


def state_bytes(sizes: Sizes, n_rows: int) -> int:
    """Bytes of the state of `n_rows` samples between tasks: residual, codes and the two groupings of the nonzeros.

    >>> state_bytes(Sizes(65536, 8192, 2304, 4096, 20), 65536) / 2**20
    608.0
    """
    per_nonzero = 4 + sizes.itemsize + 4 * 4
    return n_rows * (sizes.n_features * sizes.itemsize + sizes.k * per_nonzero + 4 * sizes.n_rounds)


def fixed_bytes(sizes: Sizes, entries: int) -> int:
    """Bytes that do not depend on the samples: dictionary, grams, partial sums and Lanczos vectors of a round.

    Parameters
    ----------
    entries : numbers in the grams on the device

    >>> fixed_bytes(Sizes(65536, 8192, 2304, 4096, 20), 4096**2) // 2**20
    154
    """
    dictionary = sizes.n_atoms * sizes.n_features * sizes.itemsize
    round_atoms = -(-sizes.n_atoms // sizes.n_rounds)
    vectors = (_PARTIAL_SUMS + sizes.lanczos_steps + 2) * round_atoms * sizes.n_features * sizes.itemsize
    return dictionary + vectors + entries * sizes.itemsize


def chunk_bytes(sizes: Sizes, n_rows: int, gram_on_device: bool) -> int:
    """Most bytes that a task needs for a chunk of `n_rows`, its state included.

    Encoding holds the samples as they came and as they are used, one tile of products (two when they go to the
    host) and the residual; grouping sorts 8-byte keys; a refresh holds two residuals and no products.

    >>> chunk_bytes(Sizes(65536, 8192, 2304, 4096, 20), 8192, True) // 2**20
    414
    """
    samples = 2 * n_rows * sizes.n_features * sizes.itemsize
    if gram_on_device:
        tile = product_tile_rows(n_rows, sizes.n_atoms, sizes.itemsize)
    else:
        tile = 2 * min(n_rows, TILE_ROWS)  # two are on their way at a time
    sums = 3 * min(n_rows, _SUM_ROWS) * sizes.n_features * 8
    keys = 5 * n_rows * sizes.k * 8
    refit = min(n_rows, 2048) * (sizes.k + 1) * sizes.k * 8
    return state_bytes(sizes, n_rows) + samples + tile * sizes.n_atoms * sizes.itemsize + sums + keys + refit


def peak_bytes(
    sizes: Sizes, chunk_size: int, placement: Placement, in_flight: int, encoder: str = "mp", gram: str = "auto"
) -> int:
    """Planned peak of a batch on the device, with at most `in_flight` chunks being encoded at once."""
    rows = min(chunk_size, sizes.n_rows)
    at_once = min(in_flight, -(-sizes.n_rows // rows))
    # parked states leave their codes and groupings behind; only the residual goes to the host
    kept = sizes if placement.resident else sizes._replace(n_features=0)
    states = state_bytes(kept, sizes.n_rows)
    fixed = fixed_bytes(sizes, gram_entries(sizes, encoder, gram) if placement.gram_on_device else 0)
    scratch = 0 if uses_gram(gram, encoder, sizes.n_atoms) else scratch_bytes(sizes, rows)
    return fixed + states + at_once * (chunk_bytes(sizes, rows, placement.gram_on_device) + scratch)


def plan_device(sizes: Sizes, budget: int, encoder: str, n_threads: int, gram: str = "auto") -> DevicePlan:
    """Cut a batch so that it fits into `budget` bytes of a device.

    Parameters
    ----------
    sizes : of the batch on this device
    budget : bytes, see `gpu.device.budget`
    encoder : one of `plan.encoders.ENCODERS`; those without a CUDA kernel run on the host
    n_threads : tasks at a time per process, all of which may hold a chunk while the host pursues
    gram : one of `plan.screening.GRAMS`; a pursuit without a gram always runs on the device

    Examples
    --------
    The paper's batches on a T4 (16 GB, of which 85 % are planned with):

    >>> t4 = 13 << 30
    >>> plan_device(Sizes(65536, 8192, 2304, 4096, 20), t4, "mp", 96)[:2]
    (Placement(device='gpu', gram_on_device=True, resident=True), 8192)
    >>> plan_device(Sizes(1048576, 8192, 2304, 4096, 20), t4, "mp", 96)[:2]
    (Placement(device='gpu', gram_on_device=True, resident=True), 8192)

    A card of 2 GB, one that cannot hold the gram of 65,536 atoms, and the same atoms without a gram:

    >>> plan_device(Sizes(1048576, 8192, 2304, 4096, 20), 3 << 29, "mp", 8)[:2]
    (Placement(device='gpu', gram_on_device=True, resident=False), 8192)
    >>> plan_device(Sizes(65536, 8192, 768, 65536, 32), t4, "mp", 8, "always")[:2]
    (Placement(device='gpu', gram_on_device=False, resident=True), 8192)
    >>> plan_device(Sizes(65536, 8192, 768, 65536, 32), t4, "mp", 8)[:2]
    (Placement(device='gpu', gram_on_device=True, resident=True), 8192)
    """
    smallest = 0
    places: tuple[bool, ...] = (True, False) if ENCODERS[encoder].on_device else (False,)
    if not uses_gram(gram, encoder, sizes.n_atoms):
        places = (True,)
    for gram_on_device in places:
        in_flight = 1 if gram_on_device else max(1, n_threads)
        for resident in (True, False):
            placement = Placement("gpu", gram_on_device, resident)
            chunk_size = min(sizes.chunk_size, sizes.n_rows)
            fewest = _RESIDENT_CHUNK_ROWS if resident else MIN_CHUNK_ROWS
            while (smallest := peak_bytes(sizes, chunk_size, placement, in_flight, encoder, gram)) > budget:
                if chunk_size // 2 < fewest:
                    break
                chunk_size //= 2
            if smallest <= budget:
                return DevicePlan(placement, chunk_size, smallest)
    raise MemoryPlanError(
        f"a batch of {sizes.n_rows} samples of {sizes.n_features} features with {sizes.n_atoms} atoms needs "
        f"{format_bytes(smallest)} of device memory even in chunks of {MIN_CHUNK_ROWS}; {format_bytes(budget)} "
        "is available. Use device='cpu', fewer atoms, or a smaller batch_size"
    )
