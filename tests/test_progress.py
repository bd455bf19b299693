"""Progress: events in order, and what the bar, the notebook view and the log make of them."""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from dbksvd_dask import events, progress
from dbksvd_dask.cli import output
from dbksvd_dask.errors import InputError
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.model import DBKSVD
from tests.helpers import clusters


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return clusters.small_store(tmp_path_factory.mktemp("progress"))


@pytest.fixture(scope="module")
def seen(store, tmp_path_factory):
    """All events of a fit on two threads."""
    out = []
    clusters.on_threads(store, 2, callbacks=[out.append], checkpoint=tmp_path_factory.mktemp("run") / "run")
    return out


def of(kind, seen):
    return [event for event in seen if isinstance(event, kind)]


def record(relative_error):
    return {"relative_error": relative_error, "validation_relative_error": relative_error + 0.01}


def finished(iteration, error=0.5, n_iter=4):
    return events.BatchFinished(iteration, n_iter, 1000, 2.0, 500.0, 90.0, 4_000_000, record(error))


# ---------------------------------------------------------------------------------------------- events


def test_events_come_in_order_with_every_batch_and_round(seen):
    kinds = [type(event).__name__ for event in seen]
    per_batch = ["BatchStarted", *["RoundFinished"] * clusters.N_ROUNDS, "BatchFinished", "CheckpointWritten"]
    assert kinds == ["FitStarted", *per_batch * clusters.N_ITER, "FitFinished"]
    rounds = [(e.iteration, e.round, e.n_rounds) for e in of(events.RoundFinished, seen)]
    assert rounds == [(i, r, clusters.N_ROUNDS) for i in range(clusters.N_ITER) for r in range(clusters.N_ROUNDS)]


def test_a_batch_tells_error_speed_time_left_and_bytes_read(seen):
    batches = of(events.BatchFinished, seen)
    assert [e.iteration for e in batches] == list(range(clusters.N_ITER))
    for event in batches:
        assert event.n_samples == 1600
        assert event.bytes_read == 1600 * 32 * 4
        assert event.samples_per_second == pytest.approx(1600 / event.seconds)
        assert 0 < event.record["relative_error"] < 1
        assert 0 < event.record["validation_relative_error"] < 1.2
    assert math.isnan(batches[0].seconds_left), "the first batch compiles kernels: it says little about the others"
    assert batches[1].seconds_left > batches[2].seconds_left == 0


def test_groups_count_as_rounds_of_their_own(store):
    out = []
    clusters.on_threads(store, 1, callbacks=[out.append], groups=(16, 32), n_iter=1)
    rounds = of(events.RoundFinished, out)
    assert [e.round for e in rounds] == list(range(rounds[0].n_rounds))


def test_a_failing_subscriber_does_not_end_the_run(store, caplog):
    def fails(event):
        raise RuntimeError("no screen")

    out = []
    clusters.on_threads(store, 1, callbacks=[fails, out.append], n_iter=1)
    assert isinstance(out[-1], events.FitFinished)
    assert "a progress callback failed" in caplog.text


def test_a_failing_subscriber_is_told_once_a_fit_and_its_traceback_only_for_debug(store, caplog):
    def fails(event):
        raise RuntimeError("no\nscreen")

    with caplog.at_level(logging.DEBUG, "dbksvd_dask"):
        for _ in range(2):
            clusters.on_threads(store, 1, callbacks=[fails], n_iter=1)
    told = [r for r in caplog.records if "a progress callback failed" in r.message]
    warnings = [r for r in told if r.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for each fit"
    assert {r.getMessage() for r in warnings} == {
        "a progress callback failed on FitStarted (RuntimeError: no screen); the work continues"
    }
    assert all(r.exc_info is None for r in warnings)
    assert all(r.exc_info for r in told if r.levelno == logging.DEBUG)
    assert len(told) > 6


# ---------------------------------------------------------------------------------------------- snapshot


def test_snapshot_follows_a_fit(seen):
    view = progress.Snapshot()
    done = []
    for event in seen:
        view.take(event)
        done.append(view.done)
    assert done == sorted(done), "a bar never goes back"
    assert view.done == view.n_iter == clusters.N_ITER
    assert view.bytes_read == clusters.N_ITER * 1600 * 32 * 4
    assert view.checkpoint.endswith("checkpoint-000003.zarr")
    assert view.planned_bytes > 0
    assert len(view.errors) == clusters.N_ITER


def test_snapshot_of_a_resumed_fit_begins_where_it_goes_on():
    view = progress.Snapshot()
    view.take(events.FitStarted(1000, 8, 16, 2, 10, 4, 100, 0))
    assert (view.done, view.count) == (4, "4 of 10 batches")


def test_rounds_move_the_bar_between_batches():
    view = progress.Snapshot()
    view.take(events.FitStarted(1000, 8, 16, 2, 10, 0, 100, 0))
    view.take(events.BatchStarted(0, 99))
    view.take(events.RoundFinished(0, 1, 8))
    assert view.done == 0.25
    assert view.count == "0 of 10 batches, round 2 of 8 of the next"


def test_a_retry_is_noted_until_the_batch_is_done():
    view = progress.Snapshot()
    view.take(events.Retrying(0, 1, 3, "a worker is gone"))
    assert view.note == "attempt 1 of 3 failed (a worker is gone); trying again"
    view.take(finished(0))
    assert view.note == ""


def test_words_of_a_snapshot():
    view = progress.Snapshot()
    assert progress.describe(view) == ""
    view.take(finished(0))
    assert progress.describe(view) == "error 0.5000, held-out 0.5100, 500 samples/s, 1 min 30 s left, 4.0 MB read"


# ---------------------------------------------------------------------------------------------- terminal


def test_bar_shows_batches_error_and_notes(seen):
    screen = io.StringIO()
    with progress.TerminalBar(Console(file=screen, width=160, force_terminal=True, color_system=None)) as bar:
        for event in seen:
            bar(event)
        bar(events.Retrying(2, 1, 3, "a [worker] is gone"))
        bar(events.JobProgress("encode", 30, 120, "samples"))
        bar(events.FitStopped(2, "", "the store is gone"))
    text = screen.getvalue()
    assert "3 of 3 batches" in text
    assert "planned peak memory per process: " in text
    assert "dashboard" not in text, "there is none on threads"
    assert "samples/s" in text
    assert "attempt 1 of 3 failed (a [worker] is gone); trying again" in text
    assert "the store is gone" not in text, "whoever catches the error shows it"
    assert "30/120 samples" in text


def test_a_narrow_terminal_shows_the_time_left_and_cuts_nothing(seen):
    def shown(told):
        screen = io.StringIO()
        with progress.TerminalBar(Console(file=screen, width=80, force_terminal=True, color_system=None)) as bar:
            for event in told:
                bar(event)
        return screen.getvalue()

    assert "1 min 30 s left" in shown([finished(0)])
    text = shown(seen)
    assert "took" in text
    assert "samples/s" not in text
    assert "…" not in text


# ---------------------------------------------------------------------------------------------- without a terminal


def test_a_line_is_written_every_ten_seconds_and_at_once_when_something_is_wrong(capsys):
    now = [0.0]
    lines = progress.Lines(10.0, lambda: now[0])

    def at(second, event):
        now[0] = second
        lines(event)
        return capsys.readouterr().err

    assert at(9.9, events.JobProgress("encode", 30, 120, "samples")) == ""
    assert at(10.0, events.JobProgress("encode", 40, 120, "samples")) == "encode: 40 of 120 samples, 0.8 s left\n"
    assert at(19.9, finished(0)) == ""
    assert at(20.0, finished(0)).startswith("fit: 1 of 4 batches, error 0.5000")
    assert "round 1 of 8 of the next, error 0.5000" in at(34.0, events.RoundFinished(1, 0, 8))
    assert at(34.1, events.Retrying(1, 1, 3, "gone")) == "attempt 1 of 3 failed (gone); trying again\n"
    assert at(35.0, events.BatchStarted(2, 99)) == "", "nothing to tell"


def test_a_command_without_a_terminal_writes_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with output.watching(as_json=False) as callbacks:
        for callback in callbacks:
            callback(finished(0))
    assert capsys.readouterr().err.startswith("fit: 1 of 4 batches")
    with output.watching(as_json=True) as callbacks:
        assert callbacks == []


# ---------------------------------------------------------------------------------------------- file


def test_log_has_one_object_per_event_and_goes_on_after_a_resume(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(progress.time, "time", itertools.count(50.0).__next__)
    path = tmp_path / "run.jsonl"
    for half in (seen[:5], seen[5:]):
        with progress.JsonLines(path) as log:
            for event in half:
                log(event)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__ for event in seen]
    assert [line["time"] for line in lines] == [50.0 + i for i in range(len(seen))]
    last = next(line for line in reversed(lines) if line["event"] == "BatchFinished")
    assert last["record"]["relative_error"] == of(events.BatchFinished, seen)[-1].record["relative_error"]


def test_log_is_complete_at_any_time_and_strict_json(tmp_path):
    path = tmp_path / "run.jsonl"
    log = progress.JsonLines(path)
    log(finished(0, error=math.nan))
    (line,) = path.read_text().splitlines()  # before it is closed: a killed run leaves whole lines
    assert json.loads(line, parse_constant=pytest.fail)["record"]["relative_error"] is None
    log.__exit__(None, None, None)


def test_a_log_without_room_leaves_out_events_says_so_once_and_holds_whole_lines(tmp_path, caplog, monkeypatch):
    path, room = tmp_path / "run.jsonl", 200

    def write_some(file, view):
        left = room - os.fstat(file.fileno()).st_size
        file.write(view[:left])
        if len(view) > left:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress, "write_all", write_some)
    with progress.JsonLines(path) as log:
        for _ in range(9):
            log(events.CheckpointWritten("a", 1))
            log(finished(0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines
    assert {line["event"] for line in lines} == {"CheckpointWritten"}
    (told,) = [r.getMessage() for r in caplog.records]
    assert told == f"the log {path} is incomplete: No space left on device; the run is not affected"


def test_subscribers_of_a_command(tmp_path):
    with progress.subscribers(bar=False, log=tmp_path / "log") as callbacks:
        assert [type(c) for c in callbacks] == [progress.JsonLines]
    with progress.subscribers(bar=False) as callbacks:
        assert callbacks == []


# ---------------------------------------------------------------------------------------------- notebook


def test_notebook_view_is_drawn_once_and_then_replaced(seen):
    drawn, replaced = [], []

    def display(text):
        drawn.append(text)
        return replaced.append

    view = progress.NotebookView(display, itertools.count().__next__)
    for event in seen:
        view(event)
    assert len(drawn) == 1
    assert len(replaced) == len(seen) - 1
    assert "width:100.0%" in replaced[-1]
    assert "took" in replaced[-1]
    assert "3 of 3 batches" in replaced[-1]
    assert "<polyline" in replaced[-1]


def test_notebook_view_escapes_what_it_shows():
    view = progress.Snapshot(note="<script>")
    assert "&lt;script&gt;" in progress.render(view)
    assert "<script>" not in progress.render(view)


def test_notebook_view_is_not_drawn_more_often_than_an_eye_follows(seen):
    drawn = []
    view = progress.NotebookView(lambda text: drawn.append(text) or drawn.append, lambda: 0.0)
    for event in seen:
        view(event)
    assert len(drawn) == 2 + clusters.N_ITER  # the start, every batch, the end
    assert "3 of 3 batches" in drawn[-1]


def test_notebook_view_shows_jobs_too():
    drawn = []
    view = progress.NotebookView(lambda text: drawn.append(text) or drawn.append, itertools.count().__next__)
    for done in (0, 500, 1000):
        view(events.JobProgress("encode", done, 1000, "samples"))
    assert "500 of 1,000 samples" in drawn[1]
    assert "2.0 s left" in drawn[1]
    assert "left" not in drawn[2]
    assert "batches" not in drawn[2]


class _Shell:
    kernel = None


@pytest.mark.parametrize(
    ("shell", "verbose", "given", "added"),
    [
        (None, None, [], None),
        (None, True, [], progress.Lines),
        (_Shell(), None, [], progress.NotebookView),
        (_Shell(), None, [print], progress.NotebookView),
        (_Shell(), None, [progress.Lines()], None),
        (_Shell(), False, [], None),
        (object(), None, [], None),  # IPython on a terminal
    ],
)
def test_a_notebook_shows_progress_by_default_and_nothing_else_does(monkeypatch, shell, verbose, given, added):
    class IPython:
        get_ipython = staticmethod(lambda: shell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    callbacks = progress.with_view(given, verbose)
    assert callbacks[: len(given)] == tuple(given)
    assert [type(c) for c in callbacks[len(given) :]] == ([] if added is None else [added])


def test_fit_and_encode_show_progress_only_where_asked(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    monkeypatch.setattr(progress.Lines.__init__, "__defaults__", (0.0, lambda: 0.0))
    run = str(tmp_path / "run")
    DBKSVD(8, 2, n_iter=1, checkpoint=run, verbose=True).fit(store)
    encode_store(store, run, str(tmp_path / "a.zarr"), verbose=True)
    shown = capsys.readouterr().err
    assert "fit: 1 of 1 batches" in shown
    assert "encode: " in shown
    DBKSVD(8, 2, n_iter=1).fit(store)
    encode_store(store, run, str(tmp_path / "b.zarr"))
    assert capsys.readouterr().err == ""


def test_an_unknown_or_missing_tracker_is_refused_before_the_fit(monkeypatch):
    with pytest.raises(InputError, match="'mlflow' with project 'p' is not known; use 'trackio' or 'wandb'"):
        progress.Tracker.named("mlflow:p")
    with pytest.raises(InputError, match="project '' is not known"):
        progress.Tracker.named("trackio")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"tensorboard is not installed .*pip install tensorboardX"):
        progress.Tracker("tensorboard", "runs")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"wandb is not installed .*pip install wandb"):
        progress.Tracker("wandb", "p")


def test_tensorboard_gets_every_figure_of_every_iteration(monkeypatch, seen):
    calls = []

    class Writer:
        def __init__(self, folder):
            calls.append(("open", folder))

        def __getattr__(self, name):
            return lambda *values: calls.append((name, *values))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    tracker = progress.Tracker.named("tensorboard:runs/one")
    for event in seen:
        tracker(event)
    errors = [event.record["relative_error"] for event in of(events.BatchFinished, seen)]
    logged = [call[2:] for call in calls if call[:2] == ("add_scalar", "relative_error")]
    assert logged == list(zip(errors, range(len(errors)), strict=True))
    assert (calls[0], calls[-1]) == (("open", "runs/one"), ("close",))


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_history_of_a_fit(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Y = np.random.default_rng(0).standard_normal((300, 8)).astype("f4")
    model = DBKSVD(12, 2, n_iter=3, callbacks=[progress.Tracker("tensorboard", str(tmp_path))]).fit(Y)
    log = reading.EventAccumulator(str(tmp_path)).Reload()
    found = [one.value for one in log.Scalars("relative_error")]
    np.testing.assert_allclose(found, model.history_["relative_error"], rtol=1e-6)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_the_history_of_a_fit(tmp_path):
    """In a process of its own: trackio takes its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    code = """
import json, sys
import numpy as np
sys.path[:] = json.loads(sys.argv[1])
from dbksvd_dask import DBKSVD
from dbksvd_dask.progress import Tracker
Y = np.random.default_rng(0).standard_normal((300, 8)).astype("f4")
model = DBKSVD(12, 2, n_iter=3, callbacks=[Tracker("trackio", "atoms", name="one", embed=False)]).fit(Y)
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("atoms", "one")
print(json.dumps([rows, model.history_["relative_error"].values.tolist()], default=str))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, errors = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["relative_error"] for row in rows] == pytest.approx(errors)
