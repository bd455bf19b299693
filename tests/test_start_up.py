"""What an import loads, and that compiled kernels are found again by the next process."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys

from numba.core.dispatcher import Dispatcher

from dbksvd_dask import kernels
from dbksvd_dask.kernels.blas import single_blas_thread


def run(code, **environment):
    return run_python("-c", code, **environment)


def run_module(name, **environment):
    return run_python("-m", name, **environment)


def run_python(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement):
    return set(json.loads(run(f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))")))


def test_import_of_the_package_loads_nothing_heavy():
    assert loaded_by("import dbksvd_dask").isdisjoint({"numba", "dask", "xarray", "zarr", "sklearn", "numpy"})


def test_kernels_know_arrays_only():
    statement = "import dbksvd_dask.kernels.encode, dbksvd_dask.kernels.update, dbksvd_dask.lanczos"
    assert loaded_by(statement).isdisjoint({"dask", "distributed", "zarr", "xarray", "fsspec"})


def test_the_library_needs_no_torch_and_no_cluster():
    modules = loaded_by("import dbksvd_dask.model, dbksvd_dask.train")
    assert modules.isdisjoint({"torch", "distributed", "cupy", "matplotlib", "click"})


WITHOUT_EDGES = """
import sys
for name in ("click", "rich", "matplotlib", "PIL", "safetensors", "h5py", "pyarrow", "bokeh", "IPython"):
    sys.modules[name] = None  # importing it fails
import numpy as np
from dbksvd_dask import DBKSVD, encode_store, import_activations, open_codes, shuffle_activations
np.save("rows.npy", np.random.default_rng(0).standard_normal((60, 6)).astype("f4"))
import_activations("rows.npy", "raw.zarr")
shuffle_activations("raw.zarr", "store.zarr", seed=0)
DBKSVD(8, 2, n_iter=2, checkpoint="run").fit("store.zarr")
encode_store("store.zarr", "run", "codes.zarr")
print(open_codes("codes.zarr").sizes["sample"])
"""


def test_jobs_and_fits_need_no_package_of_the_edges(tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r})" + WITHOUT_EDGES
    assert run(code).split() == ["60"]


def test_every_public_name_exists_and_unknown_ones_are_refused():
    import dbksvd_dask

    for name in dbksvd_dask.__all__:
        assert getattr(dbksvd_dask, name) is not None
    assert not hasattr(dbksvd_dask, "KSVD")


FIT = """
import numpy as np
from dbksvd_dask import DBKSVD
from dbksvd_dask.kernels import pursuit, update
DBKSVD(8, 2, n_iter=1, validation=0).fit(np.random.default_rng(0).standard_normal((50, 6)).astype('f4'))
kernels = (pursuit.pursue_tile, update._refresh, update._next_products)
hits, misses = ([getattr(k.stats, what) for k in kernels] for what in ("cache_hits", "cache_misses"))
print(sum(sum(h.values()) for h in hits), sum(sum(m.values()) for m in misses))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    first = run(FIT, NUMBA_CACHE_DIR=str(tmp_path)).split()
    second = run(FIT, NUMBA_CACHE_DIR=str(tmp_path)).split()
    assert first == ["0", "3"]
    assert second == ["3", "0"]


def test_kernels_give_the_same_bits_compiled_and_loaded(tmp_path):
    """The first process compiles, the second loads what the first has kept; see kernel_bits.py."""
    compiled, loaded = (run_module("tests.kernel_bits", NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert json.loads(compiled) == json.loads(loaded)


def test_functions_that_kernels_call_are_part_of_them():
    """Else there are two copies of them, which round differently; see `kernels._jit.inner`."""
    modules = [
        importlib.import_module(f"dbksvd_dask.kernels.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)
    ]
    found = 0
    for module in modules:
        for kernel in filter(is_jitted, vars(module).values()):
            body = kernel.py_func
            for name in body.__code__.co_names:
                called = body.__globals__.get(name)
                if is_jitted(called):
                    assert called.targetoptions.get("forceinline"), f"{body.__name__} calls {name}: make it @inner"
                    found += 1
    assert found > 20


def is_jitted(thing):
    return isinstance(thing, Dispatcher)


def test_blas_is_limited_until_the_last_task_leaves():
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        before = threads()
        outer, inner = single_blas_thread(), single_blas_thread()
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert threads() == {1}, "the first to leave must not hand threads to one still computing"
        inner.__exit__(None, None, None)
        assert threads() == before


def test_threads_that_hand_over_leave_blas_as_it_was():
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_info, threadpool_limits

    def threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    def elsewhere(call, *args):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *args).result()

    with threadpool_limits(2, user_api="blas"):  # this thread now owns the limits of OpenBLAS
        first, last = single_blas_thread(), single_blas_thread()
        keep_alive = ThreadPoolExecutor(1)  # a thread that lives on, as those of a scheduler's pool do
        keep_alive.submit(first.__enter__).result()
        assert threads() == {1}, "a limit set in another thread must hold"
        elsewhere(last.__enter__)
        keep_alive.submit(first.__exit__, None, None, None).result()
        assert threads() == {1}
        elsewhere(last.__exit__, None, None, None)
        assert threads() == {2}, "whoever leaves last restores the limit, in whichever thread"
        keep_alive.shutdown()
