"""The strongest samples of each atom, streamed over blocks of codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import CodeBlock, CodeBlocks, check_codes, iter_codes
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.codes import insert_strongest
from dbksvd_dask.kernels.moments import Float64Array


@dataclass(frozen=True, eq=False)
class TopSamples:
    """Lists of the strongest samples; `merge` gives the lists of two blocks.

    Equal activations are ordered by the lower sample, so the lists do not depend on blocks or on their order.

    Attributes
    ----------
    atoms : int64 ndarray of shape (n_lists,)
        The atoms that are followed.
    activation : float64 ndarray of shape (n_lists, n_top)
        Signed by the atom's sign, strongest first, 0 where there are fewer samples.
    sample : int64 ndarray of shape (n_lists, n_top)
        Number of the sample in the store, -1 where there are fewer.
    """

    atoms: NDArray[np.int64]
    activation: Float64Array
    sample: NDArray[np.int64]

    def merge(self, other: Self) -> Self:
        """Return the strongest of both; neither is changed."""
        if not np.array_equal(self.atoms, other.atoms) or self.sample.shape != other.sample.shape:
            raise InputError("cannot merge lists of different atoms or lengths")
        activation = np.concatenate([self.activation, other.activation], axis=1)
        sample = np.concatenate([self.sample, other.sample], axis=1)
        order = np.lexsort((sample, -activation), axis=1)[:, : self.sample.shape[1]]
        return type(self)(
            self.atoms,
            np.take_along_axis(activation, order, axis=1),
            np.take_along_axis(sample, order, axis=1),
        )

    def of(self, position: int) -> tuple[NDArray[np.int64], Float64Array]:
        """Return samples and activations of the list at `position`, without the empty places."""
        filled = self.sample[position] >= 0
        return self.sample[position][filled], self.activation[position][filled]


def top_samples(
    atom: ArrayLike,
    coefficient: ArrayLike,
    n_atoms: int,
    n_top: int,
    *,
    first_sample: int = 0,
    atoms: Sequence[int] | NDArray[np.int64] | None = None,
    sign: ArrayLike | None = None,
) -> TopSamples:
    """Return the strongest samples of each atom in one block.

    Parameters
    ----------
    atom, coefficient : array_like of shape (n_samples, n_slots)
    n_atoms : int
    n_top : int
        Length of each list.
    first_sample : int, default 0
        Number of the block's first sample in the store.
    atoms : sequence of int, optional
        The atoms to follow; all without it.
    sign : array_like of shape (n_atoms,), optional
        Coefficients are multiplied by it, for instance `CodeMoments.sign`; only positive products count.

    Returns
    -------
    TopSamples
    """
    lists = _empty(n_atoms, n_top, atoms)
    _insert(
        lists,
        check_codes(atom, coefficient, n_atoms),
        first_sample,
        _places(lists, n_atoms),
        _sign(sign, n_atoms),
    )
    return lists


def stream_top_samples(
    blocks: CodeBlocks,
    n_atoms: int,
    n_top: int,
    *,
    atoms: Sequence[int] | NDArray[np.int64] | None = None,
    sign: ArrayLike | None = None,
) -> TopSamples:
    """Return the strongest samples of each atom over all blocks, which follow each other from sample 0.

    Parameters
    ----------
    blocks : callable returning an iterable of (atom, coefficient)
    n_atoms, n_top, atoms, sign
        As in `top_samples`.

    Returns
    -------
    TopSamples
    """
    lists = _empty(n_atoms, n_top, atoms)
    places, signs, first = _places(lists, n_atoms), _sign(sign, n_atoms), 0
    for block in iter_codes(blocks, n_atoms):
        _insert(lists, block, first, places, signs)
        first += block[0].shape[0]
    return lists


def _empty(n_atoms: int, n_top: int, atoms: Sequence[int] | NDArray[np.int64] | None) -> TopSamples:
    if n_top < 1:
        raise InputError(f"n_top={n_top} must be at least 1")
    followed = np.arange(n_atoms) if atoms is None else np.asarray(atoms, np.int64)
    if followed.size and (followed.min() < 0 or followed.max() >= n_atoms):
        raise InputError(f"atoms must lie in 0 to {n_atoms - 1}, received {followed.min()} to {followed.max()}")
    shape = (followed.size, n_top)
    return TopSamples(followed, np.zeros(shape), np.full(shape, -1, np.int64))


def _insert(
    lists: TopSamples,
    block: CodeBlock,
    first: int,
    places: NDArray[np.int64],
    sign: Float64Array,
) -> None:
    insert_strongest(*block, first, places, sign, lists.activation, lists.sample)


def _places(lists: TopSamples, n_atoms: int) -> NDArray[np.int64]:
    places = np.full(n_atoms, -1, np.int64)
    places[lists.atoms] = np.arange(lists.atoms.size)
    return places


def _sign(sign: ArrayLike | None, n_atoms: int) -> Float64Array:
    signs: Float64Array = np.ones(n_atoms) if sign is None else kernel_input(sign, np.float64)
    if signs.shape != (n_atoms,):
        raise InputError(f"sign must have shape ({n_atoms},), received {signs.shape}")
    return signs
