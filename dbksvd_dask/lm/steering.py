"""Steering: add an atom to an activation, or take it out, while the model runs or generates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dbksvd_dask.errors import InputError
from dbksvd_dask.lm.model import Hook, LanguageModel, first_of, hooked, with_first
from dbksvd_dask.lm.reconstruct import Coder, require_width
from dbksvd_dask.store.runs import as_dictionary

WAYS = ("code", "projection")
Change = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def steer(
    model: LanguageModel,
    hook: str | Hook,
    dictionary: Any,
    atom: int,
    strength: float,
    *,
    skip_first: bool = True,
) -> Iterator[LanguageModel]:
    """Add an atom to the activation at a hook, in everything the model does inside the block.

    Parameters
    ----------
    model : LanguageModel
    hook : str
        Such as "resid:8": where the dictionary was fitted.
    dictionary : Dictionary, fitted estimator, or path of a dictionary or of the folder of a fit
    atom : int
    strength : float
        Coefficient that is added; negative to push the other way. Coefficients of the codes give the scale.
    skip_first : bool
        Leave the first token of a text alone, as capture does with the beginning token.

    Yields
    ------
    LanguageModel

    Examples
    --------
    >>> with steer(model, "resid:8", "run", atom=17, strength=400.0):  # doctest: +SKIP
    ...     print(model.generate("The weather is"))
    """
    direction = _direction(model, dictionary, atom)
    with changed(model, hook, lambda rows: rows + strength * direction.to(rows), skip_first):
        yield model


@contextlib.contextmanager
def ablate(
    model: LanguageModel,
    hook: str | Hook,
    dictionary: Any,
    atom: int,
    *,
    how: str = "code",
    k: int | None = None,
    skip_first: bool = True,
) -> Iterator[LanguageModel]:
    """Take an atom out of the activation at a hook, in everything the model does inside the block.

    Parameters
    ----------
    model, hook, dictionary, atom, skip_first
        As for `steer`.
    how : {"code", "projection"}
        Subtract the atom with the coefficient that it has in the code of the activation, which is none where the
        atom is not active; or make the activation, less the dictionary's mean, orthogonal to the atom everywhere.
    k : int, optional
        Most nonzeros of the code; default: as the dictionary was fitted.

    Yields
    ------
    LanguageModel
    """
    if how not in WAYS:
        raise InputError(f"how={how!r} is not known; use one of {', '.join(WAYS)}")
    direction = _direction(model, dictionary, atom)
    change = _projection(dictionary, direction) if how == "projection" else _code(dictionary, k, atom, direction)
    with changed(model, hook, change, skip_first):
        yield model


def _projection(dictionary: Any, direction: torch.Tensor) -> Change:
    mean = as_dictionary(dictionary).mean
    level = 0.0 if mean is None else float(mean @ direction.double().numpy())

    def change(rows: torch.Tensor) -> torch.Tensor:
        d = direction.to(rows)
        return rows - ((rows @ d) - level)[:, None] * d

    return change


def _code(dictionary: Any, k: int | None, atom: int, direction: torch.Tensor) -> Change:
    coder = Coder(dictionary, k)

    def change(rows: torch.Tensor) -> torch.Tensor:
        found, coefficient = coder.codes(rows.float().cpu().numpy())
        own = np.where(found == atom, coefficient, 0).sum(1).astype(np.float32)
        return rows - torch.from_numpy(own).to(rows)[:, None] * direction.to(rows)

    return change


def _direction(model: LanguageModel, dictionary: Any, atom: int) -> torch.Tensor:
    found = as_dictionary(dictionary)
    require_width(found, model.n_features, "the dictionary")
    if not 0 <= atom < found.n_atoms:
        raise InputError(f"atom {atom} does not exist; the dictionary has atoms 0 to {found.n_atoms - 1}")
    return torch.from_numpy(found.atoms[atom].astype(np.float32))


@contextlib.contextmanager
def changed(model: LanguageModel, hook: str | Hook, change: Change, skip_first: bool = True) -> Iterator[None]:
    """Change the activation at a hook by a function of rows (n, n_features), for the time of a block of code.

    Parameters
    ----------
    model : LanguageModel
    hook : str
    change : callable
        Given rows as a tensor, returns as many.
    skip_first : bool
        Leave the first token of a text alone.
    """
    where = _Places(skip_first)

    def put(module: Any, inputs: Any, output: Any) -> Any:
        activation = first_of(output).clone()
        chosen = where.chosen.to(activation.device).expand(activation.shape[:2])
        activation[chosen] = change(activation[chosen])
        return with_first(output, activation)

    handle = model.model.register_forward_pre_hook(where.see, with_kwargs=True)
    try:
        with hooked([(model.module(model.hook(hook)), put)]):
            yield
    finally:
        handle.remove()


class _Places:
    """Which tokens of the call at work are changed; seen from the arguments of the whole model."""

    def __init__(self, skip_first: bool) -> None:
        self._skip_first = skip_first
        self.chosen = torch.ones(1, 1, dtype=torch.bool)

    def see(self, module: Any, args: Any, kwargs: Any) -> None:
        """Look at a call of the model: while it generates, tokens before it lie in its cache."""
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs["inputs_embeds"] if given is None else given
        past, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        before = int(past.get_seq_length()) if past is not None else 0
        position = before + torch.arange(given.shape[1])[None]
        # texts of a batch may be padded before their first token
        first = mask.argmax(1)[:, None].cpu() if mask is not None and mask.dim() == 2 else torch.zeros(1, 1)
        self.chosen = position > first if self._skip_first else position >= first
