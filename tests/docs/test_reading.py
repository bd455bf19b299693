"""The benchmark of what the strongest samples of an atom have in common, at small size."""

from __future__ import annotations

import numpy as np

from benchmarks import reading
from dbksvd_dask import DBKSVD, encode_store
from dbksvd_dask.jobs.import_ import import_activations

WORDS = ("bird", "house", "river", "engine")


def test_atoms_of_one_word_are_alike_and_atoms_of_random_words_are_not(tmp_path, capsys):
    rng = np.random.default_rng(0)
    cluster = rng.integers(0, 4, 400)
    np.save(tmp_path / "rows.npy", (5 * np.eye(8)[cluster] + 0.1 * rng.standard_normal((400, 8))).astype("f4"))
    for name, words in (("same", cluster), ("mixed", rng.permutation(cluster))):
        (tmp_path / f"{name}.txt").write_text("".join(f"{WORDS[c]}\n" for c in words))
        import_activations(tmp_path / "rows.npy", tmp_path / f"{name}.zarr", texts=tmp_path / f"{name}.txt")
        model = DBKSVD(8, 1, nonneg=True, n_iter=4, validation=40).fit(tmp_path / f"{name}.zarr")
        encode_store(tmp_path / f"{name}.zarr", model, tmp_path / f"{name}-codes.zarr")
    codes = [str(tmp_path / f"{name}-codes.zarr") for name in ("same", "mixed")]
    same, mixed = reading.main([*codes, "--hashing", "--atoms", "6", "--seeds", "0"])
    assert same["similarity"] > 0.9 > mixed["similarity"]
    assert same["unrelated"] < mixed["unrelated"]
    assert capsys.readouterr().out.count("\n") == 4
