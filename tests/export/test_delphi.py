"""The latent cache of Delphi: read as its loader reads it, it gives the codes back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dbksvd_dask.codes import codes_to_csr, open_codes
from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.export.delphi import export_delphi
from dbksvd_dask.store.activations import Aligned, create_activations, open_activations
from tests.helpers.cli import run
from tests.helpers.report_parts import encoded, token_store

N_ATOMS = 16


def captured(folder):
    """A store as capture writes it: tokens of three texts of unequal length, whose first token has no row."""
    text = np.repeat([0, 1, 2], [3, 5, 2]).astype(np.int32)
    position = np.concatenate([np.arange(1, n + 1) for n in (3, 5, 2)]).astype(np.int32)
    columns = {"text": text, "position": position, "token_id": (100 + np.arange(10)).astype(np.int32)}
    rows = np.random.default_rng(5).standard_normal((10, 16)).astype(np.float32)
    kinds = {name: Aligned("int32") for name in columns}
    writer = create_activations(folder / "acts.zarr", 10, 16, "float32", chunk_rows=64, aligned=kinds)
    writer.write_chunk(0, rows, columns)
    writer.finish()
    return str(folder / "acts.zarr"), columns


def read_back(folder, n_rows, columns):
    """Codes as a matrix, as Delphi's loader puts files together, and its tokens."""
    found = np.zeros((n_rows, N_ATOMS))
    row_of = {(t, p): i for i, (t, p) in enumerate(zip(columns["text"], columns["position"], strict=True))}
    for file in sorted(folder.glob("*.safetensors")):
        first, last = map(int, file.stem.split("_"))
        data = load_file(file)
        locations = data["locations"].astype(np.int64)
        locations[:, 2] += first
        assert ((locations[:, 2] >= first) & (locations[:, 2] <= last)).all()
        for (text, position, latent), value in zip(locations.tolist(), data["activations"], strict=True):
            found[row_of[text, position], latent] = value
    return found, data["tokens"]


def test_read_as_the_loader_does_it_gives_the_positive_codes_and_the_tokens(tmp_path):
    store, columns = captured(tmp_path)
    _, codes = encoded(tmp_path, store, N_ATOMS)
    how = {"hook_name": "layers.3", "model_name": "tiny", "n_splits": 3, "fill": 7}
    result = export_delphi(codes, store, tmp_path / "out", **how)
    found, tokens = read_back(tmp_path / "out" / "layers.3", 10, columns)
    dense = codes_to_csr(open_codes(codes)).toarray()
    np.testing.assert_allclose(found, np.maximum(dense, 0), rtol=1e-3)
    assert (result.n_files, result.n_texts) == (3, 3)
    assert (result.n_activations, result.n_negative) == (int((dense > 0).sum()), int((dense < 0).sum()))
    assert tokens.tolist()[0] == [7, 100, 101, 102, 7, 7]
    config = json.loads((tmp_path / "out" / "layers.3" / "config.json").read_text())
    assert (config["cache_ctx_len"], config["n_splits"], config["model_name"]) == (6, 3, "tiny")


def test_the_command_says_what_it_left_out(tmp_path, capsys):
    store, _ = captured(tmp_path)
    _, codes = encoded(tmp_path, store, N_ATOMS)
    command = ["export", "delphi", codes, tmp_path / "out", "--hook-name", "layers.3", "--model-name", "tiny"]
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert "16 latents" in out
    assert "negative" in out
    assert (tmp_path / "out" / "layers.3" / "config.json").exists()


def test_stores_that_do_not_fit_are_refused(tmp_path):
    store, _ = captured(tmp_path)
    _, codes = encoded(tmp_path, store, N_ATOMS)
    (tmp_path / "other").mkdir()
    other, _, _ = token_store(tmp_path / "other")
    names = {"hook_name": "layers.3", "model_name": "tiny"}
    with pytest.raises(InputError, match="has no token_id; give a store that `dbksvd capture` wrote"):
        export_delphi(codes, other, tmp_path / "out", **names)
    with pytest.raises(InputError, match="a name without /"):
        export_delphi(codes, store, tmp_path / "out", hook_name="a/b", model_name="tiny")
    _, more = encoded(tmp_path / "other", other, N_ATOMS)
    with pytest.raises(MismatchError, match="give the store that was encoded"):
        export_delphi(more, store, tmp_path / "out", **names)
    assert not (tmp_path / "out").exists()
    assert open_activations(store).sizes["sample"] == 10
