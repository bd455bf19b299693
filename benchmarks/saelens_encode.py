"""Encoding against SAELens' own matching pursuit: the same rows, the same dictionary, one thread each.

    sh benchmarks/saelens_env.sh saelens-env
    saelens-env/bin/python -m benchmarks.saelens_encode --rows tokens.npy

Both sides are timed on the signed dictionary (which SAELens takes as [D; -D]) and on a non-negative one, from the
array of samples to codes, the gram included. Runs alternate and the best of each counts. SAELens
stops after k steps, ours before the (k+1)-th different atom: ours takes a few steps more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import dask
import numpy as np
import sae_lens
import torch

from benchmarks.common import best_of, machine
from dbksvd_dask import encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.export.saelens import export_saelens

NAMES = {"model_name": "benchmark", "hook_name": "blocks.0.hook_resid_post"}


def dictionary_of_samples(Y: np.ndarray, n_atoms: int, k: int, nonneg: bool) -> Dictionary:
    """Centred samples as atoms: as coherent as real activations are, and there at once."""
    mean = Y.mean(axis=0, dtype=np.float64)
    atoms = Y[np.random.default_rng(0).choice(len(Y), n_atoms, replace=False)] - mean
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    return Dictionary(atoms.astype(np.float32), mean, {"n_atoms": n_atoms, "k": k, "nonneg": nonneg})


def measure(Y: np.ndarray, n_samples: int, n_atoms: int, k: int, repeats: int) -> dict[str, Any]:
    """Time both on the last `n_samples` rows; gives seconds, samples per second and their ratio."""
    torch.set_num_threads(1)
    part = np.ascontiguousarray(Y[-n_samples:], dtype=np.float32)
    result: dict[str, Any] = {}
    for nonneg in (False, True):
        dictionary = dictionary_of_samples(Y[:-n_samples].astype(np.float32), n_atoms, k, nonneg)
        with tempfile.TemporaryDirectory() as folder:
            sae = sae_lens.SAE.load_from_disk(export_saelens(dictionary, Path(folder) / "sae", **NAMES).path)

        def theirs(sae: Any = sae) -> None:
            with torch.no_grad():
                sae.encode(torch.from_numpy(part))

        def ours(dictionary: Dictionary = dictionary, nonneg: bool = nonneg) -> None:
            with dask.config.set(scheduler="synchronous"):
                encode(part, dictionary.atoms, k, mean=dictionary.mean, nonneg=nonneg)

        encode(part[:8], dictionary.atoms, k, nonneg=nonneg)  # compiled before the clock runs
        best = best_of({"ours": ours, "saelens": theirs}, repeats)
        result["nonnegative" if nonneg else "signed"] = {
            "ours": best["ours"] | {"samples_per_s": n_samples / best["ours"]["cpu_s"]},
            "saelens": best["saelens"] | {"samples_per_s": n_samples / best["saelens"]["cpu_s"]},
            "ratio_cpu": best["saelens"]["cpu_s"] / best["ours"]["cpu_s"],
            "ratio_wall": best["saelens"]["wall_s"] / best["ours"]["wall_s"],
        }
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Read arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="activations, a .npy file; default: random ones of 384 features")
    parser.add_argument("--samples", type=int, default=16384, help="rows encoded")
    parser.add_argument("--n-atoms", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if args.rows:
        Y = np.load(args.rows, mmap_mode="r")
    else:
        Y = np.random.default_rng(1).standard_normal((args.samples + 4 * args.n_atoms, 384), np.float32)
    report = {
        "machine": machine(),
        "n_features": Y.shape[1],
        **{name: getattr(args, name) for name in ("samples", "n_atoms", "k", "repeats")},
        **measure(Y, args.samples, args.n_atoms, args.k, args.repeats),
    }
    print(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
