"""Small stores and dictionaries for the tests of jobs and commands, and how to compare what jobs wrote."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from dbksvd_dask.store.activations import create_activations
from dbksvd_dask.store.dictionary import Dictionary, save_dictionary

ROOT = Path(__file__).resolve().parents[1]

# Seconds after which a test that waits gives up: a net under what hangs, never a verdict on what is slow.
PATIENCE = 900


def made_up(n_samples, n_features, seed=0):
    """Sparse sums of 40 directions, a little noise, some zero rows: float32 (n_samples, n_features)."""
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((40, n_features))
    weights = rng.standard_normal((n_samples, 40)) * (rng.random((n_samples, 40)) < 0.08)
    rows = weights @ directions + 0.05 * rng.standard_normal((n_samples, n_features)) + 0.3
    rows[:: max(n_samples // 3, 1)] = 0
    return rows.astype(np.float32)


def write_store(path, rows, chunk_rows, dtype=None):
    """Write an activation store; the rows as given."""
    stored = rows if dtype is None else rows.astype(dtype)
    writer = create_activations(path, *stored.shape, stored.dtype, chunk_rows=chunk_rows)
    for i, a in enumerate(range(0, len(stored), chunk_rows)):
        writer.write_chunk(i, stored[a : a + chunk_rows])
    writer.finish()
    return str(path)


def write_dictionary(path, n_atoms=32, n_features=16, k=3, seed=1, **params):
    """Save a random dictionary with a mean."""
    rng = np.random.default_rng(seed)
    atoms = rng.standard_normal((n_atoms, n_features)).astype(np.float32)
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    mean = np.full(n_features, 0.3)
    return save_dictionary(path, Dictionary(atoms, mean, {"n_atoms": n_atoms, "k": k, **params}))


def tree(path):
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(Path(path).rglob("*")) if p.is_file()}


def python(code, *args, **kwargs):
    """Start a Python process that sees this project."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def command(*args):
    """Run `dbksvd` in this process: exit code, standard output, standard error."""
    from dbksvd_dask.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, out.getvalue(), err.getvalue()
