"""A batch as one task per worker, which computes its share from loading to the end; `graph.peers` connects them.

The functions are those of `graph.share`, of which the graph of tasks in `graph.batch` is made, and sums follow the
same tree, so the bits are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import Delayed

from dbksvd_dask.graph import load, outcome, share
from dbksvd_dask.graph.lines import Packed, pack_arrays, unpack_arrays
from dbksvd_dask.graph.peers import Peers, Seat, Wire
from dbksvd_dask.graph.tasks import Tasks
from dbksvd_dask.kernels import chunk
from dbksvd_dask.kernels.dead_atoms import SeedPath
from dbksvd_dask.kernels.lanczos import LanczosState
from dbksvd_dask.plan.pieces import count_pieces, partners, piece_spans
from dbksvd_dask.plan.shares import Node, Share, computes_gram_alone, is_direct, weighted_spans

ROUNDS = "dbksvd-rounds"  # topic under which the first worker reports its rounds to clients


class Work(NamedTuple):
    """What all shares of a batch have in common; the first one sends it to the others."""

    settings: list[share.Setting]  # per group of atoms
    paths: list[SeedPath]  # per group
    lanczos_steps: int
    shares_gram: bool  # whether workers compute the gram together


class _Watched:
    """References to rows that are not loaded any more once the batch has failed."""

    def __init__(self, rows: Any, peers: Peers) -> None:
        self._rows, self._peers = rows, peers

    def load(self) -> np.ndarray:
        """Read the rows: (n, n_features)."""
        self._peers.check()
        loaded: np.ndarray = self._rows.load()
        return loaded

    def where(self, index: int) -> str:
        """Name a row, for an error message."""
        name: str = self._rows.where(index)
        return name


# ---------------------------------------------------------------------------------------------- in a worker


def compute_share(seat: Seat, start: int, rows: list[Any], work: Work | None) -> outcome.Outcome | None:
    """Compute one share of a batch with the others; return the outcome at the first share, None elsewhere.

    Parameters
    ----------
    start : number of the first chunk
    rows : per chunk, `graph.sources.Rows`
    work : at the first share
    """
    with Peers(seat) as peers:
        pieces = max(pieces_of(setting, seat.n_ranks) for setting in work.settings) if work else 1
        member = _Member(peers, peers.spread(work, pieces))
        before: tuple[Any, ...] = (start, [_Watched(ref, peers) for ref in rows])
        for g in range(len(member.work.settings)):
            before = (member.group(g, before),)
        return member.finish()


class _Update(NamedTuple):
    """What the rounds of a group have brought."""

    encoded: share.Encoded  # of all shares
    new: list[np.ndarray]  # per round, its atoms


class _Member:
    """One share of a batch.

    Parameters
    ----------
    peers : the others
    work : what all have in common
    """

    def __init__(self, peers: Peers, work: Work) -> None:
        self.peers, self.work = peers, work
        self._updates: list[_Update] = []  # per group so far
        self._closed: list[share.Closed] = []

    def group(self, g: int, before: tuple[Any, ...]) -> Any:
        """Encode and update one group of atoms; return what the next one begins with, if there is one.

        Parameters
        ----------
        before : the samples, or what the last group left of them
        """
        setting = self.work.settings[g]
        encode: Callable[..., share.States] = share.encode_samples if g == 0 else share.encode_residual
        states = encode(*before, setting, setting.D, self._gram(setting))
        del before  # so that no old state lives longer than its successor needs
        update, states = self._rounds(setting, states)
        self._updates.append(update)
        proposals = [*update.new[:-1], update.encoded.counts] if setting.rule.proposes else []
        arguments = (states, update.new[-1], proposals, setting, setting.D)
        if g == len(self.work.settings) - 1:
            self._closed.append(share.close_last(*arguments))
            return None
        pair = share.close_group(*arguments)
        self._closed.append(pair[1])
        return pair

    def finish(self) -> outcome.Outcome | None:
        """Collect the ends of all groups; return the outcome at the first share."""
        n_chunks = self.work.settings[0].n_chunks

        def join(a: list[share.Closed], b: list[share.Closed]) -> list[share.Closed]:
            return [share.join_closed([x, y], n_chunks) for x, y in zip(a, b, strict=True)]

        closed = self.peers.collect(self._closed, join)
        self.peers.leave()
        if not self.peers.is_first:
            return None
        parts = zip(self.work.settings, self._updates, closed, self.work.paths, strict=True)
        merged = [outcome.merge(one, made.new, made.encoded.counts, [end], path) for one, made, end, path in parts]
        counts = [made.encoded.counts for made in self._updates]
        return outcome.gather(merged, counts, [self._updates[-1].encoded], [[end] for end in closed], n_chunks)

    def _gram(self, setting: share.Setting) -> Any:
        """Return the gram of a group, computed here or together with the others; None where none is used."""
        n_atoms = setting.D.shape[0]
        if not setting.spec.uses_gram(n_atoms):
            return None
        pairs, compact = load.gram_pairs(n_atoms), setting.spec.compact_gram(setting.weights is not None)
        if not self.work.shares_gram:
            return load.whole_gram(setting.D, pairs, compact)
        seat = self.peers.seat
        spans = [*weighted_spans(load.areas(pairs), seat.n_ranks), *[(0, 0)] * seat.n_ranks]
        a, b = spans[seat.rank]
        tiles = self.peers.collect([load.gram_tiles(setting.D, pairs[a:b], compact)], operator.add)
        return load.assemble_gram(n_atoms, self.peers.spread(tiles), compact)

    def _rounds(self, setting: share.Setting, states: share.States) -> tuple[_Update, share.States]:
        """Compute the rounds of a group, except the last refresh."""
        mine, last = share.encoded_of(states, setting.n_chunks), len(setting.rounds.atoms) - 1
        atoms, encoded = self._round(0, states, mine, setting)
        new = [atoms]
        for r in range(last):
            states = share.update(states, r, atoms, setting, setting.D)
            atoms, _ = self._round(r + 1, states, None, setting)
            new.append(atoms)
        assert encoded is not None
        return _Update(encoded, new), states

    def _round(
        self, r: int, states: share.States, encoded: share.Encoded | None, setting: share.Setting
    ) -> tuple[np.ndarray, share.Encoded | None]:
        """Return the new atoms of a round, and the statistics of all shares, given those of this one or None."""
        n_ranks, n_local = self.peers.seat.n_ranks, setting.rounds.atoms[r].size
        spans = piece_spans(n_local, pieces_of(setting, n_ranks))
        lz: Any = None  # the recurrence as far as products need it
        own: list[Any] = [None] * len(spans)  # all of it, of the pieces that end here
        is_last = False

        def join(a: _Part, b: _Part) -> _Part:
            return a.join(b, setting)

        def take(p: int, total: _Part) -> tuple[Any, share.Encoded | None]:
            own[p] = share.take_step([total.sums], r, own[p], setting, is_last, spans[p])
            return own[p] if is_last else own[p].newest, total.encoded

        for step in range(self.work.lanczos_steps):
            is_last = step == self.work.lanczos_steps - 1
            sums = states.sums if step == 0 else share.product(states, r, lz, setting)
            cut = share.cut_sums(sums, spans)
            parts = [_Part(piece, encoded if p == step == 0 else None) for p, piece in enumerate(cut)]
            answers = self.peers.exchange(parts, join, take, *_wires(setting, step == 0 and encoded is not None))
            lz = share.join_pieces([answer for answer, _ in answers])
            encoded = encoded if step else answers[0][1]
        if self.peers.is_first:
            self.peers.report(ROUNDS, self.peers.seat.batch)
        return lz, encoded


class _Part(NamedTuple):
    """What a share gives of one piece of a round's sums."""

    sums: list[Any]  # nodes of the tree of sums
    encoded: share.Encoded | None  # with the first piece in the first step of a group

    def join(self, other: _Part, setting: share.Setting) -> _Part:
        """Add what the neighbour sends."""
        sums = share.join_sums([self.sums, other.sums], setting)
        if self.encoded is None or other.encoded is None:
            return _Part(sums, None)
        return _Part(sums, share.join_encoded([self.encoded, other.encoded], setting.n_chunks))


def _part_packed(part: _Part) -> Packed:
    """Pack the sums of a part on the host."""
    numbers: list[int] = []
    arrays: list[np.ndarray] = []
    for start, stop, sums in part.sums:
        numbers += [start, stop, sums.unit, len(sums.scalars)]
        arrays += [sums.W, *sums.scalars]
    return pack_arrays(numbers, arrays)


def _part_unpacked(packed: Packed) -> _Part:
    numbers, arrays = unpack_arrays(packed)
    rest, sums = iter(arrays), []
    for start, stop, unit, n in zip(*[iter(numbers)] * 4, strict=True):
        sums.append(Node(start, stop, chunk.RoundSums(next(rest), tuple(next(rest) for _ in range(n)), unit)))
    return _Part(sums, None)


def _answer_packed(answer: tuple[Any, None]) -> Packed:
    """Pack what a step has given on the host: new atoms, or what a product takes."""
    made = answer[0]
    if not isinstance(made, LanczosState):
        return pack_arrays([], [made])
    return pack_arrays([], [*made.basis, made.alpha2, made.dv])


def _answer_unpacked(packed: Packed) -> tuple[Any, None]:
    _, arrays = unpack_arrays(packed)
    if len(arrays) == 1:
        return arrays[0], None
    V, alpha2, dv = arrays
    return LanczosState((V,), alpha2, (), (), dv), None


def _wires(setting: share.Setting, has_statistics: bool) -> tuple[Wire, Wire]:
    """Return how sums and results of a step travel: as bare arrays, if they are nothing else."""
    if has_statistics or setting.place.device != "cpu":
        return Wire(), Wire()
    return Wire(_part_packed, _part_unpacked), Wire(_answer_packed, _answer_unpacked)


def pieces_of(setting: share.Setting, n_ranks: int) -> int:
    """Return the number of pieces into which the sums and atoms of each round of a group are cut; 1 on devices."""
    if setting.place.device != "cpu":
        return 1
    n_rows, (_, n_features) = min(atoms.size for atoms in setting.rounds.atoms), setting.D.shape
    return count_pieces(n_rows * n_features * setting.D.itemsize, n_ranks, n_rows)


# ---------------------------------------------------------------------------------------------- in the driver


class Together(NamedTuple):
    """A batch that workers compute together."""

    graph: Delayed  # computes to the outcome
    keys: list[str]  # of the tasks, in order of rank
    name: str
    homes: list[str]  # addresses of the workers
    n_rounds: int


def can_work_together(shares: Sequence[Share]) -> bool:
    """Return whether shares can be computed together: several of them, each on a worker of its own."""
    homes = {share.home for share in shares}
    return "" not in homes and len(homes) == len(shares) > 1


def build(
    settings: list[share.Setting],
    paths: list[SeedPath],
    lanczos_steps: int,
    rows: list[Any],
    iteration: int,
    shares: Sequence[Share],
) -> Together:
    """Build the graph of a batch with one task per share.

    Parameters
    ----------
    settings, paths : per group of atoms
    rows : per chunk, a reference to its rows
    """
    names = Tasks(iteration, shares)
    alone = computes_gram_alone(settings[0].D.shape[1], min(one.threads for one in shares))
    work = Work(settings, paths, lanczos_steps, not alone and is_direct(shares))
    pieces, tasks = {pieces_of(setting, len(shares)) for setting in settings}, []
    for i, one in enumerate(shares):
        lower = sorted(below for n in {1, *pieces} for below in partners(i, len(shares), n) if below < i)
        seat = Seat(
            names.prefix,
            i,
            len(shares),
            one.home,
            tuple((rank, shares[rank].home) for rank in dict.fromkeys(lower)),
        )
        arguments = (seat, one.start, rows[one.start : one.stop], None if i else work)
        # Dask sends out tasks from the end of the alphabet: first that one for which all others wait
        index = f"{len(shares) - i:06d}"
        tasks.append(names.call(compute_share, "share" if i else "whole", (index,), *arguments, at=i))
    graph = names.finish(tasks[0], only_home=True)
    n_rounds = sum(len(setting.rounds.atoms) for setting in settings)
    return Together(graph, [task.key for task in tasks], names.prefix, [one.home for one in shares], n_rounds)
