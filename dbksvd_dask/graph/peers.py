"""Workers that compute one batch together and send each other sums and atoms without the scheduler.

A task costs the scheduler half a millisecond, and each of the 16 exchanges of a batch used to pass it once per
worker. Here every worker has one task per batch, and the tasks talk over the connections that Dask's workers
already use for data: a handler of the worker (as in Dask's own P2P shuffle) and its pool of connections, so
addresses, TLS and limits are those of the cluster. For the time of a batch the tasks read and write these
connections themselves (`graph.lines`).

Ranks form a binomial tree, whose subtrees are neighbours::

    0 --- 1        each rank adds what its children send, in order of rank, and sends the sum to its parent;
      --- 2 --- 3  results pass the same way down
      --- 4 --- 5
            --- 6 --- 7

Large arrays are cut into pieces, each with such a tree of its own (`plan.pieces`), so that all ranks share the
work of the first.

All lines of a batch stand or fall together: a rank that fails tells its neighbours why, one that is lost closes
its connections, and either way every task of the batch ends with an error. Tasks are pure, so the driver computes
the batch again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from dbksvd_dask.graph.lend import lend
from dbksvd_dask.graph.lines import (
    LOOK_SECONDS,
    Lines,
    Packed,
    PeersLostError,
    frames_of,
    join_frames,
    new_buffer,
    pack,
    unpack,
)
from dbksvd_dask.plan.pieces import Level, byte_spans, owner, plan_levels
from dbksvd_dask.plan.shares import tree_children, tree_parent

__all__ = ["Peers", "PeersLostError", "Seat", "install"]

T = TypeVar("T")
R = TypeVar("R")

OPERATION = "dbksvd_join"  # handler of a worker to which others connect
WELCOME = "dbksvd_welcome"  # its answer once the task has begun
INSTALL_SECONDS = 0.05  # between two attempts to join a worker that has not begun any such batch


class Seat(NamedTuple):
    """The place of a worker in a batch."""

    batch: str  # unique name of this attempt to compute the batch
    rank: int
    n_ranks: int
    home: str  # address of this worker
    lower: tuple[tuple[int, str], ...]  # ranks below this one with which it talks, and their addresses


class Wire(NamedTuple):
    """How values of one kind travel."""

    pack: Callable[[Any], Packed] = pack
    unpack: Callable[[Packed], Any] = unpack


_PICKLED = Wire()


# ---------------------------------------------------------------------------------------------- event loop


class _Meeting:
    """One batch at one worker; lives on the worker's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.opened: asyncio.Future[Lines] = loop.create_future()  # done once the task has begun
        self.waiting = 0  # neighbours that have come before
        self.connecting: set[asyncio.Task[None]] = set()


class Hub:
    """What a worker knows of the batches that it computes with others."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop
        self._meetings: dict[str, _Meeting] = {}
        worker.handlers[OPERATION] = self._on_join

    def _meeting(self, batch: str) -> _Meeting:
        if batch not in self._meetings:
            self._meetings[batch] = _Meeting(self.loop)
        return self._meetings[batch]

    def open(self, seat: Seat, lines: Lines) -> None:
        """Begin a batch: connect to lower ranks, and let higher ones in; on the event loop."""
        meeting = self._meeting(seat.batch)
        meeting.opened.set_result(lines)
        for rank, address in seat.lower:
            task = self.loop.create_task(self._connect(seat, rank, address, lines))
            meeting.connecting.add(task)
            task.add_done_callback(meeting.connecting.discard)

    def close(self, batch: str, in_order: bool) -> None:
        """Forget a batch; on the event loop."""
        meeting = self._meetings.pop(batch, None)
        if meeting is not None and not in_order:
            for task in meeting.connecting:
                task.cancel()

    async def _on_join(self, comm: Any, batch: str, rank: int) -> Any:
        """Let a higher rank in: a handler of the worker."""
        meeting = self._meeting(batch)
        meeting.waiting += 1
        try:
            while not meeting.opened.done():
                await asyncio.wait([meeting.opened], timeout=LOOK_SECONDS)
                if comm.closed():
                    return _no_reply()
        finally:
            meeting.waiting -= 1
            if not meeting.waiting and not meeting.opened.done():
                self._meetings.pop(batch, None)
        lines = meeting.opened.result()
        try:
            await comm.write(WELCOME)
            await lend(comm, rank, lines, is_guest=False)
        except OSError as error:
            lines.arrive(_lost(rank, error))
        return _no_reply()

    async def _connect(self, seat: Seat, rank: int, address: str, lines: Lines) -> None:
        """Connect to a lower rank, and lend the connection to the task."""
        pool = self.worker.rpc
        try:
            comm = await pool.connect(address)
            try:
                await self._join(comm, seat)
                await lend(comm, rank, lines, is_guest=True)
            finally:
                pool.reuse(address, comm)
        except OSError as error:
            lines.arrive(_lost(rank, error))

    async def _join(self, comm: Any, seat: Seat) -> None:
        """Join a rank once its task has begun.

        A worker whose handler is not there yet gives another answer at once.
        """
        while True:
            await comm.write({"op": OPERATION, "batch": seat.batch, "rank": seat.rank})
            if await comm.read() == WELCOME:
                return
            await asyncio.sleep(INSTALL_SECONDS)


def _lost(rank: int, error: BaseException) -> PeersLostError:
    return PeersLostError(f"no connection to the worker of share {rank} ({type(error).__name__}: {error})")


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
        self._hub = install(self._worker)
        self._lines = Lines(self._require_wanted)
        self._hub.loop.call_soon_threadsafe(self._hub.open, seat, self._lines)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        if error is None:
            self.leave()
        else:
            self._lines.fail(error)
            self._close(False)

    def leave(self) -> None:
        """Wait until all neighbours are done, too; afterwards nothing more is exchanged."""
        if self._lines.leave():
            self._close(True)

    def _close(self, in_order: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the worker is closed
            self._hub.loop.call_soon_threadsafe(self._hub.close, self.seat.batch, in_order)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, where sums end and results begin."""
        return self.seat.rank == 0

    def check(self) -> None:
        """Raise if the batch has failed."""
        self._lines.check()

    def collect(self, value: T, join: Callable[[T, T], T]) -> T:
        """Join the values of all ranks in order; return the result at rank 0, and some part of it at others.

        Parameters
        ----------
        join : joins what covers neighbouring ranks
        """
        return self._up([value], join, self._levels(1), _PICKLED).get(0, value)

    def spread(self, value: T | None = None, n_pieces: int = 1) -> T:
        """Return at every rank the value that rank 0 gives.

        Parameters
        ----------
        n_pieces : at rank 0: in so many pieces, which the ranks send each other
        """
        have: dict[int, Packed]
        if self.is_first:
            packed = pack(value)
            body, shape = (None, (1, 0, 0)) if n_pieces == 1 else join_frames(packed, n_pieces)
            spans = byte_spans(shape[1], shape[0])
            have = {0: packed} if body is None else {p: [body[a:b]] for p, (a, b) in enumerate(spans)}
        else:
            first, *values = self._lines.receive(tree_parent(self.seat.rank))
            shape, numbers = unpack(first)
            have = dict(zip(numbers, values, strict=True))
        self._scatter(have, shape)
        if shape[0] == 1:
            return value if self.is_first else unpack(have[0])  # type: ignore[return-value]
        own = {p: packed for p, packed in have.items() if self._owner(p, shape[0]) == self.seat.rank}
        done = self._down(own, self._levels(shape[0]))
        if self.is_first:
            return value  # type: ignore[return-value]
        body = new_buffer(shape[1])
        for p, (a, b) in enumerate(byte_spans(shape[1], shape[0])):
            body[a:b] = done[p][0]
        return unpack(frames_of(body, shape[2])[0])  # type: ignore[no-any-return]

    def _scatter(self, have: dict[int, Packed], shape: tuple[int, int, int]) -> None:
        """Send every child the pieces that belong to a rank below it; a single piece to all."""
        rank, n = self.seat.rank, self.seat.n_ranks
        for child in reversed(tree_children(rank, n)):  # the one with most ranks below it first
            below = range(child, 2 * child - rank)
            numbers = [p for p in have if shape[0] == 1 or self._owner(p, shape[0]) in below]
            self._lines.send(child, [pack((shape, numbers)), *(have[p] for p in numbers)])
        self._lines.flush()

    def exchange(
        self,
        parts: Sequence[T],
        join: Callable[[T, T], T],
        take: Callable[[int, T], R],
        up: Wire = _PICKLED,
        down: Wire = _PICKLED,
    ) -> list[R]:
        """Join each piece of the values of all ranks in order; return at every rank what `take` makes of them.

        Parameters
        ----------
        parts : this rank's value, in as many pieces at every rank
        join : joins what covers neighbouring ranks
        take : called with the number of a piece and its whole value, at one rank for each; piece 0 at rank 0
        up, down : how parts and results travel
        """
        levels = self._levels(len(parts))
        made = {p: take(p, total) for p, total in self._up(parts, join, levels, up).items()}
        done = self._down({p: down.pack(value) for p, value in made.items()}, levels)
        return [made[p] if p in made else down.unpack(done[p]) for p in range(len(parts))]

    def _levels(self, n_pieces: int) -> tuple[Level, ...]:
        return plan_levels(self.seat.rank, self.seat.n_ranks, n_pieces)

    def _owner(self, piece: int, n_pieces: int) -> int:
        return owner(piece, self.seat.n_ranks, n_pieces)

    def _up(
        self, parts: Sequence[T], join: Callable[[T, T], T], levels: tuple[Level, ...], wire: Wire
    ) -> dict[int, T]:
        """Join pieces on the way up; return those that end here."""
        mine = dict(enumerate(parts))
        for level in levels:
            for partner, numbers in level.sends:
                self._lines.send(partner, [wire.pack(mine.pop(p)) for p in numbers])
            for partner, numbers in level.receives:
                for p, packed in zip(numbers, self._lines.receive(partner), strict=True):
                    other: T = wire.unpack(packed)
                    pair = (mine[p], other) if partner > self.seat.rank else (other, mine[p])
                    mine[p] = join(*pair)
        self._lines.flush()
        return mine

    def _down(self, done: dict[int, Packed], levels: tuple[Level, ...]) -> dict[int, Packed]:
        """Pass pieces on the way down, as they are; return all."""
        for level in reversed(levels):
            for partner, numbers in level.receives:
                self._lines.send(partner, [done[p] for p in numbers])
            for partner, numbers in level.sends:
                done.update(zip(numbers, self._lines.receive(partner), strict=True))
        self._lines.flush()
        return done

    def report(self, topic: str, message: Any) -> None:
        """Tell the clients that have subscribed to a topic."""
        self._worker.log_event(topic, message)

    def _require_wanted(self) -> None:
        """Raise if the scheduler has taken the task back, for example because the driver has ended."""
        task = self._worker.state.tasks.get(self._key)
        if task is None or task.state not in ("executing", "long-running"):
            raise PeersLostError("the batch was cancelled")
