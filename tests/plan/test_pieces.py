"""Pieces of an array between workers: every sum in one order, and no rank passes on all of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask.plan import pieces

RANKS = st.integers(1, 70)
PIECES = st.sampled_from([1, 2, 4, 8, 16])


def walk(n_ranks, n_pieces):
    """Let all ranks do what their plans say; per piece, who ends up with which text."""
    have = [{p: f"{rank}," for p in range(n_pieces)} for rank in range(n_ranks)]
    for level in range(pieces.depth(n_ranks)):
        sent = {}
        for rank in range(n_ranks):
            for partner, numbers in pieces.plan_levels(rank, n_ranks, n_pieces)[level].sends:
                sent[rank, partner] = {p: have[rank].pop(p) for p in numbers}
        for rank in range(n_ranks):
            for partner, numbers in pieces.plan_levels(rank, n_ranks, n_pieces)[level].receives:
                came = sent.pop((partner, rank))
                assert tuple(came) == numbers
                for p, text in came.items():
                    mine = have[rank][p]
                    have[rank][p] = f"({mine}{text})" if partner > rank else f"({text}{mine})"
        assert not sent, "everything that is sent is received"
    return have


@given(RANKS, PIECES)
def test_every_piece_is_added_in_the_order_of_a_single_tree(n_ranks, n_pieces):
    ends = walk(n_ranks, n_pieces)
    (expected,) = walk(n_ranks, 1)[0].values()
    found = [(p, rank, text) for rank, have in enumerate(ends) for p, text in have.items()]
    assert sorted(p for p, _, _ in found) == list(range(n_pieces)), "each piece ends at one rank"
    assert {text for _, _, text in found} == {expected}
    assert all(rank == pieces.owner(p, n_ranks, n_pieces) for p, rank, _ in found)
    assert pieces.owner(0, n_ranks, n_pieces) == 0, "what rides with piece 0 ends at the first rank"


@given(RANKS, PIECES)
def test_partners_know_of_each_other(n_ranks, n_pieces):
    pairs = {(a, b) for a in range(n_ranks) for b in pieces.partners(a, n_ranks, n_pieces)}
    assert pairs == {(b, a) for a, b in pairs}
    assert all(a != b and 0 <= b < n_ranks for a, b in pairs)


@pytest.mark.parametrize("n_pieces", [1, 2, 4, 16])
@pytest.mark.parametrize("n_ranks", [2, 8, 64])
def test_the_busiest_rank_passes_on_as_much_as_the_model_says(n_ranks, n_pieces):
    if n_pieces > n_ranks:
        pytest.skip("there are never more pieces than ranks")
    most = [0] * pieces.depth(n_ranks)
    for rank in range(n_ranks):
        for i, level in enumerate(pieces.plan_levels(rank, n_ranks, n_pieces)):
            most[i] = max(most[i], *(sum(len(numbers) for _, numbers in moved) for moved in level))
    assert sum(most) / n_pieces == pieces.busiest(n_ranks, n_pieces)


@pytest.mark.parametrize("n_ranks", [3, 5, 7, 13, 100])
def test_other_numbers_of_ranks_cost_little_more(n_ranks):
    n_pieces = pieces.count_pieces(1 << 30, min(n_ranks, 16))
    sent = [
        sum(len(numbers) for level in pieces.plan_levels(r, n_ranks, n_pieces) for _, numbers in level.sends)
        for r in range(n_ranks)
    ]
    assert max(sent) / n_pieces <= 1.5


@given(st.integers(0, 5000), PIECES)
def test_pieces_hold_every_row_once(n_rows, n_pieces):
    for spans in (pieces.piece_spans(n_rows, n_pieces), pieces.byte_spans(n_rows, n_pieces)):
        assert len(spans) == n_pieces
        assert [row for a, b in spans for row in range(a, b)] == list(range(n_rows))


@given(st.integers(0, 1 << 24), st.integers(1, 300), st.integers(0, 4096))
def test_pieces_are_a_power_of_two_and_neither_many_nor_small(n_bytes, n_ranks, n_rows):
    n = pieces.count_pieces(n_bytes, n_ranks, n_rows)
    assert n & (n - 1) == 0
    assert 1 <= n <= n_ranks
    assert n == 1 or (n_bytes >= n * pieces.LEAST_BYTES and n_rows >= n * pieces.ROWS_MULTIPLE)
