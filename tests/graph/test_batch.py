"""One outer batch as a Dask graph: equal to its twin, pure, small, and the same bits however it ran."""

import sys

import dask
import dask.array as da
import numpy as np
import pytest

from dbksvd_dask import DBKSVD
from dbksvd_dask.fit.trainer import Trainer
from dbksvd_dask.graph import batch
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.kernels.dead_atoms import Candidates, Rule
from dbksvd_dask.plan.dead_atoms import DEAD_ATOM_RULES, DeadAtomRule
from dbksvd_dask.plan.groups import plan_rounds
from dbksvd_dask.plan.params import FitParams
from tests.naive import kernels


def trainer_of(Y, **params):
    checked = FitParams.checked(**{"n_atoms": 40, "k": 4, "validation": 0, "center": False, **params})
    return Trainer(as_source(Y, checked.chunk_size), checked)


def first_graph(trainer):
    """Graph of the first batch of a fit."""
    state = trainer.start()
    spec = trainer.policy.batch_spec(state)
    return batch.build_batch(trainer.source, trainer.stream.batch(0), state.atoms, None, spec, 0)


def samples(rng, n=300, d=24, dtype=np.float32):
    return rng.standard_normal((n, d)).astype(dtype)


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("groups", [None, (40,), (8, 12, 20)])
def test_batch_equals_twin(rng, groups, nonneg):
    Y = samples(rng, dtype=np.float64)
    trainer = trainer_of(Y, groups=groups, nonneg=nonneg, chunk_size=70, k=6)
    state = trainer.start()
    rows = trainer.stream.batch(0)
    result = trainer.step(state)
    spec = trainer.policy.batch_spec(state)
    rounds = [[list(m) for m in plan_rounds(g, 0, 0)] for g in spec.groups]
    expected, R, gap = kernels.outer_batch(
        Y[rows], state.atoms, [(g.start, g.stop, g.k) for g in spec.groups], rounds, steps=2, nonneg=nonneg
    )
    assert gap > 1e-9
    np.testing.assert_allclose(result.atoms, expected, atol=1e-6)
    error = np.mean(np.linalg.norm(R, axis=1) / np.linalg.norm(Y[rows], axis=1))
    np.testing.assert_allclose(result.history["relative_error"][-1], error, rtol=1e-6)


def test_one_group_is_plain_dbksvd_bit_for_bit(rng):
    Y = samples(rng)
    plain = DBKSVD(40, 4, n_iter=3, chunk_size=64).fit(Y)
    grouped = DBKSVD(40, 4, n_iter=3, chunk_size=64, groups=(40,)).fit(Y)
    np.testing.assert_array_equal(plain.components_, grouped.components_)


@pytest.mark.parametrize("groups", [None, (8, 12, 20)])
def test_threads_do_not_change_a_bit(rng, groups):
    Y = samples(rng, 500, 64)
    fitted = []
    for workers in (1, 2, 4):
        with dask.config.set(scheduler="threads", num_workers=workers):
            fitted.append(DBKSVD(40, 4, n_iter=3, chunk_size=64, groups=groups).fit(Y).components_)
    with dask.config.set(scheduler="synchronous"):
        fitted.append(DBKSVD(40, 4, n_iter=3, chunk_size=64, groups=groups).fit(Y).components_)
    for other in fitted[1:]:
        assert fitted[0].tobytes() == other.tobytes()


@pytest.mark.parametrize("chunks", [(500, 64), (500, 10), (77, 64), ((1, 499), 64), (64, 32)])
def test_chunks_of_the_input_do_not_change_a_bit(rng, chunks):
    Y = samples(rng, 500, 64)
    how = {"n_iter": 3, "chunk_size": 64, "batch_size": 200}
    whole = DBKSVD(40, 4, **how).fit(da.from_array(Y, chunks=(500, 64)))
    cut = DBKSVD(40, 4, **how).fit(da.from_array(Y, chunks=chunks))
    assert whole.components_.tobytes() == cut.components_.tobytes()


def test_same_seed_same_dictionary_other_seed_another(rng):
    Y = samples(rng)
    a, b, c = (DBKSVD(40, 4, n_iter=2, seed=s).fit(Y).components_ for s in (3, 3, 4))
    assert a.tobytes() == b.tobytes()
    assert a.tobytes() != c.tobytes()


def test_tasks_are_pure(rng):
    """Every task sees its inputs again afterwards, unchanged."""
    Y = samples(rng)
    trainer = trainer_of(Y, chunk_size=64)
    graph = first_graph(trainer)
    seen = {}

    def fingerprint(value):
        return dask.tokenize.tokenize(value) if not callable(value) else None

    class Watch(dask.callbacks.Callback):
        def _posttask(self, key, value, dsk, state, worker_id):
            for other, cached in state["cache"].items():
                token = fingerprint(cached)
                assert seen.setdefault(other, token) == token, f"{key} changed the result of {other}"

    with Watch(), dask.config.set(scheduler="synchronous"):
        batch.run_batch(graph)
    assert len(seen) > 50


def test_graph_is_small_and_readable(rng):
    Y = samples(rng, 800, 16)
    trainer = trainer_of(Y, chunk_size=100, batch_size=800)
    graph = first_graph(trainer)
    assert batch.count_tasks(graph) < 400  # 8 chunks, 8 rounds
    prefixes = {dask.utils.key_split(key) for key in graph.__dask_graph__()}
    assert {"encode", "refresh", "round", "lanczos-product", "gram"} <= prefixes


def test_nothing_is_computed_until_asked(rng):
    def explode(*args, **kwargs):
        raise AssertionError("a graph was computed")

    Y = da.from_array(samples(rng), chunks=(50, 24))
    model = DBKSVD(40, 4, n_iter=1).fit(Y)
    with dask.config.set(scheduler=explode):
        codes = model.transform(Y)
        samples_again = model.inverse_transform(codes)
    assert codes["atom"].chunks is not None
    assert samples_again.shape == Y.shape


def test_error_never_rises_on_real_patches_with_default_rounds(patches):
    settings = {"n_iter": 8, "batch_size": 300, "validation": 0}
    history = DBKSVD(64, 5, init="uniform", **settings).fit(patches).history_
    assert (history["relative_error"] <= history["relative_error_before"]).all()
    # the first atoms are 64 of the 300 samples, of relative error 0: their mean may rise where the squares fall
    history = DBKSVD(64, 5, init="data", **settings).fit(patches).history_
    assert (history["variance_explained"] > history["variance_explained_before"]).all()


def test_error_never_rises_with_one_atom_per_round(patches):
    history = DBKSVD(24, 3, n_iter=4, n_rounds=24, validation=0, dead_atoms="keep").fit(patches).history_
    assert (history["relative_error"] <= history["relative_error_before"] * (1 + 1e-6)).all()


@pytest.mark.parametrize("rule", ["residual", "random", "keep"])
def test_dead_atoms_follow_the_rule(rng, rule):
    Y = samples(rng, 60, 16)
    Y[:, -1] = 0
    init = kernels.unit_rows(rng.standard_normal((40, 16)))
    init[7] = np.eye(16)[-1]  # never chosen: orthogonal to every sample
    model = DBKSVD(40, 2, n_iter=1, init=init, dead_atoms=rule, validation=0, center=False).fit(Y)
    assert model.history_["dead_atoms"].item() >= 1
    moved = not np.allclose(model.components_[7], init[7], atol=1e-6)
    assert moved == (rule != "keep")


class Smallest(Rule):
    """A rule of this test: the samples of the smallest norm take the place of dead atoms, in chunk order."""

    proposes = True

    def propose(self, compute, state, D, members, new, counts):
        Y = compute.residual(state.R, state.atom, -state.coefficient, compute.place_atoms(D, members, new))
        smallest = np.argsort(np.linalg.norm(Y, axis=1))[:1]
        return Candidates(-np.linalg.norm(Y[smallest], axis=1), Y[smallest])

    def choose(self, candidates, D, dead, path):
        return kernels.unit_rows(np.concatenate([c.rows for c in candidates])[: dead.size])


def test_a_rule_for_dead_atoms_is_one_class_and_one_entry(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "dbksvd_dask.kernels.smallest", sys.modules[__name__])
    entry = DeadAtomRule("the smallest samples", "smallest:Smallest")
    monkeypatch.setitem(DEAD_ATOM_RULES, "smallest", entry)
    Y = samples(rng, 60, 16)
    Y[[10, 50]] *= 1e-3
    Y[:, -1] = 0
    trainer = trainer_of(Y, chunk_size=30, k=1, n_rounds=1)
    state = trainer.start()
    D = state.atoms.copy()
    D[[5, 9]] = np.eye(16)[-1]  # never chosen: orthogonal to every sample
    spec = trainer.policy.batch_spec(state)._replace(dead_atoms="smallest")
    result = batch.run_batch(batch.build_batch(trainer.source, np.arange(60), D, None, spec, 0))
    dead = np.flatnonzero(result.counts == 0)
    assert {5, 9} <= set(dead)
    np.testing.assert_allclose(result.dictionary[dead[:2]], kernels.unit_rows(Y[[10, 50]]), atol=1e-5)
    np.testing.assert_array_equal(result.dictionary[dead[2:]], D[dead[2:]])


@pytest.mark.slow
def test_true_atoms_are_found():
    """d=128, 512 random atoms, k=8, 10 % noise, four batches in turn, 16 iterations: 88 % at least."""
    rng = np.random.default_rng(0)
    truth = kernels.unit_rows(rng.standard_normal((512, 128)))
    X = np.zeros((80_000, 512), np.float32)
    for row in X:
        row[rng.choice(512, 8, replace=False)] = rng.standard_normal(8)
    Y = X @ truth.astype(np.float32)
    Y = (Y + 0.1 * Y.std() * rng.standard_normal(Y.shape)).astype(np.float32)
    trainer = trainer_of(Y, n_atoms=512, k=8, center=True)
    state = trainer.start()
    for t in range(16):
        state = trainer.step(state, np.arange(t % 4 * 20_000, (t % 4 + 1) * 20_000))
    found = (np.abs(state.atoms @ truth.T).max(axis=0) > 0.95).mean()
    assert found >= 0.88
