"""SIGTERM on the command line: SLURM, Kubernetes and spot machines send it before they end a process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

# 128 + 15, as a shell reports a process that SIGTERM ended; 130 is Ctrl-C
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; handled wherever Ctrl-C is."""


@contextlib.contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Raise `Terminated` in the main thread when SIGTERM arrives; further ones are ignored while work is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated("terminated")

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
