"""Loss recovered and logits of atoms, one text and one atom at a time."""

import numpy as np


def losses(model, texts, hook, reconstruct, context):
    """Loss and divergence per token of each text with a reconstruction; `reconstruct` None for the intact model.

    Returns
    -------
    list of (sum of losses, sum of divergences, number of tokens), one per text
    """
    import torch
    from torch.nn.functional import cross_entropy

    def put(module, inputs, output):
        tensor = output[0] if isinstance(output, tuple) else output
        new = tensor.clone()
        new[0, 1:] = torch.from_numpy(np.array(reconstruct(tensor[0, 1:].numpy()), np.float32))
        return (new, *output[1:]) if isinstance(output, tuple) else new

    out = []
    for text in texts:
        ids = torch.tensor([[model.tokenizer.bos_token_id, *model.tokenizer(text)["input_ids"]][:context]])
        with torch.no_grad():
            intact = model.model(ids).logits[0, 1:-1]
            handle = model.module(model.hook(hook)).register_forward_hook(put) if reconstruct else None
            logits = model.model(ids).logits[0, 1:-1]
            if handle:
                handle.remove()
        p, q = torch.softmax(intact.double(), -1), torch.softmax(logits.double(), -1)
        divergence = float((p * (p / q).log()).sum())
        out.append((float(cross_entropy(logits, ids[0, 2:], reduction="sum")), divergence, ids.shape[1] - 2))
    return out


def logits_of(model, atom):
    """Change of the logits along an atom, far from the origin: (n_vocabulary,).

    The last norm divides by the size of its input, which the atom changes too; along x + t atom, with x orthogonal
    to the atom and of mean 0, that is of second order.
    """
    import torch

    d = torch.from_numpy(atom).double()
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal(len(atom)))
    x -= x.mean()
    flat = d - d.mean()
    x -= (x @ flat) / (flat @ flat) * flat  # of mean 0 too, so x is orthogonal to d as well
    norm, head = model.last_norm.double(), model.unembedding.weight.double()
    x = x / x.square().mean().sqrt()  # the norm divides by 1
    with torch.no_grad():
        step = (norm((x + 1e-2 * d)[None]) - norm((x - 1e-2 * d)[None]))[0] / 2e-2
        out = head @ step
    model.last_norm.float(), model.unembedding.float()
    return out.numpy()
