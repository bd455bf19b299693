"""Every notebook runs in a clean kernel at a size for tests, and is shipped with its outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.jobs import PATIENCE

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from notebooks import execute  # noqa: E402 - needs both

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = execute.find_notebooks()
# The notebook on language models needs torch.
RUN = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.interop] if path.stem.startswith("06") else [])
    for path in NOTEBOOKS
]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.fixture
def surroundings(monkeypatch, tmp_path):
    """What a kernel inherits: the project, and a place of its own for IPython's and matplotlib's files."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_there_are_six_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_shipped_with_outputs_and_end_in_something_to_look_at(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < execute.MAX_BYTES
    notebook = nbformat.reads(text, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kept = [cell for cell in cells if "no-output" not in cell.metadata.get("tags", [])]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    assert not any(output.output_type == "error" for output in outputs(notebook))
    assert {"text/html", "image/png"} & set(kept[-1].outputs[-1].data)
    shown = "".join(str(output) for output in outputs(notebook))
    assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users)/", shown), "a path of somebody's machine"
    assert "tiny" not in "".join(cell.source for cell in notebook.cells).lower()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("path", RUN)
def test_notebook_runs_from_a_clean_kernel(path, surroundings, tmp_path):
    if path.stem.startswith("06"):
        pytest.importorskip("torch")
    notebook = execute.smaller(nbformat.read(path, as_version=4))
    shown = outputs(execute.run(notebook, tmp_path, PATIENCE))
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert {"text/html", "image/png"} & kinds
    complaints = [output["text"] for output in shown if output.get("name") == "stderr"]
    assert complaints == [] or path.stem[:2] in ("04", "06")  # a cluster and transformers log what they like
    if not path.stem.startswith("05"):  # the one that is quiet
        assert any('role="progressbar"' in output.get("data", {}).get("text/html", "") for output in shown)


def test_tidying_drops_large_outputs_warnings_and_the_folder(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in "ab"]
    cells[0].outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="warning"),
        nbformat.v4.new_output("stream", name="stdout", text=f"{tmp_path}/x and {tmp_path}"),
    ]
    cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="long")]
    cells[1].metadata["tags"] = ["no-output"]
    cells[1].metadata["tiny"] = "b - 1"
    made = execute.tidy(nbformat.v4.new_notebook(cells=cells), tmp_path)
    assert [[output.text for output in cell.outputs] for cell in made.cells] == [["x and ."], []]
    assert [cell.source for cell in execute.smaller(made).cells] == ["a", "b - 1"]
