"""Every entry of the table of encoders does what it claims, and is refused where it claims nothing."""

from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask import DBKSVD
from dbksvd_dask.errors import InputError
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix, residual
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS
from dbksvd_dask.plan.params import FitParams
from tests.naive import kernels

DOCS = Path(__file__).parents[2] / "docs"
EVERY = pytest.mark.parametrize("name", ENCODERS)


def run(Y, D, k, **how):
    return encode_rows(Y, D, gram_matrix(D), EncodeSpec(k, **how))


@EVERY
@pytest.mark.parametrize("k", [1, 4, 30])
def test_codes_have_at_most_k_different_atoms_and_lower_the_error(rng, make_dictionary, name, k):
    D = make_dictionary(30, 24)
    Y = rng.standard_normal((20, 24)).astype(np.float32)
    atom, coefficient = run(Y, D, k, encoder=name)
    assert atom.shape == coefficient.shape == (20, k)
    assert atom.dtype == np.int32
    for row, x in zip(atom, coefficient, strict=True):
        used = row[row >= 0]
        assert len(set(used)) == len(used) >= 1
        assert (row[len(used) :] == -1).all(), "empty slots come last"
        assert (x[len(used) :] == 0).all()
    R = residual(Y, atom, coefficient, D)
    assert (np.linalg.norm(R, axis=1) < np.linalg.norm(Y, axis=1)).all()


@EVERY
@pytest.mark.parametrize("nonneg", [False, True])
def test_a_zero_row_has_no_code(make_dictionary, name, nonneg):
    nonneg = nonneg and ENCODERS[name].nonneg
    atom, coefficient = run(np.zeros((3, 16), np.float32), make_dictionary(20, 16), 5, encoder=name, nonneg=nonneg)
    assert (atom == -1).all()
    assert (coefficient == 0).all()


@EVERY
def test_an_exact_tie_goes_to_the_lowest_index(name):
    D = np.vstack([np.eye(6), np.eye(6)]).astype(np.float32)
    atom, coefficient = run(np.array([[0, 0, 2, 0, 0, 0]], np.float32), D, 1, encoder=name)
    assert atom.tolist() == [[2]]
    np.testing.assert_allclose(coefficient, [[2]], rtol=1e-6)


@EVERY
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_same_codes_at_any_scale_of_the_samples(rng, make_dictionary, name, dtype):
    D = make_dictionary(40, 16, dtype)
    Y = rng.standard_normal((20, 16)).astype(dtype)
    atom, coefficient = run(Y, D, 4, encoder=name)
    assert coefficient.dtype == dtype
    scaled_atom, scaled = run(Y * dtype(2.0**20), D, 4, encoder=name)
    np.testing.assert_array_equal(scaled_atom, atom)
    np.testing.assert_array_equal(scaled, coefficient * dtype(2.0**20))


@EVERY
def test_the_same_bits_wherever_the_rows_are_cut(rng, make_dictionary, name):
    D = make_dictionary(101, 37)
    Y = rng.standard_normal((600, 37)).astype(np.float32)
    gram, spec = gram_matrix(D), EncodeSpec(5, encoder=name)
    whole = encode_rows(Y, D, gram, spec)
    for size in (1, 47, 49, 500):
        cut = [
            encode_rows(Y[a : a + size], D, gram, spec, first=a) for a in range(0, 150 if size == 1 else 600, size)
        ]
        for array, parts in zip(whole, zip(*cut, strict=True), strict=True):
            found = np.concatenate(parts)
            np.testing.assert_array_equal(found, array[: len(found)])


@pytest.mark.parametrize("name", [n for n, e in ENCODERS.items() if e.nonneg])
def test_non_negative_where_it_says_so(rng, make_dictionary, name):
    D = make_dictionary(30, 16)
    Y = rng.standard_normal((30, 16)).astype(np.float32)
    _, coefficient = run(Y, D, 6, encoder=name, nonneg=True)
    assert (coefficient >= 0).all()
    assert (run(Y, D, 6, encoder=name)[1] < 0).any(), "the rule must change something, or this test shows nothing"


@pytest.mark.parametrize("name", [n for n, e in ENCODERS.items() if e.least_squares])
def test_least_squares_where_it_says_so(rng, make_dictionary, name):
    D = make_dictionary(60, 30)
    Y = rng.standard_normal((30, 30)).astype(np.float32)
    atom, coefficient = run(Y, D, 6, encoder=name)
    for i, y in enumerate(Y):
        support = atom[i][atom[i] >= 0]
        expected = kernels.refit(y, D, support)
        np.testing.assert_allclose(coefficient[i, : support.size], expected, rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize(
    ("capability", "how", "message"),
    [
        ("nonneg", {"nonneg": True}, "cannot honour nonneg=True; use encoder='mp'"),
        ("staged", {"encode": "staged", "groups": (8, 12)}, "use encoder='mp'"),
        ("weighted", {"growth": 1.5, "n_iter": 100}, "needs encoder='mp'"),
    ],
)
def test_combinations_are_refused_exactly_where_the_table_has_no_capability(name, capability, how, message):
    values = {"n_atoms": 20, "k": 3, "encoder": name, **how}
    if getattr(ENCODERS[name], capability):
        assert FitParams.checked(**values).encoder == name
    else:
        with pytest.raises(InputError, match=message):
            FitParams.checked(**values)


@EVERY
def test_every_encoder_fits_and_is_documented(rng, name):
    Y = rng.standard_normal((300, 12)).astype(np.float32)
    model = DBKSVD(16, 3, n_iter=1, encoder=name).fit(Y)
    assert model.transform(Y).attrs["encoder"] == name
    assert DBKSVD.__doc__ is not None
    assert f'"{name}"' in DBKSVD.__doc__
    assert f'encoder="{name}"' in (DOCS / "algorithm.md").read_text()
