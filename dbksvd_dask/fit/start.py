"""The start of a fit: precision, memory plan, checks of the samples, mean, first dictionary."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.graph import load
from dbksvd_dask.graph.run import worker_threads
from dbksvd_dask.kernels.moments import Moments
from dbksvd_dask.kernels.scale import rows_near_one, smallest_norm
from dbksvd_dask.kernels.whiten import whitening
from dbksvd_dask.plan import memory, seeds, stream

if TYPE_CHECKING:
    from dbksvd_dask.fit.context import Context
    from dbksvd_dask.fit.policy import Policy
    from dbksvd_dask.plan.params import FitParams

logger = logging.getLogger(__name__)

# Rows of the stream over which mean and covariance are computed: exact for data up to that size, and a short pass
# instead of one over terabytes beyond it. The error of the mean is then below 0.2 % of a standard deviation.
MEAN_ROWS = 262_144


def working_dtype(dtype: Any) -> np.dtype:
    """Return the precision of a fit: float64 for float64 samples, float32 for everything else."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def unit_rows(atoms: Any, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Check a given dictionary and normalise its rows: (n_atoms, n_features).

    Rows that are unit vectors to working precision stay the same to the bit, so a dictionary returned by a fit
    encodes as the fit does.
    """
    atoms = np.asarray(atoms)
    if atoms.shape != shape:
        raise InputError(
            f"init has shape {atoms.shape}; it must be (n_atoms, n_features) = {shape}"
            + ("; transpose it with init.T" if atoms.shape == shape[::-1] else "")
        )
    if atoms.dtype.kind != "f" or not np.isfinite(atoms).all():
        raise InputError(f"init must hold finite floating-point values; it has dtype {atoms.dtype}")
    scaled = rows_near_one(atoms)  # norms that are finite at any scale of the atoms
    norms = np.linalg.norm(scaled.astype(np.float64), axis=1, keepdims=True)
    if (norms == 0).any():
        row = int(np.flatnonzero(norms == 0)[0])
        raise InputError(f"init row {row} is zero; every atom needs a direction")
    with np.errstate(over="ignore", under="ignore"):  # such norms are not near 1 anyway
        given = np.linalg.norm(atoms.astype(np.float64), axis=1, keepdims=True)
    unit = np.abs(given - 1) <= 8 * np.finfo(atoms.dtype).eps
    return np.where(unit, atoms, scaled / norms).astype(dtype)


# ---------------------------------------------------------------------------------------------- checks


def check_samples(context: Context) -> None:
    """Refuse samples that cannot train a dictionary, before any work; warn about unusual sizes."""
    _warn_of_sizes(context.params, context.stream.n_train, context.source.n_features)
    context.source.check_finite()


def _warn_of_sizes(params: FitParams, n_train: int, n_features: int) -> None:
    """Log a warning about sizes that are valid but rarely intended."""
    if params.k > n_features:
        logger.warning(
            "k=%d exceeds the %d features: that many atoms describe any sample exactly; use a smaller k",
            *(params.k, n_features),
        )
    if params.n_atoms > n_train:
        logger.warning(
            "n_atoms=%d exceeds the %d training rows: atoms will be single samples; use fewer atoms or more rows",
            *(params.n_atoms, n_train),
        )


def check_scale(batch: Moments, dtype: np.dtype) -> None:
    """Refuse samples so small that their entries have lost precision; samples of zeros are accepted."""
    size = math.sqrt(float(batch.y_square_sum.sum()) / max(batch.n_samples, 1))
    if 0 < size < smallest_norm(dtype):
        raise InputError(
            f"the samples have norms of about {size:.2g}, too small for {dtype}, which needs "
            f"{smallest_norm(dtype):.2g} or more; multiply them by a constant, which changes no atom"
        )


def plan_memory(context: Context, n_validation: int, limit: int | None) -> memory.MemoryPlan:
    """Return the peak memory per worker process on the current scheduler; refuse a plan above the limit.

    An array in memory is not counted: the caller holds it.

    Parameters
    ----------
    n_validation : held-out rows
    limit : bytes per worker process, or None
    """
    sizes = _fit_sizes(context, n_validation)
    threads = worker_threads()
    processes = memory.uneven_workers(list(threads.values()))
    together = "" not in threads and context.place.placement.device == "cpu"
    if limit is None:
        return memory.plan_fit(sizes, *processes, together)
    return memory.check_limit(sizes, limit, *processes, together)


def _fit_sizes(context: Context, n_validation: int) -> memory.FitSizes:
    """Return the sizes that determine the memory of a fit."""
    source, p = context.source, context.params
    return memory.FitSizes(
        n_features=source.n_features,
        n_atoms=p.n_atoms,
        k=p.training_slots,
        batch_size=context.stream.rows_per_batch,
        chunk_size=p.chunk_size,
        n_rounds=p.n_rounds,
        lanczos_steps=p.lanczos_steps,
        groups=p.groups or (),
        encoder=p.encoder,
        gram=p.gram,
        validation=n_validation,
        itemsize=context.dtype.itemsize,
        read_itemsize=source.read_copies * source.dtype.itemsize,
        reads_ahead=source.reads_ahead,
        rows_first=source.rows_first,
        whitened=p.whiten > 0,
    )


# ---------------------------------------------------------------------------------------------- first dictionary


def find_whitening(context: Context, mean: np.ndarray | None) -> np.ndarray | None:
    """Return the map to whitened coordinates, from the covariance of the rows that the mean is computed over."""
    params = context.params
    if params.whiten == 0:
        return None
    rows, size, dtype = _first_rows(context), params.chunk_size, context.dtype
    total = context.compute(lambda: load.build_second_moment(context.source, rows, mean, size, dtype))
    return whitening(total, params.whiten, dtype)


def _first_rows(context: Context) -> np.ndarray:
    """Return the first rows of the stream, at most `MEAN_ROWS`, in the order of the source."""
    return np.sort(context.stream.rows(0, min(context.stream.n_train, MEAN_ROWS)))


def first_dictionary(context: Context, policy: Policy, init: np.ndarray | None) -> Dictionary:
    """Return the mean and the first atoms, which encode the first batch.

    Parameters
    ----------
    init : (n_atoms, n_features) given first atoms, or None
    """
    check_init(context, policy, init)  # before rows are read for the mean
    mean = _mean(context, policy) if context.params.center else None
    atoms = _first_atoms(context, policy.first_n_atoms, mean, init)
    return Dictionary(atoms, mean, context.params.to_json(), context.source.identity)


def check_init(context: Context, policy: Policy, init: np.ndarray | None) -> None:
    """Refuse given first atoms that do not fit."""
    if init is not None:
        unit_rows(init, (policy.first_n_atoms, context.source.n_features), context.dtype)


def _mean(context: Context, policy: Policy) -> np.ndarray:
    """Return the mean of the first rows of the stream, or zeros if the policy learns it."""
    if policy.learns_mean:
        return np.zeros(context.source.n_features)
    rows = _first_rows(context)
    size, dtype = context.params.chunk_size, context.dtype
    total = context.compute(lambda: load.build_sum(context.source, rows, size, dtype))
    return np.asarray(total / rows.size)


def _first_atoms(context: Context, n_atoms: int, mean: np.ndarray | None, init: np.ndarray | None) -> np.ndarray:
    """Return given atoms, random atoms or samples: (n_atoms, n_features)."""
    shape = (n_atoms, context.source.n_features)
    if init is not None:
        return unit_rows(init, shape, context.dtype)
    fallback = seeds.random_atoms(*shape, context.dtype, context.params.seed)
    if context.params.init == "uniform":
        return fallback
    n_samples = min(n_atoms, context.stream.n_train)  # no sample twice: equal atoms would compete for ever
    reach = max(n_samples, context.stream.rows_per_batch)
    rows = np.sort(context.stream.rows(0, reach)[stream.initial_rows(reach, n_samples)])
    samples = context.compute(lambda: load.build_rows(context.source, rows, mean, context.dtype))
    samples = rows_near_one(samples)
    norms = np.linalg.norm(samples, axis=1, keepdims=True)
    drawn, others = fallback[:n_samples], fallback[n_samples:]
    atoms = np.where(norms > 0, samples / np.where(norms > 0, norms, 1), drawn).astype(context.dtype)
    return np.concatenate([atoms, others])
