"""Kill a job with SIGKILL at each of its writes in turn, run it again, and tell what that took.

    python -m tests.kills.sweep JOB FOLDER [EVERY]

JOB is import (leaves rows out by a rule), import-all (leaves none out), import-parts, shuffle, shuffle-parts, or
shuffle11, shuffle12, shuffle21: a shuffle that is killed while it takes one or two passes, and resumed with one or
two. With EVERY, each EVERY-th write is the last in turn.

Prints a JSON list, one entry per point of the kill: whether the process died there, how many parts the second run
found done and did itself, and whether the result is the same, byte for byte, as that of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys

import numpy as np

from dbksvd_dask.jobs import _shuffle_job
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.store import atomic, write_behind
from dbksvd_dask.store.small_reads import copy_each
from tests.helpers.stores import make_store, ordered_rows, tree
from tests.kills.forks import die_at, in_child, was_killed


def run_import(folder):
    return import_activations(
        f"{folder}/acts_*.npy", f"{folder}/store", chunk_rows=8, drop_outliers=1.2, source_row=True
    )


def run_import_all(folder):
    return import_activations(f"{folder}/acts_*.npy", f"{folder}/store", chunk_rows=8)


def run_import_parts(folder):
    """Three parts in turn, as processes would do them."""
    options = {"chunk_rows": 8, "drop_outliers": 1.2, "source_row": True}
    for i in (2, 1, 3):
        result = import_activations(f"{folder}/acts_*.npy", f"{folder}/store", part=(i, 3), **options)
    return result


def run_shuffle_parts(folder):
    options = {"seed": 3, "block_bytes": 16 * 28, "chunk_rows": 8}
    for i in (2, 1, 3):
        result = shuffle_activations(f"{folder}/source", f"{folder}/store", part=(i, 3), **options)
    return result


def run_shuffle(folder):
    return shuffle_activations(f"{folder}/source", f"{folder}/store", seed=3, block_bytes=16 * 28, chunk_rows=8)


RUNS = {
    "import": run_import,
    "import-all": run_import_all,
    "import-parts": run_import_parts,
    "shuffle": run_shuffle,
    "shuffle-parts": run_shuffle_parts,
}


def choose_passes(n):
    """Make the shuffles of this process take one or two passes."""
    _shuffle_job.may_pick = lambda *_: n == 1
    _shuffle_job.in_file_cache = lambda _: n == 1


def prepare(job, folder):
    rows = ordered_rows(60, 6)
    if job.startswith("import"):
        np.save(f"{folder}/acts_1.npy", rows[:25])
        np.save(f"{folder}/acts_2.npy", rows[25:])
    else:
        make_store(f"{folder}/source", rows, aligned={"row": np.arange(60, dtype=np.int32)})


def parts_done(folder):
    """Count the markers that the dead process left."""
    places = {
        "chunks": ("store.partial/.parts", "chunk"),
        "blocks": ("store.scratch.partial", "block"),
        "scans": ("store.scan.partial", "block"),
    }
    return {name: len(atomic.Ledger(f"{folder}/{at}", kind).parts()) for name, (at, kind) in places.items()}


def sweep(job, folder, every=1):
    run = RUNS[job.rstrip("12")]
    first, second = map(int, job[-2:]) if job[-1].isdigit() else (2, 2)
    os.fsync = lambda fd: None  # shows nothing here: the machine stays up
    write_behind.MIN_BYTES, write_behind.DEPTH_BYTES = 0, 300  # the chunks here are tiny

    def plain(passes=second):
        choose_passes(passes)
        return dataclasses.asdict(run(folder))

    _, undisturbed = in_child(plain)
    expected = tree(f"{folder}/store")
    results = []
    for point in itertools.count(1, every):
        shutil.rmtree(f"{folder}/store")
        status, _ = in_child(lambda point=point: (die_at(point), plain(first))[1])
        if not was_killed(status):
            break
        done = parts_done(folder)
        finished = complete(f"{folder}/store.partial/zarr.json") or complete(f"{folder}/store/zarr.json")
        status, result = in_child(plain)
        results.append(
            {
                "point": point,
                "done": done,
                "complete": finished,
                "second": result,
                "same_bytes": status == 0 and tree(f"{folder}/store") == expected,
                "left": sorted(n for n in os.listdir(folder) if "store" in n),
            }
        )
    return {"undisturbed": undisturbed, "points": results}


def complete(metadata):
    if not os.path.exists(metadata):
        return False
    with open(metadata) as file:
        return bool(json.load(file)["attributes"]["complete"])


if __name__ == "__main__":
    # compiled code is loaded once, not in every child
    copy_each(np.empty(0, np.uint64), 1, 1, np.empty(0, np.int64), 0)

    prepare_in_child = in_child(lambda: prepare(sys.argv[1], sys.argv[2]))
    assert prepare_in_child[0] == 0
    json.dump(sweep(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])), sys.stdout)
