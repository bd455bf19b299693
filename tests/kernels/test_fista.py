"""The lasso encoder equals its twin and scikit-learn's lasso, and works wherever the others do."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment, nnls
from sklearn.linear_model import Lasso

from dbksvd_dask import DBKSVD, encode, encode_store, open_codes
from dbksvd_dask.errors import InputError
from dbksvd_dask.kernels import fista
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix, residual
from dbksvd_dask.kernels.products import squared_norms
from dbksvd_dask.plan.encoder import EncodeSpec
from tests.helpers import jobs
from tests.naive import lasso as naive
from tests.naive.kernels import dense, unit_rows

SIGNS = pytest.mark.parametrize("nonneg", [False, True])


def lasso_rows(Y, D, k, *, min_coefficient=0.0, nonneg=False, rtol=0.0):
    """Lasso at the end of each path, before any refit, dense (n, n_atoms), and its penalties."""
    atom, coefficient = np.empty((len(Y), k), np.int32), np.empty((len(Y), k), Y.dtype)
    penalty = np.empty(len(Y))
    how = (k, rtol, min_coefficient, nonneg)
    fista.lasso_tile(Y @ D.T, gram_matrix(D), squared_norms(Y), *how, atom, coefficient, penalty)
    return dense(atom, coefficient, len(D)), penalty


def planted(rng, D, n, k, nonneg=True, noise=0.0):
    """Sparse sums of atoms: samples (n, d), and the atoms of each."""
    X = np.zeros((n, len(D)))
    for row in X:
        row[rng.choice(len(D), k, replace=False)] = rng.uniform(0.3, 1, k) * (
            1 if nonneg else rng.choice([-1, 1], k)
        )
    return (X @ D + noise * rng.standard_normal((n, D.shape[1]))).astype(np.float32), X


def run(Y, D, k, first=0, **how):
    return encode_rows(Y, D, gram_matrix(D), EncodeSpec(k, encoder="fista", **how), first=first)


def sklearn_lasso(y, D, penalty, nonneg):
    theirs = Lasso(alpha=penalty / y.size, fit_intercept=False, positive=nonneg, tol=1e-10, max_iter=100_000)
    return theirs.fit(D.T.astype(np.float64), y.astype(np.float64)).coef_


def objective(y, D, x, penalty):
    return 0.5 * np.sum((y - x @ D) ** 2) + penalty * np.abs(x).sum()


@SIGNS
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_the_end_of_a_path_is_as_good_as_the_lasso_of_scikit_learn(rng, make_dictionary, nonneg, share):
    D = make_dictionary(200, 30)
    for y in rng.standard_normal((10, 30)).astype(np.float32):
        penalty = share * float(np.abs(D @ y).max())
        (x,), (end,) = lasso_rows(y[None], D, 200, min_coefficient=penalty, nonneg=nonneg)
        assert end == pytest.approx(penalty) or nonneg  # max p may be smaller than max |p|: a path ends later
        best = objective(y, D, sklearn_lasso(y, D, end, nonneg), end)
        assert objective(y, D, x.astype(np.float64), end) <= best * (1 + 1e-3)
        assert (x >= 0).all() or not nonneg


@SIGNS
def test_coefficients_are_the_largest_of_the_lasso_also_where_atoms_crowd(rng, nonneg):
    D = unit_rows(rng.standard_normal((900, 24)) + 0.7).astype(np.float32)
    k = 6
    room = fista.working_set(fista.PER_SLOT * k, 900, np.float32).atom.size
    crowded = 0
    for y in (rng.standard_normal((10, 24)) + 1).astype(np.float32):
        (x,), (end,) = lasso_rows(y[None], D, k, nonneg=nonneg)
        expected = sklearn_lasso(y, D, end, nonneg)
        crowded += (D @ y > fista.PATH_RATIO * (D @ y).max()).sum() > room
        kept = np.flatnonzero(x)
        assert kept.size == k
        np.testing.assert_allclose(x[kept], expected[kept], atol=0.02 * np.abs(expected).max())
        assert np.abs(np.delete(expected, kept)).max() <= 1.02 * np.abs(x[kept]).min()
    assert crowded >= 3, "more atoms than fit must ask to come in at the first penalty already"


@SIGNS
@pytest.mark.parametrize("how", [{}, {"rtol": 0.5}, {"min_coefficient": 0.3}])
@pytest.mark.parametrize("k", [1, 6])
def test_paths_and_codes_equal_the_twin(rng, make_dictionary, nonneg, k, how):
    D = make_dictionary(40, 32)
    Y, _ = planted(rng, D, 15, 4, nonneg, noise=0.1)
    atom, coefficient = run(Y, D, k, nonneg=nonneg, **how)
    _, penalty = lasso_rows(Y, D, k, nonneg=nonneg, **how)
    # solves on the way are approximate: where the last atom only just comes in, a path may end one penalty off
    ends = [naive.path_end(y, D, k, nonneg=nonneg, **how)[0] for y in Y]
    assert np.isclose(penalty, ends).mean() >= 0.8
    compared = 0
    for i, y in enumerate(Y):
        support, x, gap = naive.encode(y, D, k, penalty[i], nonneg)
        if gap < 0.002:
            continue
        if nonneg:
            x = nnls(D[support].T.astype(np.float64), y.astype(np.float64))[0]
        used = atom[i] >= 0
        assert set(atom[i, used]) == set(support)
        expected = dict(zip(support, x, strict=True))
        np.testing.assert_allclose(coefficient[i, used], [expected[j] for j in atom[i, used]], atol=1e-3)
        compared += 1
    assert compared >= 10


@SIGNS
def test_the_atoms_that_made_a_sample_are_found(rng, make_dictionary, nonneg):
    D = make_dictionary(300, 64)
    Y, X = planted(rng, D, 100, 6, nonneg)
    atom, coefficient = run(Y, D, 6, nonneg=nonneg)
    found = [set(a[x != 0]) == set(np.flatnonzero(true)) for a, x, true in zip(atom, coefficient, X, strict=True)]
    assert np.mean(found) >= 0.95
    np.testing.assert_allclose(residual(Y, atom, coefficient, D)[found], 0, atol=1e-4)


@SIGNS
def test_twins_among_the_atoms_share_and_do_no_harm(rng, make_dictionary, nonneg):
    D = make_dictionary(10, 20)
    Y, _ = planted(rng, D, 20, 3, nonneg)
    twice = np.vstack([D, D]).astype(np.float32)
    atom, coefficient = run(Y, twice, 20, nonneg=nonneg)
    assert np.abs(coefficient).max() < 3, "a singular refit would explode"
    np.testing.assert_allclose(residual(Y, atom, coefficient, twice), 0, atol=1e-3)


def test_a_mean_number_of_nonzeros_is_met_by_the_penalty(rng, make_dictionary):
    Y, _ = planted(rng, make_dictionary(60, 20), 1500, 4, noise=0.02)
    model = DBKSVD(60, 4, encoder="fista", nonneg=True, sparsity="mean", n_iter=12, center=False, seed=1).fit(Y)
    counts = (np.asarray(model.transform(Y).atom) >= 0).sum(axis=1)
    assert counts.mean() == pytest.approx(4, rel=0.1)
    assert counts.std() > 0.3, "k is a mean, not the number of every sample"


@pytest.mark.slow
def test_training_with_it_finds_the_atoms_of_sums_of_many(rng):
    true = unit_rows(rng.standard_normal((60, 16)))
    Y, _ = planted(rng, true, 3000, 4)
    how = {"nonneg": True, "center": False, "init": "data", "n_iter": 25, "validation": 0}
    D = DBKSVD(60, 4, encoder="fista", **how).fit(Y).components_
    cosine = D @ true.T
    assert cosine[linear_sum_assignment(-cosine)].mean() > 0.95


def test_transform_encode_and_jobs_give_the_same_codes(tmp_path, rng, make_dictionary):
    rows = jobs.made_up(5000, 16)
    store = jobs.write_store(tmp_path / "store.zarr", rows, 1000)
    run_folder = jobs.write_dictionary(tmp_path / "dictionary", 32, 16, 3)
    encode_store(store, run_folder, tmp_path / "library.zarr", encoder="fista", nonneg=True)
    options = ("--encoder", "fista", "--nonneg")
    code, _, err = jobs.command("encode", store, run_folder, tmp_path / "command.zarr", *options)
    assert code == 0, err
    assert jobs.tree(tmp_path / "command.zarr") == jobs.tree(tmp_path / "library.zarr")
    stored = open_codes(tmp_path / "library.zarr")
    codes = encode(rows, run_folder, encoder="fista", nonneg=True)
    np.testing.assert_array_equal(codes.atom, stored.atom)
    np.testing.assert_array_equal(codes.coefficient, stored.coefficient)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"groups": (8, 12), "encode": "staged"}, "use encoder='mp', not 'fista'"),
        ({"growth": 1.5, "n_iter": 100}, "needs encoder='mp'"),
    ],
)
def test_what_it_cannot_do_is_refused_before_any_work(how, message):
    with pytest.raises(InputError, match=message):
        DBKSVD(20, 3, encoder="fista", **how).fit(np.zeros((50, 4), np.float32))
