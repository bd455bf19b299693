"""Every command and every line of Python of docs/language-models.md, with a model of a few blocks."""

import gzip
import re
import shlex
from pathlib import Path

import pytest

from dbksvd_dask import open_activations
from dbksvd_dask.cli import main
from tests.helpers.language_models import save_model, sentences
from tests.naive.report import page_data

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[2] / "docs" / "language-models.md"
# Two blocks and 32 features instead of a real model's.
SMALLER = {
    "--n-atoms 4096": "--n-atoms 48 --n-iter 3",
    "--k 40": "--k 4",
    "--k 20": "--k 2",
    "--k 80": "--k 8",
    "resid:8": "resid:1",
    "resid-8": "resid-1",
    "--context 128": "--context 32",
    "--seed 0": "--seed 0 --context 32",
    "loss model": "loss --context 32 model",
}


def smaller(text):
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def write_texts(folder):
    """A folder of texts, a held-out one, and a table with labels."""
    for name, seed in (("texts", 1), ("held-out", 2)):
        (folder / name).mkdir()
        for i, text in enumerate(sentences(40, seed=seed)):
            (folder / name / f"{i}.txt").write_text(text, encoding="utf-8")
    rows = "".join(f'"{text}",{"odd" if len(text) % 2 else "even"}\n' for text in sentences(10, seed=3))
    (folder / "news.csv.gz").write_bytes(gzip.compress(f"text,topic\n{rows}".encode()))


def test_every_command_and_block_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", steps=40)
    write_texts(tmp_path)
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("dbksvd ")]
    assert len(lines) == 9
    for line in lines:
        with pytest.raises(SystemExit) as done:
            main(shlex.split(smaller(line))[1:])
        assert not done.value.code, line
    assert "of mean ablation" in capsys.readouterr().out
    assert (tmp_path / "neuronpedia" / "my-model" / "1-res-dbksvd" / "features" / "batch-0.jsonl.gz").exists()
    head, arrays = page_data(tmp_path / "page.html")
    assert head["kind"] == "token"
    assert arrays["positive_token"].shape == (48, 10)
    assert arrays["position_density"].shape[0] == 48
    assert len(arrays["context_value"]) > 0
    assert open_activations("more/mlp-1.zarr")["label"].attrs["names"] == ["even", "odd"]
    for block in blocks("python"):
        code = smaller(block).replace(
            '"held-out", "resid:1", {', '"held-out", "resid:1", context=32, reconstructions={'
        )
        exec(compile(code, GUIDE.name, "exec"), names := {})
    found = names["found"]
    assert not found.doubtful
    assert found.intact.value < found.mean.loss.value - 1
    assert 0.5 < found.reconstructions["run"].of_mean.value < 1
    assert found.reconstructions["identity"].of_mean.value == pytest.approx(1, abs=1e-6)
    printed = capsys.readouterr().out.split("\n")
    assert len(set(printed)) > 3
