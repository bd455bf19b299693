"""The parameters of a fit: names, defaults, and every rule that can be checked before any work starts."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan import stream
from dbksvd_dask.plan.dead_atoms import DEAD_ATOM_RULES
from dbksvd_dask.plan.encoders import ENCODERS, able
from dbksvd_dask.plan.groups import group_sizes
from dbksvd_dask.plan.growth import growth_iterations, growth_sizes
from dbksvd_dask.plan.screening import GRAMS

INITS = ("uniform", "data", "array")
DEVICES = ("auto", "cpu", "gpu")
SPARSITIES = ("max", "mean")
ENCODES = ("plain", "staged")


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an int, or say what is wrong with it."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not a whole number; use {name} >= {minimum}")
    if value < minimum:
        raise InputError(f"{name}={value} is too small; use {name} >= {minimum}")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{name}={value!r} is not known; use one of {allowed}")
    return str(value)


def check_fraction(name: str, value: Any) -> float:
    """Return `value` as a finite float >= 0."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
        raise InputError(f"{name}={value!r} is not a finite number >= 0; use for example {name}=0.0")
    return float(value)


def check_k(k: Any, n_atoms: int) -> int:
    """Return `k` if 1 <= k <= n_atoms."""
    k = check_integer("k", k, 1)
    if k > n_atoms:
        raise InputError(f"k={k} exceeds n_atoms={n_atoms}; use k <= {n_atoms} or more atoms")
    return k


@dataclass(frozen=True)
class FitParams:
    """Everything that decides which dictionary a fit gives, checked.

    Two fits of the same store with equal parameters give the same dictionary bit for bit; a checkpoint is
    refused when any of these differs.

    Where None is the default, a rule decides: `checked` fills in n_iter and sparsity, `for_data` n_rounds and
    lanczos_steps. A fit and its checkpoints have numbers only.
    """

    n_atoms: int
    k: int
    batch_size: int = 65536
    n_iter: int = None  # type: ignore[assignment]
    n_rounds: int = None  # type: ignore[assignment]
    lanczos_steps: int = None  # type: ignore[assignment]
    groups: tuple[int, ...] | None = None
    encoder: str = "mp"
    nonneg: bool = False
    refit: bool = False
    min_coefficient: float = 0.0
    rtol: float = 0.0
    center: bool = True
    init: str = "data"
    dead_atoms: str = "residual"
    chunk_size: int = 8192
    validation: int = 8192
    device: str = "auto"
    seed: int = 0
    momentum: float = 0.6
    warm_up: bool = True
    encode: str = "plain"
    sparsity: str = None  # type: ignore[assignment]
    max_nonzeros: int | None = None
    growth: float | None = None
    growth_threshold: float = 1.3
    frequency_prior: bool = False
    patience: int | None = None
    gram: str = "auto"
    whiten: float = 0.0

    @property
    def slots(self) -> int:
        """Most nonzeros that any sample can have."""
        if self.sparsity == "max":
            return self.k
        return self.max_nonzeros or min(SLOTS_PER_MEAN * self.k, self.n_atoms)

    @property
    def training_slots(self) -> int:
        """Most nonzeros of a sample in training; a growing dictionary is held back by its threshold instead."""
        if self.growth is None:
            return self.slots
        return max(self.slots, min(SLOTS_PER_MEAN * self.k, self.n_atoms))

    @property
    def first_rows(self) -> int | None:
        """Rows of the first outer batch; None for as many as any other. Growth has a schedule of its own."""
        return stream.warm_up_rows(self.n_atoms) if self.warm_up and self.growth is None else None

    @property
    def growth_sizes(self) -> tuple[int, ...] | None:
        """Atoms at each stage of growth; None when the dictionary does not grow."""
        return None if self.growth is None else growth_sizes(self.n_atoms, self.growth)

    @classmethod
    def checked(cls, **values: Any) -> FitParams:
        """Build parameters from raw values; raises `InputError` on the first rule broken."""
        n_atoms = check_integer("n_atoms", values["n_atoms"], 1)
        k = check_k(values["k"], n_atoms)
        out = dict(values, n_atoms=n_atoms, k=k)
        _fill_in(out)
        for name, minimum in _INTEGERS.items():
            if name in out and not (out[name] is None and name in _MAY_BE_NONE):
                out[name] = check_integer(name, out[name], minimum)
        for name, choices in _CHOICES.items():
            if name in out:
                out[name] = check_choice(name, out[name], choices)
        for name in ("min_coefficient", "rtol", "growth_threshold", "whiten"):
            if name in out:
                out[name] = check_fraction(name, out[name])
        if out.get("whiten", 0.0) > 1:
            raise InputError(
                f"whiten={out['whiten']} must lie between 0 (not at all) and 1 (wholly); use for example 0.5"
            )
        if not 0 <= check_fraction("momentum", out.get("momentum", 0.0)) < 1:
            raise InputError(
                f"momentum={out['momentum']!r} must be below 1; use for example momentum=0.6, or 0 for none"
            )
        for name in ("nonneg", "refit", "center", "warm_up", "frequency_prior"):
            if name in out:
                out[name] = bool(out[name])
        out["groups"] = group_sizes(n_atoms, k, out.get("groups"))
        if ENCODERS[out.get("encoder", "mp")].least_squares:
            out["refit"] = False  # there is nothing to refit
        params = cls(**out)
        _check_combinations(params)
        return params

    def for_data(self, batch_rows: int, n_features: int) -> FitParams:
        """Return the parameters of a fit of given data, without anything left to rules.

        Parameters
        ----------
        batch_rows : rows of a whole batch
        """
        rounds, steps = update_rule(self.n_atoms, self.k, batch_rows, n_features)
        return replace(
            self,
            n_rounds=rounds if self.n_rounds is None else self.n_rounds,
            lanczos_steps=steps if self.lanczos_steps is None else self.lanczos_steps,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint or a store's attributes."""
        values = asdict(self)
        values["groups"] = None if self.groups is None else list(self.groups)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FitParams:
        """Inverse of `to_json`."""
        return cls.checked(**values)


_INTEGERS = {
    "batch_size": 1,
    "n_iter": 1,
    "n_rounds": 1,
    "lanczos_steps": 1,
    "chunk_size": 1,
    "validation": 0,
    "seed": 0,
    "patience": 1,
}
_CHOICES = {
    "encoder": tuple(ENCODERS),
    "init": INITS,
    "dead_atoms": tuple(DEAD_ATOM_RULES),
    "device": DEVICES,
    "encode": ENCODES,
    "sparsity": SPARSITIES,
    "gram": GRAMS,
}

# Those that may be None in checked parameters: the first two follow from the data, no patience never stops a fit.
_MAY_BE_NONE = ("n_rounds", "lanczos_steps", "patience")

# Slots per mean number of nonzeros when max_nonzeros is not given.
SLOTS_PER_MEAN = 3
# Slower growth would take more than a thousand iterations to 1000 atoms.
SLOWEST_GROWTH = 1.01


# Iterations of a fit, where growth does not take more.
N_ITER = 40


def _fill_in(values: dict[str, Any]) -> None:
    """Set the parameters that follow from others."""
    _check_growth_factor(values)
    if values.get("n_iter") is None:
        growth = values.get("growth")
        grown = 0 if growth is None else growth_iterations(growth_sizes(values["n_atoms"], growth))
        values["n_iter"] = max(N_ITER, grown)
    if values.get("sparsity") is None:
        mean = values.get("max_nonzeros") is not None or bool(values.get("frequency_prior"))
        values["sparsity"] = "mean" if mean else "max"


# Rounds and Lanczos steps of an update with many samples for every atom, and the most rounds of any: a graph has
# tasks in proportion to them.
ROUNDS, LANCZOS_STEPS, MOST_ROUNDS = 8, 2, 64


def update_rule(n_atoms: int, k: int, batch_rows: int, n_features: int) -> tuple[int, int]:
    """Rounds and Lanczos steps of a fit that gives none.

    Where an atom has fewer samples in a batch than there are features, atoms of one sample that are fitted at once
    to the same residual do not converge, and a singular vector of a few dozen samples fits their noise: twice k
    rounds then, and one step. Otherwise 8 rounds and 2 steps, which are faster and as good.

    >>> update_rule(4096, 20, 65536, 2304), update_rule(2048, 16, 65536, 384)
    ((40, 1), (8, 2))
    >>> update_rule(4096, 80, 16384, 2304), update_rule(64, 2, 100, 16)
    ((64, 1), (8, 1))
    """
    if batch_rows * k >= n_atoms * n_features:
        return ROUNDS, LANCZOS_STEPS
    return min(MOST_ROUNDS, max(ROUNDS, 2 * k)), 1


def _check_growth_factor(values: dict[str, Any]) -> None:
    growth = values.get("growth")
    if growth is None:
        return
    if not isinstance(growth, numbers.Real) or not math.isfinite(growth) or growth < SLOWEST_GROWTH:
        raise InputError(
            f"growth={growth!r} is not a factor >= {SLOWEST_GROWTH}; use for example growth=1.5, or None for a "
            "dictionary that has all its atoms from the start"
        )
    values["growth"] = float(growth)


def _check_combinations(params: FitParams) -> None:
    """Refuse what cannot go together."""
    _check_encoder(params)
    _check_sparsity(params)
    _check_staged(params)
    if params.growth is not None:
        _check_growth(params)
    if params.frequency_prior:
        _check_prior(params)


def _check_encoder(params: FitParams) -> None:
    encoder = ENCODERS[params.encoder]
    if params.nonneg and not encoder.nonneg:
        raise InputError(
            f"encoder={params.encoder!r} gives coefficients of both signs and cannot honour nonneg=True; "
            f"use {able('nonneg')} with nonneg=True (refit=True keeps them non-negative too)"
        )
    if params.gram == "never" and not encoder.screened:
        raise InputError(
            f"encoder={params.encoder!r} needs the products of all pairs of atoms and cannot honour gram='never'; "
            f"use {able('screened')}, or gram='auto'"
        )


def _check_sparsity(params: FitParams) -> None:
    if params.sparsity == "max":
        if params.max_nonzeros is not None:
            raise InputError(
                f"max_nonzeros={params.max_nonzeros} is for sparsity='mean'; with sparsity='max' k is the maximum"
            )
        return
    if params.max_nonzeros is not None:
        most = check_integer("max_nonzeros", params.max_nonzeros, 1)
        if not params.k <= most <= params.n_atoms:
            raise InputError(
                f"max_nonzeros={most} must lie between k={params.k} (the mean) and n_atoms={params.n_atoms}"
            )
    if params.min_coefficient > 0:
        raise InputError(
            f"sparsity='mean' learns the smallest coefficient; leave out min_coefficient={params.min_coefficient}"
        )


def _check_staged(params: FitParams) -> None:
    if params.encode == "plain":
        return
    if params.groups is None and params.growth is None:
        raise InputError("encode='staged' offers groups in order; give groups, such as 'exponential', or growth")
    if not ENCODERS[params.encoder].staged:
        raise InputError(f"encode='staged' is a matching pursuit; use {able('staged')}, not {params.encoder!r}")


def _check_growth(params: FitParams) -> None:
    if params.groups is not None:
        raise InputError(f"growth={params.growth} makes its own groups; leave out groups={params.groups}")
    if not ENCODERS[params.encoder].weighted:
        raise InputError(
            f"growth={params.growth} needs {able('weighted')}; for least squares on what it finds, use refit=True"
        )
    if params.whiten > 0:
        raise InputError(
            f"growth={params.growth} measures residuals against the noise of the samples; leave out "
            f"whiten={params.whiten}"
        )
    if params.init == "array":
        raise InputError(f"growth={params.growth} starts from few atoms; use init='uniform' or 'data'")
    sizes = params.growth_sizes or ()
    needed = growth_iterations(sizes)
    if params.n_iter < needed:
        raise InputError(
            f"growth={params.growth} reaches n_atoms={params.n_atoms} in {len(sizes)} stages of "
            f"{growth_iterations(sizes[:1])} iterations; use n_iter >= {needed} (now {params.n_iter}), or "
            "faster growth"
        )


def _check_prior(params: FitParams) -> None:
    if params.growth is None or params.sparsity != "mean":
        raise InputError(
            "frequency_prior=True shares out the threshold of a growing dictionary; use it with growth, such as "
            f"1.5 (now {params.growth}), and sparsity='mean' (now {params.sparsity!r})"
        )
    if params.encode == "staged":
        raise InputError("frequency_prior=True is one pursuit over all atoms; use encode='plain' with it")
