"""Estimates of jobs: sizes from the data alone, with the defaults of the library, and nothing written."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.jobs import estimate
from tests.helpers import jobs
from tests.helpers.stores import make_store, ordered_rows


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "acts.npy", ordered_rows(300, 8))
    make_store(tmp_path / "store.zarr", ordered_rows(300, 8), 32, {"row": np.arange(300)})
    jobs.write_dictionary(tmp_path / "run", 32, 8, 3)
    return tmp_path


def test_sizes_follow_from_the_data_and_nothing_is_written(files):
    before = sorted(os.listdir(files))
    imported = estimate.estimate_import(files / "acts.npy", files / "new")
    shuffled = estimate.estimate_shuffle(files / "store.zarr", files / "new", seed=0)
    encoded = estimate.estimate_encode(files / "store.zarr", files / "run", files / "new", k=2)
    assert [plan["rows"] for plan in (imported, shuffled, encoded)] == [300, 300, 300]
    assert (imported["read_bytes"], imported["written_bytes"]) == (9600, 9600)
    assert shuffled["read_bytes"] == 2 * 300 * (8 * 4 + 8), "aligned arrays are shuffled too"
    assert (encoded["k"], encoded["written_bytes"]) == (2, 300 * 2 * 8)
    assert sorted(os.listdir(files)) == before


def test_a_rule_that_reads_the_rows_takes_another_pass(files):
    planned = estimate.estimate_import(files / "acts.npy", files / "new", drop_outliers=10.0)
    assert (planned["passes"], planned["read_bytes"]) == (2, 2 * 9600)


def test_seconds_are_unknown_where_nothing_can_be_written(files):
    planned = estimate.estimate_import(files / "acts.npy", files / "nowhere" / "new")
    assert planned["estimated_seconds"] is None
    assert planned["rows"] == 300


def test_bad_input_is_refused_as_by_the_job(files):
    with pytest.raises(InputError, match="seed=-1"):
        estimate.estimate_shuffle(files / "store.zarr", files / "new", seed=-1)
    with pytest.raises(StoreError, match="exist"):
        estimate.estimate_shuffle(files / "store.zarr", files / "run", seed=0)
