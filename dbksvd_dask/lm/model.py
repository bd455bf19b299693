"""A causal language model with named hooks: run it up to a hook, or with something else put in its place.

| hook | the activation |
|---|---|
| `resid:8` | the residual stream after block 8, counted from 0 |
| `mlp:8` | what the MLP of block 8 adds to it |
| `attn:8` | what the attention of block 8 adds to it |

Where a norm follows the MLP or the attention before the sum, as in Gemma 2 and 3, the hook is after that norm.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbksvd_dask.errors import DeviceError, InputError, StoreError, brief

KINDS = ("resid", "mlp", "attn")
MODEL_DTYPES = ("float32", "bfloat16", "float16", "auto")
# How the modules of a block and the last norm are called in the models of transformers.
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "feedforward")
_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_LAST_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "ln_out")


@dataclass(frozen=True, order=True)
class Hook:
    """A place in a model: a kind of `KINDS` and a block."""

    kind: str
    layer: int

    def __str__(self) -> str:
        """As it is typed, such as resid:8."""
        return f"{self.kind}:{self.layer}"


class _Stop(Exception):  # noqa: N818 - no error: it ends a forward pass of which the rest is not needed
    """Leaves a forward pass."""


class LanguageModel:
    """A causal model of transformers and its tokenizer.

    Parameters
    ----------
    model : PreTrainedModel
        With a head: AutoModelForCausalLM, or one that was made by hand.
    tokenizer : PreTrainedTokenizer
    name : str
        For messages and provenance.
    sha256 : str, optional
        Checksum of its weights, for provenance.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "model", sha256: str | None = None) -> None:
        self.model, self.tokenizer, self.name, self.sha256 = model.eval(), tokenizer, name, sha256
        self.config = model.config.get_text_config()
        self._parent, self.blocks = _find_blocks(model, int(self.config.num_hidden_layers))
        self.n_features = int(self.config.hidden_size)
        self.n_layers = len(self.blocks)
        _check_vocabulary(self)

    @property
    def device(self) -> Any:
        """Where it runs."""
        return self.model.get_input_embeddings().weight.device

    @property
    def n_positions(self) -> int | None:
        """Most tokens of a window, where positions are learned; None for a model without such a limit."""
        learned = [
            int(module.num_embeddings)
            for name, module in self.model.named_modules()
            if hasattr(module, "num_embeddings") and ("wpe" in name or "position" in name)
        ]
        return min(learned, default=None)

    @property
    def n_embeddings(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def pad_id(self) -> int:
        """A token id to fill up batches with; it never counts."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None and pad < self.n_embeddings else 0

    @property
    def last_norm(self) -> Any:
        """The norm before the output embedding; None for a model without one."""
        return _child(self._parent, _LAST_NORM)

    @property
    def unembedding(self) -> Any:
        """The module that makes logits of the last hidden layer."""
        return self.model.get_output_embeddings()

    # -- hooks ----------------------------------------------------------------

    def hooks(self) -> list[Hook]:
        """Return every hook that the model has."""
        return [Hook(kind, i) for kind in KINDS for i, b in enumerate(self.blocks) if _module(b, kind) is not None]

    def hook(self, given: str | Hook) -> Hook:
        """Read the name of a hook, such as "resid:8"; refuse one that the model does not have."""
        if isinstance(given, Hook):
            found: Hook | None = given
        else:
            matched = re.fullmatch(r"(\w+)[:.-](\d+)", given.strip())
            found = Hook(matched[1], int(matched[2])) if matched else None
        if found not in self.hooks():
            raise InputError(f"hook {str(given)!r} does not exist in {self.name}; it has {self._listed()}")
        return found  # type: ignore[return-value]

    def _listed(self) -> str:
        layers = {kind: [hook.layer for hook in self.hooks() if hook.kind == kind] for kind in KINDS}
        return ", ".join(f"{kind}:{at[0]} to {kind}:{at[-1]}" for kind, at in layers.items() if at)

    def module(self, hook: Hook) -> Any:
        """Return the module whose output is the activation."""
        return _module(self.blocks[hook.layer], hook.kind)

    # -- running --------------------------------------------------------------

    def activations(
        self, ids: torch.Tensor, mask: torch.Tensor, hooks: Sequence[Hook]
    ) -> dict[Hook, torch.Tensor]:
        """Run the model just as far as the last of some hooks.

        Parameters
        ----------
        ids, mask : int64 tensor of shape (n_windows, n_tokens)
            Padded at the end; mask is 1 for tokens and 0 for padding.
        hooks : sequence of Hook

        Returns
        -------
        dict of Hook to tensor of shape (n_windows, n_tokens, n_features)
        """
        found: dict[Hook, torch.Tensor] = {}

        def keep(hook: Hook) -> Callable[..., None]:
            def see(module: Any, inputs: Any, output: Any) -> None:
                found[hook] = first_of(output)
                if len(found) == len(hooks):
                    raise _Stop

            return see

        with hooked((self.module(hook), keep(hook)) for hook in hooks), torch.inference_mode():
            with contextlib.suppress(_Stop):
                self.forward(ids, mask)
        return found

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Run the whole model; a batch without padding goes without a mask, which is faster."""
        given = {} if bool(mask.all()) else {"attention_mask": mask.to(self.device)}
        return self.model(input_ids=ids.to(self.device), use_cache=False, **given)

    def last_hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the model up to the output embedding: (n_windows, n_tokens, n_features), after the last norm."""
        found: list[torch.Tensor] = []

        def see(module: Any, inputs: Any) -> None:
            found.append(inputs[0])
            raise _Stop

        handle = self.unembedding.register_forward_pre_hook(see)
        try:
            with contextlib.suppress(_Stop), torch.inference_mode():
                self.forward(ids, mask)
        finally:
            handle.remove()
        return found[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Make logits of last hidden states: (n, n_features) to (n, n_tokens of the vocabulary), float32."""
        out = self.unembedding(hidden).float() * float(getattr(self.config, "logit_scale", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return out if not cap else torch.tanh(out / cap) * cap

    def generate(self, prompt: str, n_tokens: int = 30, *, temperature: float = 0.0, seed: int = 0) -> str:
        """Continue a text; return what was added.

        Parameters
        ----------
        prompt : str
        n_tokens : int
            Most tokens to add.
        temperature : float
            0 takes the likeliest token each time; above, tokens are drawn by `seed`.
        seed : int
        """
        begin = [] if self.tokenizer.bos_token_id is None else [int(self.tokenizer.bos_token_id)]
        ids = [*begin, *self.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        if not ids:
            raise InputError("the prompt has no token; give some text to continue")
        given = torch.tensor([ids], device=self.device)
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature > 0
            else {"do_sample": False}
        )
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            out = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=n_tokens,
                pad_token_id=self.pad_id,
                **how,
            )
        text: str = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return text

    def check_logits(self) -> None:
        """Refuse a model whose logits are made otherwise than `logits` does."""
        ids = torch.arange(min(4, self.n_embeddings))[None]
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            whole = self.forward(ids, mask).logits[0].float()
            ours = self.logits(self.last_hidden(ids, mask)[0])
        if not torch.allclose(whole, ours, rtol=1e-3, atol=1e-3 * float(whole.abs().max())):
            raise InputError(
                f"{self.name} makes its logits in a way that is not known here; losses would be wrong"
            )


# -- modules ---------------------------------------------------------------------------------------------


def _find_blocks(model: Any, n_layers: int) -> tuple[Any, Any]:
    """Find the list of blocks and the module that holds it: the outermost list of as many modules as layers."""
    named = dict(model.named_modules())
    lists = [n for n, m in named.items() if isinstance(m, torch.nn.ModuleList) and len(m) == n_layers]
    if not lists:
        kind = type(model).__name__
        raise InputError(
            f"{kind} has no list of {n_layers} blocks; give a causal transformer such as Llama or GPT-2"
        )
    name = min(lists, key=lambda one: one.count("."))
    return named[name.rpartition(".")[0]], named[name]


def _child(module: Any, names: Sequence[str]) -> Any:
    return next((m for m in (getattr(module, name, None) for name in names) if m is not None), None)


def _module(block: Any, kind: str) -> Any:
    """Return the module of a block whose output is a kind of activation; None if there is none."""
    if kind == "resid":
        return block
    # with a norm after the MLP there is one after the attention too (Gemma 2 and 3, OLMo 2); without, Llama's
    # `post_attention_layernorm` is the one before the MLP
    normed = hasattr(block, "post_feedforward_layernorm")
    after = {"mlp": "post_feedforward_layernorm", "attn": "post_attention_layernorm"}
    if normed and hasattr(block, after[kind]):
        return getattr(block, after[kind])
    return _child(block, _MLP if kind == "mlp" else _ATTENTION)


def first_of(output: Any) -> torch.Tensor:
    """Return the activation in what a module returned: itself, or the first of a tuple."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def with_first(output: Any, activation: torch.Tensor) -> Any:
    """Return what a module returned with another activation in it."""
    return (activation, *output[1:]) if isinstance(output, tuple) else activation


@contextlib.contextmanager
def hooked(pairs: Any) -> Iterator[None]:
    """Register forward hooks, given as (module, function), for the time of a block."""
    with contextlib.ExitStack() as stack:
        for module, function in pairs:
            stack.callback(module.register_forward_hook(function).remove)
        yield


@contextlib.contextmanager
def standing_in(blocks: Sequence[Any], output: Any) -> Iterator[None]:
    """Let blocks return `output` without computing anything, for the time of a block of code."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            had = "forward" in vars(block)
            before = block.forward
            stack.callback(_restore, block, before if had else None)
            block.forward = lambda *args, **kwargs: output
        yield


def _restore(block: Any, forward: Any) -> None:
    if forward is None:
        del block.forward
    else:
        block.forward = forward


# -- opening ---------------------------------------------------------------------------------------------


def open_model(path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
    """Open a model from a Hugging Face directory or a GGUF file; nothing is downloaded.

    Parameters
    ----------
    path : path
        A directory with config.json, weights and tokenizer; or a .gguf file, which holds all three.
    dtype : {"float32", "bfloat16", "float16", "auto"}
        Arithmetic of the model; "auto" for that of its weights.
    device : str
        A torch device, such as "cpu" or "cuda".

    Returns
    -------
    LanguageModel
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in MODEL_DTYPES:
        raise InputError(f"model dtype {dtype!r} is not known; use one of {', '.join(MODEL_DTYPES)}")
    where, folder, options = _locate(Path(path))
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise StoreError(
            f"{where} has no tokenizer that can be opened; save that of the model into it ({brief(error)})"
        ) from error
    try:
        with _quiet():
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=kind, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise StoreError(f"{where} cannot be opened as a causal language model: {brief(error)}") from error
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {device!r} cannot be used: {brief(error)}; try cpu") from error
    name = where.stem if where.suffix == ".gguf" else where.resolve().name
    return LanguageModel(model, tokenizer, name, weights_checksum(where))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing bars on standard error, for the time of a block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _locate(path: Path) -> tuple[Path, Path, dict[str, str]]:
    """Return what was meant, the folder that transformers wants, and its option for a GGUF file."""
    if path.is_dir() and not (path / "config.json").exists():
        packed = sorted(path.glob("*.gguf"))
        if len(packed) != 1:
            found = f"{len(packed)} .gguf files" if packed else "no .gguf file"
            raise StoreError(f"{path} is not a model directory: it has no config.json and {found}; name one file")
        path = packed[0]
    if path.is_file() and path.suffix == ".gguf":
        return path, path.parent, {"gguf_file": path.name}
    if not path.is_dir():
        raise StoreError(f"no model at {path}; give a Hugging Face model directory or a .gguf file")
    return path, path, {}


def weights_checksum(path: Path) -> str:
    """SHA-256 of the weights and the configuration of a model directory, or of a GGUF file."""
    patterns = ("config.json", "*.safetensors", "pytorch_model*.bin")
    files = [path] if path.is_file() else sorted(f for p in patterns for f in path.glob(p))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while block := content.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _check_vocabulary(model: LanguageModel) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows.

    Tokens that were added to the vocabulary do not count: Gemma 3 has one, for images, beyond its embedding.
    """
    if int(model.tokenizer.vocab_size) > model.n_embeddings:
        raise InputError(
            f"the tokenizer has {int(model.tokenizer.vocab_size)} tokens, the embedding of {model.name} only "
            f"{model.n_embeddings} rows; they do not belong together: give the tokenizer of this model"
        )


def check_ids(model: LanguageModel, ids: np.ndarray, longest: int) -> None:
    """Refuse tokens and positions beyond the embeddings, which would read other memory or crash.

    Parameters
    ----------
    model : LanguageModel
    ids : token ids of all windows
    longest : tokens of the longest window
    """
    if model.n_positions is not None and longest > model.n_positions:
        raise InputError(
            f"a window of {longest} tokens is longer than the {model.n_positions} positions of {model.name}; use "
            f"context={model.n_positions} or less"
        )
    if ids.size and int(ids.max()) >= model.n_embeddings:
        raise InputError(
            f"token id {int(ids.max())} is beyond the {model.n_embeddings} rows of the embedding of {model.name}; "
            "give the tokenizer of this model"
        )


def describe(model: LanguageModel) -> Mapping[str, Any]:
    """Return name, checksum and arithmetic of a model, for provenance."""
    dtype = str(model.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return {"model": model.name, "model_sha256": model.sha256, "model_dtype": dtype}
