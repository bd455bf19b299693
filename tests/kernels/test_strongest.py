"""The largest entries of each row equal those of a sort, ties included."""

from __future__ import annotations

import numpy as np
import pytest

from dbksvd_dask.kernels.strongest import strongest_in_rows
from tests.naive.metrics import strongest_columns


@pytest.mark.parametrize(("n_columns", "n"), [(1, 1), (5, 5), (64, 3), (200, 7), (1000, 40)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_equal_to_a_sort(rng, n_columns, n, dtype):
    values = rng.standard_normal((9, n_columns)).astype(dtype)
    values[3] = np.round(values[3])  # many ties
    values[4] = 0
    index = np.full((9, n), -7)
    strongest_in_rows(values, index)
    assert index.tolist() == strongest_columns(values, n)
