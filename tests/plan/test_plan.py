"""Planning: integers in, integers out, whatever the sizes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.groups import exponential_groups, group_budgets, group_sizes, plan_groups, plan_rounds
from dbksvd_dask.plan.stream import RowStream, plan_stream, runs

streams = st.builds(
    lambda n, block, batch, held, seed: RowStream(n, block, batch, min(held, n // 10), seed),
    st.integers(10, 400),
    st.integers(1, 60),
    st.integers(1, 500),
    st.integers(0, 60),
    st.integers(0, 5),
)


@given(streams)
@settings(max_examples=150)
def test_an_epoch_reads_every_training_row_once(stream):
    rows = stream.rows(0, stream.n_train)
    held = stream.validation_rows()
    assert len(held) == stream.n_validation == len(set(held.tolist()))
    assert sorted(np.concatenate([rows, held]).tolist()) == list(range(stream.n_samples))


@given(streams, st.integers(0, 30))
@settings(max_examples=100)
def test_batches_are_cuts_of_one_stream(stream, iteration):
    rows = stream.batch(iteration)
    assert rows.size == stream.rows_per_batch == min(stream.batch_size, stream.n_train)
    whole = stream.rows(0, (iteration + 1) * stream.rows_per_batch)
    np.testing.assert_array_equal(rows, whole[-stream.rows_per_batch :])


@pytest.mark.slow
@given(streams, st.integers(1, 80), st.integers(1, 140))
@settings(max_examples=100)
def test_a_warm_up_doubles_its_batches_and_leaves_out_no_row(stream, first_rows, n_iter):
    stream = dataclasses.replace(stream, first_rows=first_rows)
    sizes = [stream.batch(i).size for i in range(n_iter)]
    assert sizes == [min(first_rows * 2 ** (i // 2), stream.rows_per_batch) for i in range(n_iter)]
    assert stream.rows_before(n_iter) == sum(sizes)
    joined = np.concatenate([stream.batch(i) for i in range(n_iter)])
    np.testing.assert_array_equal(joined, stream.rows(0, sum(sizes)))


@given(streams)
@settings(max_examples=50)
def test_rows_are_read_in_few_runs(stream):
    """As many runs as blocks at most, plus one for each gap that held-out rows leave."""
    rows = stream.rows(0, stream.n_train)
    assert len(runs(rows)) <= stream.n_blocks + len(runs(stream.validation_rows()))


def test_epochs_come_in_new_orders_and_seeds_differ():
    stream = RowStream(1000, 10, 100, 0, 1)
    other = RowStream(1000, 10, 100, 0, 2)
    first, second = stream.rows(0, 1000), stream.rows(1000, 1000)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other.rows(0, 1000))
    np.testing.assert_array_equal(first, RowStream(1000, 10, 100, 0, 1).rows(0, 1000))


def test_a_huge_store_is_planned_in_no_time_and_little_memory():
    stream = plan_stream(10_000_000_000, 65_536, 8192, 0)
    rows = stream.batch(100_000)
    assert rows.size == 65_536
    assert len(runs(rows)) <= 22


@given(st.integers(1, 5000), st.integers(1, 8))
def test_exponential_groups_grow_and_sum_up(n_atoms, n_groups):
    groups = exponential_groups(n_atoms, n_groups)
    assert sum(groups) == n_atoms
    assert list(groups) == sorted(groups)
    assert len(groups) <= n_groups


@given(st.integers(1, 300), st.integers(1, 40))
def test_budgets_are_equal_shares_of_exactly_k(k, n_groups):
    shares = group_budgets(k, n_groups)
    assert sum(shares) == k
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@given(st.integers(1, 500), st.integers(1, 600), st.integers(0, 3), st.integers(0, 9))
def test_rounds_partition_the_atoms(n_atoms, n_rounds, seed, iteration):
    (group,) = plan_groups(n_atoms, 1, None, n_rounds)
    rounds = plan_rounds(group, seed, iteration)
    assert sorted(np.concatenate(rounds).tolist()) == list(range(n_atoms))
    sizes = [r.size for r in rounds]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 50), max_size=60))
def test_runs_restore_the_rows(values):
    rows = np.array(values, np.int64)
    restored = [i for a, b in runs(rows) for i in range(a, b)]
    assert restored == values


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"groups=\(4, 4\) sum to 8, not to n_atoms=10"):
        group_sizes(10, 4, (4, 4))
    with pytest.raises(InputError, match="is not a tuple of sizes"):
        group_sizes(10, 4, (5, -5, 10))
