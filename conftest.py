"""Examples in docstrings run in a folder of their own, with rows to work on."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def example_folder(request, tmp_path_factory, monkeypatch):
    """Hold `activations.npy`, 300 rows of 8 features, for the examples that write files."""
    if isinstance(request.node, pytest.DoctestItem) and ".npy" in request.node.dtest.docstring:
        folder = tmp_path_factory.mktemp("example")
        np.save(folder / "activations.npy", np.random.default_rng(0).standard_normal((300, 8)).astype("f4"))
        monkeypatch.chdir(folder)
