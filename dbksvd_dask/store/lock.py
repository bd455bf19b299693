"""One writer per target: a lock file that names its owner and shows that the owner is alive.

The lock of a store is ``STORE.lock`` beside it, that of a fit ``RUN/fit.lock``. It is created with O_EXCL, which
is decided by the server of a network file system. A killed process leaves its lock behind; the next one takes it
over:

- A process on this machine is alive if its number and start time are found; clocks do not matter.
- A process elsewhere touches its lock every `BEAT_SECONDS`. A process that wants the lock watches it: if it is
  touched, the newcomer is refused; if not for `PATIENCE_SECONDS`, the newcomer takes it over. Time before the
  watch counts only by the clock of the file server, and times in the future do not count.

Not every object store can create exclusively, so targets on a remote are not locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dbksvd_dask.errors import BusyError
from dbksvd_dask.store import paths
from dbksvd_dask.store.atomic import cannot_write
from dbksvd_dask.store.paths import PathLike

logger = logging.getLogger(__name__)

LOCK_SUFFIX, FIT_LOCK = ".lock", "fit.lock"
BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 120.0  # twelve beats; a file server that restarts takes a minute
POLL_SECONDS = 5.0
WRITE_SECONDS = 0.1
RECORD_BYTES = 1024  # a lock is one write of fixed length, so no reader sees half of it
ATTEMPTS = 20  # at a lock that others take and release meanwhile

UNKNOWN = "?"  # start of a process that runs but may not be inspected
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    Attributes
    ----------
    host, machine : name of the machine; its boot and process namespace, which give a process number its meaning
    pid, started : number and start of the process
    what, since : what it runs, and the time it began, for people
    token : distinguishes two locks of one process
    """

    host: str
    machine: str
    pid: int
    started: str
    what: str
    since: str
    token: str

    @classmethod
    def current(cls, what: str) -> Owner:
        """Describe this process."""
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(platform.node(), machine(), pid, process_start(pid) or UNKNOWN, what, since, uuid.uuid4().hex)

    def is_local(self) -> bool:
        """Return whether its process number can be looked up here."""
        return (self.host, self.machine) == (platform.node(), machine())

    def is_alive(self) -> bool:
        """Return whether the process of an owner on this machine runs; a later one of its number does not."""
        found = process_start(self.pid)
        return found is not None and (UNKNOWN in (found, self.started) or found == self.started)

    def describe(self) -> str:
        """Describe the owner in a message."""
        return f"{self.what} by process {self.pid} on {self.host or 'this machine'} since {self.since}"


def machine() -> str:
    """Name the boot and the process namespace of this system; empty if unavailable."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return when a process started, by a monotonic clock; None if no such process runs.

    Linux counts ticks since the boot. A zombie does not run.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
        return None if fields[0] in b"ZX" else fields[19].decode()
    except PermissionError:
        return UNKNOWN
    except (OSError, IndexError):
        return _started_elsewhere(pid)


def _started_elsewhere(pid: int) -> str | None:
    """Find the start without /proc, or with one that hides the processes of others."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return UNKNOWN
    except (OSError, OverflowError):
        return None
    if os.path.isdir("/proc/self"):
        return UNKNOWN
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


class Lock:
    """A lock that is held.

    Parameters
    ----------
    path : the lock file; None for a target that is not locked
    target : what it protects
    owner : this process
    """

    def __init__(self, path: str | None, target: str, owner: Owner) -> None:
        self.path, self.target, self.owner = path, target, owner

    def is_held(self) -> bool:
        """Return whether the lock file still names this owner."""
        return self.path is None or _read(self.path) == self.owner

    def require_held(self) -> None:
        """Stop before publishing a result that another process may have begun to write.

        Raises
        ------
        BusyError
            When the lock was taken over or removed while this process was suspended.
        """
        if self.is_held():
            return
        other = _read(str(self.path))
        who = f"taken over ({other.describe()})" if other else "removed"
        raise BusyError(
            f"{self.path} was {who} while this process was at work on {self.target}; nothing more is written; run "
            "the same command again when the other is done"
        )

    def beat(self) -> None:
        """Show that this process is alive; leave a lock of another owner alone."""
        if self.path is None:
            return
        try:
            if self.is_held():
                os.utime(self.path)
        except OSError as error:
            logger.warning("could not touch %s: %s", self.path, error)

    def release(self) -> None:
        """Remove the lock file, unless another owner has taken it over."""
        if self.path is None:
            return
        with contextlib.suppress(OSError), _opened(self.path) as fd:
            if _flock(fd) and _parse(os.pread(fd, RECORD_BYTES, 0)) == self.owner:
                os.unlink(self.path)


@contextlib.contextmanager
def hold(target: PathLike, what: str, *, inside: bool = False) -> Iterator[Lock]:
    """Hold the lock of a target while a block runs.

    Parameters
    ----------
    target : path
        A store, or the folder of a fit; not locked on a remote.
    what : str
        What this process does, such as "a fit", for the message of a refused process.
    inside : bool
        Put the lock into the folder `target`, which is created; default: beside it.

    Raises
    ------
    BusyError
        When another process holds it.
    StoreError
        When the place cannot be written to.
    """
    text, owner = paths.normalise(target), Owner.current(what)
    if paths.is_remote(text):
        yield Lock(None, text, owner)
        return
    path = os.path.join(text, FIT_LOCK) if inside else text + LOCK_SUFFIX
    with _folder(os.path.dirname(os.path.abspath(path)), text):
        lock = acquire(path, text, owner)
        done = threading.Event()
        heart = threading.Thread(target=_beat_until, args=(lock, done), name="dbksvd-lock", daemon=True)
        heart.start()
        try:
            yield lock
        finally:
            done.set()
            heart.join()
            lock.release()


def _beat_until(lock: Lock, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        lock.beat()


@contextlib.contextmanager
def _folder(folder: str, target: str) -> Iterator[None]:
    """Create a folder for the duration of a block; keep it if it is not empty afterwards."""
    made = not os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise cannot_write(target, error) from error
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


# ---------------------------------------------------------------------------------------------- taking


def acquire(path: str, target: str, owner: Owner) -> Lock:
    """Take a lock that is free or whose owner is dead; see `hold`."""
    lock = Lock(path, target, owner)
    for _ in range(ATTEMPTS):
        if _create(path, target, owner):
            return lock
        with contextlib.suppress(FileNotFoundError):  # released meanwhile: try again
            found = _read(path) or _read_again(path)
            _require_dead(path, target, found)
            if _take_over(path, target, found, owner):
                logger.info("took over %s, left by %s", path, _name(found))
                return lock
    raise BusyError(f"{target} is in use: other processes take {path} one after the other; try again later")


def _create(path: str, target: str, owner: Owner) -> bool:
    """Create a lock file; False if there is one."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    except OSError as error:
        raise cannot_write(target, error) from error
    try:
        _write(fd, owner)
    except OSError as error:
        os.unlink(path)
        raise cannot_write(target, error) from error
    finally:
        os.close(fd)
    return True


def _require_dead(path: str, target: str, found: Owner | None) -> None:
    """Refuse a lock whose owner runs; wait to see whether an owner elsewhere shows life."""
    if found is not None and found.is_local():
        alive = found.is_alive()
    else:
        alive = _shows_life(path, target, found)
        found = found or _read(path)  # it may have been written only just now
    if alive:
        raise BusyError(
            f"{target} is in use: {_name(found)}; wait for it, or choose another target; if that process is not "
            f"running any more, delete {path}"
        )


def _name(owner: Owner | None) -> str:
    return owner.describe() if owner else "an unknown process"


def _shows_life(path: str, target: str, found: Owner | None) -> bool:
    """Watch a lock until it is touched, or has not been for `PATIENCE_SECONDS`.

    Raises
    ------
    FileNotFoundError
        When it is released meanwhile.
    """
    touched = _touched(path)
    try:
        now = _now(path)
    except OSError as error:
        raise cannot_write(target, error) from error
    waited = min(max(0.0, now - touched), PATIENCE_SECONDS)  # times in the future do not count
    if waited < PATIENCE_SECONDS:
        left = PATIENCE_SECONDS - waited
        logger.warning("%s is in use: %s; waiting %.0f s for a sign of life", target, _name(found), left)
    while waited < PATIENCE_SECONDS:
        time.sleep(POLL_SECONDS)
        waited += POLL_SECONDS
        if _touched(path) != touched:
            return True
    return False


def _touched(path: str) -> float:
    """Return when a lock was last touched; opening it makes a network file system ask its server."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _now(path: str) -> float:
    """Return the time by the clock of the file system of `path`: that of a new file."""
    scratch = f"{path}.{uuid.uuid4().hex}.tmp"
    with open(scratch, "xb"):
        try:
            os.utime(scratch)
            return os.stat(scratch).st_mtime
        finally:
            os.unlink(scratch)


def _take_over(path: str, target: str, found: Owner | None, owner: Owner) -> bool:
    """Write a new owner into the lock file of a dead one; False if another process was faster."""
    try:
        with _opened(path) as fd:
            # a released file no longer has a name
            ours = _flock(fd) and os.path.samestat(os.fstat(fd), os.stat(path))
            if not ours or _parse(os.pread(fd, RECORD_BYTES, 0)) != found:
                return False
            _write(fd, owner)
            return _read(path) == owner
    except FileNotFoundError:
        return False
    except OSError as error:
        raise cannot_write(target, error) from error


# ---------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def _flock(fd: int) -> bool:
    """Keep others from taking over the same file until it is closed; succeed where files cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_FLOCK
    return True


def _write(fd: int, owner: Owner) -> None:
    if os.pwrite(fd, json.dumps(asdict(owner)).encode().ljust(RECORD_BYTES)[:RECORD_BYTES], 0) < RECORD_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, RECORD_BYTES)


def _read(path: str) -> Owner | None:
    """Return the owner that a lock file names; None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _parse(file.read(RECORD_BYTES))
    except OSError:
        return None


def _read_again(path: str) -> Owner | None:
    """Return a process that has just created a lock the time to write its name into it."""
    time.sleep(WRITE_SECONDS)
    return _read(path)


def _parse(content: bytes) -> Owner | None:
    try:
        found: dict[str, Any] = json.loads(content)
        owner = Owner(**found)
    except (ValueError, TypeError):
        return None
    return owner if isinstance(owner.pid, int) else None
