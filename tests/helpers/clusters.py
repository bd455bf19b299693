"""Fits that are disturbed while they run: a small store, gates that hold workers in a task, drivers to kill."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask
import numpy as np

from dbksvd_dask import DBKSVD, events
from tests.helpers.jobs import PATIENCE, ROOT, made_up, write_store

N_ITER = 3
N_ROUNDS = 3
HOW = {
    "n_atoms": 48,
    "k": 4,
    "batch_size": 1600,
    "chunk_size": 400,  # four chunks per batch
    "n_rounds": N_ROUNDS,
    "n_iter": N_ITER,
    "validation": 300,
}


# Workers inside the test process: each counts the memory of all of it as its own, and would pause above a limit.
IN_PROCESS = {"processes": False, "dashboard_address": "127.0.0.1:0", "memory_limit": None}


def small_store(folder):
    """A store of several batches: (6000, 32) float32 in chunks of 400 rows."""
    return write_store(Path(folder) / "store.zarr", made_up(6000, 32), 400)


def fit(store, callbacks=(), resume=False, **more):
    """Fit on the current scheduler; the bytes of the dictionary."""
    return DBKSVD(**{**HOW, **more}, callbacks=list(callbacks)).fit(store, resume=resume).components_.tobytes()


def on_threads(store, threads=1, **more):
    """Fit on threads, whatever client there is."""
    with dask.config.set(scheduler="threads", num_workers=threads):
        return fit(store, **more)


class Disturb:
    """Does something when a given round of a given batch is done, and writes down all events around it."""

    def __init__(self, iteration, round_, action, prepare=lambda: None):
        self.when, self.action, self.prepare = (iteration, round_), action, prepare
        self.before, self.after = [], []
        self.error = None

    def __call__(self, event):
        done = self.after if self.acted else self.before
        done.append(event)
        if isinstance(event, events.BatchStarted) and event.iteration == self.when[0] and not self.acted:
            self.prepare()
        if (
            isinstance(event, events.RoundFinished)
            and (event.iteration, event.round) == self.when
            and not self.acted
        ):
            self.acted = True
            try:
                self.action()
            except BaseException as error:
                self.error = error  # callbacks are not allowed to end a run; the test looks here
                raise

    acted = False

    def check_was_mid_batch(self):
        """The batch had begun, some of its rounds were done, and its end came only after the disturbance."""
        if self.error is not None:
            raise self.error
        iteration = self.when[0]
        assert self.acted
        started = [e.iteration for e in self.before if isinstance(e, events.BatchStarted)]
        finished = [e.iteration for e in self.before if isinstance(e, events.BatchFinished)]
        assert iteration in started
        assert iteration not in finished

    def finished_after(self):
        """Batches that were finished after the disturbance."""
        return [e.iteration for e in self.after if isinstance(e, events.BatchFinished)]


# ---------------------------------------------------------------------------------------------- gates


PHASES = {"encode": "encode_chunk", "first": "first_product", "next": "next_product", "refresh": "refresh_chunk"}


def moment(seed):
    """A phase of a batch, and a round of it, that follow from a seed; encoding belongs to no round."""
    rng = np.random.default_rng(seed)
    return str(rng.choice(list(PHASES))), int(rng.integers(N_ROUNDS))


def install_gate(folder, phase, round_):
    """In a worker process: one phase of one round says that it is inside, and waits until told to go on.

    Only while the file `armed` exists. Tasks name their function, so what a worker finds under that name is what
    runs.
    """
    from dbksvd_dask.kernels import chunk

    remove_gate()
    name, folder = PHASES[phase], Path(folder)
    real = getattr(chunk, name)
    chunk.ungated = (name, real)

    @functools.wraps(real)
    def gated(state, r, *rest):
        if (phase == "encode" or r == round_) and (folder / "armed").exists():
            (folder / f"inside-{os.getpid()}").touch()
            await_file(folder, "open")
        return real(state, r, *rest)

    setattr(chunk, name, gated)


def remove_gate():
    """In a worker process: back to the real function."""
    from dbksvd_dask.kernels import chunk

    if hasattr(chunk, "ungated"):
        setattr(chunk, *chunk.ungated)
        del chunk.ungated


class DisturbInside:
    """Does something to the first worker that comes to the gate in a given batch; writes down all events."""

    def __init__(self, folder, iteration, action, victim="*"):
        self.folder, self.iteration, self.action, self.victim = Path(folder), iteration, action, victim
        self.events, self.acted_after, self.error = [], None, None
        self._thread = None

    def __call__(self, event):
        self.events.append(event)
        started = isinstance(event, events.BatchStarted) and event.iteration == self.iteration
        if started and self._thread is None:
            (self.folder / "armed").touch()
            self._thread = threading.Thread(target=self._act, daemon=True)
            self._thread.start()

    def _act(self):
        try:
            pid = int(await_file(self.folder, f"inside-{self.victim}").name.removeprefix("inside-"))
            self.acted_after = list(self.events)
            self.action(pid)
        except BaseException as error:
            self.error = error
        finally:
            (self.folder / "open").touch()

    def check_was_mid_batch(self):
        """The batch had begun and not ended when the worker was disturbed; it and those after it ended."""
        self._thread.join(PATIENCE)
        if self.error is not None:
            raise self.error
        done = [e.iteration for e in self.acted_after if isinstance(e, events.BatchFinished)]
        assert done == list(range(self.iteration))
        assert [e.iteration for e in self.events if isinstance(e, events.BatchFinished)][-1] > self.iteration - 1

    def retries(self):
        """The batches that ran again."""
        return [e for e in self.events if isinstance(e, events.Retrying)]


def kill_process(pid):
    """SIGKILL a process and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    await_true(lambda: not is_alive(pid))


def await_file(folder, pattern, seconds=PATIENCE):
    """Wait until a file is there; its path."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = sorted(Path(folder).glob(pattern))
        if found:
            return found[0]
        time.sleep(0.02)
    raise TimeoutError(f"no {pattern} in {folder} after {seconds} s")


def await_true(condition, seconds=PATIENCE):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"still not after {seconds} s")
        time.sleep(0.05)


def state(pid):
    """State of a process as Linux calls it: "R", "S", "T" for stopped, "Z" for a zombie; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def is_alive(pid):
    """Whether a process runs (a zombie does not)."""
    return state(pid) not in (None, "Z")


def peak():
    """Most memory this process has had, in bytes. Not ru_maxrss: that is inherited from the process before."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


# ---------------------------------------------------------------------------------------------- drivers

DRIVER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background deaf to it
from pathlib import Path
import dask
from dbksvd_dask import events
from tests.helpers.clusters import fit

store, run, folder, iteration, round_ = sys.argv[1:6]

def hold(event):
    if isinstance(event, events.RoundFinished) and (event.iteration, event.round) == (int(iteration), int(round_)):
        Path(folder, "mid-batch").touch()
        for _ in range(6000):  # a signal that comes just before a sleep does not end it
            time.sleep(0.1)

if __name__ == "__main__":
    with dask.config.set(scheduler="threads", num_workers=2):
        fit(store, [hold], checkpoint=run)
"""


def start_driver(store, run, folder, iteration, round_, code=DRIVER):
    """Start a fit in a process of its own that stands still in the middle of a batch; returns when it does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-c", code, str(store), str(run), str(folder), str(iteration), str(round_)]
    process = subprocess.Popen(args, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        await_true(lambda: Path(folder, "mid-batch").exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def kill(process):
    """SIGKILL a process that was running; it must be that which ended it."""
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def same(a, b):
    """Two dictionaries are the same bytes; says how far apart they are if not."""
    if a != b:
        x, y = np.frombuffer(a, np.float32), np.frombuffer(b, np.float32)
        raise AssertionError(
            f"dictionaries differ: {np.count_nonzero(x != y)} of {x.size}, by {np.abs(x - y).max()}"
        )
