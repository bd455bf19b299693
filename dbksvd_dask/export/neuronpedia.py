"""The layout in which Neuronpedia imports a source: what each of its files holds, and writing them.

```
OUT/MODEL/SOURCE/model.jsonl, release.jsonl, sourceset.jsonl, source.jsonl     one line each
OUT/MODEL/SOURCE/features/batch-0.jsonl.gz          a line per feature, 1024 features per file
OUT/MODEL/SOURCE/activations/batch-0.jsonl.gz       a line per text, of the same features
OUT/MODEL/SOURCE/explanations/batch-0.jsonl.gz      a line per explanation, of the same features
```

SOURCE is LAYER-SET, such as 14-res-dbksvd. The fields are those of Neuronpedia's own export
(github.com/hijohnnylin/neuronpedia, utils/neuronpedia-utils, `export-data.py`). What they hold of a dictionary is
gathered by `dbksvd_dask.report.neuronpedia`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbksvd_dask._words import plain
from dbksvd_dask.errors import InputError
from dbksvd_dask.store.atomic import write_bytes

BATCH = 1024
KINDS = ("features", "activations", "explanations")
# Names of hooks: ours, as Neuronpedia (TransformerLens) has them, and in the name of a set.
HOOKS = {"resid": ("hook_resid_post", "res"), "mlp": ("hook_mlp_out", "mlp"), "attn": ("hook_attn_out", "att")}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True)
class NeuronpediaSource:
    """Where in Neuronpedia a dictionary goes.

    Attributes
    ----------
    model : str
        Its name of the model, such as gemma-3-270m.
    hook : str
        Place of the activations, such as resid:14.
    set_name : str
        Sources of one kind over layers; default: res-dbksvd, mlp-dbksvd or att-dbksvd.
    release : str
        Sets that are published together.
    creator, creator_id, url, description : str
        Who made it, the identifier of the account that imports it, and where to read about it.
    n_texts, n_tokens, dataset
        What activations were measured on.
    created : str
        A date, as in 2026-11-18T00:00:00.
    """

    model: str
    hook: str
    set_name: str = ""
    release: str = "dbksvd"
    creator: str = ""
    creator_id: str = "dbksvd-dask"
    url: str = ""
    description: str = ""
    dataset: str = ""
    n_texts: int | None = None
    n_tokens: int | None = None
    created: str = "1970-01-01T00:00:00"

    def __post_init__(self) -> None:
        """Refuse names that Neuronpedia cannot have in an address."""
        kind, _, layer = self.hook.partition(":")
        if kind not in HOOKS or not layer.isdigit():
            raise InputError(f"hook={self.hook!r} is not known; name it as in 'resid:14', 'mlp:14' or 'attn:14'")
        for name in ("model", "release", "set"):
            value = self.set if name == "set" else getattr(self, name)
            if not _NAME.fullmatch(value):
                raise InputError(
                    f"{'set_name' if name == 'set' else name}={value!r} cannot be part of an address; use lower "
                    "case letters, digits, '.', '_' and '-', such as 'gemma-3-270m'"
                )

    @property
    def layer(self) -> int:
        """Block of the model."""
        return int(self.hook.partition(":")[2])

    @property
    def set(self) -> str:
        """Name of the set."""
        return self.set_name or f"{HOOKS[self.hook.partition(':')[0]][1]}-dbksvd"

    @property
    def name(self) -> str:
        """Name of the source."""
        return f"{self.layer}-{self.set}"

    @property
    def hook_name(self) -> str:
        """The hook as TransformerLens names it."""
        return f"blocks.{self.layer}.{HOOKS[self.hook.partition(':')[0]][0]}"

    def heads(self) -> dict[str, dict[str, Any]]:
        """Return the line of each of the four files that describe the source."""
        common = {"creatorId": self.creator_id, "createdAt": self.created, "visibility": "PUBLIC"}
        urls = [self.url] if self.url else []
        return {
            "model": {
                **common,
                "id": self.model,
                "instruct": self.model.endswith(("-it", "-instruct")),
                "displayNameShort": self.model,
                "displayName": self.model,
                "layers": 0,
                "neuronsPerLayer": 0,
                "owner": "",
                "inferenceEnabled": False,
                "updatedAt": self.created,
            },
            "release": {
                **common,
                "name": self.release,
                "description": self.description or self.release,
                "descriptionShort": self.description or self.release,
                "urls": urls,
                "creatorName": self.creator,
                "creatorNameShort": self.creator,
                "isNewUi": False,
                "featured": False,
                "defaultUmapSourceIds": [],
            },
            "sourceset": {
                **common,
                "modelId": self.model,
                "name": self.set,
                "description": self.description or f"DB-KSVD, {self.hook_name}",
                "type": "",
                "creatorName": self.creator,
                "urls": urls,
                "releaseName": self.release,
                "hasDashboards": True,
                "defaultRange": 1,
                "defaultShowBreaks": True,
            },
            "source": {
                **common,
                "id": self.name,
                "modelId": self.model,
                "setName": self.set,
                "hasDashboards": True,
                "inferenceEnabled": False,
                "dataset": self.dataset or None,
                "num_prompts": self.n_texts,
                "num_tokens_in_prompt": self.n_tokens,
            },
        }

    def place(self, index: int, by: str = "creatorId") -> dict[str, Any]:
        """Return the fields that every line about a feature has."""
        return {"modelId": self.model, "layer": self.name, "index": str(index), by: self.creator_id}

    def identifier(self, *parts: Any) -> str:
        """Return an identifier for a line: the same for the same parts."""
        text = "/".join(map(str, (self.model, self.name, *parts)))
        return "c" + hashlib.sha256(text.encode()).hexdigest()[:24]


def activation_line(
    source: NeuronpediaSource,
    index: int,
    number: int,
    tokens: Sequence[str],
    values: Sequence[float],
    interval: tuple[float, float, float] | None,
) -> dict[str, Any]:
    """Describe a text on which a feature is active.

    Parameters
    ----------
    source : NeuronpediaSource
    index, number : int
        Of the feature, and of the text among those of the feature.
    tokens, values : sequences of equal length
    interval : (lowest, highest, share), or None
        Values of the interval that the text was drawn from, and the share of the feature's activations in it;
        None for one of the strongest.
    """
    low, high, share = interval or (None, None, None)
    strongest = max(range(len(values)), key=lambda i: values[i])
    return {
        "id": source.identifier(index, number),
        **source.place(index),
        "dataSource": source.dataset or None,
        "tokens": list(tokens),
        "values": list(values),
        "maxValue": max(values),
        "maxValueTokenIndex": strongest,
        "minValue": min(values),
        "dfaValues": [],
        "dfaMaxValue": None,
        "dfaTargetIndex": None,
        "binMin": low,
        "binMax": high,
        "binContains": share,
        "qualifyingTokenIndex": None if interval is None else strongest,
    }


def explanation_line(source: NeuronpediaSource, index: int, text: str) -> dict[str, Any]:
    """Describe an explanation of a feature."""
    return {
        "id": source.identifier(index, "explanation"),
        **source.place(index, by="authorId"),
        "description": text,
        "embedding": None,
        "typeName": None,
        "explanationModelName": None,
        "umap_x": 0,
        "umap_y": 0,
        "umap_cluster": 0,
        "umap_log_feature_sparsity": 0,
    }


def write_source(
    folder: Path, source: NeuronpediaSource, batches: Iterable[dict[str, Iterable[dict[str, Any]]]]
) -> dict[str, int]:
    """Write the files of a source; return how many lines of each kind there are.

    Parameters
    ----------
    folder : path
    source : NeuronpediaSource
    batches : iterable of dict with the lines of each of `KINDS`
        Of `BATCH` features each.
    """
    home = folder / source.model / source.name
    for kind in KINDS:
        (home / kind).mkdir(parents=True)
    for name, line in source.heads().items():
        write_bytes(home / f"{name}.jsonl", _lines([line]))
    counts = dict.fromkeys(KINDS, 0)
    for number, batch in enumerate(batches):
        for kind in KINDS:
            content = _lines(batch[kind])
            counts[kind] += content.count(b"\n")
            write_bytes(home / kind / f"batch-{number}.jsonl.gz", gzip.compress(content, 5, mtime=0))
    return counts


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """Write rows as JSON, one per line; numbers that JSON cannot express are null."""
    return b"".join((json.dumps(plain(row), allow_nan=False) + "\n").encode() for row in rows)
