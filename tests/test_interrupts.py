"""Interruptions that wait until a block has ended."""

import signal

import pytest

from dbksvd_dask.base.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def listening():
    """Let Ctrl-C raise `KeyboardInterrupt`: a background job of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_block_ends_before_the_interruption():
    done = []

    def work():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("work")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interruption_does_not_wait():
    done = []

    def work():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_not_hidden():
    with pytest.raises(ValueError, match="inside"), uninterrupted():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
