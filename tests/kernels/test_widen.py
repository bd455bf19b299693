"""float16 samples are widened to the bits that NumPy gives them."""

from __future__ import annotations

import numpy as np
import pytest

from dbksvd_dask.kernels.chunk import prepare
from dbksvd_dask.kernels.widen import widen_float16

EVERY_FLOAT16 = np.arange(65536, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("width", [1, 7, 256])
def test_every_number_gets_its_bits(width):
    rows = EVERY_FLOAT16[: 65536 // width * width].reshape(-1, width)
    wide, expected = widen_float16(rows, None), rows.astype(np.float32)
    assert wide.dtype == np.float32
    ordinary = ~np.isnan(expected)
    assert wide[ordinary].tobytes() == expected[ordinary].tobytes()
    assert np.isnan(wide[~ordinary]).all()


def test_the_mean_is_subtracted_as_numpy_does_it(rng):
    rows = rng.standard_normal((50, 37)).astype(np.float16)
    mean = rng.standard_normal(37).astype(np.float32)
    assert widen_float16(rows, mean).tobytes() == (rows.astype(np.float32) - mean).tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_may_lie_anyhow_and_stay_as_they_are(rng, order):
    rows = np.asarray(rng.standard_normal((20, 14)).astype(np.float16), order=order)[::2, ::2]
    before = rows.copy()
    rows.flags.writeable = False
    wide = prepare(rows, None, np.dtype(np.float32))
    assert wide.flags.c_contiguous
    np.testing.assert_array_equal(wide, before)
    np.testing.assert_array_equal(rows, before)


def test_no_rows():
    assert widen_float16(np.empty((0, 5), np.float16), None).shape == (0, 5)
