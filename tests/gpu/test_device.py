"""Choosing a device, planning its memory, and the likeness of CPU and GPU functions."""

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.errors import DeviceError, InputError, MemoryPlanError
from dbksvd_dask.gpu import device
from dbksvd_dask.graph import backend
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.plan import device as gpu_plan
from dbksvd_dask.plan.device import CPU, Placement, Sizes, peak_bytes, plan_device
from dbksvd_dask.plan.encoders import ENCODERS
from tests.helpers import clusters

ROOT = Path(__file__).resolve().parents[2]
Y = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device.current.cache_clear()
    yield
    device.current.cache_clear()


@pytest.fixture
def cupy_without_device(monkeypatch):
    """CuPy as it is on a machine without a driver: it imports, and says that nothing is available."""
    cupy = SimpleNamespace(__version__="14.2.0", is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device.current.cache_clear()
    yield
    device.current.cache_clear()


# ---------------------------------------------------------------------------------------------- choosing


def test_gpu_without_cupy_says_what_to_install(no_cupy):
    for call in (
        lambda: DBKSVD(8, 2, n_iter=1, device="gpu").fit(Y),
        lambda: encode(Y, np.eye(6, dtype=np.float32), 2, device="gpu"),
        lambda: device.current(),
    ):
        with pytest.raises(
            DeviceError, match=r"CuPy cannot be imported .*`pip install 'dbksvd-dask\[gpu\]'`; or use"
        ):
            call()


def test_gpu_without_a_card_says_where_to_look(cupy_without_device):
    with pytest.raises(DeviceError, match=r"CuPy 14\.2\.0 is installed but finds no CUDA device; `nvidia-smi`"):
        DBKSVD(8, 2, n_iter=1, device="gpu").fit(Y)


def test_numba_without_cuda_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14", is_available=lambda: True))
    import numba.cuda

    monkeypatch.setattr(numba.cuda, "is_available", lambda: False)
    assert "numba-cuda finds no CUDA device" in device.missing()


@pytest.mark.usefixtures("cupy_without_device")
def test_auto_without_a_card_is_the_cpu_bit_for_bit():
    fits = [DBKSVD(8, 2, n_iter=1, device=name).fit(Y).components_ for name in ("auto", "cpu")]
    np.testing.assert_array_equal(*fits)
    assert backend.place("auto", Sizes(100, 50, 6, 8, 2), "mp") == (CPU, 50, 0)


def test_an_unknown_device_is_refused(tmp_path):
    for call in (
        lambda: DBKSVD(8, 2, device="cuda").fit(Y),
        lambda: encode(Y, np.eye(6, dtype=np.float32), 2, device="cuda"),
    ):
        with pytest.raises(InputError, match=r"device='cuda' is not known; use one of 'auto', 'cpu', 'gpu'"):
            call()
    assert inspect.signature(encode_store).parameters["device"].default == "auto"


def test_one_worker_without_a_card_keeps_all_on_the_cpu(monkeypatch):
    both = [backend.Worker("tcp://a", "", 1 << 33, 2), backend.Worker("tcp://b", "CuPy is not there", 0, 2)]
    monkeypatch.setattr(backend, "workers", lambda: both)
    assert backend.choose("auto") == []
    with pytest.raises(DeviceError, match=r"on worker tcp://b CuPy is not there; or use device='cpu'"):
        backend.choose("gpu")
    monkeypatch.setattr(backend, "workers", lambda: [])
    with pytest.raises(DeviceError, match="has no workers yet"):
        backend.choose("gpu")


@pytest.mark.cluster
def test_workers_of_a_cluster_are_asked():
    from distributed import Client, LocalCluster

    with LocalCluster(**clusters.IN_PROCESS, n_workers=2, threads_per_worker=1) as cluster, Client(cluster):
        found = backend.workers()
        assert len(found) == 2
        assert all(w.name and w.n_threads == 1 for w in found)
        if found[0].missing:
            with pytest.raises(DeviceError, match=f"on worker {found[0].name} CuPy"):
                backend.choose("gpu")


def test_a_batch_is_shared_out_among_the_cards(monkeypatch):
    cards = [backend.Worker(f"tcp://{i}", "", 1 << 31, 2) for i in range(3)]
    monkeypatch.setattr(backend, "workers", lambda: cards)
    sizes = Sizes(10_000, 1000, 2304, 4096, 20)
    made = backend.place("gpu", sizes, "mp")
    assert made.device_bytes == peak_bytes(sizes._replace(n_rows=4000), made.chunk_size, made.placement, 1)


@pytest.mark.slow
def test_a_cpu_run_loads_neither_cupy_nor_cuda():
    code = (
        "import sys, numpy as np; from dbksvd_dask import DBKSVD; "
        "DBKSVD(8, 2, n_iter=1, device='cpu').fit(np.eye(16, dtype='float32')); "
        "assert not {'cupy', 'numba.cuda', 'dbksvd_dask.gpu.cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------- planning


def test_examples_in_the_plan_hold():
    assert doctest.testmod(gpu_plan).failed == 0


def test_the_plan_knows_the_sizes_of_the_code():
    from dbksvd_dask.gpu import moments, products

    assert gpu_plan._SUM_ROWS == moments._SUM_ROWS == products._SUM_ROWS


@given(
    n_rows=st.integers(1, 2_000_000),
    n_features=st.integers(1, 8192),
    n_atoms=st.integers(1, 200_000),
    k=st.integers(1, 128),
    budget=st.integers(1 << 28, 80 << 30),
    threads=st.integers(1, 128),
    encoder=st.sampled_from(list(ENCODERS)),
)
def test_a_plan_fits_and_more_memory_never_makes_it_worse(
    n_rows, n_features, n_atoms, k, budget, threads, encoder
):
    sizes = Sizes(n_rows, 8192, n_features, n_atoms, k)
    made = []
    for memory in (budget, 2 * budget):
        try:
            made.append(plan_device(sizes, memory, encoder, threads))
        except MemoryPlanError:
            continue
        assert made[-1].device_bytes <= memory
        assert made[-1].placement.device == "gpu"
        assert made[-1].placement.gram_on_device is False or ENCODERS[encoder].on_device
        assert 1 <= made[-1].chunk_size <= 8192
    if len(made) == 2:
        small, large = ((p.placement.gram_on_device, p.placement.resident, p.chunk_size) for p in made)
        assert small <= large
    else:
        assert not made or made[0].device_bytes > budget, "what fits into less fits into more"


def test_what_does_not_fit_is_refused_with_the_sizes():
    with pytest.raises(MemoryPlanError, match=r"500000 atoms needs .* [0-9.]+ MB is available\. Use device='cpu'"):
        plan_device(Sizes(8192, 8192, 768, 500_000, 16), 1 << 28, "mp", 1)


def test_more_rows_never_need_less_memory():
    place = Placement("gpu")
    peaks = [peak_bytes(Sizes(n, 8192, 2304, 4096, 20), 8192, place, 1) for n in (1000, 8192, 65_536, 10**6)]
    assert peaks == sorted(peaks)


# ---------------------------------------------------------------------------------------------- likeness

PAIRS = [
    ("encode", "encode_rows"),
    ("encode", "gram_matrix"),
    ("products", "squared_norms"),
    ("screened", "encode_rows"),
    ("update", "group_by_round"),
]
# functions of `kernels.chunk` that serve both
SHARED = {"frozen", "invert_rounds", "add_counts", "arrays_in_units", "row_scale"}


def parameters(function):
    """Names and defaults."""
    signature = inspect.signature(getattr(function, "py_func", function))
    return [(p.name, p.default) for p in signature.parameters.values()]


def functions_of(module):
    """Public functions that a module defines."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in found if f.__module__ == module.__name__ and not name.startswith("_")}


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_cpu_and_gpu_functions_take_the_same_parameters(module, name):
    cpu, gpu = (importlib.import_module(f"dbksvd_dask.{place}.{module}") for place in ("kernels", "gpu"))
    assert parameters(getattr(cpu, name)) == parameters(getattr(gpu, name))


def test_what_tasks_do_to_chunks_has_a_twin_on_the_device():
    from dbksvd_dask.gpu import chunk as on_device
    from dbksvd_dask.kernels import chunk

    assert backend.functions(CPU) is chunk
    assert backend.functions(Placement("gpu")) is on_device
    cpu, gpu = functions_of(chunk), functions_of(on_device)
    assert set(cpu) - set(gpu) == SHARED
    for name in set(cpu) & set(gpu):
        assert parameters(cpu[name]) == parameters(gpu[name]), name


def test_the_arithmetic_in_the_documentation_is_what_the_command_prints(capsys):
    from benchmarks import gpu

    assert gpu.main(["--expected"]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "gpu.md").read_text()


def test_benchmark_without_a_card_says_so(no_cupy, capsys):
    from benchmarks import gpu

    assert gpu.main(["--json"]) == 1
    assert "CuPy cannot be imported" in capsys.readouterr().err


class Asked:
    """A client whose second worker dies while it is asked."""

    def nthreads(self):
        return {"tcp://a": 1, "tcp://b": 1}

    def run(self, function, on_error):
        assert on_error == "return", "else the answer of one dead worker is an exception for all"
        return {"tcp://a": ("", 10**9), "tcp://b": ConnectionResetError("reset by peer")}


def test_a_worker_that_dies_while_it_is_asked_for_its_device_does_not_end_the_fit(monkeypatch):
    monkeypatch.setattr(backend, "current_client", Asked)
    assert backend.choose("auto") == []
    with pytest.raises(DeviceError, match=r"on worker tcp://b there is no answer \(reset by peer\)"):
        backend.choose("gpu")
