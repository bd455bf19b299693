"""Wide dictionaries without a gram: how near the exact pursuit, how many products of time, how much memory.

    python -m benchmarks.wide --data tokens.zarr                       # quality and time
    python -m benchmarks.wide --memory --atoms 65536 --rows 16384      # peak memory against the plan
    python -m benchmarks.wide --memory --atoms 262144 --rows 2048

Quality: a dictionary of `--atoms` is fitted with its gram; held-out rows are encoded with the gram and without it.
Time is CPU seconds of one thread, best of three, as a multiple of the bare product of the rows with all atoms.
Memory: one iteration and an encode in this process, whose peak is compared with the plan. Without `--data`, rows
are sums of random directions with noise.
"""

from __future__ import annotations

import argparse
from typing import Any

import dask
import numpy as np

from benchmarks import common
from benchmarks.common import cpu_seconds
from benchmarks.peak import peak_of_this_process
from dbksvd_dask import DBKSVD, encode, events
from dbksvd_dask.kernels.blas import single_blas_thread
from dbksvd_dask.kernels.encode import encode_rows, gram_for, residual
from dbksvd_dask.plan.encoder import EncodeSpec

SIZES = {
    "tiny": {"atoms": [300], "k": 8, "features": 24, "rows": 400, "held_out": 96, "n_iter": 1},
    "full": {"atoms": [8192, 16384], "k": 32, "features": 640, "rows": 65536, "held_out": 1920, "n_iter": 2},
}
TILE = 480


def made_up(n: int, d: int, k: int, seed: int) -> np.ndarray:
    """Make sums of k of 8 d random directions, with decaying coefficients and noise: (n, d)."""
    directions = common.unit_atoms(np.random.default_rng(0).standard_normal((8 * d, d), dtype=np.float32))
    rng = np.random.default_rng(seed)
    Y = 0.02 * rng.standard_normal((n, d), dtype=np.float32)
    sizes = (0.9 ** np.arange(k)).astype(np.float32)
    for start in range(0, n, 4096):
        part = Y[start : start + 4096]
        chosen = rng.integers(0, 8 * d, (len(part), k))
        for s in range(k):
            part += (sizes[s] * rng.standard_normal(len(part), dtype=np.float32))[:, None] * directions[
                chosen[:, s]
            ]
    return Y


def samples(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return rows to train on and held-out rows."""
    if args.data:
        train, test = common._read(args.data, args.rows, args.held_out)
        return train.astype(np.float32), test.astype(np.float32)
    return made_up(args.rows, args.features, args.k, 1), made_up(args.held_out, args.features, args.k, 2)


def timed(function: Any, repeats: int = 3) -> tuple[float, Any]:
    """Return the CPU seconds of the fastest of some calls, and a result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        began = cpu_seconds()
        result = function()
        best = min(best, cpu_seconds() - began)
    return best, result


def bare_products(Y: np.ndarray, D: np.ndarray) -> None:
    """Multiply all rows with all atoms, tile by tile."""
    out = np.empty((TILE, len(D)), Y.dtype)
    for start in range(0, len(Y), TILE):
        part = Y[start : start + TILE]
        np.dot(part, D.T, out=out[: len(part)])


def compare(Y: np.ndarray, D: np.ndarray, k: int, exact: bool = True) -> dict[str, Any]:
    """Encode rows without a gram, and with it where that is wanted."""
    spec, total = EncodeSpec(k), float(np.square(Y - Y.mean(axis=0), dtype=np.float64).sum())
    ways = {"screened": None, **({"exact": gram_for(D, spec._replace(gram="always"))} if exact else {})}
    found: dict[str, Any] = {}
    with single_blas_thread():
        products, _ = timed(lambda: bare_products(Y, D))
        for name, gram in ways.items():
            encode_rows(Y[:1], D, gram, spec)  # compiles
            seconds, codes = timed(lambda gram=gram: encode_rows(Y, D, gram, spec))
            left = float(np.square(residual(Y, *codes, D), dtype=np.float64).sum())
            found[name] = {"explained": 1 - left / total, "products": seconds / max(products, 1e-9)}
    return found


def quality(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fit, and encode held-out rows both ways; one row per number of atoms."""
    train, test = samples(args)
    rows = []
    for n_atoms in args.atoms:
        with dask.config.set(scheduler="threads", num_workers=1):
            model = DBKSVD(n_atoms, args.k, n_iter=args.n_iter, validation=0, gram="always").fit(train)
        D, Y = model.components_, np.ascontiguousarray(test - model.mean_, dtype=np.float32)
        rows.append({"atoms": n_atoms, "features": D.shape[1], "k": args.k, **compare(Y, D, args.k)})
    return rows


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fit one iteration and encode, without a gram; peaks so far, beside the plan."""
    train, test = samples(args)
    rows, planned = [], []
    before = peak_of_this_process()

    def note(event: events.Event) -> None:
        if isinstance(event, events.FitStarted):
            planned.append(event.planned_bytes)

    for n_atoms in args.atoms:
        with dask.config.set(scheduler="threads", num_workers=args.threads):
            how = {"n_iter": 1, "gram": "never", "batch_size": args.rows, "validation": 0, "warm_up": False}
            model = DBKSVD(n_atoms, args.k, **how, callbacks=[note]).fit(train)
            fitted = peak_of_this_process()
            encode(test, model)
        D, Y = model.components_, np.ascontiguousarray(test[:480] - model.mean_, dtype=np.float32)
        peaks = {"samples": train.nbytes + test.nbytes, "before": before, "fit": fitted}
        peaks |= {"fit and encode": peak_of_this_process(), "planned": planned[-1]}
        rows.append(
            {"atoms": n_atoms, "features": D.shape[1], "k": args.k, **peaks, **compare(Y, D, args.k, False)}
        )
    return rows


def table(result: dict[str, Any]) -> str:
    """Lay out rows as Markdown."""
    lines: list[list[Any]] = []
    for r in result["rows"]:
        ways = [r[name] for name in ("exact", "screened") if name in r]
        cells = [c for way in ways for c in (f"{way['explained']:.4f}", f"{way['products']:.2f}")]
        peaks = [f"{r[name] / 1e9:.2f}" for name in ("fit", "fit and encode", "planned") if name in r]
        lines.append([r["atoms"], r["features"], r["k"], *cells, *peaks])
    exact = ["exact: explained", "products"] if result["rows"] and "exact" in result["rows"][0] else []
    peaks = [] if exact else ["GB, fit", "with encode", "planned"]
    return common.markdown(["atoms", "d", "k", *exact, "without gram: explained", "products", *peaks], lines)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--data", help="activation store")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of quality")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--atoms", type=int, nargs="+")
    for name in ("k", "features", "rows", "held-out", "n-iter"):
        parser.add_argument(f"--{name}", type=int)
    common.add_output(parser)
    args = parser.parse_args(arguments)
    common.fill_in(args, SIZES[args.size])
    rows = memory(args) if args.memory else quality(args)
    common.emit({"machine": common.machine(), "rows": rows}, args, table)


if __name__ == "__main__":
    main()
