"""The dictionary: atoms, mean, parameters, what a fit learned; its fingerprint, its view in notebooks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dbksvd_dask._words import facts_html, history_html
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec, prior, stored_spec, stored_weights

History = dict[str, list[float]]

# What a fit learns about the smallest coefficient, by its name in `Dictionary.extra`; absent where it is 0.
_THRESHOLDS = ("threshold", "training_threshold")


@dataclass
class Dictionary:
    """A dictionary with everything it takes to encode with it, or to continue its fit.

    The state of a fit is one, a checkpoint stores one, a fitted estimator publishes one as its attributes, and
    `graph.encode.plan_encoding` makes of one how samples are encoded.

    Attributes
    ----------
    atoms : (n_atoms, n_features), unit rows
    mean : (n_features,) float64 subtracted from every sample, or None
    params : parameters of the fit (see `plan.params.FitParams.to_json`); at least n_atoms and k
    source : what it was fitted on
    iteration : outer batches done
    history : per iteration, see `DBKSVD.history_`
    counts : (n_atoms,) samples per atom in the last batch, or None
    previous : (n_atoms, n_features) atoms one iteration ago, from which momentum follows, or None
    extra : further attributes (thresholds, stages, provenance)
    weights : (n_atoms,) by which the thresholds of atoms differ when encoding, or None
    whitening : (n_features, n_features) map to the coordinates in which it encodes (samples times it), or None for
        those of the samples; atoms, mean and codes are those of the samples as they are

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import Dictionary, encode
    >>> dictionary = Dictionary(np.eye(2, dtype="f4"), None, {"n_atoms": 2, "k": 1})
    >>> encode(np.array([[1.0, 2.0]], "f4"), dictionary)["atom"].values.tolist()
    [[1]]
    """

    atoms: np.ndarray
    mean: np.ndarray | None
    params: dict[str, Any]
    source: str = ""
    iteration: int = 0
    history: History = field(default_factory=dict)
    counts: np.ndarray | None = None
    previous: np.ndarray | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None
    whitening: np.ndarray | None = None

    @property
    def n_atoms(self) -> int:
        """Number of atoms."""
        return int(self.atoms.shape[0])

    @property
    def n_features(self) -> int:
        """Number of features."""
        return int(self.atoms.shape[1])

    @property
    def threshold(self) -> float:
        """Smallest coefficient when samples are encoded; 0 where the fit learned none."""
        return float(self.extra.get("threshold", 0.0))

    @property
    def training_threshold(self) -> float:
        """Smallest coefficient in the next batch of its fit; see `fit.threshold` for why there are two."""
        return float(self.extra.get("training_threshold", 0.0))

    @property
    def recipe(self) -> str | None:
        """Name of the recipe that its parameters came from, or None."""
        name = self.extra.get("recipe")
        return None if name is None else str(name)

    def with_thresholds(self, threshold: float, training_threshold: float) -> Dictionary:
        """Return the same dictionary with other thresholds."""
        kept = {name: value for name, value in self.extra.items() if name not in _THRESHOLDS}
        learned = zip(_THRESHOLDS, (threshold, training_threshold), strict=True)
        return replace(self, extra=kept | {name: value for name, value in learned if value})

    def encode_spec(self, given: Mapping[str, Any] | None = None) -> EncodeSpec:
        """Return how it encodes: as it was fitted, except for what is given (None: nothing).

        Parameters
        ----------
        given : some of `plan.encoder.CHOOSABLE`
        """
        return stored_spec(self.params, self.n_atoms, self.extra, given or {})

    def encode_weights(self, given: Mapping[str, Any] | None = None) -> AtomWeights | None:
        """Return in what its atoms differ when it encodes; None for all alike.

        Parameters
        ----------
        given : as for `encode_spec`; another k or min_coefficient sets the weights aside
        """
        return prior(stored_weights(self.weights, given or {}))

    def __repr__(self) -> str:
        """One line: shape, k, batches and source."""
        shape = f"{self.n_atoms} atoms of {self.n_features} features, k={self.params.get('k')}"
        recipe = f", recipe {self.recipe!r}" if self.recipe else ""
        origin = f", fitted on {self.source}" if self.source else ""
        return f"<Dictionary: {shape}, {self.iteration} batches{recipe}{origin}>"

    def _repr_html_(self) -> str:
        return dictionary_html(self)


def dictionary_fingerprint(dictionary: Dictionary) -> str:
    """Return a short text that identifies this dictionary: a digest of its arrays that decide codes."""
    digest = hashlib.sha256()
    for array in (dictionary.atoms, dictionary.mean, dictionary.weights, dictionary.whitening):
        if array is not None:
            digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def dictionary_html(dictionary: Dictionary) -> str:
    """Show a dictionary: its size, how it was fitted, its history."""
    atoms, params = dictionary.atoms, dictionary.params
    facts = {
        "atoms": f"{atoms.shape[0]:,}",
        "features": f"{atoms.shape[1]:,}",
        "dtype": str(atoms.dtype),
        "k": params.get("k"),
        "iterations": dictionary.iteration,
        "recipe": dictionary.recipe,
        "fitted on": dictionary.source or None,
    }
    plain = {name: value for name, value in params.items() if name not in ("n_atoms", "k")}
    folded = f"<details><summary>parameters</summary>{facts_html('', plain)}</details>" if plain else ""
    return facts_html("Dictionary", facts, _curves(dictionary) + folded)


def fit_html(fitted: Dictionary) -> str:
    """Show what an estimator has fitted, below the diagram of its parameters."""
    size = f"{fitted.n_atoms:,} atoms x {fitted.n_features:,} features"
    return facts_html("Fitted", {"dictionary": size, "iterations": fitted.iteration}, _curves(fitted))


def _curves(dictionary: Dictionary) -> str:
    return history_html(dictionary.history, "batch" if dictionary.whitening is None else "whitened batch")
