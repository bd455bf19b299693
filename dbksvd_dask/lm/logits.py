"""The tokens that an atom promotes and suppresses: its direct effect on the logits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dbksvd_dask.lm.model import LanguageModel
from dbksvd_dask.lm.reconstruct import require_width
from dbksvd_dask.store.atomic import write_json
from dbksvd_dask.store.runs import as_dictionary

# Logits computed at a time: 256 MB.
TILE_NUMBERS = 1 << 26


@dataclass(frozen=True, eq=False)
class AtomLogits:
    """Strongest tokens of every atom, strongest first.

    Attributes
    ----------
    positive_token, negative_token : int32 ndarray of shape (n_atoms, n)
        Tokens whose logit a positive coefficient raises and lowers most.
    positive, negative : float32 ndarray of shape (n_atoms, n)
        By how much for a coefficient of 1, up to the scale of the last norm's input, which all tokens share.
    names : dict of int to str
        The tokens in words.
    """

    positive_token: npt.NDArray[np.int32]
    positive: npt.NDArray[np.float32]
    negative_token: npt.NDArray[np.int32]
    negative: npt.NDArray[np.float32]
    names: dict[int, str]

    def of(self, atom: int) -> dict[str, list[tuple[str, float]]]:
        """Return the tokens of one atom in words, with their values."""
        pairs = {
            "positive": zip(self.positive_token[atom].tolist(), self.positive[atom].tolist(), strict=True),
            "negative": zip(self.negative_token[atom].tolist(), self.negative[atom].tolist(), strict=True),
        }
        return {side: [(self.names[token], value) for token, value in found] for side, found in pairs.items()}


def norm_scale(norm: Any, n_features: int) -> tuple[npt.NDArray[np.float32], bool]:
    """Return by what a norm multiplies each feature, (n_features,), and whether it takes the mean off.

    Found by trying, as models differ in what their weights mean (Gemma multiplies by 1 + weight): a norm of x less
    the norm of -x is free of the bias.

    Parameters
    ----------
    norm : LayerNorm or RMSNorm of any make, or None for no norm
    n_features : int
    """
    if norm is None:
        return np.ones(n_features, np.float32), False
    kind = next((p for p in norm.parameters()), torch.zeros(1))
    x = torch.where(torch.arange(n_features) % 2 == 0, 1.0, -1.0)
    if n_features % 2:  # mean 0 for an odd number too
        x[-3:] = torch.tensor([1.0, 1.0, -2.0])
    x = x.to(kind.device) * 1e3  # far above the norm's epsilon
    unit = x / x.square().mean().sqrt()
    with torch.inference_mode():
        odd = (norm(x.to(kind.dtype)[None]) - norm(-x.to(kind.dtype)[None])).float()[0] / 2
        level = torch.ones_like(x) * 1e3
        flat = (norm(level.to(kind.dtype)[None]) - norm(-level.to(kind.dtype)[None])).float()[0] / 2
    scale: npt.NDArray[np.float32] = (odd / unit).cpu().numpy()
    return scale, bool(flat.abs().max() < 1e-2 * odd.abs().max())


def atom_logits(model: LanguageModel, dictionary: Any, n: int = 10) -> AtomLogits:
    """Find the tokens whose logits each atom changes most, straight through the last norm.

    The product of atoms, last norm's scale and output embedding, in tiles: never an array of all atoms by the
    whole vocabulary. What later blocks make of the atom is not in it.

    Parameters
    ----------
    model : LanguageModel
    dictionary : Dictionary, fitted estimator, or path of a dictionary or of the folder of a fit
        Of a hook that writes to the residual stream.
    n : int
        Tokens per atom and side.
    """
    found = as_dictionary(dictionary)
    require_width(found, model.n_features, "the dictionary")
    scale, centred = norm_scale(model.last_norm, model.n_features)
    D = found.atoms.astype(np.float32)
    directions = (D - D.mean(1, keepdims=True) if centred else D) * scale
    weight = model.unembedding.weight
    step = max(1, TILE_NUMBERS // weight.shape[0])
    parts = [_strongest(directions[a : a + step], weight, n) for a in range(0, len(D), step)]
    up, raised, down, lowered = (np.concatenate(column) for column in zip(*parts, strict=True))
    return AtomLogits(up, raised, down, lowered, token_names(model, np.unique(np.concatenate([up, down]))))


def _strongest(directions: npt.NDArray[Any], weight: torch.Tensor, n: int) -> tuple[npt.NDArray[Any], ...]:
    with torch.inference_mode():
        logits = torch.from_numpy(directions).to(weight) @ weight.T
        most = min(n, logits.shape[1])
        out: list[npt.NDArray[Any]] = []
        for largest in (True, False):
            value, token = logits.float().topk(most, dim=1, largest=largest)
            out += [token.cpu().numpy().astype(np.int32), value.cpu().numpy()]
    return tuple(out)


def token_names(model: LanguageModel, tokens: npt.NDArray[Any]) -> dict[int, str]:
    """Return tokens in words; rows of the embedding without a token by their number."""
    size = len(model.tokenizer)
    known = [int(token) for token in tokens if token < size]
    words = [model.tokenizer.decode([token]) for token in known]
    unknown = {int(token): f"<{int(token)}>" for token in tokens if token >= size}
    return dict(zip(known, words, strict=True)) | unknown


def write_logits(path: str | os.PathLike[str], model: LanguageModel, dictionary: Any, n: int = 10) -> str:
    """Write the strongest tokens of every atom as JSON, for `write_report(logits=...)`; see `atom_logits`.

    Returns
    -------
    str
        The path.
    """
    write_json(path, logits_content(model, dictionary, n))
    return os.fspath(path)


def logits_content(model: LanguageModel, dictionary: Any, n: int = 10) -> dict[str, Any]:
    """Return what `write_logits` writes; reports and exports take it as `logits`."""
    found = atom_logits(model, dictionary, n)
    atoms = [{"atom": i, **found.of(i)} for i in range(len(found.positive))]
    return {"model": model.name, "n_atoms": len(atoms), "atoms": atoms}
