"""Do numbers look like activations? Bytes that are read as another dtype than they were written in do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store.dtypes import BFLOAT16, stored_dtype, widen_bfloat16

# Fewer numbers than this are not judged.
LEAST = 1000
# Root mean square over median of the sizes. Activations of language models, with their outlier tokens and
# coordinates, stay below 20; float16 bytes read as float32 reach 1e5.
WIDE = 1000.0
# Median over first percentile of the sizes: 50 for normal and uniform numbers, below 3 for bfloat16 bytes that are
# read as float16.
NARROW = 4.0
# Only where each sign has at least this share: values of one sign, such as brightness, may all be far from zero.
BOTH_SIGNS = 0.1


@dataclass(frozen=True)
class Values:
    """What some imported rows hold.

    Attributes
    ----------
    smallest, largest, mean_norm : float
        Of the values, and of the norms of the rows.
    n_rows : int
        Rows that were looked at.
    doubt : str
        Why the numbers look wrong, and what may be the cause; empty if they look right.
    """

    smallest: float
    largest: float
    mean_norm: float
    n_rows: int
    doubt: str = ""


def doubt_about(values: npt.NDArray[Any]) -> str:
    """Say why numbers do not look like activations; nothing if they do.

    Parameters
    ----------
    values : floating-point ndarray

    Examples
    --------
    >>> numbers = np.random.default_rng(0).standard_normal(10_000).astype("float16")
    >>> doubt_about(numbers)
    ''
    >>> doubt_about(numbers.view("float32"))
    'half of the values are below 0.00021 in size, the largest is 278'
    """
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(values[np.isfinite(values) & (values != 0)].astype(np.float64))
        if size.size < LEAST:
            return ""
        low, middle = np.quantile(size, (0.01, 0.5))
        scale = float(size.max())
        rms = scale * float(np.sqrt(np.mean((size / scale) ** 2)))
    if rms > WIDE * middle:
        return f"half of the values are below {middle:.2g} in size, the largest is {scale:.3g}"
    positive = np.count_nonzero(values > 0) / size.size
    if low * NARROW > middle and BOTH_SIGNS < positive < 1 - BOTH_SIGNS:
        return f"values have both signs, and next to none is smaller than {low:.2g}"
    return ""


def look_at(rows: npt.NDArray[Any], dtype: str, raw: bool) -> Values:
    """Summarise rows.

    Parameters
    ----------
    rows : ndarray of shape (n, n_features)
        As stored, bfloat16 as its uint16 bits.
    dtype : str
        What the rows are said to be.
    raw : bool
        Whether only the user says so: other dtypes are then tried where this one looks wrong.
    """
    values = widen_bfloat16(rows) if dtype == BFLOAT16 else rows
    doubt = doubt_about(values)
    if not doubt and raw and dtype == "float32" and _are_two_numbers(rows):
        doubt = "each half of four bytes is a plausible bfloat16"
    if doubt and raw:
        better = [other for other in ("float16", BFLOAT16, "float32") if other != dtype and _fits(rows, other)]
        doubt += f"; as {better[0]} they would look right" if better else f"; is {dtype} the right dtype?"
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.square(values.astype(np.float64)).sum(axis=1))
    return Values(float(values.min()), float(values.max()), float(norms.mean()), len(rows), doubt)


def _are_two_numbers(rows: npt.NDArray[Any]) -> bool:
    """Return whether float32 numbers may be two bfloat16 each; lower halves are random bits otherwise."""
    lower = np.ascontiguousarray(rows).view(np.uint16)[:, ::2]
    return int(np.count_nonzero(lower)) > max(LEAST, lower.size // 2) and not doubt_about(widen_bfloat16(lower))


def _fits(rows: npt.NDArray[Any], dtype: str) -> bool:
    """Return whether the bytes of rows look right as another dtype."""
    stored = np.dtype(stored_dtype(dtype))
    if rows.shape[1] * rows.itemsize % stored.itemsize:
        return False
    other = np.ascontiguousarray(rows).view(stored)
    values = widen_bfloat16(other) if dtype == BFLOAT16 else other
    return bool(np.isfinite(values).all()) and not doubt_about(values)
