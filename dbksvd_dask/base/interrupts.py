"""Interruptions that wait until something is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C, and SIGTERM where it raises an exception, until a block has ended.

    Zarr writes on a thread of its own, which an interruption of its caller does not stop: whoever writes to the
    same place next would meet it there. A second interruption does not wait.
    """
    if threading.current_thread() is not threading.main_thread():  # interruptions reach the main thread only
        yield
        return
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before: dict[int, Handler] = {number: handler for number, handler in found.items() if callable(handler)}
    caught: list[tuple[int, FrameType | None]] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            before[number](number, frame)

    try:
        for number in before:
            signal.signal(number, put_off)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number, frame in caught[:1]:
        before[number](number, frame)
