"""Random kills: seeded moments over the measured duration of a job, repeated until its result is complete."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import numpy as np

from dbksvd_dask import DBKSVD
from dbksvd_dask.plan import units
from dbksvd_dask.store.dictionary import ATTRIBUTES_CRC
from dbksvd_dask.store.small_reads import copy_each
from tests.helpers import jobs
from tests.kills import encode_sweep
from tests.kills.forks import in_child

# of the kills; those of workers cost most, as a new worker takes seconds to start
SHARES = {"import": 0.26, "shuffle": 0.26, "encode": 0.22, "fit": 0.22, "workers": 0.04}
MOST_KILLS = 4  # of one trial
LATE = 1.05  # kills may also come when a job is about to end
STOPPED_SECONDS = 0.3
TIMEOUT = 300.0  # of a run that nobody kills

FIT = ("--n-atoms", 24, "--k", 3, "--n-iter", 6, "--chunk-size", 64, "--batch-size", 192, "--validation", 50)


# ---------------------------------------------------------------------------------------------- what is killed


@dataclass(frozen=True)
class Cluster:
    """A scheduler by its address, and a file with the numbers of its worker processes."""

    address: str
    pids: Path

    def workers(self) -> list[int]:
        """Numbers of the workers that are at work: Dask gives up on one that is killed while it starts."""
        found: list[int] = json.loads(self.pids.read_text())
        return found


@dataclass
class Kind:
    """One kind of job, in a folder of its own.

    Attributes
    ----------
    command : of `dbksvd`; the same for the first run and those after a kill
    result : what is compared of a result
    seconds : an undisturbed run
    expected : its result, and the names of the files beside it
    cluster : where it runs, or None
    """

    name: str
    folder: Path
    command: tuple[Any, ...]
    result: Callable[[Path], Any]
    cluster: Cluster | None = None
    seconds: float = 0.0
    expected: Any = None
    trials: int = 0
    stops: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def found(self) -> Any:
        return self.result(self.out), sorted(os.listdir(self.folder))

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def report(self) -> dict[str, Any]:
        names = ("trials", "kills", "stops", "bad")
        return {**{name: getattr(self, name) for name in names}, "seconds": round(self.seconds, 2)}


def fitted(run: Path) -> Any:
    """All of a run but the seconds that it took, their checksum, and its status.

    Not by Zarr, which starts a thread.
    """
    kept = {}
    for name, content in jobs.tree(run).items():
        if name == "status.json":
            continue
        if name.endswith(".zarr/zarr.json"):
            attributes = json.loads(content)["attributes"]
            del attributes[ATTRIBUTES_CRC], attributes["history"]["encode_seconds"]
            del attributes["history"]["update_seconds"]
            content = attributes
        kept[name] = content
    return kept


def prepare(home: Path) -> None:
    """Write what the jobs read."""
    rows = jobs.made_up(60, 6)
    np.save(home / "acts_1.npy", rows[:25])
    np.save(home / "acts_2.npy", rows[25:])
    jobs.write_store(home / "store.zarr", jobs.made_up(400, 16), 25)
    jobs.write_dictionary(home / "dictionary", 24, 16, 3)


def make_kind(home: Path, name: str, cluster: Cluster | None) -> Kind:
    """Describe a kind; its command has OUT for the result."""
    store = home / "store.zarr"
    fit = ("fit", store, "OUT", *FIT, "--resume")
    rules = ("--chunk-rows", 4, "--drop-outliers", 1.2, "--source-row")
    command, result = {
        "import": (("import", f"{home}/acts_*.npy", "OUT", *rules), jobs.tree),
        "shuffle": (("shuffle", store, "OUT", "--seed", 3, "--block-bytes", 4096, "--chunk-rows", 20), jobs.tree),
        "encode": (("encode", store, home / "dictionary", "OUT", "--threads", 2), jobs.tree),
        "fit": ((*fit, "--threads", 2), fitted),
        "workers": ((*fit, "--scheduler", cluster.address if cluster else ""), fitted),
    }[name]
    folder = home / name
    folder.mkdir()
    return Kind(name, folder, command, result, cluster if name == "workers" else None)


def load() -> None:
    """Load modules and compiled code once, not in every process; starts no thread, so that forking is safe."""
    for name in (
        "cli.import_",
        "cli.shuffle",
        "cli.encode",
        "cli.fit",
        "jobs.import_",
        "jobs.shuffle",
        "jobs.encode",
    ):
        importlib.import_module(f"dbksvd_dask.{name}")
    importlib.import_module("distributed")
    copy_each(np.empty(0, np.uint64), 1, 1, np.empty(0, np.int64), 0)
    encode_sweep.load_kernels()
    with dask.config.set(scheduler="synchronous"):
        DBKSVD(24, 3, n_iter=2, chunk_size=64, batch_size=192, validation=50).fit(jobs.made_up(400, 16))


# ---------------------------------------------------------------------------------------------- processes


def start(kind: Kind) -> int:
    """Run the command of a kind in a forked process; its number."""
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _work(kind)
        finally:
            os._exit(code)
    return pid


def _work(kind: Kind) -> int:
    """In a forked process: run the command, and leave what it says in a file."""
    units.MIN_CHUNK_ROWS = 25
    code, _, err = jobs.command(*(kind.out if part == "OUT" else part for part in kind.command))
    (kind.folder.parent / f"{kind.name}.err").write_text(err)
    return code


def ended(pid: int, seconds: float) -> int | None:
    """Wait so long for a process; its status, or None while it runs."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, 0.005))


def finish(kind: Kind, pid: int) -> str:
    """Wait for the end of a run that nobody kills; what was wrong with it, or nothing."""
    status = ended(pid, TIMEOUT)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"did not end within {TIMEOUT:.0f} s"
    if status != 0:
        said = (kind.folder.parent / f"{kind.name}.err").read_text()
        return f"exit code {os.waitstatus_to_exitcode(status)}: {said.strip()}"
    return ""


@contextlib.contextmanager
def started_cluster(folder: Path) -> Iterator[Cluster]:
    """A scheduler with two worker processes, apart from this one."""
    env = {**os.environ, "PYTHONPATH": str(jobs.ROOT), "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "100000"}
    with open(folder / "cluster.err", "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kills.cluster", str(folder / "pids")],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Cluster(json.loads(process.stdout.readline()), folder / "pids")
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


# ---------------------------------------------------------------------------------------------- trials


def trial(kind: Kind, rng: np.random.Generator, most: int) -> int:
    """Kill one job a few times, run it to its end, and compare; how often it was killed."""
    kind.clear()
    kind.trials += 1
    before, began, pid = sum(kind.kills.values()), time.monotonic(), start(kind)
    for number in range(min(most, int(rng.integers(1, MOST_KILLS + 1)))):
        moment = float(rng.uniform(0, LATE * kind.seconds))
        if ended(pid, moment) is not None:
            if number == 0:  # the machine has become quicker, or busier when the job was measured
                kind.seconds = min(kind.seconds, time.monotonic() - began)
            pid = start(kind)  # too late: it had ended, well or not, and the next run must tell
            break
        pid = _disturb(kind, rng, pid)
    wrong = finish(kind, pid) or _compare(kind)
    if wrong:
        kind.bad.append(f"trial {kind.trials}: {wrong}")
    return sum(kind.kills.values()) - before


def _disturb(kind: Kind, rng: np.random.Generator, pid: int) -> int:
    """Kill a driver, or a worker, or let a worker stand still; the driver that runs then."""
    pids = kind.cluster.workers() if kind.cluster is not None and rng.random() < 0.5 else []
    if pids:
        _disturb_worker(kind, rng, int(rng.choice(pids)))
        return pid
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):  # else it had ended in this very moment
        _count(kind, "driver" if kind.cluster else "process")
    return start(kind)


def _disturb_worker(kind: Kind, rng: np.random.Generator, pid: int) -> None:
    stopped = rng.random() < 1 / 3
    with contextlib.suppress(ProcessLookupError):
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(float(rng.uniform(0, STOPPED_SECONDS)))
        if stopped and rng.random() < 0.5:
            os.kill(pid, signal.SIGCONT)
            kind.stops += 1
            return
        os.kill(pid, signal.SIGKILL)
        _count(kind, "worker, stopped first" if stopped else "worker")


def _count(kind: Kind, what: str) -> None:
    kind.kills[what] = kind.kills.get(what, 0) + 1


def _compare(kind: Kind) -> str:
    found = kind.found()
    if found == kind.expected:
        return ""
    same = "same bytes, other files beside it" if found[0] == kind.expected[0] else "other bytes"
    return f"{same}: {found[1]} instead of {kind.expected[1]}"


# ---------------------------------------------------------------------------------------------- campaign


def campaign(kind: Kind, n_kills: int, rng: np.random.Generator, tell: Callable[[str], None]) -> None:
    """Run a kind undisturbed, twice as the first run may start up slowly, then kill it so many times."""
    for _ in range(2):
        kind.clear()
        began = time.monotonic()
        wrong = finish(kind, start(kind))
        assert not wrong, wrong
        kind.seconds = time.monotonic() - began
    kind.expected = kind.found()
    killed = 0
    while killed < n_kills and kind.trials < 20 * n_kills:  # the latter for jobs that always end before
        bad = len(kind.bad)
        killed += trial(kind, rng, n_kills - killed)
        tell(f"{kind.name}: {killed} of {n_kills} kills {kind.kills} in {kind.trials} trials, {len(kind.bad)} bad")
        for line in kind.bad[bad:]:
            tell(f"{kind.name}, {line}")


def run(folder: str, n_kills: int, seed: int, kinds: list[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Kill until there were `n_kills`, shared out over the kinds; what came of it."""
    home, began, done = Path(folder), time.monotonic(), []
    assert in_child(lambda: prepare(home))[0] == 0
    load()
    total = sum(SHARES[name] for name in kinds)
    for number, name in enumerate(SHARES):
        if name not in kinds:
            continue
        with started_cluster(home) if name == "workers" else contextlib.nullcontext() as cluster:
            kind = make_kind(home, name, cluster)
            campaign(
                kind, max(1, round(n_kills * SHARES[name] / total)), np.random.default_rng([seed, number]), tell
            )
        done.append(kind)
    return {
        "seed": seed,
        "kills": sum(sum(kind.kills.values()) for kind in done),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "kinds": {kind.name: kind.report() for kind in done},
    }
