"""The pursuit without a gram on the device equals that of the CPU: candidates, passes, stopping rules, refits."""

import numpy as np
import pytest

from dbksvd_dask.kernels import encode as cpu
from dbksvd_dask.plan import screening
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """Few enough that a small dictionary is screened; by default it would be one pass over all atoms."""
    monkeypatch.setattr(screening, "FEWEST_CANDIDATES", 6)
    monkeypatch.setattr(screening, "MOST_CANDIDATES", 9)
    monkeypatch.setattr(screening, "FEWEST_PASSES", 2)


def run(space, Y, D, spec, weights=None, first=0):
    from dbksvd_dask.gpu import encode

    got = encode.encode_rows(space.asarray(Y), space.asarray(D), None, spec, weights, first)
    return tuple(space.to_host(a) for a in got)


def assert_equals_cpu(Y, D, spec, got, weights=None, tolerance=1e-5):
    atom, coefficient = cpu.encode_rows(Y, D, None, spec, weights)
    assert got[0].dtype == np.int32
    np.testing.assert_array_equal(got[0], atom)
    np.testing.assert_allclose(got[1], coefficient, atol=tolerance * np.abs(coefficient).max())


HOW = [
    {},
    {"nonneg": True},
    {"rtol": 0.5},
    {"min_coefficient": 0.8},
    {"refit": True},
    {"nonneg": True, "refit": True, "min_coefficient": 0.9},
    {"stages": ((0, 9, 2), (9, 40, 2), (40, 45, 2))},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_passes_equal_cpu(space, data, how):
    Y, D = data(4, 45, 12)
    spec = EncodeSpec(6, **how)
    got = run(space, Y, D, spec)
    if "rtol" in how or "min_coefficient" in how:
        assert (got[0] == -1).any(), "the rule must stop some pursuits early, or this test shows nothing"
    assert_equals_cpu(Y, D, spec, got, tolerance=1e-4 if spec.refit and spec.nonneg else 1e-5)


def test_weights_equal_cpu(space, data, rng):
    Y, D = data(4, 45, 12)
    weights = AtomWeights(rng.uniform(0.5, 2.0, 45), rng.uniform(0.1, 1.0, 45))
    spec = EncodeSpec(5, min_coefficient=0.4)
    got = run(space, Y, D, spec, weights)
    assert (got[0] >= 0).any()
    assert_equals_cpu(Y, D, spec, got, weights)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads_gives_the_same_codes(space, data, monkeypatch, threads):
    """One thread has no bound for its candidates; eight have one from sixteen maxima."""
    monkeypatch.setattr(space, "threads", threads)
    Y, D = data(2, 60, 8)
    assert_equals_cpu(Y, D, EncodeSpec(5), run(space, Y, D, EncodeSpec(5)))


def test_more_atoms_above_the_bound_than_a_block_can_rank(space, data, monkeypatch):
    from dbksvd_dask.gpu import cuda_screened

    monkeypatch.setattr(cuda_screened, "RANKED", 10)
    Y, D = data(2, 60, 8)
    assert_equals_cpu(Y, D, EncodeSpec(5), run(space, Y, D, EncodeSpec(5)))


def test_ties_go_to_the_lowest_index_and_zero_rows_have_no_code(space):
    D = np.repeat(np.eye(4, dtype=np.float32), 12, axis=0)
    Y = np.array([[2, 0, 0, 0], [0, 0, 0, 0], [0, -1, 3, 0]], np.float32)
    got = run(space, Y, D, EncodeSpec(2))
    assert got[0].tolist() == [[0, -1], [-1, -1], [24, 12]]
    assert_equals_cpu(Y, D, EncodeSpec(2), got)


def test_float64_and_tiles(space, data, monkeypatch):
    from dbksvd_dask.gpu import screened

    Y, D = data(5, 45, 12, np.float64)
    whole = run(space, Y, D, EncodeSpec(4))
    assert_equals_cpu(Y, D, EncodeSpec(4), whole, tolerance=1e-12)
    monkeypatch.setattr(screened, "screened_tile_rows", lambda *_: 2)
    np.testing.assert_array_equal(run(space, Y, D, EncodeSpec(4))[0], whole[0])


def test_nothing_travels_to_the_host(space, data):
    from dbksvd_dask.gpu import encode

    Y, D = (space.asarray(a) for a in data(3, 45, 12))
    before = getattr(space, "to_host_bytes", 0)
    encode.encode_rows(Y, D, None, EncodeSpec(4, refit=True))
    assert getattr(space, "to_host_bytes", 0) == before
