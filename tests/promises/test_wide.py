"""A wide dictionary: nothing that the package does with it holds an array of all pairs of its atoms."""

from __future__ import annotations

import gc
import tracemalloc

import dask
import numpy as np
import pytest

from dbksvd_dask import (
    DBKSVD,
    encode,
    encode_store,
    open_dictionary,
    open_features,
    open_statistics,
    plots,
    write_report,
)
from dbksvd_dask.errors import MemoryPlanError
from dbksvd_dask.evaluate.coherence import coherence, nearest_atoms
from dbksvd_dask.evaluate.probing import random_dictionary_codes
from dbksvd_dask.evaluate.stability import stability
from dbksvd_dask.export.huggingface import export_huggingface
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.graph import backend
from dbksvd_dask.jobs.estimate import estimate_encode
from dbksvd_dask.lm.reconstruct import Coder
from dbksvd_dask.plan import memory, screening
from tests.helpers import jobs

M, D, N = 9000, 8, 300
HOW = {"n_atoms": M, "k": 4, "n_iter": 1, "validation": 30, "chunk_size": 150, "init": "uniform"}


@pytest.fixture(scope="module", autouse=True)
def narrow_limit():
    """As if 9000 atoms were many."""
    with pytest.MonkeyPatch.context() as patch, dask.config.set(scheduler="threads", num_workers=1):
        patch.setattr(screening, "GRAM_ATOMS", 2000)
        patch.setattr(backend, "GRAM_ATOMS", 2000)
        yield


@pytest.fixture(scope="module")
def Y():
    return np.random.default_rng(5).standard_normal((N, D)).astype("f4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, Y):
    """A run, its store and its codes."""
    folder = tmp_path_factory.mktemp("wide")
    jobs.write_store(folder / "y.zarr", Y, 100, "float32")
    DBKSVD(**HOW, checkpoint=folder / "run").fit(folder / "y.zarr")
    encode_store(folder / "y.zarr", folder / "run", folder / "c.zarr")
    return folder


@pytest.fixture
def no_pairs():
    """Fail where a test allocates as much as one byte for every pair of atoms."""
    gc.collect()
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < M * M


FITS = {
    "dead atoms": {"dead_atoms": "random"},
    "non-negative, refit": {"nonneg": True, "refit": True},
    "mean": {"sparsity": "mean"},
    "groups": {"groups": (1000, 8000), "encode": "staged"},
    "groups below the limit": {"groups": (1000, 2000, 2000, 4000)},
    "growth, prior": {"growth": 3000.0, "n_iter": 16, "sparsity": "mean", "frequency_prior": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_a_fit_and_its_codes(name, Y, no_pairs):
    model = DBKSVD(**{**HOW, **FITS[name]}).fit(Y)
    codes = model.transform(Y)
    assert codes.sizes["sample"] == N
    assert float(model.history_["variance_explained"][-1]) > 0.5
    assert model.inverse_transform(codes).shape == Y.shape


def test_jobs_and_statistics(folder, tmp_path, no_pairs):
    encode_store(folder / "y.zarr", folder / "run", tmp_path / "c.zarr", refit=True)
    assert open_statistics(tmp_path / "c.zarr").sizes["atom"] == M
    plan = estimate_encode(folder / "y.zarr", folder / "run", tmp_path / "other.zarr")
    assert (plan["gram_bytes"], plan["products_per_sample"]) == (0, 4)
    plan = estimate_encode(folder / "y.zarr", folder / "run", tmp_path / "other.zarr", gram="always")
    assert (plan["gram_bytes"], plan["products_per_sample"]) == (4 * M * M, 1)


@pytest.mark.slow
def test_coherence_neighbours_and_matching(folder, no_pairs):
    atoms = open_dictionary(folder / "run").atoms
    assert coherence(atoms, max_pairs=10).nearest.shape == (M,)
    assert nearest_atoms(atoms, 3)[0].shape == (M, 3)
    plots.plot_coherence(coherence(atoms, max_pairs=10))


@pytest.mark.slow
def test_stability(folder):
    """Matching keeps candidates, whose sparse graph grows with the atoms, not with their square."""
    atoms = open_dictionary(folder / "run").atoms
    tracemalloc.start()
    found = stability([atoms, np.random.default_rng(0).permutation(atoms)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.mean > 0.999
    assert peak < 2 * M * M


@pytest.mark.slow
def test_report_and_features(folder, Y, tmp_path, no_pairs):
    features = open_features(folder / "run", folder / "c.zarr", [f"row {i}" for i in range(N)])
    assert len(features.nearest(5, 12).atoms) == 12
    assert features.on(Y[0]).atoms
    assert features[7]._repr_html_()
    write_report(folder / "run", folder / "c.zarr", tmp_path / "page.html")


def test_exports_and_baselines(folder, Y, tmp_path, no_pairs):
    dictionary = open_dictionary(folder / "run")
    where = {"model_name": "gpt2-small", "hook_name": "blocks.0.hook_resid_post"}
    export_saelens(dictionary, tmp_path / "saelens", **where, codes=folder / "c.zarr")
    export_huggingface(dictionary, tmp_path / "hub", repo_id="someone/something")
    random_dictionary_codes(Y[:20], M, 4)
    assert Coder(dictionary)(Y[:5]).shape == (5, D)


# ---------------------------------------------------------------------------------------------- refused


def no_gram_yet(*_):
    raise AssertionError("work began before the refusal")


def test_a_gram_beyond_the_memory_is_refused_before_any_work(Y, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "process_memory", lambda: 500_000_000)
    monkeypatch.setattr("dbksvd_dask.kernels.encode.gram_tile", no_gram_yet)
    atoms = open_dictionary(folder / "run").atoms
    text = "takes 503.3 MB of the 500.0 MB that a process has; use encoder='mp' with gram='never', or at most 7000"
    with pytest.raises(MemoryPlanError, match=text):
        DBKSVD(**HOW, encoder="omp").fit(Y)
    with pytest.raises(MemoryPlanError, match=text):
        encode(Y, atoms, 4, encoder="fista")
    with pytest.raises(MemoryPlanError, match="a process has; use gram='never', or at most"):
        encode_store(folder / "y.zarr", folder / "run", tmp_path / "c.zarr", gram="always")
    assert not (tmp_path / "c.zarr").exists()


def test_workers_are_asked_for_their_memory():
    worker = type("Worker", (), {"memory_manager": type("Manager", (), {"memory_limit": 123})})
    assert backend.process_memory(worker) == 123
    assert backend.process_memory() > 10**8


def test_a_limit_that_only_a_gram_exceeds_names_the_way_out():
    sizes = memory.FitSizes(16, 9000, 4, 1000, 1000)
    for encoder, advice in (
        ("mp", "; gram='never' would fit"),
        ("omp", "; encoder='mp' with gram='never' would fit"),
    ):
        with pytest.raises(MemoryPlanError, match=advice):
            memory.check_limit(sizes._replace(encoder=encoder, gram="always"), 700_000_000)


def test_the_plan_counts_the_grams_of_groups_and_that_of_held_out_rows():
    def grams(**more):
        return memory.plan_fit(memory.FitSizes(16, 2000, 8, 1000, 1000, **more)).gram

    whole, half = grams(), memory.plan_fit(memory.FitSizes(16, 1000, 8, 1000, 1000)).gram
    assert grams(groups=(1000, 1000)) == pytest.approx(2 * half, abs=2)
    assert grams(groups=(1000, 1000), validation=10) == whole
    sizes = memory.FitSizes(16, 9000, 8, 1000, 1000, groups=(1000, 8000), validation=10)
    assert memory.plan_fit(sizes).gram == half, "the wide group and the whole dictionary have none"
