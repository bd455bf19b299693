"""Small runs, codes and stores for the tests of the report."""

from __future__ import annotations

import numpy as np

from dbksvd_dask.demo.photographs import load_photos, plan_patches
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.encoding import encode
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.store.activations import Aligned, create_activations
from dbksvd_dask.store.dictionary import save_dictionary

WORDS = "ash birch cedar elm fir larch maple oak pine rowan spruce willow".split()
HISTORY = {
    "relative_error_before": [0.9, 0.7],
    "relative_error": [0.8, 0.6],
    "validation_relative_error": [0.82, 0.65],
    "variance_explained_before": [0.1, 0.3],
    "variance_explained": [0.2, 0.4],
    "validation_variance_explained": [0.18, 0.35],
}


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def text_samples(n=300, n_features=16, seed=0):
    """Texts of three words, and samples that are sums of the words' directions."""
    rng = np.random.default_rng(seed)
    directions = unit(rng.standard_normal((len(WORDS), n_features)))
    chosen = np.array([rng.choice(len(WORDS), 3, replace=False) for _ in range(n)])
    weight = rng.uniform(0.5, 1.5, chosen.shape) * rng.choice([1, 1, 1, -1], chosen.shape)
    Y = (weight[:, :, None] * directions[chosen]).sum(axis=1)
    texts = [" ".join(WORDS[w] for w in row) for row in chosen]
    return Y.astype(np.float32), texts, directions


def dictionary_of(atoms, k=3, mean=None, **params):
    return Dictionary(atoms, mean, {"n_atoms": len(atoms), "k": k, **params}, "made up", 2, dict(HISTORY))


def text_report_parts(n=300, dead=2, seed=0):
    """Dictionary of the words' directions and some that no sample uses, codes and texts."""
    Y, texts, directions = text_samples(n, seed=seed)
    dictionary = dictionary_of(directions)
    codes = encode(Y, directions, 3)
    if dead:
        extra = unit(np.random.default_rng(9).standard_normal((dead, directions.shape[1])))
        dictionary = dictionary_of(np.concatenate([directions, extra]))
        codes.attrs["n_atoms"] = len(dictionary.atoms)
    return dictionary, codes, texts, Y


def token_store(folder, n_texts=40, shuffled=False, long_text=False):
    """Store with one row per word of each text, its characters and a category; path, texts and rows."""
    texts = text_samples(n_texts)[1]
    texts[3] = "\U0001f333 " + texts[3]
    if long_text:
        texts[5] = "x" * 2000 + " oak " + "y" * 2000
    rows, text, start, end = [], [], [], []
    rng = np.random.default_rng(1)
    directions = {w: unit(rng.standard_normal((1, 16)))[0] for w in WORDS}
    for number, line in enumerate(texts):
        at = 0
        for word in line.split(" "):
            rows.append(directions.get(word, directions["oak"]) * rng.uniform(1, 2))
            text.append(number)
            start.append(at)
            end.append(at + len(word))
            at += len(word) + 1
    order = rng.permutation(len(rows)) if shuffled else np.arange(len(rows))
    aligned = {"text": np.array(text), "start": np.array(start), "end": np.array(end)}
    aligned["category"] = np.array(text) % 3
    _, first = np.unique(text, return_index=True)
    aligned["position"] = np.arange(len(text)) - first[text]
    columns = {name: values[order] for name, values in aligned.items()}
    path = write_store(folder / "tokens.zarr", np.array(rows, np.float32)[order], columns, {"kind": "tokens"})
    (folder / "tokens.txt").write_text("".join(f"{t}\n" for t in texts), encoding="utf-8")
    return path, texts, columns


def write_store(path, rows, columns, about):
    kinds = {name: Aligned("int32") for name in columns}
    if "category" in columns:
        kinds["category"] = Aligned("int16", (), {"names": ["root", "stem", "leaf"]})
    columns = {name: np.asarray(v, "int16" if name == "category" else "int32") for name, v in columns.items()}
    writer = create_activations(path, *rows.shape, rows.dtype, chunk_rows=64, attributes=about, aligned=kinds)
    for i, a in enumerate(range(0, len(rows), 64)):
        writer.write_chunk(i, rows[a : a + 64], {name: v[a : a + 64] for name, v in columns.items()})
    writer.finish()
    return str(path)


def patch_store(path, patch=8, size=64):
    """Store of patches of the corners of two photographs, in random order."""
    photos = [photo[100 : 100 + size, 100 : 100 + size] for photo in load_photos()]
    plan = plan_patches([p.shape for p in photos], patch, 4)
    rows, aligned = plan.cut(photos, 0, plan.n_samples)
    about = {"kind": "image patches", "patch": patch, "images": ["china.jpg", "flower.jpg"]}
    return write_store(path, rows, aligned, about), photos


def encoded(folder, store, n_atoms=32, k=3, seed=0, n_features=None):
    """Random dictionary saved, and the codes of a store; paths of both."""
    rng = np.random.default_rng(seed)
    width = n_features or 16
    dictionary = dictionary_of(unit(rng.standard_normal((n_atoms, width))), k)
    run = save_dictionary(folder / "run.zarr", dictionary)
    codes = str(folder / "codes.zarr")
    encode_store(store, run, codes)
    return run, codes
