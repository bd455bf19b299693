"""Write the files of this folder with the tools whose formats they are. See README.md for versions.

Needs torch, safetensors, datasets, sae-lens and ml_dtypes; run from the root of the repository:
    python -m tests.data.imports.make_fixtures
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from tests.helpers.import_patterns import pattern, values

HERE = Path(__file__).parent


def tensor(shape, dtype, seed=0):
    import torch

    bits = pattern(shape, dtype, seed)
    signed = torch.from_numpy(bits.view(f"int{8 * bits.dtype.itemsize}").copy())
    return signed.view(getattr(torch, dtype))


def write_torch():
    import torch
    from safetensors.torch import save_file

    tokens = torch.arange(28, dtype=torch.int64).reshape(7, 4)
    torch.save(tensor((11, 6), "float16"), HERE / "float16.pt")
    torch.save(tensor((11, 6), "float32"), HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"states": tensor((7, 4, 6), "bfloat16"), "input_ids": tokens}, HERE / "bfloat16.pt")
    save_file(
        {"layer_3": tensor((7, 4, 6), "bfloat16"), "token_ids": tokens, "half": tensor((9, 6), "float16")},
        HERE / "torch.safetensors",
    )


def write_numpy():
    import ml_dtypes

    np.save(HERE / "ml_dtypes_bfloat16.npy", pattern((11, 6), "bfloat16").view(ml_dtypes.bfloat16))


def write_datasets():
    from datasets import Array2D, Dataset, Features, Sequence, Value

    folder = HERE / "hf_dataset"
    shutil.rmtree(folder, ignore_errors=True)
    features = Features(
        {"blocks.0.hook_mlp_out": Array2D((4, 6), "float16"), "token_ids": Sequence(Value("int32"), length=4)}
    )
    tokens = np.arange(28, dtype=np.int32).reshape(7, 4)
    dataset = Dataset.from_dict(
        {"blocks.0.hook_mlp_out": values((7, 4, 6), "float16"), "token_ids": tokens}, features=features
    )
    dataset.save_to_disk(folder, num_shards=2)
    dataset.to_parquet(HERE / "hf_dataset.parquet")


def write_saelens():
    """An activation cache by SAELens' own runner, on a tiny transformer with random weights."""
    import sae_lens.cache_activations_runner as runner
    import torch
    from datasets import Dataset, load_from_disk
    from sae_lens import CacheActivationsRunnerConfig
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    folder = HERE / "saelens_cache"
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    shape = HookedTransformerConfig(
        n_layers=1, d_model=6, n_ctx=4, d_head=3, n_heads=2, d_vocab=32, act_fn="relu", seed=0
    )
    runner.load_model = lambda **_: HookedTransformer(shape)
    tokens = np.random.default_rng(0).integers(0, 32, size=(24, 4))
    config = CacheActivationsRunnerConfig(
        dataset_path="",
        model_name="tiny",
        model_batch_size=4,
        hook_name="blocks.0.hook_mlp_out",
        d_in=6,
        training_tokens=64,
        context_size=4,
        buffer_size_gb=8e-7,  # two batches, so that there are several shards
        shuffle=False,
        prepend_bos=False,
        device="cpu",
        dtype="float32",
        streaming=False,
        new_cached_activations_path=str(folder),
    )
    runner.CacheActivationsRunner(config, Dataset.from_dict({"tokens": tokens.tolist()})).run()
    loaded = load_from_disk(folder).with_format("numpy")
    np.save(HERE / "saelens_expected.npy", np.asarray(loaded["blocks.0.hook_mlp_out"], np.float32))
    np.save(HERE / "saelens_tokens.npy", np.asarray(loaded["token_ids"], np.int32))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_torch()
    write_numpy()
    write_datasets()
    write_saelens()
