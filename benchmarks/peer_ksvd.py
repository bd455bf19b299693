"""K-SVD itself: the `ksvd` package, and the classic form with a full SVD per atom.

Both touch every row once per atom or hold codes as dense arrays; on more rows than fit the time they are run on
fewer, and the seconds of one iteration are extrapolated in proportion to the rows. Those are marked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common import Problem, Stopwatch
from benchmarks.peer_base import Recorder, data_atoms
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix, residual
from dbksvd_dask.plan.encoder import EncodeSpec


def update_atom(D: np.ndarray, j: int, R: np.ndarray, atom: np.ndarray, coefficient: np.ndarray) -> None:
    """Classic update of atom j in place: leading singular vectors of its residual by a full SVD."""
    rows, slots = np.nonzero(atom == j)
    if rows.size == 0:
        return
    E = R[rows] + coefficient[rows, slots][:, None] * D[j]
    U, s, Vt = np.linalg.svd(E, full_matrices=False)
    flip = 1.0 if Vt[0] @ D[j] >= 0 else -1.0
    D[j] = flip * Vt[0]
    coefficient[rows, slots] = flip * s[0] * U[:, 0]
    R[rows] = E - coefficient[rows, slots][:, None] * D[j]


def classic(recorder: Recorder) -> None:
    """Classic K-SVD on all training rows: our OMP, then a full SVD per atom, one after the other."""
    problem = recorder.problem
    D, Y, iteration = data_atoms(problem), problem.train, 0
    with single_blas_thread():
        while True:
            atom, coefficient = encode_rows(Y, D, gram_matrix(D), EncodeSpec(problem.k, "omp"))
            R = residual(Y, atom, coefficient, D)
            for j in range(problem.n_atoms):
                update_atom(D, j, R, atom, coefficient)
            iteration += 1
            recorder.show(lambda: D, iteration * len(Y))


def ksvd_package(recorder: Recorder) -> None:
    """ApproximateKSVD of the `ksvd` package, one iteration at a time by a warm start of its own steps."""
    from ksvd import ApproximateKSVD

    problem = recorder.problem
    model = ApproximateKSVD(problem.n_atoms, transform_n_nonzero_coefs=problem.k)
    D, iteration = data_atoms(problem).astype(np.float64), 0
    X = problem.train.astype(np.float64)
    while True:
        codes = model._transform(D, X)
        D, _ = model._update_dict(X, D, codes)
        iteration += 1
        recorder.show(lambda: D, iteration * len(X))  # noqa: B023  (called at once)


def classic_iteration(problem: Problem, n_atoms_timed: int = 64) -> dict[str, Any]:
    """CPU seconds of one classic iteration: OMP in full, SVDs of some atoms times the number of atoms."""
    D, clock, svds = data_atoms(problem), Stopwatch(), Stopwatch()
    with single_blas_thread():
        clock.start()
        atom, coefficient = encode_rows(problem.train, D, gram_matrix(D), EncodeSpec(problem.k, "omp"))
        R = residual(problem.train, atom, coefficient, D)
        clock.stop()
        timed = min(n_atoms_timed, problem.n_atoms)
        svds.start()
        for j in range(timed):
            update_atom(D, j, R, atom, coefficient)
        svds.stop()
    return {
        "rows": len(problem.train),
        "cpu_s": clock.cpu + svds.cpu * problem.n_atoms / timed,
        "encode_cpu_s": clock.cpu,
        "extrapolated": f"SVDs of {timed} of {problem.n_atoms} atoms",
    }


def package_iteration(problem: Problem, n_rows: int = 512) -> dict[str, Any]:
    """CPU seconds of one iteration of the `ksvd` package on a few rows, in proportion to all of them."""
    from ksvd import ApproximateKSVD

    model = ApproximateKSVD(problem.n_atoms, transform_n_nonzero_coefs=problem.k)
    X = problem.train[:n_rows].astype(np.float64)
    D, clock = data_atoms(problem).astype(np.float64), Stopwatch()
    clock.start()
    codes = model._transform(D, X)
    model._update_dict(X, D, codes)
    clock.stop()
    return {
        "rows": len(problem.train),
        "cpu_s": clock.cpu * len(problem.train) / len(X),
        "extrapolated": f"{len(X)} of {len(problem.train)} rows",
    }
