"""Kill an encode with SIGKILL at each of its writes in turn, run it again, and tell what that took.

    python -m tests.kills.encode_sweep FOLDER [STEP]

Prints one JSON object: what the undisturbed run did, and per point of the kill how many samples the second run
found done and encoded, and whether the result is the same, byte for byte. Processes are forked from one that has
loaded the kernels, so a point costs a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys

import dask
import numpy as np

from dbksvd_dask.evaluate.reconstruction import reconstruction_moments
from dbksvd_dask.evaluate.sums import CodeSums
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.kernels import encode
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store import atomic
from tests.helpers import jobs
from tests.kills.forks import die_at, in_child, was_killed

CHUNK, N = 16, 40  # three units, the last one short


def prepare(folder):
    jobs.write_store(f"{folder}/store.zarr", jobs.made_up(N, 6), CHUNK)
    jobs.write_dictionary(f"{folder}/dictionary", 10, 6, 2)


def load_kernels():
    """Compile, or load from the cache, what an encode needs; starts no thread, so that forking is safe."""
    rng = np.random.default_rng(0)
    Y = rng.standard_normal((CHUNK, 6)).astype(np.float32)
    D = Y[:10] / np.linalg.norm(Y[:10], axis=1, keepdims=True)
    atom, coefficient = encode.encode_rows(Y, D, encode.gram_matrix(D), EncodeSpec(2))
    R = encode.residual(Y, atom, coefficient, D)
    sums = CodeSums.of(reconstruction_moments(Y, R), atom, coefficient, 0, (10, 4))
    CodeSums.from_bytes(sums.to_bytes(), lambda: sums.extremes).merge(sums)


def run(folder):
    with dask.config.set(scheduler="synchronous"):
        result = encode_store(f"{folder}/store.zarr", f"{folder}/dictionary", f"{folder}/codes.zarr", n_top=4)
    return dataclasses.asdict(result)


def sweep(folder, step):
    _, undisturbed = in_child(lambda: run(folder))
    expected = jobs.tree(f"{folder}/codes.zarr")
    points = []
    for point in itertools.count(1, step):
        shutil.rmtree(f"{folder}/codes.zarr")
        status, _ = in_child(lambda point=point: (die_at(point), run(folder))[1])
        if not was_killed(status):
            break
        published = os.path.exists(f"{folder}/codes.zarr")
        marked = len(atomic.Ledger(f"{folder}/codes.zarr.partial/.parts", "unit").parts())
        status, second = in_child(lambda: run(folder))
        points.append(
            {
                "point": point,
                "published": published,
                "marked": marked,
                "second": second,
                "same_bytes": status == 0 and jobs.tree(f"{folder}/codes.zarr") == expected,
                "left": sorted(name for name in os.listdir(folder) if "codes" in name),
            }
        )
    return {"undisturbed": undisturbed, "points": points}


if __name__ == "__main__":
    units.MIN_CHUNK_ROWS = CHUNK
    atomic.fsync_path = lambda path: None  # shows nothing here: the machine stays up
    assert in_child(lambda: prepare(sys.argv[1]))[0] == 0
    load_kernels()
    json.dump(sweep(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1), sys.stdout)
