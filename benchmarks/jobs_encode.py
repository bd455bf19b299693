"""The encode job against the same encode from memory and against the bare product, and its peak memory.

    python -m benchmarks.jobs_encode --json
    python -m benchmarks.jobs_encode --samples 65536 --features 2304 --k 20 --json    # of_product: 0.92 is wanted
    python -m benchmarks.jobs_encode --samples 2621440 --repeats 1 --job-only --json      # 4 GB: memory

"The same encode" is the call `encode(array, ...)` of the library: the rows lie in memory as float16, the codes
stay there, no metrics are taken. The job reads the rows from its store, encodes, measures the reconstruction,
gathers the statistics per atom and writes all of it. "The bare product" is ``Y D^T`` of the same rows in float32,
with every core; `of_product` and `memory_of_product` are the speeds of the job and of the encode from memory as a
part of its speed. Runs alternate and the best of each counts. `cpu_ratio` compares the processor time of job and
encode from memory: it says the same when the machine is busy with other things, but leaves out waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import dask
import numpy as np

from benchmarks._stores import write_store
from benchmarks.peak import peak_of_this_process
from dbksvd_dask import encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.plan.seeds import random_atoms
from dbksvd_dask.store.activations import open_rows


def measure_encode(
    folder: str,
    n_samples: int = 131_072,
    n_features: int = 768,
    n_atoms: int = 4096,
    k: int = 32,
    repeats: int = 3,
    job_only: bool = False,
) -> dict[str, Any]:
    """Time both encodes of one store; figures for one JSON line.

    Parameters
    ----------
    folder : where the stores are written
    job_only : leave out the encode from memory, whose rows and codes would count as peak memory
    """
    store, out = os.path.join(folder, "store.zarr"), os.path.join(folder, "codes.zarr")
    nbytes = write_store(store, n_samples, n_features)
    atoms = random_atoms(n_atoms, n_features, np.float32, 0)
    dictionary = Dictionary(atoms, None, {"n_atoms": n_atoms, "k": k})
    rows = None if job_only else open_rows(store).read(0, n_samples)
    encode(made_small(rows, n_features), atoms, k)  # compiled before the clock runs
    memory, job, product = [], [], []
    for _ in range(repeats):
        if rows is not None:
            product.append(product_seconds(rows, atoms))
            memory.append(timed(lambda: encode(rows, atoms, k)))
        shutil.rmtree(out, ignore_errors=True)
        job.append(timed(lambda: encode_store(store, dictionary, out)))
    (job_s, job_cpu), (memory_s, memory_cpu) = best(job), best(memory)
    result = {
        "samples": n_samples,
        "features": n_features,
        "atoms": n_atoms,
        "k": k,
        "store_bytes": nbytes,
        "threads": dask.system.CPU_COUNT,
        "job_s": job_s,
        "job_samples_per_s": n_samples / job_s,
        "peak_memory_bytes": peak_of_this_process(),
    }
    if memory:
        result |= {"memory_s": memory_s, "ratio": memory_s / job_s, "cpu_ratio": memory_cpu / job_cpu}
        result |= {"product_s": min(product), "of_product": min(product) / job_s}
        result |= {"memory_of_product": min(product) / memory_s}
    return result


def product_seconds(rows: np.ndarray, atoms: np.ndarray, part: int = 8192) -> float:
    """Seconds of the bare product of all rows, part by part into one buffer; conversions are not counted."""
    out, total = np.empty((min(part, len(rows)), len(atoms)), np.float32), 0.0
    for start in range(0, len(rows), part):
        Y = rows[start : start + part].astype(np.float32)
        began = time.perf_counter()
        np.dot(Y, atoms.T, out=out[: len(Y)])
        total += time.perf_counter() - began
    return total


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds and processor seconds of a call."""
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - cpu


def best(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """Least of each, over all runs."""
    return min((a for a, _ in runs), default=0.0), min((b for _, b in runs), default=0.0)


def made_small(rows: np.ndarray | None, n_features: int) -> np.ndarray:
    """A few rows to compile with."""
    return np.ones((512, n_features), np.float16) if rows is None else rows[:512]


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs_encode", description=__doc__)
    for name, value in (("samples", 131_072), ("features", 768), ("atoms", 4096), ("k", 32), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--job-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measure_encode(folder, o.samples, o.features, o.atoms, o.k, o.repeats, o.job_only)
    print(json.dumps(result) if o.json else "\n".join(f"{name:20} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
