"""Powers of two that keep sums of products inside the range of float32, whatever the scale of the samples.

K-SVD does not depend on the scale of the data, but squares do: of rows of norm 1e-15 the dictionary update sums
products of 1e-30, and the square of such a sum is zero in float32. So the update of a chunk whose coefficients are
far from one works in units of a power of two. Multiplying by a power of two changes no bit of a mantissa: a
dictionary of samples times 2^e equals that of the samples themselves, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# Chunks whose largest coefficient is within 2^-20 and 2^20 need no units: four factors of it, times the square of
# some million rows, stay inside float32 (2^-126 to 2^128).
_ORDINARY = 20
# Largest norm of a row (as an exponent of two): coefficients may exceed the norm where atoms are coherent.
_LARGEST = {np.dtype(np.float32): 110, np.dtype(np.float64): 450}
# Smallest norm, root mean square of a batch: below it entries are subnormal and have lost digits.
_SMALLEST = {np.dtype(np.float32): -110, np.dtype(np.float64): -450}


def largest_norm(dtype: Any) -> float:
    """Return the largest norm of a row that can be encoded in a dtype."""
    return 2.0 ** _LARGEST[np.dtype(dtype)]


def smallest_norm(dtype: Any) -> float:
    """Return the smallest norm (root mean square of a batch) from which a dictionary can be learned in a dtype."""
    return 2.0 ** _SMALLEST[np.dtype(dtype)]


def unit_of(largest: float, dtype: Any) -> int:
    """Return the exponent u of the units 2^-u in which a chunk is summed; 0 for ordinary samples.

    Parameters
    ----------
    largest : magnitude of the largest coefficient of the chunk
    dtype : of the coefficients; its powers of two bound u

    Examples
    --------
    >>> [unit_of(x, np.float32) for x in (3.0, 0.0, 2.0**40, 2.0**-60, 2.0**-148)]
    [0, 0, -41, 59, 126]
    """
    exponent = math.frexp(largest)[1]
    if abs(exponent) <= _ORDINARY or not math.isfinite(largest):
        return 0
    return min(-exponent, -int(np.finfo(dtype).minexp))


def in_units(array: Any, unit: int) -> Any:
    """Multiply an array of any library by 2^unit."""
    return array if unit == 0 else array * 2.0**unit


def rows_near_one(rows: np.ndarray) -> np.ndarray:
    """Scale each row by a power of two, its largest entry to [1/2, 1), so that norms neither overflow nor vanish.

    Parameters
    ----------
    rows : (n, d) finite

    Returns
    -------
    ndarray of shape (n, d), same dtype; rows of zeros stay zero
    """
    _, exponents = np.frexp(np.abs(rows).max(axis=1, initial=0))
    return np.ldexp(rows, -exponents[:, None]).astype(rows.dtype, copy=False)
