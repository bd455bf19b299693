"""The table of a language model: methods x k, each measured as the field measures sparse autoencoders.

    python -m benchmarks.network_data data/smollm --model smollm --hook resid:15
    python -m benchmarks.networks data/smollm --model smollm --hook resid:15 --k 40 --out networks.jsonl
    python -m benchmarks.networks --table networks.jsonl

Every dictionary is trained once, with one thread, and kept below the folder; every measurement is one line of the
results. What is there is not done again: an interrupted run resumes, and methods, k, seeds and parts can be added
one by one. CPU seconds are those of training; searches for a learning rate or a threshold are outside.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Stopwatch, installed, machine
from benchmarks.network_data import CONTEXT, Prepared, add_model_options, model_path
from benchmarks.network_methods import METHODS, RAW, Training, compare_rates
from benchmarks.network_scores import SCORES, Subject, losses, stable
from benchmarks.network_table import PARTS, read_lines, table
from dbksvd_dask.store.activations import open_rows


@dataclass(frozen=True)
class Size:
    """How much is computed.

    Attributes
    ----------
    n_atoms, n_iter, sae_steps, sae_trial_steps : see `Training`
    rows : training rows, the first of the store
    loss_tokens, context : of the loss recovered
    """

    n_atoms: int
    n_iter: int
    sae_steps: int
    sae_trial_steps: int
    rows: int
    loss_tokens: int
    context: int = CONTEXT


SIZES = {
    "tiny": Size(48, 2, 4, 2, 600, 60, 32),
    "full": Size(4096, 14, 2000, 500, 500_000, 8192),
}
RATE_K = 40


@dataclass(frozen=True)
class Cell:
    """One dictionary: a method with its k and its seed."""

    method: str
    k: int
    seed: int

    @property
    def slug(self) -> str:
        """Name of its folder."""
        return f"{self.method.replace(' ', '_')}-k{self.k}-s{self.seed}"


class Table:
    """The results of one model at one size, and what it takes to add to them.

    Parameters
    ----------
    data : activations, tasks and words of the model
    size : Size
    out : file of results, one JSON object per line
    name : of the model
    options : of the command line, for the path of the model
    """

    def __init__(self, data: Prepared, size: Size, out: Path, name: str, options: argparse.Namespace) -> None:
        self.data, self.size, self.out, self.name, self._options = data, size, out, name, options
        self.lines = read_lines(out)

    #: What is measured of one dictionary at a time, by part.
    scores: Mapping[str, Callable[[Any, Any], dict[str, Any]]] = SCORES

    # -- lines ---------------------------------------------------------------------------------------

    @property
    def _setting(self) -> dict[str, Any]:
        size = self.size
        return {"model": self.name, "hook": self.data.hook, "n_atoms": size.n_atoms, "rows": size.rows}

    def find(self, part: str, cell: Cell) -> dict[str, Any] | None:
        """Return a line that is there."""
        key = self._setting | {"part": part, "method": cell.method, "k": cell.k, "seed": cell.seed}
        return next((line for line in self.lines if all(line.get(a) == b for a, b in key.items())), None)

    def add(self, part: str, cell: Cell, found: dict[str, Any]) -> None:
        """Append a line, at once."""
        key = self._setting | {"part": part, "method": cell.method, "k": cell.k, "seed": cell.seed}
        line = key | found
        self.lines.append(line)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")
        print(f"{part}: {cell.slug}", file=sys.stderr, flush=True)

    # -- training ------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> np.ndarray:
        """Training rows in random order."""
        store = open_rows(self.data.train)
        n = min(self.size.rows, store.shape[0])
        rows = np.asarray(store.read(0, n), np.float32)
        return rows[np.random.default_rng(0).permutation(n)]

    def folder(self, cell: Cell) -> Path:
        """Where the dictionary of a cell lies."""
        part = f"trained-{self.data.hook.replace(':', '-')}-{self.size.n_atoms}-{self.size.rows}"
        return self.data.folder / part / cell.slug

    def training(self, cell: Cell) -> Training:
        """What a method gets."""
        size = self.size
        shape = (self.rows, size.n_atoms, cell.k, cell.seed)
        return Training(*shape, size.n_iter, size.sae_steps, size.sae_trial_steps, self.learning_rate)

    def learning_rate(self) -> float:
        """Return the given learning rate, or the best of short TopK runs at one k; compare them if need be."""
        if getattr(self._options, "rate", None):
            return float(self._options.rate)
        cell = Cell("TopK SAE", min(RATE_K, self.size.n_atoms // 2), 0)
        line = self.find("rates", cell)
        if line is None:
            found = compare_rates(self.training(cell))
            self.add("rates", cell, {"rates": found, "steps": self.size.sae_trial_steps})
            return float(max(found, key=lambda rate: found[rate]))
        return float(max(line["rates"], key=lambda rate: line["rates"][rate]))

    def train(self, cell: Cell) -> None:
        """Train one dictionary, unless it is there."""
        folder = self.folder(cell)
        if self.find("train", cell) is not None and folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short, or without its line
        folder.parent.mkdir(parents=True, exist_ok=True)
        method, training = METHODS[cell.method], self.training(cell)
        if method.base:
            base = replace(cell, method=method.base)
            self.train(base)
            line = self.find("train", base) or {}
            training.base, training.clock = self.folder(base), Stopwatch(line["wall_s"], line["cpu_s"])
        training.clock.start()
        method.train(training, folder)
        training.clock.stop()
        seconds = {"cpu_s": training.clock.cpu, "wall_s": training.clock.wall}
        self.add("train", cell, seconds | {"notes": training.notes, "machine": machine()})

    # -- scores --------------------------------------------------------------------------------------

    def score(self, cell: Cell, parts: Iterable[str]) -> None:
        """Measure what is missing of one dictionary, but for the loss."""
        missing = [part for part in parts if part in self.scores and self.find(part, cell) is None]
        subject = Subject(self.folder(cell)) if missing else None
        for part in missing:
            self.add(part, cell, self.scores[part](subject, self.data))

    def possible(self, parts: Iterable[str]) -> list[str]:
        """Leave out what there is no data for."""
        there = {"probing": bool(self.data.tasks()), "absorption": self.data.letters.exists()}
        return [part for part in parts if there.get(part, True)]

    def raw(self) -> None:
        """Probe the activations themselves."""
        cell = Cell(RAW, 0, 0)
        if self.find("probing", cell) is None:
            self.add("probing", cell, self.scores["probing"](None, self.data))

    def loss(self, cells: Iterable[Cell]) -> None:
        """Measure the loss recovered of all dictionaries that lack it, in one pass."""
        missing = {cell.slug: cell for cell in cells if self.find("loss", cell) is None}
        if not missing:
            return
        subjects = {slug: Subject(self.folder(cell)) for slug, cell in missing.items()}
        from dbksvd_dask import lm

        model = lm.open_model(model_path(self._options))
        found = losses(model, subjects, self.data, self.size.loss_tokens, self.size.context)
        for slug, cell in missing.items():
            self.add("loss", cell, found[slug])

    def stability(self, cells: Iterable[Cell]) -> None:
        """Match the seeds of each method at each k; one line, under the first seed."""
        seeds: dict[tuple[str, int], list[Cell]] = {}
        for cell in cells:
            seeds.setdefault((cell.method, cell.k), []).append(cell)
        for (method, k), some in seeds.items():
            first = Cell(method, k, min(cell.seed for cell in some))
            if len(some) > 1 and self.find("stability", first) is None:
                found = stable([Subject(self.folder(cell)) for cell in some])
                self.add("stability", first, found | {"seeds": [cell.seed for cell in some]})


def cells(methods: Iterable[str], ks: Iterable[int], seeds: Iterable[int]) -> Iterator[Cell]:
    """All combinations whose packages are installed, seeds last: a whole table of one seed comes first."""
    usable = [m for m in methods if METHODS[m].needs is None or installed(str(METHODS[m].needs)) is not None]
    return (Cell(method, k, seed) for seed in seeds for k in ks for method in usable)


def fill(table: Table, wanted: list[Cell], parts: list[str]) -> None:
    """Train and measure everything that is missing; the scores of a cell follow its training at once."""
    possible = table.possible(parts)
    if "probing" in possible:
        table.raw()
    for cell in wanted:
        table.train(cell)
        table.score(cell, possible)
    if "loss" in parts:
        table.loss(wanted)
    if "stability" in parts:
        table.stability(wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.networks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add = parser.add_argument
    add("--size", choices=SIZES, default="full")
    add("--k", type=int, nargs="+", default=[20, 40, 80], help="default: 20 40 80")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--seeds", type=int, nargs="+", default=[0], help="two or more for stability (default: 0)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    for name, what in (
        ("--rows", "training rows"),
        ("--n-atoms", "atoms"),
        ("--n-iter", "outer batches of our fits"),
        ("--sae-steps", "batches of 1024 rows of an autoencoder"),
        ("--sae-trial-steps", "the same of each trial of a learning rate"),
        ("--loss-tokens", "tokens of the loss recovered"),
    ):
        default = getattr(SIZES["full"], name[2:].replace("-", "_"))
        add(name, type=int, help=f"{what} (default: {default})")
    add("--rate", type=float, help="learning rate of the autoencoders (default: the best of short TopK runs)")
    add("--out", type=Path, default=Path("networks.jsonl"), help="results (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run from the command line; return all lines of the results."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--table"]:
        lines = read_lines(Path(argv[1]))
        print(table(lines))
        return lines
    options = _parser().parse_args(argv)
    given = {name: getattr(options, name) for name in vars(SIZES["full"]) if getattr(options, name, None)}
    size = replace(SIZES[options.size], **given)
    found = Table(Prepared(options.folder, options.hook), size, options.out, Path(options.model).name, options)
    fill(found, list(cells(options.methods, options.k, options.seeds)), options.parts)
    print(table(found.lines))
    return found.lines


if __name__ == "__main__":
    main()
