"""One writer per target: who is refused, whose lock is taken over, and what a clock has to do with it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from dbksvd_dask.errors import BusyError, StoreError
from dbksvd_dask.store import lock as locks
from dbksvd_dask.store.lock import Owner, acquire, hold


@pytest.fixture
def target(tmp_path):
    return tmp_path / "s.zarr"


@pytest.fixture
def no_waiting(monkeypatch):
    """Pauses take no time; returns how long they would have been."""
    paused = []
    monkeypatch.setattr(locks.time, "sleep", paused.append)
    return paused


def owner(**changes):
    return dataclasses.replace(Owner.current("a fit"), **changes)


def leave(target, found):
    """Put a lock there."""
    path = f"{target}.lock"
    content = found if isinstance(found, bytes) else json.dumps(dataclasses.asdict(found)).encode()
    with open(path, "wb") as file:
        file.write(content)
    os.utime(path, (1e9, 1e9))
    return path


@pytest.fixture
def clock(monkeypatch):
    """Set the clock of the file system so many seconds after the locks that were left."""

    def set_clock(age):
        monkeypatch.setattr(locks, "_now", lambda path: 1e9 + age)

    return set_clock


def take(target):
    """Take a lock and give it back; what it said of its owner."""
    with hold(target, "a fit"), open(f"{target}.lock") as file:
        return json.load(file)


# ---------------------------------------------------------------------------------------------- held


def test_a_lock_names_its_owner_and_goes_with_the_block(target):
    found = take(target)
    assert (found["pid"], found["what"]) == (os.getpid(), "a fit")
    assert found["started"] == locks.process_start(os.getpid())
    assert not os.path.exists(f"{target}.lock")


def test_a_second_owner_is_refused_with_one_line_that_names_the_first(target):
    with hold(target, "a shuffle"):
        with pytest.raises(BusyError) as caught, hold(target, "an import"):
            raise AssertionError("two owners")
        assert os.path.exists(f"{target}.lock"), "the first one keeps it"
    text = str(caught.value)
    assert f"s.zarr is in use: a shuffle by process {os.getpid()} on " in text
    assert (
        f"wait for it, or choose another target; if that process is not running any more, delete {target}.lock"
        in text
    )
    assert "\n" not in text


def test_a_block_that_fails_gives_the_lock_back(target):
    with pytest.raises(RuntimeError, match="no good"), hold(target, "a fit"):
        raise RuntimeError("no good")
    take(target)


def test_a_folder_made_for_a_lock_goes_unless_something_was_put_there(tmp_path):
    with hold(tmp_path / "run", "a fit", inside=True):
        assert os.listdir(tmp_path / "run") == ["fit.lock"]
    assert not os.listdir(tmp_path)
    with hold(tmp_path / "run", "a fit", inside=True):
        (tmp_path / "run" / "notes").touch()
    assert os.listdir(tmp_path / "run") == ["notes"]


def test_a_remote_is_not_locked():
    with hold("memory://nowhere/s.zarr", "an import") as lock:
        lock.beat()
        lock.require_held()


def test_of_many_threads_only_one_gets_in_at_a_time(target):
    inside, most, refused = [], [], []

    def work():
        for _ in range(30):
            try:
                with hold(target, "a fit"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except BusyError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) + len(refused) == 120
    assert not os.path.exists(f"{target}.lock")


# ---------------------------------------------------------------------------------------------- left behind

HOLD = """
import sys
from dbksvd_dask.store.lock import hold
with hold(sys.argv[1], "a fit"):
    print("in", flush=True)
    sys.stdin.read()
"""


def holder(target):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "in\n"
    return process


def test_the_lock_of_a_killed_process_is_taken_over_at_once(target, no_waiting):
    with holder(target) as process:
        with pytest.raises(BusyError, match=f"a fit by process {process.pid} on "):
            take(target)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(BusyError):
            take(target)  # it stands still, but it is there
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert take(target)["pid"] == os.getpid(), "a zombie does not run"
    assert no_waiting == []


def test_another_process_under_the_number_of_a_dead_one_does_not_count(target, no_waiting):
    leave(target, owner(started="1"))  # this process, had it started with the machine
    assert take(target)["started"] != "1"
    assert no_waiting == []


def test_the_time_of_a_lock_means_nothing_while_its_process_runs(target, no_waiting, clock):
    for age in (1e6, -1e6):
        clock(age)
        leave(target, owner())
        with pytest.raises(BusyError):
            take(target)
    assert no_waiting == []


def test_a_process_that_may_not_be_looked_at_counts_as_running(target, monkeypatch):
    leave(target, owner(started="5"))
    monkeypatch.setattr(locks, "process_start", lambda pid: locks.UNKNOWN)
    with pytest.raises(BusyError):
        take(target)


# ---------------------------------------------------------------------------------------------- elsewhere

ELSEWHERE = [{"host": "elsewhere"}, {"machine": "the boot before this one"}]


@pytest.mark.parametrize("other", ELSEWHERE)
def test_a_lock_from_elsewhere_that_is_touched_refuses(target, other, monkeypatch, clock):
    clock(3)
    path = leave(target, owner(**other, what="an import"))
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: os.utime(path))
    with pytest.raises(BusyError, match="an import by process"):
        take(target)


AGES = [(0, 120), (100, 20), (119, 5), (120, 0), (1e6, 0), (-1e6, 120)]


@pytest.mark.parametrize("other", ELSEWHERE)
@pytest.mark.parametrize(("age", "wait"), AGES)
def test_a_lock_from_elsewhere_not_touched_for_long_is_taken_over(target, no_waiting, clock, age, wait, other):
    """Negative: the clock of the file server was set back, and nobody knows how old the lock is."""
    clock(age)
    leave(target, owner(**other))
    assert take(target)["host"] == locks.platform.node()
    assert sum(no_waiting) == wait


def test_the_clock_is_that_of_the_file_system(target, tmp_path):
    (tmp_path / "before").touch()
    now = locks._now(f"{target}.lock")
    (tmp_path / "after").touch()
    assert os.stat(tmp_path / "before").st_mtime <= now <= os.stat(tmp_path / "after").st_mtime
    assert sorted(os.listdir(tmp_path)) == ["after", "before"]


def test_a_lock_given_back_while_it_is_watched_is_free(target, monkeypatch, clock):
    clock(0)
    path = leave(target, owner(host="elsewhere"))
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: os.path.exists(path) and os.unlink(path))
    take(target)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff" * 2000])
def test_a_lock_that_cannot_be_read_is_judged_by_its_age(target, no_waiting, content, clock):
    for age, wait in ((10, 110), (1000, 0)):
        clock(age)
        leave(target, content)
        no_waiting.clear()
        take(target)
        assert sum(no_waiting) == locks.WRITE_SECONDS + wait


def test_a_lock_that_is_only_just_being_written_is_read_again(target, monkeypatch):
    path = leave(target, b"")
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: leave(target, owner(what="a shuffle")))
    with pytest.raises(BusyError, match="a shuffle by process"):
        acquire(path, str(target), owner())


def test_one_of_two_that_find_a_dead_owner_gets_the_lock(target):
    dead = owner(started="1")
    path = leave(target, dead)
    first, second = owner(), owner()
    assert locks._take_over(path, str(target), dead, first)
    assert not locks._take_over(path, str(target), dead, second)
    with pytest.raises(BusyError):
        acquire(path, str(target), second)


# ---------------------------------------------------------------------------------------------- alive, and lost


def test_a_beat_touches_the_lock(target):
    with hold(target, "a fit") as lock:
        os.utime(lock.path, (1, 1))
        lock.beat()
        assert os.stat(lock.path).st_mtime > 1


def test_the_heart_beats_while_the_block_runs(target, monkeypatch):
    beaten = threading.Event()
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(locks.Lock, "beat", lambda lock: beaten.set())
    with hold(target, "a fit"):
        assert beaten.wait(60)


def test_an_owner_that_lost_its_lock_publishes_nothing_and_leaves_the_lock_alone(target):
    other = owner(host="elsewhere", what="an import")
    with hold(target, "a fit") as lock:
        path = leave(target, other)
        lock.beat()
        assert os.stat(path).st_mtime == 1e9
        with pytest.raises(BusyError, match=r"was taken over \(an import by process .* on elsewhere"):
            lock.require_held()
    assert os.path.exists(path)
    os.unlink(path)
    with hold(target, "a fit") as lock:
        os.unlink(path)
        with pytest.raises(BusyError, match="was removed while this process was at work"):
            lock.require_held()


# ---------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_place_that_cannot_be_written_is_named(target, monkeypatch, code):
    real = os.open

    def refusing(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(locks.os, "open", refusing)
    with pytest.raises(StoreError, match=rf"s.zarr cannot be written \({os.strerror(code)}\); (choose a|make)"):
        take(target)


def test_a_lock_from_elsewhere_in_a_place_that_cannot_be_written_names_the_place(target, monkeypatch):
    leave(target, owner(host="elsewhere"))

    def refusing(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(locks, "_now", refusing)
    with pytest.raises(StoreError, match=r"s.zarr cannot be written \(Read-only file system\)"):
        take(target)


@pytest.mark.parametrize("written", [0, 100])
def test_a_lock_that_a_full_disk_cuts_short_is_not_left(target, monkeypatch, written):
    monkeypatch.setattr(locks.os, "pwrite", lambda fd, content, offset: written)
    with pytest.raises(StoreError, match=r"s.zarr cannot be written \(No space left on device\); make room"):
        take(target)
    assert not os.path.exists(f"{target}.lock")


def test_a_file_system_without_flock_still_has_locks(target, monkeypatch):
    def unsupported(fd, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    take(target)
    leave(target, owner(started="1"))
    take(target)
    assert not os.path.exists(f"{target}.lock")
