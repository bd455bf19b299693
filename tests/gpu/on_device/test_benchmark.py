"""The benchmark runs, so that it is ready for someone who has a card."""

import pytest

from benchmarks import gpu as benchmark
from dbksvd_dask.plan.device import Sizes

pytestmark = pytest.mark.gpu


def test_every_stage_is_measured(space):
    seconds = benchmark.measure_chunk(Sizes(6, 6, 8, 10, 2, n_rounds=2), 1)
    expected = ["upload", "gram", "products", "encode", "encode, pursuit on the host", "first products"]
    assert list(seconds) == [*expected, "next products", "lanczos", "refresh", "metrics"]
    assert all(value > 0 for value in seconds.values())
