"""Runs cases in worker processes that may die, and counts how they end."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A case takes a tenth of a second; the first of a process also imports and may compile kernels. Waited for in
# short turns: a machine that stands still for an hour takes one of them.
PATIENCE, TURN = 600.0, 5.0


@dataclass
class Summary:
    """How the cases ended.

    Attributes
    ----------
    verdicts : Counter of verdict
    kinds : Counter of the kind that was attacked
    failures : list of answers that are failures
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Count one case."""
        self.verdicts[answer["verdict"]] += 1
        self.kinds[answer["kind"]] += 1
        if answer["verdict"] == "failure":
            self.failures.append(answer)


class Worker:
    """One process that runs cases; started anew after it died."""

    def __init__(self, home: Path, kinds: Iterable[str] = ()) -> None:
        self.kinds = tuple(kinds)
        self.command = [sys.executable, "-m", "tests.attack.worker", str(home), *self.kinds]
        self.process: subprocess.Popen[str] | None = None

    def case(self, seed: int, number: int) -> dict[str, Any]:
        """Run one case there; a death is an answer too."""
        process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{seed} {number}\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            answered = any(selector.select(TURN) for _ in range(round(PATIENCE / TURN)))
            line = process.stdout.readline() if answered else ""
        answer: dict[str, Any] = json.loads(line) if line else self._death(process)
        return {"seed": seed, "case": number, "kinds": self.kinds, **answer}

    def _start(self) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self.process.stdout is None or self.process.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError("the worker of the attack does not start; its own error is above")
        return self.process

    def _death(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        hung = process.poll() is None and not _ends(process)
        if hung:
            process.kill()
        code = process.wait()
        self.close()
        how = f"no answer in {PATIENCE:.0f} s" if hung else _end_of(code)
        return {
            "kind": "unknown",
            "action": "unknown",
            "how": "unknown",
            "end": how,
            "text": how,
            "verdict": "failure",
        }

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate()  # closes its input, at which it ends
            self.process = None


def _ends(process: subprocess.Popen[str]) -> bool:
    """Tell whether a process that closed its answers ends by itself."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_of(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run(home: Path, seed: int, cases: Iterable[int], kinds: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """Run cases of a seed in a folder, of all kinds or of some; give the answer of each."""
    worker = Worker(home, kinds)
    try:
        for number in cases:
            yield worker.case(seed, number)
    finally:
        worker.close()
