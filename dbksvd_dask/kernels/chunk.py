"""The state of one chunk of samples between two tasks, and the functions that tasks apply to it on the host.

`gpu.chunk` defines the same functions, by the same names, for a device; `graph.backend.functions` chooses between
them. Every function returns new arrays and leaves its inputs unchanged, so Dask can recompute the results of a
lost worker and share one result among several. Results are read-only: a write raises instead of corrupting.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.kernels import encode, lanczos_rows, products, update
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.dead_atoms import Candidates, Rule, SeedPath
from dbksvd_dask.kernels.lanczos import LanczosState
from dbksvd_dask.kernels.moments import (
    Moments,
    ResidualMoments,
    moments,
    moments_and_norms,
    residual_moments,
    row_norms,
)
from dbksvd_dask.kernels.scale import in_units, unit_of
from dbksvd_dask.kernels.whiten import Whitened
from dbksvd_dask.kernels.widen import widen_float16
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec


class ChunkState(NamedTuple):
    """One chunk of samples between two rounds."""

    R: np.ndarray  # (n, d) residual
    atom: np.ndarray  # (n, k) int32, indices inside the group
    coefficient: np.ndarray  # (n, k)
    start: np.ndarray  # (n_rounds, n + 1): entries by round and row, see kernels.update
    pos: np.ndarray  # (nnz,)
    local: np.ndarray  # (nnz,)
    stats: ChunkStats | None = None  # sums over the chunk after its encoding
    unit: int = 0  # exponent of the units of its sums of products, see kernels.scale
    scale: np.ndarray | None = None  # (n, 1) by which its rows are multiplied, see `weigh_samples`


class ChunkStats(NamedTuple):
    """Sums over one chunk after its encoding."""

    moments: Moments
    y_norms: np.ndarray  # (n,) float64
    counts: np.ndarray  # (n_atoms of the group,) int64
    finished: float  # time.time() when the encoding ended


class Rounds(NamedTuple):
    """The rounds of one group: which atoms, and for each atom its round and place in it."""

    atoms: tuple[np.ndarray, ...]
    round_of: np.ndarray
    local_of: np.ndarray


class RoundSums(NamedTuple):
    """Sums over the samples of each atom of a round, in units of the chunks' largest samples.

    `scalars` are sums for samples times ``2^unit``; `W` carries that factor once, because twice would overflow
    float32.
    """

    W: np.ndarray  # (n_local, d), sums of products with residual rows
    scalars: tuple[np.ndarray, ...]  # (n_local,) float64 each
    unit: int = 0


def invert_rounds(atoms: list[np.ndarray], n_atoms: int) -> Rounds:
    """Return look-up tables from atom to round and place.

    Parameters
    ----------
    atoms : per round, the indices of its atoms
    """
    round_of = np.empty(n_atoms, np.int32)
    local_of = np.empty(n_atoms, np.int32)
    for r, members in enumerate(atoms):
        round_of[members] = r
        local_of[members] = np.arange(members.size, dtype=np.int32)
    return Rounds(tuple(atoms), round_of, local_of)


def add_counts(counts: list[np.ndarray]) -> np.ndarray:
    """Return samples per atom over all chunks."""
    return np.sum(counts, axis=0)


def frozen(array: np.ndarray) -> np.ndarray:
    """Mark a result read-only."""
    array.flags.writeable = False
    return array


# ---------------------------------------------------------------------------------------------- samples and codes


def prepare(raw: Any, mean: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Return rows as the kernels expect them: C-contiguous, in the working dtype, minus the mean.

    Parameters
    ----------
    raw : (n, d) as stored; unchanged
    mean : (d,) or None
    """
    mean = None if mean is None else mean.astype(dtype, copy=False)
    if raw.dtype == np.float16 and dtype == np.float32:
        return widen_float16(raw, mean)
    with np.errstate(over="ignore"):  # overflow gives infinity, and the caller refuses such rows
        if mean is None:
            return np.ascontiguousarray(raw, dtype=dtype)
        return np.ascontiguousarray(np.subtract(raw, mean, dtype=dtype))


@one_blas_thread
def whiten(Y: np.ndarray, forward: np.ndarray) -> np.ndarray:
    """Return samples in whitened coordinates, see `kernels.whiten`: (n, d)."""
    return np.dot(Y, forward)


def whitened(W: np.ndarray, mapped: tuple[np.ndarray, np.ndarray], gram: encode.Gram | None) -> Whitened:
    """Return what stands beside a dictionary that encodes in whitened coordinates.

    Parameters
    ----------
    mapped : from `kernels.whiten.unit_product`
    """
    atoms, lengths = map(frozen, mapped)
    return Whitened(W, atoms, lengths, gram)


def squared_norms(Y: np.ndarray) -> np.ndarray:
    """Return the squared norm of each row in float64: (n,)."""
    return products.squared_norms(Y)


@one_blas_thread
def encode_rows(
    Y: np.ndarray,
    D: np.ndarray,
    gram: encode.Beside,
    spec: EncodeSpec,
    weights: AtomWeights | None = None,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode samples: atom (n, k) int32 and coefficient (n, k)."""
    return encode.encode_rows(Y, D, gram, spec, weights, first)


def residual(Y: np.ndarray, atom: np.ndarray, coefficient: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Return the residual of given codes, ``Y - X D``: (n, d)."""
    return encode.residual(Y, atom, coefficient, D)


@one_blas_thread
def measure(
    Y: np.ndarray,
    D: np.ndarray,
    gram: encode.Beside,
    spec: EncodeSpec,
    weights: AtomWeights | None = None,
    first: int = 0,
) -> tuple[Moments, int]:
    """Encode samples: return sums over them and their residual, and the number of nonzeros."""
    atom, coefficient = encode.encode_rows(Y, D, gram, spec, weights, first)
    R = encode.residual(Y, atom, coefficient, D)
    return moments(Y, R), int(np.count_nonzero(coefficient))  # a refit may set some to 0


@one_blas_thread
def encode_chunk(
    Y: np.ndarray,
    D: np.ndarray,
    gram: encode.Gram | None,
    spec: EncodeSpec,
    rounds: Rounds,
    weights: AtomWeights | None = None,
) -> tuple[ChunkState, np.ndarray]:
    """Encode a chunk, subtract the reconstruction and group the nonzeros by round.

    Returns
    -------
    state : ChunkState
    counts : (n_atoms,) int64, samples per atom
    """
    atom, coefficient = encode.encode_rows(Y, D, gram, spec, weights)
    R = encode.residual(Y, atom, coefficient, D)
    start, pos, local = update.group_by_round(atom, rounds.round_of, rounds.local_of, len(rounds.atoms))
    counts = update.count_atoms(atom, D.shape[0])
    for array in (R, atom, coefficient, start, pos, local):
        frozen(array)
    unit = unit_of(float(np.abs(coefficient).max(initial=0)), coefficient.dtype)
    return ChunkState(R, atom, coefficient, start, pos, local, unit=unit), counts


def chunk_stats(Y: np.ndarray, state: ChunkState, counts: np.ndarray) -> ChunkStats:
    """Return sums over the samples and their residual."""
    return ChunkStats(*moments_and_norms(Y, state.R), counts, time.time())


def row_scale(norms: np.ndarray, half: float) -> np.ndarray:
    """Return the factor of each sample: 1 without a residual, 1/2 where its norm is `half`, towards 0 beyond.

    Parameters
    ----------
    norms : (n,) float64, norms of the residuals
    """
    return np.asarray(half / (norms + half))


def weigh_samples(state: ChunkState, half: float) -> ChunkState:
    """Multiply residuals and coefficients by `row_scale`, so that every sum of the update is a weighted one.

    An update is linear in the rows of a sample, and its coefficients are refitted row by row: rows times s_i give
    the atoms of least squares with weights s_i^2, by the same code.
    """
    scale = row_scale(row_norms(state.R), half).astype(state.R.dtype)[:, None]
    R, coefficient = frozen(state.R * scale), frozen(state.coefficient * scale)
    unit = unit_of(float(np.abs(coefficient).max(initial=0)), coefficient.dtype)
    return state._replace(R=R, coefficient=coefficient, unit=unit, scale=frozen(scale))


def _unscaled(array: np.ndarray, state: ChunkState) -> np.ndarray:
    """Return rows of a state as they are without weights."""
    return array if state.scale is None else array / state.scale


def after_update(state: ChunkState, stats: ChunkStats) -> ResidualMoments:
    """Return sums over the residual after the last round."""
    return residual_moments(_unscaled(state.R, state), stats.y_norms)


def coefficient_sums(state: ChunkState, n_atoms: int) -> np.ndarray:
    """Return the sum of the coefficients of each atom, added row by row: (n_atoms,) float64."""
    used = state.atom >= 0
    coefficient = _unscaled(state.coefficient, state)
    return np.bincount(state.atom[used], weights=coefficient[used], minlength=n_atoms)


def park(state: ChunkState) -> ChunkState:
    """Return the state itself: on the host it has nowhere else to wait for the next task."""
    return state


# ---------------------------------------------------------------------------------------------- rounds


def _inputs(*arrays: np.ndarray) -> list[Any]:
    """Return arrays in the form that the kernels accept."""
    return list(map(kernel_input, arrays))


def first_product(state: ChunkState, r: int, n_local: int) -> RoundSums:
    """Return partial sums of the warm start of round `r`: W (n_local, d) and x2 (n_local,)."""
    x = in_units(state.coefficient, state.unit)
    arrays = (state.R, x, state.start[r], state.pos, state.local)
    W, x2 = update.start_products(*(*_inputs(*arrays), n_local))
    return RoundSums(frozen(W), (frozen(x2),), state.unit)


def next_product(state: ChunkState, r: int, lz: LanczosState) -> RoundSums:
    """Return partial sums of one Lanczos product of round `r`: W (n_local, d), sx and s2 (n_local,)."""
    # scale the vectors instead of the residual, which would have to be copied
    x, V = (in_units(a, state.unit) for a in (state.coefficient, lz.basis[-1]))
    arrays = (state.R, x, state.start[r], state.pos, state.local, V, lz.dv)
    W, sx, s2 = update.next_products(*_inputs(*arrays))
    return RoundSums(frozen(W), (frozen(sx), frozen(s2)), state.unit)


def add_sums(parts: list[RoundSums]) -> RoundSums:
    """Add the sums over some chunks from left to right, in the units of the largest samples."""
    unit = min(part.unit for part in parts)
    W, *scalars = add_parts([arrays_in_units(part, unit) for part in parts])
    return RoundSums(W, tuple(scalars), unit)


def arrays_in_units(part: RoundSums, unit: int) -> tuple[np.ndarray, ...]:
    """Return the arrays of a part, of numpy or of a device, in other units."""
    step = unit - part.unit
    return in_units(part.W, step), *(in_units(total, 2 * step) for total in part.scalars)


def add_parts(parts: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Sum tuples of arrays from left to right; the order fixes the bits."""
    if len(parts) == 1:
        return parts[0]
    totals = [np.add(a, b) for a, b in zip(parts[0], parts[1], strict=True)]
    for part in parts[2:]:
        for total, more in zip(totals, part, strict=True):
            np.add(total, more, out=total)
    return tuple(frozen(total) for total in totals)


def begin_round(parts: list[RoundSums], D: np.ndarray, members: np.ndarray) -> LanczosState:
    """Start a round from the chunks' partial sums."""
    W, (x2,), unit = add_sums(parts)
    return lanczos_rows.warm_start(W, x2, D, members, unit)


def advance_round(parts: list[RoundSums], lz: LanczosState, D: np.ndarray, members: np.ndarray) -> LanczosState:
    """Take one Lanczos step of a round from the chunks' partial sums."""
    W, (sx, s2), unit = add_sums(parts)
    return lanczos_rows.advance(lz, W, sx, s2, D, members, unit)


def finish_round(lz: LanczosState, D: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return the new atoms of a round: (n_local, d)."""
    return frozen(lanczos_rows.leading_vectors(lz, D, members))


def refresh_chunk(
    state: ChunkState, r: int, D: np.ndarray, members: np.ndarray, new: np.ndarray, nonneg: bool
) -> ChunkState:
    """Exchange the atoms of round `r` and refit their coefficients."""
    arrays = (state.R, state.coefficient, state.start[r], state.pos, state.local, D, members, new)
    R, coefficient = update.refresh(*(*_inputs(*arrays), nonneg))
    return state._replace(R=frozen(R), coefficient=frozen(coefficient))


# ---------------------------------------------------------------------------------------------- the new dictionary


def worst_samples(
    state: ChunkState, D: np.ndarray, members: list[np.ndarray], new: list[np.ndarray], counts: np.ndarray
) -> Candidates:
    """Return the samples of a chunk with the largest residual norms, as many as there are dead atoms.

    A sample is rebuilt from its residual and its codes, so the chunk need not be kept or read again.
    """
    n_dead = int(np.count_nonzero(counts == 0))
    if n_dead == 0:
        return Candidates(np.empty(0), np.empty((0, D.shape[1]), D.dtype))
    R, coefficient = _unscaled(state.R, state), _unscaled(state.coefficient, state)
    error = row_norms(R)
    worst = np.argsort(-error, kind="stable")[:n_dead]
    updated = place_atoms(D, members, new)
    atom = kernel_input(state.atom[worst])
    rows = encode.residual(R[worst], atom, -coefficient[worst], updated)
    return Candidates(error[worst], rows)


def place_atoms(D: np.ndarray, members: list[np.ndarray], new: list[np.ndarray]) -> np.ndarray:
    """Return a copy of a dictionary with the new atoms of all rounds: (n_atoms, d)."""
    out = np.array(D)
    for indices, atoms in zip(members, new, strict=True):
        out[indices] = atoms
    return out


def merge_dictionary(
    D: np.ndarray,
    members: list[np.ndarray],
    new: list[np.ndarray],
    counts: np.ndarray,
    candidates: list[Candidates],
    rule: Rule,
    path: SeedPath,
) -> np.ndarray:
    """Return the updated dictionary: the rounds' atoms, with dead ones replaced by a rule.

    Parameters
    ----------
    counts : (n_atoms,) samples per atom
    candidates : per chunk, in chunk order; see `kernels.dead_atoms`
    """
    out = place_atoms(D, members, new)
    dead = np.flatnonzero(counts == 0)
    if dead.size:
        chosen = rule.choose(candidates, out, dead, path)
        out[dead[: chosen.shape[0]]] = chosen
    return frozen(out)
