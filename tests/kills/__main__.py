"""Kill imports, shuffles, encodes and fits at random moments until they have been killed often enough.

    python -m tests.kills [--kills N] [--seed S] [--kinds import,shuffle,encode,fit,workers] [--folder F]

Each trial starts a job, kills it with SIGKILL at random moments, runs it again in between, and lets the last run
come to its end. `workers` is a fit on two worker processes: the driver or a worker is killed, and workers are
stopped with SIGSTOP for a while. The bytes of the result, and the names of the files beside it, must be those of
an undisturbed run. Prints one JSON object; the exit code is 1 when any trial differed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before NumPy is loaded: a process with threads cannot be forked safely

from tests.kills import campaign  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="stop after this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(campaign.SHARES))
    parser.add_argument("--folder", help="where to work; default: a temporary folder")
    parser.add_argument("--quiet", action="store_true", help="no line per trial on standard error")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        how = (given.kills, given.seed, given.kinds.split(","))
        report = campaign.run(given.folder or folder, *how, tell=(lambda _: None) if given.quiet else tell)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(any(kind["bad"] for kind in report["kinds"].values()))


def tell(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
