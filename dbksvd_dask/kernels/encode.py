"""Encode rows in tiles: one matrix product per tile, then pursuit on it while it is in cache.

The first half of a batch of DB-KSVD (Valentin, Katz, Vanhoucke, Kochenderfer: arXiv:2505.18441), in tiles so that
the products of a batch need not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from dbksvd_dask.kernels import compact, compact_gram, pool, screened, staged, weighted
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.compact_gram import CompactGram, mirror
from dbksvd_dask.kernels.products import squared_norms, tile_products
from dbksvd_dask.kernels.update import write_residual
from dbksvd_dask.kernels.whiten import Whitened, mapped_rows, unit_product
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS

Gram = np.ndarray | CompactGram
# What stands beside the atoms when they encode: their gram, none, or whitened coordinates.
Beside = Gram | Whitened | None

# Columns of the gram per matrix product, a multiple of `plan.units.GRID_ROWS`; see `gram_bounds`.
GRAM_BLOCK = 960
# Rows per product of a tile on the diagonal, of which only the upper half is computed.
GRAM_STRIP = 240


def gram_bounds(n_atoms: int) -> list[tuple[int, int]]:
    """Cut the atoms into blocks; each pair of blocks is one tile of the gram."""
    return [(a, min(a + GRAM_BLOCK, n_atoms)) for a in range(0, n_atoms, GRAM_BLOCK)]


def gram_tile(D: np.ndarray, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
    """Compute the products of two blocks of atoms: (rows, columns); half of those of a block with itself."""
    D = kernel_input(D)
    if rows != columns:
        return _products(D, rows, columns)
    (start, stop), side = rows, rows[1] - rows[0]
    tile = np.empty((side, side), D.dtype)
    for a in range(0, side, GRAM_STRIP):
        b = min(a + GRAM_STRIP, side)
        tile[a:b, a:] = _products(D, (start + a, start + b), (start + a, stop))
    mirror(tile)
    return tile


def _products(D: np.ndarray, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
    """Multiply atoms with atoms.

    Copy the rows first: for ``A @ A.T`` of one buffer numpy calls another BLAS routine, which rounds differently,
    and whether it is one buffer would depend on where the array came from.
    """
    return np.dot(D[rows[0] : rows[1]].copy(), D[columns[0] : columns[1]].T)


def compact_gram_tile(D: np.ndarray, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Compute a tile as `gram_tile` does and split it, if it can be."""
    return compact_gram.split(gram_tile(D, rows, columns))


def assemble_gram(n_atoms: int, tiles: list[np.ndarray]) -> np.ndarray:
    """Assemble the tiles of the upper triangle and mirror those off the diagonal: (n_atoms, n_atoms)."""
    bounds = gram_bounds(n_atoms)
    gram = pool.empty((n_atoms, n_atoms), tiles[0].dtype)
    remaining = iter(tiles)
    for i, (a, b) in enumerate(bounds):
        for c, d in bounds[i:]:
            tile = next(remaining)
            gram[a:b, c:d] = tile
            if c != a:
                gram[c:d, a:b] = tile.T
    return gram


def assemble_compact_gram(n_atoms: int, tiles: list[Any]) -> Gram:
    """Assemble split tiles; a gram of which one could not be split is assembled whole."""
    if all(isinstance(tile, CompactGram) for tile in tiles):
        return compact_gram.assemble(n_atoms, gram_bounds(n_atoms), tiles)
    return assemble_gram(n_atoms, [compact_gram.joined(tile) for tile in tiles])


def _all_tiles(D: np.ndarray, tile: Callable[..., Any]) -> list[Any]:
    bounds = gram_bounds(D.shape[0])
    return [tile(D, rows, columns) for i, rows in enumerate(bounds) for columns in bounds[i:]]


def gram_matrix(D: np.ndarray) -> np.ndarray:
    """Compute the gram ``D D^T`` by the same tiles as a Dask graph does: (n_atoms, n_atoms)."""
    return assemble_gram(D.shape[0], _all_tiles(D, gram_tile))


def encode_rows(
    Y: np.ndarray,
    D: np.ndarray,
    gram: Beside,
    spec: EncodeSpec,
    weights: AtomWeights | None = None,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode samples with a dictionary.

    Parameters
    ----------
    Y : ndarray of shape (n, n_features)
    D : ndarray of shape (n_atoms, n_features), unit rows, same dtype as Y
    gram : as `gram_for` gives it: whole, compact, None to encode without it (`kernels.screened`), or whitened
        coordinates, in which the samples are then encoded, with their own atoms
    weights : thresholds and preferences of the atoms, or None; they override encoder and stages
    first : index of the first sample in its source; a sample's last bits depend on its own index modulo
        `plan.units.GRID_ROWS`, and on nothing else about how the source is cut

    Returns
    -------
    atom : int32 ndarray of shape (n, k), -1 where a slot is empty
    coefficient : ndarray of shape (n, k)
    """
    if isinstance(gram, Whitened):
        Z = mapped_rows(kernel_input(Y), gram.forward, first)
        atom, coefficient = encode_rows(Z, gram.atoms, gram.gram, spec, weights, first)
        return atom, gram.coefficients(atom, coefficient)
    if gram is None:
        return screened.encode_rows(Y, D, spec, weights, first)
    Y, D, gram = kernel_input(Y), kernel_input(D), _gram_input(gram, spec, weights)
    n, k = Y.shape[0], spec.k
    atom = np.empty((n, k), np.int32)
    coefficient = np.empty((n, k), Y.dtype)
    norm2 = squared_norms(Y)
    tiles = units.grid_tiles(n, first, D.size, units.tile_rows(D.shape[0]))
    buffer = np.empty((max((tile.height for tile in tiles), default=0), D.shape[0]), Y.dtype)
    for tile in tiles:
        part = slice(tile.start, tile.stop)
        prods = tile_products(Y[part], D, tile, buffer)
        encode_tile(prods, gram, norm2[part], spec, atom[part], coefficient[part], weights)
    return atom, coefficient


def _gram_input(gram: Gram, spec: EncodeSpec, weights: AtomWeights | None) -> Gram:
    """Bring a gram into the form that kernels take; split one given whole, so that it gives the same codes."""
    if not isinstance(gram, CompactGram) and spec.compact_gram(weights is not None):
        gram = compact_gram.split(np.asarray(gram))
    if isinstance(gram, CompactGram):
        return CompactGram(*map(kernel_input, gram))
    return kernel_input(gram)


class TileEncoder(Protocol):
    """The function that an entry of `plan.encoders.ENCODERS` names: it encodes one tile of products."""

    def __call__(
        self,
        prods: np.ndarray,
        gram: np.ndarray,
        norm2: np.ndarray,
        spec: EncodeSpec,
        atom: np.ndarray,
        coefficient: np.ndarray,
    ) -> None:
        """Encode one tile.

        Parameters
        ----------
        prods : (n, n_atoms) products ``Y D^T``; may be overwritten
        gram : (n_atoms, n_atoms)
        norm2 : (n,) float64, squared norms of the samples
        atom : (n, k) int32, out; -1 where empty
        coefficient : (n, k) out, 0 where empty
        """


def gram_for(
    D: np.ndarray, spec: EncodeSpec, weighted: bool = False, whitening: np.ndarray | None = None
) -> Beside:
    """Compute the gram with which a dictionary encodes; None if it encodes without one.

    Parameters
    ----------
    weighted : whether atoms have weights
    whitening : (d, d) map to the coordinates in which it encodes, or None for those of the samples
    """
    if whitening is not None:
        atoms, lengths = unit_product(D, whitening)
        return Whitened(whitening, atoms, lengths, gram_for(atoms, spec, weighted))
    if not spec.uses_gram(D.shape[0]):
        return None
    if spec.compact_gram(weighted):
        return assemble_compact_gram(D.shape[0], _all_tiles(D, compact_gram_tile))
    return gram_matrix(D)


@cache
def tile_encoder(name: str) -> TileEncoder:
    """Find the kernel of an encoder; imports, and so compiles or loads, only its module."""
    module, function = ENCODERS[name].kernel.split(":")
    return cast(TileEncoder, getattr(import_module(f"dbksvd_dask.kernels.{module}"), function))


def encode_tile(
    prods: np.ndarray,
    gram: Gram,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
    weights: AtomWeights | None = None,
) -> None:
    """Run the chosen encoder on one tile of products; arguments as in `TileEncoder`."""
    if isinstance(gram, CompactGram):
        compact.encode_tile(prods, gram, norm2, spec, atom, coefficient)
    elif weights is not None:
        weighted.encode_tile(prods, gram, norm2, spec, weights, atom, coefficient)
    elif spec.stages:
        staged.encode_tile(prods, gram, norm2, spec, atom, coefficient)
    else:
        tile_encoder(spec.encoder)(prods, gram, norm2, spec, atom, coefficient)


def residual(Y: np.ndarray, atom: np.ndarray, coefficient: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Compute the residual ``Y - X D`` as a new array: (n, n_features)."""
    Y = kernel_input(Y)
    R = pool.empty(Y.shape, Y.dtype)
    write_residual(Y, kernel_input(atom), kernel_input(coefficient), kernel_input(D), R)
    return R
