"""Memory that is used again is never memory still in use."""

import threading

import numpy as np
import pytest

from dbksvd_dask.kernels import pool

SHAPE = (pool._SMALLEST // 4 // 1024 + 1, 1024)


@pytest.fixture(autouse=True)
def fresh_pool():
    pool.clear()
    yield
    pool.clear()


def address(array):
    return array.__array_interface__["data"][0]


def test_freed_memory_is_handed_out_again():
    first = pool.empty(SHAPE, np.float32)
    where = address(first)
    del first
    assert address(pool.empty(SHAPE, np.float32)) == where


@pytest.mark.parametrize(
    "hold",
    [
        lambda a: a,
        lambda a: a[3:5],
        lambda a: a[3:5].T[2:],
        lambda a: memoryview(a),
        lambda a: np.asarray(a[1]).view(np.uint32),
    ],
    ids=["array", "slice", "slice of a transposed slice", "memoryview", "view"],
)
def test_memory_that_anything_still_sees_is_left_alone(hold):
    first = pool.empty(SHAPE, np.float32)
    where = address(first)
    held = hold(first)
    del first
    assert address(pool.empty(SHAPE, np.float32)) != where
    assert held is not None


def test_read_only_inputs_of_kernels_keep_their_memory():
    from dbksvd_dask.kernels._jit import kernel_input

    first = pool.empty(SHAPE, np.float32)
    first.flags.writeable = False
    where = address(first)
    held = kernel_input(first)
    del first
    assert address(pool.empty(SHAPE, np.float32)) != where
    assert held.shape == SHAPE


def test_small_arrays_are_ordinary():
    assert pool.empty((10, 10), np.float32).base is None
    assert not pool._blocks


def test_idle_memory_is_bounded_and_can_be_given_back():
    arrays = [pool.empty(SHAPE, np.float32) for _ in range(pool._MOST_IDLE + 5)]
    del arrays
    pool.empty((SHAPE[0] + 1, SHAPE[1]), np.float32)
    assert len(pool._blocks) <= pool._MOST_IDLE + 1
    pool.clear()
    assert not pool._blocks


def test_threads_never_share_a_block():
    errors = []

    def work(value):
        for _ in range(20):
            array = pool.empty(SHAPE, np.float32)
            array[::512] = value
            if not (array[::512] == value).all():
                errors.append(value)

    threads = [threading.Thread(target=work, args=(v,)) for v in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
