"""The graph of a batch on workers: one task per worker and phase, the same bits for any number of them."""

import pickle
import threading

import dask
import numpy as np
import pytest

from dbksvd_dask.errors import InputError
from dbksvd_dask.graph import batch, threads
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.plan import seeds
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.plan.groups import plan_groups
from dbksvd_dask.plan.shares import plan_shares
from tests.helpers import clusters
from tests.helpers.jobs import write_store

N_CHUNKS = 21
HOW = {
    "plain": {},
    "groups": {"groups": (8, 12, 20)},
    "non-negative": {"encode": EncodeSpec(6, nonneg=True), "dead_atoms": "random"},
    "one step": {"steps": 1, "rounds": 1},
    "three steps": {"steps": 3, "rounds": 2, "dead_atoms": "keep"},
}


SIX = EncodeSpec(6)


def spec_of(groups=None, encode=SIX, steps=2, rounds=3, dead_atoms="residual", n_atoms=40, chunk=10):
    planned = plan_groups(n_atoms, encode.k, groups, rounds)
    return batch.BatchSpec(planned, encode, steps, chunk, dead_atoms, 0, np.dtype(np.float32))


def graph_of(samples, spec, workers, n_atoms=40, **how):
    """The graph of a batch for some workers that need not exist: homes are only preferences."""
    shares = plan_shares(-(-len(samples) // spec.chunk_size), {f"w{w:03d}": 2 for w in range(workers)}, **how)
    D = seeds.random_atoms(n_atoms, samples.shape[1], np.float32, 0)
    source = as_source(samples, spec.chunk_size)
    return batch.build_batch(source, np.arange(len(samples)), D, None, spec, 0, shares=shares)


def result_of(graph):
    with dask.config.set(scheduler="synchronous"):
        return batch.run_batch(graph)


def bits(result):
    """Every number of a result but its seconds."""
    parts = [result.dictionary, result.counts, *vars(result.before).values(), *vars(result.after).values()]
    parts += [] if result.coefficient_sums is None else [result.coefficient_sums]
    return [np.asarray(part).tobytes() for part in parts]


@pytest.fixture
def samples(rng):
    Y = rng.standard_normal((10 * N_CHUNKS - 3, 24)).astype(np.float32)
    Y[:, -1] = 0  # leaves atoms dead
    return Y


@pytest.mark.parametrize("how", HOW)
def test_any_number_of_workers_gives_the_bits_of_threads(samples, how):
    spec = spec_of(**HOW[how])
    expected = bits(result_of(graph_of(samples, spec, 0)))
    for workers in (1, 2, 3, 5, 16):
        assert bits(result_of(graph_of(samples, spec, workers))) == expected, workers
    assert bits(result_of(graph_of(samples, spec, 3, together=False))) == expected, "a task per chunk, at its home"


def test_tasks_of_workers_are_pure(samples):
    seen = {}

    class Watch(dask.callbacks.Callback):
        def _posttask(self, key, value, dsk, state, worker_id):
            for other, cached in state["cache"].items():
                token = dask.tokenize.tokenize(cached)
                assert seen.setdefault(other, token) == token, f"{key} changed the result of {other}"

    with Watch():
        result_of(graph_of(samples, spec_of(rounds=2), 5))
    assert len(seen) > 50


@pytest.mark.parametrize("workers", [2, 4, 16, 64, 256])
def test_tasks_per_worker_stay_few_however_many_workers(workers):
    """Default rounds and steps, eight chunks per worker."""
    rows = np.ones((8 * workers, 2), np.float32)
    graph = graph_of(rows, spec_of(rounds=8, n_atoms=4096, chunk=1), workers, n_atoms=4096)
    assert batch.count_tasks(graph) < 40 * workers


@pytest.mark.parametrize("workers", [2, 4, 5, 16, 64, 256])
def test_no_worker_serves_or_hears_all_others(workers):
    """A hot spot would send a result to every worker, or receive one from each; groups keep that to a root."""
    rows = np.ones((8 * workers, 2), np.float32)
    graph = graph_of(rows, spec_of(rounds=2, n_atoms=960, chunk=1), workers, n_atoms=960)
    (layer,) = graph.dask.layers.values()
    home = layer.annotations["workers"]
    receivers, senders = {}, {}
    for key, task in dict(graph.__dask_graph__()).items():
        for used in task.dependencies:
            if home(key) != home(used) and not used.startswith("counts-"):  # 32 kB, for which nobody waits
                receivers.setdefault(used, set()).add(str(home(key)))
                senders.setdefault(key, set()).add(str(home(used)))
    assert max(map(len, receivers.values())) <= max(4, 2 * workers**0.5)
    assert max(map(len, senders.values())) <= max(4, 2 * workers**0.5)


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_tasks_that_need_nothing_have_no_home(workers):
    """After all workers have been lost, Dask would wait for the very worker that was the home of such a task."""
    graph = graph_of(np.ones((8 * workers, 2), np.float32), spec_of(chunk=1), workers)
    (layer,) = graph.dask.layers.values()
    roots = [key for key, task in dict(graph.__dask_graph__()).items() if not task.dependencies]
    assert roots
    assert not any(layer.annotations["workers"](key) for key in roots)


def test_an_error_names_the_row_and_ends_the_task(samples):
    samples[57, 3] = np.nan
    with pytest.raises(InputError, match=r"sample 57 \(chunk 5, row 7 in it\) has NaN or infinity"):
        result_of(graph_of(samples, spec_of(), 3))


# ---------------------------------------------------------------------------------------------- threads


def test_items_share_the_threads_of_a_worker_and_come_back_in_order(monkeypatch):
    monkeypatch.setattr(threads, "own_threads", lambda: 3)
    together = threading.Barrier(3, timeout=clusters.PATIENCE)

    def meet(i):
        together.wait()
        return i, threading.get_ident()

    done = list(threads.each(meet, range(6)))
    assert [i for i, _ in done] == list(range(6))
    assert threading.get_ident() not in {ident for _, ident in done}


def test_after_an_error_nothing_more_begins(monkeypatch):
    monkeypatch.setattr(threads, "own_threads", lambda: 2)
    begun, go_on = [], threading.Event()

    def fail(i):
        begun.append(i)
        if i == 0:
            raise InputError("row 0")
        assert go_on.wait(60)

    with pytest.raises(InputError, match="row 0"):
        for _ in threads.each(fail, range(50)):
            pass
    go_on.set()
    assert len(begun) < 50


def test_outside_a_worker_a_task_has_one_thread():
    assert threads.own_threads() == 1
    assert list(threads.each(lambda i: threading.get_ident(), range(3))) == [threading.get_ident()] * 3


@pytest.mark.cluster
def test_a_task_knows_the_threads_of_its_worker():
    distributed = pytest.importorskip("distributed")
    with distributed.Client(**clusters.IN_PROCESS, n_workers=1, threads_per_worker=3) as client:
        assert client.submit(threads.own_threads).result() == 3


# ---------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("rows", "most"),
    [(np.arange(5000), 1000), (np.r_[200:900, 0:100], 1000), (np.arange(0, 600, 2), 4000), ([], 1000)],
)
def test_references_to_consecutive_rows_travel_as_their_ends(tmp_path, rows, most):
    path = write_store(tmp_path / "store.zarr", np.zeros((5000, 2), np.float32), 500)
    source, rows = as_source(path, 500), np.asarray(rows, np.int64)
    reader, ref = pickle.dumps(source.reader), pickle.dumps(source.take(rows))
    assert len(ref) - len(reader) < most
    restored = pickle.loads(ref)
    np.testing.assert_array_equal(restored.rows, rows)
    assert restored.rows.dtype == np.int64
