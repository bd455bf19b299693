"""Which atoms to interpret, and which samples explain and test each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import CodeBlocks, iter_codes
from dbksvd_dask.evaluate.codes import CodeMoments, stream_code_moments
from dbksvd_dask.evaluate.top_samples import stream_top_samples
from dbksvd_dask.kernels.moments import Float64Array


@dataclass(frozen=True, eq=False)
class AtomSelection:
    """The samples of one atom, with activations after the sign flip.

    Attributes
    ----------
    atom : int
    flipped : bool
        Whether the atom's mean nonzero activation was negative, and all its activations are negated.
    explain_samples : int64 ndarray of shape (n_explain,)
        The strongest samples, strongest first; fewer for an atom that is active on fewer.
    explain_activations : float64 ndarray of shape (n_explain,)
    score_samples : int64 ndarray of shape (n_next + n_random,)
        The next-strongest samples, then random ones that are none of the strongest.
    score_activations : float64 ndarray of shape (n_next + n_random,)
    n_samples : int
        Number of encoded samples, of which these were chosen.
    """

    atom: int
    flipped: bool
    explain_samples: NDArray[np.int64]
    explain_activations: Float64Array
    score_samples: NDArray[np.int64]
    score_activations: Float64Array
    n_samples: int


def atoms_of_highest_variance(m: CodeMoments, n: int) -> NDArray[np.int64]:
    """Sort the live atoms by falling variance of their activation over all samples; ties to the lower.

    Parameters
    ----------
    m : CodeMoments
    n : int
        At most this many.

    Returns
    -------
    int64 ndarray of shape (at most n,)
    """
    order = np.argsort(-m.variance, kind="stable")
    return order[m.n_active[order] > 0][:n].astype(np.int64)


def select_samples(
    blocks: CodeBlocks,
    n_atoms: int,
    *,
    atoms: Sequence[int] | None = None,
    n_interpret: int = 100,
    n_explain: int = 8,
    n_next: int = 50,
    n_random: int = 50,
    seed: int = 0,
) -> list[AtomSelection]:
    """Choose atoms and samples in three passes over the codes.

    Parameters
    ----------
    blocks : callable returning an iterable of (atom, coefficient)
        Called once per pass; the blocks follow each other from sample 0.
    n_atoms : int
    atoms : sequence of int, optional
        Interpret these instead of the ones of highest variance.
    n_interpret : int, default 100
        How many atoms of highest variance.
    n_explain, n_next, n_random : int, default 8, 50, 50
        Samples to explain with, and next-strongest and random samples to score on.
    seed : int, default 0
        Of the random samples; each atom draws its own.

    Returns
    -------
    list of AtomSelection
    """
    if n_explain < 1 or n_next < 0 or n_random < 0:
        raise InputError(
            f"n_explain={n_explain} must be at least 1, n_next={n_next} and n_random={n_random} at least 0"
        )
    sums = stream_code_moments(blocks, n_atoms)
    chosen = atoms_of_highest_variance(sums, n_interpret) if atoms is None else np.asarray(atoms, np.int64)
    lists = stream_top_samples(blocks, n_atoms, n_explain + n_next, atoms=chosen, sign=sums.sign)
    strongest = [lists.of(i) for i in range(chosen.size)]
    drawn = [
        _draw(sums.n_samples, n_random, rows, np.random.default_rng([seed, int(j)]))
        for j, (rows, _) in zip(chosen, strongest, strict=True)
    ]
    values = _activations_at(blocks, n_atoms, chosen, drawn)
    selections = []
    for j, (rows, top), others, value in zip(chosen, strongest, drawn, values, strict=True):
        sign = sums.sign[j]
        selections.append(
            AtomSelection(
                int(j),
                bool(sign < 0),
                rows[:n_explain],
                top[:n_explain],
                np.concatenate([rows[n_explain:], others]),
                np.concatenate([top[n_explain:], sign * value]),
                sums.n_samples,
            )
        )
    return selections


def _draw(n_samples: int, n: int, taken: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `n` different samples that are not taken; fewer if not enough are left."""
    pool = rng.choice(n_samples, size=min(n_samples, n + taken.size), replace=False)
    return pool[~np.isin(pool, taken)][:n].astype(np.int64)


def _activations_at(
    blocks: CodeBlocks, n_atoms: int, atoms: NDArray[np.int64], rows: list[NDArray[np.int64]]
) -> list[Float64Array]:
    """Return the activation of each atom on its own rows; one pass over the codes."""
    owner = np.repeat(np.arange(atoms.size), [r.size for r in rows])
    wanted = np.concatenate(rows) if rows else np.empty(0, np.int64)
    order = np.argsort(wanted, kind="stable")
    sorted_rows = wanted[order]
    out = np.zeros(wanted.size)
    first = 0
    for atom, coefficient in iter_codes(blocks, n_atoms):
        a, b = np.searchsorted(sorted_rows, [first, first + atom.shape[0]])
        ask = order[a:b]
        local = wanted[ask] - first
        hit = atom[local] == atoms[owner[ask], None]
        out[ask] = np.where(hit, coefficient[local], 0).sum(axis=1)
        first += atom.shape[0]
    return np.split(out, np.cumsum([r.size for r in rows])[:-1]) if rows else []
