"""benchmarks/network_data.py at small size."""

import json

import numpy as np
import pytest

from benchmarks import network_data
from dbksvd_dask import open_activations
from dbksvd_dask.lm.texts import Texts
from tests.helpers.language_models import save_model, sentences


def test_held_out_texts_are_in_no_training_file(tmp_path):
    texts = [f"text {i}" for i in range(200)]
    train, held_out = network_data.split_texts(Texts(texts), tmp_path)
    parts = [[json.loads(line)["text"] for line in path.read_text().splitlines()] for path in (train, held_out)]
    assert [len(part) for part in parts] == [196, 4]
    assert sorted(parts[0] + parts[1]) == sorted(texts)


def test_tasks_are_drawn_with_as_many_of_both_sides():
    positive = np.arange(50) < 12
    chosen = network_data.balanced(positive, 20)
    assert len(set(chosen.tolist())) == 20
    assert positive[chosen].sum() == 10
    assert positive[network_data.balanced(positive, 1000)].sum() == 12


def test_first_letter_prompts_end_with_the_word_and_never_show_it_before():
    words = [f" {letter}word" for letter in "abcdefghijklm"]
    for word, prompt in zip(words, network_data.letter_prompts(words), strict=True):
        *examples, last = prompt.split("\n")[1:]
        assert last == f"{word} has the first letter:"
        assert len(examples) == 10
        assert not any(line.startswith(word + " ") for line in examples)
        assert all(line.endswith(f": {line.strip()[0].upper()}") for line in examples)


def test_a_file_is_written_once(tmp_path):
    calls = []
    for _ in range(2):
        network_data.once(tmp_path / "a.txt", lambda path: (calls.append(path), path.write_text("x")))
    assert len(calls) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_preparation_of_a_small_model(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = save_model(tmp_path / "model")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sentences(120))
    (tmp_path / "texts.jsonl").write_text(lines)
    rows = "".join(f'"{text}",{i % 2}\n' for i, text in enumerate(sentences(30)))
    (tmp_path / "7_task.csv").write_text("prompt,target\n" + rows)
    monkeypatch.setattr(network_data, "task_files", lambda: [tmp_path / "7_task.csv"])
    monkeypatch.setattr(network_data, "CONTEXT", 32)
    options = ["--model", str(model), "--hook", "resid:0", "--texts", str(tmp_path / "texts.jsonl")]
    options += ["--tokens", "200", "--held-out", "20", "--words", "0", "--task-rows", "10"]
    data = network_data.main([str(tmp_path / "data"), *options])
    assert open_activations(data.train)["activations"].shape[0] >= 200
    assert open_activations(data.held_out)["activations"].shape[0] >= 20
    (task,) = data.tasks()
    with np.load(task) as found:
        assert found["rows"].shape == (10, 32)
        assert found["positive"].sum() == 5


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_a_faster_form_of_the_model_is_compared_and_leaves_held_out_tokens_exact(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = save_model(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in sentences(200)))
    options = [str(tmp_path / "data"), "--model", str(model), "--hook", "resid:0"]
    options += [
        "--texts",
        str(tmp_path / "texts.jsonl"),
        "--dtype",
        "bfloat16",
        "--words",
        "0",
        "--task-rows",
        "0",
    ]
    network_data.main([*options, "--difference", "4"])
    said = capsys.readouterr().out
    assert said.startswith("bfloat16 against float32: ")
    assert 0 < float(said.split(": ")[1].split()[0]) < 0.01
    assert not (tmp_path / "data" / "train").exists()
    made = network_data.main([*options, "--tokens", "200", "--held-out", "40"])
    about = [open_activations(store).attrs["provenance"] for store in (made.train, made.held_out)]
    assert [one["model_dtype"] for one in about] == ["bfloat16", "float32"]
