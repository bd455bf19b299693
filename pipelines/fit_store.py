r"""Fit a dictionary to a store that is larger than any memory, on a Dask cluster: the script to copy and adapt.

On the cores of this machine:

    python -m pipelines.fit_store store.zarr run --n-atoms 4096 --k 32

On a cluster (docs/cluster.md says how to start one), waiting until 32 workers have come:

    python -m pipelines.fit_store s3://bucket/store.zarr run --n-atoms 16384 --k 64 \
        --scheduler tcp://head:8786 --wait-for 32 --log run.jsonl

It can be killed and started again at any time, with the same command: it goes on from the last checkpoint, and
the dictionary is the same, bit for bit, as without the interruption.
"""

import argparse
import sys
from collections.abc import Sequence

from dbksvd_dask import DBKSVD, cluster, open_activations, progress
from dbksvd_dask.cli.translate import in_options
from dbksvd_dask.errors import DBKSVDError


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.fit_store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("store", metavar="STORE", help="path or URL of the activations, seen by every worker")
    add("run", metavar="RUN", help="folder of the fit, seen by this process")
    add("--n-atoms", type=int, required=True, help="atoms of the dictionary")
    add("--k", type=int, required=True, help="most nonzeros per sample")
    add("--batch-size", type=int, default=65536, help="samples per outer batch (default: %(default)s)")
    add("--n-iter", type=int, default=40, help="outer batches (default: %(default)s)")
    add("--chunk-size", type=int, default=8192, help="samples per task (default: %(default)s)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--scheduler", metavar="ADDRESS", help="a running Dask scheduler, tcp://host:8786 or tls://host:8786")
    add("--workers", type=int, help="or start this many worker processes here")
    add("--wait-for", type=int, default=1, metavar="N", help="workers to wait for (default: %(default)s)")
    add("--log", metavar="FILE", help="write every event to this file, as JSON lines")
    return parser


def fit(options: argparse.Namespace) -> DBKSVD:
    """Run the fit that was asked for, or what is left of it."""
    n_samples, n_features = open_activations(options.store)["activations"].shape
    print(f"{options.store}: {n_samples} samples of {n_features} features", file=sys.stderr)
    with (
        cluster.connect(workers=options.workers, scheduler=options.scheduler) as client,
        progress.subscribers(bar=sys.stderr.isatty(), log=options.log) as callbacks,
    ):
        if client is not None:
            client.wait_for_workers(options.wait_for)
            print(f"watch it at {client.dashboard_link}", file=sys.stderr)
        model = DBKSVD(
            options.n_atoms,
            options.k,
            batch_size=options.batch_size,
            n_iter=options.n_iter,
            chunk_size=options.chunk_size,
            seed=options.seed,
            checkpoint=options.run,
            callbacks=callbacks,
        )
        return model.fit(options.store, resume=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        model = fit(options)
    except DBKSVDError as error:
        print(f"error: {in_options(str(error))}", file=sys.stderr)
        return 1
    last = {name: float(values[-1]) for name, values in model.history_.items()}
    print(f"{options.run}: {model.n_iter_} iterations, relative error {last['relative_error']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
