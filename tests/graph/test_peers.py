"""Messages between workers of one batch, and the tree along which they travel."""

import asyncio

import numpy as np
import pytest

from dbksvd_dask.graph import peers
from dbksvd_dask.graph.together import can_work_together
from dbksvd_dask.kernels.dead_atoms import Candidates, rule_of
from dbksvd_dask.plan.shares import Share, tree_children, tree_parent


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 100])
def test_every_rank_is_the_child_of_its_parent_and_subtrees_are_neighbours(n):
    def subtree(rank):
        return [rank, *(below for child in tree_children(rank, n) for below in subtree(child))]

    assert subtree(0) == list(range(n)), "in order of rank, each once"
    assert all(rank in tree_children(tree_parent(rank), n) for rank in range(1, n))


@pytest.mark.parametrize("rows", [3, 1 << 16])
def test_a_message_gives_its_value_back_and_copies_no_large_array(rows):
    value = {"W": np.arange(2.0 * rows).reshape(rows, 2), "n": 3}
    message = peers.Message.of(value, is_last=True)
    assert bool(message.large) == (rows > 1000)
    assert len(message.pickled) < 1000
    np.testing.assert_array_equal(message.value()["W"], value["W"])
    assert message.is_last


def test_a_coroutine_that_need_not_wait_runs_at_once_and_any_other_to_its_end():
    async def main():
        loop = asyncio.get_running_loop()
        post, seen, future = peers._Post(loop), [], loop.create_future()

        async def work(name, waits_for=None):
            if waits_for is not None:
                seen.append(await waits_for)
                await asyncio.sleep(0)
            seen.append(name)

        post.start(work("at once"))
        post.start(work("later", future))
        assert seen == ["at once"]
        future.set_result("awaited")
        while len(seen) < 3:
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(main()) == ["at once", "awaited", "later"]


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
