"""The scale of the samples changes no atom: powers of two change no bit, others only rounding, or a refusal."""

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode_store, open_codes
from dbksvd_dask.errors import InputError
from dbksvd_dask.kernels import chunk, lanczos
from dbksvd_dask.kernels.encode import gram_matrix
from dbksvd_dask.kernels.scale import rows_near_one, unit_of
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS
from tests.helpers.stores import make_store
from tests.naive import kernels

N, D, M, K = 600, 12, 16, 3
# far below and above one, and on both sides of where sums begin to be made in other units
EXPONENTS = (-105, -60, -21, 21, 60, 105)

MODES = {
    **{name: {"encoder": name} for name in ENCODERS},
    "nonneg": {"nonneg": True},
    "refit": {"refit": True},
    "nonneg refit": {"nonneg": True, "refit": True},
    "groups": {"groups": (4, 12)},
    "staged": {"groups": (4, 12), "encode": "staged"},
    "not centred, data": {"center": False, "init": "data"},
    "mean, four steps": {"sparsity": "mean", "lanczos_steps": 4},
    "one step, random": {"lanczos_steps": 1, "dead_atoms": "random", "rtol": 0.1},
    "whitened": {"whiten": 0.5},
    "growing with a prior": {"growth": 1.5, "sparsity": "mean", "frequency_prior": True, "n_iter": 18},
}


def planted(rng, n=N, offset=0.25):
    """Sparse sums of random atoms: (n, D), multiples of 1/64 below 8, which float16 holds exactly."""
    atoms = kernels.unit_rows(rng.standard_normal((M, D)))
    X = np.zeros((n, M))
    for row in X:
        row[rng.choice(M, K, replace=False)] = rng.uniform(0.5, 2, K) * rng.choice([-1, 1], K)
    return np.round((X @ atoms + offset) * 64) / 64


def fitted(Y, **more):
    small = {"n_iter": 4, "batch_size": 256, "chunk_size": 100, "n_rounds": 3, "seed": 1, "validation": 64}
    return DBKSVD(M, K, **{**small, **more}).fit(Y)


def codes_of(model, Y):
    codes = model.transform(Y)
    return np.asarray(codes.atom), np.asarray(codes.coefficient).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_power_of_two_changes_no_bit(rng, mode):
    Y = planted(rng).astype(np.float32)
    model = fitted(Y, **MODES[mode])
    atom, coefficient = codes_of(model, Y[:50])
    assert (atom >= 0).any()
    for exponent in EXPONENTS if "growth" not in MODES[mode] else (-60, 105):
        scale = 2.0**exponent
        other = fitted(Y * np.float32(scale), **MODES[mode])
        np.testing.assert_array_equal(other.components_, model.components_, err_msg=f"2^{exponent}")
        found = codes_of(other, Y[:50] * np.float32(scale))
        np.testing.assert_array_equal(found[0], atom)
        np.testing.assert_array_equal(found[1], coefficient * scale)
        for name in ("relative_error", "validation_variance_explained"):
            np.testing.assert_array_equal(other.history_[name], model.history_[name])


@pytest.mark.parametrize(("dtype", "exponents"), [(np.float16, (-8, 8)), (np.float64, (-400, -60, 60, 400))])
def test_a_power_of_two_changes_no_bit_in_other_dtypes(rng, dtype, exponents):
    Y = planted(rng).astype(dtype)
    expected = fitted(Y).components_
    for exponent in exponents:
        scaled = np.ldexp(Y, exponent)
        assert np.array_equal(np.ldexp(scaled, -exponent), Y), "the data themselves lose no bit"
        np.testing.assert_array_equal(fitted(scaled).components_, expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 5e8, 1e30])
def test_any_scale_learns_the_same_atoms(rng, scale):
    Y = planted(rng, n=1500, offset=0.0)
    more = {"n_iter": 12, "init": "data"}
    expected = fitted(Y.astype(np.float32), **more).components_
    found = fitted((Y * scale).astype(np.float32), **more).components_
    np.testing.assert_allclose(np.sum(found * expected, axis=1), 1, atol=1e-3)


def test_min_coefficient_is_in_the_units_of_the_samples(rng):
    Y = planted(rng).astype(np.float32)
    scale = np.float32(2.0**-60)
    model = fitted(Y, min_coefficient=0.5)
    other = fitted(Y * scale, min_coefficient=float(0.5 * scale))
    np.testing.assert_array_equal(other.components_, model.components_)
    assert np.mean(np.asarray(model.transform(Y).atom) < 0) > 0.01, "the threshold is at work"


def test_rows_far_larger_than_others_leave_the_atoms_of_the_others_to_learn(rng):
    """Two kinds of samples that share no feature, one of them 2^60 times as large."""
    half = planted(rng, offset=0.0).astype(np.float32)
    zeros = np.zeros_like(half)
    plain = np.concatenate([np.hstack([half, zeros]), np.hstack([zeros, half])])
    mixed = np.concatenate([np.hstack([half, zeros]), np.hstack([zeros, half * np.float32(2.0**60)])])
    start = np.zeros((2 * M, 2 * D), np.float32)
    start[:M, :D] = start[M:, D:] = kernels.unit_rows(rng.standard_normal((M, D)))
    how = {"n_iter": 3, "batch_size": 2000, "chunk_size": 300, "seed": 0, "validation": 0, "center": False}
    expected, found = (DBKSVD(2 * M, K, init=start, **how).fit(Y).components_ for Y in (plain, mixed))
    assert np.abs(expected - start).max() > 0.1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [3e38, -3.4028235e38, 1e34])
def test_finite_rows_out_of_range_are_refused_by_name(rng, value):
    Y = planted(rng).astype(np.float32)
    model = fitted(Y)
    Y[123] = value
    for call in (lambda: fitted(Y), lambda: model.transform(Y)):
        with pytest.raises(InputError, match=r"sample 123 .*magnitude .*too large for float32.*divide all"):
            call()


def test_float64_values_beyond_float32_are_refused_not_called_infinite(rng):
    model = fitted(planted(rng).astype(np.float32))
    with pytest.raises(InputError, match=r"sample 0 .*magnitude 1e\+200, too large for float32"):
        model.transform(np.full((2, D), 1e200))


@pytest.mark.parametrize("scale", [1e-36, 1e-40, 1e-44])
def test_samples_that_have_lost_digits_are_refused(rng, scale):
    with pytest.raises(InputError, match=r"too small for float32.*multiply them by a constant"):
        fitted((planted(rng) * scale).astype(np.float32))


def test_subnormal_rows_among_others_do_no_harm(rng):
    Y = planted(rng).astype(np.float32)
    Y[::7] = 0
    expected = fitted(Y).components_
    Y[::7] = planted(rng)[::7] * 1e-42
    assert (Y[::7] != 0).any()
    model = fitted(Y)
    np.testing.assert_allclose(model.components_, expected, atol=1e-6)
    assert np.isfinite(codes_of(model, Y)[1]).all()


def test_samples_of_zeros_are_no_smaller_than_others():
    assert np.isfinite(fitted(np.zeros((300, D), np.float32)).components_).all()


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e30, 1e200])
def test_a_given_dictionary_is_normalised_at_any_scale(rng, scale):
    Y, atoms = planted(rng), rng.standard_normal((M, D))
    found = fitted(Y, init=atoms * scale, n_iter=1).components_
    np.testing.assert_allclose(found, fitted(Y, init=atoms, n_iter=1).components_, atol=1e-9)


def test_coefficients_too_small_for_their_store_are_refused(rng, tmp_path):
    Y = (planted(rng) * 2.0**-40).astype(np.float32)
    store, run = make_store(tmp_path / "rows.zarr", Y, chunk_rows=200), str(tmp_path / "run")
    model = DBKSVD(M, K, n_iter=2, batch_size=256, validation=0, seed=0, checkpoint=run).fit(Y)
    with pytest.raises(InputError, match=r"float16 keeps all digits only from .*coefficient_dtype='float32'"):
        encode_store(store, run, str(tmp_path / "half.zarr"), coefficient_dtype="float16")
    encode_store(store, run, str(tmp_path / "codes.zarr"))
    np.testing.assert_array_equal(open_codes(str(tmp_path / "codes.zarr")).atom, model.transform(Y).atom)


# ---------------------------------------------------------------------------------------------- parts


def sums_of(Y, D, exponents):
    """Sums of a round over two chunks of given scales, and the vectors that they give."""
    rounds = chunk.invert_rounds([np.arange(D.shape[0], dtype=np.int32)], D.shape[0])
    states = []
    for part, exponent in zip(np.array_split(Y, len(exponents)), exponents, strict=True):
        rows = part * np.float32(2.0**exponent)
        states.append(chunk.encode_chunk(rows, D, gram_matrix(D), EncodeSpec(K), rounds)[0])
    members = rounds.atoms[0]
    lz = chunk.begin_round([chunk.first_product(s, 0, members.size) for s in states], D, members)
    lz = chunk.advance_round([chunk.next_product(s, 0, lz) for s in states], lz, D, members)
    return [s.unit for s in states], lz, chunk.finish_round(lz, D, members)


def test_chunks_of_different_units_add_up_to_what_one_chunk_gives(rng, make_dictionary):
    Y, D = rng.standard_normal((200, 20)).astype(np.float32), make_dictionary(30, 20)
    mixed = np.concatenate([Y[:100], Y[100:] * np.float32(2.0**22)])
    units, _, got = sums_of(Y, D, (0, 22))
    assert units[0] == 0
    assert units[1] < 0
    one, _, expected = sums_of(mixed, D, (0,))
    assert one == [units[1]]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("exponent", [-100, 100])
def test_lanczos_scalars_are_those_of_samples_in_units(rng, make_dictionary, exponent):
    Y, D = rng.standard_normal((100, 20)).astype(np.float32), make_dictionary(30, 20)
    _, plain, expected = sums_of(Y, D, (0,))
    (unit,), scaled, got = sums_of(Y, D, (exponent,))
    np.testing.assert_array_equal(got, expected)
    factor = 2.0 ** (2 * (unit + exponent))
    found, wanted = ((lz.alpha2, *lz.diagonal, *lz.off) for lz in (scaled, plain))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b * factor)


def test_a_vector_whose_square_underflows_is_measured_in_units_of_its_own(rng):
    """One atom of a round of ordinary ones has tiny sums: nothing is lost, and the others keep their bits."""
    old = kernels.unit_rows(rng.standard_normal((3, 8))).astype(np.float32)
    W, x2 = rng.standard_normal((3, 8)).astype(np.float32), np.ones(3)
    expected = lanczos.warm_start(W, x2, old)
    small = np.array([1, 2.0**-100, 1])
    found = lanczos.warm_start(W * small[:, None].astype(np.float32), x2 * small, old)
    np.testing.assert_array_equal(found.basis[0], expected.basis[0])
    np.testing.assert_array_equal(found.alpha2, expected.alpha2 * small)


def test_units_are_powers_of_two_that_the_dtype_holds():
    for dtype in (np.float32, np.float64):
        for exponent in (*range(-1070, 1024, 37), -149, -126, 127):
            unit = unit_of(2.0**exponent, dtype)
            assert 0 < np.ldexp(dtype(1), unit) < np.inf or abs(unit) <= 1074, (dtype, exponent)
            if abs(exponent) < 19:
                assert unit == 0
    assert unit_of(2.0**-149, np.float32) == 126
    assert unit_of(float("inf"), np.float32) == 0


def test_rows_near_one_keep_their_mantissas(rng):
    rows = rng.standard_normal((4, 6)).astype(np.float32)
    rows[2] = 0
    far = rows * np.array([2.0**100, 1, 1, 2.0**-100], np.float32)[:, None]
    np.testing.assert_array_equal(rows_near_one(far), rows_near_one(rows))
    largest = np.abs(rows_near_one(rows)).max(axis=1)
    assert (((0.5 <= largest) & (largest < 1)) | (largest == 0)).all()
