"""Plain-loop twins of what the report gathers, and a reader of its packed data."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import numpy as np


def naive_coactivation(atom, coefficient, n_atoms):
    """Samples with both atoms, and the Jaccard index, for every pair: two (n_atoms, n_atoms) arrays."""
    together = np.zeros((n_atoms, n_atoms))
    active = np.zeros(n_atoms)
    for row, values in zip(atom, coefficient, strict=True):
        used = {int(j) for j, x in zip(row, values, strict=True) if j >= 0 and x != 0}
        for i in used:
            active[i] += 1
            for j in used:
                if i != j:
                    together[i, j] += 1
    either = active[:, None] + active[None, :] - together
    return together, together / np.where(either > 0, either, 1)


def naive_histogram(atom, coefficient, n_atoms, low, high, n_bins):
    """Counts per bin of every atom's coefficients by looking at one at a time."""
    counts = np.zeros((n_atoms, n_bins), int)
    for j, x in zip(atom.ravel(), coefficient.ravel(), strict=True):
        if j >= 0 and x != 0:
            place = int((float(x) - low[j]) / (high[j] - low[j]) * n_bins)
            counts[j, min(max(place, 0), n_bins - 1)] += 1
    return counts


def naive_strongest(atom, coefficient, j, sign, n):
    """Samples of an atom by its signed coefficient, largest first, positive ones only."""
    found = []
    for i, (row, values) in enumerate(zip(atom, coefficient, strict=True)):
        found += [(-sign * float(x), i) for a, x in zip(row, values, strict=True) if a == j and sign * x > 0]
    return [i for _, i in sorted(found)[:n]]


def naive_class_shares(atom, coefficient, labels, n_atoms, n_classes):
    """Share of each class among the samples on which each atom is active."""
    counts = np.zeros((n_atoms, n_classes))
    for row, values, label in zip(atom, coefficient, labels, strict=True):
        for j, x in zip(row, values, strict=True):
            if j >= 0 and x != 0:
                counts[j, label] += 1
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def unpack(content):
    """Head and arrays of packed data, read as the page's script reads them."""
    assert content[:8] == b"DBKR0001"
    length = int.from_bytes(content[8:16], "little")
    held = json.loads(content[16 : 16 + length])
    base = 16 + -(-length // 8) * 8
    arrays = {}
    for name, about in held["arrays"].items():
        size = int(np.prod(about["shape"]))
        start = base + about["offset"]
        assert start % 8 == 0
        arrays[name] = np.frombuffer(content, about["type"], size, start).reshape(about["shape"])
    return held["head"], arrays


def page_data(path):
    """Head and arrays of a page."""
    html = Path(path).read_text(encoding="utf-8")
    text = re.search(r'id="data">([A-Za-z0-9+/=]*)</script>', html)[1]
    return unpack(gzip.decompress(base64.b64decode(text)))


def naive_quarters(strength, edges):
    """Count strengths in each quarter, one by one, strongest quarter first."""
    counts = [0, 0, 0, 0]
    for x in strength:
        place = 3
        for q in (1, 2, 3):
            if x > edges[q]:
                place = 3 - q
        counts[place] += 1
    return np.array(counts)
