"""What the driver does while workers compute a batch together."""

import queue
from types import SimpleNamespace

import pytest

from dbksvd_dask.graph import follow, run
from dbksvd_dask.graph.peers import PeersLostError

BATCH = SimpleNamespace(keys=["share-0"], homes=["tcp://gone"], n_rounds=1)


def client_with(*unrunnable):
    """Stand in for a client whose scheduler cannot place some tasks."""
    scheduler = SimpleNamespace(unrunnable=[SimpleNamespace(key=key) for key in unrunnable], workers={})
    return SimpleNamespace(run_on_scheduler=lambda look: look(scheduler))


class Share:
    """A future of a share that never answers."""

    status = "pending"
    asked = 0

    def done(self):
        return False

    def result(self, timeout=None):
        assert timeout is not None, "the driver would wait for ever"
        self.asked += 1
        raise TimeoutError


@pytest.mark.parametrize("status", ["lost", "pending"])
def test_a_share_that_ended_and_whose_worker_then_left_is_not_waited_for(status, monkeypatch):
    """Dask counts it as pending again, on a worker that does not come back."""
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)
    news = queue.SimpleQueue()
    share = Share()
    share.status = status
    news.put(share)
    with pytest.raises(PeersLostError, match="tcp://gone is gone or takes no tasks"):
        follow._wait(client_with("share-0"), BATCH, Share(), news, lambda: None)
    assert share.asked == 0


def test_a_result_whose_worker_left_before_it_was_fetched_is_given_up(monkeypatch):
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)
    with pytest.raises(PeersLostError):
        follow._result(client_with("share-0"), BATCH, Share())


def test_a_failed_share_ends_the_wait_with_its_error():
    class Failed(Share):
        status = "error"

        def result(self, timeout=None):
            raise ValueError("of the share")

    news = queue.SimpleQueue()
    news.put(Failed())
    with pytest.raises(ValueError, match="of the share"):
        follow._wait(client_with(), BATCH, Share(), news, lambda: None)
