"""Pursuit on a compact gram equals the plain-loop twin, also where 16 bits decide nothing; so do Lanczos steps."""

import numpy as np
import pytest

from dbksvd_dask.kernels import chunk, compact_gram, lanczos, lanczos_rows
from dbksvd_dask.kernels.compact_gram import CompactGram
from dbksvd_dask.kernels.encode import encode_rows, gram_for, gram_matrix, residual
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS
from tests.naive import kernels


def run(Y, D, k, **how):
    spec = EncodeSpec(k, **how)
    return encode_rows(Y, D, gram_for(D, spec), spec)


def assert_equals_twin(Y, D, k, atom, coefficient, *, fewest, **how):
    """Compare all rows whose choices are no near-ties; at least `fewest` of them."""
    compared = 0
    for i, y in enumerate(Y):
        support, x, gap = kernels.pursue(y, D, k, **how)
        if gap < 1e-6:
            continue
        assert atom[i][atom[i] >= 0].tolist() == support
        np.testing.assert_allclose(coefficient[i, : len(support)], x, atol=2e-6 * np.abs(x).max(initial=1e-30))
        compared += 1
    assert compared >= fewest


def test_two_parts_hold_an_entry_to_float32_precision(make_dictionary):
    D = make_dictionary(1000, 24)
    gram, parts = gram_matrix(D), gram_for(D, EncodeSpec(3))
    assert isinstance(parts, CompactGram)
    exact = parts.high * (1 / 32767) + parts.low * (1 / 32767 / 254)
    np.testing.assert_allclose(exact, np.clip(gram, -1, 1), atol=1.3e-7)
    np.testing.assert_array_equal(parts.high, parts.high.T)
    np.testing.assert_array_equal(parts.low, parts.low.T)
    for given, made in zip(compact_gram.split(gram), parts, strict=True):
        np.testing.assert_array_equal(given, made)


def test_only_plain_pursuit_of_unit_atoms_has_a_compact_gram(make_dictionary):
    D = make_dictionary(20, 8)
    for spec in (EncodeSpec(3, refit=True), EncodeSpec(3, stages=((0, 20, 3),)), EncodeSpec(3, "omp")):
        assert isinstance(gram_for(D, spec), np.ndarray)
    assert isinstance(gram_for(D, EncodeSpec(3), weighted=True), np.ndarray)
    assert isinstance(gram_for(D.astype(np.float64), EncodeSpec(3)), np.ndarray)
    assert isinstance(gram_for(D * np.float32(1.001), EncodeSpec(3)), np.ndarray)
    assert [name for name, encoder in ENCODERS.items() if encoder.compact] == ["mp"]


@pytest.mark.parametrize("nonneg", [False, True])
def test_little_that_is_left_of_a_sample_is_pursued_to_the_end(rng, make_dictionary, nonneg):
    """Sums of three atoms, nearly orthogonal: after some steps 16 bits no longer tell the products apart."""
    D = make_dictionary(700, 400)
    X = np.zeros((40, 700), np.float32)
    for row in X:
        row[rng.choice(700, 3, replace=False)] = [1, 0.03, 0.001]
    Y = X @ D
    atom, coefficient = run(Y, D, 24, nonneg=nonneg)
    assert_equals_twin(Y, D, 24, atom, coefficient, fewest=10, nonneg=nonneg)
    if not nonneg:
        left = np.linalg.norm(residual(Y, atom, coefficient, D), axis=1)
        assert np.median(left) < 1e-5, "below what 16 bits of the gram would leave"


def test_near_duplicates_are_told_apart_by_the_low_part(rng, make_dictionary):
    """Pairs of atoms closer than a step of the high part: 16 bits alone choose the wrong one of some."""
    base = make_dictionary(60, 48, np.float64)
    twins = kernels.unit_rows(base + 3e-3 * rng.standard_normal(base.shape))
    D = np.concatenate([base, twins]).astype(np.float32)
    Y = rng.standard_normal((80, 48)).astype(np.float32)
    atom, coefficient = run(Y, D, 12)
    assert_equals_twin(Y, D, 12, atom, coefficient, fewest=60)
    parts = gram_for(D, EncodeSpec(12))
    rough = encode_rows(Y, D, CompactGram(parts.high, np.zeros_like(parts.low)), EncodeSpec(12))
    assert np.abs(rough[1] - coefficient).max() > 1e-5, "the low part is at work"


@pytest.mark.parametrize("how", [{"rtol": 0.5}, {"min_coefficient": 0.9}, {"nonneg": True}])
def test_stopping_rules_equal_the_twin(rng, make_dictionary, how):
    D = make_dictionary(300, 24)
    Y = rng.standard_normal((60, 24)).astype(np.float32)
    atom, coefficient = run(Y, D, 10, **how)
    assert_equals_twin(Y, D, 10, atom, coefficient, fewest=50, **how)


def test_every_atom_tied_goes_to_the_lowest_index():
    D = np.tile(np.eye(4, dtype=np.float32), (100, 1))
    atom, coefficient = run(np.full((3, 4), 0.7, np.float32), D, 4)
    np.testing.assert_array_equal(atom, np.tile(np.arange(4), (3, 1)))
    np.testing.assert_array_equal(coefficient, np.float32(0.7))


def test_samples_near_the_end_of_float32_lose_no_bit(rng, make_dictionary):
    D = make_dictionary(300, 24)
    Y = rng.standard_normal((30, 24)).astype(np.float32)
    atom, coefficient = run(Y, D, 6)
    for exponent in (-100, -76, -74, 100):
        other, scaled = run(Y * np.float32(2.0**exponent), D, 6)
        np.testing.assert_array_equal(other, atom)
        np.testing.assert_array_equal(scaled, coefficient * np.float32(2.0**exponent))


def test_atoms_that_are_not_of_unit_norm_are_pursued_with_the_whole_gram(rng, make_dictionary):
    D = make_dictionary(50, 16) * np.float32(1.01)
    Y = rng.standard_normal((10, 16)).astype(np.float32)
    assert isinstance(gram_for(D, EncodeSpec(3)), np.ndarray)
    atom, _ = run(Y, D, 3)
    assert (atom[:, 0] == np.abs(Y @ D.T).argmax(axis=1)).all()


def test_weights_take_the_whole_gram(rng, make_dictionary):
    D = make_dictionary(50, 16)
    Y = rng.standard_normal((10, 16)).astype(np.float32)
    weights = AtomWeights(np.ones(50), np.ones(50))
    spec = EncodeSpec(3)
    for a, b in zip(encode_rows(Y, D, gram_matrix(D), spec, weights), run(Y, D, 3), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_residual_of_few_rows_has_the_bits_of_the_same_rows_among_many(rng, make_dictionary):
    D = make_dictionary(900, 70)
    Y = rng.standard_normal((600, 70)).astype(np.float32)
    atom, coefficient = run(Y, D, 7)
    atom[3, 5:], coefficient[3, 5:] = -1, 0
    whole = residual(Y, atom, coefficient, D)
    expected = Y - kernels.dense(atom, coefficient, 900) @ D
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    for rows in (slice(3, 4), slice(2, 30)):
        np.testing.assert_array_equal(residual(Y[rows], atom[rows], coefficient[rows], D), whole[rows])


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("unit", [0, 30])
def test_steps_row_by_row_equal_those_of_any_namespace(rng, make_dictionary, steps, unit):
    D = make_dictionary(40, 24)
    Y = rng.standard_normal((300, 24)).astype(np.float32) * np.float32(2.0**-unit)
    rounds = chunk.invert_rounds(np.array_split(rng.permutation(40).astype(np.int32), 3), 40)
    state, _ = chunk.encode_chunk(Y, D, gram_for(D, EncodeSpec(4)), EncodeSpec(4), rounds)
    assert (state.unit != 0) == (unit != 0)
    members = rounds.atoms[1]
    W, (x2,), at = chunk.first_product(state, 1, members.size)
    mine = lanczos_rows.warm_start(W, x2, D, members, at)
    other = lanczos.warm_start(W, x2, D[members], at)
    for _ in range(steps - 1):
        W, (sx, s2), at = chunk.next_product(state, 1, other)
        mine = lanczos_rows.advance(mine, W, sx, s2, D, members, at)
        other = lanczos.advance(other, W, sx, s2, D[members], at)
    np.testing.assert_allclose(mine.dv, other.dv, atol=1e-5)
    found, expected = lanczos_rows.leading_vectors(mine, D, members), lanczos.leading_vectors(other, D[members])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_unused_atom_stays_and_a_new_one_points_the_way_of_the_old(make_dictionary):
    D, members = make_dictionary(3, 8), np.arange(3)
    W = np.stack([np.zeros(8), -5 * D[1], 2 * D[2]]).astype(np.float32)
    lz = lanczos_rows.warm_start(W, np.array([0.0, 1.0, 1.0]), D, members)
    found = lanczos_rows.leading_vectors(lz, D, members)
    np.testing.assert_array_equal(found[0], D[0])
    np.testing.assert_allclose(found[1:], D[1:], atol=1e-6)
