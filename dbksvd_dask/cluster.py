"""Where a command runs: on threads, on worker processes of this machine, or on a cluster by address.

Only commands and benchmarks use this module. The library runs on the current scheduler and starts nothing.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import dask

from dbksvd_dask.errors import ClusterError, InputError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DASHBOARD_PORT = 8787  # Dask's own; taken when it is free
CONNECT_TIMEOUT = 30.0  # seconds to wait for a scheduler
SAY_EVERY = 60.0  # seconds between two words about workers that are still missing
# Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536, which also makes glibc map every larger array anew and
# give it back when freed: a batch of 32,768 x 768 then spent 1.1 s of 6.5 in page faults. Arrays of up to 32 MB,
# the most glibc allows, are reused instead, and a worker keeps at most 256 MB that it does not need.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 256 << 20}


@dataclass(frozen=True)
class TLSFiles:
    """PEM files that authenticate a command; see docs/cluster.md.

    Attributes
    ----------
    ca : certificate of the authority that signed every certificate of the cluster
    cert : certificate of this client (its key may be in the same file)
    key : private key of that certificate, or None
    """

    ca: str
    cert: str
    key: str | None = None


@contextmanager
def connect(
    workers: int | None = None,
    scheduler: str | None = None,
    threads: int | None = None,
    *,
    tls: TLSFiles | None = None,
    memory_limit: int | str | None = None,
    timeout: float = CONNECT_TIMEOUT,
    wait_for: int | None = None,
) -> Iterator[Any]:
    """Make a scheduler current for the duration of a block.

    Parameters
    ----------
    workers : int, optional
        Start that many worker processes on this machine; their dashboard listens on loopback only.
    scheduler : str, optional
        Address of a running scheduler, ``tcp://host:8786`` or ``tls://host:8786``. Not with `workers`.
    threads : int, optional
        Without workers: threads of this process (default: one per core). With workers: threads of each
        (default 1).
    tls : TLSFiles, optional
        For a ``tls://`` address; default: what Dask's own configuration says.
    memory_limit : int or str, optional
        Bytes per started worker, as Dask reads them (``"4GB"``); default: an equal share of the memory.
    timeout : float
        Seconds to wait for a scheduler.
    wait_for : int, optional
        Go on only once a running cluster has this many workers, however long that takes: a queue may start them
        one by one, and the first would get all the work.

    Yields
    ------
    distributed.Client, or None on threads.

    Raises
    ------
    InputError
        When `workers` and `scheduler` are both given, or an address cannot be one.
    ClusterError
        When the scheduler does not answer.
    """
    _check(workers, scheduler, threads, wait_for)
    if scheduler is not None:
        with _remote(scheduler, tls, timeout) as client:
            _wait(client, scheduler, wait_for or 0)
            yield client
    elif workers is not None:
        with _local(workers, threads or 1, memory_limit) as client:
            yield client
    else:
        with dask.config.set(scheduler="threads", **({"num_workers": threads} if threads else {})):
            yield None


def _wait(client: Any, address: str, n: int) -> None:
    """Wait until a cluster has `n` workers; say so every minute."""
    while (have := len(client.nthreads())) < n:
        logger.warning("waiting for %d workers at %s, which has %d", n, address, have)
        with suppress(TimeoutError):
            client.wait_for_workers(n, timeout=SAY_EVERY)


def _check(workers: int | None, scheduler: str | None, threads: int | None, wait_for: int | None) -> None:
    if workers is not None and scheduler is not None:
        raise InputError(
            f"workers={workers} and scheduler={scheduler!r} were both given; use workers=N to start processes "
            "on this machine or scheduler=ADDRESS to use a running cluster"
        )
    if wait_for is not None and scheduler is None:
        raise InputError(f"wait_for={wait_for} waits for workers of a running cluster; give its scheduler=ADDRESS")
    for name, value in (("workers", workers), ("threads", threads), ("wait_for", wait_for)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value} is too small; use {name} >= 1")
    if scheduler is not None and not scheduler.startswith(("tcp://", "tls://")):
        raise InputError(
            f"scheduler={scheduler!r} is not an address of a scheduler; use tcp://host:8786 or tls://host:8786"
        )


@contextmanager
def _remote(address: str, tls: TLSFiles | None, timeout: float) -> Iterator[Any]:
    from distributed import Client

    try:
        client = Client(address, timeout=timeout, security=_security(tls))
    except (OSError, TimeoutError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"no scheduler answers at {address} ({_why(error)}); start one with `dask scheduler`; a tls:// "
            "address needs certificates: tls=TLSFiles(ca, cert, key)"
        ) from error
    with client:
        yield client


def _security(tls: TLSFiles | None) -> Any:
    """Return the client's half of TLS, or None for what Dask's configuration says."""
    from distributed import Security

    if tls is None:
        return None
    return Security(
        require_encryption=True, tls_ca_file=tls.ca, tls_client_cert=tls.cert, tls_client_key=tls.key or tls.cert
    )


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _local(workers: int, threads: int, memory_limit: int | str | None) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    environ = {f"distributed.nanny.pre-spawn-environ.{name}": value for name, value in MALLOC.items()}
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(environ))
        cluster = stack.enter_context(
            LocalCluster(
                n_workers=workers,
                threads_per_worker=threads,
                processes=True,
                host=LOOPBACK,
                # Dask's default listens on every interface, and anyone who reaches it sees the run
                dashboard_address=f"{LOOPBACK}:{_free_port(DASHBOARD_PORT)}",
                memory_limit="auto" if memory_limit is None else memory_limit,
            )
        )
        client = stack.enter_context(Client(cluster))
        logger.info("%d worker processes at %s", workers, client.scheduler.address)
        yield client


def _free_port(wanted: int) -> int:
    """Return `wanted` if nothing listens there, else 0 for any free one; avoids Dask's warning."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except OSError:
            return 0
    return wanted
