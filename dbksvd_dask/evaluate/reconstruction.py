"""How well codes and dictionary give back the samples, streamed over blocks of rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate._check import check_codes
from dbksvd_dask.evaluate.metrics import VarianceExplained, fvu, mean_relative_error, variance_explained
from dbksvd_dask.kernels import encode
from dbksvd_dask.kernels._jit import kernel_input
from dbksvd_dask.kernels.codes import cosine_sums
from dbksvd_dask.kernels.moments import Moments, merge_moments, moments

# Relative errors of a pursuit are in [0, 1]: 100 equal bins, and one more for larger values.
ERROR_BINS = 100


@dataclass(frozen=True, eq=False)
class ReconstructionMoments:
    """Partial sums of one block of samples and their reconstruction ``yhat = x D``.

    Attributes
    ----------
    moments : Moments
    cosine_sum, norm_ratio_sum : float
        Sums of ``cos(y, yhat)`` and of ``|yhat| / |y|`` over rows with ``|y| > 0``.
    dot_sum, energy_sum : float
        Sums of ``y . yhat`` and of ``|yhat|^2``.
    error_histogram : int64 ndarray of shape (101,)
        Rows by relative error: 100 equal bins over [0, 1), then those at 1 and above.
    """

    moments: Moments
    cosine_sum: float
    norm_ratio_sum: float
    dot_sum: float
    energy_sum: float
    error_histogram: NDArray[np.int64]

    def merge(self, other: Self) -> Self:
        """Return the sums of both blocks; neither is changed."""
        return type(self)(
            self.moments.merge(other.moments),
            self.cosine_sum + other.cosine_sum,
            self.norm_ratio_sum + other.norm_ratio_sum,
            self.dot_sum + other.dot_sum,
            self.energy_sum + other.energy_sum,
            self.error_histogram + other.error_histogram,
        )


@dataclass(frozen=True)
class ReconstructionSummary:
    """The numbers of a reconstruction.

    Attributes
    ----------
    n_samples : int
    mean_relative_error : float
    variance_explained : VarianceExplained
    fvu : float
    cosine_similarity : float
    shrinkage : float
        Mean ``|yhat| / |y|``; below 1 the reconstruction is too short.
    relative_reconstruction_bias : float
        ``sum |yhat|^2 / sum y . yhat``; 1 is unbiased, below 1 a longer reconstruction would be closer.
    """

    n_samples: int
    mean_relative_error: float
    variance_explained: VarianceExplained
    fvu: float
    cosine_similarity: float
    shrinkage: float
    relative_reconstruction_bias: float


def residual(Y: ArrayLike, D: ArrayLike, atom: ArrayLike, coefficient: ArrayLike) -> NDArray[Any]:
    """Compute the residual ``Y - X D`` of one block.

    If the run took a mean off the samples, take it off `Y` first.

    Parameters
    ----------
    Y : array_like of shape (n_samples, n_features)
    D : array_like of shape (n_atoms, n_features)
    atom, coefficient : array_like of shape (n_samples, n_slots)

    Returns
    -------
    ndarray of shape (n_samples, n_features), float64 if `Y` is, else float32
    """
    samples, atoms = np.asarray(Y), np.asarray(D)
    if samples.ndim != 2 or atoms.ndim != 2 or samples.shape[1] != atoms.shape[1]:
        raise MismatchError(
            f"samples of shape {samples.shape} and a dictionary of shape {atoms.shape} do not share their "
            "features; pass the activations this dictionary was trained on"
        )
    places, values = check_codes(atom, coefficient, atoms.shape[0])
    if places.shape[0] != samples.shape[0]:
        raise MismatchError(
            f"received codes of {places.shape[0]} samples for {samples.shape[0]} samples; "
            "pass the codes of these rows"
        )
    dtype = np.float64 if samples.dtype == np.float64 else np.float32
    return encode.residual(samples.astype(dtype), places, values.astype(dtype), atoms.astype(dtype))


def reconstruction_moments(Y: NDArray[Any], R: NDArray[Any]) -> ReconstructionMoments:
    """Compute the partial sums of one block of samples and its residual.

    Parameters
    ----------
    Y, R : ndarray of shape (n_samples, n_features)

    Returns
    -------
    ReconstructionMoments
    """
    sums = moments(Y, R)
    histogram = np.zeros(ERROR_BINS + 1, np.int64)
    dtype = np.float64 if np.float64 in (Y.dtype, R.dtype) else np.float32
    cosine, ratio, dot, energy = cosine_sums(kernel_input(Y, dtype), kernel_input(R, dtype), histogram)
    return ReconstructionMoments(sums, float(cosine), float(ratio), float(dot), float(energy), histogram)


def stream_reconstruction(
    blocks: Iterable[tuple[ArrayLike, ArrayLike, ArrayLike]], D: ArrayLike, mean: ArrayLike | None = None
) -> ReconstructionMoments:
    """Sum over all blocks, merged in their order.

    Parameters
    ----------
    blocks : iterable of (Y, atom, coefficient)
        Rows of the samples with their codes.
    D : array_like of shape (n_atoms, n_features)
    mean : array_like of shape (n_features,), optional
        What the run took off every sample before it encoded them. All numbers then describe the centred
        samples, as those of the training do.

    Returns
    -------
    ReconstructionMoments
    """
    return merge_moments(
        reconstruction_moments(centred, residual(centred, D, atom, coefficient))
        for centred, atom, coefficient in ((_centred(Y, mean), atom, c) for Y, atom, c in blocks)
    )


def reconstruction_summary(m: ReconstructionMoments) -> ReconstructionSummary:
    """Turn sums into the reported numbers; rows of norm 0 are left out of every mean over rows."""
    rows = m.moments.n_nonzero_rows
    if rows == 0:
        raise InputError(f"all {m.moments.n_samples} samples are zero; nothing to reconstruct")
    return ReconstructionSummary(
        n_samples=m.moments.n_samples,
        mean_relative_error=mean_relative_error(m.moments),
        variance_explained=variance_explained(m.moments),
        fvu=fvu(m.moments),
        cosine_similarity=m.cosine_sum / rows,
        shrinkage=m.norm_ratio_sum / rows,
        relative_reconstruction_bias=m.energy_sum / m.dot_sum if m.dot_sum else float("nan"),
    )


def require_codes_of(Y: ArrayLike, D: ArrayLike, atom: ArrayLike, coefficient: ArrayLike) -> None:
    """Refuse codes that were made with another dictionary.

    A pursuit never makes a sample's error larger than the sample, so codes that do belong elsewhere. That holds in
    the coordinates in which it encodes: of a whitened dictionary, give ``Y W`` and ``D W``.

    Parameters
    ----------
    Y : array_like of shape (n_samples, n_features)
        A few rows are enough.
    D : array_like of shape (n_atoms, n_features)
    atom, coefficient : array_like of shape (n_samples, n_slots)
    """
    error = mean_relative_error(moments(np.asarray(Y), residual(Y, D, atom, coefficient)))
    if error > 1.0:
        raise MismatchError(
            f"these codes give the samples back with a mean relative error of {error:.3g}, worse than none; "
            "they belong to another dictionary or other samples: encode again with this dictionary"
        )


def _centred(Y: ArrayLike, mean: ArrayLike | None) -> NDArray[Any]:
    """Subtract the mean, in the precision of the samples."""
    samples = np.asarray(Y)
    if mean is None:
        return samples
    offset = np.asarray(mean)
    if offset.shape != samples.shape[1:]:
        raise MismatchError(f"mean has shape {offset.shape} but the samples have {samples.shape[1:]} features")
    dtype = np.float64 if samples.dtype == np.float64 else np.float32
    centred: NDArray[Any] = (samples - offset).astype(dtype)
    return centred
