"""A batch outside of a fit, as `DBKSVD.partial_fit` runs it: what it cannot do, and what was decided before it."""

from __future__ import annotations

from dataclasses import replace

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.params import FitParams


def batch_params(params: FitParams, state: Dictionary | None) -> FitParams:
    """Return the parameters of a single batch; refuse those that need a whole fit.

    Leaves nothing to rules that has been decided: batches of other sizes must not change it.

    Parameters
    ----------
    params : as asked for
    state : the dictionary to continue from, or None for a first batch
    """
    if params.growth is not None:
        raise InputError(f"growth={params.growth} is a schedule over a whole fit; use fit, or growth=None")
    _check_whiten(params, state)
    if state is None:
        return params
    rounds, steps = (state.params.get(name) for name in ("n_rounds", "lanczos_steps"))
    return replace(
        params,
        n_rounds=rounds if params.n_rounds is None else params.n_rounds,
        lanczos_steps=steps if params.lanczos_steps is None else params.lanczos_steps,
    )


def _check_whiten(params: FitParams, state: Dictionary | None) -> None:
    """Refuse a batch for which there is no map to whitened coordinates, or another one than is asked for."""
    if state is None or state.whitening is None:
        if params.whiten > 0:
            raise InputError(
                f"whiten={params.whiten} needs the covariance of all samples; begin with fit, or use whiten=0"
            )
    elif params.whiten != state.params.get("whiten", params.whiten):
        raise InputError(
            f"whiten={params.whiten}, but this dictionary was fitted with whiten={state.params['whiten']}, and "
            "partial_fit keeps its map; use the same value, or fit anew"
        )
