"""Shares of a batch and the tree of sums: one order of additions, whoever adds what."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask.plan import units
from dbksvd_dask.plan.shares import (
    MOST_DIRECT,
    Node,
    Share,
    add_nodes,
    covering,
    even_spans,
    is_direct,
    plan_groups,
    plan_shares,
    weighted_spans,
)


def add(a, b):
    """Not associative: the result is the order of the additions."""
    return f"({a}{b})"


def leaves(start, stop):
    return [Node(c, c + 1, f"{c},") for c in range(start, stop)]


def order_by_levels(n):
    """The order in which pairs of chunks are added level by level, a last one without a partner as it is."""
    parts = [node.value for node in leaves(0, n)]
    while len(parts) > 1:
        parts = [add(*parts[a : a + 2]) if a + 1 < len(parts) else parts[a] for a in range(0, len(parts), 2)]
    return parts[0]


def total(nodes, n):
    (whole,) = add_nodes(nodes, 0, n, n, add)
    assert (whole.start, whole.stop) == (0, n)
    return whole.value


@given(st.integers(1, 200))
def test_the_tree_adds_pairs_level_by_level(n):
    assert total(leaves(0, n), n) == order_by_levels(n)


@given(st.integers(1, 120), st.lists(st.integers(0, 120), max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_any_cut_into_workers_and_groups_gives_the_same_order(n, cuts, bounds):
    ends = sorted({0, n, *(c for c in cuts if c < n)})
    workers = [add_nodes(leaves(a, b), a, b, n, add) for a, b in pairwise(ends)]
    inner = sorted({0, len(workers), *(b for b in bounds if b < len(workers))})
    groups = [
        add_nodes([node for w in workers[a:b] for node in w], ends[a], ends[b], n, add) for a, b in pairwise(inner)
    ]
    assert total([node for group in groups for node in group], n) == order_by_levels(n)


@given(st.integers(1, 500), st.data())
def test_a_range_is_covered_by_few_nodes_of_the_tree(n, data):
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    spans = covering(start, stop, n)
    assert [c for a, b in spans for c in range(a, b)] == list(range(start, stop))
    assert len(spans) <= 2 * n.bit_length()
    for a, b in spans:
        size = 1 << (b - a - 1).bit_length()
        assert a % size == 0
        assert b in (a + size, n)


def test_chunks_that_are_missing_are_noticed():
    with pytest.raises(ValueError, match=r"chunks \(1, 2\) are not covered"):
        add_nodes(leaves(0, 1), 0, 2, 2, add)
    with pytest.raises(ValueError, match="are not covered"):
        add_nodes([Node(0, 2, "")], 0, 1, 4, add)


@given(st.integers(1, 300), st.lists(st.integers(1, 8), min_size=1, max_size=40), st.booleans())
def test_shares_hold_every_chunk_once_and_at_its_worker(n_chunks, threads, together):
    workers = {f"w{w:02d}": n for w, n in enumerate(threads)}
    homes = [f"w{w:02d}" for w in units.spread(n_chunks, threads)]
    shares = plan_shares(n_chunks, workers, together)
    assert [s.threads for s in shares] == [workers[s.home] for s in shares]
    assert [(c, s.home) for s in shares for c in range(s.start, s.stop)] == list(enumerate(homes))
    assert len(shares) == (len(set(homes)) if together else n_chunks)


@given(st.integers(1, 400), st.integers(1, 3))
def test_groups_hold_every_share_once_and_grow_with_the_root(n_workers, per_worker):
    shares = [Share(i, i + 1, f"w{i // per_worker}") for i in range(n_workers * per_worker)]
    groups = plan_groups(shares)
    assert [i for a, b in groups for i in range(a, b)] == list(range(len(shares)))
    if per_worker > 1:
        assert len(groups) == n_workers
    elif is_direct(shares):
        assert len(groups) == n_workers <= MOST_DIRECT
    else:
        assert max(b - a for a, b in groups) <= n_workers**0.5 + 2


@given(st.integers(1, 200), st.integers(1, 50))
def test_even_spans_differ_by_one_at_most(n, n_spans):
    sizes = [b - a for a, b in even_spans(n, n_spans)]
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_weighted_spans_hold_everything_once_and_none_is_much_too_heavy(weights, n_spans):
    spans = weighted_spans(weights, n_spans)
    assert [i for a, b in spans for i in range(a, b)] == list(range(len(weights)))
    assert len(spans) <= n_spans
    assert all(b > a for a, b in spans)
    assert max(sum(weights[a:b]) for a, b in spans) <= sum(weights) / min(n_spans, len(weights)) + 2 * max(weights)
