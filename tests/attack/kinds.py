"""What is attacked: small originals of every kind of file, and the commands that read them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbksvd_dask import DBKSVD, encode_store, import_activations, shuffle_activations
from dbksvd_dask.export.huggingface import export_huggingface
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.importers.selection import Selection
from dbksvd_dask.store.activations import ActivationWriter
from dbksvd_dask.store.runs import open_dictionary
from tests.attack import actions
from tests.attack.actions import Action
from tests.helpers import jobs
from tests.helpers.report_parts import patch_store, token_store
from tests.helpers.stores import make_store
from tests.importers.test_formats import WRITERS

DATA = Path(__file__).parents[1] / "data" / "imports"
N, D, M, K = 60, 8, 16, 2
FIT = {"n_atoms": M, "k": K, "n_iter": 3, "batch_size": 40, "chunk_size": 64, "validation": 0}


@dataclass(frozen=True)
class Kind:
    """One kind of thing on disk.

    Attributes
    ----------
    name : str
    build : callable
        Makes the originals in a folder that is the working directory; all paths are relative to it.
    target : str
        The file or folder that is damaged.
    actions : dict of name to Action
        What is run on it.
    verify : str, optional
        What `dbksvd info --verify` can check: a result that differs from the reference must then be found by it.
        Without it the values of a file are its own business.
    craft : str, optional
        Name of the format in `crafted.CRAFTED`, for files made to mislead.
    """

    name: str
    build: Callable[[], None]
    target: str
    actions: dict[str, Action]
    verify: str | None = None
    craft: str | None = None


def _rows() -> Any:
    return jobs.made_up(N, D)


def _store(compressor: str | None = None) -> None:
    labels = {"label": np.arange(N, dtype=np.int32)}
    make_store("store.zarr", _rows(), 20, labels, compressor=compressor)


def _run() -> None:
    _store()
    DBKSVD(**FIT, checkpoint="run").fit("store.zarr")


def _codes() -> None:
    _run()
    encode_store("store.zarr", "run", "codes.zarr")


def _tokens() -> None:
    token_store(Path())
    jobs.write_dictionary("run.zarr", M, 16, K)
    encode_store("tokens.zarr", "run.zarr", "codes.zarr")


def _explained() -> None:
    _codes()
    named = [{"atom": j, "explanation": f"atom {j}", "score": 0.5} for j in range(M)]
    Path("names.json").write_text(json.dumps(named))


def _masked() -> None:
    np.save("rows.npy", _rows())
    np.save("mask.npy", np.arange(N) % 3 > 0)


def _patches() -> None:
    patch_store("patches.zarr", size=24)
    jobs.write_dictionary("run.zarr", M, 192, K)
    encode_store("patches.zarr", "run.zarr", "codes.zarr")


def _saelens() -> None:
    _run()
    export_saelens(open_dictionary("run"), "saelens", model_name="m", hook_name="h")


def _huggingface() -> None:
    _run()
    export_huggingface(open_dictionary("run"), "hf", repo_id="someone/something")


class _StopError(Exception):
    """Ends a job in the middle, as a kill would."""


@contextlib.contextmanager
def stopped(owner: Any, name: str, after: int) -> Iterator[None]:
    """Let a job call a method `after` times, then end it."""
    real, calls = getattr(owner, name), []

    def stopping(*args: Any, **options: Any) -> Any:
        if len(calls) == after:
            raise _StopError
        calls.append(name)
        return real(*args, **options)

    setattr(owner, name, stopping)
    try:
        yield
    except _StopError:
        return
    finally:
        setattr(owner, name, real)


def _unfinished_import() -> None:
    np.save("rows.npy", _rows())
    with stopped(ActivationWriter, "write_chunk", 1):
        import_activations("rows.npy", "store.zarr", chunk_rows=20)


def _unfinished_scan() -> None:
    np.save("rows.npy", _rows())
    with stopped(Selection, "_scan_block", 2):
        import_activations("rows.npy", "store.zarr", chunk_rows=20, drop_outliers=3.0)


def _unfinished_shuffle() -> None:
    _store()
    with stopped(ActivationWriter, "write_chunk", 1):
        shuffle_activations("store.zarr", "mixed.zarr", seed=0)


def _unfinished_encode() -> None:
    _store()
    jobs.write_dictionary("run.zarr", M, D, K)
    encode_store("store.zarr", "run.zarr", "codes.zarr", part=(1, 2))


def _source_kinds() -> list[Kind]:
    """One kind for each format, written by the tools themselves."""
    kinds = []
    for name, write in WRITERS.items():
        found = _file_of(name)

        def build(write: Callable[..., Any] = write) -> None:
            write(Path("source"), _rows())

        kinds.append(Kind(name, build, found, actions.of_source(found), craft=_crafted(name)))
    for name, options in {
        "hf_dataset": ["--array", "blocks.0.hook_mlp_out", "--aligned", "token_ids"],
        "saelens_cache": ["--aligned", "token_ids"],
        "torch.safetensors": ["--array", "layer_3", "--aligned", "token_ids"],
        "float16.pt": [],
        "bfloat16.pt": [],
    }.items():

        def copy(name: str = name) -> None:
            place = DATA / name
            shutil.copytree(place, name) if place.is_dir() else shutil.copy(place, name)

        kinds.append(Kind(name, copy, name, actions.of_source(name, *options)))
    return kinds


def _file_of(name: str) -> str:
    suffixes = {
        "npz": ".npz",
        "npz_compressed": ".npz",
        "raw": ".bin",
        "safetensors": ".safetensors",
        "hdf5": ".h5",
        "arrow_stream": ".arrow",
        "arrow_file": ".feather",
        "parquet": ".parquet",
        "zarr2": "",
    }
    return f"source{suffixes.get(name, '.npy')}"


def _crafted(name: str) -> str | None:
    return {"npz_compressed": "npz", "fortran": "npy", "big_endian": "npy"}.get(name, name)


def _description() -> Kind:
    """The description of a raw file, which is all that says what its bytes mean."""

    def build() -> None:
        WRITERS["raw"](Path("source"), _rows())
        described = {"dtype": "float32", "shape": [N, D], "offset": 0}
        Path("source.bin.json").write_text(json.dumps(described))

    return Kind("raw description", build, "source.bin.json", actions.of_source("source.bin"))


def _unfinished_kinds() -> list[Kind]:
    """Work that was stopped in the middle, and goes on."""
    shuffled = ("mixed.zarr.partial", "mixed.zarr.scratch.partial")
    return [
        Kind("unfinished import", _unfinished_import, "store.zarr.partial", actions.GO_ON_IMPORT, "store.zarr"),
        Kind("unfinished scan", _unfinished_scan, "store.zarr.scan.partial", actions.GO_ON_SCAN, "store.zarr"),
        Kind("unfinished encode", _unfinished_encode, "codes.zarr.partial", actions.GO_ON_ENCODE, "codes.zarr"),
        Kind("unfinished shuffle", _unfinished_shuffle, shuffled[0], actions.GO_ON_SHUFFLE, "mixed.zarr"),
        Kind("scratch of a shuffle", _unfinished_shuffle, shuffled[1], actions.GO_ON_SHUFFLE, "mixed.zarr"),
    ]


def _compressed() -> Kind:
    some = {name: actions.OF_STORE[name] for name in ("info", "import", "shuffle", "fit")}
    return Kind("compressed activations", lambda: _store("zstd"), "store.zarr", some, "store.zarr")


KINDS: tuple[Kind, ...] = (
    *_source_kinds(),
    _description(),
    Kind("activations", _codes, "store.zarr", actions.OF_STORE, "store.zarr"),
    _compressed(),
    Kind("tokens", _tokens, "tokens.zarr", actions.OF_TOKENS, "tokens.zarr"),
    Kind("patches", _patches, "patches.zarr", actions.OF_PATCHES, "patches.zarr"),
    Kind("explanations", _explained, "names.json", actions.OF_NAMES),
    Kind("mask", _masked, "mask.npy", actions.OF_MASK, craft="npy"),
    Kind("texts", _tokens, "tokens.txt", actions.OF_TOKENS),
    Kind("run", _codes, "run", actions.OF_RUN, "run"),
    Kind("codes", _codes, "codes.zarr", actions.OF_CODES, "codes.zarr"),
    Kind("saelens folder", _saelens, "saelens", actions.of_foreign("saelens")),
    Kind("hugging face folder", _huggingface, "hf", actions.of_foreign("hf")),
    *_unfinished_kinds(),
)
