"""A store far larger than the memory, from raw files to a report: times, memory and bytes against the plans.

    python -m benchmarks.at_size --gigabytes 40 --folder /scratch --out at_size.json

Writes .npy files of ordered made-up rows (float16), links them, shuffles them, deletes the files, fits some
batches, encodes everything in parts and writes a report, each by the command that a user types, in a process of
its own that says what it took. `--copies 2` gives every file two names, for a disk that cannot hold files, scratch
and result: the store has the stated size, the files take half of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._stores import made_up_rows
from benchmarks.peak import peak_of_this_process

LEAST_FREE = 8_000_000_000
POOL_ROWS = 1 << 17


def write_files(folder: Path, gigabytes: float, args: argparse.Namespace) -> None:
    """Write files of rows that come in a strong order, out of a pool of different ones."""
    folder.mkdir()
    row_bytes = 2 * args.features
    rows = int(gigabytes * 1e9) // row_bytes // args.files
    pool = made_up_rows(min(POOL_ROWS, rows), args.features, seed=0).astype(np.float16)
    pool = pool[np.argsort(pool[:, 0], kind="stable")]
    distinct = args.files // args.copies
    for i in range(distinct):
        path = folder / f"acts_{i:03d}.npy"
        out = np.lib.format.open_memmap(path, "w+", np.float16, (rows, args.features))
        step = 1 << 14
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[start:stop] = pool[(np.arange(start, stop) * len(pool) // rows + 7 * i) % len(pool)]
        out.flush()
        del out
        require_room(folder)
        for copy in range(1, args.copies):
            os.link(path, folder / f"acts_{copy * distinct + i:03d}.npy")


def require_room(folder: Path) -> int:
    """Stop when the disk is nearly full; return the free bytes."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free; stopped, so that others can work")
    return free


def counters() -> dict[str, int]:
    """Bytes that this process has read and written, by calls and from the disk."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {name: int(value) for name, value in pairs}
    return {
        "read": found["rchar"],
        "written": found["wchar"],
        "disk_read": found["read_bytes"],
        "disk_written": found["write_bytes"],
    }


def step_in_this_process(command: list[str], out: str) -> None:
    """Run one command and say what it took."""
    from dbksvd_dask.cli import main as dbksvd

    began = time.perf_counter()
    code: Any = 0
    try:
        dbksvd([*command, "--json"])
    except SystemExit as stop:
        code = stop.code
    took = {"code": code or 0, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time()}
    Path(out).write_text(json.dumps({**took, "peak_bytes": peak_of_this_process(), **counters()}))


def run(command: list[str], folder: Path) -> tuple[dict[str, Any], Any]:
    """Run a command in a process of its own; return what it took and what it printed."""
    took, least = folder / "took.json", shutil.disk_usage(folder).free
    with open(folder / "printed", "w+") as printed:
        own = [sys.executable, "-m", "benchmarks.at_size", "--step", str(took), *command]
        process = subprocess.Popen(own, stdout=printed)
        while process.poll() is None:
            time.sleep(0.2)
            free = shutil.disk_usage(folder).free
            least = min(least, free)
            if free < LEAST_FREE:
                process.terminate()
                process.wait()
                raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free; stopped, so that others can work")
        printed.seek(0)
        text = printed.read()
    found = json.loads(took.read_text())
    if found["code"]:
        raise SystemExit(f"dbksvd {' '.join(command)} failed: {text}")
    return {**found, "least_free_bytes": least}, json.loads(text)


def measure(name: str, command: list[str], folder: Path, results: dict[str, Any], plan: bool = True) -> None:
    """Take the plan of a command, run it, and add both to the results."""
    planned = run([*command, "--plan"], folder)[1] if plan else {}
    took, printed = run(command, folder)
    kept = ("memory_bytes", "read_bytes", "written_bytes", "estimated_seconds", "scratch_bytes", "peak_bytes")
    results["steps"][name] = {
        "command": " ".join(["dbksvd", *command]),
        "planned": {key: planned[key] for key in kept if key in planned},
        "took": took,
        "printed": {key: value for key, value in printed.items() if isinstance(value, int | float | str)},
    }
    line = (
        f"{name}: {took['seconds']:.0f} s, {took['cpu_seconds']:.0f} CPU s, peak {took['peak_bytes'] / 1e6:.0f} MB"
    )
    print(f"{line}, read {took['read'] / 1e9:.1f} GB, wrote {took['written'] / 1e9:.1f} GB", flush=True)
    if results["out"]:
        Path(results["out"]).write_text(json.dumps(results, indent=1))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all steps, remove what they made, and return what they took."""
    folder = Path(args.folder, "dbksvd-at-size")
    folder.mkdir(parents=True)
    setting = {k: v for k, v in vars(args).items() if k not in ("json", "folder", "out")}
    results: dict[str, Any] = {"setting": setting, "steps": {}, "out": args.out}
    try:
        _steps(folder, args, results)
    finally:
        shutil.rmtree(folder)
    return results


def _steps(folder: Path, args: argparse.Namespace, results: dict[str, Any]) -> None:
    files, linked, store = folder / "files", folder / "linked.zarr", folder / "store.zarr"
    began = time.perf_counter()
    write_files(files, args.gigabytes, args)
    results["files_seconds"] = time.perf_counter() - began
    measure("import --link", ["import", f"{files}/*.npy", str(linked), "--link"], folder, results)
    measure("shuffle", ["shuffle", str(linked), str(store), "--seed", "0"], folder, results)
    shutil.rmtree(files)
    shutil.rmtree(linked)
    fit = ["--batch-size", str(args.batch_size), "--n-iter", str(args.batches)]
    large = ["fit", str(store), str(folder / "large"), "--n-atoms", str(args.atoms), "--k", str(args.k), *fit]
    measure("fit", large, folder, results)
    small = ["fit", str(store), str(folder / "small"), "--n-atoms", str(args.encode_atoms)]
    measure("fit of the dictionary to encode with", [*small, "--k", str(args.encode_k), *fit], folder, results)
    codes = str(folder / "codes.zarr")
    encode = ["encode", str(store), str(folder / "small"), codes]
    for part in range(1, args.parts + 1):
        name = f"encode --part {part}/{args.parts}"
        measure(name, [*encode, "--part", f"{part}/{args.parts}"], folder, results)
    measure("encode --finish", [*encode, "--finish"], folder, results, plan=False)
    page = str(folder / "page.html")
    report = ["report", str(folder / "small"), "--codes", codes, "--out", page]
    measure("report", report, folder, results, plan=False)
    results["codes_files"] = sum(len(names) for _, _, names in os.walk(codes))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the measurement, or one step of it; print the result."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["--step"]:
        step_in_this_process(given[2:], given[1])
        return {}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=40.0)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--copies", type=int, default=1, help="names of each file")
    parser.add_argument("--atoms", type=int, default=2048)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--encode-atoms", type=int, default=512)
    parser.add_argument("--encode-k", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--folder", default=".", help="where to make everything")
    parser.add_argument("--out", default=None, help="file for the results so far")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(given)
    result = compare(args)
    if args.json:
        print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
