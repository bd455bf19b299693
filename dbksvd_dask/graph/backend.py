"""The choice between host and device, and the functions that compute there.

With a mix of devices the result would depend on which worker gets which chunk, so either all workers of a cluster
compute on GPUs or none does. `auto` probes every worker; an explicit `gpu` is refused if one has no GPU.
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
from dbksvd_dask.plan import memory
from dbksvd_dask.plan.device import CPU, DevicePlan, Placement, Sizes, plan_device
from dbksvd_dask.plan.screening import GRAM_ATOMS, uses_gram

logger = logging.getLogger(__name__)


class Worker(NamedTuple):
    """A process that computes, and its device."""

    name: str  # empty for this process
    missing: str  # what keeps it from using a GPU
    budget: int  # bytes of its device that a plan may use
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
    # a worker that dies during the probe, as with too little memory, must not end the fit: its tasks run elsewhere
    answers: dict[str, Any] = client.run(probe_device, on_error="return")
    return [Worker(name, *_answer(answers[name]), n_threads.get(name, 1)) for name in sorted(answers)]


def _answer(given: Any) -> tuple[str, int]:
    """Return a worker's answer to `probe_device`, or why it gave none."""
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


def place(device: str, sizes: Sizes, encoder: str, gram: str = "auto") -> DevicePlan:
    """Decide where a batch runs, and in which chunks.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
    sizes : of the whole batch
    encoder : one of `plan.encoders.ENCODERS`
    gram : one of `plan.screening.GRAMS`
    """
    made = _placed(device, sizes, encoder, gram)
    if uses_gram(gram, encoder, sizes.n_atoms) and made.placement.pursuit == "cpu":
        require_gram_fits(sizes.n_atoms, sizes.itemsize, encoder)
    return made


def _placed(device: str, sizes: Sizes, encoder: str, gram: str) -> DevicePlan:
    """Return the plan of the devices that there are, or of the host; parameters as in `place`."""
    found = choose(device)
    if not found:
        return DevicePlan(CPU, sizes.chunk_size, 0)
    chunks = -(-sizes.n_rows // sizes.chunk_size)
    share = -(-chunks // len(found)) * sizes.chunk_size  # whole chunks: some devices have one more than others
    per_device = sizes._replace(n_rows=min(share, sizes.n_rows))
    made = plan_device(per_device, min(w.budget for w in found), encoder, max(w.n_threads for w in found), gram)
    logger.info("device plan: %s", made)
    return made


def process_memory(dask_worker: Any = None) -> int:
    """Return the bytes that this process may use: the limit of a worker, or the memory of its machine."""
    from distributed.system import MEMORY_LIMIT  # takes a moment to import, and only wide dictionaries ask

    manager = getattr(dask_worker, "memory_manager", None)
    return int(getattr(manager, "memory_limit", None) or MEMORY_LIMIT)


def require_gram_fits(n_atoms: int, itemsize: int, encoder: str) -> None:
    """Refuse a gram that exceeds the memory of a process on which it would be computed."""
    if n_atoms <= GRAM_ATOMS:  # small: `memory_limit` is for whoever has less
        return
    client = current_client()
    given = {} if client is None else client.run(process_memory, on_error="ignore")
    memory.check_gram(n_atoms, itemsize, encoder, min(given.values(), default=0) or process_memory())


def functions(place: Placement) -> Any:
    """Return the module whose functions compute on chunks at a placement.

    That is `kernels.chunk` or, for a device, `gpu.chunk`, which has the same names and parameters. Graphs are
    built from its functions; a task that calls several of them calls this once.
    """
    if place.device == "cpu":
        return chunk
    from dbksvd_dask.gpu import chunk as on_device  # imports numba.cuda, which a fit on the host does not need

    return on_device
