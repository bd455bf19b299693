"""When a fit ends: after its last iteration, or once its error has stopped falling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dbksvd_dask.plan.growth import growth_iterations

if TYPE_CHECKING:
    from dbksvd_dask.plan.params import FitParams

# An error counts as lower if it is lower by this share; smaller steps count once they add up to it.
LOWER_BY = 0.001
# Iterations without a lower error that are worth a word when a fit ends.
WORTH_A_WORD = 5
# The history of a fit has the first of these if it holds samples out.
FIGURES = ("validation_relative_error", "relative_error")


def last_gain(errors: Sequence[float], lower_by: float = LOWER_BY) -> int:
    """Return after how many iterations an error was last lower than before by a share of `lower_by`.

    Steps too small to count are not lost: the next error is compared with the last that counted.

    >>> last_gain([0.8, 0.5, 0.4, 0.4, 0.3999]), last_gain([0.5, 0.4997, 0.4994]), last_gain([])
    (3, 3, 0)
    """
    best, last = float("inf"), 0
    for iteration, error in enumerate(errors, start=1):
        if error < best * (1 - lower_by) or (last == 0 and error == error):
            best, last = error, iteration
    return last


def settled_since(params: FitParams, history: Mapping[str, Sequence[float]]) -> int:
    """Return after how many iterations the error of a fit was last lower; while it grows, all of them count.

    Parameters
    ----------
    history : figures of every iteration; see `FIGURES`
    """
    errors = next((history[name] for name in FIGURES if name in history), ())
    sizes = params.growth_sizes
    grown = 0 if sizes is None else min(growth_iterations(sizes), len(errors))
    return grown + last_gain(errors[grown:])


def is_over(params: FitParams, iteration: int, history: Mapping[str, Sequence[float]]) -> bool:
    """Return whether a fit ends after this iteration.

    Parameters
    ----------
    history : figures of the iterations so far
    """
    if iteration >= params.n_iter:
        return True
    return params.patience is not None and iteration - settled_since(params, history) >= params.patience
