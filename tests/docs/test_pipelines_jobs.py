"""The script that fits and encodes a store, at tiny size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, open_codes, open_dictionary
from pipelines import fit_and_encode
from tests.helpers import clusters, jobs

SMALL = ("--n-atoms", 24, "--k", 3)


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(3000, 16), 1000)


def run(*args):
    return fit_and_encode.main([str(a) for a in args])


def test_the_script_goes_on_where_it_was_and_gives_the_result_of_the_library(tmp_path, store, capsys):
    where = (store, tmp_path / "run", tmp_path / "codes.zarr")
    DBKSVD.recipe("read", 24, 3, n_iter=1, checkpoint=tmp_path / "run").fit(store)
    assert run(*where, *SMALL, "--n-iter", 3, "--log", tmp_path / "run.jsonl") == 0
    assert "3000 samples, variance explained 0." in capsys.readouterr().out
    model = DBKSVD.recipe("read", 24, 3, n_iter=3).fit(store)
    np.testing.assert_array_equal(open_dictionary(tmp_path / "run").atoms, model.components_)
    first = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert first["first_iteration"] == 1


@pytest.mark.cluster
def test_script_and_commands_give_the_same_on_a_cluster_by_address(tmp_path, store):
    from distributed import LocalCluster

    tcp = {"protocol": "tcp", "host": "127.0.0.1"}
    with LocalCluster(**clusters.IN_PROCESS, **tcp, n_workers=1, threads_per_worker=2) as cluster:
        at = ("--scheduler", cluster.scheduler_address, "--wait-for", 1)
        assert run(store, tmp_path / "a", tmp_path / "a.zarr", *SMALL, "--n-iter", 2, *at) == 0
        read = ("--recipe", "read", *SMALL, "--n-iter", 2)
        assert jobs.command("fit", store, tmp_path / "b", *read, *at)[0] == 0
        assert jobs.command("encode", store, tmp_path / "b", tmp_path / "b.zarr", *at)[0] == 0
    model = DBKSVD.recipe("read", 24, 3, n_iter=2).fit(store)
    for name in ("a", "b"):
        np.testing.assert_array_equal(open_dictionary(tmp_path / name).atoms, model.components_)
        assert open_codes(tmp_path / f"{name}.zarr").sizes["sample"] == 3000


def test_bad_input_is_one_line_and_exit_code_1(tmp_path, capsys):
    assert run(tmp_path / "none.zarr", tmp_path / "run", tmp_path / "codes.zarr") == 1
    assert capsys.readouterr().err.startswith("error: no store at")
