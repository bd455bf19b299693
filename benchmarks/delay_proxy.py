"""A proxy in front of a server that makes it far away: every answer is late, and connections are slow or break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class DelayProxy:
    """Forwards connections; use it as a context.

    Parameters
    ----------
    host, port : str, int
        The server.
    delay : float
        Seconds that the answer to each request is held back.
    bytes_per_second : float, optional
        What one connection delivers.
    breaks : callable, optional
        Called with the number of each request, from 0; True closes its connection without an answer.

    Attributes
    ----------
    port : int
        Where it listens, on the loopback interface.
    requests : int
        Requests so far: bytes from a client after bytes of the server.
    """

    def __init__(
        self,
        host: str,
        port: int,
        delay: float = 0.0,
        bytes_per_second: float | None = None,
        breaks: Callable[[int], bool] | None = None,
    ) -> None:
        self._server, self._delay, self._rate, self._breaks = (host, port), delay, bytes_per_second, breaks
        self.port, self.requests = 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=256)
        self._listening = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._listening.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._server)
        asked = asyncio.Event()
        try:
            up = asyncio.create_task(self._upward(reader, up_writer, asked))
            down = asyncio.create_task(self._downward(up_reader, writer, asked))
            _, left = await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
        finally:
            for end in (writer, up_writer):
                end.close()

    async def _upward(self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, asked: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            if not asked.is_set():
                asked.set()
                number, self.requests = self.requests, self.requests + 1
                if self._breaks is not None and self._breaks(number):
                    return
            up.write(data)
            await up.drain()

    async def _downward(
        self, up: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event
    ) -> None:
        while data := await up.read(1 << 16):
            if asked.is_set():
                asked.clear()
                await asyncio.sleep(self._delay)
            if self._rate is not None:
                await asyncio.sleep(len(data) / self._rate)
            writer.write(data)
            await writer.drain()
