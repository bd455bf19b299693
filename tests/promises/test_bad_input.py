"""Bad input gets one clear error before any work: what came, what is needed, what to type."""

import dask.array as da
import numpy as np
import pytest
import zarr

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.errors import InputError, MismatchError, StoreError


def good(n=60, d=8):
    return np.random.default_rng(0).standard_normal((n, d)).astype(np.float32)


def explode(*args, **kwargs):
    raise AssertionError("work was started")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"k": 0}, r"k=0 is too small; use k >= 1"),
        ({"k": 17}, r"k=17 exceeds n_atoms=16; use k <= 16 or more atoms"),
        ({"k": 2.5}, r"k=2.5 is not a whole number"),
        ({"n_atoms": 0}, r"n_atoms=0 is too small"),
        ({"batch_size": 0}, r"batch_size=0 is too small"),
        ({"n_rounds": -1}, r"n_rounds=-1 is too small"),
        ({"lanczos_steps": 0}, r"lanczos_steps=0 is too small"),
        ({"encoder": "lasso"}, r"encoder='lasso' is not known; use one of 'mp', 'omp'"),
        ({"dead_atoms": "bury"}, r"dead_atoms='bury' is not known"),
        ({"init": "zeros"}, r"init='zeros' is not known"),
        ({"device": "tpu"}, r"device='tpu' is not known"),
        ({"rtol": -0.1}, r"rtol=-0.1 is not a finite number >= 0"),
        ({"min_coefficient": float("nan")}, r"min_coefficient=nan is not a finite number"),
        ({"encoder": "omp", "nonneg": True}, r"cannot honour nonneg=True; use encoder='mp'"),
        ({"n_iter": 0}, r"n_iter=0 is too small"),
        ({"n_rounds": 0}, r"n_rounds=0 is too small"),
        ({"lanczos_steps": 1.5}, r"lanczos_steps=1.5 is not a whole number"),
        ({"batch_size": None}, r"batch_size=None is not a whole number"),
        ({"groups": (8, 9)}, r"groups=\(8, 9\) sum to 17, not to n_atoms=16"),
        ({"groups": (4, 4, 8), "k": 2}, r"3 groups share k=2"),
        ({"groups": (1, 15), "k": 4}, r"a group of 1 atoms gets 2 of k=4"),
        ({"groups": "linear"}, r"groups='linear' is not known"),
        ({"init": np.zeros((16, 8))}, r"init row 0 is zero"),
        ({"init": np.ones((8, 16))}, r"init has shape \(8, 16\); it must be .* transpose it with init.T"),
    ],
)
def test_parameters_are_checked_before_any_work(params, text, monkeypatch):
    monkeypatch.setattr("dbksvd_dask.graph.batch.build_batch", explode)
    with pytest.raises(InputError, match=text):
        DBKSVD(**{"n_atoms": 16, "k": 2, **params}).fit(good())


def with_bad_row(row, value):
    Y = good()
    Y[row, 3] = value
    return Y


@pytest.mark.parametrize(
    ("Y", "text"),
    [
        (with_bad_row(37, np.nan), r"Y contains NaN: sample 37 \(chunk 2, row 5 in it\)"),
        (with_bad_row(5, np.inf), r"Y contains infinity: sample 5 \(chunk 0, row 5 in it\)"),
        (good()[0], r"Y has 1 dimension, shape \(8,\)"),
        (good().reshape(2, 30, 8), r"Y has 3 dimensions, shape \(2, 30, 8\)"),
        (np.ones((5, 8), int), r"Y has dtype int64; it must be float16, float32 or float64"),
        (np.ones((5, 8), complex), r"Complex data not supported"),
        (np.ones((0, 8), np.float32), r"Y has 0 sample\(s\)"),
        (np.ones((8, 0), np.float32), r"Y has 0 feature\(s\)"),
    ],
)
def test_arrays_are_checked_before_any_work(Y, text, monkeypatch):
    monkeypatch.setattr("dbksvd_dask.graph.batch.build_batch", explode)
    monkeypatch.setattr("dbksvd_dask.graph.load.build_sum", explode)
    with pytest.raises(InputError, match=text):
        DBKSVD(16, 2, chunk_size=16).fit(Y)


def test_lazy_arrays_name_the_chunk_and_the_row():
    Y = da.from_array(with_bad_row(37, np.nan), chunks=(25, 8))
    with pytest.raises(InputError, match=r"sample 37 \(chunk 1, row 12 in it\) has NaN or infinity"):
        DBKSVD(16, 2, chunk_size=16).fit(Y)


def test_stores_name_the_chunk_and_the_row(tmp_path):
    array = zarr.create_array(str(tmp_path / "y.zarr"), shape=(60, 8), dtype="f4", chunks=(20, 8))
    array[...] = with_bad_row(37, np.inf)
    with pytest.raises(InputError, match=r"sample 37 \(chunk 1, row 17 in it\) of .*y.zarr has NaN or infinity"):
        DBKSVD(16, 2, chunk_size=16).fit(tmp_path / "y.zarr")


def test_lazy_arrays_of_unknown_length_are_refused():
    Y = da.from_array(good(), chunks=(25, 8))
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        DBKSVD(16, 2).fit(Y[Y[:, 0] > 0])


def test_missing_and_empty_stores(tmp_path):
    with pytest.raises(StoreError, match="nothing-here"):
        DBKSVD(16, 2).fit(tmp_path / "nothing-here.zarr")
    zarr.create_array(str(tmp_path / "empty.zarr"), shape=(0, 8), dtype="f4", chunks=(10, 8))
    with pytest.raises((StoreError, InputError), match=r"empty\.zarr"):
        DBKSVD(16, 2).fit(tmp_path / "empty.zarr")


def test_sizes_that_are_legal_and_rarely_meant_are_warned_of(caplog):
    DBKSVD(100, 9, n_iter=1, validation=0).fit(good())
    assert "n_atoms=100 exceeds the 60 training rows: atoms will be single samples" in caplog.text
    assert "k=9 exceeds the 8 features: that many atoms describe any sample exactly" in caplog.text
    caplog.clear()
    DBKSVD(60, 8, n_iter=1, validation=0).fit(good())
    assert "exceeds" not in caplog.text


@pytest.mark.parametrize("call", ["transform", "score", "partial_fit"])
def test_wrong_width_after_a_fit(call):
    model = DBKSVD(16, 2, n_iter=1).fit(good())
    with pytest.raises(InputError, match=r"Y has 9 features, but DBKSVD is expecting 8 features"):
        getattr(model, call)(good(d=9))


def test_wrong_width_of_validation_samples():
    with pytest.raises(InputError, match=r"validation has 9 features"):
        DBKSVD(16, 2, validation=good(d=9)).fit(good())


def test_encode_checks_its_dictionary():
    with pytest.raises(InputError, match=r"k=9 exceeds n_atoms=4"):
        encode(good(), np.eye(4, 8, dtype=np.float32), 9)
    with pytest.raises(InputError, match=r"dictionary has shape \(8,\)"):
        encode(good(), np.ones(8), 1)
    with pytest.raises(InputError, match=r"Y has 8 features"):
        encode(good(), np.eye(4, 9, dtype=np.float32), 2)


def test_codes_of_another_dictionary_are_refused():
    model = DBKSVD(16, 2, n_iter=1).fit(good())
    codes = model.transform(good())
    codes["atom"][0, 0] = 99
    with pytest.raises(MismatchError, match=r"sample 0 names atom 99, but the dictionary has 16 atoms, 0 to 15"):
        model.inverse_transform(codes)
    with pytest.raises(InputError, match=r"codes lack coefficient"):
        model.inverse_transform(codes.drop_vars("coefficient"))
