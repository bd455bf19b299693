"""What one iteration costs a card at least: operations, bytes, and the time that either takes.

Pure arithmetic, no device. Bytes are counted as if nothing stayed in a cache between two uses, but for the row
that a block works on; a card with a large cache can do better in the stages that read rows of the dictionary or of
the gram again and again.
"""

from __future__ import annotations

from typing import NamedTuple

from dbksvd_dask.plan.device import Sizes


class Card(NamedTuple):
    """Peak rates of a card, from its data sheet."""

    name: str
    flops: float  # float32 operations per second, no tensor cores
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second from the host


T4 = Card("T4", 8.1e12, 320e9, 16e9)
A100 = Card("A100 40 GB", 19.5e12, 1555e9, 32e9)


class Stage(NamedTuple):
    """One part of an iteration."""

    name: str
    flops: float
    bytes: float
    link: float = 0.0

    def seconds(self, card: Card) -> float:
        """The longest of computing, memory and transfer."""
        return max(self.flops / card.flops, self.bytes / card.bandwidth, self.link / card.link)


def stages(sizes: Sizes) -> list[Stage]:
    """Parts of one iteration, in order; the pursuit with exactly k steps per sample."""
    n, d, m, k = sizes.n_rows, sizes.n_features, sizes.n_atoms, sizes.k
    rounds, steps, size = sizes.n_rounds, sizes.lanczos_steps, sizes.itemsize
    chunks = -(-n // sizes.chunk_size)
    rows, used = n * d * size, n * k * d * size  # the samples once, and once per nonzero
    return [
        Stage("upload", 0, rows, rows),
        Stage("gram", 2 * m * m * d, (m * m + 2 * m * d) * size),
        Stage("products", 2 * n * d * m, rows + (chunks * m * d + n * m) * size),
        Stage("pursuit", 2 * n * k * m, (n * m + n * k * m) * size),
        Stage("residual", 2 * n * k * d, 2 * rows + used),
        Stage("first products", 2 * n * k * d, used),
        # a row is read once per round for its products with the vectors, and once per nonzero for the sums
        Stage("next products", 4 * n * k * d * (steps - 1), (rounds * rows + 2 * used) * (steps - 1)),
        # every round reads and writes every row; old and new atoms once, the new ones again for the subtraction
        Stage("refresh", 7 * n * k * d, 2 * rounds * rows + 3 * used),
        Stage("metrics", 8 * n * d, 3 * 6 * rows),
    ]


def total_seconds(sizes: Sizes, card: Card) -> float:
    """Least time of an iteration when nothing overlaps."""
    return sum(stage.seconds(card) for stage in stages(sizes))


PAPER = Sizes(n_rows=65_536, chunk_size=8192, n_features=2304, n_atoms=4096, k=20)
# Seconds per iteration that the paper reports for a T4 with 96 vCPUs, by samples of a batch.
PAPER_SECONDS = {65_536: 11.43, 1_048_576: 185.0}


def table(n_rows: int) -> str:
    """Arithmetic of one iteration at the paper's sizes, as Markdown."""
    sizes = PAPER._replace(n_rows=n_rows)
    lines = [
        f"| {n_rows:,} x 2304, 4096 atoms, k=20 | Gflop | GB | limit T4 (s) | limit A100 (s) |",
        "|---|---:|---:|---:|---:|",
    ]
    for stage in stages(sizes):
        limits = " | ".join(f"{stage.seconds(card):.3f}" for card in (T4, A100))
        lines.append(f"| {stage.name} | {stage.flops / 1e9:.0f} | {stage.bytes / 1e9:.1f} | {limits} |")
    totals = " | ".join(f"**{total_seconds(sizes, card):.2f}**" for card in (T4, A100))
    flops = sum(stage.flops for stage in stages(sizes)) / 1e9
    volume = sum(stage.bytes for stage in stages(sizes)) / 1e9
    lines.append(f"| sum | {flops:.0f} | {volume:.1f} | {totals} |")
    lines.append(f"| the paper, T4 and 96 vCPUs | | | {PAPER_SECONDS[n_rows]} | |")
    return "\n".join(lines)
