"""A scheduler with two workers that are started again when they die, until standard input ends.

    python -m tests.kills.cluster FILE

Prints the address as JSON, and keeps the numbers of the workers that are at work in FILE.
"""

from __future__ import annotations

import json
import select
import sys

from distributed import LocalCluster

from dbksvd_dask.store.atomic import write_json

if __name__ == "__main__":
    how = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    with LocalCluster(**how, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        pids: list[int] = []
        write_json(sys.argv[1], pids)
        sys.stdout.write(json.dumps(cluster.scheduler_address) + "\n")
        sys.stdout.flush()
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            found = [worker.pid for worker in list(cluster.scheduler.workers.values())]
            if found != pids:
                pids = found
                write_json(sys.argv[1], pids, durable=False)
