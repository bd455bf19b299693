"""How rows are cut: chunks of a batch, trees of sums, homes of chunks, units of an encode job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

# BLAS rounds a row of a matrix product differently depending on where in the product it lies: OpenBLAS' Haswell
# sgemm tells positions 0-5 from 6-11 modulo 12. So a row always lies at its own index modulo GRID_ROWS, a multiple
# of the unrolling of every kernel, and the rows around it do not matter.
GRID_ROWS = 48
# Rows per matrix product. BLAS reaches full speed at about 256 rows; 480 rows of 4096 atoms take 8 MB.
TILE_ROWS = 480
# Most products of a tile: those of 65,536 atoms, 126 MB in float32.
TILE_PRODUCTS = TILE_ROWS << 16
# Up to this many multiplications BLAS may pick a kernel by the size of the product (OpenBLAS: up to 10^6).
SMALL_PRODUCT = 4_000_000


class Tile(NamedTuple):
    """One matrix product: rows [start, stop) lie in it from row `place` on; the rest of its `height` is zero."""

    start: int
    stop: int
    place: int
    height: int


def tile_rows(n_atoms: int) -> int:
    """Rows per matrix product with n_atoms atoms: TILE_ROWS, or fewer, so that the products take no more memory.

    >>> tile_rows(4096), tile_rows(65536), tile_rows(100_000), tile_rows(1 << 20)
    (480, 480, 288, 48)
    """
    return min(TILE_ROWS, max(GRID_ROWS, TILE_PRODUCTS // n_atoms // GRID_ROWS * GRID_ROWS))


def grid_tiles(n_rows: int, first: int, n_products: int, at_most: int = TILE_ROWS) -> list[Tile]:
    """Cut rows into matrix products that round every row the same way, wherever the rows are cut.

    Parameters
    ----------
    n_rows : rows at hand
    first : index in their source of the first of them
    n_products : multiplications per row, n_atoms * n_features; a small product is always of full height
    at_most : rows of a product, a multiple of GRID_ROWS

    >>> grid_tiles(500, 50, 10**6)
    [Tile(start=0, stop=478, place=2, height=480), Tile(start=478, stop=500, place=0, height=48)]
    >>> grid_tiles(1, 7, 100)
    [Tile(start=0, stop=1, place=7, height=480)]
    """
    lead = first % GRID_ROWS
    small = n_products * GRID_ROWS <= SMALL_PRODUCT
    tiles = []
    for a in range(0, lead + n_rows, at_most):
        start, stop = max(a - lead, 0), min(a + at_most - lead, n_rows)
        height = at_most if small else -(-(stop + lead - a) // GRID_ROWS) * GRID_ROWS
        tiles.append(Tile(start, stop, start + lead - a, height))
    return tiles


def part_rows(n_rows: int, at_most: int) -> int:
    """Rows per task when rows are only encoded: at least four tasks, so that a few thousand rows use every core.

    A multiple of GRID_ROWS where that is allowed, so that only the last task pads a product.

    >>> part_rows(5000, 8192), part_rows(100, 8192), part_rows(10**6, 8192)
    (1296, 288, 8160)
    >>> part_rows(5000, 20)
    20
    """
    wanted = min(at_most, -(-max(256, -(-n_rows // 4)) // GRID_ROWS) * GRID_ROWS)
    return max(wanted // GRID_ROWS * GRID_ROWS, min(at_most, GRID_ROWS))


def split_rows(n_rows: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cut a batch into chunks of chunk_size rows, the last one possibly short.

    >>> split_rows(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(a, min(a + chunk_size, n_rows)) for a in range(0, n_rows, chunk_size)]


def spread(n_chunks: int, threads: Sequence[int]) -> list[int]:
    """Worker of each chunk: neighbouring chunks together, workers loaded by their threads.

    >>> spread(8, [1, 1])
    [0, 0, 0, 0, 1, 1, 1, 1]
    >>> spread(6, [2, 1])
    [0, 0, 0, 0, 1, 1]
    >>> spread(2, [1, 1, 1, 1])
    [0, 2]
    """
    ends = np.cumsum(threads)
    if ends.size == 0 or ends[-1] == 0:
        return []
    return [int(np.searchsorted(ends, c * int(ends[-1]) // n_chunks, side="right")) for c in range(n_chunks)]


# ---------------------------------------------------------------------------------------------- parts of a job


def part_range(n: int, part: int, n_parts: int) -> range:
    """Return which of n pieces of work belong to part `part` of 1..n_parts: neighbours, as evenly as possible.

    >>> [list(part_range(5, part, 3)) for part in (1, 2, 3)]
    [[0], [1, 2], [3, 4]]
    """
    return range((part - 1) * n // n_parts, part * n // n_parts)


def parts_with(missing: Iterable[int], n: int, n_parts: int) -> list[int]:
    """Return the parts of 1..n_parts to which some of the missing pieces belong.

    >>> parts_with([0, 4], 5, 3)
    [1, 3]
    """
    left = set(missing)
    return [part for part in range(1, n_parts + 1) if left & set(part_range(n, part, n_parts))]


def turned(pieces: Sequence[int], first: int) -> list[int]:
    """Return pieces of work in order from piece `first` on, and then those before it.

    >>> turned(range(5), 3)
    [3, 4, 0, 1, 2]
    """
    return [*(piece for piece in pieces if piece >= first), *(piece for piece in pieces if piece < first)]


# ---------------------------------------------------------------------------------------------- units of a job
# A code chunk of fewer rows costs more in files than in bytes; with more rows per task, a killed machine loses an
# hour of work.
MIN_CHUNK_ROWS = 4096
MAX_CHUNK_ROWS = 1 << 17
# Sums are kept per unit until the job ends. Eight chunks share one file of them when there are chunks enough:
# at 16,384 rows, 4096 atoms and k=32 that is 2 MB of sums beside 33 MB of codes.
MAX_UNIT_CHUNKS = 8
UNITS_WANTED = 64


def code_chunk_rows(store_chunk_rows: int) -> int:
    """Rows of a code chunk: those of an activation chunk, or of several small ones, or an even part of a huge one.

    >>> code_chunk_rows(16384), code_chunk_rows(1000), code_chunk_rows(1 << 20), code_chunk_rows(150_001)
    (16384, 5000, 131072, 150001)
    """
    if store_chunk_rows < MIN_CHUNK_ROWS:
        return -(-MIN_CHUNK_ROWS // store_chunk_rows) * store_chunk_rows
    pieces = -(-store_chunk_rows // MAX_CHUNK_ROWS)
    return store_chunk_rows // pieces if store_chunk_rows % pieces == 0 else store_chunk_rows


def unit_chunks(n_chunks: int) -> int:
    """Chunks of one unit; a function of the store alone, so that sums merge in the same order for everybody.

    >>> unit_chunks(20), unit_chunks(300), unit_chunks(100_000)
    (1, 4, 8)
    """
    return max(1, min(MAX_UNIT_CHUNKS, n_chunks // UNITS_WANTED))
