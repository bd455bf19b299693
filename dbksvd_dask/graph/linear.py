"""Tasks that fit a linear encoder to the codes of a dictionary: two passes over rows, each ending in a sum.

A task encodes one block of rows and sums over it; the sums of the blocks are added one by one in the order of the
rows, so the result depends on the rows and their cut into blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.graph.encode import EncodePlan, plan_encoding
from dbksvd_dask.graph.load import dictionary_and_gram, prepare
from dbksvd_dask.graph.run import attempt, compute
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.kernels import chunk, linear
from dbksvd_dask.plan.units import split_rows


def fit_linear(
    source: Source, rows: np.ndarray, dictionary: Dictionary, chunk_size: int, given: Mapping[str, Any]
) -> linear.LinearMap:
    """Return the linear map fitted to the codes of some rows, on the current scheduler.

    Parameters
    ----------
    rows : (n,) int64, in ascending order
    chunk_size : rows of a task
    given : in what the codes differ from those of the fit; some of `plan.encoder.CHOOSABLE`
    """
    how = plan_encoding(dictionary, given=given)

    def total(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
        def build() -> Delayed:
            return build_total(source, rows, dictionary.atoms, how, chunk_size, label, function, *arguments)

        return attempt(lambda: compute(build()), lambda *_: None)

    sums = total("code-sums", linear.code_sums, n_latents(how, dictionary.n_atoms))
    fitted, typical = linear.least_squares(sums), linear.typical_coefficients(sums)
    bins = total("bin-sums", linear.bin_sums, fitted, typical)
    return linear.with_thresholds(fitted, bins, sums.counts, typical)


def n_latents(how: EncodePlan, n_atoms: int) -> int:
    """Return the latents of a linear encoder: the atoms, or two for each where codes have both signs."""
    return n_atoms if how.spec.nonneg else 2 * n_atoms


def build_total(
    source: Source,
    rows: np.ndarray,
    D: np.ndarray,
    how: EncodePlan,
    chunk_size: int,
    label: str,
    function: Callable[..., Any],
    *arguments: Any,
) -> Delayed:
    """Build the graph that encodes blocks of rows, calls `function` for each, and adds the results."""
    names = Tasks()
    dictionary, gram = dictionary_and_gram(names, D, how)
    light = how.in_tasks()
    shared = [names.data(value, f"{label}-{i}") for i, value in enumerate(arguments)]
    total: Any = None
    for c, (a, b) in enumerate(split_rows(rows.size, chunk_size)):
        block = source.take(rows[a:b])
        part = names.call(_of_block, label, (c,), function, block, dictionary, gram, light, shared)
        total = part if total is None else names.call(_add, f"{label}-total", (c,), total, part)
    return names.finish(total)


def _of_block(
    function: Callable[..., Any], rows: Any, D: np.ndarray, gram: Any, how: EncodePlan, arguments: list[Any]
) -> Any:
    """Load and encode a block of rows, and sum over it."""
    Y = prepare(rows.load(), rows.where, how.mean, how.dtype)
    atom, coefficient = chunk.encode_rows(Y, D, gram, how.spec, how.weights, int(rows.rows[0]))
    latent, value = linear.latents_of(atom, coefficient, D.shape[0])
    return function(Y, latent, value, *arguments)


def _add(total: Any, part: Any) -> Any:
    return total + part
