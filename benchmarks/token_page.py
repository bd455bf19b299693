"""How fast the report of a language model opens: write a page of tokens and open it in Chromium.

    python -m benchmarks.token_page page.html

Tokens, codes and logits are made up: words of a Zipf law in texts of 128 tokens, each with atoms of its own among
random ones. The page opens a few times, each in a fresh Chromium; see `benchmarks.wide_page`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from benchmarks import common
from benchmarks.wide_page import browse
from dbksvd_dask import decode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.report import write_report
from dbksvd_dask.store.activations import Aligned, create_activations

SIZES = {"tiny": {"atoms": 64, "tokens": 1000, "k": 4}, "full": {"atoms": 4096, "tokens": 300_000, "k": 32}}
WINDOW = 128
N_FEATURES = 64


def make_words(rng: np.random.Generator, n: int) -> list[str]:
    """Return `n` different words of two to four syllables."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < n:
        words["".join(rng.choice(syllables, rng.integers(2, 5)))] = None
    return list(words)


def write_tokens(folder: Path, word: np.ndarray, rows: np.ndarray, words: list[str]) -> str:
    """Write a store of tokens with their texts beside it; return its path."""
    n_tokens, texts = len(word), []
    start, end = np.zeros(n_tokens, np.int32), np.zeros(n_tokens, np.int32)
    for first in range(0, n_tokens, WINDOW):
        part = slice(first, first + WINDOW)
        pieces = [words[w] for w in word[part]]
        length = np.array([len(piece) for piece in pieces])
        end[part] = np.cumsum(length + 1) - 1
        start[part] = end[part] - length
        texts.append(" ".join(pieces))
    (folder / "tokens.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    number = np.arange(n_tokens, dtype=np.int32)
    columns = {"text": number // WINDOW, "start": start, "end": end, "position": number % WINDOW}
    kinds = {name: Aligned("int32") for name in columns}
    about = {"texts": "tokens.txt"}
    writer = create_activations(folder / "tokens.zarr", *rows.shape, "float32", attributes=about, aligned=kinds)
    for chunk in range(writer.n_chunks or 0):
        part = slice(chunk * writer.chunk_rows, (chunk + 1) * writer.chunk_rows)
        writer.write_chunk(chunk, rows[part], {name: values[part] for name, values in columns.items()})
    writer.finish()
    return str(folder / "tokens.zarr")


def make_codes(word: np.ndarray, n_atoms: int, k: int, rng: np.random.Generator) -> xr.Dataset:
    """Return codes: the first two atoms of a token are those of its word, the others random."""
    atom = (rng.integers(0, n_atoms, (len(word), 1)) + np.arange(k) * (n_atoms // k)) % n_atoms
    atom[:, 0], atom[:, 1] = word % n_atoms, (word * 7 + 1) % n_atoms
    value = rng.gamma(2.0, 1.0, (len(word), k)).astype(np.float32)
    value[:, :2] += 4
    twice = atom[:, 1:] == atom[:, :1]
    atom[:, 1:][twice], value[:, 1:][twice] = -1, 0
    dims = ("sample", "slot")
    codes = {"atom": (dims, atom.astype(np.int32)), "coefficient": (dims, value)}
    return xr.Dataset(codes, attrs={"k": k, "n_atoms": n_atoms})


def make_logits(n_atoms: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return ten tokens of each sign for every atom."""
    words = make_words(rng, 500)
    sides = {"positive": 1.0, "negative": -1.0}
    atoms: list[dict[str, Any]] = [{"atom": j} for j in range(n_atoms)]
    for one in atoms:
        for name, sign in sides.items():
            one[name] = [(words[i], sign) for i in rng.integers(0, 500, 10)]
    return {"atoms": atoms}


def write_page(out: Path, n_atoms: int, n_tokens: int, k: int, seed: int = 0) -> float:
    """Write the page of made-up tokens; return the CPU seconds of the report alone."""
    rng = np.random.default_rng(seed)
    D = rng.standard_normal((n_atoms, N_FEATURES)).astype(np.float32)
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    words = make_words(rng, 5000)
    word = np.minimum(rng.zipf(1.3, n_tokens), len(words)) - 1
    codes, logits = make_codes(word, n_atoms, k, rng), make_logits(n_atoms, rng)
    dictionary = Dictionary(D, None, {"n_atoms": n_atoms, "k": k}, "made up", 1, {})
    with tempfile.TemporaryDirectory() as folder:
        store = write_tokens(Path(folder), word, np.asarray(decode(codes, D), np.float32), words)
        began = common.cpu_seconds()
        write_report(dictionary, codes, out, samples=store, logits=logits, title="Made-up tokens")
        return common.cpu_seconds() - began


def table(result: dict[str, Any]) -> str:
    """Lay out the result as Markdown."""
    runs = result["opened"]
    lines = [[name, ", ".join(f"{run[name]:.2f} s" for run in runs)] for name in (runs[0] if runs else {})]
    head = [["size of the page", f"{result['bytes'] / 1e6:.1f} MB"], ["writing it", f"{result['cpu']:.0f} CPU s"]]
    return common.markdown([f"{result['atoms']} atoms, {result['tokens']} tokens", ""], [*head, *lines])


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", metavar="PAGE", type=Path, help="HTML file; written unless it exists")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--opened", type=int, default=3, help="how often to open it")
    common.add_output(parser)
    args = parser.parse_args(arguments)
    size = SIZES[args.size]
    cpu = 0.0 if args.page.exists() else write_page(args.page, size["atoms"], size["tokens"], size["k"])
    opened = [browse(str(args.page), None) for _ in range(args.opened)]
    result = {
        **size,
        "machine": common.machine(),
        "cpu": cpu,
        "bytes": os.path.getsize(args.page),
        "opened": opened,
    }
    common.emit(result, args, table)


if __name__ == "__main__":
    main()
