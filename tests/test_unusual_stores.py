"""Stores that few have: bfloat16, very many chunks, very many aligned arrays, through every step."""

from __future__ import annotations

import numpy as np
import pytest

from dbksvd_dask import (
    DBKSVD,
    encode_store,
    import_activations,
    open_activations,
    open_codes,
    shuffle_activations,
)
from dbksvd_dask.cli.info import describe
from dbksvd_dask.store.dtypes import widen_bfloat16
from tests.store_helpers import make_store

HOW = {"n_iter": 2, "batch_size": 256, "chunk_size": 128, "validation": 64, "seed": 3, "n_rounds": 2}


def fitted(store, run):
    return DBKSVD(12, 3, **HOW, checkpoint=str(run)).fit(store)


def test_a_bfloat16_store_gives_what_its_widened_values_give(rng, tmp_path):
    bits = (rng.standard_normal((600, 8)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    (tmp_path / "a.bin").write_bytes(bits.tobytes())
    import_activations(tmp_path / "a.bin", tmp_path / "half", dtype="bfloat16", n_features=8, chunk_rows=100)
    assert describe(str(tmp_path / "half"))["dtype"] == "bfloat16"
    shuffle_activations(tmp_path / "half", tmp_path / "mixed", seed=0, chunk_rows=100)
    wide = make_store(tmp_path / "wide", widen_bfloat16(bits), 100)
    models = [fitted(str(store), tmp_path / f"run{i}") for i, store in enumerate((tmp_path / "half", wide))]
    np.testing.assert_array_equal(models[0].components_, models[1].components_)
    encode_store(tmp_path / "half", tmp_path / "run0", tmp_path / "codes")
    codes = open_codes(tmp_path / "codes")
    expected = models[1].transform(widen_bfloat16(bits))
    np.testing.assert_array_equal(codes.atom, expected.atom)
    np.testing.assert_array_equal(codes.coefficient, expected.coefficient)
    order = np.lexsort(widen_bfloat16(bits).T)
    mixed = open_activations(tmp_path / "mixed").activations.values
    np.testing.assert_array_equal(mixed[np.lexsort(mixed.T)], widen_bfloat16(bits)[order])


@pytest.mark.parametrize("n_chunks", [600])  # 20,000 by hand: see docs/reliability.md
def test_a_store_of_very_many_chunks_gives_the_same_as_one_of_few(rng, tmp_path, n_chunks):
    rows = rng.standard_normal((2 * n_chunks, 6)).astype(np.float32)
    many, few = make_store(tmp_path / "many", rows, 2), make_store(tmp_path / "few", rows, rows.shape[0])
    found = describe(many, True)
    assert found["n_samples"] == rows.shape[0]
    models = [fitted(store, tmp_path / f"run{i}") for i, store in enumerate((many, few))]
    np.testing.assert_array_equal(models[0].components_, models[1].components_)
    encode_store(many, tmp_path / "run0", tmp_path / "codes")
    np.testing.assert_array_equal(open_codes(tmp_path / "codes").atom, models[1].transform(rows).atom)


def test_a_hundred_aligned_arrays_stay_with_their_rows(rng, tmp_path):
    n = 60
    columns = {f"column_{i}": np.arange(n) * (i + 1) for i in range(100)}
    np.savez(tmp_path / "a.npz", acts=rng.standard_normal((n, 4)).astype(np.float32), **columns)
    import_activations(tmp_path / "a.npz", tmp_path / "s", array="acts", aligned=list(columns), chunk_rows=25)
    shuffle_activations(tmp_path / "s", tmp_path / "mixed", seed=5)
    plain, mixed = open_activations(tmp_path / "s"), open_activations(tmp_path / "mixed")
    order = mixed.column_0.values
    assert not np.array_equal(order, np.arange(n))
    np.testing.assert_array_equal(mixed.activations.values, plain.activations.values[order])
    for i, name in enumerate(columns):
        np.testing.assert_array_equal(mixed[name].values, order * (i + 1))
    assert len(describe(str(tmp_path / "mixed"))["aligned"]) == 100
    assert fitted(str(tmp_path / "mixed"), tmp_path / "run").components_.shape == (12, 4)
