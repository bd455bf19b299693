"""Names for atoms: explanations that were given, or the words that set an atom's strongest samples apart."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError, MismatchError, StoreError, brief
from dbksvd_dask.evaluate.autointerp import KeywordExplainer
from dbksvd_dask.report.samples import Samples

N_KEYWORDS = 5


@dataclass(frozen=True)
class Explanation:
    """What an atom stands for, and how well that fits (nan if it was not scored)."""

    text: str
    score: float = math.nan


def read_explanations(given: Any, n_atoms: int) -> dict[int, Explanation]:
    """Bring explanations into one form.

    Parameters
    ----------
    given : None, AutointerpResult, mapping of atom to text or (text, score), list of records, or JSON file
        A record has `atom` and `explanation`, and may have `score`.
    n_atoms : int

    Returns
    -------
    dict of atom to Explanation
    """
    if given is None:
        return {}
    if isinstance(given, str | os.PathLike):
        given = _read_json(Path(given))
    if isinstance(given, Mapping) and "interpretations" in given:
        given = given["interpretations"]
    records = getattr(given, "interpretations", given)
    try:
        found = dict(_from_mapping(records) if isinstance(records, Mapping) else _from_records(records))
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"explanations are not in a form that can be read ({brief(error)}); need a list of atom, explanation "
            "and score"
        ) from error
    wrong = [atom for atom in found if not 0 <= atom < n_atoms]
    if wrong:
        raise MismatchError(
            f"explanations name atom {wrong[0]} but the dictionary has {n_atoms}; they belong to another one"
        )
    return found


def keyword_names(samples: Samples, ids: NDArray[np.int64], strongest: NDArray[np.int64]) -> list[str]:
    """Name every atom by the words of its strongest samples.

    Parameters
    ----------
    samples : Samples
    ids : int64 ndarray of shape (n_shown,)
        Numbers of the samples on the page.
    strongest : int64 ndarray of shape (n_atoms, n_top)
        Places in `ids`, -1 where there are fewer.

    Returns
    -------
    list of str, one per atom; empty for an atom without words
    """
    words = samples.words(ids)
    if words is None:
        return [""] * len(strongest)
    groups = [[words[i] for i in row if i >= 0] for row in strongest.tolist()]
    if samples.kind == "token":
        return [_common(group) for group in groups]
    explainer = KeywordExplainer(groups)
    return [_shared(explainer, group) for group in groups]


def _shared(explainer: KeywordExplainer, texts: list[str]) -> str:
    """Return the heaviest words, each weighed by how many of the texts have it: a name is what they share."""
    weight = explainer.weights(texts)
    texts_with = Counter(word for text in texts for word in explainer.weights([text]))
    ranked = sorted(weight, key=lambda word: (-weight[word] * texts_with[word], word))
    return ", ".join(ranked[:N_KEYWORDS])


def _common(words: list[str]) -> str:
    """Return the most frequent words, most frequent first."""
    counts = Counter(word for word in words if word.strip())
    return " · ".join(word for word, _ in counts.most_common(N_KEYWORDS))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not JSON ({brief(error)}); need a list of atom, explanation and score"
        ) from error


def _from_mapping(given: Mapping[Any, Any]) -> Iterable[tuple[int, Explanation]]:
    for atom, value in given.items():
        text, score = (value, math.nan) if isinstance(value, str) else tuple(value)
        yield int(atom), Explanation(str(text), _score(score))


def _from_records(given: Iterable[Any]) -> Iterable[tuple[int, Explanation]]:
    for record in given:
        held = record if isinstance(record, Mapping) else vars(record)
        if "atom" not in held or "explanation" not in held:
            raise InputError(f"an explanation has the fields {sorted(held)}; need atom and explanation")
        yield int(held["atom"]), Explanation(str(held["explanation"]), _score(held.get("score")))


def _score(value: Any) -> float:
    return math.nan if value is None else float(value)
