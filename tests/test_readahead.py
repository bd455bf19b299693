"""Reading the next batch during this one: only where reading is slow, and never another result."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from dbksvd_dask import readahead
from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import sources
from tests import clusters


class FakeRows:
    """Rows whose reading takes as long as told, and that know who read them."""

    def __init__(self, first, seconds=0.0, error=None):
        self.rows = np.arange(first, first + 10)
        self.seconds, self.error, self.readers = seconds, error, []

    def load(self):
        self.readers.append(threading.current_thread().name)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.rows[:, None].astype(float)


def tag(iteration, fit="a"):
    return readahead.Tag(fit, iteration)


@pytest.fixture
def ahead():
    reader = readahead.ReadAhead()
    reader.load(FakeRows(0), None, tag(0))  # a first batch, so that there is one to judge by
    return reader


def test_slow_rows_are_read_ahead_by_another_thread_and_once(ahead):
    ahead.worth = True
    batches = [FakeRows(10 * i) for i in range(4)]
    ahead.load(batches[0], batches[1], tag(0))
    ahead.worth = True
    clusters.await_true(lambda: batches[1].readers)
    np.testing.assert_array_equal(ahead.load(batches[1], None, tag(1)), batches[1].rows[:, None])
    assert len(batches[1].readers) == 1
    assert batches[1].readers[0].startswith("dbksvd-read-ahead")


def test_it_judges_by_the_share_of_time_that_reading_took():
    reader = readahead.ReadAhead()
    slow = [FakeRows(10 * i, seconds=0.05) for i in range(3)]
    for i in range(2):
        reader.load(slow[i], slow[i + 1], tag(i))  # nothing but reading
    assert reader.worth
    quick = [FakeRows(10 * i) for i in range(3)]
    for i in range(2):
        reader.load(quick[i], None, tag(i + 10))
        time.sleep(0.05)  # computing
    reader.load(quick[2], None, tag(12))
    assert not reader.worth


def test_time_of_rows_read_ahead_counts_too():
    """Otherwise reading would seem free as soon as it is done ahead, and be given up again."""
    reader = readahead.ReadAhead()
    batches = [FakeRows(10 * i, seconds=0.03) for i in range(6)]
    judged = []
    for i in range(5):
        reader.load(batches[i], batches[i + 1], tag(i))
        judged.append(reader.worth)
        time.sleep(0.05)
    assert judged[1:] == [True] * 4


def test_only_the_next_batch_is_held(ahead):
    ahead.worth = True
    ahead.load(FakeRows(0), FakeRows(10), tag(0))
    assert ahead.n_held == 1
    ahead.load(FakeRows(500), None, tag(7))  # a resumed fit, or other workers: what was read is of no use
    assert ahead.n_held == 0
    ahead.worth = True
    ahead.load(FakeRows(500), FakeRows(600), tag(7))
    ahead.load(FakeRows(0), None, tag(8, fit="another"))
    assert ahead.n_held == 0


def test_an_error_is_told_by_the_task_that_needs_the_rows(ahead):
    ahead.worth = True
    bad = FakeRows(10, error=StoreError("chunk 1 is missing"))
    ahead.load(FakeRows(0), bad, tag(0))
    clusters.await_true(lambda: bad.readers)
    with pytest.raises(StoreError, match="chunk 1 is missing"):
        ahead.load(bad, None, tag(1))


# ---------------------------------------------------------------------------------------------- in a fit


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return clusters.small_store(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def readers(monkeypatch):
    """Names of the threads that read from stores; each read takes a while."""
    seen, real = [], sources.StoreRows.load

    def slow(self):
        seen.append(threading.current_thread().name)
        time.sleep(0.02)
        return real(self)

    monkeypatch.setattr(sources.StoreRows, "load", slow)
    monkeypatch.setattr(readahead, "PROCESS", readahead.ReadAhead())
    return seen


def test_a_fit_on_a_slow_store_reads_ahead_and_gives_the_same_bits(store, readers, monkeypatch):
    found = clusters.on_threads(store, 2, n_iter=4, validation=0)
    assert sum(name.startswith("dbksvd-read-ahead") for name in readers) >= 4
    assert readahead.PROCESS.n_held == 0
    monkeypatch.setattr(readahead, "WORTH", np.inf)
    monkeypatch.setattr(readahead, "PROCESS", readahead.ReadAhead())
    readers.clear()
    clusters.same(clusters.on_threads(store, 1, n_iter=4, validation=0), found)
    assert not any(name.startswith("dbksvd-read-ahead") for name in readers)


def test_rows_of_arrays_are_not_read_ahead():
    refs = [sources.ArrayRows(np.zeros((4, 2)), np.arange(4), 4)]
    assert readahead.with_next(refs, refs, tag(0)) is refs
