"""A small language model trained here, on texts of this machine: something to hang a dictionary into offline.

Needs torch and transformer-lens: see saelens_env.sh.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sae_lens import HookedSAETransformer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformer_lens import HookedTransformerConfig
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def make_tokenizer(texts: Sequence[str], folder: str | Path, vocabulary: int = 2048) -> Any:
    """Train a tokenizer of words and punctuation, and keep it in a folder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL.values()))
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(str(folder))
    return load_tokenizer(folder)


def load_tokenizer(folder: str | Path) -> Any:
    """Read a tokenizer that `make_tokenizer` kept."""
    return AutoTokenizer.from_pretrained(str(folder), add_bos_token=True)


def make_model(tokenizer: Any, *, n_layers: int = 2, d_model: int = 128, n_ctx: int = 64, seed: int = 0) -> Any:
    """Make an untrained model; a HookedSAETransformer takes dictionaries at its hooks."""
    cfg = HookedTransformerConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_ctx=n_ctx,
        d_head=32,
        n_heads=d_model // 32,
        d_mlp=4 * d_model,
        act_fn="gelu",
        d_vocab=len(tokenizer),
        device="cpu",
        seed=seed,
    )
    return HookedSAETransformer(cfg, tokenizer=tokenizer)


def token_rows(tokenizer: Any, texts: Sequence[str], n_ctx: int) -> torch.Tensor:
    """Put texts end to end, each after the token that marks a beginning, in rows of `n_ctx` tokens."""
    bos = tokenizer.bos_token_id
    pieces = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    flat = np.concatenate([[bos, *piece] for piece in pieces])
    n_rows = len(flat) // n_ctx
    return torch.from_numpy(flat[: n_rows * n_ctx].reshape(n_rows, n_ctx).astype(np.int64))


def train(model: Any, tokens: torch.Tensor, *, steps: int, batch: int = 32, seed: int = 0) -> list[float]:
    """Train on rows of tokens; gives the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        rows = tokens[torch.randint(len(tokens), (batch,), generator=generator)]
        loss = model(rows, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@torch.no_grad()
def activations(model: Any, tokens: torch.Tensor, hook_name: str, batch: int = 64) -> npt.NDArray[np.float32]:
    """Collect activations at a hook, without the first token of each row: (n, n_features)."""
    parts = []
    for start in range(0, len(tokens), batch):
        _, cache = model.run_with_cache(tokens[start : start + batch], names_filter=hook_name)
        parts.append(cache[hook_name][:, 1:].reshape(-1, model.cfg.d_model).numpy())
    return np.concatenate(parts)
