"""What a report of tokens has besides their contexts: logits of the atoms, and where in a text they are active."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError, MismatchError, StoreError, brief
from dbksvd_dask.report.facts import CodeReader
from dbksvd_dask.report.pack import Payload, narrow
from dbksvd_dask.report.samples import Samples, TokenSamples, has_array
from dbksvd_dask.store.reader import open_aligned

N_BINS = 16
SIDES = ("positive", "negative")


Logits = list[dict[str, list[tuple[str, float]]]]


def read_logits(given: Any, n_atoms: int) -> Logits | None:
    """Read the tokens that every atom promotes (`positive`) and suppresses (`negative`); None for None.

    Parameters
    ----------
    given : None, path of a JSON file that `dbksvd logits` wrote, or its content
    n_atoms : int
        Of the dictionary.
    """
    if given is None:
        return None
    where = os.fspath(given) if isinstance(given, str | os.PathLike) else "logits"
    content = given if isinstance(given, Mapping) else _read(where)
    try:
        atoms = [{side: [(str(t), float(v)) for t, v in one[side]] for side in SIDES} for one in content["atoms"]]
        order = [int(one["atom"]) for one in content["atoms"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{where} does not hold logits ({brief(error)}); write it with `dbksvd logits`"
        ) from error
    if order != list(range(n_atoms)):
        raise MismatchError(
            f"{where} is about {len(order)} atoms, the dictionary has {n_atoms}; write it for this run"
        )
    return atoms


def logits_payload(atoms: Logits | None) -> Payload:
    """Pack logits: each token once, and for every atom and side its tokens and their values."""
    if atoms is None:
        return Payload()
    n_atoms = len(atoms)
    names = sorted({token for one in atoms for side in SIDES for token, _ in one[side]})
    number = {token: i for i, token in enumerate(names)}
    arrays: dict[str, NDArray[Any]] = {}
    for side in SIDES:
        most = max((len(one[side]) for one in atoms), default=0)
        token, value = np.full((n_atoms, most), -1, np.int64), np.zeros((n_atoms, most), np.float32)
        for j, one in enumerate(atoms):
            for i, (name, amount) in enumerate(one[side]):
                token[j, i], value[j, i] = number[name], amount
        arrays |= {f"{side}_token": narrow(token), f"{side}_logit": value}
    return Payload({"tokens": names}, arrays)


def _read(where: str) -> Any:
    try:
        return json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"cannot read {where}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({brief(error)}); write it with `dbksvd logits`") from error


def position_payload(reader: CodeReader, samples: Samples) -> Payload:
    """Density of every atom by position: the share of the tokens there on which it is active.

    Positions are in bins that double in width, as beginnings of texts differ most.
    """
    if not isinstance(samples, TokenSamples) or samples.store is None or not has_array(samples.store, "position"):
        return Payload()
    position = open_aligned(samples.store, "position").read(0, reader.n_samples).ravel().astype(np.int64)
    if position.size == 0 or position.min() < 0:
        return Payload()
    edges = position_edges(int(position.max()))
    place = np.searchsorted(edges, position, side="right") - 1
    n_bins = len(edges) - 1
    counts = np.zeros(reader.n_atoms * n_bins, np.int64)
    for first, atom, coefficient in reader.placed_blocks():
        i, s = np.nonzero((atom >= 0) & (coefficient != 0))
        counts += np.bincount(atom[i, s].astype(np.int64) * n_bins + place[first + i], minlength=counts.size)
    tokens = np.bincount(place, minlength=n_bins)
    share = counts.reshape(-1, n_bins) / np.maximum(tokens, 1)
    return Payload({"position_edges": edges.tolist()}, {"position_density": share.astype(np.float32)})


def position_edges(last: int) -> NDArray[np.int64]:
    """First position of each bin, and one past the last: 0, 1, 2, 4, 8, ...

    >>> position_edges(9).tolist()
    [0, 1, 2, 4, 8, 10]
    """
    powers = [0] + [1 << i for i in range(N_BINS - 1) if 1 << i <= last]
    return np.array([*powers, last + 1], np.int64)
