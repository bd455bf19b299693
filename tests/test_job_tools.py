"""Parts of a job on a few threads: bounded in number, in order, and stopped by an error."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dbksvd_dask.job_tools import Buffers, run_bounded, storing_threads
from tests.jobs import PATIENCE


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_few_parts_are_in_memory_and_all_are_done_in_order(n_threads):
    lock, alive, peak, stored, told = threading.Lock(), 0, 0, [], []

    def load(part):
        nonlocal alive, peak
        with lock:
            alive += 1
            peak = max(peak, alive)
        return part * 10

    def store(part, content):
        nonlocal alive
        with lock:
            stored.append((part, content))
            alive -= 1

    assert run_bounded(range(20), load, store, told.append, n_threads) == 20
    assert sorted(stored) == [(i, 10 * i) for i in range(20)]
    assert told == list(range(20))
    assert peak <= n_threads + 1


def test_part_is_loaded_while_another_is_stored():
    """The store of part 0 waits until part 1 is loaded; done one after the other, this would never end."""
    loaded = threading.Event()

    def load(part):
        if part == 1:
            loaded.set()
        return part

    def store(part, content):
        assert loaded.wait(PATIENCE)

    assert run_bounded(range(2), load, store, lambda part: None, n_threads=1) == 2


@pytest.mark.parametrize("where", ["load", "store"])
def test_error_stops_the_rest(where):
    done = []

    def load(part):
        if where == "load" and part == 3:
            raise OSError("no more")
        return part

    def store(part, content):
        if where == "store" and part == 3:
            raise OSError("no more")
        done.append(part)

    with pytest.raises(OSError, match="no more"):
        run_bounded(range(1000), load, store, lambda part: None)
    assert 3 not in done
    assert len(done) < 10


def test_threads_follow_the_cores_this_process_may_use(monkeypatch):
    for cores, threads in ((1, 2), (2, 2), (5, 5), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert storing_threads() == threads


def test_buffers_are_used_again():
    buffers = Buffers()
    first = buffers.take((10, 4), np.dtype("float32"))
    second = buffers.take((10, 4), np.dtype("float32"))
    assert not np.shares_memory(first, second)
    buffers.give(first)
    again = buffers.take((4, 12), np.dtype("float16"))
    assert again.shape == (4, 12)
    assert np.shares_memory(first, again)
    buffers.give(second[2:])
    assert not np.shares_memory(second, buffers.take((3,), np.dtype("uint8")))
    assert np.shares_memory(second, buffers.take((160,), np.dtype("uint8")))
