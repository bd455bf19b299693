"""Memory of a fit and a whole encoding of stores larger than it, on threads.

    python -m benchmarks.outofcore --json

Makes a store of 1 GB and one of 4 GB (float16, 768 features) in a temporary folder, one after the other, fits a
few batches and encodes all of it, each in a process of its own, and deletes them. The peak is that of the whole
process tree: it must not depend on the size of the store.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import dask
import psutil

from benchmarks._stores import write_store
from benchmarks.peak import peak_of_this_process

LIMIT_BYTES = 1_500_000_000
MOST_GROWTH = 1.10


def work(store: str, folder: str, params: dict[str, Any], threads: int) -> dict[str, Any]:
    """Fit some batches and encode everything, in this process."""
    from dbksvd_dask import DBKSVD, events
    from dbksvd_dask.jobs.encode import encode_store

    planned: list[int] = []

    def note(event: Any) -> None:
        if isinstance(event, events.FitStarted):
            planned.append(event.planned_bytes)

    with dask.config.set(scheduler="threads", num_workers=threads):
        began = time.perf_counter()
        run, codes = os.path.join(folder, "run"), os.path.join(folder, "codes.zarr")
        model = DBKSVD(**params, checkpoint=run, callbacks=[note]).fit(store)
        fitted, fit_peak = time.perf_counter(), peak_of_this_process()
        result = encode_store(store, run, codes)
        ended = time.perf_counter()
    return {
        "samples": result.n_samples,
        "fit_seconds": fitted - began,
        "encode_seconds": ended - fitted,
        "fit_peak_bytes": fit_peak,
        "planned_bytes": planned[0],
        "own_peak_bytes": peak_of_this_process(),
        "relative_error": float(model.history_["relative_error"][-1]),
    }


class TreeWatch(threading.Thread):
    """Looks at the memory of a process and all its children, fifty times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak, self.processes, self._root = 0, 0, psutil.Process(pid)

    def run(self) -> None:
        """Look until the process has ended."""
        while self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
            total, count = 0, 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    total, count = total + process.memory_info().rss, count + 1
            except psutil.NoSuchProcess:
                pass
            self.peak, self.processes = max(self.peak, total), max(self.processes, count)
            time.sleep(0.02)


def measure(gigabytes: float, args: argparse.Namespace) -> dict[str, Any]:
    """Make a store of that size, work on it in a process of its own, and delete it."""
    n_samples = int(gigabytes * 1e9) // (2 * args.features)
    with tempfile.TemporaryDirectory(prefix="dbksvd-outofcore-", dir=args.folder) as folder:
        store = os.path.join(folder, "store.zarr")
        nbytes = write_store(store, n_samples, args.features, "float16", args.chunk_rows)
        params = {"n_atoms": args.atoms, "k": args.k, "batch_size": args.batch_size, "n_iter": args.batches}
        params["warm_up"] = False  # the peak is that of whole batches
        command = [sys.executable, "-m", "benchmarks.outofcore", "--work", store, folder, json.dumps(params)]
        process = subprocess.Popen([*command, "--threads", str(args.threads)], stdout=subprocess.PIPE, text=True)
        watch = TreeWatch(process.pid)
        watch.start()
        out, _ = process.communicate()
        watch.join()
        if process.returncode:
            raise SystemExit(f"the work on {gigabytes} GB failed")
    found = json.loads(out)
    peak = max(watch.peak, found["own_peak_bytes"])
    return {"store_bytes": nbytes, "peak_bytes": peak, "processes": watch.processes, **found}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both sizes."""
    small, large = measure(args.small, args), measure(args.large, args)
    growth = large["peak_bytes"] / small["peak_bytes"]
    return {
        "setting": {k: v for k, v in vars(args).items() if k not in ("json", "work", "folder")},
        "small": small,
        "large": large,
        "growth": growth,
        "within_limit": large["peak_bytes"] < LIMIT_BYTES,
        "does_not_grow": growth < MOST_GROWTH,
    }


def table(result: dict[str, Any]) -> str:
    """The comparison as text."""
    lines = []
    for name in ("small", "large"):
        r = result[name]
        peak, fit, planned = (r[f"{what}_bytes"] / 1e6 for what in ("peak", "fit_peak", "planned"))
        lines.append(
            f"{r['store_bytes'] / 1e9:5.2f} GB, {r['samples']} samples: peak {peak:.0f} MB (fit {fit:.0f}, "
            f"planned {planned:.0f}), fit {r['fit_seconds']:.1f} s, encode {r['encode_seconds']:.1f} s"
        )
    lines.append(f"growth {result['growth']:.3f}, below 1.5 GB: {result['within_limit']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the measurement, or the work that is measured; print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=float, default=1.0, help="gigabytes of the small store")
    parser.add_argument("--large", type=float, default=4.0, help="gigabytes of the large store")
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--atoms", type=int, default=2048)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--chunk-rows", type=int, default=16384, help="rows of a chunk of the store")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default=None, help="where to make the stores")
    parser.add_argument("--work", nargs=3, metavar=("STORE", "FOLDER", "PARAMS"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.work:
        store, folder, params = args.work
        result = work(store, folder, json.loads(params), args.threads)
        print(json.dumps(result))
        return result
    result = compare(args)
    print(json.dumps(result, indent=1) if args.json else table(result))
    return result


if __name__ == "__main__":
    main()
