"""The event loop's part of a line between tasks: it lends the socket of a connection, or stands in between.

The socket of a TCP connection is lent as it is. Connections of any other kind (TLS, those inside a process) have
none that can be read alone: there the task gets one end of a pair of sockets, and the loop passes bytes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from dbksvd_dask.graph._compat import borrow_socket
from dbksvd_dask.graph.lines import TELL_SECONDS, Line, Lines, PeersLostError

_AT_ONCE = 1 << 20  # bytes that are passed on in one piece


async def lend(comm: Any, rank: int, lines: Lines, is_guest: bool) -> None:
    """Lend a connection to a task until its line ends; afterwards it serves others, or is closed.

    Parameters
    ----------
    comm : a connection of Dask, on which nothing is under way
    rank : of the task at the other end
    is_guest : whether this end has made the connection
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()
    lent = borrow_socket(comm)
    passing = _Passing(loop, comm) if lent is None else None
    # a copy, because Dask closes connections to workers that it believes lost, whoever reads them
    sock = passing.near if passing is not None else lent.dup()

    def set_ended(in_order: bool) -> None:
        if not ended.done():
            ended.set_result(in_order)

    def end(in_order: bool) -> None:
        if passing is None:
            sock.close()
        with contextlib.suppress(RuntimeError):  # the worker is closed
            loop.call_soon_threadsafe(set_ended, in_order)

    lines.arrive(Line(rank, sock, end, is_guest))
    try:
        in_order = await ended
        if passing is not None:
            in_order = await passing.finish(in_order)
        if not in_order:
            comm.abort()
    except asyncio.CancelledError:  # the worker closes, or the batch has failed
        comm.abort()
        lines.arrive(PeersLostError("a worker of the batch was closed"))
        raise


class _Passing:
    """Bytes between a connection and one end of a pair of sockets; the task has the other, `near`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, comm: Any) -> None:
        self._loop, self._comm = loop, comm
        self.near, self._far = socket.socketpair()
        self.near.setblocking(False)
        self._far.setblocking(False)
        self._ways = [loop.create_task(way()) for way in (self._out, self._in)]

    async def _out(self) -> bool:
        """Send what the task writes; return whether all of it was sent."""
        try:
            while data := await self._loop.sock_recv(self._far, _AT_ONCE):
                await self._comm.write(data)
            await self._comm.write(b"")  # nothing follows
        except OSError:
            return False
        return True

    async def _in(self) -> bool:
        """Give the task what arrives; return whether that has ended in order."""
        try:
            while data := await self._comm.read():
                await self._loop.sock_sendall(self._far, data)
        except OSError:
            with contextlib.suppress(OSError):
                self._far.shutdown(socket.SHUT_RDWR)  # the task sees its line end
            return False
        return True

    async def finish(self, in_order: bool) -> bool:
        """Send the rest; return whether the connection is in order."""
        with contextlib.suppress(OSError):
            self.near.shutdown(socket.SHUT_WR)
        try:
            if in_order:
                return all(await asyncio.gather(*self._ways))
            await asyncio.wait(self._ways[:1], timeout=TELL_SECONDS)
            await self._comm.close()
            return False
        finally:
            for way in self._ways:
                way.cancel()
            self.near.close()
            self._far.close()
