"""Shards of saev: `acts000000.bin`, plain float32 (example, layer, token, feature), described by `metadata.json`.

Every shard has room for the same number of examples; `shards.json` says how many each holds. The layers have the
numbers of the model. Where the model has a [CLS] token, it is the first of each example. The entry `data` of the
description is a pickle in base64, which is never looked at.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbksvd_dask.errors import StoreError
from dbksvd_dask.importers.base import ArrayInfo, Hints, Region, RegionFile, SourceFile
from dbksvd_dask.store import atomic

METADATA, SHARDS = "metadata.json", "shards.json"
PATTERN = re.compile(r"acts(\d{6,})\.bin")
# what each entry is called since protocol 1.1, and before
NAMES = {
    "n_examples": ("n_examples", "n_imgs"),
    "tokens": ("content_tokens_per_example", "n_patches_per_img"),
    "n_features": ("d_model", "d_vit"),
}


@dataclass(frozen=True)
class Description:
    """What `metadata.json` says of the shards beside it."""

    n_examples: int
    tokens: int
    n_features: int
    layers: tuple[int, ...]

    @property
    def example_shape(self) -> tuple[int, int, int]:
        """Return (layers, tokens, features) of one example."""
        return len(self.layers), self.tokens, self.n_features

    @property
    def example_bytes(self) -> int:
        """Return the bytes of one example."""
        return math.prod(self.example_shape) * 4


def read_description(path: str) -> Description:
    """Read the description beside a shard."""
    file = os.path.join(os.path.dirname(path), METADATA)
    found = atomic.read_json(file)
    known = found if isinstance(found, dict) else {}
    if known.get("dtype", "float32") != "float32":
        raise StoreError(f"{file} says dtype {known['dtype']!r}; shards of saev are float32")
    sizes = {name: _entry(file, known, names) for name, names in NAMES.items()}
    layers = known.get("layers")
    if not isinstance(layers, list) or not layers or any(type(n) is not int for n in layers):
        raise StoreError(f"{file} says layers {layers!r}; need a list of numbers such as [13, 21]")
    cls = known.get("cls_token", False)
    return Description(**{**sizes, "tokens": sizes["tokens"] + bool(cls)}, layers=tuple(layers))


def _entry(file: str, known: dict[str, Any], names: Sequence[str]) -> int:
    value = next((known[name] for name in names if name in known), None)
    if type(value) is not int or value < 1:
        raise StoreError(f"{file} says {names[0]} {value!r}; need a whole number from 1 on")
    return value


def open_shard(path: str, hints: Hints) -> SourceFile:
    """Open one shard."""
    about, size = read_description(path), os.path.getsize(path)
    room, rest = divmod(size, about.example_bytes)
    if rest or not room:
        raise StoreError(
            f"{path} holds {size} bytes, not a whole number of examples of {list(about.example_shape)} float32 "
            f"({about.example_bytes} bytes each), as {METADATA} beside it says: another description, or truncated"
        )
    n = _examples(path, about, room)
    region = Region(path, 0, (n, *about.example_shape), np.dtype("<f4"))
    file = RegionFile(path, {"": (region, "float32")})
    file.arrays = {"": ArrayInfo(region.shape, "float32", about.layers)}
    return file


def _examples(path: str, about: Description, room: int) -> int:
    """Return how many examples a shard holds; the rest of its room is not filled."""
    file, name = os.path.join(os.path.dirname(path), SHARDS), os.path.basename(path)
    if os.path.isfile(file):
        entries = atomic.read_json(file)
        listed = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        n = next((e.get("n_examples") for e in listed if e.get("name") == name), None)
        if type(n) is not int or not 0 <= n <= room:
            raise StoreError(f"{file} says n_examples {n!r} of {name}, which has room for {room}; copy both again")
        return n
    match = PATTERN.fullmatch(name)
    before = int(match[1]) * room if match else 0
    return max(0, min(room, about.n_examples - before))


def require_all(paths: Sequence[str]) -> None:
    """Refuse a folder from which shards are missing."""
    about = read_description(paths[0])
    found = 0
    for path in paths:
        file = open_shard(path, Hints())
        found += file.arrays[""].shape[0]
        file.close()
    if found != about.n_examples:
        folder = os.path.dirname(paths[0])
        raise StoreError(
            f"the {len(paths)} shards in {folder} hold {found} examples, its {METADATA} says {about.n_examples}; "
            f"copy the missing ones, or give a pattern such as '{folder}/acts*.bin' to import those that exist"
        )
