"""Ways to damage a file: bytes, JSON values, whole files. The generator that is passed in decides everything."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# what a description may say in place of a number, a text, a list or an object
EVIL: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    -2,
    3,
    2**31,
    2**63,
    10**30,
    0.5,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "float32",
    "../../etc/passwd",
    "\x1b[31mred",
    "\u2028 \x00 \ud800",
    "9" * 300,
    [],
    [[]],
    [0],
    [-1, 8],
    [60],
    [60, 8],
    [8, 60],
    [10**12, 8],
    ["a", None],
    {},
    {"a": 1},
    {"name": "unknown"},
)
DEEP = 3_000
INTEGERS = (0, 1, 2, 16, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def flip_bytes(content: bytes, rng: np.random.Generator) -> bytes:
    """Change one to eight bytes."""
    out = bytearray(content)
    for place in rng.integers(0, max(len(out), 1), int(rng.integers(1, 9))):
        if out:
            out[place] = int(rng.integers(256))
    return bytes(out)


def flip_head(content: bytes, rng: np.random.Generator) -> bytes:
    """Change one to four of the first 128 bytes, where headers are."""
    return flip_bytes(content[:128], rng) + content[128:]


def flip_tail(content: bytes, rng: np.random.Generator) -> bytes:
    """Change one to four of the last 256 bytes, where directories and footers are."""
    return content[:-256] + flip_bytes(content[-256:], rng)


def cut(content: bytes, rng: np.random.Generator) -> bytes:
    """Leave out everything from a place on."""
    return content[: int(rng.integers(0, max(len(content), 1)))]


def drop_piece(content: bytes, rng: np.random.Generator) -> bytes:
    """Leave out a piece."""
    a, b = sorted(rng.integers(0, len(content) + 1, 2).tolist())
    return content[:a] + content[b:]


def repeat_piece(content: bytes, rng: np.random.Generator) -> bytes:
    """Write a piece twice."""
    a, b = sorted(rng.integers(0, len(content) + 1, 2).tolist())
    return content[:b] + content[a:]


def zero_piece(content: bytes, rng: np.random.Generator) -> bytes:
    """Blank a piece, as a disk that lost a sector does."""
    a, b = sorted(rng.integers(0, len(content) + 1, 2).tolist())
    return content[:a] + bytes(b - a) + content[b:]


def put_integer(content: bytes, rng: np.random.Generator) -> bytes:
    """Overwrite four or eight bytes with a number that counts and offsets fear."""
    width = int(rng.choice([4, 8]))
    number = INTEGERS[int(rng.integers(len(INTEGERS)))] % (1 << (8 * width))
    place = int(rng.integers(0, max(len(content) - width, 0) + 1)) & ~3
    return content[:place] + number.to_bytes(width, "little") + content[place + width :]


def grow(content: bytes, rng: np.random.Generator) -> bytes:
    """Append some bytes."""
    return content + rng.bytes(int(rng.integers(1, 64)))


BYTES: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    flip_bytes,
    flip_head,
    flip_tail,
    cut,
    drop_piece,
    repeat_piece,
    zero_piece,
    put_integer,
    grow,
)


def mutate_bytes(content: bytes, rng: np.random.Generator) -> bytes:
    """Damage the bytes of a file in one of the ways above."""
    return BYTES[int(rng.integers(len(BYTES)))](content, rng)


def mutate_json(content: bytes, rng: np.random.Generator) -> bytes:
    """Change one value of a JSON text, leave one out, or nest one beyond reason; bytes where it is no JSON."""
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        return mutate_bytes(content, rng)
    places = list(_places(whole))
    if not places:
        return mutate_bytes(content, rng)
    changed = copy.deepcopy(whole)
    path = places[int(rng.integers(len(places)))]
    home = changed
    for key in path[:-1]:
        home = home[key]
    way = rng.random()
    if way < 0.2:
        del home[path[-1]]
    elif way < 0.25:
        home[path[-1]] = "DEEP"
        return json.dumps(changed).encode().replace(b'"DEEP"', b'{"a":' * DEEP + b"1" + b"}" * DEEP)
    elif way < 0.4 and isinstance(home[path[-1]], int):
        home[path[-1]] += int(rng.choice([-1, 1, 7, -100, 100_000]))
    else:
        home[path[-1]] = EVIL[int(rng.integers(len(EVIL)))]
    return json.dumps(changed).encode()


def _places(node: Any, path: tuple[Any, ...] = ()) -> Any:
    """Walk over the ways to all values of a JSON tree."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def mutate_file(file: Path, rng: np.random.Generator) -> str:
    """Damage one file; say how."""
    content = file.read_bytes()
    looks_like_json = content[:1] in (b"{", b"[")
    way = rng.random()
    if way < 0.04:
        file.unlink()
        return "deleted"
    if way < 0.06:
        file.unlink()
        file.mkdir()
        return "a folder"
    if way < 0.08:
        file.write_bytes(b"")
        return "empty"
    if looks_like_json and way < 0.8:
        file.write_bytes(mutate_json(content, rng))
        return "another value in JSON"
    file.write_bytes(mutate_bytes(content, rng))
    return "other bytes"


def swap_files(a: Path, b: Path) -> str:
    """Exchange two files."""
    kept = a.with_name(f"{a.name}.kept")
    os.replace(a, kept)
    os.replace(b, a)
    os.replace(kept, b)
    return f"exchanged with {b.name}"


def mutate_target(target: Path, rng: np.random.Generator) -> str:
    """Damage one or two files of a file or folder; say which and how.

    Parameters
    ----------
    target : a file, or a folder of which some files are damaged
    rng : decides what happens
    """
    files = [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())
    said = []
    for _ in range(1 if rng.random() < 0.8 else 2):
        # descriptions are few and decide everything: every other time one of them
        described = [p for p in files if p.suffix == ".json" or p.name.startswith(".z")]
        pool = described if described and rng.random() < 0.5 else files
        file = pool[int(rng.integers(len(pool)))]
        if not file.is_file():
            continue
        other = files[int(rng.integers(len(files)))]
        name = file.relative_to(target.parent)
        if len(files) > 1 and other != file and other.is_file() and rng.random() < 0.05:
            said.append(f"{name}: {swap_files(file, other)}")
        else:
            said.append(f"{name}: {mutate_file(file, rng)}")
    return "; ".join(said)
