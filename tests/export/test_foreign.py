"""Dictionaries of other tools read as ours: turned, normalised, and told about it."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from dbksvd_dask.dictionary import Dictionary, dictionary_fingerprint
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.export.foreign import load_foreign, read_safetensors
from dbksvd_dask.export.huggingface import export_huggingface
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.store.dictionary import save_dictionary
from dbksvd_dask.store.runs import open_dictionary

NAMES = {"model_name": "gpt2-small", "hook_name": "blocks.6.hook_resid_post"}


def test_ksvd_jl_matrix_is_turned_by_its_shape(make_dictionary, tmp_path):
    D = make_dictionary(20, 6)
    np.save(tmp_path / "d.npy", D.T)  # (features, atoms)
    got = load_foreign(tmp_path / "d.npy", k=3)
    np.testing.assert_array_equal(got.atoms, D)
    assert got.extra["import"]["transposed"]
    assert not got.extra["import"]["normalised"]
    assert got.params == {"n_atoms": 20, "k": 3, "center": False}
    assert (got.mean, got.source) == (None, "d.npy")


def test_rows_are_normalised_and_it_is_said(make_dictionary, tmp_path, caplog):
    D = make_dictionary(20, 6)
    np.save(tmp_path / "d.npy", D * np.linspace(0.5, 4.0, 20, dtype=np.float32)[:, None])
    got = load_foreign(tmp_path / "d.npy")
    np.testing.assert_allclose(got.atoms, D, atol=1e-6)
    assert "atoms had norms from 0.5 to 4; normalised to 1" in caplog.text
    assert got.extra["import"]["norms"] == pytest.approx({"least": 0.5, "largest": 4.0}, abs=1e-5)


def test_square_matrix_needs_a_word(make_dictionary, tmp_path):
    D = make_dictionary(6, 6)
    np.save(tmp_path / "d.npy", D)
    with pytest.raises(
        InputError, match=r"square matrix \(6, 6\), which may be either way round; say orientation="
    ):
        load_foreign(tmp_path / "d.npy")
    turned = load_foreign(tmp_path / "d.npy", orientation="features_first")
    np.testing.assert_allclose(turned.atoms, D.T / np.linalg.norm(D.T, axis=1, keepdims=True), atol=1e-6)


def test_undercomplete_dictionary_is_read_with_a_word(make_dictionary, tmp_path):
    D = make_dictionary(4, 6)
    np.save(tmp_path / "d.npy", D)
    np.testing.assert_array_equal(load_foreign(tmp_path / "d.npy", orientation="atoms_first").atoms, D)


@pytest.mark.parametrize("nonneg", [False, True])
def test_our_saelens_folder_comes_back_as_it_went(make_dictionary, tmp_path, nonneg, rng):
    D, mean = make_dictionary(20, 6), rng.standard_normal(6).astype(np.float32).astype(float)
    params = {"n_atoms": 20, "k": 3, "nonneg": nonneg, "center": True}
    export_saelens(Dictionary(D, mean, params, iteration=5), tmp_path / "sae", **NAMES, k=2)
    got = load_foreign(tmp_path / "sae")
    np.testing.assert_array_equal(got.atoms, D)
    np.testing.assert_array_equal(got.mean, mean)
    assert (got.params["k"], got.params["nonneg"], got.iteration) == (2, nonneg, 5)
    assert got.extra["import"]["hook_name"] == NAMES["hook_name"]


def test_tampered_stack_is_refused(make_dictionary, tmp_path):
    export_saelens(Dictionary(make_dictionary(8, 4), None, {"k": 2}), tmp_path / "sae", **NAMES)
    broken = np.abs(read_safetensors(tmp_path / "sae" / "sae_weights.safetensors")["W_dec"])
    save_file({"W_dec": broken}, tmp_path / "sae" / "sae_weights.safetensors")
    with pytest.raises(StoreError, match=r"says that W_dec is \[D; -D\], but it is not"):
        load_foreign(tmp_path / "sae")


def foreign_folder(path, config, **tensors):
    path.mkdir()
    (path / "cfg.json").write_text(json.dumps(config))
    save_file(tensors, path / "sae_weights.safetensors")
    return path


def test_any_saelens_folder_is_read(make_dictionary, tmp_path, rng):
    D = make_dictionary(20, 6)
    bias = rng.standard_normal(6).astype(np.float32)
    config = {"architecture": "topk", "k": 5, "metadata": {"model_name": "gemma-2-2b", "hook_name": "blocks.1.x"}}
    folder = foreign_folder(
        tmp_path / "sae", config, W_dec=3 * D, b_dec=bias, W_enc=D.T.copy(), b_enc=np.zeros(20, np.float32)
    )
    got = load_foreign(folder)
    np.testing.assert_allclose(got.atoms, D, atol=1e-6)
    np.testing.assert_array_equal(got.mean, bias)
    assert (got.params["k"], got.params["nonneg"], got.params["center"]) == (5, True, True)
    assert got.extra["import"]["architecture"] == "topk"
    assert got.extra["import"]["model_name"] == "gemma-2-2b"


def test_old_saelens_folder_names_its_model_at_the_top(make_dictionary, tmp_path, caplog):
    config = {"model_name": "gpt2", "hook_name": "h", "normalize_activations": "layer_norm"}
    folder = foreign_folder(tmp_path / "sae", config, W_dec=make_dictionary(20, 6))
    got = load_foreign(folder)
    assert got.extra["import"]["model_name"] == "gpt2"
    assert "expects inputs normalised by 'layer_norm'" in caplog.text
    assert got.mean is None


def test_huggingface_folder_comes_back_as_it_went(make_dictionary, tmp_path, rng):
    D, mean = make_dictionary(20, 6), rng.standard_normal(6)
    dictionary = Dictionary(D, mean, {"n_atoms": 20, "k": 3, "center": True, "seed": 4}, iteration=9)
    export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms")
    got = load_foreign(tmp_path / "hf")
    np.testing.assert_array_equal(got.atoms, D)
    np.testing.assert_array_equal(got.mean, mean)  # float64, to the last bit
    assert (got.params["k"], got.params["seed"], got.iteration) == (3, 4, 9)


@pytest.mark.parametrize("form", ["hf", "plugin", "builtin"])
def test_the_map_of_a_whitened_dictionary_comes_back_where_its_reader_uses_it(
    make_dictionary, tmp_path, form, caplog
):
    W = np.diag(np.arange(1, 7)).astype(np.float32)
    params = {"n_atoms": 20, "k": 3, "whiten": 0.5}
    dictionary = Dictionary(make_dictionary(20, 6), None, params, whitening=W)
    if form == "hf":
        export_huggingface(dictionary, tmp_path / "out", repo_id="me/atoms")
    else:
        export_saelens(dictionary, tmp_path / "out", **NAMES, form=form)
    got = load_foreign(tmp_path / "out")
    if form == "builtin":
        assert got.whitening is None
        assert got.params["whiten"] == 0
        assert "SAELens encodes samples as they are, this dictionary whitened ones" in caplog.text
    else:
        np.testing.assert_array_equal(got.whitening, W)
        assert got.params["whiten"] == 0.5
        assert dictionary_fingerprint(got)[:8] != dictionary_fingerprint(replace(got, whitening=None))[:8]


def test_our_own_dictionary_is_read_too(make_dictionary, tmp_path):
    save_dictionary(tmp_path / "d.zarr", Dictionary(make_dictionary(8, 4), None, {"k": 2}))
    np.testing.assert_array_equal(
        load_foreign(tmp_path / "d.zarr").atoms, open_dictionary(tmp_path / "d.zarr").atoms
    )


# ---------------------------------------------------------------------------------------------- safetensors


def test_decoder_of_a_linear_layer_lies_as_features_by_atoms(make_dictionary, tmp_path):
    D = make_dictionary(6, 6)
    save_file({"decoder.weight": np.ascontiguousarray(D.T), "encoder.weight": D}, tmp_path / "ae.safetensors")
    np.testing.assert_array_equal(load_foreign(tmp_path / "ae.safetensors").atoms, D)


def test_the_only_matrix_is_the_dictionary(make_dictionary, tmp_path):
    D = make_dictionary(9, 4)
    save_file({"whatever": D, "bias": np.ones(4, np.float32)}, tmp_path / "one.safetensors")
    got = load_foreign(tmp_path / "one.safetensors")
    np.testing.assert_array_equal(got.atoms, D)
    np.testing.assert_array_equal(got.mean, np.ones(4))
    save_file({"a": D, "b": D}, tmp_path / "two.safetensors")
    with pytest.raises(InputError, match="holds the tensors a, b; a dictionary is looked for under W_dec"):
        load_foreign(tmp_path / "two.safetensors")


def test_bfloat16_is_widened_exactly(tmp_path):
    bits = np.array([[0x3F80, 0x0000], [0x0000, 0xBF80], [0x3F80, 0x3F80]], "<u2")  # 1 0, 0 -1, 1 1
    entry = {"W_dec": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]}}
    head = json.dumps(entry).encode()
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bits.tobytes())
    tensors = read_safetensors(tmp_path / "b.safetensors")
    np.testing.assert_array_equal(tensors["W_dec"], [[1, 0], [0, -1], [1, 1]])
    np.testing.assert_allclose(load_foreign(tmp_path / "b.safetensors").atoms[2], np.sqrt([0.5, 0.5]), rtol=1e-6)


def test_half_precision_becomes_float32_unit_rows(make_dictionary, tmp_path):
    save_file({"W_dec": make_dictionary(20, 6).astype(np.float16)}, tmp_path / "h.safetensors")
    got = load_foreign(tmp_path / "h.safetensors")
    assert got.atoms.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(got.atoms, axis=1), 1.0, atol=1e-6)


# -------------------------------------------------------------------------------------------------- refusals


def test_zero_atoms_are_refused_or_left_out(make_dictionary, tmp_path):
    D = make_dictionary(20, 6)
    D[[3, 7]] = 0
    np.save(tmp_path / "d.npy", D)
    with pytest.raises(InputError, match=r"2 atoms of norm 0 \(the first is 3\).*drop_zero=True"):
        load_foreign(tmp_path / "d.npy")
    got = load_foreign(tmp_path / "d.npy", drop_zero=True)
    assert got.n_atoms == got.params["n_atoms"] == 18
    np.testing.assert_array_equal(got.atoms, D[got.extra["import"]["kept"]])


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.ones((4, 2), np.int64), "holds numbers of dtype int64; a dictionary needs floating point"),
        (np.ones(4), r"holds an array of shape \(4,\); a dictionary is a matrix"),
        (np.full((4, 2), np.inf), "holds values that are not finite"),
    ],
)
def test_what_is_no_dictionary_is_refused(tmp_path, array, text):
    np.save(tmp_path / "d.npy", array)
    with pytest.raises(InputError, match=text):
        load_foreign(tmp_path / "d.npy")


def test_damaged_and_missing_files_are_named(make_dictionary, tmp_path):
    with pytest.raises(StoreError, match="gone does not exist; give a SAELens folder"):
        load_foreign(tmp_path / "gone")
    (tmp_path / "short.safetensors").write_bytes(b"\x10\x00\x00")
    with pytest.raises(StoreError, match="is not a readable safetensors file"):
        load_foreign(tmp_path / "short.safetensors")
    save_file({"W_dec": make_dictionary(8, 4)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-20])
    with pytest.raises(StoreError, match="may be truncated"):
        load_foreign(tmp_path / "cut.safetensors")
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match=r"cannot be read as a \.npy file"):
        load_foreign(tmp_path / "bad.npy")
    (tmp_path / "d.pt").write_bytes(b"x")
    with pytest.raises(InputError, match="is not of a known kind"):
        load_foreign(tmp_path / "d.pt")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "cfg.json").write_text("{}")
    with pytest.raises(StoreError, match=r"holds cfg.json but no sae_weights.safetensors"):
        load_foreign(tmp_path / "half")


def test_bias_of_another_width_is_refused(make_dictionary, tmp_path):
    save_file({"W_dec": make_dictionary(8, 4), "b_dec": np.zeros(5, np.float32)}, tmp_path / "d.safetensors")
    with pytest.raises(InputError, match=r"the bias has shape \(5,\), but the atoms have 4 features"):
        load_foreign(tmp_path / "d.safetensors")
