"""Signs of atoms: negate those whose coefficients in a batch have a negative mean.

Negating atoms negates their coefficients and changes nothing else, to the bit. A fit publishes, after every
iteration, the dictionary whose atoms have positive coefficients on average (the rule of the paper), so a fit that
resumes from a checkpoint gives the same dictionaries as one that never stopped.
"""

from __future__ import annotations

import numpy as np


def turned(sums: np.ndarray | None, *dictionaries: np.ndarray) -> tuple[np.ndarray, ...]:
    """Negate the atoms whose coefficients have a negative mean.

    Parameters
    ----------
    sums : (n_atoms,) sums of their coefficients in the last batch; None where none can be negative
    dictionaries : (n_atoms, n_features) each, of the same atoms
    """
    if sums is None or not (sums < 0).any():
        return dictionaries
    negative = (sums < 0)[:, None]
    return tuple(np.where(negative, -D, D) for D in dictionaries)
