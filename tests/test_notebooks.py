"""Every notebook runs from top to bottom in a clean kernel, at a size for tests; outputs are not committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def surroundings(monkeypatch, tmp_path):
    """What a kernel inherits: the project, the tiny size, an own place for IPython's and matplotlib's files."""
    monkeypatch.setenv("DBKSVD_NOTEBOOK_SIZE", "tiny")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("DBKSVD_TEXT_STORE", raising=False)


def test_there_are_five_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_a_clean_kernel(path, surroundings, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=PATIENCE, startup_timeout=PATIENCE, kernel_name="python3", resources=resources
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown)
    complaints = [output["text"] for output in shown if output.get("name") == "stderr"]
    assert complaints == [] or "cluster" in path.stem  # a cluster logs what it likes
