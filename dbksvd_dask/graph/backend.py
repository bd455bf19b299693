"""Where the heavy work runs, and the functions that do it there.

A mix of devices would make the result depend on which worker got which chunk, so all workers of a cluster compute
on GPUs or none does. `auto` asks every worker that is there; an explicit `gpu` is refused where one has none.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import dask
from dask.system import CPU_COUNT

from dbksvd_dask.errors import DeviceError
from dbksvd_dask.gpu import device as gpu_device
from dbksvd_dask.graph.run import current_client
from dbksvd_dask.kernels import chunk
from dbksvd_dask.plan.device import CPU, DevicePlan, Placement, Sizes, plan_device

logger = logging.getLogger(__name__)


class Worker(NamedTuple):
    """What a process that computes has to offer."""

    name: str  # empty for this process
    missing: str  # what keeps it from using a GPU
    budget: int  # bytes of its device to plan with
    n_threads: int


def probe_device() -> tuple[str, int]:
    """Return what keeps this process from using a GPU, and the bytes of its device."""
    missing = gpu_device.missing()
    return missing, 0 if missing else gpu_device.budget()


def workers() -> list[Worker]:
    """Return the processes on which a computation would run now."""
    client = current_client()
    if client is None:
        threads = dask.config.get("num_workers", None) or CPU_COUNT
        return [Worker("", *probe_device(), int(threads))]
    n_threads = client.nthreads()
    # a worker that dies while it is asked, as with too little memory, must not end the fit: its tasks go elsewhere
    answers: dict[str, Any] = client.run(probe_device, on_error="return")
    return [Worker(name, *_answer(answers[name]), n_threads.get(name, 1)) for name in sorted(answers)]


def _answer(given: Any) -> tuple[str, int]:
    """What a worker said of its device, or why it could not."""
    missing, budget = given if isinstance(given, tuple) else (f"there is no answer ({given})", 0)
    return str(missing), int(budget)


def choose(device: str) -> list[Worker]:
    """Return the workers whose GPUs to use; none for the CPU.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
    """
    if device == "cpu":
        return []
    found = workers()
    without = [w for w in found if w.missing]
    if found and not without:
        logger.info("device=%r: %d GPU(s)", device, len(found))
        return found
    if device == "auto":
        return []
    if not found:
        raise DeviceError("device='gpu' was asked for, but the cluster has no workers yet; wait for them first")
    where = f" on worker {without[0].name}" if without[0].name else ""
    raise DeviceError(f"device='gpu' was asked for, but{where} {without[0].missing}; or use device='cpu'")


def place(device: str, sizes: Sizes, encoder: str) -> DevicePlan:
    """Decide where a batch runs, and in which chunks.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
    sizes : of the whole batch
    encoder : one of `plan.encoders.ENCODERS`
    """
    found = choose(device)
    if not found:
        return DevicePlan(CPU, sizes.chunk_size, 0)
    chunks = -(-sizes.n_rows // sizes.chunk_size)
    share = -(-chunks // len(found)) * sizes.chunk_size  # whole chunks: one device may have one more than another
    own = sizes._replace(n_rows=min(share, sizes.n_rows))
    made = plan_device(own, min(w.budget for w in found), encoder, max(w.n_threads for w in found))
    logger.info("device plan: %s", made)
    return made


def functions(place: Placement) -> Any:
    """Return the module whose functions compute on chunks where a placement says.

    It is `kernels.chunk` or, for a device, its twin `gpu.chunk`: the same names, parameters and results. Graphs
    are built from its functions, and a task that calls several asks once.
    """
    if place.device == "cpu":
        return chunk
    from dbksvd_dask.gpu import chunk as on_device  # whose libraries are only there where a device is

    return on_device
