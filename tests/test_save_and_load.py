"""A fitted estimator that saves itself, and one that is opened from a dictionary or a run."""

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode, encode_store, import_activations, open_codes, open_dictionary
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store.dictionary import save_dictionary

GROWN = {"growth": 2.0, "n_iter": 16, "sparsity": "mean", "nonneg": True, "validation": 0}
MODES = {
    "plain": {},
    "omp": {"encoder": "omp", "center": False},
    "nonneg": {"nonneg": True, "refit": True},
    "staged": {"groups": (8, 16), "encode": "staged"},
    "threshold": {"sparsity": "mean"},
    "grown": GROWN | {"encode": "staged"},
    "prior": GROWN | {"frequency_prior": True},
}


@pytest.fixture(scope="module")
def Y():
    rng = np.random.default_rng(5)
    X = rng.standard_normal((300, 5)) @ rng.standard_normal((5, 12)) + 0.3 * rng.standard_normal((300, 12))
    return (X + 1).astype(np.float32)


@pytest.fixture(scope="module")
def fitted(Y):
    """Estimators by mode, each fitted once."""
    made = {}

    def fit(mode):
        if mode not in made:
            made[mode] = DBKSVD(24, 3, **{"n_iter": 3, "chunk_size": 100, **MODES[mode]}).fit(Y)
        return made[mode]

    return fit


def same_codes(a, b):
    for name in ("atom", "coefficient"):
        assert a[name].values.tobytes() == b[name].values.tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_estimator_encodes_as_before(Y, fitted, tmp_path, mode):
    model = fitted(mode)
    path = model.save(tmp_path / "d.zarr")
    again = DBKSVD.load(path)
    same_codes(model.transform(Y), again.transform(Y))
    same_codes(model.transform(Y), encode(Y, path, chunk_size=100))
    same_codes(model.transform(Y), encode(Y, model, chunk_size=100))
    assert model.score(Y) == again.score(Y)
    np.testing.assert_array_equal(*(one.inverse_transform(one.transform(Y)) for one in (model, again)))
    plain = {name: value for name, value in model.get_params().items() if name != "init"}
    # what was left to rules has been decided
    plain |= {name: model.to_dictionary().params[name] for name in ("n_rounds", "lanczos_steps", "sparsity")}
    assert plain | {"callbacks": ()} == {n: v for n, v in again.get_params().items() if n != "init"}
    for name in ("components_", "mean_", "n_iter_", "threshold_", "n_features_in_"):
        np.testing.assert_array_equal(getattr(model, name), getattr(again, name), err_msg=name)
    assert model.history_.equals(again.history_)


def test_modes_differ_in_what_a_load_has_to_know(Y, fitted):
    """Encoded without what is stored beside the atoms, the codes are others: the test above can fail."""
    for mode in ("omp", "nonneg", "staged", "threshold", "grown", "prior"):
        model = fitted(mode)
        bare = encode(Y, model.components_, 3, mean=model.mean_, chunk_size=100)
        assert not bare.equals(model.transform(Y)), mode


def test_a_run_opens_as_its_estimator(Y, tmp_path):
    model = DBKSVD(24, 3, n_iter=3, chunk_size=100, checkpoint=tmp_path / "run").fit(Y)
    same_codes(model.transform(Y), DBKSVD.load(tmp_path / "run").transform(Y))
    same_codes(model.transform(Y), encode(Y, tmp_path / "run", chunk_size=100))


def test_a_loaded_estimator_continues_as_the_one_that_was_saved(Y, tmp_path):
    model = DBKSVD(24, 3, validation=0)
    model.partial_fit(Y[:150])
    again = DBKSVD.load(model.save(tmp_path / "d.zarr"))
    a, b = model.partial_fit(Y[150:]), again.partial_fit(Y[150:])
    assert a.components_.tobytes() == b.components_.tobytes()
    assert b.n_iter_ == 2


def test_parameters_that_are_set_after_the_fit_are_saved_too(Y, fitted, tmp_path):
    model = DBKSVD.load(fitted("plain").save(tmp_path / "a.zarr")).set_params(refit=True)
    again = DBKSVD.load(model.save(tmp_path / "b.zarr"))
    assert again.refit
    same_codes(model.transform(Y), again.transform(Y))
    assert not model.transform(Y).equals(fitted("plain").transform(Y))


def test_save_replaces_only_when_it_is_told_to(fitted, tmp_path):
    path = fitted("plain").save(tmp_path / "d.zarr")
    with pytest.raises(StoreError, match="exists"):
        fitted("omp").save(path)
    assert open_dictionary(path).params["encoder"] == "mp"
    fitted("omp").save(path, overwrite=True)
    assert open_dictionary(path).params["encoder"] == "omp"


def test_a_dictionary_without_k_is_not_an_estimator(make_dictionary, tmp_path):
    save_dictionary(tmp_path / "d.zarr", Dictionary(make_dictionary(16, 12), None, {"n_atoms": 16}))
    with pytest.raises(InputError, match=r"does not say how many nonzeros .*use encode\(Y, path, k="):
        DBKSVD.load(tmp_path / "d.zarr")


def test_a_whole_store_is_encoded_with_a_fitted_estimator(Y, fitted, tmp_path):
    np.save(tmp_path / "Y.npy", Y)
    store = import_activations(tmp_path / "Y.npy", tmp_path / "Y.zarr").path
    encode_store(store, fitted("prior"), tmp_path / "codes.zarr")
    found = open_codes(tmp_path / "codes.zarr")
    np.testing.assert_array_equal(found["atom"].values, fitted("prior").transform(Y)["atom"].values)


@pytest.mark.parametrize("kind", ["run", "dictionary", "npy"])
def test_a_fit_starts_from_a_stored_dictionary(Y, fitted, tmp_path, kind):
    if kind == "run":
        model = DBKSVD(24, 3, n_iter=3, chunk_size=100, checkpoint=tmp_path / "run").fit(Y)
        path = tmp_path / "run"
    else:
        model = fitted("plain")
        path = str(tmp_path / "d.npy") if kind == "npy" else model.save(tmp_path / "d.zarr")
        if kind == "npy":
            np.save(path, model.components_)
    given, read = (DBKSVD(24, 3, n_iter=1, init=init).fit(Y) for init in (model.components_, path))
    assert given.components_.tobytes() == read.components_.tobytes()
    assert read.to_dictionary().params["init"] == "array"


def test_a_fit_starts_from_a_run_on_an_object_store(Y, fitted):
    model = fitted("plain")
    path = model.save("memory://dictionaries/first")
    given, read = (DBKSVD(24, 3, n_iter=1, init=init).fit(Y) for init in (model.components_, path))
    assert given.components_.tobytes() == read.components_.tobytes()
    with pytest.raises(InputError, match="init='memory://nowhere/at/all' is not known"):
        DBKSVD(24, 3, init="memory://nowhere/at/all").fit(Y)


def test_the_stored_first_dictionary_must_have_the_shape_of_the_fit(Y, fitted, tmp_path):
    path = fitted("plain").save(tmp_path / "d.zarr")
    with pytest.raises(InputError, match=r"init has shape \(24, 12\); it must be .* \(20, 12\)"):
        DBKSVD(20, 3, init=path).fit(Y)


def test_a_first_dictionary_that_is_not_there_is_refused(Y, tmp_path):
    with pytest.raises(InputError, match=r"init='.*missing' is not known; use 'uniform', 'data', or the path"):
        DBKSVD(20, 3, init=str(tmp_path / "missing")).fit(Y)
