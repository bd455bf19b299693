"""What every part of a fit works with: samples, parameters, the order of rows, precision, device, subscribers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dask.delayed import Delayed

from dbksvd_dask import events
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.start import working_dtype
from dbksvd_dask.graph import backend
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
    callbacks : subscribers to progress events

    Attributes
    ----------
    params : without anything left to rules
    stream : order in which the rows are read
    dtype : precision of the fit
    place : where batches run and in which chunks; see `place_batches`
    """

    def __init__(
        self, source: Source, params: FitParams, n_held: int, callbacks: Sequence[events.Callback]
    ) -> None:
        self.source, self.callbacks = source, tuple(callbacks)
        self.dtype = working_dtype(source.dtype)
        first = params.first_rows
        self.stream = stream.plan_stream(source.n_samples, params.batch_size, n_held, params.seed, first)
        self.params = params.for_data(self.stream.rows_per_batch, source.n_features)
        if 0 < self.stream.n_validation < n_held:
            logger.info("validation cut from %d to %d rows, a tenth of the data", n_held, self.stream.n_validation)
        self.place = DevicePlan(CPU, params.chunk_size, 0)

    def place_batches(self, n_rows: int) -> None:
        """Decide where batches of `n_rows` rows run; raises when a device was asked for that is not there."""
        p = self.params
        shape = (self.source.n_features, p.n_atoms, p.slots)
        sizes = Sizes(n_rows, p.chunk_size, *shape, p.n_rounds, p.lanczos_steps, itemsize=self.dtype.itemsize)
        self.place = backend.place(p.device, sizes, p.encoder)

    def encode_plan(self, state: Dictionary) -> EncodePlan:
        """Return how the dictionary as it is now encodes samples."""
        return plan_encoding(state, self.place.placement)

    def attempt(self, run: Callable[[], T], iteration: int) -> T:
        """Run something that may fail for a reason that passes, such as a lost worker."""

        def on_retry(number: int, attempts: int, reason: str) -> None:
            self.emit(events.Retrying(iteration, number, attempts, reason))

        return attempt(run, on_retry)

    def compute(self, build: Callable[[], Delayed], iteration: int = 0) -> Any:
        """Build and compute a graph, again where that may help."""
        return self.attempt(lambda: compute(build()), iteration)

    def emit(self, event: events.Event) -> None:
        """Call the subscribers."""
        events.emit(self.callbacks, event)
