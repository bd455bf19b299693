"""The status of a fit or a job: readable while it runs, after its end, and when its process is gone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, events, import_activations, status
from dbksvd_dask.errors import StoreError
from dbksvd_dask.status import StatusFile, prometheus, read_status
from tests.helpers.cli import fails, run
from tests.helpers.jobs import made_up


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


@pytest.fixture
def rows():
    return made_up(600, 8)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Write a status at every event."""
    monkeypatch.setattr(status, "EVERY", 0.0)


def during(iteration, look):
    """Return a callback that looks when a batch starts, and where it puts what it saw."""
    seen = []

    def callback(event):
        if isinstance(event, events.BatchStarted) and event.iteration == iteration:
            seen.append(look())

    return callback, seen


def fit(rows, folder, *callbacks, n_iter=3, **options):
    model = DBKSVD(n_atoms=12, k=2, n_iter=n_iter, batch_size=200, checkpoint=folder, callbacks=callbacks, seed=0)
    return model.fit(rows, **options)


def test_running_fit_says_how_far_it_is(rows, tmp_path):
    callback, seen = during(2, lambda: read_status(tmp_path / "run"))
    model = fit(rows, tmp_path / "run", callback)
    (found,) = seen
    assert (found["job"], found["state"], found["done"], found["total"]) == ("fit", "running", 2, 3)
    assert found["relative_error"] == pytest.approx(float(model.history_["relative_error"][1]))
    assert found["samples_per_second"] > 0
    assert found["seconds_left"] > 0
    assert (found["n_samples"], found["n_features"], found["n_atoms"], found["k"]) == (600, 8, 12, 2)
    assert found["checkpoint"] == 2
    after = read_status(tmp_path / "run")
    assert (after["state"], after["done"], after["seconds_left"]) == ("finished", 3, 0.0)
    assert after["updated"] >= after["started"]


def test_info_of_a_running_fit(rows, tmp_path, capsys):
    callback, seen = during(2, lambda: run(capsys, "info", tmp_path / "run"))
    fit(rows, tmp_path / "run", callback)
    code, out, _ = seen[0]
    assert code == 0
    said = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    assert (said["state"], said["done"]) == ("running", "2 of 3 iterations")
    assert {"relative error", "samples per second", "time left", "last sign", "checkpoints"} <= said.keys()
    out = run(capsys, "info", tmp_path / "run")[1]
    assert "time left" not in out
    assert "finished" in out


def test_info_before_the_first_checkpoint(rows, tmp_path, capsys):
    callback, seen = during(0, lambda: run(capsys, "info", tmp_path / "run", "--json"))
    fit(rows, tmp_path / "run", callback)
    said = json.loads(seen[0][1])
    assert said["kind"] == "status of a job: fit"
    assert (said["state"], said["done"]) == ("running", "0 of 3 iterations")


def test_fit_that_fails_is_stopped_and_one_that_resumes_runs(rows, tmp_path):
    def fail(event):
        if isinstance(event, events.BatchStarted) and event.iteration == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(rows, tmp_path / "run", fail)
    found = read_status(tmp_path / "run")
    assert (found["state"], found["done"]) == ("stopped", 1)
    assert "resume=True" in found["message"]
    callback, seen = during(1, lambda: read_status(tmp_path / "run")["state"])
    fit(rows, tmp_path / "run", callback, resume=True)
    assert seen == ["running"]
    assert read_status(tmp_path / "run")["state"] == "finished"


def test_wrong_samples_are_a_stop_as_well(rows, tmp_path):
    bad = rows.copy()
    bad[3] = np.nan
    with pytest.raises(Exception, match="NaN"):
        fit(bad, tmp_path / "run")
    found = read_status(tmp_path / "run")
    assert found is None or found["state"] == "stopped"


def test_dictionary_does_not_depend_on_the_status(rows, tmp_path):
    atoms = [fit(rows, folder).dictionary_.values.tobytes() for folder in (None, tmp_path / "run")]
    assert atoms[0] == atoms[1]


def test_status_that_cannot_be_written_ends_no_fit(rows, tmp_path, caplog):
    (tmp_path / "run" / "status.json").mkdir(parents=True)
    fit(rows, tmp_path / "run")
    assert "status.json" in caplog.text


def test_files_are_written_every_few_seconds_and_at_the_end(tmp_path):
    clock, path = Clock(), tmp_path / "s.json"

    def done():
        return json.loads(path.read_text())["done"]

    with StatusFile(path, every=5, clock=clock, now=lambda: 77.0) as file:
        clock.time += 5
        file(events.JobProgress("import", 10, 100, "rows"))
        assert done() == 10
        clock.time += 4
        file(events.JobProgress("import", 50, 100, "rows"))
        assert done() == 10
        clock.time += 1
        file(events.JobProgress("import", 60, 100, "rows"))
        found = json.loads(path.read_text())
        assert (found["done"], found["per_second"], found["seconds_left"]) == (60, 10.0, 4.0)
        file(events.JobProgress("import", 100, 100, "rows"))
    found = json.loads(path.read_text())
    assert (found["state"], found["done"], found["seconds_left"], found["updated"]) == ("finished", 100, 0.0, 77.0)
    assert os.listdir(tmp_path) == ["s.json"]


def test_job_that_fails_is_stopped(tmp_path):
    with pytest.raises(StoreError), StatusFile(tmp_path / "s.json"):
        raise StoreError("cannot open http://me:secret@host/a")
    found = read_status(tmp_path / "s.json")
    assert (found["state"], found["message"]) == ("stopped", "cannot open http://***@host/a")


KILLED = """
import os, sys
from dbksvd_dask.status import StatusFile
StatusFile(sys.argv[1]).__enter__()
os._exit(0)
"""


def test_process_that_ended_without_a_word_is_lost(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "s.json")], check=True)
    assert json.loads((tmp_path / "s.json").read_text())["state"] == "running"
    assert read_status(tmp_path / "s.json")["state"] == "lost"


@pytest.mark.parametrize(("age", "expected"), [(100, "running"), (130, "lost")])
def test_process_of_another_machine_is_judged_by_its_silence(age, expected, tmp_path):
    StatusFile(tmp_path / "s.json", now=lambda: 5000.0).__enter__()
    content = json.loads((tmp_path / "s.json").read_text())
    content["owner"]["host"] = "elsewhere"
    (tmp_path / "s.json").write_text(json.dumps(content))
    assert read_status(tmp_path / "s.json", now=5000.0 + age)["state"] == expected


@pytest.mark.parametrize("content", ["{}", "[1]", '{"format": "other"}'])
def test_other_json_is_no_status(content, tmp_path):
    (tmp_path / "s.json").write_text(content)
    assert read_status(tmp_path / "s.json") is None
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("changed", [{"format_version": 9}, {"updated": "now"}])
def test_damaged_status_is_refused(changed, tmp_path):
    StatusFile(tmp_path / "s.json").write()
    content = json.loads((tmp_path / "s.json").read_text()) | changed
    (tmp_path / "s.json").write_text(json.dumps(content))
    with pytest.raises(StoreError, match=r"s.json cannot be read: .* another version, or is damaged"):
        read_status(tmp_path / "s.json")


SAMPLE = re.compile(r'dbksvd_\w+\{path="((?:[^"\\]|\\.)*)",job="\w*"(,state="\w+")?\} -?[0-9.e+-]+')


def test_many_jobs_as_prometheus_collects_them(rows, tmp_path, capsys):
    np.save(tmp_path / "a.npy", rows)
    fit(rows, tmp_path / "run")
    code, out, _ = run(capsys, "import", tmp_path / "a.npy", tmp_path / "s", "--status", tmp_path / "i.json")
    assert code == 0
    code, out, _ = run(capsys, "info", tmp_path / "run", tmp_path / "i.json", tmp_path / "s", "--prometheus")
    lines = out.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)), "a metric has one head"
    assert f'dbksvd_done{{path="{tmp_path}/run",job="fit"}} 3' in samples
    assert f'dbksvd_done{{path="{tmp_path}/i.json",job="import"}} 600' in samples
    assert sum(line.endswith('state="finished"} 1') for line in samples) == 2


def test_paths_are_escaped():
    text = prometheus({'a"\\\n': {"state": "running", "done": 1}})
    assert r'dbksvd_done{path="a\"\\\n",job=""} 1' in text.splitlines()


@pytest.mark.parametrize("command", ["import", "shuffle", "encode"])
def test_jobs_keep_a_status_when_asked(command, rows, tmp_path, capsys):
    np.save(tmp_path / "a.npy", rows)
    import_activations(tmp_path / "a.npy", tmp_path / "s")
    fit(rows, tmp_path / "run")
    arguments = {
        "import": [tmp_path / "a.npy", tmp_path / "t"],
        "shuffle": [tmp_path / "s", tmp_path / "t", "--seed", "0"],
        "encode": [tmp_path / "s", tmp_path / "run", tmp_path / "t"],
    }[command]
    assert run(capsys, command, *arguments, "--status", tmp_path / "job.json")[0] == 0
    found = read_status(tmp_path / "job.json")
    assert (found["state"], found["done"]) == ("finished", found["total"])
    assert run(capsys, "info", tmp_path / "job.json")[0] == 0


def test_several_paths_are_for_prometheus_only(tmp_path, capsys):
    said = fails(capsys, "info", tmp_path, tmp_path)
    assert "2 paths were given; describe them one at a time" in said
