"""benchmarks/networks.py at its tiny size: every method, every part, nothing twice."""

import json

import numpy as np
import pytest

from benchmarks import network_methods, network_scores, network_table, networks
from benchmarks._stores import made_up_rows
from benchmarks.network_data import Prepared
from dbksvd_dask import create_activations
from dbksvd_dask.lm.reconstruct import SparseAutoencoder
from tests.helpers.language_models import save_model, sentences

pytestmark = pytest.mark.filterwarnings("ignore")
N_FEATURES = 16
WITHOUT_TORCH = [name for name, method in network_methods.METHODS.items() if method.needs is None]


def write_store(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = create_activations(path, *rows.shape, "float32", chunk_rows=len(rows))
    writer.write_chunk(0, rows)
    writer.finish()


@pytest.fixture
def data(tmp_path):
    """Made-up rows in place of a model's: stores, one task, words of four letters."""
    prepared = Prepared(tmp_path / "data", "resid:1")
    rows = made_up_rows(900, N_FEATURES, 0, n_true=32, active=3).astype(np.float32)
    write_store(prepared.train, rows[:600])
    write_store(prepared.held_out, rows[600:])
    tasks = prepared.folder / "tasks-resid-1"
    tasks.mkdir()
    np.savez(tasks / "1_task.npz", rows=rows[:60], positive=rows[:60, 0] > np.median(rows[:60, 0]))
    letter = rows[:400, :4].argmax(axis=1)
    np.savez(prepared.letters, rows=rows[:400], letter=letter, train=np.arange(400) < 300)
    return prepared


def run(data, out, *more):
    options = [str(data.folder), "--hook", "resid:1", "--size", "tiny", "--k", "5", "--out", str(out)]
    return networks.main([*options, *more])


@pytest.mark.slow
def test_every_method_without_torch_fills_its_row_and_nothing_is_done_twice(data, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    methods = ["--methods", *WITHOUT_TORCH, "--parts", "variance", "coherence", "probing", "absorption"]
    lines = run(data, out, *methods)
    printed = capsys.readouterr().out
    rows = {key[5]: cell for key, cell in network_table.merged(lines).items()}
    assert set(rows) == {*WITHOUT_TORCH, "raw"}
    for name in WITHOUT_TORCH:
        assert rows[name]["l0"] <= 15 + 1e-9, name
        assert {"variance_explained", "auc_5", "absorption", "coherence", "cpu_s"} <= set(rows[name])
        assert f"| {name} |" in printed
    assert rows["DB-KSVD"]["variance_explained"] > 0.9
    before = out.read_text()
    assert run(data, out, *methods) == lines
    assert out.read_text() == before


def test_a_line_that_is_missing_is_measured_again_and_only_that(data, tmp_path):
    out = tmp_path / "results.jsonl"
    options = ["--methods", "random", "--parts", "variance", "coherence", "stability", "--seeds", "0", "1"]
    lines = run(data, out, *options)
    kept = [line for line in lines if line["part"] != "coherence"]
    # the last line is cut short, as by a kill
    out.write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"part": "coher')
    again = run(data, out, *options)
    assert [line["part"] for line in again[len(kept) :]] == ["coherence", "coherence"]
    stability = next(line for line in again if line["part"] == "stability")
    assert stability["seeds"] == [0, 1]
    assert 0 < stability["stability"] < 1


@pytest.mark.slow
def test_a_method_on_another_dictionary_trains_that_first_and_counts_its_seconds(data, tmp_path):
    options = ["--methods", "DB-KSVD read, linear", "--parts", "coherence"]
    lines = run(data, tmp_path / "results.jsonl", *options)
    found = {line["method"]: line for line in lines if line["part"] == "train"}
    assert set(found) == {"DB-KSVD read", "DB-KSVD read, linear"}
    assert found["DB-KSVD read, linear"]["cpu_s"] > found["DB-KSVD read"]["cpu_s"] > 0


def test_soft_frozen_atoms_stay_near_their_start_or_its_negative():
    rng = np.random.default_rng(0)
    start, atoms = (network_methods.unit_atoms(rng.standard_normal((50, 8))) for _ in range(2))
    atoms[:5] = start[:5]
    atoms[5] = -start[5]
    moved = network_methods.project_to_start(atoms, start)
    cosine = np.abs((moved * start).sum(1))
    assert cosine.min() >= 0.8 - 1e-6
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(moved[:6], atoms[:6])
    # the nearest point of the cone: it lies in the plane of both
    outside = np.abs((atoms * start).sum(1)) < 0.8
    assert outside.sum() > 20
    for new, old, first in zip(moved[outside], atoms[outside], start[outside], strict=True):
        basis = np.linalg.qr(np.stack([old, first], axis=1))[0]
        assert np.linalg.norm(basis.T @ new) == pytest.approx(1, abs=1e-5)


def test_table_marks_the_leader_of_a_column_and_no_baseline():
    setting = {"model": "m", "hook": "h", "n_atoms": 4, "rows": 10, "k": 2, "seed": 0}
    lines = [
        {**setting, "method": method, "part": "variance", "variance_explained": v, "absorption": v, "l0": 2.0}
        for method, v in (("DB-KSVD", 0.5), ("TopK SAE", 0.4), ("random", 0.9))
    ]
    lines.append({**setting, "method": "raw", "k": 0, "part": "probing", "auc_1": 0.7})
    found = network_table.table(lines)
    assert "| DB-KSVD | 2.0 | **0.500** |" in found
    assert "| 0.900 |" in found
    assert "**0.400**" in found  # absorption: less is better
    assert found.count("| raw |") == 1
    assert network_table.settings(lines) == [("m", "h", 4, 10)]
    assert network_table.histograms(lines, ("m", "h", 4, 10)) is None
    # a panel for each measure that there is
    assert len(network_table.figure(lines, ("m", "h", 4, 10)).axes) == 2


def test_a_baseline_far_below_is_named_and_leaves_the_range_to_the_others():
    setting = {"model": "m", "hook": "h", "n_atoms": 4, "rows": 10, "k": 2, "seed": 0, "part": "loss"}
    values = {"DB-KSVD": 0.95, "TopK SAE": 0.93, "soft-frozen": 0.925, "random": -0.3}
    lines = [{**setting, "method": method, "recovered_mean": value} for method, value in values.items()]
    (ax,) = network_table.figure(lines, ("m", "h", 4, 10)).axes
    assert 0.9 < ax.get_ylim()[0] < 0.925
    assert [text.get_text() for text in ax.texts] == ["below: random -0.30"]


def test_several_seeds_give_mean_and_spread():
    setting = {"model": "m", "hook": "h", "n_atoms": 4, "rows": 10, "k": 2, "method": "DB-KSVD"}
    lines = [{**setting, "seed": s, "part": "variance", "variance_explained": v} for s, v in ((0, 0.4), (1, 0.6))]
    assert "**0.500 ± 0.100**" in network_table.table(lines)


@pytest.mark.interop
@pytest.mark.slow
def test_autoencoders_and_loss_of_a_two_layer_model(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks import network_data

    model = save_model(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in sentences(400)))
    monkeypatch.setattr(network_data, "CONTEXT", 32)
    common = [str(tmp_path / "data"), "--model", str(model), "--hook", "resid:0"]
    small = ["--tokens", "600", "--held-out", "100", "--words", "0", "--task-rows", "0"]
    network_data.main([*common, "--texts", str(tmp_path / "texts.jsonl"), *small])
    out = tmp_path / "results.jsonl"
    methods = ["DB-KSVD", "TopK SAE", "BatchTopK SAE", "Matryoshka SAE"]
    given = [*common, "--size", "tiny", "--k", "5", "--methods", *methods, "--out", str(out)]
    rows = {key[5]: cell for key, cell in network_table.merged(networks.main(given)).items()}
    for name in methods:
        assert np.isfinite(rows[name]["recovered_mean"]), name
        assert rows[name]["cpu_s"] > 0
    assert rows["DB-KSVD"]["variance_explained"] > 0.5
    assert rows["TopK SAE"]["l0"] <= 5
    # the folder of a BatchTopK SAE is one that `dbksvd loss` opens
    folder = next((tmp_path / "data").glob("trained-*/BatchTopK_SAE-*"))
    subject = network_scores.Subject(folder)
    assert isinstance(subject.reconstruct, SparseAutoencoder)
    assert subject.reconstruct.architecture == "jumprelu"


@pytest.mark.interop
def test_an_autoencoder_written_for_raw_rows_gives_what_it_gave_in_training(tmp_path):
    torch = pytest.importorskip("torch")
    rows = made_up_rows(500, N_FEATURES, 0, n_true=32, active=3).astype(np.float32) * 30 + 5
    training = network_methods.Training(rows, 40, 4, 0, 1, 8, 2, lambda: 1e-3)
    for kind in ("TopKSAE", "BatchTopKSAE"):
        sae, scale = network_methods.train_autoencoder(training, 1e-3, 20, kind, (10, 30))
        network_methods.write_autoencoder(tmp_path / kind, sae, scale, training.mean())
        scaled = torch.from_numpy(((rows - training.mean()) * scale).astype(np.float32))
        with torch.no_grad():
            _, values, latents = sae.encode(scaled)
            rebuilt = sae.decode(values, latents).numpy() / scale + training.mean()
        found = network_scores.Subject(tmp_path / kind)
        np.testing.assert_allclose(found.reconstruct(rows), rebuilt, rtol=1e-4, atol=1e-3)
        assert found.codes(rows).nnz == int((values > 0).sum())


@pytest.mark.interop
def test_batch_topk_keeps_k_per_sample_on_average(tmp_path):
    torch = pytest.importorskip("torch")
    from benchmarks.sae_torch import BatchTopKSAE

    torch.manual_seed(0)
    sae = BatchTopKSAE(8, 64, 3)
    y = torch.randn(200, 8)
    _, values, _ = sae.encode(y)
    assert int((values > 0).sum()) == 3 * 200
    assert len(set((values > 0).sum(1).tolist())) > 1
    _, single, _ = sae.eval().encode(y)
    # one batch seen: the threshold is its own
    torch.testing.assert_close(single.sort(1).values[:, -12:], values.sort(1).values)
