"""Every benchmark runs at its tiny size, so that none can rot; peers that are not installed are skipped."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest

from benchmarks import (
    common,
    encoders,
    guard,
    paper_timing,
    peer_ksvd,
    peers,
    quality,
    reproduce,
    token_page,
    wide,
    wide_page,
)
from benchmarks.common import installed, make_problem
from benchmarks.peer_base import OutOfTime, Recorder, data_atoms, minibatches, run
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix, residual
from dbksvd_dask.plan.encoder import EncodeSpec
from tests.naive.report import page_data

# Peers warn of what is theirs: linear dependence in scikit-learn's OMP, old NumPy habits.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def problem():
    return make_problem(None, 600, 200, 48, 6)


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch):
    monkeypatch.setattr(common, "gemm_speed", lambda n=64: 1.0)
    monkeypatch.setattr(peers, "gemm_speed", lambda n=64: 1.0)


@pytest.fixture
def ticking(monkeypatch):
    """Every look at the clock finds it ten seconds later: what a budget buys depends on no machine."""
    monkeypatch.setattr(common, "cpu_seconds", itertools.count(0.0, 10.0).__next__)


def foreign(name):
    """Mark a peer that needs a distribution that we do not."""
    needs = peers.PEERS[name][1]
    return pytest.param(name, marks=[pytest.mark.interop] if needs not in (None, "scikit-learn") else [])


@pytest.mark.parametrize("name", [foreign(name) for name in peers.PEERS])
def test_every_peer_trains_and_is_scored(name, problem, ticking):
    needs = peers.PEERS[name][1]
    if needs is not None and installed(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install -e '.[bench]'")
    result = peers.run_peer(name, problem, 25.0)
    last = result["points"][-1]
    assert 0 < last["ve_mp"] <= 1
    assert last["ve_omp"] >= last["ve_mp"] - 0.02
    assert last["rows"] > 0


def test_peer_that_is_not_installed_is_named(problem, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "SPAMS", (lambda r: None, "no-such-distribution", 1.0))
    assert "no-such-distribution is not installed" in peers.run_peer("SPAMS", problem, 0.1)["skipped"]


def test_ksvd_on_many_rows_is_extrapolated_and_says_so(problem, monkeypatch):
    monkeypatch.setattr(peers, "FULL_KSVD_ROWS", 10)
    result = peers.run_peer("classic K-SVD", problem, 0.1)
    assert "of 48 atoms" in result["iteration"]["extrapolated"]


def test_comparison_gives_factor_at_equal_quality_and_quality_at_equal_time():
    def curve(name, *points):
        return {
            "name": name,
            "points": [{"cpu_s": t, "wall_s": 2 * t, "ve_mp": v, "ve_omp": v + 0.1} for t, v in points],
        }

    ours = curve("DB-KSVD", (1, 0.5), (2, 0.6), (4, 0.7))
    slower, better = curve("slower", (5, 0.4), (10, 0.55)), curve("better", (2, 0.9))
    rows = {row["name"]: row for row in peers.compare([ours, slower, better])}
    assert rows["slower"]["ve_mp_ours_cpu_s"] == pytest.approx(1.5)
    assert rows["slower"]["ve_mp_factor"] == pytest.approx(10 / 1.5)
    assert rows["slower"]["ve_mp_ours_at_equal_time"] == pytest.approx(0.7)
    assert rows["better"]["ve_mp_factor"] is None
    assert rows["better"]["ve_mp_ours_at_equal_time"] == pytest.approx(0.6)


def test_clock_stands_still_while_a_dictionary_is_scored(problem, ticking):
    recorder = Recorder(problem, budget=25)
    recorder.clock.start()
    recorder.show(lambda: data_atoms(problem), 1)
    recorder.show(lambda: data_atoms(problem), 2)
    with pytest.raises(OutOfTime):
        recorder.show(lambda: data_atoms(problem), 3)
    assert [point["cpu_s"] for point in recorder.points] == [10, 20, 30]


def test_run_ends_when_the_time_is_used_up(problem, ticking):
    shown = []

    def endless(recorder):
        for i in itertools.count():
            shown.append(i)
            recorder.show(lambda: data_atoms(problem), i)

    recorder = run(endless, problem, budget=45.0)
    assert shown == [0, 1, 2, 3, 4]
    assert recorder.latest.shape == (48, 32)


def test_classic_update_lowers_the_error_of_every_atom(problem):
    D, Y = data_atoms(problem), problem.train
    atom, coefficient = encode_rows(Y, D, gram_matrix(D), EncodeSpec(6, "omp"))
    R = residual(Y, atom, coefficient, D)
    before = float((R**2).sum())
    for j in range(len(D)):
        peer_ksvd.update_atom(D, j, R, atom, coefficient)
        after = float((R**2).sum())
        assert after <= before * (1 + 1e-5)
        before = after
    np.testing.assert_allclose(R, residual(Y, atom, coefficient, D), atol=1e-4)


def test_minibatches_go_round_all_rows(problem):
    batches = minibatches(problem, 100)
    seen = np.concatenate([next(batches) for _ in range(6)])
    np.testing.assert_array_equal(np.sort(seen[:, 0]), np.sort(problem.train[:, 0]))


def test_encoders_at_tiny_size(capsys):
    result = encoders.main(["--size", "tiny"])
    names = [e["name"] for e in result["problems"][0]["encoders"]]
    assert {"bare product", "MP", "MP + refit", "OMP", "scikit-learn OMP"} <= set(names)
    assert "of the bare product" in capsys.readouterr().out


def test_paper_timing_at_tiny_size_marks_what_is_scaled(capsys):
    result = paper_timing.main(["--size", "tiny"])
    assert [row["scaled"] for row in result["table"]] == [False, True]
    assert set(result["growth"]) == {"rows", "features", "atoms", "k"}
    assert "*" in capsys.readouterr().out


def test_scaled_iteration_keeps_the_gram_and_multiplies_the_rest():
    figures = {"rows": 10, "features": 8, "atoms": 4, "k": 2, "omp_s": 1.0, "product_s": 1.0, "gram_s": 0.5}
    row = paper_timing.at_rows(figures | {"iteration_s": 3.0, "our_gram_s": 1.0}, 40)
    assert row["ours_cpu_s"] == pytest.approx(1 + 2 * 4)
    assert row["ratio"] == pytest.approx(9 / 4.5)


def test_guard_names_what_got_worse(tmp_path, capsys):
    path = str(tmp_path / "baseline.json")
    assert guard.main(["--size", "tiny", "--baseline", path, "--update"]) == 0
    stored = json.loads((tmp_path / "baseline.json").read_text())
    worse = next(name for name in stored["figures"] if name.startswith("variance explained"))
    stored["figures"][worse] += 0.1
    (tmp_path / "baseline.json").write_text(json.dumps(stored))
    assert guard.main(["--size", "tiny", "--baseline", path]) == 1
    assert worse in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("more", "now", "worse"), [(True, 0.8, True), (True, 0.95, False), (False, 1.2, True)])
def test_guard_tolerance_is_one_sided(more, now, worse):
    assert guard.Figure("x", now, more, 0.1).worse_than(1.0) is worse


def test_stored_baseline_covers_the_small_size():
    stored = json.loads(guard.BASELINE.read_text())["figures"]
    assert any(name.startswith("iteration / bare products") for name in stored)


@pytest.mark.slow
def test_quality_and_page_at_tiny_size(tmp_path, monkeypatch):
    results = tmp_path / "results"
    quality.main(["--size", "tiny", "--out", str(results / "quality.json")])
    encoders.main(["--size", "tiny", "--out", str(results / "encoders.json")])
    paper_timing.main(["--size", "tiny", "--no-growth", "--out", str(results / "paper_timing.json")])
    few = ["--peers", "DB-KSVD", "classic K-SVD", "--in-process"]
    peers.main(["--size", "tiny", *few, "--out", str(results / "peers.json")])
    network = {"model": "a model", "hook": "resid:1", "n_atoms": 48, "rows": 600, "method": "DB-KSVD", "k": 5}
    line = {**network, "seed": 0, "variance_explained": 0.5, "histogram": [0] * 39 + [48]}
    (results / "networks.jsonl").write_text(json.dumps(line) + "\n")
    page = reproduce.main([str(tmp_path / "page.html"), "--from", str(results), "--size", "tiny"]).read_text()
    titles = ("Time to quality", "Encoders", "Coherence", "Language models", "Against the trends of the paper")
    for title in titles:
        assert title in page
    assert page.count("<svg") == 5


@pytest.mark.browser
@pytest.mark.skipif(not (shutil.which("chromium") and shutil.which("chromedriver")), reason="needs chromium")
def test_the_page_of_a_wide_dictionary_is_opened_and_used(capsys):
    pytest.importorskip("selenium")
    wide_page.main(["--size", "tiny", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert set(row["seconds"]) == {"ready", *wide_page.ACTIONS}
    assert "| ready |" in wide_page.table({"rows": [row]})


@pytest.mark.parametrize("more", [[], ["--memory"]])
def test_wide_compares_both_ways_and_measures_memory(more, capsys):
    wide.main(["--size", "tiny", "--json", *more])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["atoms"] == 300
    assert 0.9 < row["screened"]["explained"] < 1
    assert ("planned" in row) == bool(more)
    if not more:
        assert row["screened"]["explained"] > 0.99 * row["exact"]["explained"]


def test_a_page_of_made_up_tokens_at_tiny_size(tmp_path, capsys):
    out = tmp_path / "page.html"
    token_page.main([str(out), "--size", "tiny", "--opened", "0"])
    head, arrays = page_data(out)
    assert (head["kind"], head["summary"]["n_samples"]) == ("token", 1000)
    assert arrays["positive_token"].shape == (64, 10)
    assert len(arrays["context_value"]) > 0
    assert "64 atoms, 1000 tokens" in capsys.readouterr().out


def test_stored_results_under_names_of_their_own_are_laid_out_as_one(tmp_path):
    for atoms in (4096, 16384):
        content = {"table": [{"atoms": atoms}], "growth": {"rows": atoms}}
        (tmp_path / f"paper_timing_{atoms}.json").write_text(json.dumps(content))
    found = reproduce.stored(tmp_path, "paper_timing")
    assert found == {"table": [{"atoms": 4096}, {"atoms": 16384}], "growth": {"rows": 16384}}
    assert reproduce.stored(tmp_path, "peers") is None
