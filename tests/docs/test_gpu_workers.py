"""The launcher gives every worker a card of its own, and takes its workers with it."""

import os
import signal
import subprocess
import sys

import pytest
from distributed import Client, LocalCluster

from pipelines import gpu_workers
from tests.helpers.jobs import PATIENCE


def test_dry_run_names_one_card_per_worker(capsys):
    assert gpu_workers.main(["tcp://127.0.0.1:8786", "--devices", "0,3", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=3"]
    assert all("worker tcp://127.0.0.1:8786" in line for line in lines)


def test_cards_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert gpu_workers.visible_devices() == ["2", "5"]


def test_without_cards_it_says_how_to_name_them(monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "")
    assert gpu_workers.main(["tcp://127.0.0.1:8786"]) == 1
    assert "name them with --devices 0,1" in capsys.readouterr().err


def test_a_worker_that_ends_ends_the_others():
    ends = [sys.executable, "-c", "raise SystemExit(3)"]
    waits = [sys.executable, "-c", "import time; time.sleep(3600)"]
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert gpu_workers.run([(waits, dict(os.environ)), (ends, dict(os.environ))]) == 3
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.cluster
def test_workers_see_one_card_each_and_leave_with_the_launcher():
    quiet = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=0, **quiet) as cluster, Client(cluster) as client:
        command = [
            sys.executable,
            "-m",
            "pipelines.gpu_workers",
            cluster.scheduler_address,
            "--devices",
            "0,1",
        ]
        launcher = subprocess.Popen([*command, "--devices", "0,1", "--threads", "1"], stderr=subprocess.DEVNULL)
        try:
            client.wait_for_workers(2, timeout=PATIENCE)
            seen = client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
            assert sorted(seen.values()) == ["0", "1"]
        finally:
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=PATIENCE) == 0
        assert not client.scheduler_info()["workers"]
