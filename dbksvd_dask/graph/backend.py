"""Where the heavy work runs, and what it does there to one chunk of samples.

A mix of devices would make the result depend on which worker got which chunk, so all workers of a cluster compute
on GPUs or none does. `auto` asks every worker that is there; an explicit `gpu` is refused where one has none.

Every function of a chunk takes arrays and returns new ones; none changes its inputs. That is what lets Dask
recompute whatever a dead worker held, and hand one result to several workers. Results are marked read-only, so
that a mistake raises instead of corrupting. Arrays on a GPU go to the functions of the same names in `gpu.chunk`;
what is only array code (Lanczos steps, sums of parts) serves both.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.system import CPU_COUNT

from dbksvd_dask.errors import DeviceError
from dbksvd_dask.gpu import device as gpu
from dbksvd_dask.gpu.device import on_device, to_host
from dbksvd_dask.graph.run import current_client
from dbksvd_dask.kernels import lanczos, update
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.chunk import Candidates, ChunkState, ChunkStats, Rounds
from dbksvd_dask.kernels.encode import encode_rows, residual, squared_norms
from dbksvd_dask.kernels.lanczos import LanczosState
from dbksvd_dask.kernels.moments import (
    Moments,
    ResidualMoments,
    moments,
    moments_and_norms,
    relative_error_sum,
    residual_moments,
    row_norms,
)
from dbksvd_dask.kernels.scale import in_units, rows_near_one, unit_of
from dbksvd_dask.plan.device import CPU, DevicePlan, Sizes, plan_device
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec

logger = logging.getLogger(__name__)


class Worker(NamedTuple):
    """What a process that computes has to offer."""

    name: str  # empty for this process
    missing: str  # what keeps it from using a GPU
    budget: int  # bytes of its device to plan with
    n_threads: int


def look() -> tuple[str, int]:
    """What keeps the process that runs this from using a GPU, and the bytes of its device."""
    missing = gpu.missing()
    return missing, 0 if missing else gpu.budget()


def workers() -> list[Worker]:
    """The processes on which a computation would run now."""
    client = current_client()
    if client is None:
        threads = dask.config.get("num_workers", None) or CPU_COUNT
        return [Worker("", *look(), int(threads))]
    n_threads = client.nthreads()
    # a worker that dies while it is asked, as with too little memory, must not end the fit: its tasks go elsewhere
    answers: dict[str, Any] = client.run(look, on_error="return")
    return [Worker(name, *_answer(answers[name]), n_threads.get(name, 1)) for name in sorted(answers)]


def _answer(given: Any) -> tuple[str, int]:
    """What a worker said of its device, or why it could not."""
    missing, budget = given if isinstance(given, tuple) else (f"there is no answer ({given})", 0)
    return str(missing), int(budget)


def choose(device: str) -> list[Worker]:
    """Workers whose GPUs are to be used; empty for the CPU.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
    """
    if device == "cpu":
        return []
    found = workers()
    without = [w for w in found if w.missing]
    if found and not without:
        logger.info("device=%r: %d GPU(s)", device, len(found))
        return found
    if device == "auto":
        return []
    if not found:
        raise DeviceError("device='gpu' was asked for, but the cluster has no workers yet; wait for them first")
    where = f" on worker {without[0].name}" if without[0].name else ""
    raise DeviceError(f"device='gpu' was asked for, but{where} {without[0].missing}; or use device='cpu'")


def place(device: str, sizes: Sizes, encoder: str) -> DevicePlan:
    """Decide where a batch runs, and in which chunks.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
    sizes : of the whole batch
    encoder : one of `plan.encoders.ENCODERS`
    """
    found = choose(device)
    if not found:
        return DevicePlan(CPU, sizes.chunk_size, 0)
    chunks = -(-sizes.n_rows // sizes.chunk_size)
    share = -(-chunks // len(found)) * sizes.chunk_size  # whole chunks: one device may have one more than another
    own = sizes._replace(n_rows=min(share, sizes.n_rows))
    made = plan_device(own, min(w.budget for w in found), encoder, max(w.n_threads for w in found))
    logger.info("device plan: %s", made)
    return made


# ---------------------------------------------------------------------------------------------- one chunk


def frozen(array: np.ndarray) -> np.ndarray:
    """Mark a result read-only; arrays on a device have no such mark."""
    if not on_device(array):
        array.flags.writeable = False
    return array


def _gpu() -> Any:
    """The device's functions, whose libraries are only there where a device is."""
    from dbksvd_dask.gpu import chunk as gpu

    return gpu


@one_blas_thread
def encode_chunk(
    Y: np.ndarray,
    D: np.ndarray,
    gram: np.ndarray,
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
    if on_device(D):
        return _gpu().encode_chunk(Y, D, gram, spec, rounds, weights)
    atom, coefficient = encode_rows(Y, D, gram, spec, weights)
    R = residual(Y, atom, coefficient, D)
    start, pos, local = update.group_by_round(atom, rounds.round_of, rounds.local_of, len(rounds.atoms))
    counts = update.count_atoms(atom, D.shape[0])
    for array in (R, atom, coefficient, start, pos, local):
        frozen(array)
    unit = unit_of(float(np.abs(coefficient).max(initial=0)), coefficient.dtype)
    return ChunkState(R, atom, coefficient, start, pos, local, unit=unit), counts


def chunk_stats(Y: np.ndarray, state: ChunkState, counts: np.ndarray) -> ChunkStats:
    """Sums over the samples and their residual."""
    if not on_device(Y):
        return ChunkStats(*moments_and_norms(Y, state.R), counts, time.time())
    samples = _gpu().row_sums(Y)
    return ChunkStats(_merged(samples, _gpu().row_sums(state.R)), samples[2], counts, time.time())


def _merged(samples: tuple[np.ndarray, ...], rest: tuple[np.ndarray, ...]) -> Moments:
    """Moments from the sums over samples and residual that came from a device."""
    error, n_nonzero = relative_error_sum(samples[2], rest[2])
    return Moments(samples[2].size, int(n_nonzero), float(error), *samples[:2], *rest[:2])


@one_blas_thread
def codes_of(
    Y: np.ndarray,
    D: np.ndarray,
    gram: np.ndarray,
    spec: EncodeSpec,
    weights: AtomWeights | None = None,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode samples where the dictionary is; atom (n, k) int32 and coefficient (n, k) on the host."""
    compute = _gpu().encode_rows if on_device(D) else encode_rows
    return compute(Y, D, gram, spec, weights, first)


def residual_of(Y: np.ndarray, atom: np.ndarray, coefficient: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Residual of given codes, computed where the dictionary is, on the host: (n, d)."""
    compute = _gpu().residual if on_device(D) else residual
    return compute(Y, atom, coefficient, D)


@one_blas_thread
def measure(
    Y: np.ndarray,
    D: np.ndarray,
    gram: np.ndarray,
    spec: EncodeSpec,
    weights: AtomWeights | None = None,
    first: int = 0,
) -> tuple[Moments, int]:
    """Encode samples: sums over them and their residual, and the number of nonzeros."""
    if on_device(D):
        samples, rest, n_nonzeros = _gpu().measure(Y, D, gram, spec, weights, first)
        return _merged(samples, rest), n_nonzeros
    atom, coefficient = encode_rows(Y, D, gram, spec, weights, first)
    R = residual(Y, atom, coefficient, D)
    return moments(Y, R), int(np.count_nonzero(atom >= 0))


def _inputs(*arrays: np.ndarray) -> list[Any]:
    """Arrays as kernels take them."""
    return list(map(kernel_input, arrays))


class RoundSums(NamedTuple):
    """Sums over the samples of each atom of a round, in units of the chunks' largest samples.

    `own` are sums for samples times ``2^unit``; `W` carries one such factor, since two would leave float32.
    """

    W: np.ndarray  # (n_local, d), sums of products with residual rows
    own: tuple[np.ndarray, ...]  # (n_local,) float64 each
    unit: int = 0


def first_product(state: ChunkState, r: int, n_local: int) -> RoundSums:
    """Partial sums of the warm start of round `r`: W (n_local, d) and x2 (n_local,)."""
    if not isinstance(state, ChunkState):
        return RoundSums(*_gpu().first_product(state, r, n_local))
    x = in_units(state.coefficient, state.unit)
    arrays = (state.R, x, state.start[r], state.pos, state.local)
    W, x2 = update.start_products(*(*_inputs(*arrays), n_local))
    return RoundSums(frozen(W), (frozen(x2),), state.unit)


def next_product(state: ChunkState, r: int, lz: LanczosState) -> RoundSums:
    """Partial sums of one Lanczos product of round `r`: W (n_local, d), sx and s2 (n_local,)."""
    if not isinstance(state, ChunkState):
        return RoundSums(*_gpu().next_product(state, r, lz))
    # the vectors carry the units of the residual, which is not copied
    x, V = (in_units(a, state.unit) for a in (state.coefficient, lz.basis[-1]))
    arrays = (state.R, x, state.start[r], state.pos, state.local, V, lz.dv)
    W, sx, s2 = update.next_products(*_inputs(*arrays))
    return RoundSums(frozen(W), (frozen(sx), frozen(s2)), state.unit)


def add_sums(parts: list[RoundSums]) -> RoundSums:
    """Sums over some chunks, added from left to right, in the units of the largest samples."""
    unit = min(part.unit for part in parts)
    W, *own = add_parts([_in_units_of(part, unit) for part in parts])
    return RoundSums(W, tuple(own), unit)


def _in_units_of(part: RoundSums, unit: int) -> tuple[np.ndarray, ...]:
    """Arrays of a part in other units."""
    step = unit - part.unit
    return in_units(part.W, step), *(in_units(total, 2 * step) for total in part.own)


def add_parts(parts: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Sum tuples of arrays from left to right; the order fixes the bits."""
    if len(parts) == 1:
        return parts[0]
    if on_device(parts[0][0]):
        return tuple(_sum_in_order(arrays) for arrays in zip(*parts, strict=True))
    totals = [np.add(a, b) for a, b in zip(parts[0], parts[1], strict=True)]
    for part in parts[2:]:
        for total, more in zip(totals, part, strict=True):
            np.add(total, more, out=total)
    return tuple(frozen(total) for total in totals)


def _sum_in_order(arrays: tuple[Any, ...]) -> Any:
    """Sum of device arrays from left to right."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def _rows(D: np.ndarray, members: np.ndarray, like: Any) -> Any:
    """Some atoms of a dictionary on the host, brought to where the array `like` is."""
    return _gpu().to_device(D[members]) if on_device(like) else D[members]


def begin_round(parts: list[RoundSums], D: np.ndarray, members: np.ndarray) -> LanczosState:
    """Warm start of a round from the chunks' partial sums."""
    W, (x2,), unit = add_sums(parts)
    return lanczos.warm_start(W, x2, _rows(D, members, W), unit)


def advance_round(parts: list[RoundSums], lz: LanczosState, D: np.ndarray, members: np.ndarray) -> LanczosState:
    """One Lanczos step of a round from the chunks' partial sums."""
    W, (sx, s2), unit = add_sums(parts)
    return lanczos.advance(lz, W, sx, s2, _rows(D, members, W), unit)


def finish_round(lz: LanczosState, D: np.ndarray, members: np.ndarray) -> np.ndarray:
    """New atoms of a round: (n_local, d)."""
    return frozen(lanczos.leading_vectors(lz, _rows(D, members, lz.dv)))


def refresh_chunk(
    state: ChunkState, r: int, D: np.ndarray, members: np.ndarray, new: np.ndarray, nonneg: bool
) -> ChunkState:
    """Exchange the atoms of round `r` and refit their coefficients."""
    if not isinstance(state, ChunkState):
        return _gpu().refresh_chunk(state, r, D, members, new, nonneg)
    arrays = (state.R, state.coefficient, state.start[r], state.pos, state.local, D[members], new)
    R, coefficient = update.refresh(*(*_inputs(*arrays), nonneg))
    return state._replace(R=frozen(R), coefficient=frozen(coefficient))


def after_update(state: ChunkState, stats: ChunkStats) -> ResidualMoments:
    """Sums over the residual after the last round."""
    if isinstance(state, ChunkState):
        return residual_moments(state.R, stats.y_norms)
    r_sum, r_square_sum, r_norms = _gpu().row_sums(state.R)
    error, _ = relative_error_sum(stats.y_norms, r_norms)
    return ResidualMoments(r_norms.size, float(error), r_sum, r_square_sum)


def worst_samples(
    state: ChunkState, D: np.ndarray, members: list[np.ndarray], new: list[np.ndarray], counts: np.ndarray
) -> Candidates:
    """Samples of a chunk with the largest residual norms, as many as there are dead atoms.

    The sample is rebuilt from its residual and its codes, so that the chunk need not be kept or read again.
    """
    if not isinstance(state, ChunkState):
        return Candidates(*_gpu().worst_samples(state, D, members, new, counts))
    n_dead = int(np.count_nonzero(counts == 0))
    if n_dead == 0:
        return Candidates(np.empty(0), np.empty((0, D.shape[1]), D.dtype))
    error = row_norms(state.R)
    worst = np.argsort(-error, kind="stable")[:n_dead]
    updated = place_atoms(D, members, new)
    atom = kernel_input(state.atom[worst])
    rows = residual(state.R[worst], atom, -state.coefficient[worst], updated)
    return Candidates(error[worst], rows)


def place_atoms(D: np.ndarray, members: list[np.ndarray], new: list[np.ndarray]) -> np.ndarray:
    """Dictionary on the host with the atoms of all rounds put in: a new (n_atoms, d)."""
    out = np.array(D)
    for indices, atoms in zip(members, new, strict=True):
        out[indices] = to_host(atoms)
    return out


def merge_dictionary(
    D: np.ndarray,
    members: list[np.ndarray],
    new: list[np.ndarray],
    counts: np.ndarray,
    candidates: list[Candidates],
    fresh: np.ndarray | None,
) -> np.ndarray:
    """Updated dictionary: the rounds' atoms, and replacements for atoms that no sample used.

    Dead atoms in ascending order take the worst samples of the batch in descending order of error (of equal
    errors the earlier sample), each sample once; where samples run out the atom stays.

    Parameters
    ----------
    candidates : per chunk, in chunk order; empty lists when atoms are kept
    fresh : (n_atoms, d) random unit rows to take instead of samples, or None
    """
    out = place_atoms(D, members, new)
    dead = np.flatnonzero(counts == 0)
    if dead.size and fresh is not None:
        out[dead] = fresh[dead]
    elif dead.size and candidates:
        error = np.concatenate([c.error for c in candidates])
        rows = np.concatenate([c.rows for c in candidates])
        order = np.argsort(-error, kind="stable")
        order = order[rows[order].any(axis=1)][: dead.size]
        chosen = rows_near_one(rows[order])
        norms = np.linalg.norm(chosen.astype(np.float64), axis=1)
        out[dead[: order.size]] = (chosen / norms[:, None]).astype(out.dtype)
    return frozen(out)


def prepare(raw: Any, mean: np.ndarray | None, dtype: Any, device: str = "cpu") -> np.ndarray:
    """Rows as the kernels take them: C-contiguous, of the working dtype, less the mean; `raw` stays as it is."""
    if device == "gpu":
        return _gpu().prepare(raw, mean, dtype)
    with np.errstate(over="ignore"):  # what leaves the range of the dtype becomes infinite, and is refused by name
        if mean is None:
            return np.ascontiguousarray(raw, dtype=dtype)
        return np.ascontiguousarray(np.subtract(raw, mean.astype(dtype, copy=False), dtype=dtype))


def norms2_of(Y: np.ndarray) -> np.ndarray:
    """Squared norm of each row in float64, on the host: (n,)."""
    return _gpu().squared_norms(Y) if on_device(Y) else squared_norms(Y)


def to_device(D: np.ndarray) -> Any:
    """Bring a dictionary to the device of this process."""
    return _gpu().to_device(D)


def device_gram(D: np.ndarray, on_device: bool) -> Any:
    """Gram of a dictionary by the device of this process, kept there or brought back: (n_atoms, n_atoms)."""
    return _gpu().gram_matrix(D, on_device)


def parked(state: ChunkState) -> ChunkState:
    """Take the residual of a state off the device, where it waits for the next task."""
    return _gpu().park(state)
