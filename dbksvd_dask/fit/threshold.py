"""The threshold with which a dictionary encodes, where k is the mean number of nonzeros.

A batch is encoded before its update, with atoms that momentum has moved, group by group and without a refit; the
finished dictionary is used otherwise. So the threshold of encoding is a separate one from that of training: it is
sought on rows that the last batch did not fit, encoded as `transform` would.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.fit.context import Context
from dbksvd_dask.graph.encode import EncodePlan, build_evaluation
from dbksvd_dask.plan import growth

# Rows on which nonzeros are counted: the error of their mean is their spread over samples divided by 90.
COUNTED_ROWS = 8192
# Counts of one search at most, and a distance from k after which one more step is the last.
MOST_COUNTS, NEAR = 5, 0.01
# The same of a dictionary that has yet to grow, whose next atoms change the threshold anyway: with as many rows
# and counts as above, the search took two fifths of the CPU seconds of a fit with the recipe "recover".
GROWING_ROWS, GROWING_COUNTS = 2048, 2


def encode_threshold(
    context: Context, at: Callable[[float], Dictionary], threshold: float, learned: float
) -> Dictionary:
    """Return the state at whose threshold rows have k nonzeros on average.

    Parameters
    ----------
    at : gives the state after a batch, for a threshold
    threshold : that of the state before the batch; 0 where it has none
    learned : smallest coefficient of the next batch, from which the search starts if there is nothing better
    """
    threshold = threshold or learned
    state, k = at(threshold), context.params.k
    grown = state.n_atoms == context.params.n_atoms
    n_rows, most = (COUNTED_ROWS, MOST_COUNTS) if grown else (GROWING_ROWS, GROWING_COUNTS)
    rows = unfitted_rows(context, state, n_rows)
    seen: list[tuple[float, float]] = []
    while threshold > 0 and len(seen) < most and not (seen and abs(seen[-1][1] / k - 1) < NEAR):
        seen.append((threshold, mean_nonzeros(context, state, context.encode_plan(state), rows)))
        fall = growth.threshold_fall(*seen[-2:]) if len(seen) > 1 else growth.FALL
        threshold = growth.next_threshold(*seen[-1], k, fall)
        state = at(threshold)
    return state


def unfitted_rows(context: Context, state: Dictionary, n_rows: int) -> np.ndarray:
    """Return about n_rows rows that the last batch did not fit: held-out ones or, where few, those of the next."""
    held = context.stream.validation_rows()
    if held.size >= n_rows // 2:
        return held[:: -(-held.size // n_rows)]
    return context.stream.batch(state.iteration)[:n_rows]


def mean_nonzeros(context: Context, state: Dictionary, how: EncodePlan, rows: np.ndarray) -> float:
    """Return the mean number of nonzeros of some rows."""
    size = min(rows.size, context.place.chunk_size)
    arguments = (context.source, rows, state.atoms, how, size, state.iteration - 1)
    _, n_nonzeros = context.compute(lambda: build_evaluation(*arguments))
    return float(n_nonzeros) / rows.size
