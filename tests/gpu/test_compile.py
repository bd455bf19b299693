"""The kernels compile to machine code for real cards, which needs numba-cuda but no card.

The simulator runs kernels as Python and checks no types; the compiler does. Skipped where numba-cuda and its CUDA
libraries are not installed (`pip install 'numba-cuda[cu12]'`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import types

INT, LONG, DOUBLE, BOOL = types.int32, types.int64, types.float64, types.boolean


def array(kind, ndim):
    return types.Array(kind, ndim, "C")


def signatures(real):
    """Types with which `gpu.encode` and `gpu.update` launch each kernel."""
    matrix, vector, index, ids = array(real, 2), array(real, 1), array(INT, 1), array(INT, 2)
    wide, wide2, wide3 = array(DOUBLE, 1), array(DOUBLE, 2), array(DOUBLE, 3)
    codes = (ids, matrix)
    refit = (array(real, 3), *codes, wide3, wide2, matrix)
    pass_numbers = (LONG, LONG, LONG, DOUBLE, LONG, LONG, DOUBLE, DOUBLE)
    pass_arrays = (ids, *codes, *codes)
    return {
        "pursue": (matrix, matrix, wide, vector, array(LONG, 2), LONG, DOUBLE, BOOL, BOOL, *codes, matrix),
        "refit": refit,
        "refit_nonneg": refit,
        "pursue_pass": (
            matrix,
            matrix,
            *pass_numbers,
            BOOL,
            vector,
            vector,
            LONG,
            vector,
            wide,
            wide2,
            *pass_arrays,
        ),
        "support_grams": (matrix, matrix, ids, array(real, 3), matrix),
        "subtract_reconstruction": (matrix, *codes, matrix, matrix),
        "entry_products": (matrix, vector, index, index, index, matrix, vector, vector),
        "atom_sums": (matrix, vector, vector, index, index, index, LONG, matrix, wide, wide),
        "refresh": (matrix, vector, index, index, index, matrix, matrix, BOOL, BOOL, matrix, vector),
    }


def assembler():
    """NVIDIA's assembler, which comes with numba-cuda's CUDA libraries."""
    for folder in map(Path, sys.path):
        for found in folder.glob("nvidia/*/bin/ptxas"):
            return found
    return None


@pytest.fixture(params=[(7, 5), (8, 0), (9, 0)], ids=["T4", "A100", "H100"])
def card(request, monkeypatch):
    """Make the compiler believe that a card is there, with nothing compiled for another yet."""
    from numba.cuda import dispatcher

    from dbksvd_dask.gpu import cuda as gpu_cuda
    from dbksvd_dask.gpu import cuda_screened

    device = type("Device", (), {"compute_capability": request.param})
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: device)
    for module in (gpu_cuda, cuda_screened):
        for inner in vars(module).values():
            if hasattr(inner, "overloads"):
                inner.overloads.clear()
    return request.param


@pytest.mark.parametrize("real", [types.float32, types.float64], ids=str)
@pytest.mark.parametrize("name", signatures(types.float32))
def test_kernel_compiles_without_spilling_registers(card, name, real, tmp_path):
    from numba import cuda

    from dbksvd_dask.gpu import cuda as gpu_cuda
    from dbksvd_dask.gpu import cuda_screened

    kernel = getattr(gpu_cuda if hasattr(gpu_cuda, name) else cuda_screened, name)
    text, _ = cuda.compile_ptx(kernel.py_func, signatures(real)[name], cc=card)
    assert ".entry" in text
    tool = assembler()
    if tool is None:
        pytest.skip("ptxas is not installed; the kernel compiled to PTX")
    (tmp_path / "kernel.ptx").write_text(text)
    limit = ["-maxrregcount", str(gpu_cuda.PURSUE_REGISTERS)] if name == "pursue" else []
    command = [tool, "-v", f"-arch=sm_{card[0]}{card[1]}", *limit, tmp_path / "kernel.ptx", "-o", os.devnull]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilled = int(re.search(r"(\d+) bytes spill stores", done.stderr)[1])
    assert spilled <= (64 if limit and real is types.float64 else 0)  # the limit is made for float32
    static = re.search(r"(\d+) bytes smem", done.stderr)
    if name == "pursue_pass":  # launched without dynamic shared memory
        assert int(static[1]) <= 48 * 1024
        return
    assert static is None or int(static[1]) <= 4096, "device.CupySpace.shared_bytes leaves this much for it"
