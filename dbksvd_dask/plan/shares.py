"""Integers in, integers out: which chunks a task takes together, and how sums over all chunks stay in one order.

Sums over the chunks of a batch follow one fixed tree of pairs, so their bits do not depend on who adds what. A
*node* of the tree is the sum over the chunks ``[start, stop)``: start is a multiple of a power of two, and stop is
that power further or the last chunk. A worker adds the nodes that lie inside its own chunks and sends only the
largest of them; whoever receives the nodes of all workers finishes the same tree.

::

    chunks     0   1   2   3   4   5   6
               +---+   +---+   +---+   |
               |   (0,2)   |   (4,6)   |
               +---(0,4)---+     +-----+
                     |         (4,7)
                     +--(0,7)----+          worker A has 0-2 and sends (0,2), (2,3); B has 3-6: (3,4), (4,7)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from dbksvd_dask.plan.units import spread

T = TypeVar("T")

# Up to this many workers send their sums to each other; more of them form groups. With four, a worker receives
# three sums per step and saves the two further hops of a group: 7 instead of 13 ms per step with two workers.
MOST_DIRECT = 4


class Share(NamedTuple):
    """Consecutive chunks of a batch that each of its tasks takes together."""

    start: int
    stop: int
    home: str = ""  # address of the worker that should run its tasks; empty where the scheduler decides
    threads: int = 1  # of that worker


class Node(NamedTuple, Generic[T]):
    """A node of the tree of sums: the chunks that it covers, and their sum."""

    start: int
    stop: int
    value: T


def plan_shares(n_chunks: int, threads: Mapping[str, int], together: bool = True) -> list[Share]:
    """Deal the chunks of a batch out to workers, neighbours to the same one, in proportion to their threads.

    Parameters
    ----------
    threads : threads of each worker, by its address; without workers every chunk is a share of its own
    together : whether one share has all chunks of a worker

    Examples
    --------
    >>> plan_shares(3, {"b": 2, "a": 4})
    [Share(start=0, stop=2, home='a', threads=4), Share(start=2, stop=3, home='b', threads=2)]
    >>> len(plan_shares(3, {"b": 2, "a": 4}, together=False)), len(plan_shares(3, {}))
    (3, 3)
    """
    workers = sorted(threads)
    homes = spread(n_chunks, [threads[worker] for worker in workers])
    shares: list[Share] = []
    for c in range(n_chunks):
        home = workers[homes[c]] if homes else ""
        if together and home and shares and shares[-1].home == home:
            shares[-1] = shares[-1]._replace(stop=c + 1)
        else:
            shares.append(Share(c, c + 1, home, threads.get(home, 1)))
    return shares


# ---------------------------------------------------------------------------------------------- the tree of sums


def covering(start: int, stop: int, n: int) -> list[tuple[int, int]]:
    """Return the largest nodes that cover the chunks [start, stop) of n, in order; at most 2 log2(n) of them.

    >>> covering(0, 3, 7), covering(3, 7, 7), covering(0, 7, 7), covering(5, 5, 7)
    ([(0, 2), (2, 3)], [(3, 4), (4, 7)], [(0, 7)], [])
    >>> covering(8, 16, 64), covering(1, 64, 64)
    ([(8, 16)], [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)])
    """
    nodes = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and min(start + 2 * size, n) <= stop and start + size < n:
            size *= 2
        nodes.append((start, min(start + size, n)))
        start += size
    return nodes


def children(start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two nodes of which a node of more than one chunk is the sum.

    >>> children(0, 4), children(4, 7), children(0, 9)
    (((0, 2), (2, 4)), ((4, 6), (6, 7)), ((0, 8), (8, 9)))
    """
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def add_nodes(nodes: Iterable[Node[T]], start: int, stop: int, n: int, add: Callable[[T, T], T]) -> list[Node[T]]:
    """Add neighbouring nodes as far as the tree allows inside the chunks [start, stop).

    Parameters
    ----------
    nodes : of these chunks, in order, without gaps; taken one after the other, so few need be alive at once
    n : chunks of the batch
    add : adds the sums of two neighbours

    Examples
    --------
    >>> letters = [Node(c, c + 1, "abcdefg"[c]) for c in range(7)]
    >>> [node.value for node in add_nodes(letters[:3], 0, 3, 7, "({}{})".format)]
    ['(ab)', 'c']
    >>> [node.value for node in add_nodes(letters, 0, 7, 7, "({}{})".format)]
    ['(((ab)(cd))((ef)g))']
    """
    coming = _Coming(iter(nodes))

    def value(span: tuple[int, int]) -> T:
        if coming.is_next(span):
            return coming.take()
        left, right = children(*span)
        before = value(left)
        return add(before, value(right))

    return [Node(*span, value(span)) for span in covering(start, stop, n)]


class _Coming(Generic[T]):
    """Nodes in order, of which the next can be looked at."""

    def __init__(self, nodes: Iterator[Node[T]]) -> None:
        self._nodes = nodes
        self._next: Node[T] | None = next(nodes, None)

    def is_next(self, span: tuple[int, int]) -> bool:
        """Return whether the next node covers exactly these chunks; raise if none can follow."""
        if self._next is None or self._next.start != span[0] or self._next.stop > span[1]:
            raise ValueError(f"chunks {span} are not covered: the next node is {self._next}")
        return self._next.stop == span[1]

    def take(self) -> T:
        """Return the sum of the next node."""
        assert self._next is not None
        taken, self._next = self._next.value, next(self._nodes, None)
        return taken


# ---------------------------------------------------------------------------------------------- between workers


def tree_parent(rank: int) -> int:
    """Return the rank to which one sends its sums, -1 for the first: a binomial tree, so subtrees are neighbours.

    >>> [tree_parent(rank) for rank in range(9)]
    [-1, 0, 0, 2, 0, 4, 4, 6, 0]
    """
    return rank & (rank - 1) if rank else -1


def tree_children(rank: int, n: int) -> list[int]:
    """Return the ranks that send their sums to one; each stands for itself and all up to the next.

    >>> tree_children(0, 8), tree_children(4, 8), tree_children(4, 6), tree_children(0, 1)
    ([1, 2, 4], [5, 6], [5], [])
    """
    steps = (1 << j for j in range(n.bit_length()))
    return [rank + step for step in steps if rank + step < n and tree_parent(rank + step) == rank]


def plan_groups(shares: Sequence[Share]) -> list[tuple[int, int]]:
    """Return the groups in which shares exchange sums, as spans of their numbers.

    Shares of one worker form a group where a worker has several. Otherwise a group has about as many members as
    there are groups: with W workers, a sum then passes three hops, each of about sqrt(W) transfers.

    >>> plan_groups([Share(c, c + 1, f"w{c}") for c in range(4)])
    [(0, 1), (1, 2), (2, 3), (3, 4)]
    >>> plan_groups([Share(c, c + 1, f"w{c}") for c in range(10)])
    [(0, 4), (4, 7), (7, 10)]
    >>> plan_groups([Share(0, 1, "a"), Share(1, 2, "a"), Share(2, 3, "b")])
    [(0, 2), (2, 3)]
    """
    homes = [share.home for share in shares]
    firsts = [i for i, home in enumerate(homes) if i == 0 or home != homes[i - 1]]
    if homes and homes[0] and len(firsts) < len(homes):
        return list(zip(firsts, [*firsts[1:], len(homes)], strict=True))
    if is_direct(shares):
        return [(i, i + 1) for i in range(len(shares))]
    return even_spans(len(shares), math.isqrt(len(shares)))


def is_direct(shares: Sequence[Share]) -> bool:
    """Return whether each share receives the sums of all others: a few workers with one share each.

    >>> is_direct([Share(0, 4, "a"), Share(4, 8, "b")]), is_direct([Share(0, 1), Share(1, 2)])
    (True, False)
    """
    homes = {share.home for share in shares}
    return "" not in homes and len(homes) == len(shares) <= MOST_DIRECT


def even_spans(n: int, n_spans: int) -> list[tuple[int, int]]:
    """Cut n things into n_spans spans of nearly equal size, larger ones first.

    >>> even_spans(10, 3), even_spans(2, 5)
    ([(0, 4), (4, 7), (7, 10)], [(0, 1), (1, 2)])
    """
    n_spans = min(n, n_spans)
    size, more = divmod(n, n_spans)
    ends = [(i + 1) * size + min(i + 1, more) for i in range(n_spans)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def weighted_spans(weights: Sequence[int], n_spans: int) -> list[tuple[int, int]]:
    """Cut things into at most n_spans spans of nearly equal weight.

    >>> weighted_spans([4, 4, 4, 1, 4, 4, 1, 1], 2), weighted_spans([5, 1, 1], 3)
    ([(0, 3), (3, 8)], [(0, 1), (1, 2), (2, 3)])
    """
    total, passed, ends = sum(weights), 0, [0]
    for i, weight in enumerate(weights):
        passed += weight
        if passed * n_spans >= len(ends) * total or len(weights) - i <= n_spans - len(ends):
            ends.append(i + 1)
    return list(pairwise(ends))


def computes_gram_alone(n_features: int, threads: int) -> bool:
    """Return whether a worker computes a whole gram sooner than it would receive the parts of others.

    Computing takes m^2 d operations, at some 50 billion a second per thread; receiving takes 2 m^2 bytes, at a
    billion a second.

    >>> computes_gram_alone(768, 8), computes_gram_alone(768, 2)
    (True, False)
    """
    return n_features <= 100 * threads
