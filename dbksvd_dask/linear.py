"""`LinearEncoder`: codes by one linear step and a threshold, as a sparse autoencoder has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dbksvd_dask.base.late import late
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.units import split_rows

if TYPE_CHECKING:
    import scipy.sparse as sp

    from dbksvd_dask.kernels.linear import LinearMap
else:
    sp = late("scipy.sparse")

# Samples whose activations are computed at once: dense, (rows, n_latents).
BLOCK_ROWS = 2048


@dataclass(frozen=True, eq=False)
class LinearEncoder:
    """An encoder of one linear step: ``z = W (y - mean) + b``, 0 unless ``z > threshold``.

    `fit_linear_encoder` makes one. It is as fast as the encoder of a sparse autoencoder and less accurate than the
    pursuit that it imitates; docs/settings.md has the figures.

    Attributes
    ----------
    dictionary : Dictionary
        Its atoms reconstruct, its mean is subtracted first.
    W : float32 ndarray of shape (n_latents, n_features)
    b, threshold : float32 ndarrays of shape (n_latents,)
        A dictionary with coefficients of both signs has two latents per atom: first the positive parts of all
        atoms, then the negative ones.
    n_rows : int
        Samples that it was fitted to.

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import Dictionary, LinearEncoder
    >>> W, b, threshold = np.eye(2, dtype="f4"), np.zeros(2, "f4"), np.ones(2, "f4")
    >>> encoder = LinearEncoder(Dictionary(W, None, {"n_atoms": 2, "k": 1}), W, b, threshold)
    >>> encoder.encode([[3.0, 0.5], [1.0, 2.0]]).toarray().tolist()
    [[3.0, 0.0], [0.0, 2.0]]
    """

    dictionary: Dictionary
    W: np.ndarray
    b: np.ndarray
    threshold: np.ndarray
    n_rows: int = 0

    @property
    def n_latents(self) -> int:
        """Latents: one per atom, or two."""
        return int(self.W.shape[0])

    @property
    def stacked(self) -> bool:
        """Whether there are two latents per atom."""
        return self.n_latents == 2 * self.dictionary.n_atoms

    def encode(self, Y: Any) -> sp.csr_array:
        """Encode samples.

        Parameters
        ----------
        Y : array_like of shape (n_samples, n_features)

        Returns
        -------
        csr array of shape (n_samples, n_atoms), float32
        """
        samples = np.asarray(Y)
        if samples.ndim != 2 or samples.shape[1] != self.dictionary.n_features:
            raise InputError(
                f"Y has shape {samples.shape}; it must be (n_samples, {self.dictionary.n_features}), "
                "as the dictionary has features"
            )
        blocks = [self._block(samples[a:b]) for a, b in split_rows(samples.shape[0], BLOCK_ROWS)]
        shape = (0, self.dictionary.n_atoms)
        return sp.csr_array(sp.vstack(blocks)) if blocks else sp.csr_array(shape, dtype=np.float32)

    def _block(self, Y: np.ndarray) -> sp.csr_array:
        from dbksvd_dask.kernels import chunk
        from dbksvd_dask.kernels.linear import activations

        n_atoms = self.dictionary.n_atoms
        acts = activations(chunk.prepare(Y, self.dictionary.mean, np.float32), self.linear_map)
        return sp.csr_array(acts[:, :n_atoms] - acts[:, n_atoms:] if self.stacked else acts)

    @property
    def linear_map(self) -> LinearMap:
        """The map alone."""
        from dbksvd_dask.kernels.linear import LinearMap

        return LinearMap(self.W, self.b, self.threshold)

    def __repr__(self) -> str:
        shape = f"{self.n_latents} latents of {self.dictionary.n_features} features"
        return f"<LinearEncoder: {shape}, fitted to the codes of {self.n_rows:,} samples>"
