"""Whole fits and encodings on the device: the estimator's answer is the CPU's, whatever the plan."""

import dask
import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.graph import backend
from dbksvd_dask.plan.device import CPU, DevicePlan, Placement

pytestmark = pytest.mark.gpu

PLANS = {
    "resident": Placement("gpu"),
    "parked": Placement("gpu", resident=False),
    "pursuit-on-host": Placement("gpu", gram_on_device=False),
}


@pytest.fixture
def planned(space, monkeypatch):
    """Put a plan of one's own in the place of what the card's size would give."""

    def use(where, chunk_size):
        def place(device, sizes, encoder, gram):
            if device == "cpu":
                return DevicePlan(CPU, sizes.chunk_size, 0)
            return DevicePlan(where, min(chunk_size, sizes.chunk_size), 0)

        if hasattr(space, "launches"):  # simulated: each thread of a block is a thread of Python
            space.threads = 2
        monkeypatch.setattr("dbksvd_dask.graph.backend.place", place)

    return use


@pytest.fixture
def samples(rng):
    X = rng.standard_normal((30, 5)) @ rng.standard_normal((5, 8)) + 0.1 * rng.standard_normal((30, 8))
    return X.astype(np.float32)


def fit(Y, device, **how):
    fixed = {"batch_size": 18, "n_rounds": 2, "chunk_size": 7, "validation": 3, "seed": 3}
    return DBKSVD(9, 2, n_iter=how.pop("n_iter", 1), device=device, **fixed, **how).fit(Y)


@pytest.mark.parametrize("plan", PLANS)
def test_fit_on_the_device_equals_the_cpu(space, planned, samples, plan):
    planned(PLANS[plan], 7)
    n_iter = 2 if plan == "resident" else 1
    cpu, gpu = fit(samples, "cpu", n_iter=n_iter), fit(samples, "gpu", n_iter=n_iter)
    assert isinstance(gpu.components_, np.ndarray)
    np.testing.assert_allclose(gpu.components_, cpu.components_, atol=2e-4)
    for name in cpu.history_:
        if "seconds" not in name:
            np.testing.assert_allclose(gpu.history_[name], cpu.history_[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "how",
    [
        # not from data: a sample that is an atom of the first group leaves the second rounding to learn from
        {"groups": (4, 5), "init": "uniform"},
        {"nonneg": True},
        {"refit": True, "lanczos_steps": 3},
        {"encoder": "omp"},
        {"gram": "never", "refit": True},
        {"dead_atoms": "random", "lanczos_steps": 1},
        {"whiten": 0.5},
    ],
    ids=lambda how: next(iter(how)),
)
def test_every_kind_of_fit_equals_the_cpu(space, planned, samples, how):
    planned(PLANS["pursuit-on-host" if how.get("encoder") == "omp" else "resident"], 7)
    cpu, gpu = fit(samples, "cpu", **how), fit(samples, "gpu", **how)
    np.testing.assert_allclose(gpu.components_, cpu.components_, atol=1e-3)


def test_threads_and_parked_residuals_do_not_change_a_bit(space, planned, samples):
    planned(PLANS["resident"], 7)
    with dask.config.set(scheduler="synchronous"):
        one = fit(samples, "gpu").components_
    with dask.config.set(scheduler="threads", num_workers=3):
        many = fit(samples, "gpu").components_
    np.testing.assert_array_equal(one, many)
    planned(PLANS["parked"], 7)
    np.testing.assert_array_equal(one, fit(samples, "gpu").components_)


@pytest.mark.parametrize("plan", ["resident", "pursuit-on-host"])
def test_encode_transform_and_score_equal_the_cpu(space, planned, samples, plan):
    planned(PLANS[plan], 7)
    model = fit(samples, "cpu")
    cpu = encode(samples, model.components_, 2, mean=model.mean_, device="cpu")
    gpu = encode(samples, model.components_, 2, mean=model.mean_, device="gpu")
    np.testing.assert_array_equal(gpu.atom, cpu.atom)
    np.testing.assert_allclose(gpu.coefficient, cpu.coefficient, atol=1e-5)
    score = model.score(samples)
    model.set_params(device="gpu")
    np.testing.assert_array_equal(model.transform(samples).atom, cpu.atom)
    assert model.score(samples) == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("how", [{}, {"gram": "never"}, {"encoder": "omp"}], ids=str)
def test_whitened_codes_on_the_device_equal_those_of_the_cpu(space, planned, samples, how):
    planned(PLANS["pursuit-on-host" if how.get("encoder") == "omp" else "resident"], 7)
    model = fit(samples, "cpu", whiten=0.5, **how)
    cpu, score = model.transform(samples), model.score(samples)
    model.set_params(device="gpu")
    gpu = model.transform(samples)
    np.testing.assert_array_equal(gpu.atom, cpu.atom)
    np.testing.assert_allclose(gpu.coefficient, cpu.coefficient, atol=1e-4)
    assert model.score(samples) == pytest.approx(score, abs=1e-5)


def test_encode_job_on_the_device_writes_the_same_codes(space, planned, samples, tmp_path):
    from dbksvd_dask.codes import open_codes
    from dbksvd_dask.dictionary import Dictionary
    from dbksvd_dask.jobs.encode import encode_store
    from dbksvd_dask.store.activations import create_activations

    planned(PLANS["resident"], 7)
    store = tmp_path / "store.zarr"
    writer = create_activations(store, *samples.shape, samples.dtype, chunk_rows=len(samples))
    writer.write_chunk(0, samples)
    writer.finish()
    model = fit(samples, "cpu")
    dictionary = Dictionary(model.components_, model.mean_, {"k": 2, "n_atoms": 9})
    results = {
        device: encode_store(store, dictionary, tmp_path / f"{device}.zarr", device=device)
        for device in ("cpu", "gpu")
    }
    cpu, gpu = (open_codes(tmp_path / f"{device}.zarr").compute() for device in ("cpu", "gpu"))
    np.testing.assert_array_equal(gpu.atom, cpu.atom)
    np.testing.assert_allclose(gpu.coefficient, cpu.coefficient, atol=1e-5)
    for name, value in results["cpu"].metrics.items():
        assert results["gpu"].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name


def test_nan_on_the_device_is_named(space, planned, samples):
    from dbksvd_dask.errors import InputError

    planned(PLANS["resident"], 7)
    samples[17, 3] = np.nan
    with pytest.raises(InputError, match="sample 17"):
        encode(samples, np.eye(8, dtype=np.float32), 3, device="gpu")


def test_products_and_residuals_never_travel_to_the_host(space, planned, samples):
    """In a resident fit only sums, norms, atoms and, for the signs of atoms, codes leave the device."""
    if not hasattr(space, "to_host_bytes"):
        pytest.skip("counted by the simulated device only")
    planned(PLANS["resident"], 30)
    n, d = 30, 40
    wide = np.repeat(samples, 5, axis=1)
    spec = {"batch_size": n, "n_iter": 1, "chunk_size": n, "validation": 0, "dead_atoms": "keep", "n_rounds": 2}
    space.to_host_bytes = 0
    DBKSVD(9, 2, device="gpu", **spec).fit(wide)
    residual, products, atoms = n * d * 4, n * 9 * 4, 9 * d * 4
    sums = 3 * (2 * d + n) * 8 + n * 8  # of samples and two residuals, and the norms that are looked at for NaN
    counts, largest_coefficient, codes = 10 * 4, 4, n * 2 * 8
    assert space.to_host_bytes == atoms + sums + counts + largest_coefficient + codes
    assert space.to_host_bytes < residual + products


def test_auto_takes_the_device_when_every_worker_has_one(space, monkeypatch):
    from dbksvd_dask.gpu import device

    monkeypatch.setattr(device, "budget", lambda: 1 << 33)
    assert [w.budget for w in backend.choose("auto")] == [1 << 33]
    assert backend.choose("cpu") == []
