"""A scheduler with two workers that are started again when they die, until standard input ends.

    python -m tests.kills.cluster

Prints the address as JSON.
"""

from __future__ import annotations

import json
import sys

from distributed import LocalCluster

if __name__ == "__main__":
    how = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    with LocalCluster(**how, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        sys.stdout.write(json.dumps(cluster.scheduler_address) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
