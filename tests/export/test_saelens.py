"""SAELens folders, written without torch, judged by a twin of SAELens' documented encoder."""

import json

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import load_file

from dbksvd_dask import codes_to_csr, encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.export.saelens import export_saelens, log10_density, stack
from tests.naive import saelens

NAMES = {"model_name": "gpt2-small", "hook_name": "blocks.6.hook_resid_post"}


def dictionary_of(atoms, *, k=4, mean=None, **params):
    return Dictionary(atoms, mean, {"n_atoms": len(atoms), "k": k, **params}, iteration=3)


@pytest.fixture
def signed(make_dictionary, rng):
    return dictionary_of(make_dictionary(24, 10), mean=rng.standard_normal(10) * 0.3)


def test_folder_holds_exactly_what_saelens_reads(signed, tmp_path):
    result = export_saelens(signed, tmp_path / "sae", **NAMES)
    assert sorted(p.name for p in (tmp_path / "sae").iterdir()) == ["cfg.json", "sae_weights.safetensors"]
    config, tensors = saelens.open_folder(tmp_path / "sae")
    assert set(tensors) == {"W_dec", "b_dec"}
    np.testing.assert_array_equal(tensors["W_dec"], np.vstack([signed.atoms, -signed.atoms]))
    np.testing.assert_array_equal(tensors["b_dec"], signed.mean.astype(np.float32))
    assert (tensors["W_dec"].dtype, tensors["b_dec"].dtype) == (np.float32, np.float32)
    expected = {
        "architecture": "matching_pursuit",
        "d_in": 10,
        "d_sae": 48,
        "residual_threshold": 0.0,
        "max_iterations": 4,
        "stop_on_duplicate_support": False,
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "dtype": "float32",
    }
    assert {name: config[name] for name in expected} == expected
    assert (result.n_latents, result.stacked, result.notes) == (48, True, ())


def test_metadata_keeps_names_and_states_a_version_that_is_not_dropped(signed, tmp_path):
    export_saelens(signed, tmp_path / "sae", **NAMES, metadata={"context_size": 64, "prepend_bos": False})
    metadata = saelens.open_folder(tmp_path / "sae")[0]["metadata"]
    assert int(metadata["sae_lens_version"].split(".")[0]) >= 6
    assert {name: metadata[name] for name in NAMES} == NAMES
    assert (metadata["context_size"], metadata["prepend_bos"]) == (64, False)
    assert metadata["dbksvd"]["params"]["k"] == 4
    assert metadata["dbksvd"]["stacked"]


def test_stacked_codes_are_the_signed_pursuit_of_as_many_steps(signed, tmp_path, rng):
    """Positive part minus negative part; k iterations of SAELens are k steps of the signed pursuit."""
    export_saelens(signed, tmp_path / "sae", **NAMES)
    config, tensors = saelens.open_folder(tmp_path / "sae")
    Y = rng.standard_normal((60, 10)).astype(np.float32) + tensors["b_dec"]
    acts = saelens.saelens_encode(Y, tensors["W_dec"], tensors["b_dec"], config)
    folded = acts[:, :24] - acts[:, 24:]
    for i, y in enumerate(Y - tensors["b_dec"]):
        x, residual = np.zeros(24), y.astype(np.float64)
        for _ in range(4):
            p = signed.atoms.astype(np.float64) @ residual
            j = int(np.abs(p).argmax())
            x[j] += p[j]
            residual -= p[j] * signed.atoms[j]
        np.testing.assert_allclose(folded[i], x, atol=1e-6)


@pytest.mark.parametrize("nonneg", [False, True])
def test_codes_agree_with_ours_wherever_no_atom_is_chosen_twice(nonneg, make_dictionary, rng, tmp_path):
    D = make_dictionary(40, 16)
    dictionary = dictionary_of(D, k=8, mean=rng.standard_normal(16) * 0.2, nonneg=nonneg)
    export_saelens(dictionary, tmp_path / "sae", **NAMES)
    config, tensors = saelens.open_folder(tmp_path / "sae")
    Y = (rng.standard_normal((80, 16)) + dictionary.mean).astype(np.float32)
    acts = saelens.saelens_encode(Y, tensors["W_dec"], tensors["b_dec"], config)
    theirs = acts if nonneg else acts[:, :40] - acts[:, 40:]
    ours = codes_to_csr(encode(Y, D, 8, mean=dictionary.mean, nonneg=nonneg)).toarray()
    chosen = [saelens.pursuit(y - dictionary.mean, D, 8, nonneg)[1] for y in Y]
    once = [len(set(c)) == len(c) for c in chosen]
    assert 20 < sum(once) < 80  # both kinds are there
    np.testing.assert_array_equal(theirs[once] != 0, ours[once] != 0)
    np.testing.assert_allclose(theirs[once], ours[once], atol=1e-4)
    np.testing.assert_allclose(
        saelens.saelens_decode(acts, tensors["W_dec"], tensors["b_dec"])[once],
        (ours @ D + dictionary.mean)[once],
        atol=1e-4,
    )


def test_nonnegative_dictionary_is_written_as_it_is(make_dictionary, tmp_path):
    D = make_dictionary(24, 10)
    result = export_saelens(dictionary_of(D, nonneg=True), tmp_path / "sae", **NAMES)
    _, tensors = saelens.open_folder(tmp_path / "sae")
    np.testing.assert_array_equal(tensors["W_dec"], D)
    np.testing.assert_array_equal(tensors["b_dec"], np.zeros(10))
    assert not result.stacked


def test_plugin_form_keeps_signs_and_the_whole_rule(make_dictionary, tmp_path):
    D = make_dictionary(24, 10)
    dictionary = dictionary_of(D, refit=True, rtol=0.1)
    result = export_saelens(dictionary, tmp_path / "sae", **NAMES, form="plugin", k=6)
    config, tensors = saelens.open_folder(tmp_path / "sae")
    np.testing.assert_array_equal(tensors["W_dec"], D)
    rule = ("k", "encoder", "nonneg", "refit", "min_coefficient", "rtol")
    assert [config[name] for name in rule] == [6, "mp", False, True, 0.0, 0.1]
    assert config["architecture"] == result.architecture == "dbksvd_pursuit"
    assert "import dbksvd_dask.export.saelens_plugin" in result.notes[0]


def test_what_saelens_cannot_do_is_said(make_dictionary, tmp_path, caplog):
    dictionary = dictionary_of(make_dictionary(24, 10), refit=True, rtol=0.2, min_coefficient=0.5)
    result = export_saelens(dictionary, tmp_path / "sae", **NAMES)
    assert len(result.notes) == 3
    assert "SAELens does not refit" in caplog.text
    assert "form='plugin'" in result.notes[1]
    omp = export_saelens(dictionary_of(dictionary.atoms, encoder="omp"), tmp_path / "omp", **NAMES)
    assert "fitted with 'omp'" in omp.notes[0]


def test_activations_of_heads_are_reshaped(signed, tmp_path):
    export_saelens(signed, tmp_path / "sae", model_name="gpt2", hook_name="blocks.3.attn.hook_z")
    assert saelens.open_folder(tmp_path / "sae")[0]["reshape_activations"] == "hook_z"


def test_float64_stays_float64(make_dictionary, tmp_path):
    export_saelens(dictionary_of(make_dictionary(24, 10, np.float64)), tmp_path / "sae", **NAMES)
    config, tensors = saelens.open_folder(tmp_path / "sae")
    assert config["dtype"] == "float64"
    assert tensors["W_dec"].dtype == tensors["b_dec"].dtype == np.float64


# ------------------------------------------------------------------------------------------------- densities


def small_codes():
    atom = np.array([[0, 1], [0, -1], [2, 0], [0, 2]], np.int32)
    coefficient = np.array([[1.0, -2.0], [3.0, 0.0], [0.0, -1.0], [2.0, 1.0]], np.float32)
    return xr.Dataset({"atom": (("sample", "slot"), atom), "coefficient": (("sample", "slot"), coefficient)})


def test_densities_are_those_of_a_plain_count(make_dictionary, tmp_path):
    dictionary = dictionary_of(make_dictionary(4, 3), k=2)
    plain = log10_density(small_codes(), dictionary, stacked=False)
    np.testing.assert_allclose(plain, np.log10(np.array([4, 1, 1, 0]) / 4 + 1e-10), rtol=1e-6)
    parts = log10_density(small_codes(), dictionary, stacked=True)
    np.testing.assert_allclose(parts, np.log10(np.array([3, 0, 1, 0, 1, 1, 0, 0]) / 4 + 1e-10), rtol=1e-6)
    export_saelens(dictionary, tmp_path / "sae", **NAMES, codes=small_codes())
    written = load_file(tmp_path / "sae" / "sparsity.safetensors")
    np.testing.assert_array_equal(written["sparsity"], parts)


def test_codes_of_another_dictionary_are_refused(make_dictionary, tmp_path):
    codes = small_codes().assign_attrs(n_atoms=5)
    with pytest.raises(MismatchError, match="these codes are over 5 atoms, the dictionary has 4"):
        log10_density(codes, dictionary_of(make_dictionary(4, 3)), stacked=False)
    codes = small_codes().assign_attrs(n_atoms=4, dictionary={"fingerprint": "abc"})
    with pytest.raises(MismatchError, match="were written with dictionary abc"):
        export_saelens(dictionary_of(make_dictionary(4, 3)), tmp_path / "sae", **NAMES, codes=codes)
    assert not (tmp_path / "sae").exists()


# -------------------------------------------------------------------------------------------------- refusals


def test_dictionary_that_is_not_unit_norm_is_refused(signed, tmp_path):
    signed.atoms = signed.atoms.copy()
    signed.atoms[7] *= 2
    with pytest.raises(InputError, match=r"atom 7 has norm 2; an export needs atoms of unit norm: divide by"):
        export_saelens(signed, tmp_path / "sae", **NAMES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float16", "int32", "complex64"])
def test_dictionary_of_the_wrong_dtype_is_refused(signed, tmp_path, dtype):
    signed.atoms = signed.atoms.astype(dtype)
    with pytest.raises(InputError, match=f"is of dtype {dtype}; an export needs float32 or float64"):
        export_saelens(signed, tmp_path / "sae", **NAMES)


def test_existing_folder_is_refused_and_left_alone(signed, tmp_path):
    (tmp_path / "sae").mkdir()
    (tmp_path / "sae" / "mine.txt").write_text("keep")
    with pytest.raises(
        StoreError, match=r"sae already exists; choose another folder, or replace it with overwrite=True"
    ):
        export_saelens(signed, tmp_path / "sae", **NAMES)
    with pytest.raises(
        StoreError, match=r"sae holds mine.txt, which is not part of an export; it is not replaced"
    ):
        export_saelens(signed, tmp_path / "sae", **NAMES, overwrite=True)
    assert [p.name for p in (tmp_path / "sae").iterdir()] == ["mine.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["sae"]


def test_export_takes_the_place_of_one_before_it(signed, tmp_path):
    export_saelens(signed, tmp_path / "sae", **NAMES)
    before = sorted(p.name for p in (tmp_path / "sae").iterdir())
    (tmp_path / "sae" / before[0]).write_text("old")
    export_saelens(signed, tmp_path / "sae", **NAMES, overwrite=True)
    assert (tmp_path / "sae" / before[0]).read_bytes() != b"old"
    assert sorted(p.name for p in (tmp_path / "sae").iterdir()) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"atoms": np.full((4, 3), np.nan, np.float32)}, "atom 0 holds values that are not finite"),
        ({"atoms": np.ones((0, 3), np.float32)}, r"has shape \(0, 3\)"),
        ({"mean": np.zeros(9)}, r"the mean has shape \(9,\); it must be \(10,\)"),
        ({"params": {}}, "does not record how many nonzeros a sample has; give k=N$"),
        ({"params": {"k": 99}}, "k=99 exceeds n_atoms=24"),
    ],
)
def test_what_cannot_be_exported_is_refused(signed, tmp_path, change, text):
    for name, value in change.items():
        setattr(signed, name, value)
    with pytest.raises(InputError, match=text):
        export_saelens(signed, tmp_path / "sae", **NAMES)


def test_names_and_form_are_needed(signed, tmp_path):
    with pytest.raises(InputError, match="hook_name='' is not a name"):
        export_saelens(signed, tmp_path / "sae", model_name="gpt2", hook_name="")
    with pytest.raises(InputError, match="form='torch' is not known; use one of 'builtin', 'plugin'"):
        export_saelens(signed, tmp_path / "sae", **NAMES, form="torch")


def test_failed_export_leaves_nothing(signed, tmp_path):
    with pytest.raises(TypeError):
        export_saelens(signed, tmp_path / "sae", **NAMES, metadata={"not": {"json": object()}})
    assert list(tmp_path.iterdir()) == []


def test_stack_is_a_dictionary_of_both_signs(make_dictionary):
    D = make_dictionary(5, 3)
    np.testing.assert_array_equal(stack(D), np.vstack([D, -D]))


def test_config_is_plain_json(signed, tmp_path):
    signed.params["groups"] = [8, 16]
    export_saelens(signed, tmp_path / "sae", **NAMES)
    assert json.loads((tmp_path / "sae" / "cfg.json").read_text())["metadata"]["dbksvd"]["params"]["groups"] == [
        8,
        16,
    ]
