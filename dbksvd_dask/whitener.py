"""`Whitener`: samples in coordinates in which directions vary more alike, and back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from dbksvd_dask.base.late import late
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.plan import seeds
from dbksvd_dask.plan.params import check_fraction, check_integer

if TYPE_CHECKING:
    import dask.array as da
else:
    da = late("dask.array")

# Samples whose covariance is computed: as many as a fit with `whiten` takes.
N_ROWS = 262_144
ARRAYS = ("mean", "forward", "backward")


class Whitener(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Multiply centred samples by ``C^(-exponent / 2)``, where C is their covariance, and undo it.

    Few directions carry most of the variance of activations, so a pursuit spends most of its nonzeros on them. A
    dictionary of whitened samples serves the others as well; docs/settings.md has what that brings. Unlike
    ``DBKSVD(whiten=...)``, which whitens updates only and keeps a dictionary of the samples as they are, codes are
    then those of whitened samples: transform before you encode.

    Parameters
    ----------
    exponent : float, default 0.5
        0 changes nothing, 1 makes all directions alike.
    n_rows : int, default 262,144
        Samples to compute the covariance of, drawn by `seed`.
    chunk_size : int, default 8192
        Samples per task. The last bits of the result depend on it.
    seed : int, default 0

    Attributes
    ----------
    mean_ : float64 ndarray of shape (n_features,)
    forward_ : float32 or float64 ndarray of shape (n_features, n_features)
        Symmetric; whitened samples are ``(y - mean_) forward_``.
    backward_ : ndarray of the same shape and dtype
        Its inverse.
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import DBKSVD, Whitener
    >>> Y = np.random.default_rng(0).normal(size=(500, 8)).astype("f4") * np.array([30, 1, 1, 1, 1, 1, 1, 1], "f4")
    >>> whitener = Whitener().fit(Y)
    >>> model = DBKSVD(n_atoms=16, k=2, n_iter=3).fit(whitener.transform(Y))
    >>> codes = model.transform(whitener.transform(Y))
    >>> whitener.inverse_transform(model.inverse_transform(codes)).shape
    (500, 8)
    """

    def __init__(
        self, exponent: float = 0.5, *, n_rows: int = N_ROWS, chunk_size: int = 8192, seed: int = 0
    ) -> None:
        self.exponent = exponent
        self.n_rows = n_rows
        self.chunk_size = chunk_size
        self.seed = seed

    def fit(self, Y: Any, y: Any = None) -> Whitener:
        """Compute mean and covariance, on the current Dask scheduler.

        Parameters
        ----------
        Y : ndarray, tensor, dask array, xarray.DataArray, path of a .npy file or path/URL of a Zarr store
            Of shape (n_samples, n_features).
        y : ignored
        """
        from dbksvd_dask.graph.load import build_second_moment, build_sum
        from dbksvd_dask.graph.run import attempt, compute
        from dbksvd_dask.graph.sources import as_source
        from dbksvd_dask.kernels.whiten import whitening

        exponent = check_fraction("exponent", self.exponent)
        if exponent > 1:
            raise InputError(f"exponent={exponent} must lie between 0 and 1; use for example exponent=0.5")
        size = check_integer("chunk_size", self.chunk_size, 1)
        source = as_source(Y, size)
        n = min(check_integer("n_rows", self.n_rows, 1), source.n_samples)
        rows = np.sort(seeds.generator(self.seed, seeds.WHITENING).permutation(source.n_samples)[:n])
        dtype = np.dtype(np.float64 if source.dtype == np.float64 else np.float32)
        mean = attempt(lambda: compute(build_sum(source, rows, size, dtype)), lambda *_: None) / n
        total = attempt(lambda: compute(build_second_moment(source, rows, mean, size, dtype)), lambda *_: None)
        maps = whitening(total, exponent, dtype)
        self._set(mean, maps.forward, maps.backward.astype(dtype))
        return self

    def _set(self, mean: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> None:
        self.mean_, self.forward_, self.backward_ = mean, forward, backward
        self.n_features_in_ = int(mean.shape[0])

    def transform(self, Y: Any) -> Any:
        """Whiten samples.

        Parameters
        ----------
        Y : as for `fit`

        Returns
        -------
        ndarray of shape (n_samples, n_features); for a Dask array or a store, a Dask array, computed block by
        block when it is read
        """
        from dbksvd_dask.graph.sources import LazySource, as_source

        check_is_fitted(self)
        if isinstance(Y, str | os.PathLike) and not os.fspath(Y).endswith(".npy"):
            from dbksvd_dask.store.activations import open_activations

            Y = open_activations(Y)["activations"]
        source = as_source(Y, self.chunk_size)
        if source.n_features != self.n_features_in_:
            raise InputError(f"Y has {source.n_features} features, the Whitener {self.n_features_in_}")
        if isinstance(source, LazySource):
            whole = source.array.rechunk({1: -1})
            return da.map_blocks(_block, whole, self.mean_, self.forward_, dtype=self.forward_.dtype)
        return _whitened(source.take(np.arange(source.n_samples)).load(), self.mean_, self.forward_, 0)

    def inverse_transform(self, Z: Any) -> np.ndarray:
        """Return samples as they were: (n_samples, n_features).

        Parameters
        ----------
        Z : array_like of shape (n_samples, n_features), whitened samples or their reconstructions
        """
        from dbksvd_dask.kernels.whiten import mapped_rows

        check_is_fitted(self)
        rows = np.ascontiguousarray(Z, dtype=self.backward_.dtype)
        if rows.ndim != 2 or rows.shape[1] != self.n_features_in_:
            raise InputError(f"Z has shape {rows.shape}; it must be (n_samples, {self.n_features_in_})")
        out: np.ndarray = mapped_rows(rows, self.backward_) + self.mean_.astype(rows.dtype)
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write mean, maps and parameters to one .npz file, whole or not at all."""
        from dbksvd_dask.store.atomic import staged

        check_is_fitted(self)
        content: dict[str, Any] = self.get_params() | {name: getattr(self, f"{name}_") for name in ARRAYS}
        with staged(path) as aside, open(aside, "wb") as file:
            np.savez(file, **content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Whitener:
        """Open what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            arrays = [found.pop(name) for name in ARRAYS]
            out = cls(**{name: value.item() for name, value in found.items()})
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise StoreError(f"{path} is not a Whitener that was saved ({error})") from error
        out._set(*arrays)
        return out


def _whitened(rows: Any, mean: np.ndarray, forward: np.ndarray, first: int) -> np.ndarray:
    from dbksvd_dask.kernels.chunk import prepare
    from dbksvd_dask.kernels.whiten import mapped_rows

    return mapped_rows(prepare(np.asarray(rows), mean, forward.dtype), forward, first)


def _block(rows: Any, mean: np.ndarray, forward: np.ndarray, block_info: Any = None) -> np.ndarray:
    """Whiten a block of a Dask array; rows lie at their index in the whole array."""
    first = block_info[0]["array-location"][0][0] if block_info else 0
    return _whitened(rows, mean, forward, first)
