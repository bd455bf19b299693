"""Encode throughput: samples per CPU second of our encoders and of every peer, on the same rows with one thread.

    pip install -e '.[bench]'
    OMP_NUM_THREADS=1 python -m benchmarks.encoders --size small --data wordnet_tokens_l4.zarr --json

Encoders that work on the gram of the dictionary compute it inside the clock, as SPAMS and dictlearn do on every
call; only scikit-learn is given it, because it is timed on few rows, of which the gram would be an unfair share.
`of_gemm` is the speed as a fraction of the bare product ``Y D^T``; "gram given" is what a chunk costs inside a fit
or an encode job. All variants alternate, the best of each counts. With `--data` the rows of the 384-dimensional
problem are those of the store; the others are made up.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import (
    ONE_THREAD,
    Problem,
    add_output,
    best_of,
    emit,
    installed,
    machine,
    make_problem,
    markdown,
)
from benchmarks.peer_base import data_atoms
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import encode_rows, gram_for
from dbksvd_dask.plan.encoder import EncodeSpec

# size: list of (features, atoms, k, rows), and repeats
SIZES: dict[str, tuple[list[tuple[int, int, int, int]], int]] = {
    "tiny": ([(24, 64, 4, 128)], 1),
    "small": ([(384, 2048, 16, 8192)], 2),
    "paper": ([(384, 4096, 32, 4096), (2304, 4096, 20, 4096)], 2),
}
# Rows for those that are so slow that all rows would take minutes.
FEW_ROWS = {"scikit-learn OMP": 128, "SAELens MP": 512}


@dataclass(frozen=True)
class Contender:
    """One encoder: a function of rows, and the distribution it needs."""

    encode: Callable[[np.ndarray], Any]
    needs: str | None = None


def ours(problem: Problem, D: np.ndarray) -> dict[str, Contender]:
    """Our encoders: `encode_rows` in one thread, as a Dask task calls it."""

    def encoder(spec: EncodeSpec, gram_given: bool = False) -> Contender:
        given = gram_for(D, spec) if gram_given else None
        return Contender(lambda Y: encode_rows(Y, D, given if gram_given else gram_for(D, spec), spec))

    return {
        "MP": encoder(EncodeSpec(problem.k)),
        "MP, gram given": encoder(EncodeSpec(problem.k), gram_given=True),
        "MP + refit": encoder(EncodeSpec(problem.k, refit=True)),
        "OMP": encoder(EncodeSpec(problem.k, "omp")),
        "OMP, gram given": encoder(EncodeSpec(problem.k, "omp"), gram_given=True),
    }


def sklearn_omp(problem: Problem, D: np.ndarray) -> Contender:
    """`sparse_encode` by OMP, gram given."""
    from sklearn.decomposition import sparse_encode

    gram = D @ D.T
    return Contender(
        lambda Y: sparse_encode(
            Y, D, gram=gram, algorithm="omp", n_nonzero_coefs=problem.k, n_jobs=1, check_input=False
        )
    )


def spams_omp(problem: Problem, D: np.ndarray) -> Contender:
    """SPAMS' OMP; without ``eps=0.0`` its float32 form reads memory that was never set, and may return zeros."""

    def encode(Y: np.ndarray) -> Any:
        import spams

        return spams.omp(np.asfortranarray(Y.T), atoms, L=problem.k, eps=0.0, numThreads=1)

    atoms = np.asfortranarray(D.T)
    return Contender(encode, "spams-bin")


def dictlearn_omp(problem: Problem, D: np.ndarray) -> Contender:
    """Batch OMP of dictlearn, float64 as it asks for."""
    atoms = D.astype(np.float64)

    def encode(Y: np.ndarray) -> Any:
        from dictlearn import sparse_encode

        return sparse_encode(Y.astype(np.float64), atoms, algorithm="omp", n_nonzero_coefs=problem.k)

    return Contender(encode, "dictlearn")


def saelens_mp(problem: Problem, D: np.ndarray) -> Contender:
    """Matching pursuit of SAELens in torch, k steps."""
    made: list[Any] = []

    def encode(Y: np.ndarray) -> Any:
        import torch

        if not made:
            made.append(_saelens_model(D, problem.k))
        with torch.no_grad():
            return made[0].encode(torch.from_numpy(Y))

    return Contender(encode, "sae-lens")


def _saelens_model(D: np.ndarray, k: int) -> Any:
    import torch
    from sae_lens.saes.matching_pursuit_sae import MatchingPursuitSAE, MatchingPursuitSAEConfig

    torch.set_num_threads(1)
    config = MatchingPursuitSAEConfig(
        d_in=D.shape[1],
        d_sae=D.shape[0],
        device="cpu",
        dtype="float32",
        residual_threshold=0.0,
        max_iterations=k,
        stop_on_duplicate_support=False,
        apply_b_dec_to_input=False,
    )
    sae = MatchingPursuitSAE(config)
    sae.W_dec.data = torch.from_numpy(D.copy())
    return sae


PEERS: dict[str, Callable[[Problem, np.ndarray], Contender]] = {
    "SPAMS OMP": spams_omp,
    "dictlearn OMP": dictlearn_omp,
    "SAELens MP": saelens_mp,
    "scikit-learn OMP": sklearn_omp,
}


def measure(
    problem: Problem, repeats: int, peers: Sequence[str] = tuple(PEERS), gram_inside: bool = True
) -> dict[str, Any]:
    """Time encoders on the rows of `problem.test`, with training rows as atoms.

    Parameters
    ----------
    peers : which of `PEERS`
    gram_inside : time our encoders with the gram inside the clock too; they are then what factors refer to
    """
    D, rows = data_atoms(problem), problem.test
    own = {name: c for name, c in ours(problem, D).items() if gram_inside or name.endswith("gram given")}
    contenders = {"bare product": Contender(lambda Y: np.dot(Y, D.T))} | own
    contenders |= {name: PEERS[name](problem, D) for name in peers}
    missing = {name: c.needs for name, c in contenders.items() if c.needs and installed(c.needs) is None}
    contenders = {name: c for name, c in contenders.items() if name not in missing}
    parts = {name: rows[: FEW_ROWS.get(name, len(rows))] for name in contenders}
    with single_blas_thread():
        for name, contender in contenders.items():
            contender.encode(parts[name][:64])  # imports and compiles
        runs = {name: partial(contender.encode, parts[name]) for name, contender in contenders.items()}
        seconds = best_of(runs, repeats)
    speed = {name: len(parts[name]) / seconds[name]["cpu_s"] for name in contenders}
    suffix = "" if gram_inside else ", gram given"
    encoders = [
        {"name": name, "rows": len(parts[name]), "samples_per_cpu_s": speed[name]}
        | {"of_gemm": speed[name] / speed["bare product"], "mp_factor": speed["MP" + suffix] / speed[name]}
        | {"omp_factor": speed["OMP" + suffix] / speed[name]}
        for name in contenders
    ]
    shape = {"features": D.shape[1], "atoms": D.shape[0], "k": problem.k, "rows": len(rows)}
    return shape | {"encoders": encoders, "not_installed": missing}


def table(result: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    lines = []
    for part in result["problems"]:
        lines.append(f"\nd={part['features']}, {part['atoms']} atoms, k={part['k']}\n")
        rows = [
            [
                e["name"],
                f"{e['samples_per_cpu_s']:,.0f}",
                f"{e['of_gemm']:.3f}",
                f"{e['mp_factor']:.2f}",
                f"{e['omp_factor']:.2f}",
                f"{e['rows']:,}",
            ]
            for e in part["encoders"]
        ]
        header = [
            "encoder",
            "samples per CPU s",
            "of the bare product",
            "our MP is faster by",
            "our OMP by",
            "rows",
        ]
        lines.append(markdown(header, rows))
        lines += [f"{name}: not run, {needs} is not installed" for name, needs in part["not_installed"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--data", help="store of 384-dimensional activations; made-up rows without it")
    add_output(parser)
    args = parser.parse_args(argv)
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    shapes, repeats = SIZES[args.size]
    problems = []
    for n_features, n_atoms, k, n_rows in shapes:
        data = args.data if n_features == 384 else None
        problem = make_problem(data, 2 * n_atoms, n_rows, n_atoms, k, n_features=n_features)
        problems.append(measure(problem, repeats))
    result = {"benchmark": "encoders", "size": args.size, "machine": machine(), "problems": problems}
    emit(result, args, table)
    return result


if __name__ == "__main__":
    main()
