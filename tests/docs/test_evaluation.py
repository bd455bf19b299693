"""The Python blocks of docs/evaluation.md run, in order, on small data."""

import re
from pathlib import Path

import numpy as np
import xarray as xr

from tests.naive import metrics as naive

GUIDE = Path(__file__).parents[2] / "docs" / "evaluation.md"
# Small sizes, and an embedding that needs no model; the block that calls a server is tested with its stub.
SMALLER = {"117_000": "900", "SentenceTransformerEmbedding": "HashingEmbedding", "range(0, len(Y), 8192)": "[0]"}


def small_data():
    rng = np.random.default_rng(0)
    n, k, n_atoms = 400, 3, 20
    D = naive.unit_rows(rng, n_atoms, 8)
    atom, coefficient = naive.random_codes(rng, n, k, n_atoms)
    mean = rng.standard_normal(8)
    pair = (atom, coefficient)
    Y = naive.dense_codes(atom, coefficient, n_atoms) @ D + mean
    return {
        "Y": Y,
        "D": D,
        "mean": mean,
        "atom": atom,
        "coefficient": coefficient,
        "codes": xr.Dataset(
            {"atom": (("sample", "slot"), atom), "coefficient": (("sample", "slot"), coefficient)}
        ),
        "n_atoms": n_atoms,
        "k": k,
        "D_true": naive.unit_rows(rng, 15, 8),
        "parts": [(pair, (atom % 15, coefficient))],
        **{f"D_run{i}": naive.unit_rows(rng, 12, 8) for i in (1, 2, 3)},
        "labels": (Y @ naive.unit_rows(rng, 3, 8).T).argmax(axis=1),
        "texts": [f"word{i % 7} other{i % 5} thing" for i in range(n)],
    }


def test_every_python_block_of_the_guide_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names = small_data()
    ran = 0
    for block in blocks:
        if "OpenAIClient" in block:
            continue
        for old, new in SMALLER.items():
            block = block.replace(old, new)
        # blocks that repeat an example name, such as `codes`, must not disturb later ones
        exec(compile(block, GUIDE.name, "exec"), names if "def blocks" in block else dict(names))
        ran += 1
    assert ran == len(blocks) - 1 >= 7
    printed = capsys.readouterr().out
    assert "mean_relative_error" in printed
    assert "| random dictionary |" in printed
