"""What happens on real machines: memory that runs out, schedulers and disks that go away, data that is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from distributed import Client, WorkerPlugin

from dbksvd_dask import cluster, events
from dbksvd_dask.errors import ClusterError, InputError, StoreError
from dbksvd_dask.graph import batch
from dbksvd_dask.graph import run as graph_run
from dbksvd_dask.store.runs import checkpoints
from tests.helpers import clusters, jobs


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return clusters.small_store(tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def expected(store):
    return clusters.on_threads(store, 1)


# ---------------------------------------------------------------------------------------------- by address


class Remote:
    """A scheduler and workers in processes of their own, as on a cluster."""

    def __init__(self, folder, *options, protocol="tcp"):
        self.folder, self.options, self.processes = Path(folder), options, []
        self.file = self.folder / "scheduler.json"
        self.protocol = protocol
        self.start_scheduler(0)

    def start_scheduler(self, port):
        self.file.unlink(missing_ok=True)
        where = ["--host", "127.0.0.1", "--port", port, "--no-dashboard", "--protocol", self.protocol]
        self.scheduler = self._start("dask_scheduler", *where, "--scheduler-file", self.file)
        clusters.await_file(self.folder, "scheduler.json")
        clusters.await_true(lambda: self.file.read_text().strip().endswith("}"))

    def _start(self, program, *args):
        command = [sys.executable, "-m", f"distributed.cli.{program}", *map(str, args), *self.options]
        env = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def add_worker(self):
        where = ["--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard", "--no-nanny"]
        return self._start("dask_worker", "--scheduler-file", self.file, *where)

    @property
    def address(self):
        return json.loads(self.file.read_text())["address"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.cluster
def test_scheduler_by_address_and_a_worker_that_joins_late(store, expected, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(graph_run, "POLL_SECONDS", 0.2)
    with Remote(tmp_path) as remote, cluster.connect(scheduler=remote.address) as client:
        assert not client.nthreads()

        real, joined = graph_run._check_workers, []

        def join_then_check(client, seen):
            if not joined:
                assert not client.nthreads(), "the work waits although nobody is there to do it"
                joined.append(remote.add_worker())
            return real(client, seen)

        monkeypatch.setattr(graph_run, "_check_workers", join_then_check)
        clusters.same(clusters.fit(store), expected)
    assert joined
    assert "the scheduler has no workers; waiting" in caplog.text


@pytest.mark.cluster
def test_without_workers_for_too_long_it_gives_up(store, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_run, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(graph_run, "NO_WORKERS_SECONDS", 0.3)
    with (
        Remote(tmp_path) as remote,
        cluster.connect(scheduler=remote.address),
        pytest.raises(ClusterError, match=r"has had no worker for \d+ s; start workers \(`dask worker tcp://"),
    ):
        clusters.fit(store)


@pytest.mark.cluster
def test_lost_scheduler_stops_with_word_of_the_checkpoint(store, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_run, "RECONNECT_SECONDS", 0.1)
    run = tmp_path / "run"
    with Remote(tmp_path) as remote:
        remote.add_worker()
        with cluster.connect(scheduler=remote.address) as client:
            client.wait_for_workers(1, timeout=clusters.PATIENCE)
            disturb = clusters.Disturb(1, 0, remote.scheduler.kill)
            with pytest.raises(ClusterError) as caught:
                clusters.fit(store, [disturb], checkpoint=run)
    disturb.check_was_mid_batch()
    assert f"the connection to the scheduler at {remote.address} was lost" in str(caught.value)
    assert "checkpoint-000001.zarr is intact; continue with resume=True" in str(caught.value)
    assert isinstance(disturb.after[-1], events.FitStopped)
    assert (disturb.after[-1].iteration, disturb.after[-1].message) == (1, str(caught.value))
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)


@pytest.mark.cluster
def test_scheduler_that_comes_back_is_found_again_and_the_batch_run_again(store, expected, tmp_path):
    with Remote(tmp_path) as remote:
        remote.add_worker()

        def replace_scheduler():
            remote.scheduler.kill()
            remote.scheduler.wait()
            remote.start_scheduler(remote.address.rpartition(":")[2])
            remote.add_worker()

        with cluster.connect(scheduler=remote.address) as client:
            client.wait_for_workers(1, timeout=clusters.PATIENCE)
            disturb = clusters.Disturb(1, 0, replace_scheduler)
            found = clusters.fit(store, [disturb])
    disturb.check_was_mid_batch()
    retries = [e for e in disturb.after if isinstance(e, events.Retrying)]
    assert [(e.iteration, e.attempt) for e in retries] == [(1, 1)]
    clusters.same(found, expected)


# ---------------------------------------------------------------------------------------------- TLS


@pytest.fixture
def certificates(tmp_path):
    """An authority, and one certificate for all sides signed by it: PEM files."""
    return make_certificates(tmp_path)


@pytest.mark.cluster
def test_tls_with_real_certificates(store, expected, tmp_path, certificates):
    ca, cert, key = certificates
    options = ["--tls-ca-file", ca, "--tls-cert", cert, "--tls-key", key]
    with Remote(tmp_path, *options, protocol="tls") as remote:
        remote.add_worker()
        assert remote.address.startswith("tls://")
        with cluster.connect(scheduler=remote.address, tls=cluster.TLSFiles(ca, cert, key)) as client:
            client.wait_for_workers(1, timeout=clusters.PATIENCE)
            assert all(worker.startswith("tls://") for worker in client.nthreads())
            clusters.same(clusters.fit(store), expected)
        stranger = make_certificates(tmp_path / "stranger")
        with (
            pytest.raises(ClusterError, match="no scheduler answers at tls://"),
            cluster.connect(scheduler=remote.address, tls=cluster.TLSFiles(ca, *stranger[1:]), timeout=2),
        ):
            pass


def make_certificates(folder):
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def build(name, public, issuer, signer, is_authority):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(signer, hashes.SHA256())
        )

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = build("authority", authority.public_key(), None, authority, True)
    leaf = build("node", own.public_key(), root.subject, authority, False)
    private = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    contents = {
        "ca.pem": root.public_bytes(serialization.Encoding.PEM),
        "cert.pem": leaf.public_bytes(serialization.Encoding.PEM),
        "key.pem": private,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return tuple(str(folder / name) for name in contents)


# ---------------------------------------------------------------------------------------------- memory of a worker


WORKER_BYTES, HOARD_BYTES = 800_000_000, 1_000_000_000


def hoard(folder, times):
    """In a worker process: some refresh tasks take more memory than it may have, and wait to be ended."""
    from dbksvd_dask.kernels import chunk

    real = getattr(chunk, "ungated_refresh", chunk.refresh_chunk)
    chunk.ungated_refresh = real
    folder = Path(folder)

    def hoarding(state, r, *rest):
        taken = sorted(folder.glob("hoard-*"))
        if r == 1 and len(taken) < times:
            (folder / f"hoard-{len(taken)}").touch()
            held = np.ones(HOARD_BYTES // 8)
            clusters.time.sleep(clusters.PATIENCE)  # until the nanny, which looks ten times a second, ends it
            del held
        return real(state, r, *rest)

    chunk.refresh_chunk = hoarding


class Hoarders(WorkerPlugin):
    """Makes every worker that joins a hoarder, those started in place of lost ones too."""

    name = "hoarders"

    def __init__(self, folder, times):
        self.folder, self.times = str(folder), times

    def setup(self, worker):
        hoard(self.folder, self.times)


@pytest.mark.cluster
def test_worker_out_of_memory_is_replaced_and_the_bits_are_the_same(store, expected, tmp_path):
    with cluster.connect(workers=1, memory_limit=WORKER_BYTES) as client:
        client.register_plugin(Hoarders(tmp_path, 1))
        before = set(client.nthreads())
        clusters.same(clusters.fit(store), expected)
        assert (tmp_path / "hoard-0").exists()
        assert before != set(client.nthreads()), "the worker is another one now"


@pytest.mark.cluster
def test_a_task_that_kills_every_worker_ends_the_fit_in_plain_words(store, expected, tmp_path):
    run = tmp_path / "run"
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        cluster.connect(workers=1, memory_limit=WORKER_BYTES) as client,
    ):
        clusters.fit(store, checkpoint=run, n_iter=1)
        client.register_plugin(Hoarders(tmp_path, 99))
        with pytest.raises(ClusterError) as caught:
            clusters.fit(store, checkpoint=run, resume=True)
    assert "1 worker in turn died while running a `refresh` task" in str(caught.value)
    assert "most often they ran out of memory" in str(caught.value)
    assert "checkpoint-000001.zarr is intact" in str(caught.value)
    assert len(list(tmp_path.glob("hoard-*"))) == 1, "what kills workers is not tried again by the fit"
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)


# ---------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("how", "text"), [("missing", "is missing"), ("truncated", "has 100 bytes instead of 51200")]
)
def test_damaged_chunk_stops_with_its_name_and_goes_on_when_restored(tmp_path, how, text):
    """The first iteration does not read the chunk; the fit stops where it is read."""
    store, run = clusters.small_store(tmp_path), tmp_path / "run"
    expected = clusters.on_threads(store, 2, validation=0)
    clusters.on_threads(store, 2, validation=0, checkpoint=run, n_iter=1)
    path = chunk_read_later(store)
    content = path.read_bytes()
    path.unlink() if how == "missing" else path.write_bytes(content[:100])
    seen = []
    with pytest.raises(StoreError, match=text) as caught:
        clusters.on_threads(store, 2, validation=0, checkpoint=run, resume=True, callbacks=[seen.append])
    assert str(path) in str(caught.value)
    newest = Path(checkpoints(run)[-1]).name
    assert f"{newest} is intact; continue with resume=True" in str(caught.value)
    assert not [e for e in seen if isinstance(e, events.Retrying)], "it would be damaged again"
    path.write_bytes(content)
    clusters.same(clusters.on_threads(store, 2, validation=0, checkpoint=run, resume=True), expected)


def chunk_read_later(store):
    """File of a chunk that only the batches after the first read."""
    from dbksvd_dask.model import DBKSVD

    stream = DBKSVD(**{**clusters.HOW, "validation": 0})._trainer(store).stream
    late = set(np.concatenate([stream.batch(1), stream.batch(2)]) // 400) - set(stream.batch(0) // 400)
    return Path(store, "activations", f"c.{min(late)}.0")


def test_bad_rows_are_named_and_never_tried_again(tmp_path):
    rows = jobs.made_up(6000, 32)
    rows[4321, 7] = np.nan
    store = jobs.write_store(tmp_path / "store.zarr", rows, 400)
    seen = []
    with pytest.raises(InputError, match=r"sample 4321 \(chunk 10, row 321 in it\) .* has NaN or infinity"):
        clusters.on_threads(store, 2, callbacks=[seen.append], center=False, n_iter=8)
    assert not [e for e in seen if isinstance(e, events.Retrying)]


# ---------------------------------------------------------------------------------------------- disk


FULL_DISK = """
import resource, sys
from tests.helpers.clusters import fit
store, run, limit = sys.argv[1:]
if __name__ == "__main__":
    fit(store, checkpoint=run, n_iter=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    fit(store, checkpoint=run, resume=True)
"""


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(store, expected, tmp_path):
    """The system refuses files above a size: writing fails in the middle, as on a full disk."""
    run = tmp_path / "run"
    process = jobs.python(FULL_DISK, store, run, 4096)
    _, errors = process.communicate(timeout=jobs.PATIENCE)
    assert process.returncode == 1
    assert "StoreError: could not write" in errors
    assert "File too large" in errors
    assert "checkpoint-000001.zarr is intact; continue with resume=True" in errors
    assert sorted(os.listdir(run)) == ["checkpoint-000001.zarr", "status.json"], "nothing half-written is left"
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before(store, expected, small_disk):
    run = small_disk / "run"
    clusters.on_threads(store, 2, checkpoint=run, n_iter=1)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(600_000))
    with pytest.raises(StoreError, match="No space left on device") as caught:
        clusters.on_threads(store, 2, checkpoint=run, resume=True)
    assert "checkpoint-000001.zarr is intact" in str(caught.value)
    filler.unlink()
    clusters.same(clusters.on_threads(store, 2, checkpoint=run, resume=True), expected)


# ---------------------------------------------------------------------------------------------- retries


def failing(times, error):
    """`graph.batch.run_batch` that fails some times first."""
    real, left = batch.run_batch, [times]

    def run(graph, on_round=None):
        if left[0]:
            left[0] -= 1
            raise error
        return real(graph, on_round)

    return run


def unanswered():
    """What reading a remote store raises when the remote does not answer."""
    error = StoreError("chunk 3 cannot be read")
    error.__cause__ = TimeoutError("no answer")
    return error


@pytest.mark.parametrize("error", [ConnectionResetError("peer is gone"), TimeoutError("no answer"), unanswered()])
def test_what_may_pass_is_tried_again_and_reported(store, expected, monkeypatch, caplog, error):
    monkeypatch.setattr(batch, "run_batch", failing(2, error))
    monkeypatch.setattr(graph_run.time, "sleep", lambda _: None)
    seen = []
    clusters.same(clusters.on_threads(store, 2, callbacks=[seen.append]), expected)
    retries = [e for e in seen if isinstance(e, events.Retrying)]
    assert [(e.iteration, e.attempt, e.attempts) for e in retries] == [(0, 1, 3), (0, 2, 3)]
    assert str(error) in retries[0].reason
    assert "attempt 1 of 3 failed" in caplog.text


def test_retries_are_bounded(store, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "run_batch", failing(99, ConnectionResetError("peer is gone")))
    monkeypatch.setattr(graph_run.time, "sleep", lambda _: None)
    seen = []
    with pytest.raises(ClusterError, match="failed 3 times, last: ConnectionResetError: peer is gone"):
        clusters.on_threads(store, 2, checkpoint=tmp_path, callbacks=[seen.append])
    assert len([e for e in seen if isinstance(e, events.Retrying)]) == 2


@pytest.mark.parametrize("error", [InputError("bad"), StoreError("gone"), ZeroDivisionError("a mistake")])
def test_what_will_fail_again_is_not_tried_again(store, monkeypatch, error):
    monkeypatch.setattr(batch, "run_batch", failing(1, error))
    seen = []
    with pytest.raises(type(error)):
        clusters.on_threads(store, 2, callbacks=[seen.append])
    assert not [e for e in seen if isinstance(e, events.Retrying)]


# ---------------------------------------------------------------------------------------------- paused workers


def test_workers_that_are_all_paused_end_the_wait_in_plain_words(monkeypatch, caplog):
    """More workers than the five of which a client lists the states; one process holds them all."""
    monkeypatch.setattr(graph_run, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    limited = {**clusters.IN_PROCESS, "memory_limit": "32MB"}
    with Client(**limited, n_workers=6, threads_per_worker=1) as client:
        clusters.await_true(lambda: set(client.run_on_scheduler(states_of_workers)) == {"paused"})
        assert graph_run._check_workers(client, 900.0) == 900.0
        assert "the scheduler has only paused workers; waiting for some since 100 s" in caplog.text
        with pytest.raises(ClusterError, match=r"all workers .* inproc://\S+ have been paused for 1000 s"):
            graph_run._check_workers(client, 0.0)
        client.cluster.workers[5].memory_manager.memory_limit = 1 << 50  # it resumes by itself
        clusters.await_true(lambda: "running" in client.run_on_scheduler(states_of_workers))
        assert graph_run._check_workers(client, 0.0) == 1000.0
    with (
        Client(**clusters.IN_PROCESS, n_workers=0) as client,
        pytest.raises(ClusterError, match="no worker for 1000 s"),
    ):
        graph_run._check_workers(client, 0.0)


def states_of_workers(dask_scheduler):
    return [worker.status.name for worker in dask_scheduler.workers.values()]
