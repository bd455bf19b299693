"""New atoms of a growing dictionary, drawn from the residuals of a batch.

A new atom is the residual of a sample, drawn with probability proportional to its squared norm. Sample i gets the
key ``log(u_i) / |r_i|^2`` with u_i uniform; taking the largest keys is an exact draw without replacement. Each
chunk sends only its own largest keys, and the result depends on the seed, the iteration and the chunk size, not on
where or in which order the chunks ran.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import dask
import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.gpu import device
from dbksvd_dask.graph import load
from dbksvd_dask.graph.backend import functions
from dbksvd_dask.graph.encode import EncodePlan
from dbksvd_dask.graph.load import prepare
from dbksvd_dask.graph.sources import Source
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.kernels.dead_atoms import Candidates
from dbksvd_dask.kernels.moments import row_norms
from dbksvd_dask.kernels.scale import rows_near_one
from dbksvd_dask.plan import seeds, units


class Draw(NamedTuple):
    """The number of residuals to draw, and the path of the random numbers."""

    n_new: int
    seed: int
    iteration: int


def race_keys(norms: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Return the keys of a draw proportional to squared norms; minus infinity for a residual of zero.

    Parameters
    ----------
    norms : (n,) float64;  uniform : (n,) float64 from [0, 1)
    """
    with np.errstate(divide="ignore"):
        keys: np.ndarray = np.log1p(-uniform) / np.square(norms)
    return np.where(norms > 0, keys, -np.inf)


def draw_residuals(
    rows: Any, D: np.ndarray, gram: np.ndarray | None, how: EncodePlan, draw: Draw, c: int
) -> Candidates:
    """Return the largest keys of one chunk and their residuals, at most n_new, largest first."""
    compute, raw = functions(how.place), rows.load()
    with device.turn(how.place.pursuit):
        Y = prepare(raw, rows.where, how.mean, how.dtype, how.place)
        R = compute.residual(Y, *compute.encode_rows(Y, D, gram, how.spec, how.weights), D)
    uniform: Any = seeds.generator(draw.seed, seeds.GROWTH, draw.iteration, c).random(R.shape[0])
    keys = race_keys(row_norms(R), uniform)
    best = np.argsort(-keys, kind="stable")[: draw.n_new]
    best = best[np.isfinite(keys[best])]
    return Candidates(keys[best], R[best])


def _merge(parts: list[Candidates], n_new: int) -> np.ndarray:
    """Return the residuals with the largest keys of all chunks: (at most n_new, d)."""
    keys = np.concatenate([part.score for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    return rows[np.argsort(-keys, kind="stable")[:n_new]]


def build_draw(source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, size: int, draw: Draw) -> Delayed:
    """Build the graph that encodes rows and draws residuals: (at most n_new, n_features)."""
    names = Tasks(draw.iteration)
    dictionary, gram = load.dictionary_and_gram(names, D, how)
    light = how.in_tasks()
    parts = [
        names.call(draw_residuals, "grow", (c,), source.take(rows[a:b]), dictionary, gram, light, draw, c)
        for c, (a, b) in enumerate(units.split_rows(rows.size, size))
    ]
    return names.finish(names.call(_merge, "grown", (), parts, draw.n_new))


def grow(source: Source, rows: np.ndarray, D: np.ndarray, how: EncodePlan, size: int, draw: Draw) -> np.ndarray:
    """Return a dictionary with n_new more atoms: (n_atoms + n_new, n_features).

    If there are fewer residuals than new atoms, the others are random directions.
    """
    (residuals,) = dask.compute(build_draw(source, rows, D, how, size, draw))
    residuals = rows_near_one(residuals)
    norms = np.linalg.norm(residuals.astype(np.float64), axis=1, keepdims=True)
    atoms = (residuals / norms).astype(D.dtype)
    missing = draw.n_new - atoms.shape[0]
    if missing:
        fresh = seeds.random_atoms(missing, D.shape[1], D.dtype, draw.seed, draw.iteration, D.shape[0])
        atoms = np.concatenate([atoms, fresh])
    return np.concatenate([D, atoms])
