"""The folder for Hugging Face: what is in it, and a card whose commands work."""

import json
import re
import sys
import types

import numpy as np
import pytest
import xarray as xr

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.export.huggingface import export_huggingface
from dbksvd_dask.export.saelens import export_saelens
from tests.naive.saelens import read_card

NAMES = {"model_name": "org/model", "hook_name": "blocks.6.hook_resid_post"}


@pytest.fixture
def dictionary(make_dictionary, rng):
    history = {"variance_explained": [0.1, 0.75], "dead": [3.0, float("nan")]}
    params = {"n_atoms": 24, "k": 3, "nonneg": True, "center": True, "rtol": 0.01, "seed": 9}
    return Dictionary(make_dictionary(24, 10), rng.standard_normal(10), params, "store", 2, history)


def test_folder_is_ready_to_upload(dictionary, tmp_path):
    result = export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms", **NAMES, license="mit")
    files = sorted(str(p.relative_to(tmp_path / "hf")) for p in (tmp_path / "hf").rglob("*") if p.is_file())
    hook = NAMES["hook_name"]
    assert files == [
        *("README.md", f"{hook}/cfg.json", f"{hook}/sae_weights.safetensors"),
        *("config.json", "dictionary.safetensors"),
    ]
    assert (result.path, result.architecture) == (str(tmp_path / "hf"), "matching_pursuit")


def test_saelens_part_is_the_saelens_export(dictionary, tmp_path):
    export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms", **NAMES)
    export_saelens(dictionary, tmp_path / "sae", **NAMES)
    for name in ("cfg.json", "sae_weights.safetensors"):
        assert (tmp_path / "hf" / NAMES["hook_name"] / name).read_bytes() == (tmp_path / "sae" / name).read_bytes()


def test_card_says_what_it_is_and_what_was_measured(dictionary, tmp_path):
    export_huggingface(
        dictionary,
        tmp_path / "hf",
        repo_id="me/atoms",
        **NAMES,
        license="mit",
        metrics={"probing accuracy": 0.875},
    )
    head, body = read_card((tmp_path / "hf" / "README.md").read_text())
    assert {"license: mit", "library_name: saelens", "base_model: org/model"} <= set(head)
    assert "24 atoms over 10 features" in body
    assert "at most 3 atoms with coefficients non-negative" in body
    assert "| last iteration: variance explained | 0.75 |" in body
    assert "| probing accuracy | 0.875 |" in body
    assert "| k | 3 |" in body
    assert "nan" not in body
    assert str(tmp_path) not in body
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["params"]["seed"] == 9
    assert config["metrics"]["probing accuracy"] == 0.875


def run_card(folder, monkeypatch, activations):
    """Run the Python lines of a card on activations; return the names they define."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = {"me/atoms": str(folder)}.__getitem__
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    names = {"activations": activations}
    exec(code, names)
    return names


def test_command_on_the_card_encodes_as_the_fit_does(dictionary, tmp_path, rng, monkeypatch):
    export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms")
    names = run_card(tmp_path / "hf", monkeypatch, rng.standard_normal((30, 10)).astype(np.float32))
    expected = encode(names["activations"], dictionary.atoms, 3, mean=dictionary.mean, nonneg=True, rtol=0.01)
    xr.testing.assert_identical(names["codes"], expected)
    assert names["again"].shape == (30, 10)


@pytest.mark.parametrize(
    "how",
    [
        {"whiten": 0.5},
        {"nonneg": True, "groups": (8, 16), "encode": "staged", "whiten": 1.0},
        {"sparsity": "mean", "encoder": "omp"},
    ],
)
def test_command_on_the_card_keeps_map_stages_and_threshold(how, tmp_path, rng, monkeypatch):
    Y = (rng.standard_normal((300, 10)) * np.geomspace(3, 0.2, 10)).astype(np.float32)
    model = DBKSVD(24, 3, n_iter=2, validation=0, **how).fit(Y)
    export_huggingface(model.to_dictionary(), tmp_path / "hf", repo_id="me/atoms")
    names = run_card(tmp_path / "hf", monkeypatch, Y)
    xr.testing.assert_identical(names["codes"], model.transform(Y))


def test_codes_bring_figures_and_densities(dictionary, tmp_path, rng):
    codes = encode(rng.standard_normal((50, 10)).astype(np.float32), dictionary.atoms, 3, nonneg=True)
    export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms", **NAMES, codes=codes)
    body = (tmp_path / "hf" / "README.md").read_text()
    l0 = float((codes["atom"].data >= 0).sum() / 50)
    assert f"| codes: mean L0 | {l0:.4g}".rstrip("0").rstrip(".") in body
    assert "| codes: samples | 50 |" in body
    assert (tmp_path / "hf" / NAMES["hook_name"] / "sparsity.safetensors").exists()


def test_without_a_model_there_is_no_saelens_part(dictionary, tmp_path):
    result = export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms")
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
        *("README.md", "config.json", "dictionary.safetensors")
    ]
    assert "SAELens" not in (tmp_path / "hf" / "README.md").read_text()
    assert result.architecture == ""


def test_signed_card_explains_the_stack_and_plugin_card_names_the_import(dictionary, tmp_path):
    dictionary.params["nonneg"] = False
    export_huggingface(dictionary, tmp_path / "a", repo_id="me/atoms", **NAMES)
    assert "`W_dec` is `[D; -D]`" in (tmp_path / "a" / "README.md").read_text()
    export_huggingface(dictionary, tmp_path / "b", repo_id="me/atoms", **NAMES, form="plugin")
    text = (tmp_path / "b" / "README.md").read_text()
    assert "import dbksvd_dask.export.saelens_plugin" in text
    assert "[D; -D]" not in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"repo_id": "atoms"}, "repo_id='atoms' is not the name of a repository; use 'user/name'"),
        ({"repo_id": "me/atoms", "model_name": "gpt2"}, "give both for a SAELens part, or neither"),
        ({"repo_id": "me/a", "model_name": "gpt2", "hook_name": "a/b"}, "cannot be the name of a folder"),
    ],
)
def test_names_are_checked(dictionary, tmp_path, options, text):
    with pytest.raises(InputError, match=text):
        export_huggingface(dictionary, tmp_path / "hf", **options)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_refused(dictionary, tmp_path):
    (tmp_path / "hf").mkdir()
    with pytest.raises(StoreError, match="already exists; choose another folder"):
        export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms")
    export_huggingface(dictionary, tmp_path / "hf", repo_id="me/atoms", overwrite=True)


def test_single_atom_and_no_mean(tmp_path):
    one = Dictionary(np.array([[0.6, 0.8]], np.float32), None, {"k": 1})
    export_huggingface(one, tmp_path / "hf", repo_id="me/atoms")
    assert "None were recorded." in (tmp_path / "hf" / "README.md").read_text()
