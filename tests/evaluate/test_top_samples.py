"""Strongest samples: equal to sorting the dense column, whatever the blocks."""

import numpy as np
import pytest

from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.codes import code_moments
from dbksvd_dask.evaluate.top_samples import stream_top_samples, top_samples
from dbksvd_dask.kernels.moments import merge_moments
from tests.naive import metrics as naive

N, K, M = 150, 4, 12


@pytest.fixture(scope="module")
def codes():
    atom, coefficient = naive.random_codes(np.random.default_rng(0), N, K, M - 1)
    return atom, np.round(coefficient, 1)  # rounding makes ties


@pytest.mark.parametrize("n_top", [1, 5, 200])
@pytest.mark.parametrize("flip", [False, True])
def test_lists_equal_the_sorted_columns(codes, n_top, flip):
    X = naive.dense_codes(*codes, M)
    sign = code_moments(*codes, M).sign if flip else np.ones(M)
    lists = top_samples(*codes, M, n_top, sign=sign)
    for j in range(M):
        samples, activations = lists.of(j)
        rows, values = naive.strongest(X, j, sign[j], n_top)
        assert samples.tolist() == rows
        np.testing.assert_array_equal(activations, values)
    assert lists.of(M - 1)[0].size == 0


@pytest.mark.parametrize("rows", [1, 40, N])
def test_blocks_and_their_order_do_not_matter(codes, rows):
    whole = top_samples(*codes, M, 7)
    starts = list(range(0, N, rows))
    streamed = stream_top_samples(lambda: ((codes[0][i : i + rows], codes[1][i : i + rows]) for i in starts), M, 7)
    parts = [
        top_samples(codes[0][i : i + rows], codes[1][i : i + rows], M, 7, first_sample=i) for i in reversed(starts)
    ]
    for lists in (streamed, merge_moments(parts)):
        np.testing.assert_array_equal(lists.sample[whole.sample >= 0], whole.sample[whole.sample >= 0])
        np.testing.assert_array_equal(lists.activation, whole.activation)


def test_only_the_asked_atoms_are_followed(codes):
    some = top_samples(*codes, M, 3, atoms=[9, 2])
    every = top_samples(*codes, M, 3)
    np.testing.assert_array_equal(some.sample, every.sample[[9, 2]])


def test_wrong_input_is_refused(codes):
    with pytest.raises(InputError, match="n_top=0"):
        top_samples(*codes, M, 0)
    with pytest.raises(InputError, match="must lie in 0 to 11, received 3 to 12"):
        top_samples(*codes, M, 2, atoms=[3, 12])
    with pytest.raises(InputError, match=r"sign must have shape \(12,\), received \(3,\)"):
        top_samples(*codes, M, 2, sign=np.ones(3))
    with pytest.raises(InputError, match="different atoms or lengths"):
        top_samples(*codes, M, 2).merge(top_samples(*codes, M, 3))
