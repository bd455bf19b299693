"""The benchmarks of scale run at tiny size, and the model of moved bytes agrees with what workers send."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import outofcore, scaling, schedulers
from dbksvd_dask.plan import units


def test_neighbours_on_one_worker_move_one_sum_per_worker():
    for workers in (2, 4, 8):
        homes = units.spread(16, [1] * workers)
        assert scaling.crossings(homes) == workers - 1
        assert scaling.crossings([c % workers for c in range(16)]) > workers - 1


def test_bytes_per_worker_do_not_grow_with_the_workers():
    per_worker = [scaling.bytes_moved(scaling.Batch(768, 4096, w), w).total / w for w in (2, 64, 1024)]
    assert per_worker[2] < 2 * per_worker[0]
    assert per_worker[2] == pytest.approx(per_worker[1], rel=0.03)


def test_the_table_covers_two_to_a_thousand_workers():
    rows = scaling.table_of(argparse.Namespace(features=768, atoms=4096), scaling.Machine())
    assert {row["workers"] for row in rows} >= {2, 1024}
    assert all(0 < row["efficiency"] <= 1 for row in rows)


@pytest.mark.cluster
def test_model_of_moved_bytes_agrees_with_two_workers():
    small = ["--features", "256", "--atoms", "1024", "--rows", "1024", "--chunk-size", "256", "--workers", "2"]
    (check,) = scaling.main(["--json", "--k", "4", *small])["checks"]
    assert 0.9 < check["ratio"] < 1.4


@pytest.mark.cluster
def test_schedulers_benchmark_gives_one_dictionary():
    small = [
        "--rows",
        "600",
        "--features",
        "32",
        "--atoms",
        "64",
        "--k",
        "4",
        "--rounds",
        "2",
        "--chunk-size",
        "200",
    ]
    result = schedulers.main([*small, "--repeats", "1", "--json"])
    assert result["same_bits"]
    assert result["tasks"] < 600


@pytest.mark.slow
def test_out_of_core_benchmark_stays_below_the_limit():
    small = ["--small", "0.02", "--large", "0.06", "--features", "128", "--atoms", "128", "--k", "4"]
    result = outofcore.main([*small, "--batch-size", "8192", "--batches", "2", "--chunk-rows", "4096", "--json"])
    assert result["within_limit"]
    assert result["does_not_grow"]
