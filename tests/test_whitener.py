"""`Whitener`: samples in whitened coordinates, and back."""

import dask
import dask.array as da
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline

from dbksvd_dask import DBKSVD, Whitener, open_activations
from dbksvd_dask.errors import InputError, StoreError
from tests.helpers.stores import make_store


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(5)
    scale = np.array([40.0, 9, 4, 2, 1, 1, 1, 1, 0.5, 0.5, 0.3, 0.3])
    turn = np.linalg.qr(rng.standard_normal((12, 12)))[0]
    return (rng.standard_normal((2011, 12)) * scale @ turn + 7).astype(np.float32)


@pytest.fixture(scope="module")
def whitener(samples):
    return Whitener(chunk_size=500).fit(samples)


def test_it_is_the_power_of_the_covariance(samples, whitener):
    """Its twin: an eigendecomposition in plain NumPy."""
    centred = samples.astype(np.float64) - samples.mean(axis=0, dtype=np.float64)
    variances, directions = np.linalg.eigh(centred.T @ centred)
    variances = np.maximum(variances, 1e-3 * variances.mean())  # below lies what samples do not use
    wanted = centred @ directions / variances**0.25 @ directions.T
    wanted *= np.sqrt(np.square(centred).sum() / np.square(wanted).sum())
    np.testing.assert_allclose(whitener.transform(samples), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("exponent", "spread"), [(0.0, 80**2), (0.5, 80.0), (1.0, 1.2)])
def test_the_exponent_decides_how_alike_directions_are(samples, exponent, spread):
    found = Whitener(exponent).fit(samples).transform(samples)
    variances = np.linalg.eigvalsh(np.cov(found.T.astype(np.float64)))
    assert spread / 3 < variances[-1] / variances[0] < spread * 3


def test_back_and_forth_changes_nothing(samples, whitener):
    np.testing.assert_allclose(
        whitener.inverse_transform(whitener.transform(samples)), samples, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("chunks", [(37, 12), (500, 5), (2011, 12)])
def test_the_same_bits_however_samples_are_cut(chunks, samples, whitener, tmp_path):
    lazy = da.from_array(samples, chunks=chunks)
    store = str(make_store(tmp_path / "s.zarr", samples, chunk_rows=chunks[0]))
    wanted = whitener.transform(samples).tobytes()
    for given in (lazy, store, open_activations(store), open_activations(store)["activations"]):
        found = whitener.transform(given)
        assert isinstance(found, da.Array)
        with dask.config.set(scheduler="threads", num_workers=2):
            assert np.asarray(found).tobytes() == wanted
            other = Whitener(chunk_size=500).fit(given)
        assert other.forward_.tobytes() == whitener.forward_.tobytes()


def test_a_fit_on_whitened_samples_of_a_store_is_that_of_the_array(samples, whitener, tmp_path):
    store = str(make_store(tmp_path / "s.zarr", samples, chunk_rows=300))
    how = {"n_atoms": 24, "k": 3, "n_iter": 4, "batch_size": 1024, "chunk_size": 256}
    one = DBKSVD(**how).fit(whitener.transform(samples))
    other = DBKSVD(**how).fit(whitener.transform(store))
    assert one.components_.tobytes() == other.components_.tobytes()


def test_weak_directions_are_reconstructed_better(samples):
    """What it is for: at the same number of nonzeros, features of small variance lose less."""

    def left(whitened):
        whitener = Whitener(whitened).fit(samples)
        model = DBKSVD(24, 3, n_iter=12, refit=True, validation=0).fit(whitener.transform(samples))
        back = whitener.inverse_transform(model.inverse_transform(model.transform(whitener.transform(samples))))
        turned = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)[2]
        error, whole = ((part @ turned.T).var(axis=0) for part in (samples - back, samples))
        return (error / whole).mean()

    assert left(0.5) < 0.8 * left(0.0)


def test_it_is_a_transformer(samples):
    pipeline = make_pipeline(Whitener(exponent=0.25), DBKSVD(16, 2, n_iter=2, output="sparse"))
    assert pipeline.fit_transform(samples).shape == (2011, 16)
    assert clone(pipeline).get_params()["whitener__exponent"] == 0.25


def test_saved_and_loaded_it_is_the_same(samples, whitener, tmp_path):
    whitener.save(tmp_path / "w.npz")
    again = Whitener.load(tmp_path / "w.npz")
    assert again.get_params() == whitener.get_params()
    assert again.transform(samples).tobytes() == whitener.transform(samples).tobytes()


def test_bad_input_is_refused_in_words(samples, whitener, tmp_path):
    with pytest.raises(InputError, match="Y has 5 features, the Whitener 12"):
        whitener.transform(samples[:, :5])
    with pytest.raises(InputError, match=r"Z has shape \(3, 4\); it must be \(n_samples, 12\)"):
        whitener.inverse_transform(np.zeros((3, 4)))
    with pytest.raises(InputError, match=r"exponent=1\.5 must lie between 0 and 1"):
        Whitener(1.5).fit(samples)
    with pytest.raises(NotFittedError):
        Whitener().transform(samples)
    with pytest.raises(InputError, match="NaN"):
        Whitener().fit(np.full((10, 3), np.nan, np.float32))
    (tmp_path / "no.npz").write_bytes(b"PK nothing")
    with pytest.raises(StoreError, match="is not a Whitener that was saved"):
        Whitener.load(tmp_path / "no.npz")
