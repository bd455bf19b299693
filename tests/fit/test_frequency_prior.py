"""The frequency prior: atoms that few samples use need larger coefficients, in every path that encodes."""

import dask
import numpy as np
import pytest
import xarray as xr
import zarr
from scipy.stats import spearmanr

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.codes import open_codes
from dbksvd_dask.dictionary import dictionary_fingerprint
from dbksvd_dask.errors import InputError
from dbksvd_dask.export.check import encode_spec
from dbksvd_dask.fit import growing
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.report import write_report
from dbksvd_dask.store.runs import open_dictionary
from tests.naive import groups

HOW = {"growth": 1.5, "nonneg": True, "sparsity": "mean", "frequency_prior": True, "n_iter": 16, "validation": 0}


def samples(rng, n=1500, d=24):
    truth = rng.standard_normal((40, d))
    active = rng.random((n, 40)) < np.geomspace(0.3, 0.005, 40)
    return (active @ truth + 0.3 * rng.standard_normal((n, d))).astype(np.float32)


@pytest.mark.parametrize("nonneg", [False, True])
def test_weighted_codes_equal_the_twin(rng, make_dictionary, nonneg):
    Y, D = rng.standard_normal((200, 24)), make_dictionary(300, 24, np.float64)
    weights = AtomWeights(rng.uniform(0.5, 2.0, 300), rng.uniform(0.1, 1.0, 300))
    spec = EncodeSpec(6, nonneg=nonneg, min_coefficient=0.5)
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), spec, weights)
    n_differ = 0
    plain, _ = encode_rows(Y, D, gram_matrix(D), spec)
    for i, y in enumerate(Y):
        floors = 0.5 * weights.threshold
        support, x = groups.weighted(y, D, floors, weights.preference, 6, nonneg=nonneg)
        assert atom[i][atom[i] >= 0].tolist() == support
        np.testing.assert_allclose(coefficient[i][: len(support)], x, atol=1e-6)
        n_differ += atom[i].tolist() != plain[i].tolist()
    assert n_differ > 100


@pytest.mark.parametrize("nonneg", [False, True])
def test_refit_is_least_squares_on_the_support(rng, make_dictionary, nonneg):
    Y, D = rng.standard_normal((100, 24)), make_dictionary(40, 24, np.float64)
    weights = AtomWeights(np.ones(40), rng.uniform(0.1, 1.0, 40))
    spec = EncodeSpec(6, nonneg=nonneg, refit=True, min_coefficient=0.5)
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), spec, weights)
    for y, row, x in zip(Y, atom, coefficient, strict=True):
        used = row[(row >= 0) & (x != 0)]
        np.testing.assert_allclose(D[used] @ (y - x[row >= 0] @ D[row[row >= 0]]), 0, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"nonneg": True}, {"rtol": 0.5}, {"min_coefficient": 0.5}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_weights_change_nothing(rng, make_dictionary, whole_gram, how, dtype):
    Y, D = rng.standard_normal((100, 24)).astype(dtype), make_dictionary(300, 24, dtype)
    Y[3] = 0
    spec, weights = EncodeSpec(6, **how), AtomWeights(np.ones(300), np.ones(300))
    gram = gram_matrix(D)
    weighted = encode_rows(Y, D, gram, spec, weights)
    for a, b in zip(encode_rows(Y, D, gram, spec), weighted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)  # float32 products may come from a compact gram
    with whole_gram():
        for a, b in zip(encode_rows(Y, D, gram, spec), weighted, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 2.0])
def test_weights_equal_the_twin(noise):
    counts = np.array([990, 600, 300, 10, 1, 0])
    found = growing.prior_weights(counts, 1000, noise)
    np.testing.assert_allclose(found, groups.prior_weights(counts, 1000, noise), rtol=1e-12)
    assert (np.diff(found) >= 0).all()
    assert found[0] == found[1]
    assert found[-1] == found[-2]
    assert found[0] > 0


def test_thresholds_far_above_the_noise_hardly_differ():
    counts = np.array([500, 100, 10, 1])
    spread = [np.ptp(growing.prior_weights(counts, 1000, noise)) for noise in (0.0, 0.02, 0.2, 0.5)]
    assert spread[0] == 0
    assert spread[1] < 0.01
    assert spread[1] < spread[2] < spread[3]


def test_atoms_that_all_samples_use_are_alike():
    np.testing.assert_allclose(growing.prior_weights(np.array([900, 800]), 1000, 0.5), 1, rtol=1e-6)


def test_rare_atoms_lose_small_coefficients_and_the_mean_number_stays(rng):
    Y = samples(rng)
    with_prior, without = (DBKSVD(24, 4, **{**HOW, "frequency_prior": on}).fit(Y) for on in (True, False))
    # the prior is about encoding: the dictionary is the same
    np.testing.assert_array_equal(with_prior.components_, without.components_)
    smallest = []
    for model in (with_prior, without):
        codes = model.set_params(output="sparse").transform(Y).tocsc()
        assert codes.nnz / len(Y) == pytest.approx(4, rel=0.06)
        columns = (codes.data[a:b] for a, b in zip(codes.indptr, codes.indptr[1:], strict=False))
        smallest.append([float(x.min(initial=np.inf)) for x in columns])
    place = np.arange(24)  # atoms are sorted by use
    assert spearmanr(place, smallest[0]).statistic > 0.7
    # without it one threshold holds for all; the smallest of few coefficients may lie a little above
    spread = [np.max(found) / np.min(found) for found in smallest]
    assert spread[1] < 1.1 < 1.2 < spread[0]


@pytest.mark.slow
def test_store_job_and_resume_keep_the_prior(rng, tmp_path):
    Y = samples(rng)
    zarr.create_array(str(tmp_path / "y.zarr"), shape=Y.shape, dtype="f4", chunks=(500, 24))[...] = Y
    whole = DBKSVD(24, 4, **HOW).fit(tmp_path / "y.zarr")
    DBKSVD(24, 4, **{**HOW, "n_iter": 16}, checkpoint=tmp_path / "run").fit(tmp_path / "y.zarr")
    longer = {**HOW, "n_iter": 18}
    resumed = DBKSVD(24, 4, **longer, checkpoint=tmp_path / "run").fit(tmp_path / "y.zarr", resume=True)
    assert resumed.components_.tobytes() == DBKSVD(24, 4, **longer).fit(tmp_path / "y.zarr").components_.tobytes()
    stored = open_dictionary(tmp_path / "run")
    encode_store(tmp_path / "y.zarr", tmp_path / "run", tmp_path / "codes.zarr")
    for name in ("atom", "coefficient"):
        found = open_codes(tmp_path / "codes.zarr")[name].values
        np.testing.assert_array_equal(found, resumed.transform(Y)[name].values)
    # at most 3: neither the threshold of the fit nor its weights
    encode_store(tmp_path / "y.zarr", tmp_path / "run", tmp_path / "three.zarr", k=3)
    D = stored.atoms
    plain, _ = encode_rows(Y - stored.mean.astype("f4"), D, gram_matrix(D), EncodeSpec(3, nonneg=True))
    np.testing.assert_array_equal(open_codes(tmp_path / "three.zarr")["atom"].values, plain)
    before = dictionary_fingerprint(stored)
    stored.weights = None
    assert dictionary_fingerprint(stored) != before
    assert whole.threshold_ > 0


def test_a_stored_dictionary_encodes_as_its_estimator_does(rng, tmp_path):
    Y = samples(rng)
    model = DBKSVD(24, 4, **HOW, checkpoint=tmp_path / "run").fit(Y)
    stored = open_dictionary(tmp_path / "run")
    assert dictionary_fingerprint(model.to_dictionary()) == dictionary_fingerprint(stored)
    for k in (None, 4):
        xr.testing.assert_identical(encode(Y, stored, k), model.transform(Y))
    assert (encode(Y, stored, 2)["atom"] >= 0).sum("slot").max() == 2  # neither threshold nor weights


@pytest.mark.slow
def test_the_estimator_of_a_prior_reports_on_its_own_codes(rng, tmp_path):
    Y = samples(rng)
    zarr.create_array(str(tmp_path / "y.zarr"), shape=Y.shape, dtype="f4", chunks=(500, 24))[...] = Y
    model = DBKSVD(24, 4, **HOW, checkpoint=tmp_path / "run").fit(tmp_path / "y.zarr")
    encode_store(tmp_path / "y.zarr", tmp_path / "run", tmp_path / "codes.zarr")
    for run in (model, tmp_path / "run"):
        write_report(run, tmp_path / "codes.zarr", tmp_path / "page.html")
        assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.slow
def test_schedulers_do_not_change_a_bit(rng):
    Y, found = samples(rng), []
    for config in ({"scheduler": "threads", "num_workers": 2}, {"scheduler": "synchronous"}):
        with dask.config.set(**config):
            model = DBKSVD(24, 4, chunk_size=256, **HOW).fit(Y)
            found.append(
                (model.components_, model.to_dictionary().weights, model.transform(Y)["coefficient"].values)
            )
    for a, b in zip(*found, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.slow
def test_exports_want_k_instead(rng, tmp_path):
    DBKSVD(24, 4, **HOW, checkpoint=tmp_path / "run").fit(samples(rng))
    stored = open_dictionary(tmp_path / "run")
    with pytest.raises(InputError, match=r"frequency_prior=True, which other tools do not support; give k=N"):
        encode_spec(stored)
    assert encode_spec(stored, 5).k == 5


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"growth": None}, r"use it with growth, such as 1.5 \(now None\)"),
        ({"sparsity": "max"}, r"sparsity='mean' \(now 'max'\)"),
        ({"encode": "staged"}, r"is one pursuit over all atoms; use encode='plain'"),
    ],
)
def test_illegal_combinations_are_refused(rng, params, text):
    with pytest.raises(InputError, match=text):
        DBKSVD(24, 4, **{**HOW, **params}).fit(samples(rng, 60))
