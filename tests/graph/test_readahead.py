"""Reading the next batch during this one: only where reading is slow, and never another result."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from dbksvd_dask.errors import StoreError
from dbksvd_dask.graph import batch, readahead, sources
from tests.helpers import clusters


class Clock(threading.local):
    """A clock that each thread moves on by itself: what one thread reads or computes costs the others nothing."""

    now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


class FakeRows:
    """Rows whose reading takes as long as told by a clock, and that know who read them."""

    def __init__(self, first, clock=None, seconds=0.0, error=None):
        self.rows = np.arange(first, first + 10)
        self.clock, self.seconds, self.error, self.readers = clock or Clock(), seconds, error, []

    def load(self):
        self.readers.append(threading.current_thread().name)
        self.clock.spend(self.seconds)
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


@pytest.mark.parametrize(("reading", "worth"), [(0.02, False), (0.04, True)])
def test_it_judges_by_the_share_of_time_that_reading_took(reading, worth):
    """3 in 100 seconds is where it begins to be worth it."""
    clock = Clock()
    reader = readahead.ReadAhead(clock)
    for i in range(3):
        reader.load(FakeRows(10 * i, clock, seconds=reading), None, tag(i))
        clock.spend(1.0 - reading)  # computing
    assert reader.worth == worth


def test_it_judges_every_batch_anew():
    clock = Clock()
    reader = readahead.ReadAhead(clock)
    judged = []
    for i, reading in enumerate((0.5, 0.5, 0.0, 0.0, 0.5, 0.5)):
        reader.load(FakeRows(10 * i, clock, seconds=reading), None, tag(i))
        judged.append(reader.worth)
        clock.spend(0.5)
    assert judged == [False, True, True, False, False, True], "by the batch before"


def test_time_of_rows_read_ahead_counts_too():
    """Otherwise reading would seem free as soon as it is done ahead, and be given up again."""
    clock = Clock()
    reader = readahead.ReadAhead(clock)
    batches = [FakeRows(10 * i, clock, seconds=0.03) for i in range(6)]
    judged = []
    for i in range(5):
        reader.load(batches[i], batches[i + 1], tag(i))
        judged.append(reader.worth)
        clock.spend(0.05)
    assert judged == [False, *[True] * 4]
    assert all(rows.readers[0].startswith("dbksvd-read-ahead") for rows in batches[2:5])


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
    """Names of the threads that read from stores; by the clock, reading is all that takes time."""
    seen, real = [], sources.StoreRows.load

    def noted(self):
        seen.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(sources.StoreRows, "load", noted)
    monkeypatch.setattr(readahead, "PROCESS", readahead.ReadAhead(itertools.count().__next__))
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


def test_only_rows_of_stores_are_read_ahead(store):
    upcoming = batch.Upcoming("fit", np.arange(4, 8))
    for Y, kind in ((np.zeros((8, 2)), sources.ArrayRows), (store, readahead.AheadRows)):
        refs = batch._references(sources.as_source(Y, 4), np.arange(4), 4, 0, upcoming)
        assert [type(ref) for ref in refs] == [kind]
