"""Import, shuffle and encode of a store against what bounds them, and the peak memory of each.

    python -m benchmarks.jobs --json                      # 0.4 GB
    python -m benchmarks.jobs --size paper --json         # 4 GB, 768 features, 4096 atoms
    python -m benchmarks.jobs --size tiny --only import,shuffle

Import is that of a float16 .npy file, as `dbksvd import` does it: rows checked, checksums taken, read back and
compared, everything forced to the disk. Its bound is a plain copy of the same file (`shutil.copyfile`), which
does none of that; the copy forced to the disk stands beside it. Shuffle has the same bound. Encode has the same
encode from memory as its bound; see jobs_encode.py. Every job has a process of its own, so that its peak memory
is its own; there it alternates with the copy, one right after the other, and the best of each counts. (What came
before matters as much as the work itself: a virtual machine that hands free memory back to its host needs up to
three times as long for a copy into memory that has to be fetched again. The jobs let go of what they wrote, so
the copy after a long job may meet such memory: a ratio means little when its `copy_seconds` is out of line.)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.peak import peak_of_this_process

# rows, features, repeats; the figures that are promised are those of "paper"
SIZES = {"tiny": (4_096, 64, 1), "small": (262_144, 768, 5), "paper": (2_621_440, 768, 5)}
JOBS = ("import", "shuffle", "encode")
# how fast the jobs must be, as a part of the speed of their bound
WANTED = {"import": 0.50, "shuffle": 0.25, "encode": 0.85}
WANTED_BYTES = 1 << 30


def write_npy(path: str, n_samples: int, n_features: int) -> int:
    """Write a float16 .npy file of made-up rows, block by block; its bytes."""
    shape = (n_samples, n_features)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
        block = np.random.default_rng(0).standard_normal((min(n_samples, 1 << 14), n_features), np.float32)
        block = block.astype(np.float16)
        for i, start in enumerate(range(0, n_samples, len(block))):
            file.write(np.roll(block, i, axis=1)[: n_samples - start].tobytes())
    return os.path.getsize(path)


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def copy(source: str, target: str) -> dict[str, float]:
    """Seconds of a plain copy of a file, and of the same forced to the disk."""
    plain = timed(lambda: shutil.copyfile(source, target))
    fd = os.open(target, os.O_RDONLY)
    forced = plain + timed(lambda: os.fsync(fd))
    os.close(fd)
    os.unlink(target)
    return {"copy_seconds": plain, "copy_fsync_seconds": forced}


def run_import(source: str, target: str) -> dict[str, Any]:
    """Import once; seconds of the library call."""
    from dbksvd_dask.jobs.import_ import import_activations

    result = import_activations(source, target)
    return {"seconds": result.seconds, "bytes": result.nbytes}


def run_shuffle(source: str, target: str) -> dict[str, Any]:
    """Shuffle once; seconds of the library call and the mixing figures."""
    from dbksvd_dask.jobs.shuffle import shuffle_activations

    result = shuffle_activations(source, target, seed=0)
    return {"seconds": result.seconds, "bytes": result.nbytes, "mixing": result.mixing_after}


def alternate(job: str, file: str, source: str, target: str, repeats: int) -> dict[str, Any]:
    """Run the copy of a file and a job in turn; the best of each, and the peak memory of the process."""
    run = {"import": run_import, "shuffle": run_shuffle}[job]
    found: list[dict[str, Any]] = []
    for _ in range(repeats):
        copied = copy(file, f"{target}.copy")
        found.append({**run(source, target), **copied})
        shutil.rmtree(target)
    best = {name: min(one[name] for one in found) for name in ("seconds", "copy_seconds", "copy_fsync_seconds")}
    return {**found[0], **best, "peak_memory_bytes": peak_of_this_process()}


def measure_copying_job(job: str, folder: str, n_samples: int, n_features: int, repeats: int) -> dict[str, Any]:
    """Time import or shuffle against the copy of a file of the same bytes."""
    file, store = os.path.join(folder, "rows.npy"), os.path.join(folder, "store.zarr")
    if not os.path.exists(file):
        write_npy(file, n_samples, n_features)
    if job == "shuffle" and not os.path.exists(store):
        run_import(file, store)
    source, target = (file if job == "import" else store), os.path.join(folder, "target")
    command = [sys.executable, "-m", "benchmarks.jobs", "--child", job, file, source, target, str(repeats)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "job": job,
        **found,
        "bytes_per_second": found["bytes"] / found["seconds"],
        "ratio": found["copy_seconds"] / found["seconds"],
        "ratio_fsync": found["copy_fsync_seconds"] / found["seconds"],
        "wanted_ratio": WANTED[job],
        "wanted_memory_bytes": WANTED_BYTES,
    }


def measure_encode_job(n_samples: int, n_features: int, repeats: int) -> dict[str, Any]:
    """Time encode against the encode from memory, and take its peak memory over the whole store alone."""
    atoms, k = (4096, 32) if n_features >= 768 else (128, 4)
    sizes = [f"--features={n_features}", f"--atoms={atoms}", f"--k={k}", "--json"]
    command = [sys.executable, "-m", "benchmarks.jobs_encode", *sizes]
    few = [f"--samples={min(n_samples, 131_072)}", f"--repeats={repeats}"]
    speed = json.loads(subprocess.run([*command, *few], check=True, capture_output=True, text=True).stdout)
    whole = [f"--samples={n_samples}", "--repeats=1", "--job-only"]
    memory = json.loads(subprocess.run([*command, *whole], check=True, capture_output=True, text=True).stdout)
    return {
        "job": "encode",
        "bytes": memory["store_bytes"],
        "seconds": memory["job_s"],
        "samples_per_second": speed["job_samples_per_s"],
        "ratio": speed["ratio"],
        "wanted_ratio": WANTED["encode"],
        "peak_memory_bytes": memory["peak_memory_bytes"],
        "wanted_memory_bytes": WANTED_BYTES,
    }


def measure(size: str, only: tuple[str, ...] = JOBS, folder: str | None = None) -> dict[str, Any]:
    """Measure the jobs at one size."""
    n_samples, n_features, repeats = SIZES[size]
    results = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for job in only:
            if job == "encode":
                results.append(measure_encode_job(n_samples, n_features, repeats))
            else:
                results.append(measure_copying_job(job, scratch, n_samples, n_features, repeats))
    return {"benchmark": "jobs", "size": size, "machine": common.machine(), "jobs": results}


def table(result: dict[str, Any]) -> str:
    """Lay the figures out for people."""
    header = ["job", "GB", "seconds", "GB/s", "of its bound", "wanted", "peak MB"]
    rows = [
        [
            job["job"],
            f"{job['bytes'] / 1e9:.2f}",
            f"{job['seconds']:.2f}",
            f"{job['bytes'] / job['seconds'] / 1e9:.2f}",
            f"{job['ratio']:.2f}",
            f"{job['wanted_ratio']:.2f}",
            f"{job['peak_memory_bytes'] / 1e6:.0f}",
        ]
        for job in result["jobs"]
    ]
    return common.markdown(header, rows)


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", default=",".join(JOBS), help="jobs to measure, separated by commas")
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    common.add_output(parser)
    args = parser.parse_args(arguments)
    if args.child:
        *paths, repeats = args.child
        print(json.dumps(alternate(*paths, int(repeats))))
        return
    only = tuple(args.only.split(","))
    if not set(only) <= set(JOBS):
        parser.error(f"--only {args.only}: known are {', '.join(JOBS)}")
    common.emit(measure(args.size, only, args.folder), args, table)


if __name__ == "__main__":
    main()
