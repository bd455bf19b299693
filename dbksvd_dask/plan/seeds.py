"""Random numbers by purpose.

Random choices depend on (seed, purpose, number) alone, so any iteration can be planned again after a crash, on any
machine, without replaying earlier ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# One number per purpose keeps the random streams apart.
EPOCH, ROUNDS, INIT, VALIDATION, DEAD, GROWTH, LINEAR = range(7)


def generator(seed: int, *path: int) -> np.random.Generator:
    """Return the random generator of one purpose, from the seed and a path of integers."""
    return np.random.default_rng(np.random.SeedSequence([seed, *path]))


def random_atoms(n_atoms: int, n_features: int, dtype: Any, seed: int, *path: int) -> np.ndarray:
    """Draw atoms with entries from U(-1/2, 1/2) and normalise them: (n_atoms, n_features).

    With a `path` (iteration, first atom) they replace dead atoms; without one they are the first dictionary.
    """
    rng = generator(seed, DEAD if path else INIT, *path)
    atoms = rng.random((n_atoms, n_features)) - 0.5
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    return atoms.astype(dtype)
