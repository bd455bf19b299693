"""A short run of the attack, and what it calls a failure; a longer one: ``python -m tests.attack``."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dbksvd_dask.errors import StoreError
from tests.attack import mutations
from tests.attack.__main__ import describe
from tests.attack.actions import Action
from tests.attack.driver import Summary, Worker, run
from tests.attack.kinds import Kind
from tests.attack.worker import Attack, outcome

SEED, CASES = 14, 40


@pytest.mark.slow
def test_every_case_ends_in_the_reference_or_in_one_line_of_ours(tmp_path):
    summary = Summary()
    for answer in run(tmp_path, SEED, range(CASES)):
        summary.add(answer)
    assert not summary.failures, "\n\n".join(map(describe, summary.failures))
    assert sum(summary.verdicts.values()) == CASES
    assert len(summary.kinds) > 15
    assert summary.verdicts["refused"] > 15
    assert summary.verdicts["same"] > 0


def test_a_worker_that_dies_is_a_failure_and_another_goes_on(tmp_path):
    worker = Worker(tmp_path)
    dies = "import os, sys; print('ready', flush=True); sys.stdin.readline(); os.kill(os.getpid(), 11)"
    worker.command = [sys.executable, "-c", dies]
    for case in (3, 4):
        answer = worker.case(7, case)
        assert (answer["verdict"], answer["end"]) == ("failure", "killed by SIGSEGV")
        assert f"--seed 7 --first {case} --cases 1" in describe(answer)
    worker.command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="does not start"):
        worker.case(7, 5)


def raising(error):
    def run() -> str:
        raise error

    return Action(run)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (StoreError("x is damaged"), "ours"),
        (StoreError("x is\ndamaged"), "not one line"),
        (StoreError(""), "not one line"),
        (OSError("x is damaged"), "unforeseen"),
        (KeyError("x"), "unforeseen"),
        (SystemExit(1), "unforeseen"),
        (MemoryError(), "unforeseen"),
    ],
)
def test_only_one_line_of_ours_is_a_refusal(error, end):
    assert outcome(raising(error))["end"] == end


def test_a_result_that_differs_is_a_failure_unless_checksums_say_so(tmp_path, monkeypatch):
    def judged(found, verify, exact=True):
        kind = Kind("kind", lambda: None, "target", {"read": Action(str, exact)}, verify)
        return Attack(tmp_path).judge(kind, "read", {"end": "result", "text": "a"}, found)

    other = {"end": "result", "text": "b"}
    assert judged({"end": "result", "text": "a"}, None) == "same"
    assert judged(other, None) == "other values"
    assert judged(other, None, exact=False) == "described"
    assert judged({"end": "unforeseen", "text": "KeyError"}, None, exact=False) == "failure"
    for found, verdict in (("ours", "found by --verify"), ("result", "failure"), ("unforeseen", "failure")):
        monkeypatch.setattr("tests.attack.worker.outcome_of_verify", lambda path, found=found: found)
        assert judged(other, "target") == verdict


def test_the_seed_decides_every_mutation(tmp_path):
    def mutated(seed, again):
        file = tmp_path / f"{seed}-{again}" / "a.json"
        file.parent.mkdir()
        file.write_text('{"shape": [60, 8], "name": "x", "chunks": [20, 8], "codecs": [{"name": "bytes"}]}')
        how = mutations.mutate_target(file, np.random.default_rng(seed))
        return how, file.read_bytes() if file.is_file() else None

    found = [mutated(seed, "first") for seed in range(40)]
    assert found == [mutated(seed, "second") for seed in range(40)]
    assert len({content for _, content in found}) > 20
