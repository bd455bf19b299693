"""Matryoshka groups: staged encoding equals its twin, stays within k, travels with the dictionary."""

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import InputError
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.groups import exponential_groups, group_budgets
from dbksvd_dask.store.runs import open_dictionary
from tests.naive import groups as naive_groups

STAGES = ((0, 8, 3), (8, 20, 2), (20, 40, 2))


def samples(rng, n=300, d=24, dtype=np.float32):
    return rng.standard_normal((n, d)).astype(dtype)


@pytest.mark.parametrize("how", [{}, {"nonneg": True}, {"min_coefficient": 0.8}])
def test_staged_codes_equal_the_twin(rng, make_dictionary, how):
    Y, D = samples(rng, 200, dtype=np.float64), make_dictionary(40, 24, np.float64)
    how = {"min_coefficient": 1e-3, **how}  # below it, rounding chooses
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), EncodeSpec(7, stages=STAGES, **how))
    for i, y in enumerate(Y):
        support, x, gap = naive_groups.staged(y, D, STAGES, 7, **how)
        assert gap > 1e-9
        assert atom[i][atom[i] >= 0].tolist() == support
        np.testing.assert_allclose(coefficient[i][: len(support)], x, atol=1e-5)


def test_rtol_is_relative_to_the_sample(rng, make_dictionary):
    Y, D = samples(rng), make_dictionary(40, 24)
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), EncodeSpec(7, rtol=0.6, stages=STAGES))
    for y, row, x in zip(Y, atom, coefficient, strict=True):
        used = row >= 0
        rest = np.linalg.norm(y - x[used] @ D[row[used]]) / np.linalg.norm(y)
        last = np.linalg.norm(y - x[used][:-1] @ D[row[used][:-1]]) / np.linalg.norm(y)
        assert last > 0.6 - 1e-5  # it did not go on for longer than needed
        assert rest <= 0.6 + 1e-5 or used.sum() >= 2


@pytest.mark.parametrize("nonneg", [False, True])
def test_refit_is_least_squares_on_the_support_of_all_groups(rng, make_dictionary, nonneg):
    Y, D = samples(rng, 60, dtype=np.float64), make_dictionary(40, 24, np.float64)
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), EncodeSpec(7, nonneg=nonneg, refit=True, stages=STAGES))
    for i, y in enumerate(Y):
        used = atom[i] >= 0
        rest = y - coefficient[i][used] @ D[atom[i][used]]
        slope = D[atom[i][used]] @ rest
        inside = coefficient[i][used] > 0 if nonneg else np.ones(used.sum(), bool)
        np.testing.assert_allclose(slope[inside], 0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_stage_is_plain_encoding(rng, make_dictionary, whole_gram, dtype):
    Y, D = samples(rng, 700).astype(dtype), make_dictionary(300, 24, dtype)
    gram = gram_matrix(D)
    staged = encode_rows(Y, D, gram, EncodeSpec(5, stages=((0, 300, 5),)))
    for a, b in zip(encode_rows(Y, D, gram, EncodeSpec(5)), staged, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)  # float32 products may come from a compact gram
    with whole_gram():
        for a, b in zip(encode_rows(Y, D, gram, EncodeSpec(5)), staged, strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_full_row_leaves_nothing_to_later_groups(rng, make_dictionary):
    Y, D = samples(rng), make_dictionary(40, 24)
    stages = ((0, 20, 4), (20, 40, 4))
    atom, _ = encode_rows(Y, D, gram_matrix(D), EncodeSpec(4, stages=stages))
    assert (atom < 20).all()


@given(k=st.integers(1, 64), n_groups=st.integers(1, 20))
def test_shares_are_equal_and_sum_to_k(k, n_groups):
    shares = group_budgets(k, n_groups)
    assert sum(shares) == k
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@settings(max_examples=30)
@given(n_atoms=st.integers(1, 5000))
def test_exponential_groups_fill_the_dictionary(n_atoms):
    groups = exponential_groups(n_atoms)
    assert sum(groups) == n_atoms
    assert min(groups) >= 1


@pytest.mark.parametrize("encode", ["plain", "staged"])
@pytest.mark.parametrize("nonneg", [False, True])
def test_total_never_exceeds_k(rng, encode, nonneg):
    Y = samples(rng)
    model = DBKSVD(40, 7, groups="exponential", encode=encode, nonneg=nonneg, n_iter=2).fit(Y)
    codes = model.transform(Y)
    assert codes.sizes["slot"] == 7
    assert float(model.history_["nonzeros"].max()) <= 7
    if nonneg:
        assert (codes["coefficient"] >= 0).all()


def test_staged_encoding_keeps_the_share_of_each_group(rng):
    Y = samples(rng)
    model = DBKSVD(40, 7, groups=(8, 12, 20), encode="staged", n_iter=2).fit(Y)
    atom = model.transform(Y)["atom"].values
    for (start, stop), share in zip([(0, 8), (8, 20), (20, 40)], (3, 2, 2), strict=True):
        inside = ((atom >= start) & (atom < stop)).sum(axis=1)
        assert inside.max() == share


@pytest.mark.parametrize("nonneg", [False, True])
def test_staged_fit_does_not_depend_on_threads_or_chunks(rng, nonneg):
    Y = samples(rng, 500, 64)
    how = {"groups": (8, 12, 20), "encode": "staged", "nonneg": nonneg, "n_iter": 2, "chunk_size": 64}
    kept = []
    for config in ({"scheduler": "threads", "num_workers": 2}, {"scheduler": "synchronous"}):
        with dask.config.set(**config):
            model = DBKSVD(40, 4, **how).fit(Y)
            codes = model.transform(Y)
        score = model.history_["validation_variance_explained"].values
        kept.append((model.components_, codes["atom"].values, codes["coefficient"].values, score))
    for a, b in zip(*kept, strict=True):
        assert a.tobytes() == b.tobytes()
    whole, cut = (DBKSVD(40, 4, **how).fit(da.from_array(Y, chunks=c)) for c in ((500, 64), (77, 32)))
    assert whole.components_.tobytes() == cut.components_.tobytes()
    lazy = model.transform(da.from_array(Y, chunks=(500, 64)))
    np.testing.assert_array_equal(lazy["atom"].values, kept[0][1])


def test_staged_encoding_travels_with_the_dictionary(rng, tmp_path):
    import zarr

    Y = samples(rng)
    zarr.create_array(str(tmp_path / "y.zarr"), shape=Y.shape, dtype="f4", chunks=(100, 24))[...] = Y
    run = tmp_path / "run"
    model = DBKSVD(40, 7, groups=(8, 12, 20), encode="staged", n_iter=2, checkpoint=run).fit(tmp_path / "y.zarr")
    assert open_dictionary(run).params["encode"] == "staged"
    encode_store(tmp_path / "y.zarr", run, tmp_path / "codes.zarr")
    stored = open_codes(tmp_path / "codes.zarr")
    np.testing.assert_array_equal(stored["atom"].values, model.transform(Y)["atom"].values)
    encode_store(tmp_path / "y.zarr", run, tmp_path / "codes.zarr", resume=True)  # the very same codes


def test_encode_with_groups_is_the_staged_transform(rng):
    Y = samples(rng)
    model = DBKSVD(40, 7, groups=(8, 12, 20), encode="staged", n_iter=1).fit(Y)
    codes = encode(Y, model.components_, 7, mean=model.mean_, groups=(8, 12, 20))
    np.testing.assert_array_equal(codes["atom"].values, model.transform(Y)["atom"].values)


def test_resume_after_interrupt_gives_same_dictionary(rng, tmp_path):
    Y = samples(rng)
    how = {"groups": (8, 12, 20), "encode": "staged", "chunk_size": 64}
    whole = DBKSVD(40, 7, n_iter=4, **how).fit(Y)
    DBKSVD(40, 7, n_iter=2, checkpoint=tmp_path / "run", **how).fit(Y)
    resumed = DBKSVD(40, 7, n_iter=4, checkpoint=tmp_path / "run", **how).fit(Y, resume=True)
    assert whole.components_.tobytes() == resumed.components_.tobytes()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"encode": "staged"}, r"encode='staged' offers groups in order; give groups"),
        ({"encode": "staged", "groups": (8, 32), "encoder": "omp"}, r"use encoder='mp', not 'omp'"),
        ({"encode": "nested"}, r"encode='nested' is not known; use one of 'plain', 'staged'"),
    ],
)
def test_illegal_combinations_are_refused(rng, params, text):
    with pytest.raises(InputError, match=text):
        DBKSVD(40, 7, **params).fit(samples(rng))


@pytest.mark.slow
def test_groups_lower_the_coherence_of_real_patches(patches):
    """The paper's finding, on photographs: fewer atoms with a close neighbour."""
    how = {"n_iter": 10, "validation": 0, "seed": 1}
    plain, nested = (DBKSVD(128, 10, groups=g, **how).fit(patches).components_ for g in (None, "exponential"))
    near = [np.abs(D @ D.T - np.eye(128)).max(axis=1).mean() for D in (plain, nested)]
    assert near[1] < near[0]
