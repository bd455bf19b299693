"""Lines between tasks: messages of any size arrive whole and in order, and every failure ends the wait."""

import socket
import threading

import numpy as np
import pytest

from dbksvd_dask.errors import InputError
from dbksvd_dask.graph import lines
from dbksvd_dask.graph.lines import Line, Lines, PeersLostError


class End:
    """What has become of a connection."""

    def __init__(self, sock):
        self.sock, self.in_order = sock, None

    def __call__(self, in_order):
        self.in_order = in_order
        if not in_order:
            self.sock.close()


@pytest.fixture
def connected(monkeypatch):
    """Make the lines of n ranks, each connected to all others, and the ends of their connections."""
    every, ends = [], []

    def connect(n=2, require_wanted=lambda: None):
        every.extend(Lines(require_wanted) for _ in range(n))
        for low in range(n):
            for high in range(low + 1, n):
                pair = socket.socketpair()
                for sock, own, other in zip(pair, (low, high), (high, low), strict=True):
                    sock.setblocking(False)
                    ends.append(End(sock))
                    every[own].arrive(Line(other, sock, ends[-1], is_guest=own == high))
        return every, ends

    yield connect
    monkeypatch.setattr(lines, "TELL_SECONDS", 0)
    for one in every:
        one.fail(RuntimeError())
    for end in ends:
        end.sock.close()


def at_once(*calls):
    """Run calls in threads of their own; their results, or the errors that ended them."""
    out = [None] * len(calls)

    def run(i):
        try:
            out[i] = calls[i]()
        except BaseException as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hangs"
    return out


@pytest.mark.parametrize("n", [0, 1, 3, 5000, 1 << 20])
def test_a_value_comes_back_and_no_large_array_is_copied(n):
    value = {"W": np.arange(2.0 * n).reshape(n, 2), "n": n, "odd": b"x" * 63}
    packed = lines.pack(value)
    assert len(packed) == (2 if n > 1000 else 1)
    found = lines.unpack(packed)
    np.testing.assert_array_equal(found["W"], value["W"])
    assert (found["n"], found["odd"]) == (n, value["odd"])


def test_arrays_come_back_with_their_numbers(rng):
    arrays = [rng.standard_normal((7, 3)).astype(np.float32), np.arange(5), np.zeros((0, 4)), rng.random((6, 6)).T]
    numbers, found = lines.unpack_arrays(lines.pack_arrays([3, -1], arrays))
    assert numbers == (3, -1)
    for a, b in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize("sizes", [[0], [1], [63, 64, 65], [1 << 20, 0, 7], [100] * 40, []])
def test_messages_of_odd_sizes_arrive_whole_in_order_and_aligned(connected, sizes, rng):
    (a, b), ends = connected()
    values = [lines.pack_arrays([i], [rng.integers(0, 99, n, np.uint8)]) for i, n in enumerate(sizes)]

    def send():
        a.send(1, values)
        a.send(1, values[::-1])
        return a.leave()

    def receive():
        return [b.receive(0), b.receive(0), b.leave()]

    sent, (first, second, left) = at_once(send, receive)
    assert sent is left is True
    assert [[bytes(frame) for frame in one] for one in first] == [[bytes(f) for f in one] for one in values]
    assert [bytes(one[1]) for one in second] == [bytes(one[1]) for one in values[::-1]]
    assert all(np.frombuffer(frame, np.uint8).ctypes.data % 8 == 0 for one in first for frame in one)
    assert [end.in_order for end in ends] == [True, True]


def test_two_that_send_each_other_large_messages_do_not_block(connected):
    (a, b), _ = connected()
    large = [lines.pack(np.zeros(1 << 22))]

    def talk(mine, other):
        mine.send(other, large)
        got = mine.receive(other)
        mine.flush()
        return len(got[0][1]), mine.leave()

    assert at_once(lambda: talk(a, 1), lambda: talk(b, 0)) == [(1 << 25, True)] * 2


def test_after_a_goodbye_nothing_is_read_that_is_meant_for_others(connected):
    (a, b), ends = connected()
    at_once(a.leave, b.leave)
    ends[0].sock.sendall(b"of Dask")
    assert ends[1].sock.recv(100) == b"of Dask"


def test_the_host_says_nothing_before_its_guest():
    """Until its loop has lent the socket, the guest's worker would take in what is meant for the task."""
    host, guest = socket.socketpair()
    host.setblocking(False)
    guest.settimeout(0.2)
    line = Line(1, host, End(host), is_guest=False)
    line.put(0, [lines.pack("first")])
    with pytest.raises(TimeoutError):
        guest.recv(1)
    guest.setblocking(False)
    Line(0, guest, End(guest), is_guest=True)
    line.read()
    assert not line.out, "now it is sent"
    line.sock.close()
    guest.close()


def test_an_error_reaches_a_neighbour_as_it_is(connected):
    (a, b, c), ends = connected(3)
    told = at_once(lambda: a.fail(InputError("row 7")), lambda: b.receive(2), lambda: c.receive(0))
    assert told[0] is None
    assert all(isinstance(error, InputError) and "row 7" in str(error) for error in told[1:])
    assert {end.in_order for end in ends[:1]} == {False}
    with pytest.raises(PeersLostError, match="the batch is over"):
        a.check()


def test_who_cannot_send_any_more_reads_why(connected):
    (a, b), _ = connected()
    a.check()
    b.check()
    a.check()
    b.send(0, [lines.pack("before")])
    b.fail(InputError("row 8"))

    def send():
        for _ in range(100):
            a.send(1, [lines.pack(np.zeros(1 << 16))])

    with pytest.raises(InputError, match="row 8"):
        send()


def test_an_error_that_cannot_travel_is_described(connected):
    class LocalError(Exception):
        pass

    (a, b), _ = connected()
    _, told = at_once(lambda: a.fail(LocalError("odd")), lambda: b.receive(0))
    assert isinstance(told, RuntimeError)
    assert str(told) == "LocalError: odd"


def test_a_neighbour_that_is_lost_in_the_middle_of_a_message_is_noticed(connected):
    (a, b), ends = connected()
    a.check()  # takes its line
    whole = b"".join(lines.framed(0, [lines.pack(np.zeros(1 << 16))]))
    ends[1].sock.setblocking(True)
    ends[1].sock.sendall(whole[: len(whole) // 4])
    ends[1].sock.close()
    with pytest.raises(PeersLostError, match="share 1 was lost"):
        a.receive(1)
    b.fail(RuntimeError())


def test_who_does_not_listen_is_told_no_longer_than_a_moment(connected, monkeypatch):
    monkeypatch.setattr(lines, "TELL_SECONDS", 0.05)
    (a, _), _ = connected()
    a.send(1, [lines.pack(np.zeros(1 << 24))])  # more than a socket takes
    a.fail(RuntimeError("nobody reads this"))


def test_a_task_that_is_not_wanted_any_more_does_not_wait(connected, monkeypatch):
    monkeypatch.setattr(lines, "LOOK_SECONDS", 0.01)

    def cancelled():
        raise PeersLostError("cancelled")

    (a, _), _ = connected(require_wanted=cancelled)
    with pytest.raises(PeersLostError, match="cancelled"):
        a.receive(1)
    with pytest.raises(PeersLostError, match="cancelled"):
        a.receive(3)  # no line ever comes


def test_an_error_of_the_event_loop_ends_the_wait_for_a_line(connected):
    (alone,), _ = connected(1)
    threading.Timer(0.1, lambda: alone.arrive(PeersLostError("no connection"))).start()
    with pytest.raises(PeersLostError, match="no connection"):
        alone.receive(2)


def test_a_line_that_comes_too_late_is_closed(connected):
    (alone,), _ = connected(1)
    sock, other = socket.socketpair()
    alone.leave()
    end = End(sock)
    alone.arrive(Line(1, sock, end, is_guest=False))
    assert end.in_order is False
    other.close()
