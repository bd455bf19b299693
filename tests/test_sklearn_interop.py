"""The estimator inside scikit-learn's own machinery: Pipeline, GridSearchCV, clone, joblib."""

import pickle

import joblib
import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dbksvd_dask import DBKSVD, codes_to_csr
from dbksvd_dask.errors import InputError

OPTIONS = {"n_iter": 3, "batch_size": 128, "validation": 0}


@pytest.fixture(scope="module")
def clusters():
    """300 samples of three classes, each a few directions of its own: (Y, label)."""
    rng = np.random.default_rng(3)
    directions = rng.standard_normal((3, 2, 12))
    label = np.arange(300) % 3
    weights = rng.uniform(1.0, 3.0, (300, 2, 1))
    Y = (directions[label] * weights).sum(axis=1) + 0.1 * rng.standard_normal((300, 12))
    return Y.astype(np.float32), label


def test_sparse_output_is_the_codes_as_csr(clusters):
    Y, _ = clusters
    model = DBKSVD(16, 3, **OPTIONS).fit(Y)
    codes = model.transform(Y)
    X = clone(model).set_params(output="sparse").fit(Y).transform(Y)
    assert isinstance(X, sp.csr_array)
    assert X.shape == (300, 16)
    assert X.dtype == np.float32
    expected = np.zeros((300, 16), np.float32)
    for i in range(300):
        for j, a in zip(codes["atom"].data[i], codes["coefficient"].data[i], strict=True):
            if j >= 0:
                expected[i, j] = a
    np.testing.assert_array_equal(X.toarray(), expected)


def test_sparse_output_of_lazy_samples_is_in_memory(clusters):
    import dask.array as da

    Y, _ = clusters
    model = DBKSVD(16, 3, output="sparse", **OPTIONS).fit(Y)
    lazy = model.transform(da.from_array(Y, chunks=(100, 12)))
    np.testing.assert_allclose(lazy.toarray(), model.transform(Y).toarray(), atol=1e-5)


def test_inverse_transform_takes_both_outputs(clusters):
    Y, _ = clusters
    model = DBKSVD(16, 3, **OPTIONS).fit(Y)
    codes = model.transform(Y)
    from_csr = model.inverse_transform(codes_to_csr(codes))
    np.testing.assert_allclose(from_csr, model.inverse_transform(codes), atol=1e-6)
    assert from_csr.dtype == np.float32
    with pytest.raises(InputError, match=r"codes have 15 columns but the dictionary has 16 atoms"):
        model.inverse_transform(codes_to_csr(codes)[:, :15])


def test_unknown_output_is_refused_at_fit(clusters):
    with pytest.raises(InputError, match=r"output='dense' is not known; use one of 'codes', 'sparse'"):
        DBKSVD(16, 3, output="dense", **OPTIONS).fit(clusters[0])


def test_pipeline_classifies_from_codes(clusters):
    Y, label = clusters
    pipeline = make_pipeline(
        StandardScaler(), DBKSVD(16, 3, output="sparse", **OPTIONS), LogisticRegression(max_iter=500)
    )
    pipeline.fit(Y[:200], label[:200])
    assert pipeline.score(Y[200:], label[200:]) > 0.9
    assert pipeline[:-1].get_feature_names_out()[:2].tolist() == ["atom0", "atom1"]
    X = pipeline[:-1].transform(Y)
    again = pipeline[:-1].inverse_transform(X)
    assert np.linalg.norm(again - Y) < 0.5 * np.linalg.norm(Y)


def test_feature_names_only_for_columns():
    assert not hasattr(DBKSVD(16, 3), "get_feature_names_out")


@pytest.mark.slow
def test_grid_search_over_a_pipeline_and_alone(clusters):
    Y, label = clusters
    pipeline = make_pipeline(DBKSVD(16, 1, output="sparse", **OPTIONS), LogisticRegression(max_iter=500))
    search = GridSearchCV(pipeline, {"dbksvd__k": [1, 3], "dbksvd__nonneg": [False, True]}, cv=2)
    search.fit(Y, label)
    assert search.best_score_ > 0.9
    alone = GridSearchCV(DBKSVD(16, 1, **OPTIONS), {"k": [1, 4]}, cv=2).fit(Y)
    assert alone.best_params_ == {"k": 4}  # more atoms per sample explain more


@pytest.mark.cluster
def test_grid_search_gives_the_same_in_worker_processes(clusters):
    Y, _ = clusters
    grid = {"k": [1, 2]}
    here = GridSearchCV(DBKSVD(8, 1, **OPTIONS), grid, cv=2).fit(Y)
    with joblib.parallel_backend("loky", n_jobs=2):
        there = GridSearchCV(DBKSVD(8, 1, **OPTIONS), grid, cv=2).fit(Y)
    np.testing.assert_array_equal(here.cv_results_["mean_test_score"], there.cv_results_["mean_test_score"])


def test_fitted_estimator_survives_pickle_and_joblib(clusters, tmp_path):
    Y, _ = clusters
    model = DBKSVD(16, 3, output="sparse", **OPTIONS).fit(Y)
    joblib.dump(model, tmp_path / "model.joblib")
    for copy in (pickle.loads(pickle.dumps(model)), joblib.load(tmp_path / "model.joblib")):
        np.testing.assert_array_equal(copy.transform(Y).toarray(), model.transform(Y).toarray())
        assert copy.get_params() == model.get_params()


def test_clone_of_a_fitted_estimator_fits_the_same(clusters):
    Y, _ = clusters
    model = DBKSVD(16, 3, **OPTIONS).fit(Y)
    copy = clone(model)
    assert not hasattr(copy, "components_")
    np.testing.assert_array_equal(copy.fit(Y).components_, model.components_)
