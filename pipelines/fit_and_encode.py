"""Fit a store and encode it on a Dask cluster, from Python: the script to copy and adapt.

    python -m pipelines.fit_and_encode store.zarr run codes.zarr --scheduler tcp://head:8786 --wait-for 8

`dbksvd fit` and `dbksvd encode` do the same with every option. Copy this script for what options cannot say:
samples from elsewhere, a callback of your own, several fits on one cluster. It can be killed and started again at
any time; it resumes from the last checkpoint, and the result is the same, bit for bit.
"""

import argparse
import sys
from collections.abc import Sequence

from dbksvd_dask import DBKSVD, cluster, encode_store, progress
from dbksvd_dask.errors import DBKSVDError


def fit_and_encode(options: argparse.Namespace) -> str:
    """Do the work, or what is left of it; return a line about it."""
    where = {"scheduler": options.scheduler, "wait_for": options.wait_for}
    with cluster.connect(**where), progress.subscribers(log=options.log) as callbacks:
        model = DBKSVD.recipe(  # your parameters
            "read", options.n_atoms, options.k, n_iter=options.n_iter, checkpoint=options.run, callbacks=callbacks
        )
        model.fit(options.store, resume=True)
        result = encode_store(options.store, options.run, options.codes, callbacks=callbacks)
    return (
        f"{result.path}: {result.n_samples} samples, variance explained {result.metrics['variance_explained']:.4f}"
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.fit_and_encode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("store", metavar="STORE", help="path or URL of the activations, seen by every worker")
    add("run", metavar="RUN", help="folder of the fit, seen by this process")
    add("codes", metavar="CODES", help="path or URL of the codes, seen by every worker")
    add("--n-atoms", type=int, default=4096, help="atoms of the dictionary (default: %(default)s)")
    add("--k", type=int, default=32, help="most nonzeros per sample (default: %(default)s)")
    add("--n-iter", type=int, help="outer batches (default: 40)")
    add("--scheduler", metavar="ADDRESS", help="a running Dask scheduler, tcp://host:8786; default: this machine")
    add("--wait-for", type=int, metavar="N", help="start once the cluster has N workers")
    add("--log", metavar="FILE", help="write every event to this file, as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        print(fit_and_encode(options))
    except DBKSVDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
