"""One dictionary, bit for bit, wherever it is computed and whatever happens to the workers meanwhile."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

import dask
import pytest

from dbksvd_dask import DBKSVD, cluster, events, fit_linear_encoder, progress
from dbksvd_dask.errors import ClusterError, InputError
from tests.helpers import clusters

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


def test_states_stay_on_their_workers(client, store):
    """Of the residuals, the one large thing, nothing moves: only sums, atoms and tiles do."""
    moved = []

    def incoming(dask_worker):
        return [list(record["keys"]) for record in dask_worker.transfer_incoming_log]

    clusters.fit(store)
    for records in client.run(incoming).values():
        moved += [key for keys in records for key in keys]
    assert any(key.startswith("lanczos-start") for key in moved)
    assert not [key for key in moved if key.startswith(("encode-", "refresh-"))]


def test_killed_worker_mid_batch_gives_the_same_bits(client, store, expected, tmp_path):
    before = set(client.nthreads())
    client.run(clusters.install_gate, str(tmp_path), 1)
    killed = []

    def kill_worker():
        # a worker is inside a task of this batch, and holds states that later rounds need
        pid = int(clusters.await_file(tmp_path, "inside-*").name.removeprefix("inside-"))
        assert pid in client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        clusters.await_true(lambda: not clusters.is_alive(pid))
        killed.append(pid)
        (tmp_path / "open").touch()

    disturb = clusters.Disturb(1, 0, kill_worker, prepare=(tmp_path / "armed").touch)
    found = clusters.fit(store, [disturb])
    client.run(clusters.remove_gate)
    disturb.check_was_mid_batch()
    assert len(killed) == 1
    assert disturb.finished_after() == [1, 2]
    clusters.same(found, expected)
    client.wait_for_workers(2, timeout=clusters.PATIENCE)
    assert len(before - set(client.nthreads())) == 1, "one of the workers is another one now"


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_a_worker_stopped_mid_batch_gives_the_same_bits(client, store, expected, tmp_path, then):
    """Stopped with SIGSTOP inside a task, holding states that later rounds need; then let go on, or killed."""
    client.wait_for_workers(2, timeout=60)
    client.run(clusters.install_gate, str(tmp_path), 1)
    states = []

    def stop_worker():
        pid = int(clusters.await_file(tmp_path, "inside-*").name.removeprefix("inside-"))
        os.kill(pid, signal.SIGSTOP)
        clusters.await_true(lambda: clusters.state(pid) == "T")
        (tmp_path / "open").touch()  # it does not see that: it stands still
        states.append(clusters.state(pid))
        os.kill(pid, then)

    disturb = clusters.Disturb(1, 0, stop_worker, prepare=(tmp_path / "armed").touch)
    found = clusters.fit(store, [disturb])
    client.run(clusters.remove_gate)
    disturb.check_was_mid_batch()
    assert states == ["T"]
    assert disturb.finished_after() == [1, 2]
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
def test_killing_the_first_of_five_workers_gives_the_same_bits(store, tmp_path):
    """Five workers exchange sums in groups; the first adds for its group and serves it."""
    how = {"chunk_size": 100, "n_iter": 2}
    with cluster.connect(workers=5) as client:
        client.run(clusters.install_gate, str(tmp_path), 1)
        pids = client.run(os.getpid)  # by address, the order of homes
        victim = pids[min(pids)]

        def kill_worker():
            clusters.await_file(tmp_path, f"inside-{victim}")
            os.kill(victim, signal.SIGKILL)
            clusters.await_true(lambda: not clusters.is_alive(victim))
            (tmp_path / "open").touch()

        disturb = clusters.Disturb(1, 0, kill_worker, prepare=(tmp_path / "armed").touch)
        found = clusters.fit(store, [disturb], **how)
        disturb.check_was_mid_batch()
    clusters.same(found, clusters.on_threads(store, 1, **how))


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
