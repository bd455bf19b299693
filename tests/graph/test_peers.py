"""Messages between workers of one batch, and the tree along which they travel."""

import asyncio
import socket
import threading
from itertools import pairwise

import numpy as np
import pytest

from dbksvd_dask.graph import peers, share, together
from dbksvd_dask.graph.lines import Line, Lines, PeersLostError
from dbksvd_dask.graph.peers import Peers, Seat
from dbksvd_dask.graph.together import can_work_together
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.dead_atoms import Candidates, rule_of
from dbksvd_dask.plan.pieces import count_pieces, partners, piece_spans
from dbksvd_dask.plan.shares import Share, tree_children, tree_parent


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 100])
def test_every_rank_is_the_child_of_its_parent_and_subtrees_are_neighbours(n):
    def subtree(rank):
        return [rank, *(below for child in tree_children(rank, n) for below in subtree(child))]

    assert subtree(0) == list(range(n)), "in order of rank, each once"
    assert all(rank in tree_children(tree_parent(rank), n) for rank in range(1, n))


def test_shares_work_together_only_on_workers_of_their_own():
    assert can_work_together([Share(0, 1, "a"), Share(1, 2, "b")])
    assert not can_work_together([Share(0, 2, "a")]), "nobody to work with"
    assert not can_work_together([Share(0, 1, "a"), Share(1, 2, "a")]), "two on one worker"
    assert not can_work_together([Share(0, 1), Share(1, 2)]), "threads"


def test_candidates_that_are_cut_on_their_way_leave_the_same_choice(rng):
    """Errors with ties and rows of zeros; cut in pairs of chunks as on the way through workers."""
    rule, D, dead = rule_of("residual"), np.zeros((9, 4), np.float32), np.arange(5)
    chunks = []
    for _ in range(8):
        rows = rng.standard_normal((7, 4)).astype(np.float32)
        rows[2] = 0
        chunks.append(Candidates(-np.sort(-rng.integers(0, 4, 7).astype(float)), rows))
    cut = [part for i in range(0, 8, 2) for part in rule.best(chunks[i : i + 2], dead.size)]
    assert sum(part.score.size for part in cut) == 4 * dead.size
    whole = np.concatenate([c.rows for c in chunks])
    order = np.argsort(-np.concatenate([c.score for c in chunks]), kind="stable")
    expected = whole[[i for i in order if whole[i].any()][: dead.size]]
    expected = (expected / np.linalg.norm(expected.astype(np.float64), axis=1)[:, None]).astype(np.float32)
    for candidates in (chunks, cut):
        np.testing.assert_allclose(rule.choose(candidates, D, dead, None), expected, rtol=1e-6)
    np.testing.assert_array_equal(rule.choose(cut, D, dead, None), rule.choose(chunks, D, dead, None))


# ---------------------------------------------------------------------------------------------- ranks as threads


def seated(rank, n, lines):
    """A rank with lines of its own, without a worker."""
    one = object.__new__(Peers)
    one.seat, one._lines = Seat("batch", rank, n, "", ()), lines
    one._close = lambda in_order: None
    return one


def run_ranks(n, n_pieces, what):
    """Run a function of (peers, rank) at every rank; their results, or the errors that ended them."""
    every, socks, out = [Lines() for _ in range(n)], [], [None] * n
    for high in range(n):
        for low in sorted({low for p in {1, n_pieces} for low in partners(high, n, p) if low < high}):
            pair = socket.socketpair()
            for sock, own, other in zip(pair, (low, high), (high, low), strict=True):
                sock.setblocking(False)
                socks.append(sock)
                end = lambda in_order, sock=sock: None if in_order else sock.close()  # noqa: E731
                every[own].arrive(Line(other, sock, end, is_guest=own == high))

    def run(rank):
        try:
            with seated(rank, n, every[rank]) as one:
                out[rank] = what(one, rank)
        except BaseException as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for sock in socks:
        sock.close()
    assert not any(thread.is_alive() for thread in threads), "hangs"
    return out


RANKS = [1, 2, 3, 5, 8, 13, 16]


@pytest.mark.parametrize("n_pieces", [1, 4, 16])
@pytest.mark.parametrize("n", RANKS)
def test_all_ranks_get_every_piece_added_in_one_order(n, n_pieces):
    """Also twice in a row, of odd sizes, and with pieces without any row."""
    n_pieces = min(n_pieces, 1 << n.bit_length() - 1)
    spans = piece_spans(37, n_pieces)

    def exchange(one, rank):
        parts = [(f"{rank},", np.full((b - a, 3), 1.0 + rank)) for a, b in spans]
        join = lambda a, b: (f"({a[0]}{b[0]})", a[1] + b[1])  # noqa: E731
        return [one.exchange(parts, join, lambda p, total: (p, *total)) for _ in range(2)]

    out = run_ranks(n, n_pieces, exchange)
    texts = {text for twice in out for once in twice for _, text, _ in once}
    assert len(texts) == 1
    assert texts.pop().replace("(", "").replace(")", "") == "".join(f"{rank}," for rank in range(n))
    for once in (once for twice in out for once in twice):
        assert [p for p, _, _ in once] == list(range(n_pieces))
        assert [len(rows) for _, _, rows in once] == [b - a for a, b in spans]
        assert all((rows == n * (n + 1) / 2).all() for _, _, rows in once)


@pytest.mark.parametrize("size", [0, 5, 100_001])
@pytest.mark.parametrize("n_pieces", [1, 2, 8])
@pytest.mark.parametrize("n", RANKS)
def test_all_ranks_get_what_the_first_gives(n, n_pieces, size):
    n_pieces = min(n_pieces, 1 << n.bit_length() - 1)
    value = {"D": np.arange(size), "odd": b"123"}
    for found in run_ranks(n, n_pieces, lambda one, rank: one.spread(None if rank else value, n_pieces)):
        np.testing.assert_array_equal(found["D"], value["D"])
        assert found["odd"] == b"123"


@pytest.mark.parametrize("n", RANKS)
def test_the_first_rank_collects_in_order(n):
    out = run_ranks(n, 1, lambda one, rank: one.collect([rank], lambda a, b: a + b))
    assert out[0] == list(range(n))


@pytest.mark.parametrize("where", ["join", "take"])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_a_failure_in_the_middle_of_the_pieces_ends_all_ranks(n, where):
    """All of them fail by the same error, or by the loss of one that did."""
    n_pieces = 1 << n.bit_length() - 1

    def exchange(one, rank):
        def failing(name, value):
            if name == where and rank == n - 1:
                raise ValueError("in the middle")
            return value

        parts = [np.ones(1 << 16) for _ in range(n_pieces)]
        for _ in range(3):
            one.exchange(parts, lambda a, b: failing("join", a + b), lambda p, total: failing("take", total))

    out = run_ranks(n, n_pieces, exchange)
    assert all(isinstance(error, (ValueError, PeersLostError)) for error in out), out
    assert "in the middle" in str(out[n - 1])
    assert sum("in the middle" in str(error) for error in out) > n // 2


# ---------------------------------------------------------------------------------------------- sums in pieces


def sums_of(rng, n_atoms, n_features, n_scalars, unit=0):
    scalars = tuple(rng.random(n_atoms) for _ in range(n_scalars))
    W = rng.standard_normal((n_atoms, n_features)).astype(np.float32)
    return chunk.RoundSums(W, scalars, unit)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(("n_atoms", "n_pieces"), [(16, 1), (37, 2), (512, 16), (530, 8), (1000, 16)])
def test_steps_of_pieces_have_the_bits_of_a_step_of_all_atoms(rng, n_atoms, n_pieces, steps):
    D = rng.standard_normal((n_atoms, 24)).astype(np.float32)
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    members = rng.permutation(n_atoms)
    whole = [sums_of(rng, n_atoms, 24, 1 if step == 0 else 2) for step in range(steps)]

    def stepped(span):
        lz = None
        for sums in whole:
            a, b = span
            part = share._rows(sums, a, b)
            if lz is None:
                lz = chunk.begin_round([part], D, members[a:b])
            else:
                lz = chunk.advance_round([part], lz, D, members[a:b])
        return lz.newest, chunk.finish_round(lz, D, members[a:b])

    newest, atoms = stepped((0, n_atoms))
    pieces = [stepped(span) for span in piece_spans(n_atoms, n_pieces)]
    assert share.join_pieces([new for _, new in pieces]).tobytes() == atoms.tobytes()
    joined = share.join_pieces([lz for lz, _ in pieces])
    for one, other in ((joined.basis[0], newest.basis[0]), (joined.alpha2, newest.alpha2), (joined.dv, newest.dv)):
        assert one.tobytes() == other.tobytes()


def test_sums_and_answers_travel_as_bare_arrays(rng):
    nodes = [share.Node(0, 4, sums_of(rng, 20, 6, 2)), share.Node(4, 5, sums_of(rng, 20, 6, 2, unit=-3))]
    found = together._part_unpacked(together._part_packed(together._Part(nodes, None)))
    for one, other in zip(found.sums, nodes, strict=True):
        assert (one.start, one.stop, one.value.unit) == (other.start, other.stop, other.value.unit)
        np.testing.assert_array_equal(one.value.W, other.value.W)
        np.testing.assert_array_equal(one.value.scalars, other.value.scalars)
    atoms = rng.standard_normal((5, 3))
    np.testing.assert_array_equal(together._answer_unpacked(together._answer_packed((atoms, None)))[0], atoms)


def test_a_round_is_cut_where_its_arrays_are_large():
    assert [count_pieces(512 * 768 * 4, n, 512) for n in (1, 2, 3, 64)] == [1, 2, 2, 16]
    assert all(a == b for (_, a), (b, _) in pairwise(piece_spans(512, 16)))


# ---------------------------------------------------------------------------------------------- connections


def test_a_neighbour_that_gives_up_before_the_task_begins_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(peers, "LOOK_SECONDS", 0.01)

    class Loop:
        asyncio_loop = None

    class Worker:
        handlers: dict = {}  # noqa: RUF012
        loop = Loop

    class Comm:
        def closed(self):
            return True

    async def main():
        Loop.asyncio_loop = asyncio.get_running_loop()
        hub = peers.Hub(Worker)
        await Worker.handlers[peers.OPERATION](Comm(), batch="a", rank=1)
        return hub._meetings

    assert asyncio.run(main()) == {}
