"""The fault list names tests that exist."""

from __future__ import annotations

import itertools
import re

from tests.helpers.jobs import ROOT


def test_every_test_named_in_the_fault_list_exists():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert len(named) >= 19
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"


def test_every_row_of_the_fault_list_names_a_test():
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    heads = {line for line, below in itertools.pairwise(lines) if below.startswith("|---")}
    rows = [line for line in lines if line.startswith("| ") and line not in heads]
    assert rows
    assert all("::test_" in row for row in rows)
