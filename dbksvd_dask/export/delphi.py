"""The latent cache of Delphi (EleutherAI): on which tokens a latent is active, for its explainers and scorers.

```
OUT/HOOK/config.json               length of a text, number of tokens, name of the model
OUT/HOOK/0_818.safetensors         latents 0 to 818
    locations     uint16 or uint32 (n, 3)    text, position in it, latent less the first one of the file
    activations   float16 or float32 (n,)
    tokens        int64 (n_texts, length)    the same in every file
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from dbksvd_dask.codes import code_blocks, open_codes
from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.export.check import new_folder
from dbksvd_dask.store import paths
from dbksvd_dask.store.atomic import write_json
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.reader import open_aligned

NEEDED = ("token_id", "text", "position")
FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class DelphiResult:
    """What was written.

    Attributes
    ----------
    path : str
    n_latents, n_files, n_texts, n_activations : int
    n_negative : int
        Coefficients that were left out, as Delphi knows positive activations only.
    """

    path: str
    n_latents: int
    n_files: int
    n_texts: int
    n_activations: int
    n_negative: int


def export_delphi(
    codes: PathLike,
    store: PathLike,
    path: PathLike,
    *,
    hook_name: str,
    model_name: str,
    dataset: str = "",
    n_splits: int = 5,
    fill: int = 0,
    overwrite: bool = False,
) -> DelphiResult:
    """Write codes of tokens as a latent cache of Delphi. All activations are held in memory, 10 bytes each.

    Parameters
    ----------
    codes : path of a codes store
    store : path of the activation store that was encoded
        Written by `dbksvd capture`: it has the token, the text and the position of every row.
    path : path
        Folder to write; must not exist.
    hook_name : str
        Name of the hook in Delphi, such as layers.14: the folder below `path`.
    model_name, dataset : str
        For its configuration.
    n_splits : int
        Files that the latents are divided into.
    fill : int
        Token where a text has no row: before its first token, and after its end.
    overwrite : bool
        Replace an earlier export.
    """
    if n_splits < 1 or not hook_name or "/" in hook_name:
        raise InputError(
            f"n_splits={n_splits}, hook_name={hook_name!r}: give at least 1 file, and a name without /"
        )
    columns, opened = _columns(store), open_codes(codes)
    n_atoms, n_samples = int(opened.attrs["n_atoms"]), int(opened.sizes["sample"])
    if n_samples != len(columns["text"]):
        raise MismatchError(
            f"the codes have {n_samples} samples but {store} has {len(columns['text'])}; give the store that was "
            "encoded"
        )
    tokens = _tokens(columns, fill)
    row, atom, value, n_negative = _activations(opened)
    place = np.stack([columns["text"][row], columns["position"][row], atom], axis=1)
    config = {
        "dataset_repo": dataset,
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": "text",
        "batch_size": 32,
        "cache_ctx_len": tokens.shape[1],
        "n_tokens": tokens.size,
        "n_splits": n_splits,
        "model_name": model_name,
    }
    edges = np.linspace(0, n_atoms, min(n_splits, n_atoms) + 1).astype(np.int64)
    with new_folder(path, overwrite=overwrite) as folder:
        (folder / hook_name).mkdir()
        write_json(folder / hook_name / "config.json", config)
        for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            name = f"{first}_{stop - 1}.safetensors"
            save_file(_split(place, value, tokens, first, stop), str(folder / hook_name / name))
    return DelphiResult(str(path), n_atoms, len(edges) - 1, len(tokens), len(value), n_negative)


def _columns(store: PathLike) -> dict[str, npt.NDArray[np.int64]]:
    node = paths.open_group(paths.normalise(store))
    missing = [name for name in NEEDED if name not in node]
    if missing:
        raise InputError(f"{store} has no {' and no '.join(missing)}; give a store that `dbksvd capture` wrote")
    readers = {name: open_aligned(store, name) for name in NEEDED}
    return {name: r.read(0, r.n_samples).ravel().astype(np.int64) for name, r in readers.items()}


def _tokens(columns: dict[str, npt.NDArray[np.int64]], fill: int) -> npt.NDArray[np.int64]:
    """Lay the tokens out by text and position."""
    shape = (int(columns["text"].max()) + 1, int(columns["position"].max()) + 1)
    tokens = np.full(shape, fill, np.int64)
    tokens[columns["text"], columns["position"]] = columns["token_id"]
    return tokens


def _activations(codes: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32], int]:
    """Return row, atom and value of every positive coefficient in the order of rows, and how many are negative."""
    rows, atoms, values, first, n_negative = [], [], [], 0, 0
    for atom, coefficient in code_blocks(codes):
        i, s = np.nonzero((atom >= 0) & (coefficient > 0))
        n_negative += int(np.count_nonzero((atom >= 0) & (coefficient < 0)))
        rows.append(i + first)
        atoms.append(atom[i, s].astype(np.int64))
        values.append(coefficient[i, s].astype(np.float32))
        first += len(atom)
    return np.concatenate(rows), np.concatenate(atoms), np.concatenate(values), n_negative


def _split(
    place: npt.NDArray[np.int64],
    value: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int64],
    first: int,
    stop: int,
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of the latents from `first` to `stop`, in the smallest types that hold them."""
    inside = (place[:, 2] >= first) & (place[:, 2] < stop)
    locations, held = place[inside] - [0, 0, first], value[inside]
    small = locations.max(initial=0) < 1 << 16
    half = float(held.max(initial=0.0)) <= FLOAT16_MAX
    return {
        "locations": np.ascontiguousarray(locations, np.uint16 if small else np.uint32),
        "activations": held.astype(np.float16 if half else np.float32),
        "tokens": tokens,
    }
