"""The rules for dead atoms, those that no sample of a batch used, and the class that implements each.

A new rule is one class, in `kernels.dead_atoms` or another module of `kernels`, and one entry here. The names that
parameters and options accept and the tasks of a batch follow from the entry.
"""

from __future__ import annotations

from typing import NamedTuple


class DeadAtomRule(NamedTuple):
    """One way to treat dead atoms.

    Attributes
    ----------
    meaning : what replaces a dead atom, in a few words
    rule : "module:class" in `dbksvd_dask.kernels`, a `kernels.dead_atoms.Rule`
    redrawn_by_growth : whether a growing dictionary drops dead atoms and draws others from residuals, as it draws
        the atoms that it adds
    """

    meaning: str
    rule: str
    redrawn_by_growth: bool = False


DEAD_ATOM_RULES = {
    "residual": DeadAtomRule(
        meaning="the samples with the largest residuals",
        rule="dead_atoms:WorstSamples",
        redrawn_by_growth=True,
    ),
    "random": DeadAtomRule(
        meaning="random directions",
        rule="dead_atoms:RandomAtoms",
    ),
    "keep": DeadAtomRule(
        meaning="nothing, the atom stays as it is",
        rule="dead_atoms:Keep",
    ),
}
