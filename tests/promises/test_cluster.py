"""One dictionary, bit for bit, wherever it is computed and whatever happens to the workers meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import dask
import numpy as np
import pytest
from distributed import Client, Status

from dbksvd_dask import DBKSVD, cluster, events, fit_linear_encoder, progress
from dbksvd_dask.errors import ClusterError, InputError
from dbksvd_dask.graph import run
from tests.helpers import clusters
from tests.helpers.jobs import made_up, write_store

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return clusters.small_store(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def expected(store):
    """The dictionary of one thread."""
    return clusters.on_threads(store, 1)


@pytest.fixture(scope="module")
def client():
    with cluster.connect(workers=2) as client:
        yield client


@pytest.fixture
def passing_client():
    """A cluster for one test that kills workers: Dask's nanny does not always start another one in their place."""
    with cluster.connect(workers=2) as client:
        yield client


def test_two_threads_give_the_bits_of_one(store, expected):
    clusters.same(clusters.on_threads(store, 2), expected)


def test_two_processes_give_the_bits_of_one_thread(client, store, expected):
    seen = []
    clusters.same(clusters.fit(store, [seen.append]), expected)
    rounds = [(e.iteration, e.round) for e in seen if isinstance(e, events.RoundFinished)]
    assert rounds == [(i, r) for i in range(clusters.N_ITER) for r in range(clusters.N_ROUNDS)]
    assert not [e for e in seen if isinstance(e, events.Retrying)]
    link = client.dashboard_link if find_spec("bokeh") else ""
    assert seen[0].dashboard == link
    assert progress.describe_start(seen[0]).endswith(f"dashboard: {link}" if link else "(pip install bokeh)")


MODES = {
    "no gram": {"gram": "never", "n_atoms": 150},
    "groups, staged": {"groups": (8, 16, 24), "encode": "staged"},
    "groups, whitened": {"groups": (8, 16, 24), "whiten": 0.5},
    "non-negative, mean": {"nonneg": True, "sparsity": "mean"},
    "growing, prior": {
        "n_atoms": 24,
        "growth": 1.5,
        "n_iter": 16,
        "batch_size": 800,
        "nonneg": True,
        "refit": True,
        "sparsity": "mean",
        "frequency_prior": True,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_one_thread(client, store, mode):
    clusters.same(clusters.fit(store, **MODES[mode]), clusters.on_threads(store, 1, **MODES[mode]))


def test_a_linear_encoder_has_the_bits_of_one_thread(client, store):
    model = DBKSVD(24, 4, n_iter=1, validation=0).fit(store)
    found = fit_linear_encoder(model, store, chunk_size=400)
    with dask.config.set(scheduler="synchronous"):
        expected = fit_linear_encoder(model, store, chunk_size=400)
    for name in ("W", "b", "threshold"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes()


@pytest.fixture(params=["direct", "tasks"])
def exchange(request):
    """The way in which workers exchange sums."""
    with dask.config.set({"dbksvd.exchange": request.param}):
        yield request.param


def test_states_stay_on_their_workers(client, store, exchange):
    """Of the residuals, the one large thing, nothing moves: only sums, atoms and tiles do."""

    def incoming(dask_worker):
        return [list(record["keys"]) for record in dask_worker.transfer_incoming_log]

    def moved():
        return [key for records in client.run(incoming).values() for keys in records for key in keys]

    before = len(moved())
    clusters.fit(store)
    keys = moved()[before:]
    assert any(key.startswith("lanczos-start") for key in keys) == (exchange == "tasks")
    assert not [key for key in keys if key.startswith(("encode-", "refresh-", "share-", "whole-"))]


def test_a_batch_is_one_task_per_worker(client, store, exchange):
    seen = []
    clusters.fit(store, [seen.append], n_iter=1)
    (started,) = [e for e in seen if isinstance(e, events.BatchStarted)]
    assert started.n_tasks == 2 if exchange == "direct" else started.n_tasks > 20


def test_an_unknown_way_to_exchange_is_refused(client, store):
    with (
        dask.config.set({"dbksvd.exchange": "pigeon"}),
        pytest.raises(InputError, match="use 'direct' or 'tasks'"),
    ):
        clusters.fit(store, n_iter=1)


def test_a_bad_row_is_named_by_every_way_and_not_tried_again(client, exchange, tmp_path):
    rows = made_up(1600, 32)
    rows[1234, 7] = np.nan
    rows, seen = write_store(tmp_path / "store.zarr", rows, 400), []
    with pytest.raises(InputError, match=r"sample 1234 .* has NaN or infinity"):
        clusters.fit(rows, [seen.append], n_iter=1, validation=0, center=False)
    assert not [e for e in seen if isinstance(e, events.Retrying)]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_killed_worker_mid_batch_gives_the_same_bits(passing_client, store, expected, tmp_path, exchange, seed):
    """In any phase and round: a worker is inside a task of this batch, and holds states that later rounds need."""
    if exchange == "tasks" and seed:
        pytest.skip("one moment is enough for what Dask itself recovers")
    client = passing_client
    before = set(client.nthreads())
    client.run(clusters.install_gate, str(tmp_path), *clusters.moment(seed))
    disturb = clusters.DisturbInside(tmp_path, 1, clusters.kill_process)
    found = clusters.fit(store, [disturb])
    client.run(clusters.remove_gate)
    disturb.check_was_mid_batch()
    clusters.same(found, expected)
    assert [(e.iteration, e.attempt) for e in disturb.retries()] == ([(1, 1)] if exchange == "direct" else [])
    assert len(before - set(client.nthreads())) == 1, "one of the workers is gone"


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_a_worker_stopped_mid_batch_gives_the_same_bits(passing_client, store, expected, tmp_path, then):
    """Stopped with SIGSTOP inside a task, holding states that later rounds need; then let go on, or killed."""
    client = passing_client
    client.run(clusters.install_gate, str(tmp_path), *clusters.moment(10 + then))
    states = []

    def stop_worker(pid):
        os.kill(pid, signal.SIGSTOP)
        clusters.await_true(lambda: clusters.state(pid) == "T")
        (tmp_path / "open").touch()  # it does not see that: it stands still
        states.append(clusters.state(pid))
        os.kill(pid, then)

    disturb = clusters.DisturbInside(tmp_path, 1, stop_worker)
    found = clusters.fit(store, [disturb])
    client.run(clusters.remove_gate)
    disturb.check_was_mid_batch()
    assert states == ["T"]
    assert len(disturb.retries()) == (then == signal.SIGKILL)
    clusters.same(found, expected)


def test_workers_joining_and_leaving_give_the_same_bits(store, expected):
    with cluster.connect(workers=1) as client:

        def join():
            client.cluster.scale(3)
            client.wait_for_workers(3, timeout=clusters.PATIENCE)

        def leave():
            client.cluster.scale(2)
            clusters.await_true(lambda: len(client.nthreads()) == 2)

        joining, leaving = clusters.Disturb(0, 1, join), clusters.Disturb(2, 1, leave)
        found = clusters.fit(store, [joining, leaving])
        joining.check_was_mid_batch()
        leaving.check_was_mid_batch()
        assert len(client.nthreads()) == 2
    clusters.same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_killing_any_of_five_workers_gives_the_same_bits(store, tmp_path, rank):
    """The first, which adds for all others and serves them, or the last."""
    how = {"chunk_size": 100, "n_iter": 2}
    with cluster.connect(workers=5) as client:
        client.run(clusters.install_gate, str(tmp_path), *clusters.moment(20 + rank))
        pids = client.run(os.getpid)  # by address, the order of homes
        disturb = clusters.DisturbInside(tmp_path, 1, clusters.kill_process, pids[sorted(pids)[rank]])
        found = clusters.fit(store, [disturb], **how)
        disturb.check_was_mid_batch()
    clusters.same(found, clusters.on_threads(store, 1, **how))


@pytest.mark.slow
def test_sixteen_workers_of_one_process_give_the_bits_of_one_thread(store):
    how = {"chunk_size": 50, "n_iter": 2}
    with Client(**clusters.IN_PROCESS, n_workers=16, threads_per_worker=1) as client:
        found = clusters.fit(store, **how)
        assert len(client.nthreads()) == 16
    clusters.same(found, clusters.on_threads(store, 1, **how))


@pytest.mark.slow
def test_two_fits_at_once_on_workers_of_one_thread_do_not_wait_for_each_other(client, store, expected):
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: clusters.fit(store), range(3)):
            clusters.same(found, expected)


WIDE = {"n_atoms": 512, "k": 4, "batch_size": 800, "chunk_size": 100, "n_rounds": 2, "n_iter": 2, "validation": 0}


@pytest.fixture(scope="module")
def wide_store(tmp_path_factory):
    """Of 768 features: sums of a round have 786 kB and travel in pieces."""
    return write_store(tmp_path_factory.mktemp("wide") / "store.zarr", made_up(1600, 768), 400)


def test_sums_in_pieces_give_the_bits_of_one_thread(client, wide_store):
    clusters.same(clusters.fit(wide_store, **WIDE), clusters.on_threads(wide_store, 1, **WIDE))


@pytest.mark.slow
def test_sums_in_pieces_give_the_bits_of_one_thread_on_five_workers(wide_store):
    """Workers of one process have no sockets between them: their event loop passes bytes on."""
    seen = []
    with Client(**clusters.IN_PROCESS, n_workers=5, threads_per_worker=1):
        found = clusters.fit(wide_store, [seen.append], **WIDE)
    clusters.same(found, clusters.on_threads(wide_store, 1, **WIDE))
    assert not [e for e in seen if isinstance(e, events.Retrying)]


@pytest.mark.slow
def test_a_worker_paused_before_its_share_has_begun_is_not_waited_for(store, tmp_path, monkeypatch):
    """Its task lies ready and would wait as long as the worker is paused; another worker computes the batch."""
    monkeypatch.setattr(run, "POLL_SECONDS", 0.2)
    held, seen = [], []
    with Client(**clusters.IN_PROCESS, n_workers=2, threads_per_worker=1) as client, ThreadPoolExecutor(1) as pool:
        worker = client.cluster.workers[1]

        def hold(event):
            seen.append(event)
            if isinstance(event, events.BatchStarted) and event.iteration == 1 and not held:
                held.append(client.submit(clusters.await_file, tmp_path, "open", workers=[worker.address]))
                clusters.await_true(lambda: worker.state.executing_count == 1)
                pool.submit(pause)

        def pause():
            clusters.await_true(lambda: any(task.state == "ready" for task in worker.state.tasks.values()))
            worker.loop.add_callback(setattr, worker, "status", Status.paused)
            clusters.await_true(lambda: worker.status == Status.paused)
            (tmp_path / "open").touch()

        found = clusters.fit(store, [hold])
        assert worker.status == Status.paused
    clusters.same(found, clusters.on_threads(store, 1))
    assert [e.iteration for e in seen if isinstance(e, events.BatchFinished)] == [0, 1, 2]


def test_local_cluster_listens_on_loopback_only(client):
    address = client.scheduler.address
    assert address.startswith("tcp://127.0.0.1:")
    assert client.dashboard_link.startswith("http://127.0.0.1:")
    assert all(worker.startswith("tcp://127.0.0.1:") for worker in client.nthreads())


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"workers": 2, "scheduler": "tcp://a:1"}, "workers=2 and scheduler='tcp://a:1' were both given"),
        ({"workers": 0}, "workers=0 is too small; use workers >= 1"),
        ({"threads": -1}, "threads=-1 is too small"),
        ({"scheduler": "localhost:8786"}, "use tcp://host:8786 or tls://host:8786"),
    ],
)
def test_impossible_places_are_refused(how, text):
    with pytest.raises(InputError, match=text), cluster.connect(**how):
        pass


def test_scheduler_that_does_not_answer_is_named():
    with (
        pytest.raises(ClusterError, match=r"no scheduler answers at tcp://127\.0\.0\.1:9"),
        cluster.connect(scheduler="tcp://127.0.0.1:9", timeout=1),
    ):
        pass
