"""The functions that tasks apply to one chunk of samples on the device: `kernels.chunk`, by the same names.

Between tasks the state of a chunk stays on the device. If a batch does not fit there, the residual is parked on
the host: each task copies it to the device and, if it changed, back.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.gpu import device, encode, moments, products, update
from dbksvd_dask.gpu.update import Entries
from dbksvd_dask.kernels import chunk, lanczos
from dbksvd_dask.kernels.chunk import ChunkStats, RoundSums, arrays_in_units
from dbksvd_dask.kernels.dead_atoms import Candidates, Rule, SeedPath
from dbksvd_dask.kernels.lanczos import LanczosState, namespace
from dbksvd_dask.kernels.moments import Moments, ResidualMoments, relative_error_sum
from dbksvd_dask.kernels.scale import in_units, unit_of
from dbksvd_dask.kernels.whiten import Whitened
from dbksvd_dask.plan.device import product_tile_rows
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec

Sums = tuple[np.ndarray, np.ndarray, np.ndarray]


class DeviceState(NamedTuple):
    """One chunk of samples between two rounds, on the device; if parked, its residual is on the host."""

    R: Any  # (n, d) residual
    atom: Any  # (n, k) int32, indices inside the group
    coefficient: Any  # (n, k)
    entries: Entries
    stats: Any = None  # `kernels.chunk.ChunkStats` after its encoding, on the host
    unit: int = 0  # exponent of the units of its sums of products, see `kernels.scale`
    scale: Any = None  # (n, 1) by which its rows are multiplied, see `kernels.chunk.weigh_samples`


def prepare(raw: Any, mean: np.ndarray | None, dtype: Any) -> Any:
    """Return rows as the kernels expect them: on the device, in the working dtype, minus the mean.

    They are transferred in their stored dtype and widened on the device.
    """
    space = device.current()
    xp = space.xp
    wide = xp.float64 if np.dtype(dtype) == np.float64 else xp.float32
    Y = xp.astype(space.asarray(np.ascontiguousarray(raw)), wide)
    return Y if mean is None else Y - space.asarray(mean.astype(dtype, copy=False))


def whiten(Y: Any, forward: np.ndarray) -> Any:
    """Return samples in whitened coordinates, see `kernels.whiten`: (n, d)."""
    return Y @ device.current().asarray(forward)


def whitened(W: np.ndarray, mapped: tuple[np.ndarray, np.ndarray], gram: Any) -> Whitened:
    """Return what stands beside a dictionary that encodes in whitened coordinates, on the device."""
    with device.turn("gpu"):
        atoms, lengths = map(to_device, mapped)
        return Whitened(to_device(W), atoms, lengths, gram)


def encode_chunk(
    Y: Any, D: Any, gram: Any, spec: EncodeSpec, rounds: Any, weights: AtomWeights | None = None
) -> tuple[DeviceState, np.ndarray]:
    """Encode a chunk, subtract the reconstruction and group the nonzeros by round.

    Parameters
    ----------
    Y : (n, d) samples, on the device or parked;  D : (n_atoms, d) on the device
    rounds : `kernels.chunk.Rounds`

    Returns
    -------
    state : DeviceState
    counts : (n_atoms,) int64, samples per atom, on the host
    """
    # a pursuit on the host takes no turn: threads run it in parallel
    with device.turn(encode.pursuit_place(gram)):
        Y = device.current().asarray(Y)
        atom, coefficient = encode.encode_rows(Y, D, gram, spec, weights)
    with device.turn("gpu"):
        R = products.residual(Y, atom, coefficient, D)
        entries = update.group_by_round(atom, rounds.round_of, rounds.local_of, len(rounds.atoms))
        counts = update.count_atoms(entries, rounds.round_of, rounds.local_of)
        unit = _unit(coefficient)
    return DeviceState(R, atom, coefficient, entries, unit=unit), counts


def _unit(coefficient: Any) -> int:
    """Return the units of the sums of a chunk, from its largest coefficient."""
    xp = namespace(coefficient)
    largest = device.to_host(xp.max(xp.abs(coefficient)))
    return unit_of(float(largest), largest.dtype)


def encode_rows(
    Y: Any, D: Any, gram: Any, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Encode samples, from the host or on the device: codes on the host, atom (n, k) and coefficient (n, k)."""
    with device.turn(encode.pursuit_place(gram)):
        atom, coefficient = encode.encode_rows(device.current().asarray(Y), D, gram, spec, weights, first)
        return device.to_host(atom), device.to_host(coefficient)


def residual(Y: Any, atom: np.ndarray, coefficient: np.ndarray, D: Any) -> np.ndarray:
    """Return the residual ``Y - X D`` on the host: (n, d). Samples and codes may be on either side."""
    with device.turn("gpu"):
        here = [a if device.on_device(a) else to_device(np.ascontiguousarray(a)) for a in (Y, atom, coefficient)]
        return device.to_host(products.residual(here[0], here[1], here[2], D))


def measure(
    Y: Any, D: Any, gram: Any, spec: EncodeSpec, weights: AtomWeights | None = None, first: int = 0
) -> tuple[Moments, int]:
    """Encode samples: return sums over them and their residual, and the number of nonzeros."""
    with device.turn(encode.pursuit_place(gram)):
        Y = device.current().asarray(Y)
        atom, coefficient = encode.encode_rows(Y, D, gram, spec, weights, first)
    with device.turn("gpu"):
        R = products.residual(Y, atom, coefficient, D)
        return _merged(row_sums(Y), row_sums(R)), int(np.count_nonzero(device.to_host(coefficient)))


def chunk_stats(Y: Any, state: DeviceState, counts: np.ndarray) -> ChunkStats:
    """Return sums over the samples and their residual."""
    samples = row_sums(Y)
    return ChunkStats(_merged(samples, row_sums(state.R)), samples[2], counts, time.time())


def _merged(samples: Sums, rest: Sums) -> Moments:
    """Return the moments, from the sums over samples and residual."""
    error, n_nonzero = relative_error_sum(samples[2], rest[2])
    return Moments(samples[2].size, int(n_nonzero), float(error), *samples[:2], *rest[:2])


def weigh_samples(state: DeviceState, half: float) -> DeviceState:
    """Multiply residuals and coefficients by factors that make every sum of the update a weighted one."""
    with device.turn("gpu"):
        R = _residual(state)
        factors = chunk.row_scale(row_sums(R)[2], half)
        scale = namespace(R).astype(to_device(factors), R.dtype)[:, None]
        coefficient = state.coefficient * scale
        return state._replace(R=R * scale, coefficient=coefficient, unit=_unit(coefficient), scale=scale)


def _unscaled(array: Any, state: DeviceState) -> Any:
    """Return rows of a state as they are without weights."""
    return array if state.scale is None else array / state.scale


def after_update(state: DeviceState, stats: ChunkStats) -> ResidualMoments:
    """Return sums over the residual after the last round."""
    with device.turn("gpu"):
        R = _unscaled(_residual(state), state)
    r_sum, r_square_sum, r_norms = row_sums(R)
    error, _ = relative_error_sum(stats.y_norms, r_norms)
    return ResidualMoments(r_norms.size, float(error), r_sum, r_square_sum)


def row_sums(A: Any) -> Sums:
    """Return column sums, column sums of squares and row norms of samples or a residual, on the host."""
    with device.turn("gpu"):
        return moments.row_sums(device.current().asarray(A))


def squared_norms(Y: Any) -> np.ndarray:
    """Return the squared norm of each row, on the host: (n,)."""
    with device.turn("gpu"):
        return device.to_host(products.squared_norms(Y))


def gram_matrix(D: np.ndarray, on_device: bool) -> Any:
    """Return the gram of a dictionary of the host, computed on the device: kept there, or copied back in parts."""
    with device.turn("gpu"):
        atoms = to_device(D)
        if on_device:
            return encode.gram_matrix(atoms)
        gram = np.empty((D.shape[0], D.shape[0]), D.dtype)
        for rows in products.row_tiles(D.shape[0], product_tile_rows(D.shape[0], D.shape[0], D.dtype.itemsize)):
            gram[rows] = device.to_host(atoms[rows, :] @ atoms.T)
        return gram


def coefficient_sums(state: DeviceState, n_atoms: int) -> np.ndarray:
    """Return the sum of the coefficients of each atom, added row by row on the host: (n_atoms,) float64."""
    with device.turn("gpu"):
        atom, coefficient = device.to_host(state.atom), device.to_host(_unscaled(state.coefficient, state))
    used = atom >= 0
    return np.bincount(atom[used], weights=coefficient[used], minlength=n_atoms)


def park(state: DeviceState) -> DeviceState:
    """Move the residual to the host until the next task."""
    return state._replace(R=device.to_host(state.R))


def first_product(state: DeviceState, r: int, n_local: int) -> RoundSums:
    """Return partial sums of the warm start of round `r`: W (n_local, d) and x2 (n_local,)."""
    with device.turn("gpu"):
        x = in_units(state.coefficient, state.unit)
        W, x2 = update.start_products(_residual(state), x, state.entries, r, n_local)
        return RoundSums(W, (x2,), state.unit)


def next_product(state: DeviceState, r: int, lz: LanczosState) -> RoundSums:
    """Return partial sums of one Lanczos product of round `r`: W (n_local, d), sx and s2 (n_local,)."""
    with device.turn("gpu"):
        x, V = in_units(state.coefficient, state.unit), in_units(lz.basis[-1], state.unit)
        W, sx, s2 = update.next_products(_residual(state), x, state.entries, r, V, lz.dv)
        return RoundSums(W, (sx, s2), state.unit)


def add_sums(parts: list[RoundSums]) -> RoundSums:
    """Add the sums over some chunks from left to right, in the units of the largest samples."""
    unit = min(part.unit for part in parts)
    W, *scalars = add_parts([arrays_in_units(part, unit) for part in parts])
    return RoundSums(W, tuple(scalars), unit)


def add_parts(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Sum tuples of arrays from left to right; the order fixes the bits."""
    return tuple(_sum_in_order(arrays) for arrays in zip(*parts, strict=True))


def _sum_in_order(arrays: tuple[Any, ...]) -> Any:
    """Add arrays from left to right."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def begin_round(parts: list[RoundSums], D: np.ndarray, members: np.ndarray) -> LanczosState:
    """Start a round from the chunks' partial sums; D (n_atoms, d) is on the host."""
    W, (x2,), unit = add_sums(parts)
    return lanczos.warm_start(W, x2, to_device(D[members]), unit)


def advance_round(parts: list[RoundSums], lz: LanczosState, D: np.ndarray, members: np.ndarray) -> LanczosState:
    """Take one Lanczos step of a round from the chunks' partial sums."""
    W, (sx, s2), unit = add_sums(parts)
    return lanczos.advance(lz, W, sx, s2, to_device(D[members]), unit)


def finish_round(lz: LanczosState, D: np.ndarray, members: np.ndarray) -> Any:
    """Return the new atoms of a round: (n_local, d)."""
    return lanczos.leading_vectors(lz, to_device(D[members]))


def refresh_chunk(state: DeviceState, r: int, D: Any, members: np.ndarray, new: Any, nonneg: bool) -> DeviceState:
    """Exchange the atoms of round `r` and refit their coefficients."""
    with device.turn("gpu"):
        old = take_rows(D, members)
        arrays = (_residual(state), state.coefficient, state.entries, r, old, new)
        R, coefficient = update.refresh(*arrays, nonneg)
        after = state._replace(R=R, coefficient=coefficient)
        return after if device.on_device(state.R) else park(after)


def worst_samples(
    state: DeviceState, D: Any, members: list[np.ndarray], new: list[Any], counts: np.ndarray
) -> Candidates:
    """Return the samples with the largest residual norms, as many as there are dead atoms, on the host."""
    n_dead = int(np.count_nonzero(counts == 0))
    if n_dead == 0:
        return Candidates(np.empty(0), np.empty((0, D.shape[1]), np.float32))
    with device.turn("gpu"):
        R, coefficient = _unscaled(_residual(state), state), _unscaled(state.coefficient, state)
        error = row_sums(R)[2]
        worst = np.argsort(-error, kind="stable")[:n_dead]
        updated = place_atoms(D, members, new)
        picked = [take_rows(a, worst) for a in (R, state.atom, coefficient)]
        rows = products.residual(picked[0], picked[1], -picked[2], updated)
        return Candidates(error[worst], device.to_host(rows))


def place_atoms(D: Any, members: list[np.ndarray], new: list[Any]) -> Any:
    """Return the new atoms of all rounds as one dictionary: (n_atoms, d). Rounds hold every atom once."""
    whole = namespace(D).concat(new)
    return take_rows(whole, np.argsort(np.concatenate(members)))


def merge_dictionary(
    D: np.ndarray,
    members: list[np.ndarray],
    new: list[Any],
    counts: np.ndarray,
    candidates: list[Candidates],
    rule: Rule,
    path: SeedPath,
) -> np.ndarray:
    """Return the updated dictionary on the host; see `kernels.chunk.merge_dictionary`."""
    here = [device.to_host(atoms) for atoms in new]
    return chunk.merge_dictionary(D, members, here, counts, candidates, rule, path)


def to_device(array: np.ndarray) -> Any:
    """Copy an array of the host to the device."""
    return device.current().asarray(array)


def take_rows(array: Any, rows: np.ndarray) -> Any:
    """Return some rows of a device array, by indices on the host."""
    return namespace(array).take(array, device.current().asarray(rows.astype(np.int64)), axis=0)


def _residual(state: DeviceState) -> Any:
    """Return the residual of a chunk on the device, copied there if it is parked."""
    return device.current().asarray(state.R)
