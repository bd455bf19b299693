"""An object store that is far away: ranges in parts, codes in few objects, checkpoints in a bucket.

    python -m benchmarks.objects --delay 0.05 --megabytes-per-second 40

A server of moto in a process of its own, behind a proxy that holds every answer back by `--delay` seconds and lets
a connection deliver `--megabytes-per-second`. What is compared runs against the same server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np

from benchmarks._stores import made_up_rows, write_store
from benchmarks.delay_proxy import DelayProxy
from dbksvd_dask import Dictionary
from dbksvd_dask.jobs import encode
from dbksvd_dask.plan import units
from dbksvd_dask.store import paths, remote
from dbksvd_dask.store.activations import open_rows
from dbksvd_dask.store.runs import open_dictionary, write_checkpoint

SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""
BUCKET = "s3://bucket"


@contextmanager
def far_away(delay: float, bytes_per_second: float) -> Iterator[DelayProxy]:
    """Start a server and a proxy, and let fsspec speak to the proxy."""
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", SERVER], text=True, **quiet)  # type: ignore[call-overload]
    old = dict(fsspec.config.conf)
    try:
        port = next(int(line) for line in process.stdout if line.strip().isdecimal())
        with DelayProxy("127.0.0.1", port, delay, bytes_per_second) as proxy:
            url = f"http://127.0.0.1:{proxy.port}"
            fsspec.config.conf["s3"] = {"endpoint_url": url, "key": "k", "secret": "s"}
            fsspec.filesystem("s3").mkdir(BUCKET.removeprefix("s3://"))
            yield proxy
    finally:
        fsspec.config.conf.clear()
        fsspec.config.conf.update(old)
        process.kill()
        process.communicate()


def timed(run: Callable[[], Any], proxy: DelayProxy) -> dict[str, float]:
    """Return the seconds and requests of a run."""
    began, before = time.perf_counter(), proxy.requests
    run()
    return {"seconds": time.perf_counter() - began, "requests": proxy.requests - before}


def read_chunk(proxy: DelayProxy, args: argparse.Namespace) -> dict[str, Any]:
    """Read a chunk of 32 MiB as one range and in parts, the best of several."""
    store, width = f"{BUCKET}/store", 768
    rows = (args.chunk_mib << 20) // (2 * width)
    write_store(store, 2 * rows, width, "float16", rows)
    reader = open_rows(store)
    reader.read(0, 1)
    found: dict[str, Any] = {"opened": timed(lambda: open_rows(store), proxy)}
    for name, size in {"one range": 1 << 40, "in parts": remote.PART_BYTES}.items():
        with mock.patch.object(remote, "PART_BYTES", size):
            runs = [timed(lambda: reader.read(0, rows), proxy) for _ in range(args.repeats)]
        best = min(runs, key=lambda run: run["seconds"])
        found[name] = best | {"mb_per_second": rows * width * 2 / best["seconds"] / 1e6}
    return found


def write_codes(proxy: DelayProxy, args: argparse.Namespace) -> dict[str, Any]:
    """Encode a local store into the bucket, a chunk per object and a unit per object."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(units, "UNITS_WANTED", args.units):
        n = 8 * args.units * units.MIN_CHUNK_ROWS
        write_store(f"{folder}/s", n, 16, "float16", units.MIN_CHUNK_ROWS)
        atoms = made_up_rows(32, 16, seed=1)
        atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
        dictionary = Dictionary(atoms, None, {"n_atoms": 32, "k": 4})
        encode.encode_store(f"{folder}/s", dictionary, f"{folder}/codes")  # compiles
        for name, rule in {"a chunk": lambda _: 1, "a unit": units.unit_chunks}.items():
            place = f"{BUCKET}/codes-{name.replace(' ', '-')}"
            with mock.patch.object(encode, "unit_chunks", rule):
                took = timed(lambda place=place: encode.encode_store(f"{folder}/s", dictionary, place), proxy)
            objects = sum(len(paths.list_names(f"{place}/{array}")) - 1 for array in ("atom", "coefficient"))
            found[f"{name} per object"] = took | {"objects": objects, "rows": n}
    return found


def checkpoint(proxy: DelayProxy, args: argparse.Namespace) -> dict[str, Any]:
    """Publish a checkpoint of 4096 atoms and 768 features, and read it."""
    atoms = made_up_rows(4096, 768, seed=2)
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    state = Dictionary(atoms, None, {"n_atoms": 4096, "k": 32}, iteration=1)
    run = f"{BUCKET}/run"
    return {
        "bytes": atoms.nbytes,
        "published": timed(lambda: write_checkpoint(run, state), proxy),
        "read": timed(lambda: open_dictionary(run), proxy),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--megabytes-per-second", type=float, default=40.0, help="of one connection")
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--units", type=int, default=8, help="units of the codes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default=None)
    args = parser.parse_args(argv)
    result: dict[str, Any] = {"setting": {k: v for k, v in vars(args).items() if k != "out"}}
    with far_away(args.delay, args.megabytes_per_second * 1e6) as proxy:
        for measured in (read_chunk, write_codes, checkpoint):
            result[measured.__name__] = measured(proxy, args)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text)
    return result


if __name__ == "__main__":
    main()
