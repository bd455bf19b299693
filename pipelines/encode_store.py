"""Encode a store that is larger than any disk of one machine, in parts: the script to copy and adapt.

Every array job, indexed job or shell loop does one part. The parts know nothing of each other; all they share is
the file system or object store:

    python -m pipelines.encode_store store.zarr run codes.zarr --part 3/64
    python -m pipelines.encode_store store.zarr run codes.zarr --finish        # when all have ended

Under SLURM (`sbatch --array=1-64`) and in an indexed job of Kubernetes the part is found in the environment:

    python -m pipelines.encode_store store.zarr run codes.zarr --part auto

Or all at once, on the workers of a Dask cluster:

    python -m pipelines.encode_store store.zarr run codes.zarr --scheduler tcp://head:8786

Whatever was killed is simply run again: units that are done are not encoded twice. `--finish` says which parts are
missing, and the bytes of the result do not depend on how many parts there were.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from dbksvd_dask import cluster, encode_store, progress
from dbksvd_dask.cli.translate import in_options
from dbksvd_dask.errors import DBKSVDError, InputError


def part_of(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Read `3/64`, or find the part of an array job in the environment.

    >>> part_of("3/64", {})
    (3, 64)
    >>> part_of("auto", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "64"})
    (3, 64)
    >>> part_of("auto", {"JOB_COMPLETION_INDEX": "2", "N_PARTS": "64"})
    (3, 64)
    """
    try:
        if text != "auto":
            i, n = text.split("/")
            return int(i), int(n)
        if "SLURM_ARRAY_TASK_ID" in environment:
            first = int(environment["SLURM_ARRAY_TASK_MIN"])
            last = int(environment["SLURM_ARRAY_TASK_MAX"])
            return int(environment["SLURM_ARRAY_TASK_ID"]) - first + 1, last - first + 1
        # Kubernetes counts from 0 and does not say how many there are: give N_PARTS in the pod's env
        return int(environment["JOB_COMPLETION_INDEX"]) + 1, int(environment["N_PARTS"])
    except KeyError as error:
        raise InputError(
            f"--part auto needs {error} in the environment; it is for array jobs of SLURM and indexed jobs of "
            "Kubernetes (with N_PARTS); otherwise write --part 3/64"
        ) from error
    except ValueError as error:
        raise InputError(f"--part {text} is not a part; write 3/64 for the third of sixty-four") from error


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.encode_store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("store", metavar="STORE", help="path or URL of the activations")
    add("run", metavar="RUN", help="folder of a fit, or a dictionary")
    add("out", metavar="OUT", help="path or URL of the codes")
    add("--part", metavar="I/N", help="do one part, such as 3/64, or 'auto' in an array job")
    add("--finish", action="store_true", help="put together what the parts have written")
    add("--k", type=int, help="most nonzeros per sample (default: as in the fit)")
    add("--coefficient-dtype", choices=("float32", "float16"), default="float32", help="default: %(default)s")
    add("--scheduler", metavar="ADDRESS", help="a running Dask scheduler, tcp://host:8786 or tls://host:8786")
    add("--workers", type=int, help="or start this many worker processes here")
    add("--log", metavar="FILE", help="write every event to this file, as JSON lines")
    return parser


def encode(options: argparse.Namespace) -> str:
    """Do what was asked for; a line about it."""
    part = None if options.part is None else part_of(options.part, os.environ)
    with (
        cluster.connect(workers=options.workers, scheduler=options.scheduler),
        progress.subscribers(bar=sys.stderr.isatty(), log=options.log) as callbacks,
    ):
        result = encode_store(
            options.store,
            options.run,
            options.out,
            k=options.k,
            coefficient_dtype=options.coefficient_dtype,
            part=part,
            finish=options.finish,
            resume=True,
            callbacks=callbacks,
        )
    done = f"{result.samples_written} samples encoded, {result.samples_kept} were there already"
    if not result.finished:
        return f"{result.path}: {done}; not finished yet"
    return f"{result.path}: {done}; variance explained {result.metrics['variance_explained']:.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        print(encode(options))
    except DBKSVDError as error:
        print(f"error: {in_options(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
