"""The benchmarks of large stores and of object stores run, at tiny size."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from benchmarks import at_size


def test_files_of_a_run_at_size_are_ordered_and_have_two_names(tmp_path):
    args = argparse.Namespace(features=32, files=4, copies=2)
    at_size.write_files(tmp_path / "files", 0.001, args)
    files = sorted((tmp_path / "files").iterdir())
    rows = [np.load(file) for file in files]
    assert [len(part) for part in rows] == [1e6 // 64 // 4] * 4
    assert files[0].stat().st_ino == files[2].stat().st_ino != files[1].stat().st_ino
    assert (np.diff(rows[0][:, 0].astype(float)) >= 0).all()


def test_step_says_what_it_took(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.zeros((1000, 16), np.float32))
    command = ["import", str(tmp_path / "a.npy"), str(tmp_path / "s")]
    at_size.main(["--step", str(tmp_path / "took.json"), *command])
    took = json.loads((tmp_path / "took.json").read_text())
    assert took["code"] == 0
    assert min(took["peak_bytes"], took["written"]) >= 64_000
    assert json.loads(capsys.readouterr().out)["n_samples"] == 1000


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_objects_are_fewer_and_ranges_more(capsys):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from benchmarks import objects

    result = objects.main(["--chunk-mib", "9", "--units", "1", "--repeats", "1", "--delay", "0"])
    assert result["read_chunk"]["in parts"]["requests"] > result["read_chunk"]["one range"]["requests"]
    codes = result["write_codes"]
    assert codes["a unit per object"]["objects"] == codes["a chunk per object"]["objects"] / 8 == 2
    assert result["checkpoint"]["bytes"] == 4096 * 768 * 4
