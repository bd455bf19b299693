"""Activations at one token of each prompt: what probes and tasks of whole prompts read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dbksvd_dask.errors import InputError
from dbksvd_dask.events import Callback, JobProgress, emit
from dbksvd_dask.lm.model import Hook, LanguageModel, check_ids, open_model
from dbksvd_dask.lm.windows import Windows, beginning_token, padded, plan_batches, token_ids


def prompt_activations(
    model: LanguageModel | str | os.PathLike[str],
    prompts: Sequence[str],
    hook: str | Hook,
    *,
    position: int = -1,
    context: int = 128,
    bos: str = "drop",
    batch_tokens: int = 2048,
    callbacks: Iterable[Callback] = (),
) -> npt.NDArray[np.float32]:
    """Return the activation at one token of each prompt.

    Of a prompt that is too long its end is kept, since that is where a task asks.

    Parameters
    ----------
    model : LanguageModel, or path of a model
    prompts : sequence of str
    hook : str
        Such as "resid:8".
    position : int
        Token to read, counted from the end: -1 is the last.
    context : int
        Most tokens of a prompt, beginning token included.
    bos : {"drop", "keep", "none"}
        Put a beginning token before each prompt, or none ("none").
    batch_tokens : int
        Most tokens of one forward pass, padding included.
    callbacks : iterable of callable
        Called with `JobProgress` events.

    Returns
    -------
    float32 ndarray of shape (n_prompts, n_features)
    """
    opened = model if isinstance(model, LanguageModel) else open_model(model)
    place = opened.hook(hook)
    windows = _windows(opened, prompts, position, context, bos)
    out = np.empty((len(prompts), opened.n_features), np.float32)
    done = 0
    for batch in plan_batches(windows.lengths, batch_tokens):
        ids, mask = padded(windows, batch, opened.pad_id)
        hidden = opened.activations(torch.from_numpy(ids), torch.from_numpy(mask), [place])[place]
        at = torch.from_numpy(windows.lengths[batch] + position).to(hidden.device)
        out[batch] = hidden[torch.arange(len(batch), device=hidden.device), at].float().cpu().numpy()
        done += len(batch)
        emit(tuple(callbacks), JobProgress("prompts", done, len(prompts), "prompts"))
    return out


def _windows(model: LanguageModel, prompts: Sequence[str], position: int, context: int, bos: str) -> Windows:
    """One window per prompt: a beginning token and the last tokens of the prompt."""
    first = beginning_token(model.tokenizer, bos)
    head = [] if first is None else [first]
    room = context - len(head)
    if position >= 0 or -position > room:
        raise InputError(f"position={position} must lie between -{max(room, 1)} and -1 for context={context}")
    cut = [head + ids[-room:] for ids in token_ids(model.tokenizer, prompts)]
    short = next((i for i, ids in enumerate(cut) if len(ids) - len(head) < -position), None)
    if short is not None:
        raise InputError(
            f"prompt {short} has {len(cut[short]) - len(head)} tokens, position={position} asks for one before "
            f"them: {prompts[short][:40]!r}"
        )
    offset = np.concatenate([[0], np.cumsum([len(ids) for ids in cut])]).astype(np.int64)
    ids = np.concatenate([np.array(one, np.int32) for one in cut]) if cut else np.empty(0, np.int32)
    check_ids(model, ids, int(np.diff(offset).max(initial=0)))
    return Windows(ids, offset, np.arange(len(cut), dtype=np.int32), None, None, list(prompts), 0)
