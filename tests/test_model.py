"""The estimator: fitted state, every kind of input, codes, history, edges."""

import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr

from dbksvd_dask import DBKSVD, codes_to_csr, encode, events
from tests.naive import kernels


@pytest.fixture
def Y(rng):
    return rng.standard_normal((400, 20)).astype(np.float32)


@pytest.fixture
def model(Y):
    return DBKSVD(32, 3, n_iter=3, batch_size=150, chunk_size=50).fit(Y)


def test_fitted_state(model, Y):
    assert model.dictionary_.dims == ("atom", "feature")
    assert model.components_.shape == (32, 20)
    assert model.components_.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(model.components_, axis=1), 1, atol=1e-6)
    assert model.mean_.shape == (20,)
    assert model.n_iter_ == 3
    assert model.n_features_in_ == 20


def test_history_has_every_promised_column(model):
    assert set(model.history_.data_vars) == {
        "relative_error_before",
        "relative_error",
        "variance_explained_before",
        "variance_explained",
        "validation_relative_error",
        "validation_variance_explained",
        "dead_atoms",
        "nonzeros",
        "encode_seconds",
        "update_seconds",
    }
    assert model.history_.sizes["iteration"] == 3
    assert bool(model.history_.notnull().all().to_array().all())


def test_codes_reconstruct_and_score_is_variance_explained(model, Y):
    codes = model.transform(Y)
    assert codes["atom"].dtype == np.int32
    assert codes["coefficient"].dtype == np.float32
    X = kernels.dense(codes["atom"].values, codes["coefficient"].values, 32)
    expected = X @ model.components_ + model.mean_
    np.testing.assert_allclose(model.inverse_transform(codes), expected, atol=1e-5)
    explained = 1 - np.mean((Y - expected).var(axis=0) / Y.var(axis=0))
    np.testing.assert_allclose(model.score(Y), explained, rtol=1e-5)


def test_codes_as_scipy_matrix(model, Y):
    codes = model.transform(Y)
    matrix = codes_to_csr(codes)
    assert matrix.shape == (400, 32)
    np.testing.assert_allclose(
        matrix.toarray(), kernels.dense(codes["atom"].values, codes["coefficient"].values, 32), atol=1e-6
    )


def kinds(Y, tmp_path):
    array = zarr.create_array(str(tmp_path / "y.zarr"), shape=Y.shape, dtype=Y.dtype, chunks=(90, 20))
    array[...] = Y
    return {
        "numpy": Y,
        "dask": da.from_array(Y, chunks=(90, 7)),
        "xarray": xr.DataArray(Y, dims=("sample", "feature"), coords={"sample": np.arange(400) * 2}),
        "xarray on dask": xr.DataArray(da.from_array(Y, chunks=(90, 20)), dims=("sample", "feature")),
        "zarr": str(tmp_path / "y.zarr"),
        "path": tmp_path / "y.zarr",
    }


def test_every_kind_of_input_encodes_the_same(model, Y, tmp_path):
    expected = model.transform(Y)
    for name, samples in kinds(Y, tmp_path).items():
        codes = model.transform(samples)
        lazy = name not in ("numpy", "xarray")
        assert (codes["atom"].chunks is not None) == lazy, name
        np.testing.assert_array_equal(codes["atom"].values, expected["atom"].values, err_msg=name)
        np.testing.assert_allclose(codes["coefficient"].values, expected["coefficient"].values, atol=1e-6)
        np.testing.assert_allclose(model.score(samples), model.score(Y), rtol=1e-6)


def test_every_kind_of_input_fits(Y, tmp_path):
    for name, samples in kinds(Y, tmp_path).items():
        model = DBKSVD(32, 3, n_iter=2, batch_size=150, chunk_size=50).fit(samples)
        assert model.components_.shape == (32, 20), name
        assert model.history_["variance_explained"][-1] > 0.2, name


def test_labels_of_samples_survive(model, Y, tmp_path):
    codes = model.transform(kinds(Y, tmp_path)["xarray"])
    np.testing.assert_array_equal(codes["sample"], np.arange(400) * 2)


def test_encode_as_a_function_equals_transform(model, Y):
    codes = encode(Y, model.dictionary_, 3, mean=model.mean_)
    np.testing.assert_array_equal(codes["atom"], model.transform(Y)["atom"])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes(Y, dtype):
    model = DBKSVD(32, 3, n_iter=2).fit(Y.astype(dtype))
    expected = np.float64 if dtype == np.float64 else np.float32
    assert model.components_.dtype == expected
    assert model.transform(Y.astype(dtype))["coefficient"].dtype == expected


def test_inputs_are_never_changed_and_may_be_read_only(Y):
    locked = np.asfortranarray(Y)
    locked.flags.writeable = False
    a = DBKSVD(32, 3, n_iter=2).fit(locked)
    b = DBKSVD(32, 3, n_iter=2).fit(Y.copy())
    assert a.components_.tobytes() == b.components_.tobytes()


def test_partial_fit_goes_on_from_batch_to_batch(Y):
    model = DBKSVD(32, 3, validation=0)
    for part in (Y[:130], Y[130:260], Y[260:]):
        model.partial_fit(part)
    assert model.n_iter_ == 3
    assert model.history_.sizes["iteration"] == 3
    assert model.score(Y) > 0.2


def test_warm_start_from_an_array(Y, model):
    again = DBKSVD(32, 3, n_iter=1, init=model.dictionary_, validation=0).fit(Y)
    cold = DBKSVD(32, 3, n_iter=1, init="uniform", validation=0).fit(Y)
    assert again.history_["variance_explained_before"][0] > cold.history_["variance_explained_before"][0] + 0.05


def test_init_from_data_takes_samples(Y):
    from dbksvd_dask.fit.trainer import Trainer
    from dbksvd_dask.graph.sources import as_source
    from dbksvd_dask.plan.params import FitParams

    trainer = Trainer(as_source(Y, 64), FitParams.checked(n_atoms=32, k=3, init="data", center=False))
    atoms = trainer.start().atoms
    directions = kernels.unit_rows(Y)
    assert (np.abs(atoms @ directions.T).max(axis=1) > 1 - 1e-5).all()


def test_where_there_are_fewer_samples_than_atoms_the_rest_are_random(Y):
    from dbksvd_dask.fit.trainer import Trainer
    from dbksvd_dask.graph.sources import as_source
    from dbksvd_dask.plan.params import FitParams

    params = {"n_atoms": 32, "k": 3, "center": False, "validation": 0}
    few = Y[:20]
    atoms = Trainer(as_source(few, 64), FitParams.checked(**params)).start().atoms
    random = Trainer(as_source(few, 64), FitParams.checked(**params, init="uniform")).start().atoms
    near = np.abs(atoms @ kernels.unit_rows(few).T) > 1 - 1e-5
    assert near[:20].any(axis=0).all()  # every sample once
    assert near[:20].sum() == 20
    np.testing.assert_array_equal(atoms[20:], random[20:])


def test_validation_rows_never_train(Y):
    from dbksvd_dask.fit.trainer import Trainer
    from dbksvd_dask.graph.sources import as_source
    from dbksvd_dask.plan.params import FitParams

    trainer = Trainer(as_source(Y, 64), FitParams.checked(n_atoms=32, k=3, batch_size=90, validation=40))
    held = set(trainer.stream.validation_rows().tolist())
    assert len(held) == 40
    for t in range(12):
        assert held.isdisjoint(trainer.stream.batch(t).tolist())


def test_validation_may_be_an_array(Y):
    history = DBKSVD(32, 3, n_iter=2, validation=Y[:50]).fit(Y[50:]).history_
    assert "validation_variance_explained" in history


def test_no_validation_leaves_its_columns_out(Y):
    history = DBKSVD(32, 3, n_iter=1, validation=0).fit(Y).history_
    assert "validation_variance_explained" not in history


@pytest.mark.parametrize(
    "case",
    [
        {"n": 1, "n_atoms": 4, "k": 1},
        {"n": 7, "n_atoms": 3, "k": 3},
        {"n": 65, "n_atoms": 8, "k": 2, "chunk_size": 64, "batch_size": 65},
        {"n": 50, "n_atoms": 100, "k": 5, "n_rounds": 200},
    ],
)
def test_edges_fit_and_encode(rng, case):
    n = case.pop("n")
    Y = rng.standard_normal((n, 6)).astype(np.float32)
    model = DBKSVD(n_iter=3, validation=0, **case).fit(Y)
    assert np.isfinite(model.components_).all()
    assert model.transform(Y).sizes == {"sample": n, "slot": case["k"]}


def test_constant_and_zero_rows_are_harmless(rng):
    Y = rng.standard_normal((60, 8)).astype(np.float32)
    Y[::3] = 0
    Y[:, 5] = 2.5
    model = DBKSVD(16, 2, n_iter=3, center=False).fit(Y)
    assert np.isfinite(model.components_).all()
    assert np.isfinite(model.score(Y))


def test_more_iterations_explain_more(patches):
    # from random atoms: on so few rows a start from samples is nearly there after one iteration
    history = DBKSVD(96, 6, n_iter=12, validation=60, init="uniform").fit(patches).history_
    held = history["validation_variance_explained"].values
    assert held[-1] > held[0] + 0.01


def test_non_negative_codes_are_non_negative(Y):
    model = DBKSVD(32, 4, n_iter=3, nonneg=True, refit=True).fit(Y)
    assert (model.transform(Y)["coefficient"] >= 0).all()


def test_progress_events_tell_the_story(Y):
    from dbksvd_dask import events

    seen = []
    DBKSVD(32, 3, n_iter=3, batch_size=150, callbacks=[seen.append]).fit(Y)
    kinds_seen = [type(e) for e in seen if not isinstance(e, events.RoundFinished)]
    step = [events.BatchStarted, events.BatchFinished]
    assert kinds_seen == [events.FitStarted, *step, *step, *step, events.FitFinished]
    finished = [e for e in seen if isinstance(e, events.BatchFinished)]
    assert finished[-1].seconds_left == 0
    assert finished[0].record["relative_error"] > 0


def test_a_failing_callback_does_not_end_the_run(Y, caplog):
    def broken(event):
        raise RuntimeError("boom")

    DBKSVD(32, 3, n_iter=1, callbacks=[broken]).fit(Y)
    assert "a progress callback failed" in caplog.text


def test_a_fit_warms_up_with_small_batches_and_goes_on_inside_it(rng, tmp_path):
    Y = rng.standard_normal((20_000, 12)).astype(np.float32)
    seen = []
    settings = {"n_atoms": 24, "k": 2, "batch_size": 16_384, "validation": 0, "n_iter": 4}
    whole = DBKSVD(**settings, callbacks=[seen.append]).fit(Y)
    assert [e.n_samples for e in seen if isinstance(e, events.BatchFinished)] == [8192, 8192, 16_384, 16_384]
    DBKSVD(**(settings | {"n_iter": 1}), checkpoint=tmp_path / "run").fit(Y)
    resumed = DBKSVD(**settings, checkpoint=tmp_path / "run").fit(Y, resume=True)
    np.testing.assert_array_equal(whole.components_, resumed.components_)
    plain = DBKSVD(**settings, warm_up=False, callbacks=[seen.append]).fit(Y)
    assert [e.n_samples for e in seen if isinstance(e, events.BatchFinished)][-4:] == [16_384] * 4
    assert not np.array_equal(plain.components_, whole.components_)
