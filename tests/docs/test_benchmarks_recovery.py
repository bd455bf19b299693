"""The benchmarks of recovery, probing and coherence run at tiny size, so that they cannot rot."""

import argparse
import json

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from benchmarks import (
    coherence,
    compositional,
    frontier_picture,
    l0_sweep,
    recovery_picture,
    stability,
    synth_model,
    synthsaebench,
    whitening,
    wordnet_probing,
)
from dbksvd_dask import DBKSVD, codes_to_csr, encode
from tests.naive import kernels


def test_coherence_is_measured_as_by_loops(rng):
    D = kernels.unit_rows(rng.standard_normal((30, 12)))
    D[7] = D[3]
    found = coherence.measure(D, tile=8)
    largest = [max(abs(D[i] @ D[j]) for j in range(30) if j != i) for i in range(30)]
    np.testing.assert_allclose([found["mean"], found["max"]], [np.mean(largest), 1.0], rtol=1e-6)
    assert found["near"] == np.mean(np.array(largest) > 0.9)


def test_coherence_table_has_a_row_per_k_and_kind(rng, tmp_path):
    array = zarr.create_array(str(tmp_path / "y.zarr"), shape=(300, 12), dtype="f4", chunks=(100, 12))
    array[...] = rng.standard_normal((300, 12))
    args = argparse.Namespace(store=tmp_path / "y.zarr", atoms=32, k=[6], n_iter=1, batch_size=200)
    assert len(coherence.table(list(coherence.run(args))).splitlines()) == 4


def test_probing_finds_the_categories(rng):
    tags = np.repeat([0, 1, 2], 100)
    Y = (np.eye(3, 12)[tags] * 4 + rng.standard_normal((300, 12))).astype(np.float32)
    args = argparse.Namespace(atoms=64, k=8, n_iter=2, only=["DB-KSVD, non-negative"])
    (found,) = wordnet_probing.dictionaries(Y, args, 0)
    row = {"method": found.name, "seconds": found.seconds} | wordnet_probing.row_of(found.codes, tags, 0)
    row["VE"] = found.variance_explained(Y)
    assert row["k_sp=5"] > 0.7
    assert 0.5 < row["VE"] < 1
    assert "DB-KSVD, non-negative, plain | 1" in wordnet_probing.table([row])


def test_probing_has_a_row_per_recipe_and_one_with_k_on_average(rng):
    Y = rng.standard_normal((600, 12)).astype(np.float32)
    args = argparse.Namespace(atoms=40, k=4, only=["recipe read"])
    rows = {found.name: found for found in wordnet_probing.recipes(Y, args, 0)}
    names = ("recipe read", "recipe read with k on average")
    assert list(rows) == [name + how for name in names for how in ("", ", linear")]
    most, mean = (np.diff(rows[name].codes.indptr) for name in names)
    assert most.max() <= 4
    assert mean.max() == 5
    assert abs(mean.mean() - 4) < 0.4


def test_recovery_settings_are_legal_and_tabled():
    for name, size in synth_model.SIZES.items():
        for how in synthsaebench.fits(name, 1.5).values():
            params = DBKSVD(size.n_atoms, size.l0[0], n_iter=200, sparsity="mean", **how)._params()
            assert params.slots == 3 * size.l0[0]
    row = dict.fromkeys(synthsaebench.COLUMNS, 0.5) | {"k": 4, "method": "DB-KSVD", "encode": "plain"}
    text = synthsaebench.table([row, row])
    assert "| 4 | DB-KSVD | plain | 2 | 0.500 (0.000) |" in text


def test_cached_samples_are_not_drawn_again(tmp_path, monkeypatch):
    drawn = []

    def draw(folder, size, seed, n_train):
        drawn.append(seed)
        folder.mkdir(parents=True)
        for part in ("train", "test", "truth"):
            np.save(folder / f"{part}.npy", np.ones((4, 3), np.float32))
        csr = sp.csr_array(np.eye(4, 5))
        parts = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr, "shape": csr.shape}
        np.savez(folder / "test_features.npz", **parts)
        (folder / "done.json").write_text("{}")

    monkeypatch.setattr(synth_model, "_draw", draw)
    for _ in range(2):
        samples = synth_model.load_samples(tmp_path, "small", 7, 4)
    assert drawn == [7]
    assert samples.test_features.shape == (4, 5)


def test_picture_of_recovery_has_a_point_per_l0_with_the_range_over_seeds(tmp_path):
    row = {"size": "small", "method": recovery_picture.RECOVER, "encode": "plain", "MCC": 0.5, "F1": 0.5}
    rows = [row | {"k": k, "L0": k + 0.1, "EV": ev} for k, ev in ((6, 0.5), (4, 0.3), (4, 0.4), (4, 0.8))]
    rows.append(row | {"encode": "staged", "k": 4, "L0": 4.0, "EV": 0.0})
    (low, high) = recovery_picture.curve(rows, "small", recovery_picture.RECOVER, "EV")
    np.testing.assert_allclose(low, (4.1, 0.5, 0.3, 0.8))
    np.testing.assert_allclose(high, (6.1, 0.5, 0.5, 0.5))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    recovery_picture.main([str(tmp_path / "picture.png"), "--rows", str(lines)])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_frontier_has_a_point_per_recipe_encoding_and_sae(tmp_path):
    row = {"size": "small", "k": 6, "MCC": 0.5, "F1": 0.6}
    recovery = [
        row | {"method": "recipe read", "encode": "own", "EV": 0.4},
        row | {"method": "recipe read", "encode": "own", "EV": 0.6},
        row | {"method": "recipe read", "encode": "linear", "EV": 0.3},
        row | {"method": "Matryoshka SAE", "encode": "own", "EV": 0.7},
        row | {"method": "DB-KSVD", "encode": "plain", "EV": 0.9},
        row | {"method": "recipe read", "encode": "own", "EV": 0.0, "k": 3},
    ]
    assert frontier_picture.recovery_points(recovery, "F1") == [
        ("read", "own", 0.5, 0.6),
        ("read", "linear", 0.3, 0.6),
        ("Matryoshka SAE", "sae", 0.7, 0.6),
    ]
    probing = [
        {"method": "recipe read", "k_sp=1": 0.8, "VE": 0.6},
        {"method": "recipe read, linear", "k_sp=1": 0.9, "VE": 0.5},
        {"method": "Matryoshka SAE, own encoder", "k_sp=1": 0.7, "VE": 0.8},
        {"method": "Matryoshka SAE, pursuit", "k_sp=1": 0.1},
    ]
    assert [tuple(p) for p in frontier_picture.probing_points(probing)] == [
        ("read", "own", 0.6, 0.8),
        ("read", "linear", 0.5, 0.9),
        ("Matryoshka SAE", "sae", 0.8, 0.7),
    ]
    for name, rows in (("recovery", recovery), ("probing", probing)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    given = [f"--{name}={tmp_path / name}" for name in ("recovery", "probing")]
    frontier_picture.main([str(tmp_path / "picture.png"), *given])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_reaches_every_l0_and_its_own_threshold_gives_the_same_codes(rng):
    Y = (rng.uniform(1, 2, (3000, 30)) * (rng.random((3000, 30)) < 0.1)) @ rng.standard_normal((30, 16))
    Y = (Y + 0.1 * rng.standard_normal(Y.shape)).astype(np.float32)
    model = DBKSVD.recipe("recover", 24, 3, validation=0, batch_size=2000).fit(Y)
    fitted = model.to_dictionary()
    same = l0_sweep.at_threshold(fitted, 3, fitted.threshold, 2000)
    np.testing.assert_allclose(same.weights, fitted.weights, rtol=1e-6)
    for l0 in (2, 4):
        found = l0_sweep.at_l0(fitted, l0, Y, 2000)
        assert codes_to_csr(encode(Y, found)).nnz / len(Y) == pytest.approx(l0, rel=0.03)


def test_alike_is_one_for_the_same_atoms_in_any_order_and_sign(rng):
    D = kernels.unit_rows(rng.standard_normal((12, 30)))
    cosine, shared = stability.alike(D, -D[::-1])
    assert (round(cosine, 9), shared) == (1, 1)
    cosine, shared = stability.alike(D, np.concatenate([D[:6], kernels.unit_rows(rng.standard_normal((6, 30)))]))
    assert 0.5 < cosine < 0.9
    assert shared == 0.5


def test_stability_has_a_row_per_recipe(rng, monkeypatch, tmp_path, capsys):
    Y = rng.standard_normal((600, 12)).astype(np.float32)
    monkeypatch.setattr(stability, "load_samples", lambda *a: argparse.Namespace(train=Y))
    small = synth_model.Size(40, 12, 4, 20, (2,), 600, 10)
    monkeypatch.setattr(stability, "SIZES", {"small": small})
    stability.main(["--cache", str(tmp_path), "--k", "2", "--recipes", "reconstruct", "read"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| 0 | reconstruct | 0.") for line in lines)
    assert any(line.startswith("| 0 | read | 0.") for line in lines)


def test_whitening_has_a_row_per_k_and_exponent_and_keeps_the_last_rows_apart(rng, tmp_path, capsys):
    rows = rng.standard_normal((500, 12)).astype(np.float32) * np.geomspace(1, 10, 12, dtype=np.float32)
    store = tmp_path / "y.zarr"
    zarr.create_array(str(store), data=rows, chunks=(100, 12))
    train, test = whitening.split(str(store), 300, 100)
    np.testing.assert_array_equal(test, rows[400:])
    assert {tuple(row) for row in train} == {tuple(row) for row in rows[:300]}
    size = ("--rows", "300", "--held-out", "100", "--atoms", "20", "--n-iter", "1")
    whitening.main([str(store), *size, "--k", "2", "4", "--whiten", "0", "0.5", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split(" | ") for line in lines[2:]]
    assert [(c[1], c[2]) for c in cells] == [("2", "0.0"), ("2", "0.5"), ("4", "0.0"), ("4", "0.5")]
    figures = np.array([c[3:6] for c in cells], float)
    assert ((figures > 0) & (figures < 1)).all()
    with pytest.raises(SystemExit, match="500 held-out rows leave none"):
        whitening.split(str(store), 300, 500)


def test_stability_on_a_store(rng, tmp_path, capsys):
    store = tmp_path / "y.zarr"
    zarr.create_array(str(store), data=rng.standard_normal((500, 12)).astype(np.float32), chunks=(100, 12))
    stability.main(["--store", str(store), "--k", "2", "--atoms", "20", "--rows", "400", "--recipes", "read"])
    assert any(line.startswith("| y.zarr | read | 0.") for line in capsys.readouterr().out.splitlines())


def test_compositional_samples_are_sums_of_few_latents():
    size = compositional.SIZES["tiny"]
    samples = compositional.make_samples(size, 1)
    np.testing.assert_array_equal((samples.test_latents > 0).sum(axis=1), size.active)
    for y, z in zip(samples.test[:20], samples.test_latents, strict=False):
        expected = sum(z[j] * samples.truth[j] for j in np.flatnonzero(z))
        np.testing.assert_allclose(y, expected, atol=1e-5)
    assert samples.train.shape == samples.test.shape
    assert not np.array_equal(samples.train, samples.test)


def test_compositional_score_is_high_for_the_truth_in_any_order_only(rng):
    samples = compositional.make_samples(compositional.Size(24, 40, 300, active=2), 1)
    right = compositional.score(samples.truth[rng.permutation(24)], samples)
    assert right["atoms"] > 0.999
    assert right["found"] == 1
    assert right["codes"] > 0.95
    wrong = compositional.score(kernels.unit_rows(rng.standard_normal((24, 40))).astype(np.float32), samples)
    assert wrong["atoms"] < 0.6
    assert wrong["codes"] < 0.6


def test_correlations_are_those_of_numpy_and_zero_for_constant_columns(rng):
    A, B = rng.standard_normal((2, 50, 4))
    A[:, 2] = 3.0
    expected = [0.0 if j == 2 else np.corrcoef(A[:, j], B[:, j])[0, 1] for j in range(4)]
    np.testing.assert_allclose(compositional.correlations(A, B), expected, atol=1e-12)


def test_compositional_at_tiny_size_has_a_row_per_learner(capsys):
    compositional.main(["--size", "tiny", "--seeds", "0", "1", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| 30 | DB-KSVD, lasso start, then pursuits | 0.") for line in lines)
    assert any(line.startswith("| 30 | scikit-learn, lasso | 0.") for line in lines)
