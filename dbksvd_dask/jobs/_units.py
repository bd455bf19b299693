"""The units of an encode job: one task each, run a bounded number at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import dask
import numpy as np
from dask.callbacks import Callback as DaskCallback
from dask.delayed import Delayed

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.reconstruction import reconstruction_moments
from dbksvd_dask.evaluate.sums import CodeSums
from dbksvd_dask.graph import run
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.encode import EncodePlan
from dbksvd_dask.graph.load import dictionary_and_gram, prepare
from dbksvd_dask.graph.run import current_client
from dbksvd_dask.graph.sources import StoreRows
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.jobs._workers import run_on_client
from dbksvd_dask.kernels.blas import one_blas_thread
from dbksvd_dask.kernels.moments import merge_moments
from dbksvd_dask.plan import units as plan_units
from dbksvd_dask.store.codes_writer import CodesWriter, UnitWritten
from dbksvd_dask.store.reader import RowReader

# Rows that a task of the encode job widens and encodes at a time: whole tiles, enough for full speed, and a task
# then needs the memory of its stored chunk and little more.
BLOCK_ROWS = 9 * plan_units.TILE_ROWS
# Tasks of one graph on local threads, where results are a few bytes and only as many chunks as there are
# threads are in memory; between two graphs the threads wait for the slowest.
LOCAL_WINDOW = 256


@one_blas_thread
def encode_unit(
    reader: RowReader, unit: int, D: np.ndarray, gram: np.ndarray | None, how: EncodePlan, writer: CodesWriter
) -> UnitWritten:
    """Encode one unit of a store and write it; return only a few bytes.

    Writing is the one side effect of a task here: a unit that is run twice writes the same bytes twice.
    """
    goal, compute = writer.plan, functions(how.place)
    first, stop = goal.unit_bounds(unit)
    atom = np.empty((stop - first, how.spec.k), np.int32)
    coefficient = np.empty((stop - first, how.spec.k), goal.coefficient_dtype)
    sums = []
    for start in range(first, stop, goal.read_rows):
        raw = reader.read(start, min(start + goal.read_rows, stop))
        for a, b in plan_units.split_rows(raw.shape[0], BLOCK_ROWS):
            where = StoreRows(reader, np.arange(start + a, start + b)).where
            Y = prepare(raw[a:b], where, how.mean, how.dtype)
            part = slice(start - first + a, start - first + b)
            atom[part], exact = compute.encode_rows(Y, D, gram, how.spec, how.weights, start + a)
            coefficient[part] = _narrow(exact, goal.coefficient_dtype)
            # the error of what is stored, not of what was computed
            R = compute.residual(Y, atom[part], coefficient[part].astype(how.dtype), D)
            sums.append(reconstruction_moments(Y, R))
    total = CodeSums.of(merge_moments(sums), atom, coefficient, first, (goal.n_atoms, goal.n_top))
    return writer.write_unit(unit, atom, coefficient, total)


def _narrow(coefficient: np.ndarray, dtype: str) -> np.ndarray:
    """Convert coefficients to the dtype of the store; refuse those that do not fit."""
    limit = float(np.finfo(dtype).max)
    largest = float(np.abs(coefficient).max(initial=0.0))
    if largest > limit:
        raise InputError(
            f"a coefficient of {largest:.4g} does not fit into {dtype} (at most {limit:.4g}); "
            "use coefficient_dtype='float32'"
        )
    smallest = float(np.finfo(dtype).smallest_normal)
    if 0 < largest < smallest:
        raise InputError(
            f"the largest coefficient of a block is {largest:.4g}: {dtype} keeps all digits only from "
            f"{smallest:.2g} on; use coefficient_dtype='float32'"
        )
    return coefficient.astype(dtype)


def hold_dictionary(D: np.ndarray, how: EncodePlan) -> tuple[Delayed, Delayed | None]:
    """Compute the dictionary and its gram, if it has one, once and keep them where the tasks run."""
    names = Tasks()
    dictionary, gram = dictionary_and_gram(names, D, how)
    if gram is None:
        return dask.persist(names.finish(dictionary))[0], None
    return dask.persist(names.finish(dictionary), names.finish(gram))


def build_units(
    reader: RowReader,
    units: Iterable[int],
    held: tuple[Delayed, Delayed | None],
    how: EncodePlan,
    writer: CodesWriter,
) -> Iterator[Delayed]:
    """Yield tasks that encode and write the units of a store, each built when it is requested."""
    light = how.in_tasks()
    for unit in units:
        names = Tasks()
        yield names.finish(names.call(encode_unit, "encode", (unit,), reader, unit, *held, light, writer))


def run_units(tasks: Iterator[Delayed], on_done: Callable[[UnitWritten], None]) -> None:
    """Run tasks on the current scheduler, a bounded number at a time; call `on_done` with each result."""
    client = current_client()
    if client is not None:
        run.warn_of_mixed_arithmetic(client)
        run_on_client(client, tasks, on_done)
        return

    def heard(key: Any, result: Any, *_: Any) -> None:
        if isinstance(result, UnitWritten):
            on_done(result)

    while window := list(itertools.islice(tasks, LOCAL_WINDOW)):
        with DaskCallback(posttask=heard):
            dask.compute(window)
