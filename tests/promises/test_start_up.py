"""What an import loads, and that compiled kernels are found again by the next process."""

import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from dbksvd_dask import kernels
from dbksvd_dask.base.late import postponed
from dbksvd_dask.kernels.blas import single_blas_thread

ROOT = Path(__file__).resolve().parents[2]


def run(code, **environment):
    return run_python("-c", code, **environment)


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
    return set(json.loads(run(f"{statement}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")))


def test_import_of_the_package_loads_nothing_heavy():
    assert loaded_by("import dbksvd_dask").isdisjoint({"numba", "dask", "xarray", "zarr", "sklearn", "numpy"})


HEAVY = {"numba", "llvmlite", "dask", "distributed", "zarr", "xarray", "pandas", "scipy.stats", "fsspec"}
EDGES = {"matplotlib", "PIL", "click", "rich", "torch", "cupy", "h5py", "pyarrow"}


def test_import_of_the_estimator_loads_what_computes_later():
    assert loaded_by("from dbksvd_dask import DBKSVD").isdisjoint(HEAVY | EDGES)


FIRST_FIT = """import numpy as np
from dbksvd_dask import DBKSVD
DBKSVD(4, 2, n_iter=1).fit(np.eye(30, 6, dtype="f4"))"""


@pytest.mark.slow
def test_a_fit_of_an_array_loads_no_cluster_no_store_and_no_statistics():
    assert loaded_by(FIRST_FIT).isdisjoint({"distributed", "zarr", "scipy.stats", "matplotlib", "click", "torch"})


AS_BEFORE = """
from dbksvd_dask import DBKSVD
from sklearn.base import BaseEstimator, clone
assert isinstance(clone(DBKSVD(4, 2)), BaseEstimator)
import scipy.stats, pandas, scipy, sys
from sklearn.utils import fixes
assert type(sys.modules["scipy.stats"]).__name__ == type(pandas).__name__ == "module"
assert scipy.stats is sys.modules["scipy.stats"] and fixes.scipy.stats is scipy.stats
print(scipy.stats.norm.cdf(0.0), fixes.pd.Series([1, 2]).sum())
"""


def test_what_the_import_left_for_later_is_itself_when_it_is_used():
    assert run(AS_BEFORE).split() == ["0.5", "3"]


def test_what_is_loaded_already_is_not_postponed():
    import fractions

    with postponed("fractions"):
        assert sys.modules["fractions"] is fractions


def test_a_postponed_module_that_is_used_at_once_is_loaded_at_once(monkeypatch):
    monkeypatch.delitem(sys.modules, "statistics", raising=False)
    with postponed("statistics"):
        from statistics import median
    assert median([1, 5, 9]) == 5
    assert type(sys.modules["statistics"]).__name__ == "module"


def test_kernels_know_arrays_only():
    statement = "import dbksvd_dask.kernels.encode, dbksvd_dask.kernels.update, dbksvd_dask.kernels.lanczos"
    assert loaded_by(statement).isdisjoint({"dask", "distributed", "zarr", "xarray", "fsspec"})


@pytest.mark.slow
def test_the_library_needs_no_torch_and_no_cluster():
    modules = loaded_by("import dbksvd_dask.model, dbksvd_dask.fit.trainer")
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


@pytest.mark.slow
def test_jobs_and_fits_need_no_package_of_the_edges(tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r})" + WITHOUT_EDGES
    assert run(code).split() == ["60"]


def test_every_public_name_exists_and_unknown_ones_are_refused():
    import dbksvd_dask

    for name in dbksvd_dask.__all__:
        assert getattr(dbksvd_dask, name) is not None
    for name in set(dbksvd_dask.__all__) - {"__version__"}:  # an example that runs as a doctest
        assert ">>> from dbksvd_dask import" in getattr(dbksvd_dask, name).__doc__, name
    assert not hasattr(dbksvd_dask, "KSVD")


BITS = """
import json
from dbksvd_dask.kernels import compact, update
from tests.helpers import kernel_bits
bits = kernel_bits.checksums(("mp", "mp refit"))  # the others compile for half a minute
kernels = (compact.pursue_tile, update._refresh, update._next_products)
loaded, compiled = (
    sum(sum(getattr(kernel.stats, what).values()) for kernel in kernels) for what in ("cache_hits", "cache_misses")
)
print(json.dumps({"bits": bits, "loaded": loaded, "compiled": compiled}))
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes tell that share a new cache: the first compiles, the second loads; see kernel_bits.py."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return [json.loads(run(BITS, NUMBA_CACHE_DIR=cache)) for _ in range(2)]


@pytest.mark.slow
def test_a_second_process_compiles_nothing(two_processes):
    first, second = two_processes
    assert first["loaded"] == 0
    assert first["compiled"] >= 3
    assert (second["loaded"], second["compiled"]) == (first["compiled"], 0)


@pytest.mark.slow
def test_kernels_give_the_same_bits_compiled_and_loaded(two_processes):
    first, second = two_processes
    assert first["bits"] == second["bits"]


@pytest.fixture
def read_only(tmp_path):
    """A copy of the package and a home in which nothing can be written, also not by root; the environment of both.

    Files stand where numba would make its folders.
    """
    copy = tmp_path / "site"
    shutil.copytree(ROOT / "dbksvd_dask", copy / "dbksvd_dask", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "dbksvd_dask" / "kernels" / "__pycache__").write_text("")
    (tmp_path / "home").write_text("")
    (tmp_path / "tmp").mkdir()
    home = str(tmp_path / "home")
    return {
        "PYTHONPATH": str(copy),
        "HOME": home,
        "XDG_CACHE_HOME": home,
        "NUMBA_CACHE_DIR": "",
        "TMPDIR": str(tmp_path / "tmp"),
    }


def run_read_only(arguments, environment):
    """Run in an empty folder, so that the copy is imported: (stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=environment["TMPDIR"],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# a few kernels that compile within seconds: what they give, and how often they were found or compiled
FEW = """
import hashlib
import numpy as np
from dbksvd_dask.kernels import moments, update
rng = np.random.default_rng(0)
R, x = rng.standard_normal((9, 70)).astype("f4"), rng.standard_normal((9, 1)).astype("f4")
start, pos, local = np.arange(10), np.arange(9), np.arange(9, dtype=np.int32) % 4
arrays = update.next_products(R, x, start, pos, local, R[:4].copy(), x[:4, 0].copy())
sums = np.zeros(70), np.zeros(70), np.zeros(9)
moments.column_sums(R, *sums)
print(hashlib.sha256(b"".join(a.tobytes() for a in (*arrays, *sums))).hexdigest())
for what in ("cache_hits", "cache_misses"):
    print(sum(sum(getattr(k.stats, what).values()) for k in (update._next_products, moments.column_sums)))
"""


@pytest.mark.slow
def test_where_nothing_can_be_written_kernels_are_kept_in_a_private_temporary_folder(read_only):
    (first, told), (second, _) = (run_read_only(["-c", FEW], read_only) for _ in range(2))
    expected = run(FEW).split()[0]
    assert first.split() == [expected, "0", "2"]
    assert second.split() == [expected, "2", "0"]
    assert told.count("no folder for compiled kernels") == 1
    assert "NUMBA_CACHE_DIR" in told
    (folder,) = Path(read_only["TMPDIR"]).glob("dbksvd-numba-*")
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_temporary_folder_that_others_can_write_is_not_taken_and_the_bits_are_the_same(read_only):
    folder = Path(read_only["TMPDIR"], f"dbksvd-numba-{os.getuid()}")
    folder.mkdir()
    folder.chmod(0o777)
    found, told = run_read_only(["-c", FEW], read_only)
    assert list(folder.iterdir()) == []
    assert told.count("no folder for compiled kernels") == 1
    assert "every process compiles" in told
    assert found.split()[0] == run(FEW).split()[0]


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


def test_codes_are_read_in_the_process_that_encoded_them(tmp_path):
    """Distributed, loaded during the encode, keeps its configuration afterwards."""
    code = """
import numpy as np
from dbksvd_dask import DBKSVD, encode_store, import_activations, open_codes

np.save("a.npy", np.random.default_rng(0).standard_normal((300, 8)).astype("f4"))
import_activations("a.npy", "s.zarr")
DBKSVD(16, 2, n_iter=1, checkpoint="run").fit("s.zarr")
encode_store("s.zarr", "run", "c.zarr")
print(open_codes("c.zarr").compute().sizes["sample"])
"""
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{code}")
    assert run_python(str(script), PYTHONPATH=str(ROOT)).strip() == "300"
