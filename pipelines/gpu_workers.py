"""Start one Dask worker per GPU: each sees a card of its own, through CUDA_VISIBLE_DEVICES.

    dask scheduler --host 127.0.0.1 &
    python -m pipelines.gpu_workers tcp://127.0.0.1:8786

A fit with a `Client` of that scheduler and `device="gpu"` then uses all cards. The workers end with this process.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

# Two threads: while one queues work for the card, the other reads the next chunk. Each holds one chunk in memory.
THREADS = 2


def visible_devices() -> list[str]:
    """Cards that a worker may be started on: those CUDA_VISIBLE_DEVICES names, or all that nvidia-smi lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device.strip() for device in named.split(",") if device.strip()]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return listed.stdout.split()


def worker_command(scheduler: str, device: str, threads: int, memory_limit: str) -> list[str]:
    """Command that starts the worker of one card."""
    name = f"gpu-{device}-{os.getpid()}"
    command = [sys.executable, "-m", "dask", "worker", scheduler, "--name", name, "--nthreads", str(threads)]
    return [*command, "--memory-limit", memory_limit, "--no-dashboard", "--death-timeout", "60"]


def worker_environment(device: str) -> dict[str, str]:
    """Environment of the worker of one card.

    Dask counts an array on a card as if it lay in the worker's own memory. The fit plans the card's memory itself,
    so the worker must not write such arrays to disk, nor wait, because it thinks it is full.
    """
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": device,
        "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "false",
        "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL": "false",
        "DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE": "false",
    }


def run(commands: Sequence[tuple[list[str], dict[str, str]]]) -> int:
    """Run the workers until one ends or this process is told to; give an exit code."""
    workers = [subprocess.Popen(command, env=environment) for command, environment in commands]
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped and all(worker.poll() is None for worker in workers):
        time.sleep(0.2)
    ended = [worker.returncode for worker in workers if worker.returncode is not None]
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for worker in workers:
        worker.wait()
    return 0 if stopped else max(map(abs, ended), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.gpu_workers", description="Start one Dask worker per GPU."
    )
    parser.add_argument("scheduler", help="address of the scheduler, such as tcp://127.0.0.1:8786")
    parser.add_argument("--devices", help="cards, such as 0,1,3; all that can be seen when not given")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads per worker (default %(default)s)")
    parser.add_argument("--memory-limit", default="auto", help="host memory per worker (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    args = parser.parse_args(argv)
    devices = args.devices.split(",") if args.devices else visible_devices()
    if not devices:
        print("no GPU found: nvidia-smi lists none; name them with --devices 0,1", file=sys.stderr)
        return 1
    commands = [
        (worker_command(args.scheduler, device, args.threads, args.memory_limit), worker_environment(device))
        for device in devices
    ]
    if args.dry_run:
        for command, environment in commands:
            print(f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}", *command)
        return 0
    return run(commands)


if __name__ == "__main__":
    sys.exit(main())
