"""Integers in, integers out: which dictionaries encode without a gram, in how many passes, among how many atoms.

The rules depend on the dictionary and on k alone, never on the memory of a machine: the same samples give the same
codes everywhere.
"""

from __future__ import annotations

from dbksvd_dask.plan.encoders import ENCODERS

# What `gram` may be: by the rule below, or one of the two.
GRAMS = ("auto", "always", "never")
# Widest dictionary whose gram is formed by rule: 1.1 GB in float32, 17 GB at four times as many atoms.
GRAM_ATOMS = 16384
# Atoms that a pass chooses: more, and it misses atoms that were no candidates at its start. And the bounds of the
# number of passes, each of which costs a product of the samples with all atoms.
ATOMS_PER_PASS = 8
FEWEST_PASSES, MOST_PASSES = 4, 8
# Candidates of a pass per nonzero of the whole pursuit, and their bounds. Of 8192 atoms and k=32, 256 candidates
# leave 1 % less of the variance than 128, and a step costs twice as much; benchmarks/wide.py prints such figures.
CANDIDATES_PER_NONZERO = 6
FEWEST_CANDIDATES, MOST_CANDIDATES = 64, 192


def uses_gram(gram: str, encoder: str, n_atoms: int) -> bool:
    """Tell whether a dictionary, or a group of one, encodes with its gram.

    >>> uses_gram("auto", "mp", 16384), uses_gram("auto", "mp", 16385), uses_gram("auto", "omp", 65536)
    (True, False, True)
    """
    if gram == "auto":
        return n_atoms <= GRAM_ATOMS or not ENCODERS[encoder].screened
    return gram == "always"


def n_candidates(k: int) -> int:
    """Atoms that one pass chooses from, besides those that it has already.

    >>> n_candidates(4), n_candidates(24), n_candidates(100)
    (64, 144, 192)
    """
    return min(MOST_CANDIDATES, max(FEWEST_CANDIDATES, CANDIDATES_PER_NONZERO * k))


def n_passes(k: int, n_atoms: int) -> int:
    """Passes in which at most k of n_atoms atoms are chosen; one, if all atoms are candidates.

    >>> n_passes(2, 65536), n_passes(32, 65536), n_passes(100, 65536), n_passes(32, 150)
    (2, 4, 8, 1)
    """
    if n_atoms <= n_candidates(k):
        return 1
    return min(k, MOST_PASSES, max(FEWEST_PASSES, -(-k // ATOMS_PER_PASS)))


def pass_limit(k: int, t: int, passes: int) -> int:
    """Most nonzeros of a sample at the end of pass t, counted from 0: an equal share each.

    >>> [pass_limit(10, t, 4) for t in range(4)]
    [3, 5, 8, 10]
    """
    return -(-k * (t + 1) // passes)
