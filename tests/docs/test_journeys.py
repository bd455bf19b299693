"""Three newcomers, each with the words of the README or of the page it links to, in an environment with the wheel.

On a laptop: from a folder of .npy files and a file of texts to a page that names features. On a cluster: a fit by
address, an encode as an array job. In a notebook: the features of the laptop's run.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess

import numpy as np
import pytest

from tests.docs.test_blocks import blocks_of, smaller
from tests.helpers import jobs
from tests.naive.report import page_data

pytestmark = pytest.mark.slow

WORDS = ("bird", "house", "river", "engine")


def block_with(page, words):
    return next(block for block in blocks_of(jobs.ROOT / page) if words in block.text)


def write_activations(folder):
    """Three files of rows in four clusters, and a line of text for each row, which names its cluster."""
    rng = np.random.default_rng(0)
    cluster = rng.integers(0, 4, 1500)
    rows = 5 * np.eye(16)[cluster] + 0.3 * rng.standard_normal((1500, 16))
    (folder / "shards").mkdir()
    for i, part in enumerate(np.split(rows.astype("float32"), 3)):
        np.save(folder / "shards" / f"acts_{i}.npy", part)
    lines = [f"text {i} is about a {WORDS[c]}\n" for i, c in enumerate(cluster)]
    (folder / "texts.txt").write_text("".join(lines), encoding="utf-8")


def shell(script, folder, home, **more):
    """Run a script that finds the commands of the environment; the checkout is on no path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{folder / 'bin'}:{home / 'bin'}:{env['PATH']}", **more}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=jobs.PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def laptop(home, tmp_path_factory):
    """The folder of someone who has typed the commands of the README."""
    folder = tmp_path_factory.mktemp("laptop")
    write_activations(folder)
    block = block_with("README.md", "dbksvd import")
    assert len(block.commands) <= 6
    shell(smaller("\n".join(block.commands)), folder, home)
    return folder


def test_on_a_laptop_six_commands_lead_to_a_page_that_names_features(laptop):
    head, _ = page_data(laptop / "page.html")
    assert head["kind"] == "text"
    named = {word for name in head["keywords"] for word in WORDS if word in name.split(", ")[0]}
    assert named == set(WORDS)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_in_a_notebook_the_features_of_a_run_show_themselves(laptop, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(jobs.ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    code = block_with("README.md", "open_features").text
    cells = [nbformat.v4.new_code_cell(line) for line in code.strip().splitlines() if line]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(laptop)}}
    nbclient.NotebookClient(
        notebook, timeout=jobs.PATIENCE, startup_timeout=jobs.PATIENCE, kernel_name="python3", resources=resources
    ).execute()
    shown = [output["data"].get("text/html", "") for cell in cells for output in cell.get("outputs", ())]
    assert sum("bird" in html for html in shown) >= 1
    assert "iframe" in shown[-1]


@pytest.mark.cluster
def test_on_a_cluster_a_fit_by_address_and_an_encode_as_an_array_job(home, tmp_path):
    write_activations(tmp_path)
    (tmp_path / "bin").mkdir()
    dask = tmp_path / "bin" / "dask"  # the environment has the package, not its commands
    dask.write_text(f'#!/bin/sh\nexec {home / "bin" / "python"} -m dask "$@"\n')
    dask.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    by_hand = block_with("docs/cluster.md", "dask worker tcp://10.0.0.1").commands
    scheduler, worker, fit = (
        line.replace("10.0.0.1", "127.0.0.1")
        .replace("8786", str(port))
        .replace("127.0.0.1:8787", "127.0.0.1:0")
        .replace("/shared/", "")
        .replace("/scratch/$USER", "scratch")
        .replace("--nthreads 32 --memory-limit 100GB", "--nthreads 2 --memory-limit 0")
        .replace("--n-atoms 16384 --k 64", "--n-atoms 32 --k 8 --n-iter 2")
        for line in by_hand
    )
    queue = block_with("docs/cluster.md", "--array=1-64").text
    imported, shuffled, encoded = (line.replace("/shared/", "") for line in re.findall(r"'(dbksvd .*?)'", queue))
    script = f"""
    {scheduler} & head=$!
    {worker} & worker=$!
    trap 'kill $worker $head; wait' EXIT
    export SLURM_ARRAY_TASK_MIN=1 SLURM_ARRAY_TASK_MAX=2
    for task in 2 1; do SLURM_ARRAY_TASK_ID=$task {imported}; done
    for task in 1 2; do SLURM_ARRAY_TASK_ID=$task {shuffled}; done
    {fit} --wait-for 1
    for task in 1 2; do SLURM_ARRAY_TASK_ID=$task {encoded}; done
    """
    told = shell(script, tmp_path, home)
    assert "part 1/2 done" in told
    assert "codes.zarr: 1500 samples" in told
