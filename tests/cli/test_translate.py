"""Errors of the library name parameters, errors of a command name its options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import dbksvd_dask
from dbksvd_dask.cli.main import cli
from dbksvd_dask.cli.translate import in_options, typed_command
from tests.helpers.cli import fails
from tests.helpers.stores import make_store

PACKAGE = Path(dbksvd_dask.__file__).parent
# a whole command in backticks may be quoted anywhere; `var(--line)` is a colour of the page
COMMAND_LINE = re.compile(r"`(?:dbksvd|dask) [^`]*`|var\(--\w+\)")
OPTION = re.compile(r"(?<![\w-])--[a-z]")


def strings(path):
    """Yield the strings of a module, with the pieces of an f-string put together."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def named_options(folder):
    return [
        f"{path.relative_to(folder)}:{line}: {text}"
        for path in sorted(folder.rglob("*.py"))
        if "cli" not in path.parts
        for line, text in strings(path)
        if OPTION.search(COMMAND_LINE.sub("", text))
    ]


def test_no_string_outside_the_command_line_names_an_option():
    assert named_options(PACKAGE) == []


def test_the_scan_finds_options_and_leaves_command_lines_alone(tmp_path):
    (tmp_path / "a.py").write_text('x = 1\ny = f"give {x} (--k)"\nz = "run `dbksvd info --verify`; var(--blue)"\n')
    assert named_options(tmp_path) == ["a.py:2: give {} (--k)"]


def command(*words):
    return typed_command(cli, words)


@pytest.mark.parametrize(
    ("words", "message", "translated"),
    [
        (("encode",), "begin again with force=True", "begin again with --force"),
        (("export", "saelens"), "or replace it with overwrite=True", "or replace it with --force"),
        (("fit",), "k=99 is too large; use nonneg=False", "--k 99 is too large; use --no-nonneg"),
        (("-v", "encode"), "such as part=(1, 4)", "such as --part 1/4"),
        (
            ("report",),
            "give image_shape=(H, W, 3) or samples=STORE",
            "give --image-shape HxWx3 or --samples STORE",
        ),
        (("import",), "say dtype='bfloat16' if", "say --dtype bfloat16 if"),
        (
            ("fit",),
            "needs certificates: tls=TLSFiles(ca, cert, key)",
            "needs certificates: --tls-ca, --tls-cert, --tls-key",
        ),
        (("fit",), "more than memory_limit=50.0 MB", "more than --memory-limit 50.0 MB"),
        (("fit",), "min_coefficient=-1e-05 (rtol=0.5) is", "--min-coefficient -1e-05 (--rtol 0.5) is"),
        (("fit",), "use k <= 24 (n_atoms > 3) or x < 2", "use --k <= 24 (--n-atoms > 3) or x < 2"),
        # of another command
        (
            ("info",),
            "continue with resume=True, or begin again with force=True",
            "continue with --resume, or begin again with --force",
        ),
        (
            ("fit",),
            "import the samples again with nonfinite='drop'; use a smaller chunk_size",
            "import the samples again with --nonfinite drop; use a smaller --chunk-size",
        ),
        (("report",), "shape=(5, 5) does not fit 32 features", "--image-shape 5x5 does not fit 32 features"),
        (("report",), "import it with texts=FILE", "import it with --texts FILE"),
        # not options, not values that can be typed, or parts of names
        (("shuffle",), "begun with compressor=None, now n_parts=3", "begun with compressor=None, now n_parts=3"),
        (("fit",), "/data/k=4/store and run-k=4 and k=4.zarr", "/data/k=4/store and run-k=4 and k=4.zarr"),
        (("fit",), "http://host/a?k=3&seed=1", "http://host/a?k=3&seed=1"),
        ((), "k=3", "k=3"),
    ],
)
def test_parameters_become_options_of_the_command(words, message, translated):
    assert in_options(message, command(*words)) == translated


def test_a_script_without_click_gets_the_options_that_all_have():
    assert in_options("replace it with overwrite=True; k=3") == "replace it with --force; k=3"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("shuffle", "{store}", "{store}", "--seed", 0),
            "already exists; choose another name, or replace it with --force",
        ),
        (
            ("import", "{tmp}/nan.npy", "{tmp}/out"),
            "leave such rows out with --nonfinite drop, or import them with --nonfinite keep",
        ),
        (("import", "{tmp}/two.npz", "{tmp}/out"), "several arrays; name one with --array NAME:"),
        (("import", "{tmp}/x.bin", "{tmp}/out"), "such as --dtype float16 --n-features 768"),
        (("import", "{tmp}/x.what", "{tmp}/out"), "or say it with --format NAME"),
        (("import", "{tmp}/rows.npy", "{tmp}/out", "--dtype", "float64"), "--dtype float64 does not fit"),
        (("fit", "{store}", "{tmp}/run", "--n-atoms", 4, "--k", 9), "--k 9"),
    ],
)
def test_a_command_says_what_to_type(args, said, tmp_path, capsys):
    rows = np.ones((8, 4), np.float32)
    store = make_store(tmp_path / "s", rows)
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "nan.npy", np.full((8, 4), np.nan, np.float32))
    np.savez(tmp_path / "two.npz", x=rows, y=rows)
    for name in ("x.bin", "x.what"):
        (tmp_path / name).write_bytes(bytes(64))
    line = fails(capsys, *(str(a).format(store=store, tmp=tmp_path) for a in args))
    assert said in line
