"""The benchmark of the jobs runs, at tiny size, and says what it promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import jobs


@pytest.mark.slow
def test_jobs_are_measured_against_a_copy(tmp_path, capsys):
    jobs.main(["--size", "tiny", "--only", "import,shuffle", "--json", "--folder", str(tmp_path)])
    result = json.loads(capsys.readouterr().out)
    assert [job["job"] for job in result["jobs"]] == ["import", "shuffle"]
    for job in result["jobs"]:
        assert job["bytes"] == 4096 * 64 * 2
        assert job["seconds"] > 0
        assert job["ratio"] > 0
        assert job["peak_memory_bytes"] > 0
    assert not list(tmp_path.iterdir())
    assert "| import | 0.00 |" in jobs.table(result)
