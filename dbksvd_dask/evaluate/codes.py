"""Statistics of sparse codes: L0, L1, density, dead and over-dense atoms, sign balance."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate._check import CodeBlocks, check_codes, iter_codes
from dbksvd_dask.kernels.codes import atom_sums
from dbksvd_dask.kernels.moments import Float64Array, merge_moments

# An atom active on more than one sample in ten says little about any of them; SAE reports draw the same line.
OVER_DENSE = 0.1


@dataclass(frozen=True, eq=False)
class CodeMoments:
    """Partial sums of one block of codes; `merge` gives the sums of two blocks.

    A slot is active when it names an atom and its coefficient is not zero.

    Attributes
    ----------
    n_samples : int
    l1_sum : float
        Sum of the absolute coefficients.
    l0_histogram : int64 ndarray of shape (n_slots + 1,)
        Number of samples with 0, 1, ... active atoms.
    n_active, n_positive : int64 ndarray of shape (n_atoms,)
        Samples on which the atom is active, and active with a positive coefficient.
    total, square : float64 ndarray of shape (n_atoms,)
        Sum of the coefficients and of their squares.
    largest : float64 ndarray of shape (n_atoms,)
        Largest absolute coefficient.
    """

    n_samples: int
    l1_sum: float
    l0_histogram: NDArray[np.int64]
    n_active: NDArray[np.int64]
    n_positive: NDArray[np.int64]
    total: Float64Array
    square: Float64Array
    largest: Float64Array

    def merge(self, other: Self) -> Self:
        """Return the sums of both blocks; neither is changed."""
        if self.n_active.size != other.n_active.size:
            raise InputError(
                f"cannot merge sums over {self.n_active.size} atoms with sums over {other.n_active.size}"
            )
        longer = max(self.l0_histogram.size, other.l0_histogram.size)
        return type(self)(
            self.n_samples + other.n_samples,
            self.l1_sum + other.l1_sum,
            _padded(self.l0_histogram, longer) + _padded(other.l0_histogram, longer),
            self.n_active + other.n_active,
            self.n_positive + other.n_positive,
            self.total + other.total,
            self.square + other.square,
            np.maximum(self.largest, other.largest),
        )

    @property
    def density(self) -> Float64Array:
        """Fraction of the samples on which each atom is active, shape (n_atoms,)."""
        return self.n_active / max(self.n_samples, 1)

    @property
    def sign_balance(self) -> Float64Array:
        """Fraction of each atom's active samples with a positive coefficient, nan for a dead atom."""
        return _quotient(self.n_positive, self.n_active)

    @property
    def mean_active(self) -> Float64Array:
        """Mean of each atom's nonzero coefficients, nan for a dead atom."""
        return _quotient(self.total, self.n_active)

    @property
    def variance(self) -> Float64Array:
        """Variance of each atom's coefficient over all samples, zeros included, shape (n_atoms,)."""
        n = max(self.n_samples, 1)
        return np.maximum(self.square / n - (self.total / n) ** 2, 0.0)

    @property
    def sign(self) -> Float64Array:
        """-1 for atoms whose mean nonzero coefficient is negative, else 1: the sign-flip rule."""
        return np.where(self.total < 0.0, -1.0, 1.0)


@dataclass(frozen=True, eq=False)
class CodeSummary:
    """What a page or a table says about codes.

    Attributes
    ----------
    n_samples, n_atoms : int
        The sample size belongs to every count of dead atoms: more samples, fewer dead.
    l0_mean : float
    l0_min, l0_max : int
    l1_mean : float
        Mean over samples of the sum of absolute coefficients.
    n_dead : int
        Atoms active on no sample.
    n_over_dense : int
        Atoms active on more than `over_dense` of the samples.
    over_dense : float
    density_mean, sign_balance_mean : float
        Means over all atoms and over the atoms in use.
    """

    n_samples: int
    n_atoms: int
    l0_mean: float
    l0_min: int
    l0_max: int
    l1_mean: float
    n_dead: int
    n_over_dense: int
    over_dense: float
    density_mean: float
    sign_balance_mean: float


@dataclass(frozen=True, eq=False)
class DensityHistogram:
    """Histogram of log10 density over the atoms in use.

    Attributes
    ----------
    edges : float64 ndarray of shape (n_bins + 1,)
        Bin edges in log10 of the density; the first is that of one sample, the last 0 (every sample).
    counts : int64 ndarray of shape (n_bins,)
    n_dead : int
        Atoms without a place on a logarithmic axis.
    n_samples : int
    """

    edges: Float64Array
    counts: NDArray[np.int64]
    n_dead: int
    n_samples: int


def code_moments(atom: ArrayLike, coefficient: ArrayLike, n_atoms: int) -> CodeMoments:
    """Compute the partial sums of one block of codes.

    Parameters
    ----------
    atom, coefficient : array_like of shape (n_samples, n_slots)
    n_atoms : int

    Returns
    -------
    CodeMoments
    """
    return _sums(*check_codes(atom, coefficient, n_atoms), n_atoms)


def _sums(atoms: NDArray[np.int32], values: NDArray[Any], n_atoms: int) -> CodeMoments:
    l0_histogram = np.zeros(atoms.shape[1] + 1, np.int64)
    n_active, n_positive = np.zeros(n_atoms, np.int64), np.zeros(n_atoms, np.int64)
    total, square, largest = np.zeros(n_atoms), np.zeros(n_atoms), np.zeros(n_atoms)
    l1 = atom_sums(atoms, values, l0_histogram, n_active, n_positive, total, square, largest)
    return CodeMoments(atoms.shape[0], float(l1), l0_histogram, n_active, n_positive, total, square, largest)


def stream_code_moments(blocks: CodeBlocks, n_atoms: int) -> CodeMoments:
    """Sum over all blocks of codes, merged in their order.

    Parameters
    ----------
    blocks : callable returning an iterable of (atom, coefficient)
        Called once; each pair has shape (rows, n_slots).
    n_atoms : int

    Returns
    -------
    CodeMoments
    """
    return merge_moments(_sums(atom, coefficient, n_atoms) for atom, coefficient in iter_codes(blocks, n_atoms))


def code_summary(m: CodeMoments, over_dense: float = OVER_DENSE) -> CodeSummary:
    """Sum up codes in a few numbers.

    Parameters
    ----------
    m : CodeMoments
    over_dense : float, default 0.1
        Density above which an atom counts as over-dense.

    Returns
    -------
    CodeSummary
    """
    if m.n_samples == 0:
        raise InputError("the codes hold no samples; pass at least one row")
    seen = np.flatnonzero(m.l0_histogram)
    balance = m.sign_balance[m.n_active > 0]
    return CodeSummary(
        n_samples=m.n_samples,
        n_atoms=m.n_active.size,
        l0_mean=float(m.n_active.sum() / m.n_samples),
        l0_min=int(seen[0]),
        l0_max=int(seen[-1]),
        l1_mean=m.l1_sum / m.n_samples,
        n_dead=int(np.count_nonzero(m.n_active == 0)),
        n_over_dense=int(np.count_nonzero(m.density > over_dense)),
        over_dense=over_dense,
        density_mean=float(m.density.mean()),
        sign_balance_mean=float(balance.mean()) if balance.size else float("nan"),
    )


def density_histogram(m: CodeMoments, bins_per_decade: int = 5) -> DensityHistogram:
    """Histogram of log10 density, from one sample up to every sample.

    Parameters
    ----------
    m : CodeMoments
    bins_per_decade : int, default 5

    Returns
    -------
    DensityHistogram
    """
    used = m.density[m.n_active > 0]
    lowest = -np.log10(max(m.n_samples, 10))
    edges = np.linspace(lowest, 0.0, max(1, round(-lowest * bins_per_decade)) + 1)
    # 1/n and 1 sit on the outer edges; rounding must not push them out
    counts, _ = np.histogram(np.clip(np.log10(used), edges[0], edges[-1]), edges)
    return DensityHistogram(edges, counts.astype(np.int64), int(m.n_active.size - used.size), m.n_samples)


def _padded(counts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.pad(counts, (0, length - counts.size))


def _quotient(a: NDArray[np.int64] | Float64Array, b: NDArray[np.int64]) -> Float64Array:
    out: Float64Array = np.full(b.shape, np.nan)
    np.divide(a, b, out=out, where=b > 0)
    return out
