"""What whitening does to a reconstruction: held-out figures of one store at several exponents and k.

    python -m benchmarks.whitening STORE --k 8 16 32 --whiten 0 0.25 0.5 --threads 1

Trains the recipe "reconstruct" on the first rows of the store, up to 100,000, and encodes its last 10,000.
"per feature" is the variance explained as a mean over features, "of the total" that of all features together,
"relative error" the mean of ``|residual| / |sample|``. CPU seconds of training, and of encoding the held-out rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import Stopwatch, markdown
from dbksvd_dask import DBKSVD
from dbksvd_dask.evaluate.metrics import fvu_explained, mean_relative_error, variance_explained
from dbksvd_dask.kernels.moments import moments
from dbksvd_dask.store.activations import open_rows

BATCH_ROWS = 16_384


def split(store: str, n_train: int, n_test: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the first rows of a store, in random order, and its last ones: float32 each."""
    rows = open_rows(store)
    total = rows.shape[0]
    if total <= n_test:
        raise SystemExit(f"{store} has {total} rows; {n_test} held-out rows leave none to train on")
    train = np.asarray(rows.read(0, min(n_train, total - n_test)), np.float32)
    test = np.asarray(rows.read(total - n_test, total), np.float32)
    return train[np.random.default_rng(0).permutation(len(train))], test


def measure(train: np.ndarray, test: np.ndarray, n_atoms: int, k: int, how: dict[str, Any]) -> dict[str, Any]:
    """Train on rows and measure the reconstruction of others."""
    model = DBKSVD.recipe("reconstruct", n_atoms, k, batch_size=BATCH_ROWS, validation=0, output="sparse", **how)
    fitting, encoding = Stopwatch(), Stopwatch()
    fitting.start()
    model.fit(train)
    fitting.stop()
    encoding.start()
    codes = model.transform(test)
    encoding.stop()
    sums = moments(test, (test - codes @ model.components_ - model.mean_).astype(np.float32))
    return {
        "per_feature": variance_explained(sums).value,
        "of_total": fvu_explained(sums),
        "relative_error": mean_relative_error(sums),
        "fit_seconds": fitting.cpu,
        "encode_seconds": encoding.cpu,
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per k, exponent and seed."""
    train, test = split(args.store, args.rows, args.held_out)
    for k in args.k:
        for whiten in args.whiten:
            for seed in args.seeds:
                about = {"store": Path(args.store).name.removesuffix(".zarr"), "rows": len(train), "k": k}
                how = {"whiten": whiten, "seed": seed, "n_iter": args.n_iter}
                yield about | {"whiten": whiten, "seed": seed} | measure(train, test, args.atoms, k, how)


def table(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows as Markdown, mean over seeds."""
    names = ("per_feature", "of_total", "relative_error", "fit_seconds", "encode_seconds")
    header = ["store", "k", "whiten", *(name.replace("_", " ") for name in names)]
    cells = []
    for key in dict.fromkeys((r["store"], r["k"], r["whiten"]) for r in rows):
        mine = [r for r in rows if (r["store"], r["k"], r["whiten"]) == key]
        means = {name: float(np.mean([r[name] for r in mine])) for name in names}
        cells.append([*key, *(f"{means[name]:.{1 if name.endswith('seconds') else 3}f}" for name in names)])
    return markdown(header, cells)


def main(argv: list[str] | None = None) -> None:
    """Read the command line, run, print rows as they come and the table at the end."""
    parser = argparse.ArgumentParser(description="Reconstruction with and without whitening.")
    parser.add_argument("store")
    parser.add_argument("--atoms", type=int, default=1024)
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--whiten", type=float, nargs="+", default=[0.0, 0.25, 0.5])
    parser.add_argument("--n-iter", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100_000, help="training rows, the first of the store")
    parser.add_argument("--held-out", type=int, default=10_000, help="rows to measure on, the last of the store")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    common.add_row_output(parser)
    args = parser.parse_args(argv)
    common.emit_rows(run(args), args, table)


if __name__ == "__main__":
    main()
