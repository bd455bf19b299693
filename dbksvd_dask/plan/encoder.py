"""How samples become codes: the encoder, and how a fit or a stored dictionary chooses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan import growth
from dbksvd_dask.plan.encoders import ENCODERS
from dbksvd_dask.plan.groups import Group, plan_groups
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.plan.screening import uses_gram


class EncodeSpec(NamedTuple):
    """How samples become codes; every field as in `dbksvd_dask.DBKSVD`.

    `k` is the number of slots. `stages` are groups that encode in order, each (first atom, end, most nonzeros);
    empty: all atoms at once. `gram` is one of `plan.screening.GRAMS`.
    """

    k: int
    encoder: str = "mp"
    nonneg: bool = False
    refit: bool = False
    min_coefficient: float = 0.0
    rtol: float = 0.0
    stages: tuple[tuple[int, int, int], ...] = ()
    gram: str = "auto"

    def uses_gram(self, n_atoms: int) -> bool:
        """Tell whether a dictionary, or a group, of n_atoms atoms encodes with its gram."""
        return uses_gram(self.gram, self.encoder, n_atoms)

    def compact_gram(self, weighted: bool) -> bool:
        """Tell whether the kernel reads a compact gram; `weighted` if atoms have weights."""
        return ENCODERS[self.encoder].compact and not (weighted or self.stages or self.refit)


class AtomWeights(NamedTuple):
    """Thresholds and preferences of the atoms in a weighted pursuit; see `kernels.weighted`.

    `threshold` multiplies the smallest coefficient, `preference` ranks the atoms: (n_atoms,) each, positive.
    """

    threshold: np.ndarray
    preference: np.ndarray


# ---------------------------------------------------------------------------------------------- from parameters

# what a caller may override when a stored dictionary encodes
CHOOSABLE = ("k", "encoder", "nonneg", "refit", "min_coefficient", "rtol", "encode", "gram")
# what else of a fit decides how its dictionary encodes
_FITTED = ("groups", "growth", "sparsity", "max_nonzeros", "n_iter")
DECISIVE = (*CHOOSABLE, *_FITTED)


def encode_spec(params: FitParams, threshold: float = 0.0, n_atoms: int | None = None) -> EncodeSpec:
    """Return the encoder of a fit.

    Parameters
    ----------
    threshold : smallest coefficient, where the fit has learned one
    n_atoms : current number of atoms, while a dictionary grows
    """
    return EncodeSpec(
        params.slots if n_atoms is None else min(params.slots, n_atoms),
        params.encoder,
        params.nonneg,
        params.refit,
        max(params.min_coefficient, threshold),
        params.rtol,
        stages(params, n_atoms or params.n_atoms),
        params.gram,
    )


def stages(params: FitParams, n_atoms: int) -> tuple[tuple[int, int, int], ...]:
    """Return the groups that encode in order, each (first atom, end, most nonzeros); none for plain encoding."""
    if params.encode == "plain":
        return ()
    if params.growth is not None:
        return growth.frequency_stages(n_atoms, params.slots)
    return tuple((group.start, group.stop, group.k) for group in _groups(params, n_atoms, 1))


def training_groups(params: FitParams, n_atoms: int) -> tuple[Group, ...]:
    """Return the groups that one iteration of a fit updates in order; a growing dictionary is one group."""
    return _groups(params, n_atoms, params.n_rounds)


def _groups(params: FitParams, n_atoms: int, n_rounds: int) -> tuple[Group, ...]:
    slots = min(params.training_slots, n_atoms)
    groups = plan_groups(n_atoms, slots, params.groups, n_rounds)
    return tuple(group._replace(k=min(group.k, group.stop - group.start)) for group in groups)


def training_spec(params: FitParams, threshold: float, n_atoms: int) -> EncodeSpec:
    """Return the encoder with which an iteration of a fit encodes its batch."""
    spec = encode_spec(params, threshold, n_atoms)
    k = max(group.k for group in _groups(params, n_atoms, 1))
    # refits during growth lose true features; the finished dictionary may encode with them
    refit = spec.refit and params.growth is None
    return spec._replace(k=k, refit=refit, stages=())


def _keeps_threshold(given: Mapping[str, Any]) -> bool:
    """Tell whether a stored dictionary encodes with the threshold that its fit learned."""
    return given.get("k") is None and given.get("min_coefficient") is None


def stored_weights(weights: np.ndarray | None, given: Mapping[str, Any]) -> np.ndarray | None:
    """Return the weights with which a stored dictionary encodes: those of its fit, if it keeps its threshold."""
    return weights if _keeps_threshold(given) else None


def prior(weights: np.ndarray | None) -> AtomWeights | None:
    """Turn a frequency prior into thresholds and preferences: rare atoms need more and rank lower."""
    return None if weights is None else AtomWeights(weights, 1.0 / weights)


def stored_spec(
    params: Mapping[str, Any], n_atoms: int, extra: Mapping[str, Any], given: Mapping[str, Any]
) -> EncodeSpec:
    """Return the encoder of a stored dictionary: as fitted, except for what is given (None: as fitted).

    A given k is the most nonzeros per sample, even if the fit had k as their mean; a given min_coefficient
    replaces a learned one.

    Parameters
    ----------
    params, extra : of the dictionary
    n_atoms : atoms of the dictionary
    given : some of `CHOOSABLE`
    """
    unknown = sorted(set(given) - set(CHOOSABLE))
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}; known are {', '.join(CHOOSABLE)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    values = {name: params[name] for name in DECISIVE if name in params} | chosen
    if "k" not in values:
        raise InputError("this dictionary does not record how many nonzeros a sample has; give k=N")
    threshold = float(extra.get("threshold", 0.0))
    if not _keeps_threshold(given):
        values |= {"sparsity": "max", "max_nonzeros": None}
        threshold = 0.0
    grown_to = int(params.get("n_atoms", n_atoms))  # the size the fit grows to: its stages follow from it
    if values.get("growth") is None:
        grown_to = n_atoms
    return encode_spec(FitParams.checked(**{**values, "n_atoms": grown_to}), threshold, n_atoms)
