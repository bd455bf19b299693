"""Atoms have positive coefficients on average, and turning them around changes nothing else, not by a bit."""

import dask
import numpy as np
import pytest

from dbksvd_dask import DBKSVD, codes_to_csr
from dbksvd_dask.fit import policy
from dbksvd_dask.graph.signs import turned
from dbksvd_dask.kernels.chunk import ChunkState, coefficient_sums

SMALL = {"n_iter": 4, "batch_size": 400, "chunk_size": 96, "validation": 0, "center": False}
KINDS = {
    "plain": {},
    "random start": {"init": "uniform", "dead_atoms": "random"},
    "groups": {"groups": (8, 24)},
    "omp": {"encoder": "omp"},
    "refit": {"refit": True, "momentum": 0.0},
    "mean": {"sparsity": "mean"},
    "growth": {"growth": 2.0, "n_iter": 17},
}


def positive(rng, n=600, d=20, m=32):
    """Samples that are sums of three directions with positive coefficients."""
    truth = rng.standard_normal((m, d))
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    X = np.zeros((n, m))
    for row in X:
        row[rng.choice(m, 3, replace=False)] = rng.uniform(1, 2, 3)
    return (X @ truth + 0.01 * rng.standard_normal((n, d))).astype(np.float32)


@pytest.fixture
def Y(rng):
    return positive(rng)


@pytest.mark.slow
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_turned_atoms_are_the_only_difference(Y, how, monkeypatch):
    published = DBKSVD(32, 4, **(SMALL | how)).fit(Y)
    sums = []

    def as_they_come(found, *dictionaries):
        sums.append(found)
        return dictionaries

    monkeypatch.setattr(policy, "turned", as_they_come)
    plain = DBKSVD(32, 4, **(SMALL | how)).fit(Y)
    negative = (plain.components_ * published.components_).sum(axis=1) < 0
    assert negative.any()
    np.testing.assert_array_equal(published.components_, np.where(negative[:, None], -1, 1) * plain.components_)
    np.testing.assert_array_equal(published.history_["relative_error"], plain.history_["relative_error"])
    if "growth" not in how:  # which sorts its atoms afterwards
        np.testing.assert_array_equal(negative, sums[-1] < 0)


def test_atoms_of_positive_samples_are_positive(rng):
    Y = positive(rng, n=2000)
    model = DBKSVD(32, 3, n_iter=20, batch_size=1000, center=False, validation=0, init="uniform").fit(Y)
    codes = codes_to_csr(model.transform(Y))
    assert (np.asarray(codes.sum(axis=0)).ravel() > 0).mean() > 0.95


@pytest.mark.parametrize("how", [{}, {"groups": (8, 24)}], ids=["plain", "groups"])
def test_schedulers_and_resume_give_the_same_signs(Y, how, tmp_path):
    settings = SMALL | how
    whole = DBKSVD(32, 4, **settings).fit(Y)
    with dask.config.set(scheduler="threads", num_workers=3):
        threads = DBKSVD(32, 4, **settings).fit(Y)
    run = tmp_path / "run"
    for n_iter in (1, 2, 4):
        resumed = DBKSVD(32, 4, **(settings | {"n_iter": n_iter}), checkpoint=run).fit(Y, resume=True)
    for other in (threads, resumed):
        assert other.components_.tobytes() == whole.components_.tobytes()


def test_partial_fit_turns_atoms_too(Y):
    model = DBKSVD(32, 4, center=False, validation=0, init="uniform")
    for part in (Y[:300], Y[300:]):
        model.partial_fit(part)
    sums = np.asarray(codes_to_csr(model.transform(Y[300:])).sum(axis=0)).ravel()
    assert (sums >= 0).mean() > 0.85


def test_non_negative_dictionaries_are_never_turned(Y, monkeypatch):
    monkeypatch.setattr(policy, "turned", lambda sums, *given: given if sums is None else pytest.fail("turned"))
    DBKSVD(32, 4, **SMALL, nonneg=True).fit(Y)


def test_sums_are_those_of_loops(rng):
    atom = rng.integers(-1, 9, (50, 4)).astype(np.int32)
    coefficient = rng.standard_normal((50, 4)).astype(np.float32)
    state = ChunkState(*[np.empty(0)] * 6)._replace(atom=atom, coefficient=coefficient)
    expected = np.zeros(11)
    for row, values in zip(atom, coefficient, strict=True):
        for j, x in zip(row, values, strict=True):
            if j >= 0:
                expected[j] += float(x)
    np.testing.assert_array_equal(coefficient_sums(state, 11), expected)


def test_an_atom_without_coefficients_stays(rng):
    D = rng.standard_normal((3, 5))
    (out,) = turned(np.array([0.0, -1e-30, 2.0]), D)
    np.testing.assert_array_equal(out, D * [[1], [-1], [1]])
    assert turned(None, D)[0] is D
    assert turned(np.ones(3), D)[0] is D
