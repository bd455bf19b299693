"""What is run on a damaged file: commands as the command line runs them, and library calls; results as digests."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbksvd_dask import codes_to_csr, decode, encode, open_codes, open_dictionary, open_statistics
from dbksvd_dask.cli.main import cli
from dbksvd_dask.store.activations import open_activations


@dataclass(frozen=True)
class Action:
    """Something that reads a damaged file.

    Attributes
    ----------
    run : callable
        Runs in the folder of the case and returns a digest of the result.
    exact : bool
        Whether the digest must equal that of the originals; otherwise any result will do, as of `info`.
    """

    run: Callable[[], str]
    exact: bool = True


def command(*args: Any) -> str:
    """Run `dbksvd args` with errors let through; return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        cli(args=[str(a) for a in args], prog_name="dbksvd", standalone_mode=False)
    return out.getvalue()


def digest(parts: Iterable[bytes]) -> str:
    """Return a short digest of some bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


def _array(values: Any) -> bytes:
    array = np.ascontiguousarray(values)
    return f"{array.dtype} {array.shape}".encode() + array.tobytes()


def rows_of(path: str) -> str:
    """Digest of the rows and aligned arrays of an activation store."""
    found = open_activations(path)
    named = sorted({"activations", *found.coords})
    return digest(part for name in named for part in (str(name).encode(), _array(found[name].values)))


def dictionary_of(path: str) -> str:
    """Digest of a dictionary."""
    found = open_dictionary(path)
    arrays = (found.atoms, found.mean, found.weights)
    return digest(_array(array) for array in arrays if array is not None)


def codes_of(path: str) -> str:
    """Digest of stored codes."""
    found = open_codes(path)
    return digest(_array(found[name].values) for name in ("atom", "coefficient"))


def files_of(path: str) -> str:
    """Digest of all files below a folder."""
    files = sorted(p for p in Path(path).rglob("*") if p.is_file())
    return digest(part for p in files for part in (str(p).encode(), p.read_bytes()))


def _then(look: Callable[[str], str], path: str, *args: Any) -> Callable[[], str]:
    """Run a command, then digest what it wrote to `path`."""

    def run() -> str:
        command(*args)
        return look(path)

    return run


def _page(*args: Any) -> Callable[[], str]:
    return _then(
        lambda path: digest([Path(path).read_bytes()]), "page.html", "report", *args, "--out", "page.html"
    )


def _info(path: str, *options: str) -> Action:
    return Action(lambda: command("info", path, "--json", *options), exact=False)


def verify(path: str) -> None:
    """Compare everything with its checksums; an error of ours where something differs."""
    command("info", path, "--verify")


def of_source(path: str, *options: str) -> dict[str, Action]:
    """What reads a file that can be imported."""
    imported = ("import", path, "new.zarr", "--chunk-rows", 20, *options)
    return {
        "info": _info(path),
        "import": Action(_then(rows_of, "new.zarr", *imported)),
        "import plan": Action(lambda: command(*imported, "--plan"), exact=False),
    }


def of_foreign(path: str) -> dict[str, Action]:
    """What reads a dictionary of another tool."""
    return {
        "info": _info(path),
        "import-dictionary": Action(_then(dictionary_of, "new.zarr", "import-dictionary", path, "new.zarr")),
    }


def _fit(store: str, *options: Any) -> Callable[[], str]:
    sizes = ("--n-atoms", 16, "--k", 2, "--n-iter", 2, "--batch-size", 40, "--chunk-size", 64, "--validation", 0)
    return _then(dictionary_of, "new", "fit", store, "new", *sizes, *options)


def _measure() -> str:
    """Read codes through the library, in every form."""
    codes, dictionary = open_codes("codes.zarr"), open_dictionary("run")
    matrix = codes_to_csr(codes)
    back = np.asarray(decode(codes, dictionary.atoms, dictionary.mean))
    statistics = open_statistics("codes.zarr")
    arrays = [matrix.data, matrix.indices, back, *(statistics[name].values for name in statistics)]
    return digest([*map(_array, arrays), repr(codes.dbksvd.summary()).encode()])


def _encode_rows() -> str:
    """Encode an array with a run, through the library."""
    rows = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    codes = encode(rows, open_dictionary("run"))
    return digest(_array(codes[name].values) for name in ("atom", "coefficient"))


_SHUFFLE = ("shuffle", "store.zarr", "mixed.zarr", "--seed", 0)
_ENCODE = ("encode", "store.zarr", "run.zarr", "codes.zarr")
_NAMES = ("--model-name", "m", "--hook-name", "h")

OF_STORE = {
    "info": _info("store.zarr"),
    "info --verify": _info("store.zarr", "--verify"),
    "import": Action(_then(rows_of, "new.zarr", "import", "store.zarr", "new.zarr", "--aligned", "label")),
    "shuffle": Action(_then(rows_of, "new.zarr", "shuffle", "store.zarr", "new.zarr", "--seed", 0)),
    "fit": Action(_fit("store.zarr")),
    "encode": Action(_then(codes_of, "new.zarr", "encode", "store.zarr", "run", "new.zarr")),
    "report": Action(
        _page("run", "--codes", "codes.zarr", "--samples", "store.zarr", "--image-shape", "2x4"), exact=False
    ),
}
OF_TOKENS = {
    "report": Action(_page("run.zarr", "--codes", "codes.zarr", "--samples", "tokens.zarr"), exact=False),
    "report of what codes name": Action(_page("run.zarr", "--codes", "codes.zarr"), exact=False),
    "shuffle": Action(_then(rows_of, "new.zarr", "shuffle", "tokens.zarr", "new.zarr", "--seed", 0)),
}
OF_PATCHES = {
    "report": Action(_page("run.zarr", "--codes", "codes.zarr", "--samples", "patches.zarr"), exact=False),
    "report of what codes name": Action(_page("run.zarr", "--codes", "codes.zarr"), exact=False),
}
OF_NAMES = {
    "report": Action(_page("run", "--codes", "codes.zarr", "--explanations", "names.json"), exact=False),
}
OF_MASK = {
    "import": Action(_then(rows_of, "new.zarr", "import", "rows.npy", "new.zarr", "--mask", "mask.npy")),
}
OF_RUN = {
    "info": _info("run"),
    "info --verify": _info("run", "--verify"),
    "encode": Action(_then(codes_of, "new.zarr", "encode", "store.zarr", "run", "new.zarr")),
    "encode rows": Action(_encode_rows),
    "report": Action(_page("run", "--codes", "codes.zarr")),
    "resume": Action(_then(dictionary_of, "run", "fit", "store.zarr", "run", "--resume", "--n-iter", 4)),
    "export": Action(_then(files_of, "out", "export", "saelens", "run", "out", *_NAMES)),
}
OF_CODES = {
    "info": _info("codes.zarr"),
    "info --verify": _info("codes.zarr", "--verify"),
    "report": Action(_page("run", "--codes", "codes.zarr")),
    "library": Action(_measure),
    "export": Action(_then(files_of, "out", "export", "saelens", "run", "out", *_NAMES, "--codes", "codes.zarr")),
    "encode again": Action(_then(codes_of, "codes.zarr", "encode", "store.zarr", "run", "codes.zarr")),
}
GO_ON_IMPORT = {
    "info": _info("store.zarr.partial"),
    "go on": Action(_then(rows_of, "store.zarr", "import", "rows.npy", "store.zarr", "--chunk-rows", 20)),
}
_DROPPING = ("--chunk-rows", 20, "--drop-outliers", 3.0)
GO_ON_SCAN = {
    "info": _info("store.zarr.scan.partial"),
    "go on": Action(_then(rows_of, "store.zarr", "import", "rows.npy", "store.zarr", *_DROPPING)),
}
GO_ON_SHUFFLE = {
    "info": _info("mixed.zarr.partial"),
    "go on": Action(_then(rows_of, "mixed.zarr", *_SHUFFLE)),
}
GO_ON_ENCODE = {
    "info": _info("codes.zarr.partial"),
    "go on": Action(_then(codes_of, "codes.zarr", *_ENCODE)),
    "finish": Action(_then(codes_of, "codes.zarr", *_ENCODE, "--finish")),
}


def enter(folder: Path) -> None:
    """Make a folder the working directory."""
    os.chdir(folder)
