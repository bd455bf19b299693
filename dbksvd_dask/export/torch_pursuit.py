"""Our pursuit on torch tensors.

Two ways to the same codes. Without gradients they come from the compiled kernels of this package, in the gram
domain, on the CPU. When a gradient is needed, or the tensors are on another device, the same rule runs in torch
on the residual, step by step for all samples.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import Beside, encode_rows, gram_for
from dbksvd_dask.kernels.pursuit import NOISE, STEPS_PER_ATOM
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS
from dbksvd_dask.plan.units import TILE_ROWS


class TorchPursuit:
    """An encoder of tensors that caches the gram of its dictionary.

    Parameters
    ----------
    spec : EncodeSpec
        How samples become codes.
    """

    def __init__(self, spec: EncodeSpec) -> None:
        self.spec = spec
        self._atoms: np.ndarray | None = None
        self._gram: Beside = None
        self._mapped: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, x: torch.Tensor, W_dec: torch.Tensor, whitening: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode samples, already without their mean.

        Parameters
        ----------
        x : tensor of shape (..., n_features)
        W_dec : tensor of shape (n_atoms, n_features), unit rows
        whitening : tensor of shape (n_features, n_features), the map to the coordinates in which to encode

        Returns
        -------
        tensor of shape (..., n_atoms), dtype and device of `x`: at most k nonzeros in the last dimension
        """
        rows = x.reshape(-1, x.shape[-1])
        if whitening is None:
            acts = self._encode(rows, W_dec)
        else:
            atoms, lengths = self._whitened(W_dec, whitening)
            acts = self._encode(rows @ whitening.detach().to(rows.device, rows.dtype), atoms)
            acts = acts / lengths.to(acts.device, acts.dtype)
        return acts.reshape(*x.shape[:-1], W_dec.shape[0])

    def _whitened(self, W_dec: torch.Tensor, whitening: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the atoms in whitened coordinates, unit rows, and their lengths; mapped again if changed."""
        state = [(t.data_ptr(), t._version, t.dtype, t.device) for t in (W_dec, whitening)]
        if self._mapped is None or self._mapped[0] != state:
            with torch.no_grad():
                mapped = W_dec.detach().double() @ whitening.detach().to(W_dec.device).double()
                lengths = mapped.norm(dim=1)
                self._mapped = (state, (mapped / lengths[:, None]).to(W_dec.dtype), lengths)
        return self._mapped[1:]

    def _encode(self, rows: torch.Tensor, W_dec: torch.Tensor) -> torch.Tensor:
        wants_gradient = torch.is_grad_enabled() and rows.requires_grad
        least_squares = self.spec.refit or ENCODERS[self.spec.encoder].least_squares
        if least_squares or not (wants_gradient or rows.device.type != "cpu"):
            with torch.no_grad():
                acts = self._from_kernel(rows, W_dec)
            return _solve_on_support(rows, W_dec, acts) if wants_gradient else acts
        return pursue(rows, W_dec, self.spec)

    def _from_kernel(self, rows: torch.Tensor, W_dec: torch.Tensor) -> torch.Tensor:
        """Encode with the compiled kernels, with tiles of rows spread over threads."""
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        Y = rows.detach().to("cpu", dtype).numpy()
        D, gram = self._dictionary(W_dec.detach().to("cpu", dtype).numpy())
        acts = np.zeros((Y.shape[0], D.shape[0]), Y.dtype)
        starts = range(0, Y.shape[0], TILE_ROWS)

        def encode(start: int) -> None:
            part = slice(start, start + TILE_ROWS)
            _scatter(acts[part], *encode_rows(Y[part], D, gram, self.spec))

        with single_blas_thread():
            if len(starts) > 1:
                with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                    list(pool.map(encode, starts))
            else:
                list(map(encode, starts))
        acts[~np.isfinite(Y).all(axis=1)] = np.nan  # as other encoders do with a sample that is not a number
        return torch.from_numpy(acts).to(rows.device, rows.dtype)

    def _dictionary(self, D: np.ndarray) -> tuple[np.ndarray, Beside]:
        """Return the dictionary and its gram, if it has one, recomputed when the weights have changed."""
        if self._atoms is None or not np.array_equal(self._atoms, D):
            self._atoms = np.array(D)
            with single_blas_thread():
                self._gram = gram_for(self._atoms, self.spec)
        return self._atoms, self._gram


def _scatter(acts: np.ndarray, atom: np.ndarray, coefficient: np.ndarray) -> None:
    """Write codes (n, k) into dense rows (n, n_atoms)."""
    sample, slot = np.nonzero(atom >= 0)
    acts[sample, atom[sample, slot]] = coefficient[sample, slot]


def pursue(x: torch.Tensor, W_dec: torch.Tensor, spec: EncodeSpec) -> torch.Tensor:
    """Run matching pursuit on the residual, with gradients: the rule of `kernels.pursuit`, in its stages.

    Parameters
    ----------
    x : tensor of shape (n, n_features)
    W_dec : tensor of shape (n_atoms, n_features), unit rows

    Returns
    -------
    tensor of shape (n, n_atoms)
    """
    ends = _Ends(x.detach(), spec)
    parts, residual = [], x
    for start, stop, k in spec.stages or ((0, W_dec.shape[0], spec.k),):
        group = W_dec[start:stop]
        parts.append(_pursue_group(residual, group, k, spec.nonneg, ends))
        if stop < W_dec.shape[0]:
            residual = residual - parts[-1] @ group
    return torch.cat(parts, dim=1)


class _Ends:
    """When the pursuits of samples end, apart from the number of atoms.

    Attributes
    ----------
    floor : (n,) smallest coefficient that counts
    remaining, target : (n,) squared norms of the residual, and where to stop
    """

    def __init__(self, x: torch.Tensor, spec: EncodeSpec) -> None:
        norm = x.double().norm(dim=1)
        self.floor = torch.clamp(NOISE * torch.finfo(x.dtype).eps * norm, min=spec.min_coefficient)
        self.remaining, self.target = norm**2, (spec.rtol * norm) ** 2
        self.relative = spec.rtol > 0

    def not_yet(self, rows: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return which of some rows may take their next step."""
        allowed = (step.abs().double() >= self.floor[rows]) & (step != 0)
        return allowed & (self.remaining[rows] > self.target[rows]) if self.relative else allowed


def _pursue_group(x: torch.Tensor, atoms: torch.Tensor, k: int, nonneg: bool, ends: _Ends) -> torch.Tensor:
    """Pursue all samples with the atoms of one group: (n, atoms of the group)."""
    n, n_atoms = x.shape[0], atoms.shape[0]
    used = torch.zeros(n, n_atoms, dtype=torch.bool, device=x.device)
    rows = torch.arange(n, device=x.device)  # the samples that are not done
    residual = x
    where, values = [], []
    for _ in range(STEPS_PER_ATOM * k):
        with torch.no_grad():
            products = residual @ atoms.T
            chosen = (products if nonneg else products.abs()).argmax(dim=1)
        selected = atoms[chosen]
        step = (residual * selected).sum(dim=1)
        with torch.no_grad():
            allowed = ends.not_yet(rows, step)
            allowed &= used[rows, chosen] | (used[rows].sum(dim=1) < k)
            if nonneg:
                allowed &= step > 0
            keep = allowed.nonzero().squeeze(1)
            if keep.numel() == 0:
                break
            rows, chosen = rows[keep], chosen[keep]
            used[rows, chosen] = True
            ends.remaining[rows] -= step[keep].double() ** 2
        where.append(rows * n_atoms + chosen)
        values.append(step[keep])
        residual = residual[keep] - step[keep].unsqueeze(1) * selected[keep]
    acts = x.new_zeros(n * n_atoms)
    if values:
        acts = acts.index_add(0, torch.cat(where), torch.cat(values))
    return acts.reshape(n, n_atoms)


def _solve_on_support(x: torch.Tensor, W_dec: torch.Tensor, acts: torch.Tensor) -> torch.Tensor:
    """Repeat the least squares on the supports of `acts`, so that gradients reach `x`: (n, n_atoms)."""
    width = int((acts != 0).sum(dim=1).max()) if acts.numel() else 0
    if width == 0:
        return acts + 0 * x.sum()
    values, atom = acts.abs().topk(width, dim=1)
    empty = values == 0
    atoms = W_dec[atom] * (~empty).unsqueeze(2).to(x.dtype)  # (n, width, n_features)
    gram = atoms @ atoms.transpose(1, 2) + torch.diag_embed(empty.to(x.dtype))
    products = (atoms @ x.unsqueeze(2)).squeeze(2)
    solved: Any = torch.linalg.solve(gram, products)
    return torch.zeros_like(acts).scatter(1, atom, solved)
