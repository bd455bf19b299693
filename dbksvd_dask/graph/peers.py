"""Workers that compute one batch together and send each other sums and atoms without the scheduler.

A task costs the scheduler half a millisecond, and each of the 16 exchanges of a batch used to pass it once per
worker. Here every worker has one task per batch, and the tasks talk over the connections that Dask's workers
already use for data: a handler of the worker (as in Dask's own P2P shuffle) and its pool of connections, so
addresses, TLS and limits are those of the cluster.

Ranks form a binomial tree, whose subtrees are neighbours::

    0 --- 1        each rank adds what its children send, in order of rank, and sends the sum to its parent;
      --- 2 --- 3  results pass the same way down
      --- 4 --- 5
            --- 6 --- 7

All connections of a batch stand or fall together: a rank that fails tells its neighbours why, one that is lost
closes its connections, and either way every task of the batch ends with an error. Tasks are pure, so the driver
computes the batch again.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NamedTuple, TypeVar

from dbksvd_dask.plan.shares import tree_children, tree_parent

T = TypeVar("T")

OPERATION = "dbksvd_join"  # handler of a worker to which a child connects
LOOK_SECONDS = 1.0  # between two looks of a waiting task whether it is still wanted
INSTALL_SECONDS = 0.05  # between two attempts to join a parent that has not begun any such batch


class PeersLostError(ConnectionError):
    """A worker of the batch is lost, or has left the batch."""


class Seat(NamedTuple):
    """The place of a worker in a batch."""

    batch: str  # unique name of this attempt to compute the batch
    rank: int
    n_ranks: int
    home: str  # address of this worker
    parent: str  # address of the worker of the parent's rank; empty for rank 0


class _Failed:
    """Wakes a task that waits for a message that will not come."""


# ---------------------------------------------------------------------------------------------- event loop


class _Post:
    """The connections and messages of one batch at one worker; lives on the worker's event loop.

    Only the boxes and `error` are read by the thread of the task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.boxes: dict[int, queue.SimpleQueue[Any]] = {}
        self.error: BaseException | None = None
        self.parent: int | None = None  # rank, once the task of this worker has begun
        self.sent_last = asyncio.Event()  # the parent has got all, or the batch has failed
        self._links: dict[int, asyncio.Future[Any]] = {}
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine up to its first wait, and the rest of it in a task.

        Nearly every message is sent without waiting, and a task would cost more than that.
        """
        try:
            awaited = work.send(None)
        except StopIteration:
            return
        self.spawn(_finish(work, awaited))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in a task; the loop itself would forget it."""
        task = self.loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _link(self, rank: int) -> asyncio.Future[Any]:
        if rank not in self._links:
            self._links[rank] = self.loop.create_future()
        return self._links[rank]

    def box(self, rank: int) -> queue.SimpleQueue[Any]:
        """Return the messages of a neighbour that the task has not taken yet."""
        return self.boxes.setdefault(rank, queue.SimpleQueue())

    def connect(self, rank: int, comm: Any) -> None:
        """Take the connection to a neighbour; messages to it may be waiting."""
        link = self._link(rank)
        if not link.done():
            link.set_result(comm)
        if self.error is not None:
            self.spawn(_tell(comm, self.error))

    def disconnect(self, rank: int) -> None:
        """Forget the connection to a neighbour that has left in order."""
        self._links.pop(rank, None)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is connected."""
        return not self._links

    async def write(self, rank: int, message: Message) -> None:
        """Send a message to a neighbour, once it is connected."""
        try:
            comm = await self._link(rank)
            await comm.write(message.to_send())
            if message.is_last and rank == self.parent:
                self.sent_last.set()
        except OSError as error:
            self.fail(_lost(rank, error))
        except asyncio.CancelledError:  # failed meanwhile
            pass

    def fail(self, error: BaseException) -> None:
        """End the batch at this worker, and tell all neighbours."""
        if self.error is not None:
            return
        self.error = error
        self.sent_last.set()
        for box in list(self.boxes.values()):
            box.put(_Failed)
        for link in self._links.values():
            if link.done():
                self.spawn(_tell(link.result(), error))
            else:
                link.cancel()


async def _finish(work: Coroutine[Any, Any, Any], awaited: Any) -> None:
    await _Rest(work, awaited)


class _Rest:
    """What is left of a coroutine that waits for a future."""

    def __init__(self, work: Coroutine[Any, Any, Any], awaited: Any) -> None:
        self._work, self._awaited = work, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    value = yield self._awaited
                except BaseException as error:
                    self._awaited = self._work.throw(error)
                else:
                    self._awaited = self._work.send(value)
        except StopIteration:
            return


async def _tell(comm: Any, error: BaseException) -> None:
    """Tell a neighbour of an error, and close the connection."""
    try:
        await comm.write({"error": pickle.dumps(_portable(error))})
        await comm.close()
    except OSError:
        comm.abort()


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _lost(rank: int, error: BaseException) -> PeersLostError:
    return PeersLostError(
        f"the connection to the worker of share {rank} was lost ({type(error).__name__}: {error})"
    )


# ---------------------------------------------------------------------------------------------- messages


# Arrays below this size are copied into their message: each of the others is a frame that is sent and read by
# itself, which takes as long as copying about this much.
_LARGE = 1 << 18


class Message(NamedTuple):
    """A value as it travels; whoever passes it on need not unpack it."""

    pickled: bytes
    large: list[Any]  # buffers that are not copied
    is_last: bool = False  # nothing follows in this direction

    @classmethod
    def of(cls, value: Any, is_last: bool = False) -> Message:
        """Pack a value."""
        large: list[Any] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _LARGE:
                return True
            large.append(buffer.raw())
            return False

        return cls(pickle.dumps(value, protocol=5, buffer_callback=is_small), large, is_last)

    def value(self) -> Any:
        """Unpack the value."""
        return pickle.loads(self.pickled, buffers=self.large)

    def to_send(self) -> Any:
        """Return the message for a connection; most need no more than their bytes."""
        if not self.large and not self.is_last:
            return self.pickled
        from distributed.protocol import to_serialize

        large = [to_serialize(buffer) for buffer in self.large]
        return {"pickled": self.pickled, "large": large, "is_last": self.is_last}


class _ToldError(Exception):
    """A neighbour has failed, and said why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _received(message: Any) -> Message:
    """Return a message of a neighbour; raise if it has failed."""
    if isinstance(message, dict) and "error" in message:
        raise _ToldError(pickle.loads(message["error"]))
    return Message(message, []) if isinstance(message, bytes) else Message(**message)


class Hub:
    """What a worker knows of the batches that it computes with others."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop
        self._posts: dict[str, _Post] = {}
        worker.handlers[OPERATION] = self._on_join

    def post(self, batch: str) -> _Post:
        """Return the connections of a batch; on the event loop."""
        if batch not in self._posts:
            self._posts[batch] = _Post(self.loop)
        return self._posts[batch]

    def drop(self, batch: str) -> None:
        """Forget a batch; on the event loop."""
        self._posts.pop(batch, None)

    async def _on_join(self, comm: Any, batch: str, rank: int) -> Any:
        """Receive from a child until its last message: a handler of the worker."""
        post = self.post(batch)
        try:
            post.connect(rank, comm)
            is_last = False
            while not is_last:
                message = _received(await comm.read())
                is_last = message.is_last
                post.box(rank).put(message)
            post.disconnect(rank)
        except _ToldError as told:
            post.fail(told.error)
        except OSError as error:
            post.fail(_lost(rank, error))
        except asyncio.CancelledError:  # this worker closes
            post.fail(PeersLostError("a worker of the batch was closed"))
            raise
        finally:
            if post.parent is None and (post.is_idle or post.error is not None):
                self.drop(batch)
        return _no_reply()

    async def follow(self, seat: Seat, post: _Post) -> None:
        """Connect to the parent, and pass on what it sends until its last message."""
        rank, below = tree_parent(seat.rank), tree_children(seat.rank, seat.n_ranks)
        pool = self.worker.rpc
        try:
            comm = await pool.connect(seat.parent)
        except OSError as error:
            post.fail(_lost(rank, error))
            return
        try:
            answer = await self._join(comm, seat, post)
            post.connect(rank, comm)
            while True:
                message = _received(answer)
                for child in reversed(below):
                    post.start(post.write(child, message))
                post.box(rank).put(message)
                if message.is_last:
                    break
                answer = await comm.read()
            await post.sent_last.wait()
            post.disconnect(rank)
        except _ToldError as told:
            post.fail(told.error)
        except OSError as error:
            post.fail(_lost(rank, error))
        finally:
            pool.reuse(seat.parent, comm)

    async def _join(self, comm: Any, seat: Seat, post: _Post) -> Any:
        """Join the parent; return its first message.

        A worker whose handler is not there yet answers None at once.
        """
        while True:
            await comm.write({"op": OPERATION, "batch": seat.batch, "rank": seat.rank})
            answer = await comm.read()
            if answer is not None:
                return answer
            if post.error is not None:
                raise PeersLostError("the batch is over")
            await asyncio.sleep(INSTALL_SECONDS)


def _no_reply() -> Any:
    from distributed.core import Status

    return Status.dont_reply


_lock = threading.Lock()
_hubs: weakref.WeakKeyDictionary[Any, Hub] = weakref.WeakKeyDictionary()


def install(dask_worker: Any) -> Hub:
    """Return the hub of a worker; the first call adds its handler."""
    with _lock:
        if dask_worker not in _hubs:
            _hubs[dask_worker] = Hub(dask_worker)
        return _hubs[dask_worker]


# ---------------------------------------------------------------------------------------------- in a task


class Peers:
    """The other workers of a batch, as the task of one of them sees them.

    Use it as a context: leaving it by an error ends the batch at every worker.

    Parameters
    ----------
    seat : the place of this task
    """

    def __init__(self, seat: Seat) -> None:
        from distributed import get_worker, secede

        self.seat, self._worker = seat, get_worker()
        if self._worker.address != seat.home:
            raise PeersLostError(f"the worker at {seat.home} is gone; its share of the batch came to another")
        self._key = self._worker.get_current_task()
        # this task waits for others, which may have to wait for a thread of the worker on which they begin
        secede()
        self._children = tree_children(seat.rank, seat.n_ranks)
        self._hub = install(self._worker)
        opened: queue.SimpleQueue[_Post] = queue.SimpleQueue()
        self._hub.loop.call_soon_threadsafe(self._open, opened)
        self._post = opened.get()

    def _open(self, opened: queue.SimpleQueue[_Post]) -> None:
        post = self._hub.post(self.seat.batch)
        post.parent = tree_parent(self.seat.rank)
        for rank in (*self._children, post.parent):
            post.box(rank)
        if not self.is_first:
            post.spawn(self._hub.follow(self.seat, post))
        opened.put(post)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        loop, post = self._hub.loop, self._post
        if error is not None:
            loop.call_soon_threadsafe(post.fail, error)
        loop.call_soon_threadsafe(self._hub.drop, self.seat.batch)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, where sums end and results begin."""
        return self.seat.rank == 0

    def check(self) -> None:
        """Raise if the batch has failed."""
        if self._post.error is not None:
            raise self._post.error

    def collect(self, value: T, join: Callable[[T, T], T], is_last: bool = False) -> T:
        """Join the values of all ranks in order; return the result at rank 0, and some part of it at others.

        Parameters
        ----------
        join : joins what covers neighbouring ranks
        is_last : whether nothing more is collected
        """
        for child in self._children:
            value = join(value, self._receive(child))
        if not self.is_first:
            self._send(tree_parent(self.seat.rank), Message.of(value, is_last))
        return value

    def spread(self, value: T | None = None, is_last: bool = False) -> T:
        """Return at every rank the value that rank 0 gives.

        Parameters
        ----------
        is_last : at rank 0: whether nothing more is spread
        """
        if not self.is_first:
            return self._receive(tree_parent(self.seat.rank))  # type: ignore[no-any-return]
        assert value is not None
        message = Message.of(value, is_last)
        for child in reversed(self._children):  # the one with most ranks below it first
            self._send(child, message)
        return value

    def report(self, topic: str, message: Any) -> None:
        """Tell the clients that have subscribed to a topic."""
        self._worker.log_event(topic, message)

    def _send(self, rank: int, message: Message) -> None:
        self._hub.loop.call_soon_threadsafe(self._post.start, self._post.write(rank, message))

    def _receive(self, rank: int) -> Any:
        while True:
            self.check()
            try:
                message = self._post.boxes[rank].get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self._require_wanted()
                continue
            if message is not _Failed:
                return message.value()

    def _require_wanted(self) -> None:
        """Raise if the scheduler has taken the task back, for example because the driver has ended."""
        task = self._worker.state.tasks.get(self._key)
        if task is None or task.state not in ("executing", "long-running"):
            raise PeersLostError("the batch was cancelled")
