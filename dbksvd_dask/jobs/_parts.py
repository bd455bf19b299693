"""Parts of a job: any number of processes do one each, and the last to end publishes the result.

A part takes no lock. Whatever two processes write is the same, each file appears whole or not at all, and a marker
says what is done. Only publishing takes the lock of the target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from dbksvd_dask.errors import BusyError, InputError, StoreError
from dbksvd_dask.plan.units import parts_with
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.lock import hold

T = TypeVar("T")
Part = tuple[int, int]


class Divisible(Protocol):
    """A job that can be done in parts."""

    path: str

    def is_there(self) -> bool:
        """Return whether the result already exists and is not to be replaced."""

    def missing(self) -> Sequence[int]:
        """Return what is still to be written."""

    def finish(self) -> Any:
        """Publish the result."""

    def tidy(self) -> None:
        """Remove what a killed run left beside the result."""

    def abandon(self) -> None:
        """Remove what this process has begun after another one had published the result."""


def check_part(part: Part) -> Part:
    """Return (i, n) if it names a part."""
    i, n = part
    if not 1 <= i <= n:
        raise InputError(f"part {i}/{n} does not exist; parts count from 1/{max(n, 1)} to {max(n, 1)}/{max(n, 1)}")
    return i, n


def check_part_alone(part: Part | None, force: bool) -> Part | None:
    """Return a part that may be done; refuse one that would replace what other parts have written."""
    if part is None:
        return None
    if force:
        raise InputError(
            "part and force were both given; parts run at the same time and must not replace each other's work: "
            "remove the old store first, then run the parts without force=True"
        )
    return check_part(part)


def run_part(job: Divisible, name: str, work: Callable[[], T | None]) -> tuple[T | None, bool]:
    """Do one part of a job, and publish the result if nothing is missing then.

    Parameters
    ----------
    job : Divisible
    name : str
        Such as "import", for messages.
    work : callable
        Does the part; returns None if the result is published when it begins.

    Returns
    -------
    done : what `work` returned; None if another process published the result meanwhile
    finished : bool
        Whether the result is published.
    """
    try:
        done = work()
        if done is not None:
            return done, _publish_last(job, name)
    except (FileNotFoundError, StoreError) as error:
        # with the result published, what is aside is what a process that came too late has begun
        if not job.is_there():
            if paths.is_remote(job.path) or paths.exists(atomic.aside(job.path)):
                raise
            raise StoreError(
                f"{atomic.aside(job.path)} is gone: another process has finished or discarded this {name}; run "
                "the part again"
            ) from error
    with contextlib.suppress(FileNotFoundError):  # others may do the same
        job.abandon()
    return None, True


def found_by_part(job: Divisible, name: str) -> bool:
    """Return whether the result exists; remove what a process that was killed while publishing it left behind."""
    if not job.is_there():
        return False
    with contextlib.suppress(BusyError, StoreError), hold(job.path, _holder(name)):
        job.tidy()
    return True


def _holder(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def parts_missing(job: Divisible, n: int, n_parts: int) -> tuple[int, ...]:
    """Return the parts that still have something to write, of n pieces in n_parts parts.

    Empty while another process publishes the result.
    """
    try:
        return tuple(parts_with(job.missing(), n, n_parts))
    except (FileNotFoundError, StoreError):
        return ()


def _publish_last(job: Divisible, name: str) -> bool:
    """Publish a job of which nothing is missing; return whether it is published."""
    if job.missing():
        return False
    try:
        with hold(job.path, _holder(name)) as lock:
            if job.is_there():
                job.tidy()
            else:
                lock.require_held()
                job.finish()
            return True
    except BusyError:  # another process is publishing it, or does the whole job
        return False
