"""Growing dictionaries: the schedule, the draw of new atoms, and the same promises as any other fit."""

import itertools

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from dbksvd_dask import DBKSVD
from dbksvd_dask.codes import open_codes
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.fit.growing import prefers_frequent
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph import draw
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.plan import growth
from dbksvd_dask.plan.groups import plan_rounds
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.store.runs import open_dictionary
from tests.naive.groups import batch_in_order, proportional_winners

SIZES = (16, 24, 36, 48)  # growth=1.5 to 48 atoms


def samples(rng, n=400, d=24):
    return rng.standard_normal((n, d)).astype(np.float32) + 0.5


# ---------------------------------------------------------------------------------------------- schedule


@given(n_atoms=st.integers(1, 20_000), factor=st.floats(1.01, 8.0))
def test_sizes_rise_to_n_atoms_by_no_more_than_the_factor(n_atoms, factor):
    sizes = growth.growth_sizes(n_atoms, factor)
    assert sizes[0] == min(16, n_atoms)
    assert sizes[-1] == n_atoms
    for a, b in itertools.pairwise(sizes):
        assert a < b <= max(a + 1, a * factor + 1)


@given(iteration=st.integers(0, 500), factor=st.floats(1.05, 4.0))
def test_schedule_never_shrinks_and_ends_with_all_atoms(iteration, factor):
    sizes = growth.growth_sizes(300, factor)
    now, then = growth.growth_step(sizes, iteration), growth.growth_step(sizes, iteration + 1)
    assert now.n_atoms == sizes[now.stage] <= then.n_atoms
    assert then.stage - now.stage in (0, 1)
    if iteration >= growth.growth_iterations(sizes) - 1:
        assert now.n_atoms == 300


@given(n_atoms=st.integers(1, 20_000), k=st.integers(1, 64))
def test_groups_by_frequency_begin_small_and_take_all_atoms_once(n_atoms, k):
    groups = growth.frequency_stages(n_atoms, k)
    assert [start for start, _, _ in groups] == [0, *(stop for _, stop, _ in groups[:-1])]
    assert groups[-1][1] == n_atoms
    assert groups[0][1] <= 4
    for start, stop, most in groups:
        assert most == min(k, stop - start)
        assert stop - start <= max(4, start)


# ---------------------------------------------------------------------------------------------- in which order


@pytest.mark.parametrize(
    ("nonzeros", "expected"), [([], True), ([3.5], True), ([3.7], False), ([1.0, 4.0], False), ([9.0, 3.5], True)]
)
def test_frequent_atoms_are_preferred_while_a_pursuit_takes_fewer_than_k(nonzeros, expected):
    history = {"plain_nonzeros": nonzeros} if nonzeros else {}
    assert prefers_frequent(history, 4) is expected


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("residual_norm", [None, 5.0])
def test_a_batch_that_prefers_frequent_atoms_equals_its_twin(rng, make_dictionary, nonneg, residual_norm):
    """After the first batch, samples with large residuals count less: half of 0.3 of the last residual norm."""
    Y, D = rng.standard_normal((200, 24)), make_dictionary(40, 24, np.float64)
    how = {"growth": 1.5, "nonneg": nonneg, "refit": True, "center": False, "validation": 0}
    params = FitParams.checked(n_atoms=40, k=5, n_iter=32, chunk_size=64, **how)
    trainer = Trainer(as_source(Y, 64), params)
    used = rng.integers(1, 100, 40)
    history = {} if residual_norm is None else {"residual_norm": [9.0, residual_norm]}
    state = Dictionary(D, None, params.to_json(), iteration=24, counts=used, history=history)
    state = state.with_thresholds(0.5, 0.7)
    result, rows = trainer.step(state), trainer.stream.batch(24)
    (group,) = trainer.policy.batch_spec(state).groups
    rounds = [list(m) for m in plan_rounds(group, 0, 24)]
    how = {"steps": 2, "min_coefficient": 0.7, "nonneg": nonneg, "half": residual_norm and 0.3 * residual_norm}
    expected, counts, R = batch_in_order(Y[rows], D, used, 15, rounds, **how)
    np.testing.assert_array_equal(result.counts, counts)
    np.testing.assert_allclose(result.atoms, expected, atol=1e-6)
    error = np.mean(np.linalg.norm(R, axis=1) / np.linalg.norm(Y[rows], axis=1))
    np.testing.assert_allclose(result.history["relative_error"][-1], error, rtol=1e-6)
    norm = np.sqrt(np.mean(np.sum(R**2, axis=1)))
    np.testing.assert_allclose(result.history["residual_norm"][-1], norm, rtol=1e-6)


def test_atoms_are_sorted_by_use(rng):
    Y = samples(rng, 2000)
    model = DBKSVD(24, 3, growth=1.5, n_iter=16, nonneg=True, validation=0).fit(Y)
    atoms = model.transform(Y)["atom"].values
    counts = np.bincount(atoms[atoms >= 0], minlength=24)
    assert spearmanr(np.arange(24), counts).statistic < -0.8


def made_of_pairs(rng, n=8000, d=60, n_pairs=20):
    """Samples of general features and of special ones, each of which comes only with its general one."""
    truth = np.linalg.qr(rng.standard_normal((d, 2 * n_pairs)))[0].T
    general = rng.random((n, n_pairs)) < 0.15
    special = general & (rng.random((n, n_pairs)) < 0.3)
    size = 4.5 + 0.5 * rng.standard_normal((n, 2 * n_pairs))
    Y = (np.concatenate([general, special], axis=1) * size) @ truth + 0.5 * rng.standard_normal((n, d))
    return Y.astype(np.float32), truth[:n_pairs], truth[n_pairs:]


@pytest.mark.slow
def test_a_feature_that_never_comes_alone_gets_an_atom_of_its_own(rng):
    """All at once, pursuits settle on atoms for the sum of both, which saves a nonzero."""
    Y, *truths = made_of_pairs(rng)
    how = {"sparsity": "mean", "nonneg": True, "batch_size": 2000, "chunk_size": 1000, "validation": 0}
    growing, plain = (
        [
            np.mean((DBKSVD(40, 4, **how, **more).fit(Y).components_ @ truth.T).max(axis=0) > 0.9)
            for truth in truths
        ]
        for more in ({"growth": 1.5, "n_iter": 32}, {"n_iter": 32})
    )
    assert min(growing) >= 0.75
    assert plain[0] > 0.9
    assert plain[1] < 0.1


# ---------------------------------------------------------------------------------------------- new atoms


def test_keys_give_the_draw_of_the_twin(rng):
    norms, uniform = rng.random(50), rng.random(50)
    norms[::7] = 0
    keys = draw.race_keys(norms, uniform)
    best = [int(i) for i in np.argsort(-keys, kind="stable")[:45] if np.isfinite(keys[i])]
    assert best == proportional_winners(norms, uniform, 45)


@pytest.mark.parametrize("rule", ["residual", "keep"])
def test_dead_atoms_are_drawn_anew_unless_they_are_kept(rng, make_dictionary, rule):
    Y, D = samples(rng), make_dictionary(24, 24)
    params = FitParams.checked(n_atoms=24, k=3, growth=1.5, n_iter=16, dead_atoms=rule, validation=0)
    trainer = Trainer(as_source(Y, 8192), params)
    counts = np.append(np.arange(20, 0, -1), np.zeros(4, int))
    state = Dictionary(D, np.zeros(24), params.to_json(), iteration=12, counts=counts, previous=D)
    state = state.with_thresholds(0.0, 0.5)
    grown = trainer.policy.before(state, np.arange(400))
    assert grown.atoms.shape == (24, 24)
    np.testing.assert_array_equal(grown.atoms[:20], D[:20])
    np.testing.assert_allclose(np.linalg.norm(grown.atoms, axis=1), 1, atol=1e-5)
    same = (grown.atoms[20:] == D[20:]).all(axis=1)
    assert same.all() if rule == "keep" else not same.any()
    assert trainer.policy.batch_spec(state).dead_atoms == "keep"


def test_draws_are_proportional_to_squared_norms(rng):
    norms = np.sqrt([1.0, 2.0, 4.0, 1.0])
    first = [int(np.argmax(draw.race_keys(norms, rng.random(4)))) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(first) / 4000, np.array([1, 2, 4, 1]) / 8, atol=0.03)


def test_samples_without_residual_give_random_directions():
    """Data of one direction: nothing is left over to take, and the fit still ends with unit atoms."""
    Y = np.outer(np.arange(1, 101), np.ones(12)).astype(np.float32)
    model = DBKSVD(20, 2, growth=1.5, n_iter=16, center=False, nonneg=True, validation=0).fit(Y)
    np.testing.assert_allclose(np.linalg.norm(model.components_, axis=1), 1, atol=1e-5)
    assert np.isfinite(model.history_["relative_error"]).all()


# ---------------------------------------------------------------------------------------------- fits


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"nonneg": True}, {}, {"nonneg": True, "sparsity": "mean"}])
def test_history_tells_the_stages(rng, how):
    model = DBKSVD(48, 4, growth=1.5, n_iter=34, chunk_size=100, **how).fit(samples(rng))
    assert model.components_.shape == (48, 24)
    expected = [growth.growth_step(SIZES, i) for i in range(34)]
    assert model.history_["n_atoms"].values.tolist() == [s.n_atoms for s in expected]
    assert model.history_["stage"].values.tolist() == [s.stage for s in expected]
    assert (model.history_["growth_threshold"].values > 0).all()
    assert model.threshold_ > 0
    assert "validation_variance_explained" in model.history_


def test_mean_is_learned_on_the_way(rng):
    Y = samples(rng)
    model = DBKSVD(16, 2, growth=1.5, n_iter=10, nonneg=True).fit(Y)
    rest = Y - model.inverse_transform(model.transform(Y))
    assert np.linalg.norm(model.mean_) > 0
    assert np.linalg.norm(rest.mean(axis=0)) < 0.2 * np.linalg.norm(Y.mean(axis=0))
    assert (DBKSVD(16, 2, growth=1.5, n_iter=8, center=False).fit(Y).mean_ == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"nonneg": True}, {"sparsity": "mean"}])
def test_threads_and_chunks_do_not_change_a_bit(rng, how):
    Y = samples(rng, 500)
    how = {"growth": 3.0, "n_iter": 17, "chunk_size": 128, "validation": 64, **how}
    models = []
    for config in ({"scheduler": "threads", "num_workers": 2}, {"scheduler": "synchronous"}):
        with dask.config.set(**config):
            models.append(DBKSVD(24, 4, **how).fit(Y))
    models += [DBKSVD(24, 4, **how).fit(da.from_array(Y, chunks=c)) for c in ((500, 24), (77, 10))]
    for a, b in (models[:2], models[2:]):
        assert a.components_.tobytes() == b.components_.tobytes()
        assert a.mean_.tobytes() == b.mean_.tobytes()
        assert a.threshold_ == b.threshold_


@pytest.mark.slow
@pytest.mark.parametrize("stop", [7, 8, 10])
def test_resume_in_any_stage_gives_same_dictionary(rng, tmp_path, monkeypatch, stop):
    Y = samples(rng)
    how = {"growth": 1.5, "n_iter": 16, "nonneg": True, "validation": 0}
    whole = DBKSVD(24, 3, **how).fit(Y)

    real, seen = Trainer.step, []

    def interrupted(self, state, rows=None):
        if len(seen) == stop:
            raise KeyboardInterrupt
        seen.append(state.iteration)
        return real(self, state, rows)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DBKSVD(24, 3, checkpoint=tmp_path / "run", **how).fit(Y)
    monkeypatch.undo()
    stored = open_dictionary(tmp_path / "run")
    assert stored.n_atoms == growth.growth_step((16, 24), stop - 1).n_atoms
    resumed = DBKSVD(24, 3, checkpoint=tmp_path / "run", **how).fit(Y, resume=True)
    assert whole.components_.tobytes() == resumed.components_.tobytes()
    assert whole.mean_.tobytes() == resumed.mean_.tobytes()
    np.testing.assert_array_equal(whole.history_["n_atoms"], resumed.history_["n_atoms"])


@pytest.mark.slow
def test_an_unfinished_dictionary_can_encode(rng, tmp_path):
    import zarr

    Y = samples(rng)
    zarr.create_array(str(tmp_path / "y.zarr"), shape=Y.shape, dtype="f4", chunks=(100, 24))[...] = Y
    how = {"growth": 1.5, "encode": "staged", "nonneg": True, "checkpoint": tmp_path / "run", "n_iter": 32}
    DBKSVD(48, 3, **how).fit(tmp_path / "y.zarr")
    for kept in (tmp_path / "run").glob("*.zarr"):
        stored = open_dictionary(kept)
        stored.atoms, stored.iteration = stored.atoms[:24], 9  # as it was in its second stage
        encode_store(tmp_path / "y.zarr", stored, tmp_path / f"{kept.name}.codes")
        assert int(open_codes(tmp_path / f"{kept.name}.codes")["atom"].max()) < 24


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"growth": 1.0}, r"growth=1.0 is not a factor >= 1.01"),
        ({"growth": "fast"}, r"growth='fast' is not a factor"),
        ({"growth": 1.5, "groups": (8, 40)}, r"makes its own groups; leave out groups=\(8, 40\)"),
        ({"growth": 1.5, "n_iter": 31}, r"in 4 stages of 8 iterations; use n_iter >= 32 \(now 31\)"),
        (
            {"growth": 1.5, "encoder": "omp"},
            r"needs encoder='mp'; for least squares on what it finds, use refit=True",
        ),
        ({"growth": 1.5, "init": np.eye(48, 24)}, r"starts from few atoms; use init='uniform' or 'data'"),
        ({"growth_threshold": -1}, r"growth_threshold=-1 is not a finite number >= 0"),
    ],
)
def test_illegal_combinations_are_refused(rng, params, text):
    with pytest.raises(InputError, match=text):
        DBKSVD(48, 4, **params).fit(samples(rng, 60))


def test_partial_fit_refuses_growth(rng):
    with pytest.raises(InputError, match=r"growth=1.5 is a schedule over a whole fit; use fit"):
        DBKSVD(48, 4, growth=1.5).partial_fit(samples(rng))
