"""The scripts that fit and encode a store, at tiny size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode_store, open_codes, open_dictionary
from dbksvd_dask.errors import InputError
from pipelines import encode_store as encode_script
from pipelines import fit_store as fit_script
from tests.helpers import jobs


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(9000, 16), 1000)


def fit(store, run, *more):
    small = ("--n-atoms", 24, "--k", 3, "--batch-size", 512, "--chunk-size", 256, *more)
    return fit_script.main([str(a) for a in (store, run, *small)])


def encode(*args):
    return encode_script.main([str(a) for a in args])


def test_fit_store_goes_on_where_it_was_and_gives_the_dictionary_of_the_library(tmp_path, store, capsys):
    assert fit(store, tmp_path / "run", "--n-iter", 1) == 0
    assert fit(store, tmp_path / "run", "--n-iter", 3, "--log", tmp_path / "run.jsonl") == 0
    assert "3 iterations, relative error 0." in capsys.readouterr().out
    model = DBKSVD(24, 3, batch_size=512, chunk_size=256, n_iter=3).fit(store)
    np.testing.assert_array_equal(open_dictionary(tmp_path / "run").atoms, model.components_)
    first = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert first["first_iteration"] == 1


def test_encode_store_in_parts_gives_the_codes_of_the_library(tmp_path, store, monkeypatch, capsys):
    run = jobs.write_dictionary(tmp_path / "dictionary", 24, 16, 3)
    for index in (3, 5):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "3")
        monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "5")
        assert encode(store, run, tmp_path / "codes.zarr", "--part", "auto") == 0
    assert encode(store, run, tmp_path / "codes.zarr", "--finish") == 1
    assert "Parts not encoded: 2 of 3" in capsys.readouterr().err
    assert encode(store, run, tmp_path / "codes.zarr", "--part", "2/3") == 0
    assert encode(store, run, tmp_path / "codes.zarr", "--finish") == 0
    assert "variance explained" in capsys.readouterr().out
    encode_store(store, run, tmp_path / "whole.zarr")
    assert jobs.tree(tmp_path / "codes.zarr") == jobs.tree(tmp_path / "whole.zarr")
    assert encode(store, run, tmp_path / "codes.zarr") == 0
    assert "0 samples encoded, 9000 were there already" in capsys.readouterr().out


@pytest.mark.cluster
def test_both_scripts_run_on_a_cluster_by_address(tmp_path, store):
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1,
        threads_per_worker=2,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        at = ("--scheduler", cluster.scheduler_address)
        assert fit(store, tmp_path / "run", "--n-iter", 2, *at) == 0
        assert encode(store, tmp_path / "run", tmp_path / "codes.zarr", *at) == 0
    model = DBKSVD(24, 3, batch_size=512, chunk_size=256, n_iter=2).fit(store)
    np.testing.assert_array_equal(open_dictionary(tmp_path / "run").atoms, model.components_)
    assert open_codes(tmp_path / "codes.zarr").sizes["sample"] == 9000


def test_bad_input_is_one_line_and_exit_code_1(tmp_path, store, capsys):
    assert fit(tmp_path / "none.zarr", tmp_path / "run") == 1
    assert capsys.readouterr().err.startswith("error: no store at")
    assert encode(store, tmp_path / "none", tmp_path / "codes.zarr") == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "a/b", "1/2/3"])
def test_parts_that_cannot_be_read_are_refused(text):
    with pytest.raises(InputError, match="is not a part; write 3/64"):
        encode_script.part_of(text, {})


def test_part_auto_outside_an_array_job_says_what_it_needs():
    with pytest.raises(InputError, match="--part auto needs 'JOB_COMPLETION_INDEX' in the environment"):
        encode_script.part_of("auto", {})
    assert encode_script.part_of("auto", {"JOB_COMPLETION_INDEX": "0", "N_PARTS": "4"}) == (1, 4)
