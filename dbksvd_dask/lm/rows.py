"""The activations of one text, token by token: to ask which atoms are active on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from dbksvd_dask.errors import InputError
from dbksvd_dask.lm.model import Hook, LanguageModel, check_ids
from dbksvd_dask.lm.windows import make_windows, padded


@dataclass(frozen=True, eq=False)
class TextRows:
    """The tokens of a text and their activations.

    Attributes
    ----------
    text : str
    start, end : int32 ndarray of shape (n_tokens,)
        Characters that each token covers.
    rows : float32 ndarray of shape (n_tokens, n_features)
    """

    text: str
    start: npt.NDArray[Any]
    end: npt.NDArray[Any]
    rows: npt.NDArray[Any]


def text_activations(
    model: LanguageModel, text: str, hook: str | Hook, *, context: int = 256, bos: str = "drop"
) -> TextRows:
    """Return the activations of the tokens of a text at a hook.

    Parameters
    ----------
    model : LanguageModel
    text : str
        Tokens beyond `context` are left out.
    hook : str
        Such as "resid:8".
    context, bos
        As for `capture_activations`.

    Returns
    -------
    TextRows
    """
    place = model.hook(hook)
    windows = make_windows(model.tokenizer, [text], context=context, bos=bos, long="cut")
    if windows.start is None or windows.end is None:
        raise InputError(
            f"the tokenizer of {model.name} does not say which characters a token covers; use a fast one"
        )
    check_ids(model, windows.ids, int(windows.lengths.max(initial=0)))
    ids, mask = padded(windows, [0], model.pad_id)
    hidden = model.activations(torch.from_numpy(ids), torch.from_numpy(mask), [place])[place]
    beside = windows.beside(0, 1, None)
    rows = hidden[0, windows.skip :].float().cpu().numpy()
    return TextRows(windows.pieces[0], beside["start"], beside["end"], rows)
