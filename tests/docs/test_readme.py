"""The README says what is so: its code runs, its tests, files and commands exist."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers import clusters, jobs

README = (jobs.ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_lines_on_an_array_run(capsys):
    exec(PYTHON[0].replace("20_000", "2_000"), {})
    score, shape = re.match(r"(\S+) (\(.*?\))", capsys.readouterr().out).groups()
    assert 0 < float(score) < 1
    assert shape == "(2000, 256)"


@pytest.mark.cluster
def test_lines_on_a_cluster_run(tmp_path, monkeypatch, capsys):
    from distributed import LocalCluster

    monkeypatch.chdir(tmp_path)
    jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100)
    template = next(block for block in PYTHON if "distributed" in block)
    code = template.replace("/shared", str(tmp_path)).replace("n_atoms=16384, k=64", "n_atoms=32, k=4, n_iter=2")
    with LocalCluster(**clusters.IN_PROCESS, n_workers=1, threads_per_worker=2, protocol="tcp") as cluster:
        scope = {}
        exec(code.replace("tcp://head:8786", cluster.scheduler_address), scope)
        scope["client"].close()
    assert 0 < float(capsys.readouterr().out.split()[0]) < 1


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README)
    assert len(named) > 5
    for path, name in named:
        assert f"def {name}" in (jobs.ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (jobs.ROOT / target.partition("#")[0]).exists(), target


def test_first_screen_says_what_it_is_and_the_two_commands():
    first = "\n".join(README.splitlines()[:30])
    for words in ("make demo", "make test", "larger than", "bit for bit", "kill -9"):
        assert words in first


def test_statistics_named_in_the_readme_are_there(tmp_path):
    from dbksvd_dask import encode_store, open_statistics

    store = jobs.write_store(tmp_path / "store.zarr", jobs.made_up(300, 16), 100)
    encode_store(store, jobs.write_dictionary(tmp_path / "run"), tmp_path / "codes.zarr")
    found = open_statistics(tmp_path / "codes.zarr")
    assert found.sizes["rank"] == 64
    assert np.isfinite(found["coefficient_sum"]).all()
    assert {"count", "positive_count", "abs_max", "top_sample"} <= set(found)
