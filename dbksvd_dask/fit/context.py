"""The setting that all parts of a fit share: samples, parameters, order of rows, precision, device, callbacks."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.start import working_dtype
from dbksvd_dask.graph import backend
from dbksvd_dask.graph.batch import Upcoming
from dbksvd_dask.graph.encode import EncodePlan, plan_encoding
from dbksvd_dask.graph.run import attempt, compute
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.plan import stream
from dbksvd_dask.plan.device import CPU, DevicePlan, Sizes
from dbksvd_dask.plan.params import FitParams

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Context:
    """The setting of one fit.

    Parameters
    ----------
    source : the samples
    params : checked parameters, also those that leave something to rules
    n_held : rows of the source to set aside for measurements
    callbacks : called with each progress event

    Attributes
    ----------
    params : without anything left to rules
    stream : the order in which rows are read
    dtype : precision of the fit
    place : where batches run, and their chunk size; see `place_batches`
    """

    def __init__(
        self, source: Source, params: FitParams, n_held: int, callbacks: Sequence[events.Callback]
    ) -> None:
        self.source, self.callbacks = source, tuple(callbacks)
        self.status: events.Callback | None = (
            None  # called with every event but rounds, which cost a little to count
        )
        self.dtype = working_dtype(source.dtype)
        self._fit = uuid.uuid4().hex  # identifies this fit among those of the process
        first = params.first_rows
        self.stream = stream.plan_stream(source.n_samples, params.batch_size, n_held, params.seed, first)
        self.params = params.for_data(self.stream.rows_per_batch, source.n_features)
        if 0 < self.stream.n_validation < n_held:
            logger.info("validation cut from %d to %d rows, a tenth of the data", n_held, self.stream.n_validation)
        self.place = DevicePlan(CPU, params.chunk_size, 0)

    def place_batches(self, n_rows: int) -> None:
        """Decide where batches of `n_rows` rows run; raise if a requested device is missing."""
        p = self.params
        shape = (self.source.n_features, p.n_atoms, p.slots)
        sizes = Sizes(n_rows, p.chunk_size, *shape, p.n_rounds, p.lanczos_steps, itemsize=self.dtype.itemsize)
        sizes = sizes._replace(groups=p.groups or ())
        self.place = backend.place(p.device, sizes, p.encoder, p.gram)

    def upcoming(self, iteration: int) -> Upcoming:
        """Return the rows that the batch after this one reads; none after the last."""
        last = iteration + 1 >= self.params.n_iter
        return Upcoming(self._fit, np.empty(0, np.int64) if last else self.stream.batch(iteration + 1))

    def encode_plan(self, state: Dictionary) -> EncodePlan:
        """Return how a state of the dictionary encodes samples."""
        return plan_encoding(state, self.place.placement)

    def attempt(self, run: Callable[[], T], iteration: int) -> T:
        """Call `run`, and again after a transient failure such as a lost worker."""

        def on_retry(number: int, attempts: int, reason: str) -> None:
            self.emit(events.Retrying(iteration, number, attempts, reason))

        return attempt(run, on_retry)

    def compute(self, build: Callable[[], Delayed], iteration: int = 0) -> Any:
        """Build and compute a graph, and again after a transient failure."""
        return self.attempt(lambda: compute(build()), iteration)

    def emit(self, event: events.Event) -> None:
        """Call the callbacks with an event."""
        events.emit(self.callbacks if self.status is None else (*self.callbacks, self.status), event)
