"""Loss recovered: against a naive twin, at its ends, and for SAEs of other tools."""

import json

import numpy as np
import pytest

from dbksvd_dask import decode, encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.lm.reconstruct import dictionary_reconstruction, open_reconstruction, saelens_reconstruction
from dbksvd_dask.store.dictionary import save_dictionary
from tests.conftest import random_dictionary
from tests.helpers.cli import run
from tests.helpers.language_models import make_model, save_model, sentences, teach
from tests.naive import lm as naive

HOOKS = [("llama", "resid:0"), ("gemma3", "resid:1"), ("gpt2", "mlp:0"), ("neox", "attn:1"), ("gemma3", "mlp:1")]
NAMES = {"model_name": "tiny", "hook_name": "blocks.0.hook_resid_post"}


def needs_torch(function):
    """Skip without torch, and let the libraries under test warn about their own dependencies."""
    return pytest.mark.interop(pytest.mark.filterwarnings("default")(function))


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.fixture
def dictionary(rng):
    D = random_dictionary(rng, 48, 32)
    return Dictionary(D, rng.standard_normal(32) * 0.1, {"n_atoms": 48, "k": 8, "center": True})


# -- reconstructions -------------------------------------------------------------------------------------


def test_reconstruction_is_that_of_encode_and_decode(rng, dictionary):
    Y = rng.standard_normal((70, 32)).astype(np.float32)
    for k in (None, 3):
        expected = decode(encode(Y, dictionary, k), dictionary.atoms, dictionary.mean)
        np.testing.assert_allclose(dictionary_reconstruction(dictionary, k)(Y), expected, rtol=1e-5, atol=1e-5)


def test_exported_dictionary_is_opened_again(tmp_path, rng, dictionary):
    Y = rng.standard_normal((20, 32)).astype(np.float32)
    export_saelens(dictionary, tmp_path / "sae", **NAMES)
    found = open_reconstruction(tmp_path / "sae")(Y)
    np.testing.assert_allclose(found, dictionary_reconstruction(dictionary)(Y), rtol=1e-5, atol=1e-5)


def write_sae(folder, rng, architecture, **config):
    """A SAELens folder of random weights: 32 features, 64 latents."""
    from safetensors.numpy import save_file

    shapes = {"W_enc": (32, 64), "W_dec": (64, 32), "b_dec": (32,), "b_enc": (64,)}
    shapes |= {"jumprelu": {"threshold": (64,)}, "gated": dict.fromkeys(("b_gate", "r_mag", "b_mag"), (64,))}.get(
        architecture, {}
    )
    if architecture == "gated":
        del shapes["b_enc"]
    tensors = {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    if "threshold" in tensors:
        tensors["threshold"] = np.abs(tensors["threshold"])
    folder.mkdir()
    save_file(tensors, folder / "sae_weights.safetensors")
    about = {"d_in": 32, "d_sae": 64, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": True}
    meta = {"sae_lens_version": "6.54.12", "sae_lens_training_version": None, **NAMES}
    config = {**about, "normalize_activations": "none", "reshape_activations": "none", **config, "metadata": meta}
    (folder / "cfg.json").write_text(json.dumps({"architecture": architecture, **config}))
    return tensors


KINDS = [("standard", {}), ("jumprelu", {}), ("gated", {}), ("topk", {"k": 5})]


@pytest.mark.parametrize(("architecture", "config"), KINDS)
def test_latents_row_by_row(tmp_path, rng, architecture, config):
    t = write_sae(tmp_path / "sae", rng, architecture, **config)
    Y = rng.standard_normal((9, 32)).astype(np.float32)
    found = saelens_reconstruction(tmp_path / "sae")(Y)
    for y, row in zip(Y, found, strict=True):
        pre = [float((y - t["b_dec"]) @ t["W_enc"][:, j]) for j in range(64)]
        latent = np.zeros(64)
        for j in range(64):
            if architecture == "gated":
                open_ = pre[j] + t["b_gate"][j] > 0
                latent[j] = open_ * max(0.0, pre[j] * np.exp(t["r_mag"][j]) + t["b_mag"][j])
                continue
            value = pre[j] + t["b_enc"][j]
            if architecture == "topk":
                keep = sorted((p + b for p, b in zip(pre, t["b_enc"], strict=True)), reverse=True)[4] <= value
            else:
                keep = value > (t["threshold"][j] if architecture == "jumprelu" else 0)
            latent[j] = max(0.0, value) * keep
        np.testing.assert_allclose(row, latent @ t["W_dec"] + t["b_dec"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("architecture", "config"), KINDS)
@needs_torch
def test_latents_are_those_of_saelens(tmp_path, rng, torch, architecture, config):
    sae_lens = pytest.importorskip("sae_lens")
    write_sae(tmp_path / "sae", rng, architecture, **config)
    Y = rng.standard_normal((50, 32)).astype(np.float32)
    theirs = sae_lens.SAE.load_from_disk(str(tmp_path / "sae"))(torch.from_numpy(Y)).detach().numpy()
    np.testing.assert_allclose(saelens_reconstruction(tmp_path / "sae")(Y), theirs, rtol=1e-3, atol=1e-3)


def test_bad_folders_are_refused(tmp_path, rng):
    with pytest.raises(StoreError, match="is not a SAELens folder"):
        saelens_reconstruction(tmp_path)
    write_sae(tmp_path / "a", rng, "transcoder")
    with pytest.raises(InputError, match="architecture 'transcoder'; known are gated, jumprelu, standard, topk"):
        saelens_reconstruction(tmp_path / "a")
    write_sae(tmp_path / "b", rng, "standard")
    config = json.loads((tmp_path / "b" / "cfg.json").read_text())
    (tmp_path / "b" / "cfg.json").write_text(json.dumps({**config, "architecture": "jumprelu"}))
    with pytest.raises(StoreError, match="lacks the tensors threshold"):
        saelens_reconstruction(tmp_path / "b")
    (tmp_path / "b" / "cfg.json").write_text(json.dumps({**config, "normalize_activations": "layer_norm"}))
    with pytest.raises(InputError, match="normalised by 'layer_norm'"):
        saelens_reconstruction(tmp_path / "b")
    write_sae(tmp_path / "c", rng, "topk")
    with pytest.raises(InputError, match="does not say its k"):
        saelens_reconstruction(tmp_path / "c")


# -- the measurement -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "hook"), HOOKS)
@needs_torch
def test_losses_agree_with_the_naive_twin(torch, dictionary, family, hook):
    from dbksvd_dask.lm import loss_recovered

    model, texts = make_model(family), sentences(9, seed=3)
    mean = np.linspace(-1, 1, 32, dtype=np.float32)
    ours = {"d": dictionary_reconstruction(dictionary, 4), "identity": lambda x: x}
    found = loss_recovered(model, texts, hook, ours, mean=mean, context=24, long="cut", batch_tokens=64)
    functions = {
        "intact": None,
        "zero": np.zeros_like,
        "mean": lambda x: np.broadcast_to(mean, x.shape),
        "d": ours["d"],
    }
    sums = {name: np.array(naive.losses(model, texts, hook, f, 24)) for name, f in functions.items()}
    n = sums["intact"][:, 2].sum()
    loss = {name: s[:, 0].sum() / n for name, s in sums.items()}
    assert found.n_tokens == n
    assert found.intact.value == pytest.approx(loss["intact"], abs=1e-5)
    d = found.reconstructions["d"]
    for row, name in ((found.zero, "zero"), (found.mean, "mean"), (d, "d")):
        assert row.loss.value == pytest.approx(loss[name], abs=1e-5)
        assert row.kl.value == pytest.approx(sums[name][:, 1].sum() / n, abs=1e-5)
        assert row.harm.value == pytest.approx(loss[name] - loss["intact"], abs=1e-5)
    assert d.of_zero.value == pytest.approx((loss["zero"] - loss["d"]) / (loss["zero"] - loss["intact"]), abs=1e-4)
    assert d.of_mean.value == pytest.approx((loss["mean"] - loss["d"]) / (loss["mean"] - loss["intact"]), abs=1e-4)
    assert d.loss.error > 0


@pytest.mark.parametrize(("family", "hook"), HOOKS[:3])
@needs_torch
def test_identity_recovers_everything_and_the_mean_nothing(torch, family, hook):
    from dbksvd_dask.lm import loss_recovered

    model, texts = make_model(family), sentences(8)
    centre = mean_activation(model, texts, hook)
    given = {"identity": lambda x: x, "mean": lambda x: np.broadcast_to(centre, x.shape)}
    options = {"context": 24, "batch_tokens": 64}
    by_itself = loss_recovered(model, texts, hook, given, **options).reconstructions
    assert by_itself["mean"].of_mean.value == pytest.approx(0, abs=1e-5)  # two float32 means of the same rows
    found = loss_recovered(model, texts, hook, given, mean=centre, **options).reconstructions
    assert found["identity"].of_mean.value == pytest.approx(1, abs=1e-6)
    assert found["identity"].of_zero.value == pytest.approx(1, abs=1e-6)
    assert found["identity"].kl.value == pytest.approx(0, abs=1e-6)
    assert found["mean"].of_mean.value == pytest.approx(0, abs=1e-6)


@needs_torch
def test_an_ablation_that_does_no_harm_is_no_reference(torch, caplog):
    """An untrained model predicts worse than the uniform distribution, which zero ablation leaves."""
    from dbksvd_dask.lm import loss_recovered

    model, texts = make_model(), sentences(20, seed=2)
    found = loss_recovered(model, texts, "resid:1", lambda x: x, context=32)
    assert found.zero.loss.value == pytest.approx(np.log(320), abs=1e-4)
    assert found.zero.loss.value < found.intact.value
    assert "zero" in found.doubtful
    assert "resid:1: zero ablation has a loss of 5.768" in caplog.text
    assert "does not clearly harm the model" in caplog.text
    caplog.clear()
    teach(model.model, model.tokenizer, 30)
    found = loss_recovered(model, texts, "resid:1", lambda x: x, context=32)
    assert found.intact.value < found.mean.loss.value < found.zero.loss.value
    assert found.doubtful == ()
    assert not caplog.text


def mean_activation(model, texts, hook):
    """The mean activation, summed by hand over the windows of each text."""
    import torch

    rows = []
    for text in texts:
        ids = model.tokenizer(text)["input_ids"]
        for a in range(0, len(ids), 23):
            given = torch.tensor([[0, *ids[a : a + 23]]])
            rows.append(
                model.activations(given, torch.ones_like(given), [model.hook(hook)])[model.hook(hook)][0, 1:]
            )
    return torch.cat(rows).double().mean(0).float().numpy()


@needs_torch
def test_model_is_left_as_it_was(torch, dictionary):
    from dbksvd_dask.lm import loss_recovered

    model = make_model()
    ids = torch.arange(8)[None]
    before = model.model(ids).logits
    loss_recovered(model, sentences(3), "mlp:1", dictionary, context=24)
    assert torch.equal(model.model(ids).logits, before)
    assert all("forward" not in vars(block) for block in model.blocks)


@needs_torch
def test_bad_input_is_refused_in_one_line(torch, rng):
    from dbksvd_dask.lm import loss_recovered

    model = make_model()
    narrow = Dictionary(random_dictionary(rng, 20, 16), None, {"n_atoms": 20, "k": 2})
    with pytest.raises(MismatchError, match="has 16 features, the activations of this model 32"):
        loss_recovered(model, sentences(2), "resid:0", narrow)
    with pytest.raises(InputError, match="no window has two tokens"):
        loss_recovered(model, ["a"], "resid:0", lambda x: x)
    with pytest.raises(InputError, match="a reconstruction returned shape"):
        loss_recovered(model, sentences(2), "resid:0", lambda x: x[:1])
    with pytest.raises(InputError, match=r"mean has shape \(3,\)"):
        loss_recovered(model, sentences(2), "resid:0", lambda x: x, mean=np.zeros(3))
    with pytest.raises(InputError, match="it has resid:0 to resid:1"):
        loss_recovered(model, sentences(2), "resid:7", lambda x: x)


@needs_torch
def test_command_prints_a_table_and_json(tmp_path, capsys, torch, dictionary):
    model = save_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in sentences(5)))
    save_dictionary(tmp_path / "run", dictionary)
    args = ["loss", model, tmp_path / "a.jsonl", tmp_path / "run", "--hook", "resid:0", "--k", 2, "--k", 8]
    code, out, err = run(capsys, *args, "--context", 24)
    assert code == 0, err
    assert "run k=2" in out
    assert "of mean ablation" in out
    code, out, err = run(capsys, *args, "--context", 24, "--json")
    found = json.loads(out)["reconstructions"]
    assert found["run k=8"]["of_mean"]["value"] > found["run k=2"]["of_mean"]["value"]
