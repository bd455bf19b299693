"""Statistics of codes and of the reconstruction: equal to dense arrays, independent of the blocks."""

import numpy as np
import pytest
from sklearn.metrics.pairwise import paired_cosine_distances

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate import codes as ec
from dbksvd_dask.evaluate import reconstruction as er
from tests.naive import metrics as naive

N, K, M = 203, 6, 40


@pytest.fixture
def block():
    return naive.random_codes(np.random.default_rng(0), N, K, M - 2)  # the last two atoms stay dead


def test_sums_per_atom_equal_the_dense_matrix(block):
    m = ec.code_moments(*block, M)
    X = naive.dense_codes(*block, M)
    np.testing.assert_array_equal(m.n_active, (X != 0).sum(0))
    np.testing.assert_array_equal(m.n_positive, (X > 0).sum(0))
    np.testing.assert_allclose(m.total, X.sum(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(m.variance, X.var(0), rtol=1e-9)
    np.testing.assert_array_equal(m.largest, np.abs(X).max(0))
    np.testing.assert_allclose(m.density, (X != 0).mean(0))
    used = m.n_active > 0
    np.testing.assert_allclose(m.sign_balance[used], (X > 0).sum(0)[used] / (X != 0).sum(0)[used])
    assert np.isnan(m.sign_balance[~used]).all()
    np.testing.assert_allclose(m.mean_active[used], (X.sum(0)[used] / (X != 0).sum(0)[used]))
    np.testing.assert_array_equal(m.sign[used], np.where(m.mean_active[used] < 0, -1, 1))


def test_summary_equals_the_dense_matrix(block):
    X = naive.dense_codes(*block, M)
    l0 = (X != 0).sum(1)
    s = ec.code_summary(ec.code_moments(*block, M), over_dense=0.12)
    assert (s.n_samples, s.n_atoms, s.l0_min, s.l0_max) == (N, M, l0.min(), l0.max())
    assert s.l0_mean == pytest.approx(l0.mean())
    assert s.l1_mean == pytest.approx(np.abs(X).sum(1).mean(), rel=1e-9)
    assert s.n_dead == 2
    assert s.n_over_dense == ((X != 0).mean(0) > 0.12).sum() > 0
    assert s.density_mean == pytest.approx((X != 0).mean())


@pytest.mark.parametrize("rows", [1, 7, 100, N])
def test_streaming_codes_equals_in_memory(block, rows):
    whole = ec.code_moments(*block, M)

    def blocks():
        for i in range(0, N, rows):
            yield block[0][i : i + rows], block[1][i : i + rows]

    parts = ec.stream_code_moments(blocks, M)
    for name in ("n_active", "n_positive", "l0_histogram", "largest"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    np.testing.assert_allclose(parts.square, whole.square, rtol=1e-12)
    assert parts.l1_sum == pytest.approx(whole.l1_sum, rel=1e-12)


def test_blocks_of_different_slot_counts_merge(block):
    wide = ec.code_moments(*block, M)
    narrow = ec.code_moments(block[0][:, :2], block[1][:, :2], M)
    for merged in (wide.merge(narrow), narrow.merge(wide)):
        assert merged.l0_histogram.sum() == 2 * N
        assert merged.l0_histogram.size == K + 1


def test_density_histogram_counts_every_living_atom_once():
    atom = np.zeros((1000, 2), np.int32)
    atom[:, 1] = -1
    atom[0, 1] = 1  # atom 0 on every sample, atom 1 on one, atom 2 on none
    h = ec.density_histogram(ec.code_moments(atom, np.ones_like(atom, np.float32), 3))
    assert (h.counts[0], h.counts[-1], h.counts.sum(), h.n_dead) == (1, 1, 2, 1)
    assert (h.edges[0], h.edges[-1], h.n_samples) == (-3.0, 0.0, 1000)


def test_codes_of_another_dictionary_are_refused(block):
    with pytest.raises(MismatchError, match=r"names atom 3\d, .* has 30 atoms, 0 to 29; pass the dictionary"):
        ec.code_moments(*block, 30)
    with pytest.raises(InputError, match=r"atom \(203, 6\) and coefficient \(203, 5\)"):
        ec.code_moments(block[0], block[1][:, 1:], M)
    with pytest.raises(InputError, match="atom must hold integers, received dtype float64"):
        ec.code_moments(block[0].astype(float), block[1], M)
    with pytest.raises(InputError, match="over 40 atoms with sums over 41"):
        ec.code_moments(*block, M).merge(ec.code_moments(*block, M + 1))
    with pytest.raises(InputError, match="the codes hold no samples"):
        ec.code_summary(ec.code_moments(block[0][:0], block[1][:0], M))


def samples(dtype=np.float64):
    rng = np.random.default_rng(1)
    D = naive.unit_rows(rng, M, 9, dtype)
    atom, coefficient = naive.random_codes(rng, N, K, M)
    Y = naive.dense_codes(atom, coefficient, M) @ D + 0.3 * rng.standard_normal((N, 9))
    Y[5] = 0
    atom[6] = -1  # a sample without a code: its reconstruction is zero
    return Y.astype(dtype), D, atom, coefficient


@pytest.mark.parametrize("rows", [1, 50, N])
def test_reconstruction_numbers_equal_their_twins(rows):
    Y, D, atom, coefficient = samples()
    blocks = [(Y[i : i + rows], atom[i : i + rows], coefficient[i : i + rows]) for i in range(0, N, rows)]
    m = er.stream_reconstruction(blocks, D)
    s = er.reconstruction_summary(m)
    Z = naive.dense_codes(atom, coefficient, M) @ D
    assert s.mean_relative_error == pytest.approx(naive.mean_relative_error(Y, Y - Z), rel=1e-9)
    assert s.variance_explained.value == pytest.approx(naive.variance_explained(Y, Y - Z, 0)[0], rel=1e-9)
    assert s.fvu == pytest.approx(naive.fvu(Y, Y - Z), rel=1e-9)
    assert s.cosine_similarity == pytest.approx(naive.cosine_similarity(Y, Z), rel=1e-9)
    assert s.shrinkage == pytest.approx(naive.shrinkage(Y, Z), rel=1e-9)
    assert s.relative_reconstruction_bias == pytest.approx(np.sum(Z * Z) / np.sum(Y * Z), rel=1e-9)
    assert m.error_histogram.sum() == N - 1


def test_a_mean_that_the_run_took_off_is_taken_off_first():
    Y, D, atom, coefficient = samples()
    mean = np.linspace(-3, 3, Y.shape[1])
    plain = er.reconstruction_summary(er.stream_reconstruction([(Y, atom, coefficient)], D))
    moved = er.reconstruction_summary(er.stream_reconstruction([(Y + mean, atom, coefficient)], D, mean))
    assert moved.mean_relative_error == pytest.approx(plain.mean_relative_error, rel=1e-6)
    assert moved.fvu == pytest.approx(plain.fvu, rel=1e-9)
    with pytest.raises(MismatchError, match=r"mean has shape \(3,\)"):
        er.stream_reconstruction([(Y, atom, coefficient)], D, mean[:3])


def test_cosine_similarity_equals_sklearn():
    Y, D, atom, coefficient = samples(np.float32)
    rows = np.arange(N)[7:]
    R = er.residual(Y[rows], D, atom[rows], coefficient[rows])
    assert R.dtype == np.float32
    s = er.reconstruction_summary(er.reconstruction_moments(Y[rows], R))
    assert s.cosine_similarity == pytest.approx(1 - paired_cosine_distances(Y[rows], Y[rows] - R).mean(), rel=1e-5)


def test_error_histogram_places_each_row():
    Y = np.array([[1.0, 0], [1, 0], [1, 0], [0, 0]])
    R = np.array([[0.0, 0.255], [0, 1.0], [0, 7.0], [0, 0]])
    h = er.reconstruction_moments(Y, R).error_histogram
    assert (h[25], h[100], h.sum()) == (1, 2, 3)


def test_samples_and_codes_that_do_not_fit_are_refused():
    Y, D, atom, coefficient = samples()
    with pytest.raises(MismatchError, match="do not share their features"):
        er.residual(Y[:, 1:], D, atom, coefficient)
    with pytest.raises(MismatchError, match="codes of 202 samples for 203 samples"):
        er.residual(Y, D, atom[1:], coefficient[1:])
    with pytest.raises(InputError, match="all 2 samples are zero"):
        er.reconstruction_summary(er.reconstruction_moments(np.zeros((2, 3)), np.zeros((2, 3))))


def test_codes_made_with_another_dictionary_are_noticed():
    Y, D, atom, coefficient = samples()
    er.require_codes_of(Y, D, atom, coefficient)
    with pytest.raises(MismatchError, match="belong to another dictionary"):
        er.require_codes_of(Y, np.roll(D, 1, axis=0), atom, coefficient)
