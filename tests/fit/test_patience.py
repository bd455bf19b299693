"""`patience`: a fit that no longer gains stops, at the same iteration however it was run."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from dbksvd_dask import DBKSVD
from dbksvd_dask.store.runs import checkpoints
from tests.helpers import jobs

SIZES = {"n_atoms": 8, "k": 2, "n_iter": 60, "batch_size": 256, "chunk_size": 128, "validation": 60}


@pytest.fixture
def rows():
    """Rows of eight directions: a fit is done after a few iterations."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((600, 8)) * (rng.random((600, 8)) < 0.25)
    return (weights @ rng.standard_normal((8, 16)) + 0.01 * rng.standard_normal((600, 16))).astype(np.float32)


def test_a_fit_stops_once_it_no_longer_gains_and_was_the_same_until_then(rows):
    stopped = DBKSVD(**SIZES, patience=3).fit(rows)
    assert 4 <= stopped.n_iter_ < 60
    errors = stopped.history_["validation_relative_error"].values
    assert len(errors) == stopped.n_iter_
    assert errors[-3:].min() >= 0.999 * errors[:-3].min()
    whole = DBKSVD(**{**SIZES, "n_iter": stopped.n_iter_}).fit(rows)
    np.testing.assert_array_equal(stopped.components_, whole.components_)


def test_a_resumed_fit_stops_where_the_whole_one_did_and_stays_stopped(rows, tmp_path):
    whole = DBKSVD(**SIZES, patience=3).fit(rows)
    run = tmp_path / "run"
    DBKSVD(**{**SIZES, "n_iter": 2}, patience=3, checkpoint=run).fit(rows)
    resumed = DBKSVD(**SIZES, patience=3, checkpoint=run, checkpoint_every=100).fit(rows, resume=True)
    assert resumed.n_iter_ == whole.n_iter_
    np.testing.assert_array_equal(resumed.components_, whole.components_)
    before = [os.stat(path).st_mtime_ns for path in checkpoints(run)]
    again = DBKSVD(**SIZES, patience=3, checkpoint=run).fit(rows, resume=True)
    assert (again.n_iter_, [os.stat(p).st_mtime_ns for p in checkpoints(run)]) == (whole.n_iter_, before)


def test_a_stopped_fit_goes_on_with_more_patience(rows, tmp_path):
    first = DBKSVD(**SIZES, patience=2, checkpoint=tmp_path / "run").fit(rows)
    more = {**SIZES, "n_iter": first.n_iter_ + 2}
    longer = DBKSVD(**more, checkpoint=tmp_path / "run").fit(rows, resume=True)
    assert longer.n_iter_ == first.n_iter_ + 2
    np.testing.assert_array_equal(longer.components_, DBKSVD(**more).fit(rows).components_)


def test_the_command_says_that_it_stopped_and_since_when_little_has_changed(rows, tmp_path):
    store = jobs.write_store(tmp_path / "store.zarr", rows, 200)
    options = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", value)]
    code, out, err = jobs.command("fit", store, tmp_path / "run", *options, "--patience", 5)
    assert code == 0, err
    assert "; stopped before iteration 60; little has changed since iteration " in out
    told = json.loads(jobs.command("info", tmp_path / "run", "--json")[1])
    assert told["finished"]
    assert told["iteration"] < 60
