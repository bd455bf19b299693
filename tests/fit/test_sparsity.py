"""k as the mean number of nonzeros: reached, per sample and deterministic when encoding, stored, resumable."""

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask import DBKSVD
from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import InputError
from dbksvd_dask.fit import threshold
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.plan import growth
from dbksvd_dask.store.runs import open_dictionary


def uneven(rng, n=800, d=24, n_features=48):
    """Samples made of 1 to 9 features each."""
    truth = rng.standard_normal((n_features, d))
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    X = np.zeros((n, n_features))
    for row in X:
        some = rng.choice(n_features, rng.integers(1, 10), replace=False)
        row[some] = rng.uniform(1, 2, some.size)
    return (X @ truth + 0.02 * rng.standard_normal((n, d))).astype(np.float32)


def nonzeros(codes):
    return ((codes["atom"] >= 0) & (codes["coefficient"] != 0)).sum("slot").values


@pytest.mark.parametrize("how", [{}, {"nonneg": True}, {"encoder": "omp"}, {"refit": True}])
def test_mean_number_of_nonzeros_comes_to_k(rng, how):
    Y = uneven(rng)
    model = DBKSVD(48, 5, sparsity="mean", max_nonzeros=16, n_iter=15, validation=0, **how).fit(Y)
    counts = nonzeros(model.transform(Y))
    assert counts.mean() == pytest.approx(5, rel=0.06)
    assert counts.min() < 4
    assert counts.max() > 6
    assert model.threshold_ > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"groups": (8, 40)},
        {"groups": (8, 40), "encode": "staged", "refit": True},
        {"growth": 2.0, "encode": "staged"},
    ],
)
def test_the_mean_is_k_on_new_samples_however_they_are_encoded(rng, how):
    """Training encodes otherwise than the finished dictionary does: groups in turn, no refit while it grows."""
    Y = uneven(rng, 8000)
    model = DBKSVD(48, 5, sparsity="mean", nonneg=True, n_iter=24, validation=0, **how).fit(Y[:4000])
    assert nonzeros(model.transform(Y[4000:])).mean() == pytest.approx(5, rel=0.04)


def test_held_out_rows_set_the_threshold_where_there_are_enough(rng):
    Y = uneven(rng, 4000)
    model = DBKSVD(48, 5, sparsity="mean", n_iter=3, validation=200, batch_size=1000)
    context = model._trainer(Y).context
    state = model.fit(Y).to_dictionary()
    held, following = context.stream.validation_rows(), context.stream.batch(3)
    np.testing.assert_array_equal(threshold.unfitted_rows(context, state, 400), held)
    np.testing.assert_array_equal(threshold.unfitted_rows(context, state, 8192), following)


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 5])
def test_a_grown_dictionary_encodes_with_k_nonzeros_on_average(rng, k):
    """Its training has a threshold of its own; that of encoding has to be found beside it."""
    Y = uneven(rng)
    how = {"growth": 1.5, "nonneg": True, "n_iter": 32, "validation": 0}
    model = DBKSVD(48, k, sparsity="mean", max_nonzeros=16, **how).fit(Y)
    assert nonzeros(model.transform(Y)).mean() == pytest.approx(k, rel=0.06)


@pytest.mark.parametrize("encode", ["plain", "staged"])
def test_groups_share_the_slots(rng, encode):
    Y = uneven(rng)
    how = {"groups": (8, 16, 24), "encode": encode, "max_nonzeros": 12, "n_iter": 12, "validation": 0}
    model = DBKSVD(48, 5, sparsity="mean", **how).fit(Y)
    assert float(model.history_["nonzeros"][-3:].mean()) == pytest.approx(5, rel=0.1)
    codes = model.transform(Y)
    assert codes.sizes["slot"] == 12
    if encode == "staged":
        assert nonzeros(codes).mean() == pytest.approx(5, rel=0.15)


def test_slots_are_the_stated_maximum(rng):
    Y = uneven(rng)
    for given_max, slots in ((None, 15), (7, 7)):
        model = DBKSVD(48, 5, sparsity="mean", max_nonzeros=given_max, n_iter=2).fit(Y)
        codes = model.transform(Y)
        assert codes.sizes["slot"] == slots
        assert nonzeros(codes).max() <= slots


def test_encoding_is_per_sample(rng):
    """A sample's code does not depend on the samples around it."""
    Y = uneven(rng)
    model = DBKSVD(48, 5, sparsity="mean", n_iter=4).fit(Y)
    every = model.transform(Y)["atom"].values
    alone = np.concatenate([model.transform(Y[i : i + 1])["atom"].values for i in range(20)])
    np.testing.assert_array_equal(alone, every[:20])


def test_no_coefficient_begins_below_the_threshold(rng):
    Y = uneven(rng)
    model = DBKSVD(48, 5, sparsity="mean", n_iter=6).fit(Y)
    first = model.transform(Y)["coefficient"].values[:, 0]
    assert (np.abs(first[first != 0]) >= model.threshold_ * (1 - 1e-6)).all()


@given(threshold=st.floats(1e-6, 1e3), mean=st.floats(0, 1e3), k=st.integers(1, 100))
def test_threshold_moves_the_right_way_and_not_too_far(threshold, mean, k):
    new = growth.next_threshold(threshold, mean, k)
    assert 0.5 * threshold <= new <= 2 * threshold
    assert (new >= threshold) if mean >= k else (new <= threshold)


@pytest.mark.slow
@pytest.mark.parametrize("nonneg", [False, True])
def test_threads_and_chunks_do_not_change_a_bit(rng, nonneg):
    Y = uneven(rng, 500)
    how = {"sparsity": "mean", "n_iter": 3, "chunk_size": 64, "nonneg": nonneg}
    models = []
    for config in ({"scheduler": "threads", "num_workers": 2}, {"scheduler": "synchronous"}):
        with dask.config.set(**config):
            models.append(DBKSVD(48, 5, **how).fit(Y))
    models += [DBKSVD(48, 5, **how).fit(da.from_array(Y, chunks=c)) for c in ((500, 24), (77, 10))]
    for a, b in (models[:2], models[2:]):
        assert a.components_.tobytes() == b.components_.tobytes()
        assert a.threshold_ == b.threshold_


def test_threshold_is_stored_and_used_by_the_encode_job(rng, tmp_path):
    Y = uneven(rng)
    zarr.create_array(str(tmp_path / "y.zarr"), shape=Y.shape, dtype="f4", chunks=(200, 24))[...] = Y
    how = {"sparsity": "mean", "n_iter": 5, "checkpoint": tmp_path / "run"}
    model = DBKSVD(48, 5, **how).fit(tmp_path / "y.zarr")
    assert open_dictionary(tmp_path / "run").extra["threshold"] == model.threshold_
    encode_store(tmp_path / "y.zarr", tmp_path / "run", tmp_path / "codes.zarr")
    stored = open_codes(tmp_path / "codes.zarr")
    np.testing.assert_array_equal(stored["atom"].values, model.transform(Y)["atom"].values)
    encode_store(tmp_path / "y.zarr", tmp_path / "run", tmp_path / "at-most-3.zarr", k=3)
    assert (open_codes(tmp_path / "at-most-3.zarr")["atom"].values >= 0).sum(axis=1).min() == 3


def test_resume_after_interrupt_gives_same_dictionary(rng, tmp_path):
    Y = uneven(rng)
    whole = DBKSVD(48, 5, sparsity="mean", n_iter=5).fit(Y)
    DBKSVD(48, 5, sparsity="mean", n_iter=3, checkpoint=tmp_path / "run").fit(Y)
    resumed = DBKSVD(48, 5, sparsity="mean", n_iter=5, checkpoint=tmp_path / "run").fit(Y, resume=True)
    assert whole.components_.tobytes() == resumed.components_.tobytes()
    assert whole.threshold_ == resumed.threshold_
    np.testing.assert_array_equal(whole.history_["threshold"], resumed.history_["threshold"])


def test_partial_fit_learns_the_threshold(rng):
    Y = uneven(rng)
    model = DBKSVD(48, 5, sparsity="mean", validation=0)
    for _ in range(3):
        model.partial_fit(Y)
    assert model.threshold_ > 0


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"sparsity": "median"}, r"sparsity='median' is not known; use one of 'max', 'mean'"),
        ({"sparsity": "max", "max_nonzeros": 8}, r"max_nonzeros=8 is for sparsity='mean'"),
        ({"max_nonzeros": 3}, r"max_nonzeros=3 must lie between k=5"),
        ({"sparsity": "mean", "max_nonzeros": 3}, r"max_nonzeros=3 must lie between k=5"),
        ({"sparsity": "mean", "max_nonzeros": 49}, r"max_nonzeros=49 must lie between .* n_atoms=48"),
        ({"sparsity": "mean", "max_nonzeros": 6.5}, r"max_nonzeros=6.5 is not a whole number"),
        ({"sparsity": "mean", "min_coefficient": 0.1}, r"learns the smallest coefficient; leave out min_coeff"),
    ],
)
def test_illegal_combinations_are_refused(rng, params, text):
    with pytest.raises(InputError, match=text):
        DBKSVD(48, 5, **params).fit(uneven(rng, 60))
