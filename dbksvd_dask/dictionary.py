"""The dictionary: atoms, mean, parameters, what a fit learned; its fingerprint, its view in notebooks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from dbksvd_dask._words import facts_html, history_html


@dataclass
class Dictionary:
    """A dictionary with everything needed to encode with it, or to go on fitting it.

    Attributes
    ----------
    atoms : (n_atoms, n_features), unit rows
    mean : (n_features,) float64 taken off every sample, or None
    params : parameters of the fit (see `plan.params.FitParams.to_json`); at least n_atoms and k
    source : what it was fitted on
    iteration : outer batches done
    history : per iteration, see `DBKSVD.history_`
    counts : (n_atoms,) samples per atom in the last batch, or None
    previous : (n_atoms, n_features) atoms one iteration ago, which a fit with momentum goes on from, or None
    extra : further attributes (thresholds, stages, provenance)
    weights : (n_atoms,) by which the thresholds of atoms differ when encoding, or None
    """

    atoms: np.ndarray
    mean: np.ndarray | None
    params: dict[str, Any]
    source: str = ""
    iteration: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    counts: np.ndarray | None = None
    previous: np.ndarray | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None

    @property
    def n_atoms(self) -> int:
        """Number of atoms."""
        return int(self.atoms.shape[0])

    @property
    def n_features(self) -> int:
        """Number of features."""
        return int(self.atoms.shape[1])

    def to_xarray(self) -> xr.Dataset:
        """Dataset with `dictionary` (atom, feature) and `mean` (feature,)."""
        mean = np.zeros(self.n_features) if self.mean is None else self.mean
        return xr.Dataset(
            {"dictionary": (("atom", "feature"), self.atoms), "mean": (("feature",), mean)},
            attrs={"iteration": self.iteration, **self.params},
        )

    def __repr__(self) -> str:
        """One line: shape, k, batches and source."""
        shape = f"{self.n_atoms} atoms of {self.n_features} features, k={self.params.get('k')}"
        where = f", fitted on {self.source}" if self.source else ""
        return f"<Dictionary: {shape}, {self.iteration} batches{where}>"

    def _repr_html_(self) -> str:
        return dictionary_html(self.atoms, self.params, self.history, self.iteration, self.source)


def dictionary_fingerprint(dictionary: Dictionary) -> str:
    """Return a short text that tells this dictionary from others: a digest of its atoms, mean and weights."""
    digest = hashlib.sha256()
    for array in (dictionary.atoms, dictionary.mean, dictionary.weights):
        if array is not None:
            digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def dictionary_html(
    atoms: np.ndarray, params: Mapping[str, Any], history: Mapping[str, Any], iteration: int, source: str = ""
) -> str:
    """A dictionary: its size, how it was fitted, how far it came.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
    params : parameters of the fit
    history : mapping of name to values per iteration
    iteration : int
    source : str
        What it was fitted on.
    """
    facts = {
        "atoms": f"{atoms.shape[0]:,}",
        "features": f"{atoms.shape[1]:,}",
        "dtype": str(atoms.dtype),
        "k": params.get("k"),
        "iterations": iteration,
        "fitted on": source or None,
    }
    plain = {name: value for name, value in params.items() if name not in ("n_atoms", "k")}
    folded = f"<details><summary>parameters</summary>{facts_html('', plain)}</details>" if plain else ""
    return facts_html("Dictionary", facts, history_html(history) + folded)


def fit_html(atoms: np.ndarray, history: xr.Dataset, iteration: int) -> str:
    """A fitted estimator, below the diagram of its parameters.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
    history : Dataset over `iteration`
    iteration : int
    """
    curves = history_html({str(name): np.asarray(values) for name, values in history.data_vars.items()})
    facts = {"dictionary": f"{atoms.shape[0]:,} atoms x {atoms.shape[1]:,} features", "iterations": iteration}
    return facts_html("Fitted", facts, curves)
