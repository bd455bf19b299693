"""Pursuit without a gram equals its plain-loop twin, comes close to the exact one, rounds the same everywhere."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.errors import InputError
from dbksvd_dask.kernels import products
from dbksvd_dask.kernels.encode import encode_rows, gram_for, gram_matrix, residual
from dbksvd_dask.plan import memory, screening
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from tests.naive import kernels as naive

HOW = [
    {},
    {"nonneg": True},
    {"rtol": 0.5},
    {"min_coefficient": 0.6},
    {"min_coefficient": 0.3, "nonneg": True},
]


@pytest.fixture
def planted(rng, make_dictionary):
    """Samples that are sums of a few atoms, with noise."""
    D = make_dictionary(700, 40)
    X = np.zeros((130, 700))
    for row in X:
        row[rng.choice(700, 6, replace=False)] = rng.uniform(0.5, 2, 6)
    return (X @ D + 0.05 * rng.standard_normal((130, 40))).astype("f4"), D


def run(Y, D, k, weights=None, first=0, **how):
    return encode_rows(Y, D, None, EncodeSpec(k, **how), weights, first)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("k", [1, 3, 12])
def test_passes_equal_the_twin(planted, how, k):
    Y, D = planted
    passes, candidates = screening.n_passes(k, 700), screening.n_candidates(k)
    assert candidates < 700, "all atoms as candidates would show nothing"
    atom, coefficient = run(Y, D, k, **how)
    X = naive.dense(atom, coefficient, 700)
    equal = 0
    for y, x in zip(Y, X, strict=True):
        support, values = naive.screened(y, D, k, passes, candidates, **how)
        twin = np.zeros(700)
        twin[support] = values
        equal += np.allclose(x, twin, atol=1e-4)
    assert equal >= 0.97 * len(Y), "a tie that rounding decides may differ, no more"


def test_with_all_atoms_as_candidates_it_is_the_exact_pursuit(planted):
    Y, D = planted
    D = D[:60].copy()
    for how in HOW:
        exact = encode_rows(Y, D, gram_matrix(D), EncodeSpec(6, **how))
        atom, coefficient = run(Y, D, 6, **how)
        same = (atom == exact[0]).all(axis=1)
        assert same.mean() > 0.97
        np.testing.assert_allclose(coefficient[same], exact[1][same], atol=1e-4)


def test_it_explains_nearly_what_the_exact_pursuit_does(patches):
    Y = np.ascontiguousarray(patches[:100] - patches.mean(0), dtype="f4")
    rows = patches[100:] - patches.mean(0)
    D = (rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-9)).astype("f4")
    spec = EncodeSpec(16)
    left = [
        float((residual(Y, *encode_rows(Y, D, gram, spec), D).astype("f8") ** 2).sum())
        for gram in (gram_matrix(D), None)
    ]
    total = float((Y.astype("f8") ** 2).sum())
    assert 1 - left[1] / total > 0.99 * (1 - left[0] / total)


def test_the_same_bits_wherever_the_rows_are_cut(planted):
    Y, D = planted
    prior = AtomWeights(1 + np.arange(700) % 3, np.ones(700))
    for weights, how in ((None, {"refit": True}), (prior, {"min_coefficient": 0.2})):
        whole = run(Y, D, 12, weights, **how)
        for cut in (1, 47, 48, 100):
            parts = [run(Y[:cut], D, 12, weights, **how), run(Y[cut:], D, 12, weights, first=cut, **how)]
            for i in range(2):
                np.testing.assert_array_equal(np.concatenate([p[i] for p in parts]), whole[i])


def test_products_with_few_atoms_of_a_group_are_of_full_height(rng, make_dictionary, monkeypatch):
    """BLAS may choose a kernel by the size of a small product; that of a large one is padded to the grid only."""
    heights, real = [], np.dot
    monkeypatch.setattr(products.np, "dot", lambda a, b, out: heights.append(len(a)) or real(a, b, out=out))
    run(
        rng.standard_normal((5, 32)).astype("f4"), make_dictionary(6000, 32), 4, stages=((0, 70, 2), (70, 6000, 2))
    )
    assert heights == [480, 480, 48, 48], "two passes with each group"


@pytest.mark.parametrize("nonneg", [False, True])
def test_refit_is_least_squares_on_the_support(planted, nonneg):
    Y, D = planted
    atom, coefficient = run(Y, D, 8, refit=True, nonneg=nonneg)
    before = run(Y, D, 8, nonneg=nonneg)
    np.testing.assert_array_equal(atom, before[0])
    if nonneg:
        assert (coefficient >= 0).all()
        return
    for y, a, x in zip(Y[:20], atom, coefficient, strict=False):
        np.testing.assert_allclose(x[a >= 0], naive.refit(y, D, a[a >= 0]), atol=1e-3)


def test_groups_in_order_and_equal_weights(planted):
    Y, D = planted
    stages = ((0, 100, 4), (100, 700, 4))
    atom, _ = run(Y, D, 8, stages=stages)
    inside = (atom >= 0) & (atom < 100)
    assert (inside.sum(axis=1) <= 4).all()
    assert inside.any()
    assert ((atom >= 100).sum(axis=1) <= 4).all()
    equal = AtomWeights(np.ones(700), np.ones(700))
    for a, b in zip(run(Y, D, 8, equal), run(Y, D, 8), strict=True):
        np.testing.assert_array_equal(a, b)
    barred = AtomWeights(np.where(np.arange(700) < 350, 1e6, 1.0), np.ones(700))
    atom, _ = run(Y, D, 8, barred, min_coefficient=0.2)
    assert ((atom == -1) | (atom >= 350)).all()


def test_ties_go_to_the_lowest_index_and_zero_rows_have_no_code():
    D = np.repeat(np.eye(4, dtype="f4"), 40, axis=0)
    atom, _ = run(np.array([[2, 0, 0, 0], [0, 0, 0, 0]], "f4"), D, 2)
    assert atom.tolist() == [[0, -1], [-1, -1]]


# ---------------------------------------------------------------------------------------------- in a fit


@pytest.mark.parametrize(
    "more",
    [{}, {"sparsity": "mean"}, {"groups": (100, 200)}, {"nonneg": True, "refit": True}, {"dead_atoms": "random"}],
)
def test_a_fit_without_gram_learns_as_one_with_it(planted, more):
    Y, _ = planted
    Y = np.concatenate([Y, Y[::-1] * 0.9])
    how = {"n_atoms": 300, "k": 8, "n_iter": 3, "chunk_size": 100, "validation": 0, **more}
    with dask.config.set(scheduler="sync"):
        exact, plain = (DBKSVD(**how, gram=gram).fit(Y) for gram in ("always", "never"))
    found = [float(fit.history_["variance_explained"][-1]) for fit in (exact, plain)]
    assert found[1] > 0.97 * found[0]
    with dask.config.set(scheduler="threads", num_workers=3):
        again = DBKSVD(**how, gram="never").fit(Y)
    np.testing.assert_array_equal(again.components_, plain.components_)


def test_a_resumed_fit_without_gram_gives_the_same_bits_on_another_scheduler(planted, tmp_path):
    Y, _ = planted
    how = {"n_atoms": 110, "k": 8, "chunk_size": 40, "validation": 20, "gram": "never", "seed": 3}
    with dask.config.set(scheduler="sync"):
        whole = DBKSVD(**how, n_iter=3).fit(Y)
        DBKSVD(**how, n_iter=1, checkpoint=tmp_path).fit(Y)
    with dask.config.set(scheduler="threads", num_workers=3):
        resumed = DBKSVD(**how, n_iter=3, checkpoint=tmp_path).fit(Y, resume=True)
    assert resumed.n_iter_ == 3
    np.testing.assert_array_equal(resumed.components_, whole.components_)


def test_the_choice_is_stored_and_can_be_overridden(planted):
    Y, _ = planted
    fit = DBKSVD(110, 12, n_iter=1, validation=0, gram="never", init="uniform").fit(Y)
    own, same, exact = fit.transform(Y), encode(Y, fit), encode(Y, fit, gram="always")
    np.testing.assert_array_equal(own["coefficient"], same["coefficient"])
    assert not np.array_equal(own["coefficient"], exact["coefficient"])


def test_the_rule_depends_on_the_atoms_and_bounds_the_memory():
    assert gram_for(np.eye(3, dtype="f4"), EncodeSpec(1)) is not None
    assert gram_for(np.eye(3, dtype="f4"), EncodeSpec(1, gram="never")) is None
    sizes = memory.FitSizes(640, 65536, 32, 65536, 8192)
    assert memory.plan_fit(sizes, 1, 2).gram == 0
    assert memory.plan_fit(sizes, 1, 2).total < 4e9
    assert memory.plan_fit(sizes._replace(gram="always"), 1, 2).gram > 17e9
    assert memory.plan_fit(sizes._replace(n_atoms=262144, batch_size=8192), 1, 2).total < 12e9


def test_what_it_cannot_do_is_refused_before_any_work():
    with pytest.raises(InputError, match=r"encoder='omp' needs .* cannot honour gram='never'; use encoder='mp'"):
        DBKSVD(300, 8, encoder="omp", gram="never").fit(np.zeros((10, 4), "f4"))
    with pytest.raises(InputError, match="gram='sometimes' is not known; use one of 'auto', 'always', 'never'"):
        DBKSVD(300, 8, gram="sometimes").fit(np.zeros((10, 4), "f4"))
