"""Time of each stage of an iteration on a GPU, beside what the card's data sheet allows.

``python -m benchmarks.gpu --json`` needs a card; ``python -m benchmarks.gpu --expected`` prints the arithmetic
alone, anywhere. `encode` includes products, pursuit, residual and grouping.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np

from benchmarks.gpu_arithmetic import PAPER, PAPER_SECONDS, stages, table
from dbksvd_dask.errors import DeviceError
from dbksvd_dask.gpu import device
from dbksvd_dask.kernels import chunk, lanczos
from dbksvd_dask.model import DBKSVD
from dbksvd_dask.plan.device import Sizes
from dbksvd_dask.plan.encoder import EncodeSpec


def random_data(sizes: Sizes, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples of one chunk and a dictionary: each sample a sum of k atoms and noise."""
    rng = np.random.default_rng(seed)
    D = rng.standard_normal((sizes.n_atoms, sizes.n_features)).astype(np.float32)
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    n = min(sizes.chunk_size, sizes.n_rows)
    Y = 0.1 * rng.standard_normal((n, sizes.n_features)).astype(np.float32)
    for s in range(sizes.k):
        Y += (rng.standard_normal(n) / (s + 1)).astype(np.float32)[:, None] * D[rng.integers(0, len(D), n)]
    return Y, D


class Clock:
    """Seconds of each stage, the best of several runs."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.seconds: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call, wait for the device, and add the shortest time to what is under `name`."""
        best = float("inf")
        for _ in range(self.repeats):
            began = time.perf_counter()
            out = call(*args)
            _settle(out)
            best = min(best, time.perf_counter() - began)
        self.seconds[name] = self.seconds.get(name, 0.0) + best
        return out


def _settle(out: Any) -> None:
    """Wait until the device has computed a result, by fetching a corner of it."""
    while isinstance(out, tuple):
        out = out.R if hasattr(out, "R") else out[0]
    if hasattr(out, "shape") and device.on_device(out):
        device.to_host(out[:1, ...])


def measure_chunk(sizes: Sizes, repeats: int) -> dict[str, float]:
    """Seconds of every stage for one chunk."""
    from dbksvd_dask.gpu import chunk as gpu

    raw, atoms = random_data(sizes)
    clock = Clock(repeats)
    Y = clock.time("upload", gpu.prepare, raw, None, np.float32)
    D = gpu.to_device(atoms)
    gram = clock.time("gram", gpu.gram_matrix, atoms, True)
    clock.time("products", lambda: Y @ D.T)
    order = np.random.default_rng(1).permutation(sizes.n_atoms).astype(np.int32)
    rounds = chunk.invert_rounds(np.array_split(order, sizes.n_rounds), sizes.n_atoms)
    spec = EncodeSpec(sizes.k)
    state, counts = clock.time("encode", gpu.encode_chunk, Y, D, gram, spec, rounds)
    clock.time("encode, pursuit on the host", gpu.encode_rows, Y, D, device.to_host(gram), spec)
    for r, members in enumerate(rounds.atoms):
        state = _measure_round(clock, state, r, D, members)
    clock.time("metrics", gpu.chunk_stats, Y, state, counts)
    return clock.seconds


def _measure_round(clock: Clock, state: Any, r: int, D: Any, members: np.ndarray) -> Any:
    """One round with two Lanczos steps: the state after it."""
    from dbksvd_dask.gpu import chunk as gpu

    old = gpu.take_rows(D, members)
    W, (x2,), unit = clock.time("first products", gpu.first_product, state, r, members.size)
    lz = lanczos.warm_start(W, x2, old, unit)
    W, (sx, s2), unit = clock.time("next products", gpu.next_product, state, r, lz)
    new = clock.time("lanczos", lambda: lanczos.leading_vectors(lanczos.advance(lz, W, sx, s2, old, unit), old))
    return clock.time("refresh", gpu.refresh_chunk, state, r, D, members, new, False)


def measure_fit(sizes: Sizes) -> dict[str, Any]:
    """Seconds of whole iterations through the estimator, the first (which compiles) apart."""
    Y, _ = random_data(sizes._replace(chunk_size=sizes.n_rows))
    how = {"n_rounds": sizes.n_rounds, "lanczos_steps": sizes.lanczos_steps, "chunk_size": sizes.chunk_size}
    model = DBKSVD(sizes.n_atoms, sizes.k, batch_size=sizes.n_rows, validation=0, device="gpu", **how)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        model.partial_fit(Y)
        seconds.append(time.perf_counter() - began)
    return {
        "first_iteration_seconds": seconds[0],
        "iteration_seconds": min(seconds[1:]),
        "variance_explained": float(model.history_["variance_explained"][-1]),
        "paper_seconds": PAPER_SECONDS.get(sizes.n_rows),
    }


def _card() -> dict[str, Any]:
    """Name of the card and versions of what drives it."""
    import cupy
    import numba

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "card": properties["name"].decode(),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "cupy": cupy.__version__,
        "numba": numba.__version__,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def report(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Everything measured, beside the arithmetic for the same chunk."""
    one = sizes._replace(n_rows=min(sizes.chunk_size, sizes.n_rows))
    return {
        "sizes": sizes._asdict(),
        "chunk_seconds": measure_chunk(one, repeats),
        "chunk_arithmetic": {s.name: {"flops": s.flops, "bytes": s.bytes} for s in stages(one)},
        "fit": measure_fit(sizes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=PAPER.n_rows)
    parser.add_argument("--features", type=int, default=PAPER.n_features)
    parser.add_argument("--atoms", type=int, default=PAPER.n_atoms)
    parser.add_argument("--k", type=int, default=PAPER.k)
    parser.add_argument("--chunk-size", type=int, default=PAPER.chunk_size)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--check", action="store_true", help="only say whether there is a card")
    parser.add_argument("--expected", action="store_true", help="the arithmetic alone; needs no card")
    args = parser.parse_args(argv)
    if args.expected:
        print("\n\n".join(table(n) for n in PAPER_SECONDS))
        return 0
    try:
        device.current()
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 1
    if args.check:
        return 0
    sizes = Sizes(args.rows, args.chunk_size, args.features, args.atoms, args.k)
    found = {**_card(), **report(sizes, args.repeats)}
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{found['card']}, {found['date']}: {found['fit']['iteration_seconds']:.3f} s per iteration")
    for name, seconds in found["chunk_seconds"].items():
        print(f"  {name:30s} {seconds * 1e3:9.2f} ms per chunk")
    return 0


if __name__ == "__main__":
    sys.exit(main())
