"""Language models: from a model and texts to activations, and from a dictionary back into the model.

| module | does |
|---|---|
| `texts` | reads texts and labels from files |
| `windows` | cuts tokens into windows, windows into batches |
| `model` | opens a model, names its hooks, runs it up to a hook |
| `capture` | writes the activations of hooks to stores |
| `prompts` | the activation at one token of each prompt |
| `reconstruct` | what a dictionary, or an SAE of another tool, makes of activations |
| `loss` | measures the loss with reconstructed activations |
| `logits` | the tokens that an atom promotes and suppresses |
| `rows` | the activations of one text |
| `steering` | adds or removes an atom while the model runs |

Only this folder knows torch and transformers, which the extra `lm` installs. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dbksvd_dask.errors import InputError

_PUBLIC = {
    "LanguageModel": "dbksvd_dask.lm.model",
    "ablate": "dbksvd_dask.lm.steering",
    "atom_logits": "dbksvd_dask.lm.logits",
    "capture_activations": "dbksvd_dask.lm.capture",
    "dictionary_reconstruction": "dbksvd_dask.lm.reconstruct",
    "logits_content": "dbksvd_dask.lm.logits",
    "loss_recovered": "dbksvd_dask.lm.loss",
    "open_model": "dbksvd_dask.lm.model",
    "prompt_activations": "dbksvd_dask.lm.prompts",
    "read_texts": "dbksvd_dask.lm.texts",
    "saelens_reconstruction": "dbksvd_dask.lm.reconstruct",
    "steer": "dbksvd_dask.lm.steering",
    "text_activations": "dbksvd_dask.lm.rows",
    "write_logits": "dbksvd_dask.lm.logits",
}

if TYPE_CHECKING:
    from dbksvd_dask.lm.capture import capture_activations as capture_activations
    from dbksvd_dask.lm.logits import atom_logits as atom_logits
    from dbksvd_dask.lm.logits import logits_content as logits_content
    from dbksvd_dask.lm.logits import write_logits as write_logits
    from dbksvd_dask.lm.loss import loss_recovered as loss_recovered
    from dbksvd_dask.lm.model import LanguageModel as LanguageModel
    from dbksvd_dask.lm.model import open_model as open_model
    from dbksvd_dask.lm.prompts import prompt_activations as prompt_activations
    from dbksvd_dask.lm.reconstruct import dictionary_reconstruction as dictionary_reconstruction
    from dbksvd_dask.lm.reconstruct import saelens_reconstruction as saelens_reconstruction
    from dbksvd_dask.lm.rows import text_activations as text_activations
    from dbksvd_dask.lm.steering import ablate as ablate
    from dbksvd_dask.lm.steering import steer as steer
    from dbksvd_dask.lm.texts import read_texts as read_texts

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dbksvd_dask.lm' has no attribute {name!r}")
    try:
        module = importlib.import_module(_PUBLIC[name])
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("torch", "transformers"):
            raise
        raise InputError(
            f"{name} needs {error.name}, which is not installed; pip install 'dbksvd-dask[lm]'"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
