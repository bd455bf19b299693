"""Capture: the activations of several hooks, from one forward pass, each to a store of its own; restartable."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dbksvd_dask.errors import InputError
from dbksvd_dask.events import Callback, JobProgress, emit
from dbksvd_dask.jobs.base import begin_or_resume
from dbksvd_dask.lm.model import Hook, LanguageModel, check_ids, describe, open_model
from dbksvd_dask.lm.texts import Texts, read_texts
from dbksvd_dask.lm.windows import BATCHES_PER_BLOCK, Windows, make_windows, padded, plan_batches, plan_blocks
from dbksvd_dask.progress import with_view
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import ActivationWriter, Aligned, create_activations, default_chunk_rows
from dbksvd_dask.store.dtypes import BFLOAT16, stored_dtype
from dbksvd_dask.store.lock import hold
from dbksvd_dask.store.partial import tidy
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.writer import JOB_ID, is_finished, job_id, require_free, require_room

DTYPES = ("float32", "bfloat16", "float16")
# One character for another, so that the places of tokens stay: the file of texts has one line for each window.
_ONE_LINE = str.maketrans({"\n": "\u21b5", "\r": "\u21b5"})


@dataclass(frozen=True)
class CaptureResult:
    """What a capture did.

    Attributes
    ----------
    stores : dict of str to str
        Path of the store of each hook.
    n_rows : int
        Rows of each store.
    n_windows, n_empty : int
        Windows that the texts were cut into, and texts without a token.
    tokens_run : int
        Tokens that this run gave to the model, padding not counted.
    seconds : float
        Time of this run.
    tokens_per_second : float
        Of this run; 0 when there was nothing to do.
    """

    stores: dict[str, str]
    n_rows: int
    n_features: int
    n_windows: int
    n_empty: int
    tokens_run: int
    seconds: float
    tokens_per_second: float


def store_name(hook: Hook) -> str:
    """Return the name of the store of a hook, such as resid-8.zarr."""
    return f"{hook.kind}-{hook.layer}.zarr"


def capture_activations(
    model: LanguageModel | str | os.PathLike[str],
    texts: Texts | str | os.PathLike[str] | Iterable[str],
    out: PathLike,
    hooks: Sequence[str | Hook],
    *,
    context: int = 256,
    bos: str = "drop",
    long: str = "split",
    n_tokens: int | None = None,
    seed: int | None = None,
    dtype: str = "float32",
    batch_tokens: int = 2048,
    chunk_rows: int | None = None,
    force: bool = False,
    callbacks: Iterable[Callback] = (),
    verbose: bool | None = None,
) -> CaptureResult:
    """Write the activations of a language model at some hooks to stores.

    The stores lie in the folder `out`, one per hook, such as `resid-8.zarr`. Each has, aligned with its rows,
    `token_id`, `document` (number of the text), `position` (in the window), `text` (number of the window, a line
    of the file of texts beside the stores), `start` and `end` (its characters there) and, for texts with labels,
    `label`. An interrupted capture resumes when called again; the stores come out the same byte for byte.

    Parameters
    ----------
    model : LanguageModel, or path of a Hugging Face directory or GGUF file
    texts : Texts, iterable of str, or path of texts as `read_texts` takes it
    out : path
        Folder for the stores.
    hooks : sequence of str
        Such as ``["resid:8", "mlp:8", "attn:8"]``. Blocks after the last are not computed.
    context : int
        Most tokens of a window, beginning token included.
    bos : {"drop", "keep", "none"}
        Put a beginning token before each window and give it no row; give it one; or put none.
    long : {"split", "cut"}
        Cut longer texts into several windows, or take the first window only.
    n_tokens : int, optional
        Take whole windows until there are this many rows.
    seed : int, optional
        Mix the texts by this seed; default: keep their order.
    dtype : {"float32", "bfloat16", "float16"}
        Of the stores.
    batch_tokens : int
        Most tokens of one forward pass, padding included.
    chunk_rows : int, optional
        Rows per chunk; default: chunks of 16 to 32 MiB.
    force : bool
        Replace stores of these names, and unfinished ones of another description.
    callbacks : iterable of callable
        Called with `JobProgress` events.
    verbose : bool, optional
        Show live progress or nothing; default: in a notebook only.

    Returns
    -------
    CaptureResult
    """
    began = time.perf_counter()
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
    if batch_tokens < 1:
        raise InputError(f"batch_tokens={batch_tokens} is too small; give at least 1")
    given = texts if isinstance(texts, Texts) else read_texts(texts)
    opened = model if isinstance(model, LanguageModel) else open_model(model)
    places = list(dict.fromkeys(opened.hook(hook) for hook in hooks))
    if not places:
        raise InputError("no hook was given; name at least one, such as resid:8")
    order = None if seed is None else np.random.default_rng(seed).permutation(len(given.texts))
    windows = make_windows(
        opened.tokenizer, given.texts, context=context, bos=bos, long=long, n_rows=n_tokens, order=order
    )
    check_ids(opened, windows.ids, int(windows.lengths.max(initial=0)))
    about = {"context": context, "bos": bos, "long": long, "order_seed": seed, "batch_tokens": batch_tokens}
    seen = with_view(callbacks, verbose)
    job = CaptureJob(opened, given, windows, paths.normalise(out), dtype, chunk_rows, about, force, seen)
    with hold(job.out, "a capture"):
        tokens = job.run(places, batch_tokens)
    seconds = time.perf_counter() - began
    stores = {str(hook): job.path(hook) for hook in places}
    sizes = (windows.n_rows, opened.n_features, len(windows.pieces), windows.n_empty, tokens)
    return CaptureResult(stores, *sizes, seconds, tokens / job.busy if tokens else 0.0)


@dataclass
class CaptureJob:
    """A capture whose texts are in windows; see `capture_activations`."""

    model: LanguageModel
    texts: Texts
    windows: Windows
    out: str
    dtype: str
    chunk_rows: int | None
    about: dict[str, Any]
    force: bool
    callbacks: tuple[Callback, ...]
    busy: float = 0.0  # seconds between the first forward pass and the last chunk

    def path(self, hook: Hook) -> str:
        """Return the path of the store of a hook."""
        return paths.join(self.out, store_name(hook))

    def run(self, hooks: Sequence[Hook], batch_tokens: int) -> int:
        """Write what is missing and publish it; return the tokens that were given to the model."""
        facts = self._facts()
        fillers: dict[Hook, Filler] = {}
        for hook in hooks:
            if not self.force and is_finished(self.path(hook), self._id(hook, facts)):
                tidy(self.path(hook))  # what a run that was killed after publishing left
            else:
                fillers[hook] = self._begin(hook, facts)
        with atomic.explain_full_disk(self.out), contextlib.ExitStack() as stack:
            for filler in fillers.values():
                stack.enter_context(filler)
            tokens = self._fill(fillers, batch_tokens) if fillers else 0
        atomic.write_bytes(paths.join(self.out, facts["texts"]), self._content())
        for hook, filler in fillers.items():
            filler.writer.finish(attributes={JOB_ID: self._id(hook, facts)})
        return tokens

    def _facts(self) -> dict[str, Any]:
        """What else must be the same for a store to be the same: the tokens, the model, how it was run."""
        digest = hashlib.sha256(self.windows.ids.tobytes() + self.windows.offset.tobytes())
        digest.update(self._content())
        for array in (self.windows.document, self.texts.label):
            digest.update(b"" if array is None else array.tobytes())
        known = {**describe(self.model), "source": self.texts.source, **self.about}
        tokens = digest.hexdigest()
        # named by its content: stores of other texts may lie in the same folder
        return {
            **known,
            "texts": f"texts-{tokens[:8]}.txt",
            "tokens_sha256": tokens,
            "torch": str(torch.__version__),
        }

    def _attributes(self, hook: Hook, facts: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "tokens", "hook": str(hook), "layer": hook.layer, **facts}

    def _id(self, hook: Hook, facts: dict[str, Any]) -> str:
        shape = [self.windows.n_rows, self.model.n_features, self.dtype, self.chunk_rows]
        return job_id({"capture": self._attributes(hook, facts), "shape": shape, "names": self.texts.names})

    def _content(self) -> bytes:
        """Return the file of texts: the piece of text of each window, one per line."""
        return "".join(f"{piece.translate(_ONE_LINE)}\n" for piece in self.windows.pieces).encode(errors="replace")

    def _aligned(self) -> dict[str, Aligned | npt.DTypeLike]:
        columns = self.windows.beside(0, 0, self.texts.label)
        out: dict[str, Aligned | npt.DTypeLike] = {name: array.dtype for name, array in columns.items()}
        if "label" in out:
            out["label"] = Aligned("int32", (), {"names": self.texts.names})
        return out

    def _begin(self, hook: Hook, facts: dict[str, Any]) -> Filler:
        path, shape = self.path(hook), (self.windows.n_rows, self.model.n_features)
        require_free(path, self.force)
        aligned = self._aligned()
        row_bytes = shape[1] * stored_dtype(self.dtype).itemsize + 4 * len(aligned)
        rows = self.chunk_rows or min(default_chunk_rows(shape[1], stored_dtype(self.dtype).itemsize), shape[0])
        require_room(path, shape[0], rows, row_bytes)
        writer = begin_or_resume(
            lambda resume: create_activations(
                path,
                *shape,
                self.dtype,
                chunk_rows=rows,
                attributes=self._attributes(hook, facts),
                aligned=aligned,
                overwrite=self.force,
                resume=resume,
            ),
            self.force,
        )
        return Filler(writer, shape[0])

    def _fill(self, fillers: dict[Hook, Filler], batch_tokens: int) -> int:
        """Run the blocks that hold rows of missing chunks; return the tokens that were run."""
        offset, total = self.windows.row_offset, self.windows.n_rows
        blocks = plan_blocks(self.windows.lengths, BATCHES_PER_BLOCK * batch_tokens)
        spans = [(int(offset[first]), int(offset[last])) for first, last in blocks]
        began, tokens = time.perf_counter(), 0
        wanted = [any(f.wants(a, b) for f in fillers.values()) for a, b in spans]
        todo = sum(b - a for (a, b), want in zip(spans, wanted, strict=True) if want)
        tell = self._teller(total - todo, began)
        for (first, last), (a, _), want in zip(blocks, spans, wanted, strict=True):
            if not want:
                continue
            rows = self._block(first, last, list(fillers), batch_tokens, tell)
            beside = self.windows.beside(first, last, self.texts.label)
            for hook, filler in fillers.items():
                filler.put(a, rows[hook], beside)
            tokens += int(self.windows.offset[last] - self.windows.offset[first])
        for filler in fillers.values():
            filler.settle()
        self.busy = time.perf_counter() - began
        return tokens

    def _teller(self, before: int, began: float) -> Callable[[int], None]:
        """Return a function that takes the rows done and emits progress; the first event comes at once."""
        done = 0

        def tell(rows: int) -> None:
            nonlocal done
            done += rows
            pace = done / max(time.perf_counter() - began, 1e-9)
            emit(self.callbacks, JobProgress("capture", before + done, self.windows.n_rows, "tokens", pace))

        tell(0)
        return tell

    def _block(
        self, first: int, last: int, hooks: list[Hook], batch_tokens: int, tell: Callable[[int], None]
    ) -> dict[Hook, npt.NDArray[Any]]:
        """Return the rows of windows first to last at each hook: (n_rows, n_features), as they are stored."""
        offset = self.windows.row_offset[first : last + 1] - self.windows.row_offset[first]
        shape, kind = (int(offset[-1]), self.model.n_features), stored_dtype(self.dtype)
        out = {hook: np.empty(shape, kind) for hook in hooks}
        for batch in plan_batches(self.windows.lengths[first:last], batch_tokens):
            ids, mask = padded(self.windows, [first + w for w in batch], self.model.pad_id)
            found = self.model.activations(torch.from_numpy(ids), torch.from_numpy(mask), hooks)
            kept = torch.from_numpy((mask > 0) & (np.arange(mask.shape[1]) >= self.windows.skip))
            places = np.concatenate([np.arange(offset[w], offset[w + 1]) for w in batch])
            for hook, hidden in found.items():
                out[hook][places] = to_stored(hidden[kept.to(hidden.device)], self.dtype, hook)
            tell(len(places))
        return out


def to_stored(rows: torch.Tensor, dtype: str, hook: Hook) -> npt.NDArray[Any]:
    """Return rows as a store takes them, bfloat16 as its bits; refuse what does not fit.

    Parameters
    ----------
    rows : tensor of shape (n, n_features)
    dtype : {"float32", "bfloat16", "float16"}
    hook : Hook
        For the message.
    """
    narrow = rows.to(getattr(torch, dtype)).cpu()
    if not bool(torch.isfinite(narrow).all()):
        if bool(torch.isfinite(rows).all()):
            top = float(rows.float().abs().max())
            raise InputError(f"activations up to {top:.3g} at {hook} do not fit {dtype}; use bfloat16 or float32")
        raise InputError(f"the model has activations at {hook} that are not finite; run it with dtype float32")
    if dtype == BFLOAT16:
        bits: npt.NDArray[Any] = narrow.view(torch.int16).numpy().view(np.uint16)
        return bits
    out: npt.NDArray[Any] = narrow.numpy()
    return out


class Filler:
    """Cuts consecutive rows into the chunks of a store and writes those that are missing, one behind the other.

    Parameters
    ----------
    writer : ActivationWriter
    n_rows : int
        Rows of the whole store.
    """

    def __init__(self, writer: ActivationWriter, n_rows: int) -> None:
        self.writer, self._n_rows = writer, n_rows
        self._missing = set(writer.missing())
        self._parts: dict[int, list[tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]]] = {}
        self._have: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True)

    def wants(self, first: int, last: int) -> bool:
        """Tell whether rows first to last (not included) belong to a chunk that is missing."""
        size = self.writer.chunk_rows
        return any(i in self._missing for i in range(first // size, -(-last // size)))

    def put(self, first: int, rows: npt.NDArray[Any], beside: dict[str, npt.NDArray[Any]]) -> None:
        """Take rows that begin at number `first`; complete chunks are written while the model continues."""
        size = self.writer.chunk_rows
        for i in range(first // size, -(-(first + len(rows)) // size)):
            if i not in self._missing:
                continue
            part = slice(max(0, i * size - first), (i + 1) * size - first)
            piece = rows[part], {name: array[part] for name, array in beside.items()}
            self._parts.setdefault(i, []).append(piece)
            self._have[i] = self._have.get(i, 0) + len(piece[0])
            if self._have[i] == min(size, self._n_rows - i * size):
                self.settle()
                self._pending = self._pool.submit(self._write, i, self._parts.pop(i))

    def settle(self) -> None:
        """Wait for the chunk that is being written; what went wrong with it is raised here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, i: int, parts: list[tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]]) -> None:
        beside = {name: np.concatenate([b[name] for _, b in parts]) for name in parts[0][1]}
        self.writer.write_chunk(i, np.concatenate([rows for rows, _ in parts]), beside)
