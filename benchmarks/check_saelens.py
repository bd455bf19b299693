"""Exported dictionaries, loaded by the real SAELens and compared with our own encoder on real rows.

    sh benchmarks/saelens_env.sh saelens-env
    saelens-env/bin/python -m benchmarks.check_saelens rows.npy --out check.json

`rows.npy` holds activations (n_samples, n_features). A signed and a non-negative dictionary are learned from all
but the last rows, exported in both forms, opened with ``SAE.load_from_disk`` and run on the last `--n-rows`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sae_lens
import torch

import dbksvd_dask.export.saelens_plugin  # registers the class of our own
from benchmarks import tiny_model
from dbksvd_dask import DBKSVD, codes_to_csr, encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.export.torch_pursuit import pursue
from dbksvd_dask.plan.encoder import EncodeSpec

Array = npt.NDArray[Any]
NAMES = {"model_name": "tiny", "hook_name": "blocks.0.hook_resid_post"}


def learn(Y: Array, *, n_atoms: int, k: int, n_iter: int, nonneg: bool) -> Dictionary:
    """Fit a dictionary."""
    model = DBKSVD(n_atoms, k, n_iter=n_iter, batch_size=16384, nonneg=nonneg, validation=0).fit(Y)
    params = {"n_atoms": n_atoms, "k": k, "nonneg": nonneg, "center": True, "encoder": "mp", "refit": False}
    return Dictionary(model.components_, model.mean_, params, iteration=n_iter)


def of_k_steps(Y: Array, dictionary: Dictionary, k: int, nonneg: bool) -> Array:
    """Codes of a pursuit that is stopped after k steps, as SAELens stops, in float64: (n, n_atoms)."""
    D, residual = dictionary.atoms.astype(np.float64), Y - np.asarray(dictionary.mean, np.float64)
    codes, rows = np.zeros((len(Y), len(D))), np.arange(len(Y))
    for _ in range(k):
        products = residual @ D.T
        chosen = (products if nonneg else np.abs(products)).argmax(axis=1)
        step = products[rows, chosen]
        if nonneg:
            step = np.maximum(step, 0.0)
        codes[rows, chosen] += step
        residual -= step[:, None] * D[chosen]
    return codes


def compare(theirs: Array, ours: Array) -> dict[str, float]:
    """Share of rows with the same support, and the largest difference of coefficients in those."""
    same = ((theirs != 0) == (ours != 0)).all(axis=1)
    return {
        "rows": len(same),
        "same_support": float(same.mean()),
        "largest_difference": float(np.abs(theirs - ours)[same].max(initial=0.0)),
        "rows_within_1e-4": float((np.abs(theirs - ours).max(axis=1) <= 1e-4).mean()),
    }


@torch.no_grad()
def check(dictionary: Dictionary, Y: Array, folder: Path) -> dict[str, Any]:
    """Export in both forms, load, encode, decode, compare."""
    k, nonneg, n_atoms = dictionary.params["k"], dictionary.params["nonneg"], dictionary.n_atoms
    ours = codes_to_csr(encode(Y, dictionary.atoms, k, mean=dictionary.mean, nonneg=nonneg)).toarray()
    again = ours @ dictionary.atoms + dictionary.mean
    report: dict[str, Any] = {}
    for form in ("builtin", "plugin"):
        result = export_saelens(dictionary, folder / f"{form}-{nonneg}", form=form, **NAMES)
        sae = sae_lens.SAE.load_from_disk(result.path)
        acts = sae.encode(torch.from_numpy(Y))
        decoded = sae.decode(acts).numpy()
        codes = acts.numpy()
        if result.stacked:
            codes = codes[:, :n_atoms] - codes[:, n_atoms:]
        metadata = sae.cfg.metadata
        report[form] = {
            "class": type(sae).__name__,
            **compare(codes, ours),
            "largest_difference_decoded": float(
                np.abs(decoded - again)[((codes != 0) == (ours != 0)).all(axis=1)].max(initial=0.0)
            ),
            "relative_error": float(np.mean(np.linalg.norm(Y - decoded, axis=1) / np.linalg.norm(Y, axis=1))),
            "metadata_intact": {name: metadata[name] for name in NAMES} == NAMES,
        }
        if form == "builtin":
            report["builtin_against_k_steps"] = compare(codes, of_k_steps(Y, dictionary, k, nonneg))
    centred = torch.from_numpy((Y - np.asarray(dictionary.mean)).astype(np.float32))
    by_torch = pursue(centred, torch.from_numpy(dictionary.atoms), EncodeSpec(k, nonneg=nonneg)).numpy()
    report["plugin_with_gradients"] = compare(by_torch, ours)
    report["our_relative_error"] = float(np.mean(np.linalg.norm(Y - again, axis=1) / np.linalg.norm(Y, axis=1)))
    return report


@torch.no_grad()
def check_hooks(folder: Path) -> dict[str, Any]:
    """Hang both forms into a tiny model; say under which names the cache has their latents."""
    texts = ["the cat sat on the mat", "a dog ran in the park", "birds sing when the sun is up"] * 20
    tokenizer = tiny_model.make_tokenizer(texts, folder / "tokenizer")
    model = tiny_model.make_model(tokenizer, d_model=64, n_ctx=16)
    tokens = tiny_model.token_rows(tokenizer, texts, 16)
    Y = tiny_model.activations(model, tokens, NAMES["hook_name"])
    dictionary = learn(Y, n_atoms=96, k=4, n_iter=5, nonneg=False)
    report: dict[str, Any] = {}
    for form in ("builtin", "plugin"):
        result = export_saelens(dictionary, folder / f"hooks-{form}", form=form, **NAMES)
        sae = sae_lens.SAE.load_from_disk(result.path)
        _, cache = model.run_with_cache_with_saes(tokens[:4], saes=[sae])
        name = f"{NAMES['hook_name']}.hook_sae_acts_post"
        report[form] = {"hook_sae_acts_post": name in cache}
        if name in cache:
            acts = cache[name].numpy().reshape(-1, 96)
            _, plain = model.run_with_cache(tokens[:4], names_filter=NAMES["hook_name"])
            rows = plain[NAMES["hook_name"]].reshape(-1, 64).numpy()
            ours = codes_to_csr(encode(rows, dictionary.atoms, 4, mean=dictionary.mean)).toarray()
            report[form].update(shape=list(cache[name].shape), **compare(acts, ours))
            report[form]["steered"] = _steers(model, sae, tokens[:4], name)
    return report


def _steers(model: Any, sae: Any, tokens: torch.Tensor, name: str) -> bool:
    """Tell whether setting latents to zero at the hook changes what the model says."""
    plain = model.run_with_saes(tokens, saes=[sae])
    with model.saes(saes=[sae]):
        steered = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda acts, hook: torch.zeros_like(acts))])
    return not torch.allclose(plain, steered, atol=1e-4)


def run(Y: Array, *, n_rows: int = 2000, n_atoms: int = 1024, k: int = 16, n_iter: int = 4) -> dict[str, Any]:
    """Do the whole check on activations (n_samples, n_features)."""
    Y = np.asarray(Y, np.float32)
    report: dict[str, Any] = {
        "sae_lens": sae_lens.__version__,
        "plugin": dbksvd_dask.export.saelens_plugin.PLUGIN_ARCHITECTURE,
        "n_atoms": n_atoms,
        "k": k,
        "n_features": Y.shape[1],
    }
    with tempfile.TemporaryDirectory() as folder:
        for nonneg in (False, True):
            dictionary = learn(Y[:-n_rows], n_atoms=n_atoms, k=k, n_iter=n_iter, nonneg=nonneg)
            report["nonnegative" if nonneg else "signed"] = check(dictionary, Y[-n_rows:], Path(folder))
        report["hooks"] = check_hooks(Path(folder))
    return report


def main() -> None:
    """Read arguments, run, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="activations, a .npy file (n_samples, n_features)")
    parser.add_argument("--n-rows", type=int, default=2000)
    parser.add_argument("--n-atoms", type=int, default=1024)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--n-iter", type=int, default=4)
    parser.add_argument("--limit", type=int, default=40000, help="rows of the file that are used at most")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    Y = np.load(args.rows, mmap_mode="r")[-args.limit :]
    report = run(Y, n_rows=args.n_rows, n_atoms=args.n_atoms, k=args.k, n_iter=args.n_iter)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
