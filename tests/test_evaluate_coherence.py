"""Coherence: equal to the loops over all pairs, whatever the tile, and never an m x m array."""

import tracemalloc

import numpy as np
import pytest

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate import coherence as co
from tests import naive_metrics as naive


@pytest.mark.parametrize("tile", [1, 7, 64, 512])
def test_coherence_equals_all_pairs(tile):
    D = naive.unit_rows(np.random.default_rng(0), 60, 11)
    D[41] = -D[3]
    D[50] = D[7]
    c = co.coherence(D, tile=tile)
    signed, absolute = naive.coherence(D)
    np.testing.assert_allclose(c.signed, signed, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(c.absolute, absolute, rtol=1e-12)
    assert (c.nearest[3], c.nearest[41], c.nearest[7]) == (41, 3, 50)
    assert c.mutual == pytest.approx(1.0)
    assert c.n_near_duplicates == (absolute > 0.9).sum() >= 4
    assert {(3, 41), (7, 50)} <= {tuple(p) for p in c.duplicate_pairs}
    assert (c.duplicate_pairs[:, 0] < c.duplicate_pairs[:, 1]).all()


def test_named_pairs_are_limited():
    D = np.repeat(np.eye(3), 5, axis=0)
    assert co.coherence(D).duplicate_pairs.shape == (30, 2)
    assert co.coherence(D, max_pairs=4, tile=2).duplicate_pairs.shape == (4, 2)
    assert co.coherence(D, max_pairs=4).n_near_duplicates == 15


def test_an_equiangular_dictionary_reaches_the_welch_bound():
    angles = np.pi * np.arange(3) / 3
    c = co.coherence(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    assert c.mutual == pytest.approx(c.welch_bound) == pytest.approx(0.5)
    assert c.recoverable_k == 1  # k < (1 + 2) / 2


@pytest.mark.parametrize(("mutual", "k"), [(1.0, 0), (0.5, 1), (1 / 3, 1), (0.3, 2), (0.01, 50), (0.0, 99)])
def test_recoverable_k_is_strictly_below_the_bound(mutual, k):
    assert co.recoverable_k(mutual, 99) == k
    if 0 < mutual:
        assert k < (1 + 1 / mutual) / 2 <= k + 1


def test_orthogonal_and_single_atoms():
    c = co.coherence(np.eye(4, dtype=np.float32))
    assert (c.mutual, c.welch_bound, c.recoverable_k, c.n_near_duplicates) == (0.0, 0.0, 4, 0)
    one = co.coherence(np.eye(1))
    assert (one.mutual, one.nearest[0], one.recoverable_k) == (0.0, -1, 1)


@pytest.mark.parametrize("tile", [3, 512])
def test_nearest_atoms_are_sorted_by_absolute_similarity(tile):
    D = naive.unit_rows(np.random.default_rng(1), 30, 5)
    index, similarity = co.nearest_atoms(D, 4, tile=tile)
    gram = D @ D.T
    for j in range(30):
        ranked = sorted((i for i in range(30) if i != j), key=lambda i: -abs(gram[j, i]))
        assert index[j].tolist() == ranked[:4]
        np.testing.assert_allclose(similarity[j], gram[j, ranked[:4]], rtol=1e-10)
    assert co.nearest_atoms(D[:3], 10)[0].shape == (3, 2)


@pytest.mark.slow
def test_memory_is_a_tile_not_the_gram():
    D = naive.unit_rows(np.random.default_rng(2), 8300, 2, np.float32)
    tracemalloc.start()
    co.coherence(D, max_pairs=0, tile=64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8300 * 8300 * 4 / 10


def test_rows_that_are_not_unit_are_refused_with_the_cure():
    D = 2.5 * np.eye(3)
    with pytest.raises(InputError, match=r"3 rows that are not of norm 1, .* row 0 with norm 2.5; divide"):
        co.coherence(D)
    with pytest.raises(InputError, match=r"must have shape \(n_atoms, n_features\), received \(3,\)"):
        co.coherence(D[0])
    with pytest.raises(InputError, match="norm nan"):
        co.coherence(D * np.nan)
    with pytest.raises(InputError, match="tile=0"):
        co.coherence(np.eye(2), tile=0)
    with pytest.raises(InputError, match=r"must be in \[0, 1\], received 1.5"):
        co.recoverable_k(1.5, 3)
