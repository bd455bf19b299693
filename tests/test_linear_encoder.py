"""`fit_linear_encoder`: an encoder of one step for any dictionary, and its export."""

import json

import dask
import numpy as np
import pytest
from safetensors.numpy import load_file

from dbksvd_dask import DBKSVD, Dictionary, fit_linear_encoder
from dbksvd_dask.errors import InputError
from dbksvd_dask.export.foreign import load_foreign
from dbksvd_dask.export.saelens import export_linear
from tests.helpers.cli import run as run_command
from tests.helpers.stores import make_store
from tests.naive.linear import jump_relu

NAMES = {"model_name": "gpt2-small", "hook_name": "blocks.6.hook_resid_post"}


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(3)
    D = rng.standard_normal((24, 16))
    X = rng.uniform(1, 2, (3000, 24)) * (rng.random((3000, 24)) < 0.1)
    return (X @ D + 0.1 * rng.standard_normal((3000, 16)) + 3).astype(np.float32)


@pytest.fixture(scope="module")
def model(samples):
    return DBKSVD(24, 4, n_iter=12, nonneg=True, validation=0, output="sparse").fit(samples)


def test_it_finds_most_of_the_codes(model, samples):
    encoder = fit_linear_encoder(model, samples)
    found, wanted = encoder.encode(samples), model.transform(samples)
    assert found.shape == wanted.shape
    assert abs(found.nnz / wanted.nnz - 1) < 0.1
    both = found.astype(bool).multiply(wanted.astype(bool)).sum()
    assert both / wanted.nnz > 0.6
    error = np.square(samples - model.inverse_transform(found)).sum() / np.square(samples - samples.mean(0)).sum()
    assert error < 0.5


@pytest.mark.parametrize("source", ["array", "store", "lazy"])
def test_same_bits_on_any_scheduler_and_source(source, model, samples, tmp_path):
    given = samples
    if source == "store":
        given = make_store(tmp_path / "s.zarr", samples, chunk_rows=700)
    elif source == "lazy":
        import dask.array as da

        given = da.from_array(samples, chunks=(500, 16))
    with dask.config.set(scheduler="synchronous"):
        one = fit_linear_encoder(model, samples, n_rows=2000, chunk_size=300)
    with dask.config.set(scheduler="threads", num_workers=2):
        other = fit_linear_encoder(model, given, n_rows=2000, chunk_size=300)
    for name in ("W", "b", "threshold"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_signed_dictionaries_have_two_latents_per_atom(samples):
    model = DBKSVD(24, 4, n_iter=4, validation=0, output="sparse").fit(samples)
    encoder = fit_linear_encoder(model, samples)
    assert (encoder.n_latents, encoder.stacked) == (48, True)
    X = encoder.encode(samples)
    assert X.shape == (3000, 24)
    assert (X.data < 0).any()


def test_codes_of_one_pursuit_can_be_imitated_where_the_fit_has_groups(samples):
    model = DBKSVD(24, 4, n_iter=6, nonneg=True, groups=(6, 18), encode="staged", validation=0).fit(samples)
    plain, staged = (fit_linear_encoder(model, samples, encode=encode) for encode in ("plain", "staged"))
    assert plain.W.tobytes() != staged.W.tobytes()
    assert staged.W.tobytes() == fit_linear_encoder(model, samples).W.tobytes()
    same = fit_linear_encoder(model.set_params(encode="plain"), samples)
    assert plain.W.tobytes() == same.W.tobytes()
    assert plain.threshold.tobytes() == same.threshold.tobytes()


def test_weights_of_a_frequency_prior_are_imitated_too(samples):
    model = DBKSVD.recipe("recover", 24, 3, n_iter=16, validation=0, output="sparse").fit(samples)
    encoder = fit_linear_encoder(model, samples)
    assert abs(encoder.encode(samples).nnz / model.transform(samples).nnz - 1) < 0.05


def test_bad_input_is_refused_in_one_line(model, samples):
    with pytest.raises(InputError, match=r"10 samples are fewer than the 16 features"):
        fit_linear_encoder(model, samples, n_rows=10)
    with pytest.raises(InputError, match=r"encode='flat' is not known"):
        fit_linear_encoder(model, samples, encode="flat")
    with pytest.raises(InputError, match=r"Y has 8 features"):
        fit_linear_encoder(model, samples[:, :8])
    with pytest.raises(InputError, match=r"n_rows=0 is too small"):
        fit_linear_encoder(model, samples, n_rows=0)
    with pytest.raises(InputError, match=r"int is not a dictionary"):
        fit_linear_encoder(3, samples)
    with pytest.raises(InputError, match=r"Y has shape \(16,\)"):
        fit_linear_encoder(model, samples).encode(samples[0])


@pytest.mark.parametrize("nonneg", [True, False])
def test_exported_weights_give_the_same_activations(nonneg, samples, tmp_path):
    model = DBKSVD(24, 4, n_iter=4, nonneg=nonneg, validation=0).fit(samples)
    encoder = fit_linear_encoder(model, samples)
    result = export_linear(encoder, tmp_path / "sae", **NAMES)
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    tensors = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    assert (result.architecture, config["architecture"], config["d_sae"]) == (*["jumprelu"] * 2, encoder.n_latents)
    assert config["apply_b_dec_to_input"]
    acts = jump_relu(samples[:50] - tensors["b_dec"], tensors["W_enc"].T, tensors["b_enc"], tensors["threshold"])
    folded = acts if nonneg else acts[:, :24] - acts[:, 24:]
    np.testing.assert_allclose(folded, encoder.encode(samples[:50]).toarray(), atol=1e-4)
    np.testing.assert_array_equal(load_foreign(tmp_path / "sae").atoms, model.components_)


def test_the_command_writes_a_plain_sae(model, samples, tmp_path, capsys):
    store = make_store(tmp_path / "store.zarr", samples, chunk_rows=700)
    names = ["--model-name", "gpt2-small", "--hook-name", "blocks.6.hook_resid_post", "--linear", store]
    command = ["export", "saelens", model.save(tmp_path / "run.zarr")]
    code, out, _ = run_command(capsys, *command, tmp_path / "sae", *names)
    assert code == 0
    assert "24 latents, SAELens architecture jumprelu" in out
    code, _, err = run_command(capsys, *command, tmp_path / "other", *names, "--form", "plugin")
    assert code == 2
    assert "--form was given beside --linear" in err


@pytest.mark.interop
def test_saelens_reads_it_as_its_own(model, samples, tmp_path):
    torch, sae_lens = pytest.importorskip("torch"), pytest.importorskip("sae_lens")
    encoder = fit_linear_encoder(model, samples)
    export_linear(encoder, tmp_path / "sae", **NAMES)
    sae = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    with torch.no_grad():
        acts = sae.encode(torch.from_numpy(samples[:200])).numpy()
        rebuilt = sae.decode(torch.from_numpy(acts)).numpy()
    np.testing.assert_allclose(acts, encoder.encode(samples[:200]).toarray(), atol=1e-4)
    np.testing.assert_allclose(rebuilt, acts @ model.components_ + model.mean_, atol=1e-3)


def test_a_dictionary_without_k_says_so(samples):
    atoms = np.eye(16, dtype=np.float32)
    with pytest.raises(InputError, match="give k"):
        fit_linear_encoder(Dictionary(atoms, None, {"n_atoms": 16}), samples)
