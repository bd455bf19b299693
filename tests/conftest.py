"""Data that many tests share: random and real, small."""

from __future__ import annotations

import os
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from dbksvd_dask.plan.encoder import EncodeSpec

# Examples may take their time: how long they take depends on the machine.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Whoever uses one of these fixtures is marked by it.
MARKS = {
    "s3": "network",
    "stub": "network",
    "guarded": "network",
    "site": "slow",
    "driver": "browser",
    "bert": "interop",
}


# Folders whose tests run commands, guides and benchmarks as a whole: left out of `make test-fast`.
WHOLE_PROGRAMS = ("docs", "promises")


def pytest_collection_modifyitems(items):
    """Mark, and put what takes long first, so that no process is left alone with it at the end."""
    for item in items:
        if item.path.parent.name in WHOLE_PROGRAMS:
            item.add_marker(pytest.mark.slow)
        for name in MARKS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(MARKS[name])
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "cluster")))


@pytest.fixture(scope="session", autouse=True)
def whatever_the_machine_does():
    """A busy machine or disk changes nothing.

    Files are not forced to the disk: that takes most of the time of a small test, and the machine stays up.
    Commands do not tell every ten seconds how far they are; tests of that ask for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr("dbksvd_dask.progress.LINE_EVERY", float("inf"))
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(20240)


@pytest.fixture(scope="session")
def patches():
    """Real data: 8 x 8 x 3 colour patches of scikit-learn's two photographs, centred, float32 (600, 192)."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(7)
    rows = []
    for photo in load_sample_images().images:
        for _ in range(300):
            i, j = rng.integers(0, photo.shape[0] - 8), rng.integers(0, photo.shape[1] - 8)
            rows.append(photo[i : i + 8, j : j + 8].reshape(-1) / 255.0)
    Y = np.array(rows, np.float32)
    Y -= Y.mean(axis=0)
    Y.flags.writeable = False
    return Y


def random_dictionary(rng, n_atoms, n_features, dtype=np.float32):
    D = rng.standard_normal((n_atoms, n_features))
    return (D / np.linalg.norm(D, axis=1, keepdims=True)).astype(dtype)


@pytest.fixture
def make_dictionary(rng):
    return lambda n_atoms, n_features, dtype=np.float32: random_dictionary(rng, n_atoms, n_features, dtype)


@pytest.fixture
def whole_gram():
    """Return a context in which every kernel reads the whole gram, so that equal work gives equal bits."""

    @contextmanager
    def entered():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EncodeSpec, "compact_gram", lambda self, weighted: False)
            yield

    return entered
