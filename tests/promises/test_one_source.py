"""One source, one result: however its rows are cut, under each kind of BLAS kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask.kernels import encode
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import EncodeSpec

# what OpenBLAS takes for OPENBLAS_CORETYPE, and the flag of /proc/cpuinfo without which its kernels cannot run
CORE_TYPES = {"Nehalem": "sse4_2", "Sandybridge": "avx", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}
ALL_MODES = (
    *("omp", "fista", "nonneg refit", "rtol", "groups", "mean", "prior", "no gram", "no gram, groups"),
    "whitened",
)


def processor_flags():
    try:
        with open("/proc/cpuinfo") as file:
            return set(next(line for line in file if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return set()


def compare(*modes, **env):
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.source_bits", *modes],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("core_type", CORE_TYPES)
def test_every_cut_gives_the_same_bits_under_each_kind_of_kernels(core_type):
    if CORE_TYPES[core_type] not in processor_flags():
        pytest.skip(f"this processor cannot run the {core_type} kernels of OpenBLAS")
    found = compare("defaults", OPENBLAS_CORETYPE=core_type)
    assert found["different"] == []
    assert found["compared"] > 40


@pytest.mark.slow
def test_every_cut_gives_the_same_bits_in_every_mode():
    found = compare(*ALL_MODES)
    assert found["different"] == []


def test_a_row_lies_at_its_own_index_on_the_grid(monkeypatch, rng):
    Y, D = (rng.standard_normal(shape).astype("f4") for shape in ((100, 16), (32, 16)))
    gram, seen, real = gram_matrix(D), [], np.dot
    monkeypatch.setattr(encode.np, "dot", lambda a, b, out: seen.append(a.copy()) or real(a, b, out=out))
    encode_rows(Y[50:60], D, gram, EncodeSpec(2), first=50)
    (tile,) = seen
    assert tile.shape[0] % units.GRID_ROWS == 0
    np.testing.assert_array_equal(tile[2:12], Y[50:60])
    assert not tile[:2].any()
    assert not tile[12:].any()


@given(st.integers(1, 3000), st.integers(0, 10**12), st.sampled_from([100, 10**6]))
def test_tiles_cover_every_row_once_at_its_place(n_rows, first, n_products):
    tiles = units.grid_tiles(n_rows, first, n_products)
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
    assert tiles[-1].stop == n_rows
    for tile in tiles:
        assert (first + tile.start - tile.place) % units.GRID_ROWS == 0
        assert tile.height % units.GRID_ROWS == 0
        assert tile.place + tile.stop - tile.start <= tile.height <= units.TILE_ROWS
