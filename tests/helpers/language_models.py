"""Small language models made on the spot: random weights, a tokenizer trained on a few sentences."""

from __future__ import annotations

import numpy as np

SUBJECTS = ["the cat", "a dog", "my friend", "the old house", "one bird", "the queen"]
VERBS = ["sat on", "ran to", "looked at", "forgot", "painted", "met"]
OBJECTS = ["the mat", "a river", "the market", "some bread", "the café", "her sister"]


def sentences(n, seed=0):
    """Texts of one to six short sentences."""
    rng = np.random.default_rng(seed)
    one = lambda: " ".join(str(rng.choice(words)) for words in (SUBJECTS, VERBS, OBJECTS)) + "."  # noqa: E731
    return ["\n".join(one() for _ in range(rng.integers(1, 7))) for _ in range(n)]


def make_tokenizer(bos="<bos>"):
    """A byte-level tokenizer of about 300 tokens; `bos=None` for one without a beginning token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences(50), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, pad_token="<pad>")


def make_network(family="llama", vocabulary=320, n_layers=2, seed=0):
    """A causal model of 2 blocks and width 32, of one of four families."""
    import torch
    import transformers

    torch.set_num_threads(1)  # so small that threads only wait for each other
    torch.manual_seed(seed)
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    heads = {"num_key_value_heads": 2}
    names = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**common, **heads}),
        "gemma3": (
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            {**common, **heads, "head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 20.0},
        ),
        "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", common),
        "gpt2": (
            "GPT2LMHeadModel",
            "GPT2Config",
            {
                "vocab_size": vocabulary,
                "n_embd": 32,
                "n_layer": n_layers,
                "n_head": 2,
                "n_positions": 64,
                "initializer_range": 0.2,
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
        ),
    }
    network, config, options = names[family]
    return getattr(transformers, network)(getattr(transformers, config)(**options)).eval()


def make_model(family="llama", **options):
    """A `LanguageModel` with its tokenizer."""
    from dbksvd_dask.lm import LanguageModel

    return LanguageModel(make_network(family, **options), make_tokenizer(), family)


def save_model(folder, family="llama", steps=0, **options):
    """Write a model directory as Hugging Face has it, after some steps of training; return its path."""
    network, tokenizer = make_network(family, **options), make_tokenizer()
    teach(network, tokenizer, steps)
    network.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def teach(network, tokenizer, steps):
    """Train a model on sentences, so that it predicts better than without an activation."""
    import torch

    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    for step in range(steps):
        given = tokenizer(sentences(16, seed=1000 + step), padding=True, return_tensors="pt")["input_ids"]
        given = torch.cat([torch.zeros(len(given), 1, dtype=given.dtype), given[:, :40]], 1)
        labels = torch.where(given == tokenizer.pad_token_id, -100, given)
        adam.zero_grad()
        network(given, labels=labels).loss.backward()
        adam.step()
    network.eval()
