"""What a page and a notebook show of a dictionary: gathered once, drawn by either."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError
from dbksvd_dask.report.facts import AtomFacts, SampleFacts, Sizes, gather_atoms, gather_samples
from dbksvd_dask.report.inputs import Inputs, open_inputs
from dbksvd_dask.report.naming import Explanation, keyword_names, read_explanations
from dbksvd_dask.report.samples import Excerpt
from dbksvd_dask.report.tokens import Logits, read_logits


@dataclass(frozen=True, eq=False)
class Material:
    """Everything known about the atoms of a dictionary, their samples and their names.

    Attributes
    ----------
    inputs : Inputs
    facts : AtomFacts
    shown : SampleFacts
    explanations : dict of atom to Explanation
        Those that were given.
    logits : list with one entry per atom, or None
    title : str
    """

    inputs: Inputs
    facts: AtomFacts
    shown: SampleFacts
    explanations: dict[int, Explanation]
    logits: Logits | None
    title: str

    @property
    def n_atoms(self) -> int:
        """Atoms of the dictionary."""
        return self.inputs.dictionary.n_atoms

    @cached_property
    def keywords(self) -> list[str]:
        """Name every atom by the words of its strongest samples; empty where there are none."""
        return keyword_names(self.inputs.samples, self.shown.sample, self.shown.lists["strongest"])

    @cached_property
    def excerpts(self) -> list[Excerpt] | None:
        """The text of every sample that is shown; None where samples are not texts."""
        return self.inputs.samples.excerpts(self.shown.sample)

    def explanation(self, atom: int) -> str:
        """Return the explanation that was given for an atom, or an empty text."""
        return self.explanations[atom].text if atom in self.explanations else ""

    def name(self, atom: int) -> str:
        """Return the explanation of an atom, or else its keywords."""
        return self.explanation(atom) or self.keywords[atom]


def gather_material(
    run: Any,
    codes: Any,
    *,
    samples: Any = None,
    activations: Any = None,
    explanations: Any = None,
    logits: Any = None,
    title: str | None = None,
    image_shape: Sequence[int] | None = None,
    max_samples: int | None = None,
    n_top: int = 10,
    seed: int = 0,
) -> Material:
    """Open everything, measure atoms and choose samples; parameters as in `write_report`."""
    if n_top < 1:
        raise InputError(f"n_top={n_top} is too small; show at least 1 sample per atom")
    inputs = open_inputs(run, codes, samples, activations, image_shape, max_samples)
    n_atoms = inputs.dictionary.n_atoms
    named, effects = read_explanations(explanations, n_atoms), read_logits(logits, n_atoms)
    facts, shown = gather(inputs, Sizes(n_top=n_top, seed=seed))
    return Material(inputs, facts, shown, named, effects, title or run_name(run))


def gather(inputs: Inputs, sizes: Sizes) -> tuple[AtomFacts, SampleFacts]:
    """Measure atoms and choose samples."""
    facts = gather_atoms(inputs.reader, inputs.dictionary, sizes, inputs.moments)
    also = inputs.samples.also()
    inside = None if also is None else np.asarray(also[also < inputs.reader.n_samples])
    groups = inputs.samples.groups()
    return facts, gather_samples(inputs.reader, facts.codes, facts.histogram, sizes, inside, groups)


def run_name(run: Any) -> str:
    """Return the name of a run: that of its folder, or of the estimator."""
    return Path(os.fspath(run)).name or "run" if isinstance(run, str | os.PathLike) else "DBKSVD"
