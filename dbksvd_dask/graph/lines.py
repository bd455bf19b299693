"""Lines between the tasks of a batch: sockets that the tasks themselves read and write.

Through event loops and Dask's serialization a message between two tasks costs a third of a millisecond of a core:
it wakes four threads and is copied five times. Here a task borrows the socket of a connection for the time of a
batch (`graph.peers` makes the connections and gives them back), so a message costs a few system calls.

A task reads and writes only inside the functions of `Lines`, all lines at once: whoever waits for a message also
takes in what others send and notices whoever is lost, and two that send each other large arrays do not block.

A message is a prefix, the lengths of its frames, and the frames::

    kind, number of frames, bytes of the rest | length, length, ... | frame, padding | frame, padding | ...
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Packed = list[Any]  # a value as it travels: its pickle, then buffers of large arrays

LOOK_SECONDS = 1.0  # between two looks of a waiting task whether it is still wanted
TELL_SECONDS = 1.0  # for which a task that has failed tries to say why
# Arrays below this size are copied into the pickle of their message; any other is a frame of its own.
_LARGE = 1 << 14

_PREFIX = struct.Struct("<IIQ")
_MESSAGE, _BYE, _ERROR, _HELLO = range(4)
_ALIGNED = 64  # bytes, for arrays inside a message
_PADDING = memoryview(bytes(_ALIGNED))
_BEGINS = 1 << 63  # flag of the length of a frame with which a value begins
_MOST_BUFFERS = 512  # of one call that writes; systems allow 1024


class PeersLostError(ConnectionError):
    """A worker of the batch is lost, or has left the batch."""


# ---------------------------------------------------------------------------------------------- messages


def pack(value: Any) -> Packed:
    """Pack a value; large arrays are not copied."""
    large: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        large.append(raw)
        return False

    return [pickle.dumps(value, protocol=5, buffer_callback=is_small), *large]


def unpack(packed: Packed) -> Any:
    """Return the value; its large arrays share the memory of the message."""
    return pickle.loads(packed[0], buffers=packed[1:])


def pack_arrays(numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> Packed:
    """Pack integers and contiguous arrays: a fifth of the time of a pickle of the objects that hold them.

    >>> numbers, (a,) = unpack_arrays(pack_arrays([7, 8], [np.zeros((2, 3), np.float32)]))
    >>> numbers, a.dtype.char, a.shape
    ((7, 8), 'f', (2, 3))
    """
    about = [len(numbers), *numbers]
    for array in arrays:
        about += [ord(array.dtype.char), array.ndim, *array.shape]
    frames = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    return [struct.pack(f"<{len(about)}q", *about), *frames]


@functools.cache
def _dtype_of(char: int) -> np.dtype[Any]:
    return np.dtype(chr(char))


def unpack_arrays(packed: Packed) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """Return the integers and the arrays, which share the memory of the message."""
    n, *about = struct.unpack(f"<{len(packed[0]) // 8}q", packed[0])
    arrays, at = [], n
    for frame in packed[1:]:
        char, n_dims = about[at : at + 2]
        arrays.append(np.frombuffer(frame, _dtype_of(char)).reshape(about[at + 2 : at + 2 + n_dims]))
        at += 2 + n_dims
    return tuple(about[:n]), arrays


def framed(kind: int, values: Sequence[Packed] = ()) -> list[Any]:
    """Return the buffers of a message with some values."""
    frames, lengths, size = [], [], 0
    for packed in values:
        begins = _BEGINS
        for frame in packed:
            length = len(frame)
            lengths.append(length | begins)
            frames.append(memoryview(frame))
            begins, padding = 0, -length % _ALIGNED
            if padding:
                frames.append(_PADDING[:padding])
            size += length + padding
    index = struct.pack(f"<{len(lengths)}Q", *lengths)
    index += bytes(-len(index) % _ALIGNED)
    return [memoryview(_PREFIX.pack(kind, len(lengths), size + len(index)) + index), *frames]


def new_buffer(size: int) -> memoryview:
    """Return memory that nothing was written to."""
    return memoryview(np.empty(size, np.uint8).data)


def join_frames(packed: Packed, n_pieces: int) -> tuple[memoryview, tuple[int, int, int]]:
    """Copy a value into one buffer, to be cut into pieces; return also those, its bytes and its frames."""
    prefix, *frames = framed(_MESSAGE, [packed])
    body = memoryview(b"".join([prefix[_PREFIX.size :], *frames]))
    return body, (n_pieces, len(body), len(packed))


def frames_of(body: memoryview, n_frames: int) -> list[Packed]:
    """Return the values of a message."""
    out: list[Packed] = []
    at = -(-8 * n_frames // _ALIGNED) * _ALIGNED
    for length in struct.unpack_from(f"<{n_frames}Q", body):
        size = length & ~_BEGINS
        if length & _BEGINS:
            out.append([])
        out[-1].append(body[at : at + size])
        at += -(-size // _ALIGNED) * _ALIGNED
    return out


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# ---------------------------------------------------------------------------------------------- one line


class Line:
    """One end of a connection to another task.

    Parameters
    ----------
    rank : of the other task
    sock : does not block
    end : called when the line is not needed any more: whether the connection can serve others
    is_guest : whether this end has made the connection. It speaks first: until then the event loop of its worker
        may still read, and would take in what is meant for the task
    """

    def __init__(self, rank: int, sock: socket.socket, end: Callable[[bool], None], is_guest: bool) -> None:
        self.rank, self.sock, self.end = rank, sock, end
        self.messages: deque[list[Packed]] = deque()
        self.out: deque[memoryview] = deque()
        self.has_ended = False  # the other task has nothing more to say
        self.watched, self.number = 0, sock.fileno()  # events for which the task waits, and on what
        self._kind, self._n_frames = -1, 0
        self._begin(memoryview(bytearray(_PREFIX.size)))
        self._is_open = is_guest
        if is_guest:
            self.put(_HELLO)

    def _begin(self, buffer: memoryview) -> None:
        self._buffer, self._filled = buffer, 0

    @property
    def waits_for(self) -> int:
        """Events for which the task waits: more to read, and room if something is left to send."""
        reads = 0 if self.has_ended else select.POLLIN  # afterwards bytes are for others
        return reads | (select.POLLOUT if self.out and self._is_open else 0)

    def put(self, kind: int, values: Sequence[Packed] = ()) -> None:
        """Send a message, or what of it can be sent without waiting; `out` keeps the rest."""
        self.out.extend(framed(kind, values))
        self.write()

    def write(self) -> None:
        """Send what can be sent without waiting."""
        while self.out and self._is_open:
            try:
                sent = self.sock.sendmsg([self.out[i] for i in range(min(len(self.out), _MOST_BUFFERS))])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.out.clear()
                self._read_all()  # the other task may have said why
                raise self._lost(error) from error
            while self.out and sent >= len(self.out[0]):
                sent -= len(self.out.popleft())
            if sent:
                self.out[0] = self.out[0][sent:]

    def read(self) -> None:
        """Take in the next message, or what has arrived of it.

        Raises
        ------
        PeersLostError
            When the other task is gone. If it has failed, its error is raised.
        """
        before = len(self.messages)
        while len(self.messages) == before and not self.has_ended:  # what follows a goodbye is for others
            try:
                got = self.sock.recv_into(self._buffer[self._filled :])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise self._lost(error) from error
            if got == 0:
                raise self._lost(EOFError("closed"))
            self._filled += got
            if self._filled == len(self._buffer):
                self._complete()

    def _read_all(self) -> None:
        """Take in all that has arrived."""
        before = -1
        while before < len(self.messages):
            before = len(self.messages)
            self.read()

    def _complete(self) -> None:
        """Use a prefix or a body that has arrived as a whole."""
        if self._kind < 0:
            self._kind, self._n_frames, size = _PREFIX.unpack(self._buffer)
            if size:
                self._begin(new_buffer(size))
                return
        kind, body, self._kind = self._kind, self._buffer, -1
        self._begin(memoryview(bytearray(_PREFIX.size)))
        if kind == _HELLO:
            self._is_open = True
            self.write()
            return
        if kind == _BYE:
            self.has_ended = True
            return
        values = frames_of(body, self._n_frames)
        if kind == _ERROR:
            error: BaseException = unpack(values[0])
            raise error
        self.messages.append(values)

    def _lost(self, error: BaseException) -> PeersLostError:
        what = f"{type(error).__name__}: {error}"
        return PeersLostError(f"the connection to the worker of share {self.rank} was lost ({what})")


# ---------------------------------------------------------------------------------------------- all of a task


class Lines:
    """The lines of one task.

    Parameters
    ----------
    require_wanted : called every second of waiting; raises if the task need not wait any more
    """

    def __init__(self, require_wanted: Callable[[], None] = lambda: None) -> None:
        self._require_wanted = require_wanted
        self._lines: dict[int, Line] = {}
        self._poll = select.poll()
        self._watched: dict[int, Line] = {}  # by the numbers of their sockets
        self._arrivals: deque[Line | BaseException] = deque()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._poll.register(self._bell, select.POLLIN)
        self._is_closed = False
        self._busy = threading.Lock()  # threads that load rows look for failures, too

    def arrive(self, arrival: Line | BaseException) -> None:
        """Add a line, or end all waiting by an error; from any thread."""
        self._arrivals.append(arrival)
        with contextlib.suppress(OSError):  # full, so the task wakes anyway; or closed
            self._ring.send(b".")
        if self._is_closed:
            self._turn_away()

    def send(self, rank: int, values: Sequence[Packed]) -> None:
        """Send values to a rank, as one message; what cannot be sent at once is sent while waiting."""
        with self._busy:
            line = self._line(rank)
            line.put(_MESSAGE, values)
            self._watch(line)

    def receive(self, rank: int) -> list[Packed]:
        """Wait for the next message of a rank."""
        with self._busy:
            line = self._line(rank)
            if not line.messages:
                line.read()
                self._watch(line)
            while not line.messages:
                self._pump(LOOK_SECONDS)
            return line.messages.popleft()

    def flush(self) -> None:
        """Wait until everything is sent."""
        with self._busy:
            while any(line.out for line in self._lines.values()):
                self._pump(LOOK_SECONDS)

    def check(self) -> None:
        """Raise if the batch has failed."""
        with self._busy:
            if self._is_closed:
                raise PeersLostError("the batch is over")
            self._pump(0)

    def leave(self) -> bool:
        """Say goodbye to all neighbours, and wait until they do; then the connections can serve others.

        Return whether that was not done before.
        """
        with self._busy:
            if self._is_closed:
                return False
            self._take_arrivals()
            for line in self._lines.values():
                line.put(_BYE)
                self._watch(line)
            while not all(line.has_ended and not line.out for line in self._lines.values()):
                self._pump(LOOK_SECONDS)
            self._close(True)
            return True

    def fail(self, error: BaseException) -> None:
        """Tell all neighbours why this task ends, as far as they listen, and close the connections."""
        told = framed(_ERROR, [pack(_portable(error))])
        with self._busy:
            if self._is_closed:
                return
            with contextlib.suppress(BaseException):
                self._take_arrivals()
            for line in self._lines.values():
                line.out.extend(told)
            end = time.monotonic() + TELL_SECONDS
            while any([_tell(line) for line in self._lines.values()]) and time.monotonic() < end:
                time.sleep(0.001)
            self._close(False)

    def _close(self, in_order: bool) -> None:
        self._is_closed = True
        for line in self._lines.values():
            line.end(in_order)
        self._lines.clear()
        self._turn_away()
        self._bell.close()
        self._ring.close()

    def _turn_away(self) -> None:
        """Close lines that come too late."""
        while self._arrivals:
            with contextlib.suppress(IndexError):  # another thread does the same
                late = self._arrivals.popleft()
                if isinstance(late, Line):
                    late.end(False)

    def _line(self, rank: int) -> Line:
        """Return the line to a rank, once it is there."""
        while rank not in self._lines:
            self._pump(LOOK_SECONDS)
        return self._lines[rank]

    def _watch(self, line: Line) -> None:
        """Wait for what a line waits for."""
        wanted = line.waits_for
        if wanted == line.watched:
            return
        if wanted:
            self._poll.register(line.number, wanted)
            self._watched[line.number] = line
        else:
            self._poll.unregister(line.number)
            del self._watched[line.number]
        line.watched = wanted

    def _pump(self, seconds: float) -> None:
        """Wait until something happens on any line, and do it."""
        ready = self._poll.poll(1000 * seconds)
        if not ready and seconds:
            self._require_wanted()
        for number, event in ready:
            line = self._watched.get(number)
            if line is None:
                self._take_arrivals()
                continue
            if event & select.POLLOUT:
                line.write()
            if event & ~select.POLLOUT:
                line.read()
            self._watch(line)

    def _take_arrivals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if isinstance(arrival, BaseException):
                raise arrival
            self._lines[arrival.rank] = arrival
            self._watch(arrival)


def _tell(line: Line) -> bool:
    """Send what can be sent; return whether something is left to tell a neighbour that listens."""
    try:
        line.read()  # a guest may just have said that it listens
        line.write()
    except Exception:
        return False
    return bool(line.out)
