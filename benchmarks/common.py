"""What the benchmarks share: clocks, the machine in words, rows to work on, one score for all dictionaries."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import dask
import numpy as np

from benchmarks._stores import made_up_rows
from dbksvd_dask.evaluate.metrics import variance_explained
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import encode_rows, gram_for, residual
from dbksvd_dask.kernels.moments import moments
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store.activations import open_rows

# One thread for everything that looks at these: CPU seconds of different libraries can then be compared.
ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
}

# The settings behind the tables of the documentation, wherever those of a fit are not stated: the defaults have
# moved since (first atoms from samples, rounds and Lanczos steps by rule).
DOCUMENTED: dict[str, Any] = {"init": "uniform", "n_rounds": 8, "lanczos_steps": 2}


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads, and the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass
class Stopwatch:
    """Wall-clock and CPU seconds of the stretches between `start` and `stop`."""

    wall: float = 0.0
    cpu: float = 0.0
    _began: tuple[float, float] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Let the clock run."""
        self._began = (time.perf_counter(), cpu_seconds())

    def stop(self) -> None:
        """Add the stretch since `start`."""
        if self._began is not None:
            self.wall += time.perf_counter() - self._began[0]
            self.cpu += cpu_seconds() - self._began[1]
            self._began = None


def best_of(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Alternate the runs and keep the least seconds of each, so that a busy machine disturbs all alike.

    Returns
    -------
    dict of name to ``{"wall_s": ..., "cpu_s": ...}``
    """
    best = {name: {"wall_s": np.inf, "cpu_s": np.inf} for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            clock = Stopwatch()
            clock.start()
            run()
            clock.stop()
            best[name] = {
                "wall_s": min(best[name]["wall_s"], clock.wall),
                "cpu_s": min(best[name]["cpu_s"], clock.cpu),
            }
    return best


def gemm_speed(n: int = 1024) -> float:
    """Billions of floating-point operations per CPU second of a bare product: how fast this core is just now."""
    A = np.ones((n, n), np.float32)
    with single_blas_thread():
        A @ A
        seconds = best_of({"gemm": lambda: A @ A}, 3)["gemm"]["cpu_s"]
    return 2 * n**3 / seconds / 1e9


def machine() -> dict[str, Any]:
    """The machine and the libraries, for the head of a result."""
    names = ("numpy", "numba", "dask", "scikit-learn", "torch", "spams-bin", "dictlearn", "ksvd", "sae-lens")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: version for name in names if (version := installed(name)) is not None},
    }


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


@dataclass(frozen=True)
class Problem:
    """What every peer gets: the same centred rows, the same size of dictionary.

    Attributes
    ----------
    train : float32 ndarray of shape (n_train, n_features), shuffled, mean taken off
    test : float32 ndarray of shape (n_test, n_features), less the mean of `train`
    """

    train: np.ndarray
    test: np.ndarray
    n_atoms: int
    k: int
    seed: int = 0


def make_problem(
    data: str | None, n_train: int, n_test: int, n_atoms: int, k: int, seed: int = 0, n_features: int = 32
) -> Problem:
    """Rows for training from the start of a store and for testing from its end; made-up rows without a store."""
    if data is None:
        rows = made_up_rows(n_train + n_test, n_features, seed, n_true=2 * n_features, active=k)
        train, test = rows[:n_train], rows[n_train:]
    else:
        train, test = _read(data, n_train, n_test)
    train = train[np.random.default_rng(seed).permutation(len(train))].astype(np.float32)
    mean = train.mean(axis=0, dtype=np.float64).astype(np.float32)
    train -= mean
    return Problem(train, test.astype(np.float32) - mean, n_atoms, k, seed)


def _read(data: str, n_train: int, n_test: int) -> tuple[np.ndarray, np.ndarray]:
    store = open_rows(data)
    total = store.shape[0]
    if n_train + n_test > total:
        raise SystemExit(f"{data} has {total} rows; {n_train} to train on and {n_test} to test on do not fit")
    return np.asarray(store.read(0, n_train)), np.asarray(store.read(total - n_test, total))


def unit_atoms(D: np.ndarray) -> np.ndarray:
    """Rows of unit norm as float32; a zero row stays zero."""
    norms = np.linalg.norm(D, axis=1, keepdims=True)
    return np.ascontiguousarray(D / np.where(norms > 0, norms, 1), dtype=np.float32)


def explained(Y: np.ndarray, D: np.ndarray, k: int, encoder: str = "mp", refit: bool = False) -> float:
    """Variance explained of rows by a dictionary with one of our encoders."""
    atoms = unit_atoms(D)
    with single_blas_thread():
        spec = EncodeSpec(k, encoder, refit=refit)
        atom, coefficient = encode_rows(Y, atoms, gram_for(atoms, spec), spec)
        return variance_explained(moments(Y, residual(Y, atom, coefficient, atoms))).value


def score(problem: Problem, D: np.ndarray) -> dict[str, float]:
    """Held-out variance explained by one and the same pursuit for all, and by one and the same OMP."""
    return {f"ve_{e}": explained(problem.test, D, problem.k, e) for e in ("mp", "omp")}


def fill_in(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Give options that were left out the values of a size."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark has."""
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--out", help="write the JSON to this file too")


def emit(result: dict[str, Any], args: argparse.Namespace, table: Callable[[dict[str, Any]], str]) -> None:
    """Print a result as JSON or as text, and keep it in a file if asked."""
    if args.out:
        write(result, args.out)
    print(json.dumps(result, indent=1, default=float) if args.json else table(result))


def add_row_output(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmarks that take long and give one row after the other."""
    parser.add_argument("--threads", type=int, help="of Dask; one per core when not given")
    parser.add_argument("--json", type=Path, help="append each row to this file as it comes")


def emit_rows(
    rows: Iterable[dict[str, Any]], args: argparse.Namespace, table: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Print rows as they come, keep them in a file if asked, and print the table at the end."""
    seen = []
    with dask.config.set(scheduler="threads", **({"num_workers": args.threads} if args.threads else {})):
        for row in rows:
            seen.append(row)
            line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
            print(line, file=sys.stderr, flush=True)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(line + "\n")
    print(table(seen))


def write(result: dict[str, Any], path: str) -> None:
    """Write a result as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1, default=float) + "\n")


def markdown(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; floats as they are given."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
