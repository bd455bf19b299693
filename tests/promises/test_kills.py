"""A short campaign of random kills; `python -m tests.kills --kills 1000` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kills import campaign


def few_kills(*args):
    command = [sys.executable, "-W", "error", "-m", "tests.kills", "--quiet", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["kinds"]


@pytest.mark.slow
def test_kills_at_any_moment_give_the_same_bytes():
    """Whenever the kills come: how often a job was hit before it ended is not judged, only what it gave."""
    kinds = few_kills("--kills", 8, "--kinds", "import,shuffle,encode,fit")
    assert list(kinds) == ["import", "shuffle", "encode", "fit"]
    assert all(kind["trials"] >= 1 for kind in kinds.values())


@pytest.mark.parametrize("damage", ["content", "leftover"])
def test_the_campaign_notices_a_difference(tmp_path, damage):
    kind = campaign.Kind("import", tmp_path / "import", (), campaign.jobs.tree)
    kind.out.mkdir(parents=True)
    (kind.out / "file").write_text("a")
    kind.expected = kind.found()
    assert campaign._compare(kind) == ""
    if damage == "content":
        (kind.out / "file").write_text("b")
    else:
        (kind.folder / "out.lock").touch()
    assert ("other bytes" if damage == "content" else "other files") in campaign._compare(kind)
