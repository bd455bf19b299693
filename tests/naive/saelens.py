"""Plain-loop twins of what other tools do with an exported folder."""

import json

import numpy as np
from safetensors.numpy import load_file


def saelens_encode(Y, W_dec, b_dec, config):
    """The `matching_pursuit` encoder of SAELens 6.54 on samples (n, d), in float64: (n, n_latents).

    Every iteration takes the largest positive product with the residual; an iteration that takes a latent again
    counts like any other.
    """
    acts = np.zeros((len(Y), len(W_dec)))
    for i, y in enumerate(Y):
        residual = y.astype(np.float64) - b_dec * config["apply_b_dec_to_input"]
        before = acts[i] != 0
        for _ in range(config["max_iterations"]):
            products = np.maximum(W_dec.astype(np.float64) @ residual, 0.0)
            j = int(products.argmax())
            acts[i, j] += products[j]
            residual = residual - products[j] * W_dec[j]
            if config["stop_on_duplicate_support"] and np.array_equal(acts[i] != 0, before):
                break
            if config["residual_threshold"] > 0 and np.linalg.norm(residual) < config["residual_threshold"]:
                break
            before = acts[i] != 0
    return acts


def saelens_decode(acts, W_dec, b_dec):
    return acts @ W_dec + b_dec


def open_folder(folder):
    """`cfg.json` and the tensors of a SAELens folder."""
    config = json.loads((folder / "cfg.json").read_text())
    return config, load_file(folder / "sae_weights.safetensors")


def pursuit(y, D, k, nonneg=False):
    """Our rule on one sample, with the order of its choices: (coefficients (n_atoms,), atoms chosen)."""
    x, residual, chosen = np.zeros(len(D)), y.astype(np.float64), []
    for _ in range(4 * k):
        p = D.astype(np.float64) @ residual
        j = int((p if nonneg else np.abs(p)).argmax())
        if (nonneg and p[j] <= 0) or p[j] == 0 or (j not in chosen and len(set(chosen)) == k):
            break
        x[j] += p[j]
        residual = residual - p[j] * D[j]
        chosen.append(j)
    return x, chosen


def read_card(text):
    """The front matter of a model card as lines, and its body."""
    assert text.startswith("---\n")
    head, _, body = text[4:].partition("\n---\n")
    return head.splitlines(), body
