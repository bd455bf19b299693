"""What every pursuit on the device begins and ends with: tiles of rows, norms, smallest coefficients, residuals.

The counterpart of `kernels.products`.
"""

from __future__ import annotations

from typing import Any

from dbksvd_dask.gpu import cuda, device
from dbksvd_dask.kernels.lanczos import namespace
from dbksvd_dask.kernels.pursuit import NOISE
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import EncodeSpec

# Rows per float64 sum, so that the widened copy of a chunk stays small.
_SUM_ROWS = 1024
# Blocks of a refit, each with its own scratch: several per multiprocessor of any card.
_REFIT_BLOCKS = 2048


def row_tiles(n: int, size: int, first: int = 0) -> list[slice]:
    """Return slices of n rows, of at most `size` rows each, cut on the grid of rows that starts at row 0.

    Parameters
    ----------
    first : index of the first of these rows
    """
    lead = first % units.GRID_ROWS % size  # tiles smaller than a cell of the grid are also cut inside it
    return [slice(max(a - lead, 0), min(a - lead + size, n)) for a in range(0, lead + n, size)]


def squared_norms(Y: Any) -> Any:
    """Return the squared norm of each row: (n,) float64, not finite exactly where the row has NaN or infinity."""
    xp = namespace(Y)
    parts = []
    for rows in row_tiles(Y.shape[0], _SUM_ROWS):
        wide = xp.astype(Y[rows, :], xp.float64)
        parts.append(xp.sum(wide * wide, axis=1))
    return xp.concat(parts)


def itemsize(array: Any) -> int:
    """Return the bytes of a number."""
    return 8 if array.dtype == namespace(array).float64 else 4


def smallest_coefficients(norm2: Any, spec: EncodeSpec, dtype: Any) -> Any:
    """Return the smallest coefficient worth taking, per sample: (n,) of the working dtype.

    The limit is rounded up: a coefficient of that dtype is below the float64 limit exactly when it is below the
    rounded one.
    """
    xp = namespace(norm2)
    eps = float(xp.finfo(dtype).eps)
    exact = NOISE * eps * xp.sqrt(norm2)
    if spec.min_coefficient > 0:
        exact = xp.where(exact < spec.min_coefficient, xp.full_like(exact, spec.min_coefficient), exact)
    near = xp.astype(exact, dtype)
    above = xp.nextafter(near, xp.full_like(near, float("inf")))
    return xp.where(xp.astype(near, xp.float64) < exact, above, near)


def residual(Y: Any, atom: Any, coefficient: Any, D: Any) -> Any:
    """Return the residual ``Y - X D`` as a new array: (n, n_features)."""
    space = device.current()
    R = space.empty(Y.shape, Y.dtype)
    space.launch(cuda.subtract_reconstruction, Y.shape[0], 0, Y, atom, coefficient, D, R)
    return R


def refit(grams: Any, place: Any, rest: Any, nonneg: bool, coefficient: Any) -> None:
    """Replace coefficients by least squares on their supports; arguments as in `gpu.cuda.refit`."""
    space = device.current()
    n, k = place.shape
    blocks = min(n, _REFIT_BLOCKS)
    A = space.empty((blocks, k, k), space.xp.float64)
    delta = space.empty((blocks, k), space.xp.float64)
    space.launch(cuda.refit_nonneg if nonneg else cuda.refit, blocks, 0, grams, place, rest, A, delta, coefficient)
