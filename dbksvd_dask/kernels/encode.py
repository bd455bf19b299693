"""Encode rows in tiles: one matrix product per tile, then pursuit on it while it is in cache.

The first half of a batch of DB-KSVD (Valentin, Katz, Vanhoucke, Kochenderfer: arXiv:2505.18441), in tiles so that
the products of a batch need not fit into memory.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from dbksvd_dask.kernels import pool, screened, staged, weighted
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.products import squared_norms, tile_products
from dbksvd_dask.kernels.update import subtract_reconstruction
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS

# Columns of the gram per matrix product, a multiple of `plan.units.GRID_ROWS`; see `gram_bounds`.
GRAM_BLOCK = 960


def gram_bounds(n_atoms: int) -> list[tuple[int, int]]:
    """Cut the atoms into blocks; each pair of blocks is one tile of the gram."""
    return [(a, min(a + GRAM_BLOCK, n_atoms)) for a in range(0, n_atoms, GRAM_BLOCK)]


def gram_tile(D: np.ndarray, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
    """Compute the products of two blocks of atoms, (rows, columns).

    Copy the rows first: for ``A @ A.T`` of one buffer numpy calls another BLAS routine, which rounds differently,
    and whether it is one buffer would depend on where the array came from.
    """
    D = kernel_input(D)
    return np.dot(D[rows[0] : rows[1]].copy(), D[columns[0] : columns[1]].T)


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


def gram_matrix(D: np.ndarray) -> np.ndarray:
    """Compute the gram ``D D^T`` by the same tiles as a Dask graph does: (n_atoms, n_atoms)."""
    bounds = gram_bounds(D.shape[0])
    tiles = [gram_tile(D, rows, columns) for i, rows in enumerate(bounds) for columns in bounds[i:]]
    return assemble_gram(D.shape[0], tiles)


def encode_rows(
    Y: np.ndarray,
    D: np.ndarray,
    gram: np.ndarray | None,
    spec: EncodeSpec,
    weights: AtomWeights | None = None,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode samples with a dictionary.

    Parameters
    ----------
    Y : ndarray of shape (n, n_features)
    D : ndarray of shape (n_atoms, n_features), unit rows, same dtype as Y
    gram : ndarray of shape (n_atoms, n_atoms), or None to encode without it (`kernels.screened`)
    weights : thresholds and preferences of the atoms, or None; they override encoder and stages
    first : index of the first sample in its source; a sample's last bits depend on its own index modulo
        `plan.units.GRID_ROWS`, and on nothing else about how the source is cut

    Returns
    -------
    atom : int32 ndarray of shape (n, k), -1 where a slot is empty
    coefficient : ndarray of shape (n, k)
    """
    if gram is None:
        return screened.encode_rows(Y, D, spec, weights, first)
    Y, D, gram = kernel_input(Y), kernel_input(D), kernel_input(gram)
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


def gram_for(D: np.ndarray, spec: EncodeSpec) -> np.ndarray | None:
    """Compute the gram with which a dictionary encodes; None if it encodes without one."""
    return gram_matrix(D) if spec.uses_gram(D.shape[0]) else None


@cache
def tile_encoder(name: str) -> TileEncoder:
    """Find the kernel of an encoder; imports, and so compiles or loads, only its module."""
    module, function = ENCODERS[name].kernel.split(":")
    return cast(TileEncoder, getattr(import_module(f"dbksvd_dask.kernels.{module}"), function))


def encode_tile(
    prods: np.ndarray,
    gram: np.ndarray,
    norm2: np.ndarray,
    spec: EncodeSpec,
    atom: np.ndarray,
    coefficient: np.ndarray,
    weights: AtomWeights | None = None,
) -> None:
    """Run the chosen encoder on one tile of products; arguments as in `TileEncoder`."""
    if weights is not None:
        weighted.encode_tile(prods, gram, norm2, spec, weights, atom, coefficient)
    elif spec.stages:
        staged.encode_tile(prods, gram, norm2, spec, atom, coefficient)
    else:
        tile_encoder(spec.encoder)(prods, gram, norm2, spec, atom, coefficient)


def residual(Y: np.ndarray, atom: np.ndarray, coefficient: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Compute the residual ``Y - X D`` as a new array: (n, n_features)."""
    Y = kernel_input(Y)
    R = pool.empty(Y.shape, Y.dtype)
    subtract_reconstruction(Y, kernel_input(atom), kernel_input(coefficient), kernel_input(D), R)
    return R
