"""With torch and SAELens: the pursuit on tensors, the class of the plugin, folders opened by the real loader.

Runs in the environment of benchmarks/saelens_env.sh (and, for SAEBench, of benchmarks/saebench_env.sh); elsewhere
every test is skipped.
"""

from dataclasses import replace

import numpy as np
import pytest

from dbksvd_dask import codes_to_csr, encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.export.foreign import load_foreign
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix
from dbksvd_dask.kernels.products import second_moment
from dbksvd_dask.kernels.whiten import whitening
from dbksvd_dask.plan.encoder import EncodeSpec
from tests.conftest import random_dictionary
from tests.naive import saelens

torch = pytest.importorskip("torch")
# the libraries under test warn about their own dependencies
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

NAMES = {"model_name": "tiny", "hook_name": "blocks.0.hook_resid_post"}


@pytest.fixture
def case(rng):
    D, mean = random_dictionary(rng, 40, 16), rng.standard_normal(16) * 0.3
    Y = (rng.standard_normal((70, 16)) + mean).astype(np.float32)
    return D, mean, Y


def dictionary_of(D, mean, k=6, **params):
    return Dictionary(D, mean, {"n_atoms": len(D), "k": k, "center": True, **params})


def dense(Y, D, spec):
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), spec)
    out = np.zeros((len(Y), len(D)), Y.dtype)
    for i in range(len(Y)):
        for j, a in zip(atom[i], coefficient[i], strict=True):
            if j >= 0:
                out[i, j] = a
    return out


SPECS = [
    EncodeSpec(6),
    EncodeSpec(6, nonneg=True),
    EncodeSpec(1),
    EncodeSpec(6, rtol=0.5),
    EncodeSpec(6, min_coefficient=0.8),
    EncodeSpec(6, stages=((0, 10, 2), (10, 40, 4))),
    EncodeSpec(6, nonneg=True, rtol=0.3, stages=((0, 20, 3), (20, 40, 3))),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pursuit_on_tensors_is_that_of_the_kernels(case, spec):
    from dbksvd_dask.export.torch_pursuit import TorchPursuit, pursue

    D, mean, Y = case
    Y = (Y - mean).astype(np.float32)
    ours = dense(Y, D, spec)
    for theirs in (
        pursue(torch.from_numpy(Y), torch.from_numpy(D), spec),
        TorchPursuit(spec)(torch.from_numpy(Y), torch.from_numpy(D)),
    ):
        np.testing.assert_array_equal(theirs.numpy() != 0, ours != 0)
        np.testing.assert_allclose(theirs.numpy(), ours, atol=1e-5)


def test_pursuit_on_tensors_is_that_of_a_plain_loop(case):
    from dbksvd_dask.export.torch_pursuit import pursue

    D, mean, Y = case
    D = D.astype(np.float64)
    acts = pursue(torch.from_numpy(Y - mean), torch.from_numpy(D), EncodeSpec(6))
    for row, y in zip(acts.numpy(), Y - mean, strict=True):
        np.testing.assert_allclose(row, saelens.pursuit(y, D, 6)[0], atol=1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        EncodeSpec(4),
        EncodeSpec(4, refit=True),
        EncodeSpec(4, encoder="omp"),
        EncodeSpec(4, nonneg=True, refit=True),
    ],
    ids=str,
)
def test_gradients_are_those_of_finite_differences(case, spec):
    from dbksvd_dask.export.torch_pursuit import TorchPursuit

    D, _, Y = case
    W, x = torch.from_numpy(D.astype(np.float64)), torch.from_numpy(Y[:3].astype(np.float64)).requires_grad_()
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 40)))
    encoder = TorchPursuit(spec)
    with torch.no_grad():
        plain = encoder(x, W)
    with_gradient = encoder(x, W)
    torch.testing.assert_close(plain, with_gradient.detach(), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad((with_gradient * weight).sum(), x)
    step = 1e-6
    for f in range(4):
        moved = x.detach().clone()
        moved[:, f] += step
        with torch.no_grad():
            slope = ((encoder(moved, W) - plain) * weight).sum(dim=1) / step
        torch.testing.assert_close(gradient[:, f], slope, atol=1e-3, rtol=1e-3)


def test_changed_weights_are_noticed(case):
    from dbksvd_dask.export.torch_pursuit import TorchPursuit

    D, _, Y = case
    W = torch.from_numpy(D.copy())
    encoder = TorchPursuit(EncodeSpec(6))
    encoder(torch.from_numpy(Y), W)
    W.data[:5] = W.data[5:10].clone()
    np.testing.assert_allclose(encoder(torch.from_numpy(Y), W), dense(Y, W.numpy(), EncodeSpec(6)), atol=1e-5)


def test_sample_that_is_not_a_number_gives_none(case):
    from dbksvd_dask.export.torch_pursuit import TorchPursuit

    D, _, Y = case
    Y = Y.copy()
    Y[2, 3] = np.nan
    acts = TorchPursuit(EncodeSpec(6))(torch.from_numpy(Y), torch.from_numpy(D))
    assert torch.isnan(acts[2]).all()
    assert torch.isfinite(acts[[0, 1, 3]]).all()


# --------------------------------------------------------------------------------------------------- SAELens


@pytest.mark.parametrize("nonneg", [False, True])
def test_real_saelens_opens_and_agrees_with_the_twin(case, nonneg, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    D, mean, Y = case
    export_saelens(dictionary_of(D, mean, nonneg=nonneg), tmp_path / "sae", **NAMES, metadata={"context_size": 32})
    sae = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    assert type(sae).__name__ == "MatchingPursuitSAE"
    assert (sae.cfg.metadata.model_name, sae.cfg.metadata.hook_name) == ("tiny", NAMES["hook_name"])
    assert sae.cfg.metadata.context_size == 32
    config, tensors = saelens.open_folder(tmp_path / "sae")
    twin = saelens.saelens_encode(Y, tensors["W_dec"], tensors["b_dec"], config)
    with torch.no_grad():
        acts = sae.encode(torch.from_numpy(Y))
        again = sae.decode(acts)
    np.testing.assert_array_equal(acts.numpy() != 0, twin != 0)
    np.testing.assert_allclose(acts.numpy(), twin, atol=1e-4)
    np.testing.assert_allclose(again, saelens.saelens_decode(twin, tensors["W_dec"], tensors["b_dec"]), atol=1e-4)


@pytest.mark.parametrize("nonneg", [False, True])
def test_plugin_encodes_as_we_do(case, nonneg, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    import dbksvd_dask.export.saelens_plugin as plugin

    D, mean, Y = case
    export_saelens(dictionary_of(D, mean, nonneg=nonneg), tmp_path / "sae", **NAMES, form="plugin")
    sae = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    assert isinstance(sae, plugin.DBKSVDSAE)
    ours = codes_to_csr(encode(Y, D, 6, mean=mean, nonneg=nonneg)).toarray()
    with torch.no_grad():
        acts = sae.encode(torch.from_numpy(Y).reshape(7, 10, 16))
        again = sae(torch.from_numpy(Y))
    assert acts.shape == (7, 10, 40)
    np.testing.assert_array_equal(acts.reshape(70, 40).numpy() != 0, ours != 0)
    np.testing.assert_allclose(acts.reshape(70, 40), ours, atol=1e-4)
    np.testing.assert_allclose(again, ours @ D + mean, atol=1e-4)


def test_plugin_keeps_refit_and_stages(case, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    import dbksvd_dask.export.saelens_plugin  # noqa: F401

    D, mean, Y = case
    dictionary = dictionary_of(D, mean, refit=True, encode="staged", groups=[16, 24])
    export_saelens(dictionary, tmp_path / "sae", **NAMES, form="plugin")
    sae = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    spec = EncodeSpec(6, refit=True, stages=((0, 16, 3), (16, 40, 3)))
    with torch.no_grad():
        acts = sae.encode(torch.from_numpy(Y))
    np.testing.assert_allclose(acts, dense((Y - mean).astype(np.float32), D, spec), atol=1e-4)


@pytest.fixture
def whitened(case):
    D, mean, Y = case
    W = whitening(second_moment((Y - mean).astype(np.float32)), 0.5, np.dtype(np.float32))
    return replace(dictionary_of(D, mean), whitening=W), Y


def test_plugin_and_saebench_encode_whitened_samples(whitened, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    import dbksvd_dask.export.saelens_plugin  # noqa: F401

    dictionary, Y = whitened
    ours = codes_to_csr(encode(Y, dictionary)).toarray()
    export_saelens(dictionary, tmp_path / "sae", **NAMES, form="plugin")
    sae = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    x = torch.from_numpy(Y)
    with torch.no_grad():
        acts = sae.encode(x)
    np.testing.assert_allclose(acts, ours, atol=1e-4)
    with torch.enable_grad():  # another path: the pursuit in torch
        np.testing.assert_allclose(sae.encode(x.clone().requires_grad_()).detach(), ours, atol=1e-3)
    sae.save_model(tmp_path / "again")
    copy = load_foreign(tmp_path / "again")
    np.testing.assert_array_equal(copy.whitening, dictionary.whitening)
    assert codes_to_csr(encode(Y, copy, 6)).toarray() == pytest.approx(ours, abs=1e-5)


def test_plugin_survives_saving(case, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    import dbksvd_dask.export.saelens_plugin  # noqa: F401

    D, mean, Y = case
    export_saelens(dictionary_of(D, mean), tmp_path / "sae", **NAMES, form="plugin")
    sae = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    sae.save_model(tmp_path / "again")
    copy = sae_lens.SAE.load_from_disk(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(copy.encode(torch.from_numpy(Y)), sae.encode(torch.from_numpy(Y)))
    with pytest.raises(NotImplementedError, match="unit rows"):
        sae.fold_W_dec_norm()


@pytest.mark.skipif(np.__version__ < "2", reason="fitting needs numpy 2, SAEBench an older one")
def test_cache_and_steering_see_the_latents_of_the_plugin(tmp_path):
    pytest.importorskip("sae_lens")
    from benchmarks.check_saelens import check_hooks

    report = check_hooks(tmp_path)
    assert not report["builtin"]["hook_sae_acts_post"]  # why there is a plugin
    assert report["plugin"]["hook_sae_acts_post"]
    assert report["plugin"]["same_support"] >= 0.999
    assert report["plugin"]["steered"]


def test_huggingface_folder_holds_what_saelens_loads(case, tmp_path):
    sae_lens = pytest.importorskip("sae_lens")
    from dbksvd_dask.export.huggingface import export_huggingface

    D, mean, Y = case
    export_huggingface(dictionary_of(D, mean), tmp_path / "hf", repo_id="me/atoms", **NAMES)
    sae = sae_lens.SAE.load_from_disk(tmp_path / "hf" / NAMES["hook_name"])
    assert sae.encode(torch.from_numpy(Y)).shape == (70, 80)


# -------------------------------------------------------------------------------------------------- SAEBench


@pytest.mark.parametrize("nonneg", [False, True])
def test_saebench_object_keeps_its_contract(case, nonneg):
    pytest.importorskip("sae_bench")
    from dbksvd_dask.export.saebench import SAEBenchDictionary

    D, mean, Y = case
    sae = SAEBenchDictionary(dictionary_of(D, mean, nonneg=nonneg), **NAMES)
    n_latents = 40 if nonneg else 80
    assert (sae.cfg.d_in, sae.cfg.d_sae, sae.cfg.hook_layer) == (16, n_latents, 0)
    shapes = [tuple(getattr(sae, name).shape) for name in ("W_enc", "W_dec", "b_enc", "b_dec")]
    assert shapes == [(16, n_latents), (n_latents, 16), (n_latents,), (16,)]
    acts = sae.encode(torch.from_numpy(Y).reshape(7, 10, 16)).reshape(70, n_latents)
    assert (acts >= 0).all()
    codes = acts if nonneg else acts[:, :40] - acts[:, 40:]
    ours = codes_to_csr(encode(Y, D, 6, mean=mean, nonneg=nonneg)).toarray()
    np.testing.assert_allclose(codes, ours, atol=1e-4)
    np.testing.assert_allclose(sae(torch.from_numpy(Y)), ours @ D + mean, atol=1e-4)
    half = sae.to(dtype=torch.bfloat16)
    assert (half.dtype, half.cfg.dtype) == (torch.bfloat16, "bfloat16")
    again = half.encode(torch.from_numpy(Y).to(torch.bfloat16))
    assert again.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------- benchmarks


def test_benchmark_against_saelens_runs(capsys):
    pytest.importorskip("sae_lens")
    from benchmarks import saelens_encode

    report = saelens_encode.main(["--samples", "16", "--n-atoms", "32", "--k", "2", "--repeats", "1"])
    assert report["signed"]["ratio_cpu"] > 0
    assert report["nonnegative"]["ours"]["samples_per_s"] > 0
