"""`whiten`: samples are fitted and encoded in other coordinates; atoms and codes are of samples as they are."""

from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode, encode_store, open_codes, open_dictionary, save_dictionary
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.kernels import whiten
from dbksvd_dask.kernels.products import second_moment
from dbksvd_dask.store.dictionary import publish_dictionary
from dbksvd_dask.store.runs import readable_checkpoint
from tests.helpers.cli import run as run_command
from tests.helpers.stores import make_store

PLAIN = {"n_iter": 3, "validation": 0, "momentum": 0.0, "warm_up": False, "batch_size": 600, "chunk_size": 150}


@pytest.fixture(scope="module")
def samples():
    """Samples of which a few directions have most of the variance."""
    rng = np.random.default_rng(5)
    X = rng.uniform(0, 1, (600, 30)) * (rng.random((600, 30)) < 0.15)
    return (X @ rng.standard_normal((30, 12)) @ np.diag(np.geomspace(5, 0.2, 12)) + 2).astype(np.float32)


@pytest.mark.parametrize("how", [{}, {"groups": (4, 8, 12), "nonneg": True, "encode": "staged"}])
def test_it_is_a_fit_of_whitened_samples_mapped_back(samples, how):
    start = np.random.default_rng(0).standard_normal((24, 12)).astype(np.float32)
    model = DBKSVD(24, 4, init=start, whiten=0.5, **PLAIN, **how).fit(samples)
    centred = samples - samples.mean(axis=0)
    maps = whiten.Whitening.of(whiten.whitening(second_moment(centred), 0.5, samples.dtype))
    twin = DBKSVD(24, 4, init=start @ maps.forward, center=False, **PLAIN, **how).fit(centred @ maps.forward)
    # a pursuit that meets a near tie may choose otherwise: nearly all atoms agree
    agree = np.abs(np.sum(model.components_ * maps.back(twin.components_), axis=1))
    assert np.mean(agree > 0.999) > 0.9
    plain = DBKSVD(24, 4, init=start, **PLAIN, **how).fit(samples)
    assert np.mean(np.abs(np.sum(model.components_ * plain.components_, axis=1)) > 0.999) < 0.5


@pytest.mark.parametrize("source", ["array", "store", "lazy"])
def test_same_bits_on_any_scheduler_and_source(samples, source, tmp_path):
    with dask.config.set(scheduler="synchronous"):
        expected = DBKSVD(24, 4, whiten=0.5, **PLAIN).fit(samples).components_
    given = {
        "array": lambda: samples,
        "store": lambda: make_store(tmp_path / "s.zarr", samples, chunk_rows=130),
        "lazy": lambda: da.from_array(samples, chunks=(170, 12)),
    }[source]()
    with dask.config.set(scheduler="threads", num_workers=2):
        got = DBKSVD(24, 4, whiten=0.5, **PLAIN).fit(given).components_
    assert got.tobytes() == expected.tobytes()


def test_resumed_gives_the_same_bits(samples, tmp_path):
    how = PLAIN | {"momentum": 0.6, "whiten": 0.5}
    expected = DBKSVD(24, 4, **how).fit(samples).components_
    DBKSVD(24, 4, checkpoint=tmp_path / "run", **{**how, "n_iter": 2}).fit(samples)
    again = DBKSVD(24, 4, checkpoint=tmp_path / "run", **how).fit(samples, resume=True)
    assert again.components_.tobytes() == expected.tobytes()


def test_codes_are_those_of_whitened_samples_and_figures_those_of_samples(samples, tmp_path):
    model = DBKSVD(24, 4, whiten=0.5, **{**PLAIN, "validation": samples[:100]}).fit(samples)
    codes = model.transform(samples)
    white = whiten.Whitening.of(model.to_dictionary().whitening)
    twin = encode((samples - model.mean_).astype("f4") @ white.forward, white.into(model.components_), 4)
    assert (codes["atom"].values == twin["atom"].values).mean() > 0.99  # a near tie may fall otherwise
    R = samples[:100] - model.inverse_transform(codes.isel(sample=slice(100)))
    error = np.mean(np.linalg.norm(R, axis=1) / np.linalg.norm(samples[:100] - model.mean_, axis=1))
    assert float(model.history_["validation_relative_error"][-1]) == pytest.approx(error, rel=1e-4)
    left = samples - model.inverse_transform(codes)
    assert model.score(samples) == pytest.approx(np.mean(1 - left.var(axis=0) / samples.var(axis=0)), rel=1e-4)
    loaded = DBKSVD.load(model.save(tmp_path / "d.zarr"))
    assert loaded.whiten == 0.5
    assert loaded.transform(samples).equals(codes)
    assert not encode(samples, model.components_, 4, mean=model.mean_).equals(codes)


def test_a_dictionary_encodes_a_store_as_it_does_an_array(samples, tmp_path):
    model = DBKSVD(24, 4, whiten=0.5, refit=True, **PLAIN).fit(samples)
    store = make_store(tmp_path / "s.zarr", samples, chunk_rows=130)
    run = model.save(tmp_path / "d.zarr")
    expected = model.transform(samples)
    for part in ((1, 2), (2, 2)):
        encode_store(store, run, tmp_path / "codes.zarr", part=part)
    encode_store(store, run, tmp_path / "codes.zarr")
    stored = open_codes(tmp_path / "codes.zarr")
    for name in ("atom", "coefficient"):
        assert stored[name].values.tobytes() == expected[name].values.tobytes()
        assert encode(samples[7:9], run)[name].shape == (2, 4)
    assert stored.attrs["metrics"]["variance_explained"] == pytest.approx(model.score(samples), rel=1e-5)


def test_a_fit_begun_before_dictionaries_kept_the_map_goes_on(samples, tmp_path):
    how = PLAIN | {"whiten": 0.5}
    expected = DBKSVD(24, 4, **how).fit(samples).components_
    DBKSVD(24, 4, checkpoint=tmp_path / "run", **{**how, "n_iter": 2}).fit(samples)
    newest, state, _ = readable_checkpoint(tmp_path / "run")
    publish_dictionary(newest, replace(state, whitening=None))
    again = DBKSVD(24, 4, checkpoint=tmp_path / "run", **how).fit(samples, resume=True)
    assert again.components_.tobytes() == expected.tobytes()


def test_a_damaged_map_is_refused(samples, tmp_path):
    model = DBKSVD(24, 4, whiten=0.5, **PLAIN).fit(samples)
    with pytest.raises(StoreError, match=r"`whitening` has shape \(3, 3\) instead of \(12, 12\)"):
        open_dictionary(save_dictionary(tmp_path / "d", replace(model.to_dictionary(), whitening=np.eye(3))))


def test_bad_values_and_combinations_are_refused_in_one_line(samples):
    with pytest.raises(InputError, match=r"whiten=1.5 must lie between 0"):
        DBKSVD(24, 4, whiten=1.5).fit(samples)
    with pytest.raises(InputError, match=r"whiten=-1 is not a finite number"):
        DBKSVD(24, 4, whiten=-1).fit(samples)
    with pytest.raises(InputError, match=r"growth=1.5 measures residuals.*leave out whiten=0.5"):
        DBKSVD(24, 4, whiten=0.5, growth=1.5).fit(samples)
    with pytest.raises(InputError, match=r"whiten=0.5 needs the covariance of all samples; begin with fit"):
        DBKSVD(24, 4, whiten=0.5).partial_fit(samples)
    plain = DBKSVD(24, 4, **PLAIN).fit(samples).set_params(whiten=0.5)
    with pytest.raises(InputError, match=r"whiten=0.5 needs the covariance of all samples"):
        plain.partial_fit(samples)


def test_batches_go_on_from_a_fitted_or_stored_dictionary_with_its_map(samples, tmp_path):
    model = DBKSVD(24, 4, whiten=0.5, **PLAIN).fit(samples)
    again, further = DBKSVD.load(model.save(tmp_path / "d.zarr")), model.to_dictionary().whitening
    again.partial_fit(samples)
    model.partial_fit(samples)
    assert again.n_iter_ == 4
    assert again.components_.tobytes() == model.components_.tobytes()
    assert model.to_dictionary().whitening.tobytes() == further.tobytes()
    with pytest.raises(InputError, match=r"whiten=0.0, but this dictionary was fitted with whiten=0.5"):
        model.set_params(whiten=0.0).partial_fit(samples)


def test_the_plan_counts_it(samples):
    plain, white = (DBKSVD(24, 4, whiten=a, **PLAIN).plan(samples) for a in (0.0, 0.5))
    assert white.working > plain.working


def test_the_command_takes_and_refuses_it(samples, tmp_path, capsys):
    store = make_store(tmp_path / "s.zarr", samples, chunk_rows=600)
    given = ["fit", store, tmp_path / "run", "--n-atoms", 24, "--k", 4, "--n-iter", 1, "--whiten"]
    code, _, err = run_command(capsys, *given, 2)
    assert code == 1
    assert "--whiten 2" in err
    code, out, _ = run_command(capsys, *given, 0.5, "--validation", 0)
    assert code == 0
    assert "; relative error of whitened samples 0." in out
    assert "whiten" in run_command(capsys, "info", tmp_path / "run")[1]
