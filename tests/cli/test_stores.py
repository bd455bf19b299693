"""The commands import, shuffle and info: what they print, and one clear line for every bad input."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import click
import numpy as np
import pytest

from dbksvd_dask import progress
from dbksvd_dask.cli import info, output
from dbksvd_dask.jobs.import_ import ImportJob, import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.store.activations import create_activations, open_rows
from tests.helpers.cli import fails, run, run_apart
from tests.helpers.stores import make_store, ordered_rows, tree


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "acts.npy", ordered_rows(300, 8))
    return tmp_path / "acts.npy"


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store.zarr", ordered_rows(300, 8), 32, {"row": np.arange(300)})


# what they do


def test_import_shuffle_info_in_a_row(source, tmp_path, capsys):
    code, out, err = run(capsys, "import", source, tmp_path / "a.zarr", "--chunk-rows", 32, "--source-row")
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r".*a.zarr: 300 x 8 float32 \(9.6 kB\) from 1 file in .* s, read back and compared; "
        r"values from -\S+ to \S+, mean norm \S+\n",
        out,
    )
    code, out, err = run(capsys, "shuffle", tmp_path / "a.zarr", tmp_path / "b.zarr", "--seed", 0)
    assert (code, err) == (0, "")
    assert re.search(
        r"variance of batch means relative to a full shuffle: [01]\.\d\d \(before: \d\d+\.\d\d\)", out
    )
    code, out, err = run(capsys, "info", tmp_path / "b.zarr", "--verify")
    assert (code, err) == (0, "")
    for line in ("activation store", "300", "float32", "source_row int64 (300,)", "seed 0", "10 chunks agree"):
        assert line in out


def test_json_is_one_object_with_plain_numbers(source, tmp_path, capsys):
    results = [
        run(capsys, "import", source, tmp_path / "a", "--json"),
        run(capsys, "shuffle", tmp_path / "a", tmp_path / "b", "--seed", 1, "--json"),
        run(capsys, "info", tmp_path / "b", "--json"),
    ]
    imported, shuffled, described = (json.loads(out) for _, out, _ in results)
    assert imported["n_samples"] == shuffled["n_samples"] == described["n_samples"] == 300
    assert shuffled["mixing_before"] > shuffled["mixing_after"]
    assert described["bytes"] == 300 * 8 * 4
    assert described["provenance"]["seed"] == 1


@pytest.mark.parametrize("command", ["import", "shuffle"])
def test_plan_tells_and_writes_nothing(command, source, store, tmp_path, capsys):
    before = sorted(os.listdir(tmp_path))
    given = [source] if command == "import" else [store]
    options = [] if command == "import" else ["--seed", 0]
    code, out, _ = run(capsys, command, *given, tmp_path / "new", *options, "--plan", "--json")
    planned = json.loads(out)
    assert code == 0
    assert planned["rows"] == 300
    for name in ("passes", "read_bytes", "written_bytes", "memory_bytes", "estimated_seconds"):
        assert planned[name] > 0
    assert sorted(os.listdir(tmp_path)) == before
    text = run(capsys, command, *given, tmp_path / "new", *options, "--plan")[1]
    assert re.search(r"memory bytes +\d+\.\d MB", text)


@pytest.mark.parametrize(("command", "options"), [("import", ["--chunk-rows", 100]), ("shuffle", ["--seed", 0])])
def test_log_has_every_event_and_goes_on_in_the_same_file(command, options, source, store, tmp_path, capsys):
    log = tmp_path / "run.jsonl"
    given = source if command == "import" else store
    for target in ("a", "b"):
        code, out, err = run(capsys, command, given, tmp_path / target, *options, "--log", log)
        assert (code, out.count("\n"), err) == (0, 1, "")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["event"] for line in lines} == {"JobProgress"}
    last = {"import": "import", "shuffle": "gather"}[command]
    assert sum(line["job"] == last and line["done"] == line["total"] for line in lines) == 2


@pytest.mark.parametrize("command", ["import", "shuffle"])
def test_a_log_that_cannot_be_written_is_refused_before_any_work(command, source, store, tmp_path, capsys):
    options = [] if command == "import" else ["--seed", 0]
    given = source if command == "import" else store
    line = fails(capsys, command, given, tmp_path / "new", *options, "--log", tmp_path / "nowhere" / "run.jsonl")
    assert "run.jsonl" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["import", "shuffle"])
def test_lines_tell_the_progress_without_a_terminal(command, source, store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    options = ["--chunk-rows", 100] if command == "import" else ["--seed", 0]
    given = source if command == "import" else store
    code, out, err = run(capsys, command, given, tmp_path / "new", *options)
    assert (code, out.count("\n")) == (0, 1)
    last = {"import": "import", "shuffle": "gather"}[command]
    assert re.search(rf"^{last}: (\d+) of \1 \w+(, 0.0 s left)?$", err, re.M)
    code, _, err = run(capsys, command, given, tmp_path / "newer", *options, "--json")
    assert (code, err) == (0, ""), "machines read the result only"


def test_options_reach_the_library(tmp_path, capsys):
    rows = np.arange(120, dtype=np.float32).reshape(10, 4, 3)
    np.savez(tmp_path / "a.npz", acts=rows, mask=np.tile([1, 1, 1, 0], (10, 1)), label=np.arange(10))
    options = ["--array", "acts", "--mask-array", "mask", "--drop-first-token", "--aligned", "label"]
    code, out, _ = run(capsys, "import", tmp_path / "a.npz", tmp_path / "s", *options)
    assert code == 0
    assert "rows left out: first_token 10, mask_array 10" in out
    np.testing.assert_array_equal(open_rows(tmp_path / "s").read(0, 20), rows[:, 1:3].reshape(-1, 3))


def test_every_option_is_a_parameter_of_the_library():
    import inspect

    from dbksvd_dask.cli.import_ import command as import_command
    from dbksvd_dask.cli.shuffle import command as shuffle_command

    for command, function in ((import_command, import_activations), (shuffle_command, shuffle_activations)):
        where = {"workers", "scheduler", "wait_for", "tls_ca", "tls_cert", "tls_key"}
        options = {p.name for p in command.params} - {"as_json", "show_plan", "log", "status"} - where
        assert options == set(inspect.signature(function).parameters) - {"callbacks", "verbose"}


def test_interrupted_import_says_that_it_went_on(source, tmp_path, capsys):
    job = ImportJob(source, tmp_path / "s", chunk_rows=100)
    job.init()
    job.run(parts=[1])
    job.close()
    described = json.loads(run(capsys, "info", tmp_path / "s.partial", "--json")[1])
    assert described["kind"] == "unfinished activation store"
    assert (described["chunks_written"], described["n_chunks"]) == (1, 3)
    code, out, _ = run(capsys, "import", source, tmp_path / "s", "--chunk-rows", 100)
    assert code == 0
    assert "resumed after 1 of 3 chunks" in out


def test_help_has_an_example_for_each_command(capsys):
    for command in ("import", "shuffle", "info"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert re.search(rf"^  dbksvd {command} \S+", out, re.M)


def test_info_describes_files_and_foreign_arrays(source, tmp_path, capsys):
    import zarr

    zarr.create_array(tmp_path / "z", shape=(5, 4), chunks=(2, 4), dtype="float32")
    assert "arrays  unnamed float32 (300, 8)" in run(capsys, "info", source)[1]
    assert "Zarr array of rows" in run(capsys, "info", tmp_path / "z")[1]
    assert "has no checksums to verify" in fails(capsys, "info", tmp_path / "z", "--verify")


def test_info_asks_further_describers(tmp_path, capsys, monkeypatch):
    (tmp_path / "thing").mkdir()
    module = type(sys)("thing_describer")
    module.describe = lambda path, verify: {"kind": "thing", "verify": verify} if path.endswith("thing") else None
    monkeypatch.setitem(sys.modules, "thing_describer", module)
    monkeypatch.setattr(info, "DESCRIBERS", [*info.DESCRIBERS, "thing_describer:describe"])
    assert "kind    thing" in run(capsys, "info", tmp_path / "thing")[1]


@pytest.mark.slow
def test_bar_is_drawn_on_a_terminal_only(source, tmp_path):
    """On a pseudo-terminal as standard error; the result still goes to standard output alone."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from dbksvd_dask.cli import main; main()", "import", source, tmp_path / "s"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(ours)
    assert b"300/300" in drawn
    assert process.stdout.count("\n") == 1


# bad input: one line, exit code 1, nothing published


def truncated_npy(tmp_path):
    np.save(tmp_path / "bad.npy", np.ones((100, 8), np.float32))
    os.truncate(tmp_path / "bad.npy", 1000)
    return tmp_path / "bad.npy"


def mixed_widths(tmp_path):
    np.save(tmp_path / "w1.npy", np.ones((10, 8), np.float32))
    np.save(tmp_path / "w2.npy", np.ones((10, 7), np.float32))
    return tmp_path / "w*.npy"


def with_nan(tmp_path):
    rows = np.ones((100, 8), np.float32)
    rows[77, 3] = np.nan
    np.save(tmp_path / "nan.npy", rows)
    return tmp_path / "nan.npy"


def empty_file(tmp_path):
    (tmp_path / "empty.npy").touch()
    return tmp_path / "empty.npy"


def no_rows(tmp_path):
    np.save(tmp_path / "none.npy", np.ones((0, 8), np.float32))
    return tmp_path / "none.npy"


BAD_IMPORTS = {
    "missing": (lambda t: t / "nowhere.npy", r"no file or folder at .*nowhere.npy"),
    "empty": (empty_file, r"empty.npy is empty: 0 bytes"),
    "no rows": (no_rows, r"none.npy has no rows"),
    "truncated": (truncated_npy, r"bad.npy is truncated: it has 1000 bytes, its header promises 3328"),
    "wrong width": (mixed_widths, r"different width cannot be mixed: 8 in .*w1.npy, 7 in .*w2.npy"),
    "NaN": (with_nan, r"row 77 of .*nan.npy holds a value that is NaN or infinite; leave such rows out"),
}


@pytest.mark.parametrize("case", BAD_IMPORTS)
def test_import_of_bad_input_is_one_line(case, tmp_path, capsys):
    make, message = BAD_IMPORTS[case]
    line = fails(capsys, "import", make(tmp_path), tmp_path / "out.zarr", "--chunk-rows", 32)
    assert re.search(message, line)
    assert not list(tmp_path.glob("out*"))


def empty_store(tmp_path):
    import zarr

    zarr.create_array(tmp_path / "empty", shape=(0, 4), chunks=(2, 4), dtype="float32")
    return tmp_path / "empty"


def truncated_store(tmp_path):
    path = make_store(tmp_path / "short", ordered_rows(100, 4), 16)
    os.truncate(f"{path}/activations/c.3.0", 100)
    return path


def three_dimensions(tmp_path):
    import zarr

    zarr.create_array(tmp_path / "cube", shape=(2, 3, 4), chunks=(2, 3, 4), dtype="float32")
    return tmp_path / "cube"


def unfinished(tmp_path):
    create_activations(tmp_path / "half", 10, 4, "float32")
    return tmp_path / "half"


BAD_STORES = {
    "missing": (lambda t: t / "nowhere", r"no store at .*nowhere; make one with `dbksvd import"),
    "empty": (empty_store, r"empty is empty: its shape is \(0, 4\)"),
    "truncated": (truncated_store, r"chunk 3 of .*short \(rows 48 to 63\) has 100 bytes instead of 256"),
    "wrong shape": (three_dimensions, r"cube has shape \(2, 3, 4\); need two dimensions"),
    "not a store": (truncated_npy, r"bad.npy is not a Zarr store"),
    "unfinished": (unfinished, r"no store at .*half; an unfinished one is at .*half.partial"),
}


@pytest.mark.parametrize("case", BAD_STORES)
def test_shuffle_of_bad_input_is_one_line(case, tmp_path, capsys):
    make, message = BAD_STORES[case]
    line = fails(capsys, "shuffle", make(tmp_path), tmp_path / "out.zarr", "--seed", 0)
    assert re.search(message, line)
    assert not (tmp_path / "out.zarr").exists()


def test_info_of_bad_input_is_one_line(tmp_path, capsys):
    assert "nothing at" in fails(capsys, "info", tmp_path / "nowhere")
    (tmp_path / "x.txt").write_text("x")
    assert "dbksvd does not recognise" in fails(capsys, "info", tmp_path / "x.txt")
    assert "is empty: 0 bytes" in fails(capsys, "info", empty_file(tmp_path))
    assert "has 100 bytes instead of 256" in fails(capsys, "info", truncated_store(tmp_path), "--verify")


def test_existing_output_needs_force(source, store, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    for args in (("import", source), ("shuffle", store)):
        extra = ["--seed", 0] if args[0] == "shuffle" else []
        line = fails(capsys, *args, tmp_path / "out", *extra)
        assert "out already exists; choose another name, or replace it with --force" in line
        line = fails(capsys, *args, tmp_path / "out", *extra, "--force")
        assert "out is something else, and only an activation store is replaced; choose another name" in line
        assert (tmp_path / "out" / "precious").exists()
    (tmp_path / "out" / "precious").unlink()
    for _ in ("empty folder", "store"):
        assert run(capsys, "import", source, tmp_path / "out", "--force")[0] == 0
        assert open_rows(tmp_path / "out").n_samples == 300


def test_plan_says_in_how_many_passes_a_store_is_shuffled(tmp_path, capsys):
    wide, narrow = (make_store(tmp_path / str(d), ordered_rows(300, d), 64) for d in (300, 6))
    for store, passes in ((wide, 1), (narrow, 2)):
        code, out, _ = run(capsys, "shuffle", store, tmp_path / "out", "--seed", 0, "--plan", "--json")
        assert code == 0
        plan = json.loads(out)
        nbytes = open_rows(store).nbytes
        assert (plan["passes"], plan["scratch_bytes"]) == (passes, (passes - 1) * nbytes)
        assert plan["written_bytes"] == passes * nbytes
    taken = fails(capsys, "shuffle", wide, narrow, "--seed", 0, "--plan")
    assert "already exists" in taken


def test_force_does_not_cost_the_source(source, store, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "a.npy", np.ones((4, 3), np.float32))
    before = tree(tmp_path)
    assert "is something else, and only an activation store is replaced" in fails(
        capsys, "import", source, source, "--force"
    )
    folder = tmp_path / "folder"
    assert "is something else, and only an activation store is replaced" in fails(
        capsys, "import", folder, folder, "--force"
    )
    assert tree(tmp_path) == before
    rows = open_rows(store).read(0, 300)
    assert run(capsys, "shuffle", store, store, "--seed", 0, "--force")[0] == 0
    mixed = open_rows(store).read(0, 300)
    np.testing.assert_array_equal(np.sort(mixed, axis=0), np.sort(rows, axis=0))
    assert not np.array_equal(mixed, rows)


@pytest.mark.parametrize("command", ["import", "shuffle"])
def test_wrong_usage_is_exit_code_2(command, source, tmp_path, capsys):
    for args in ([], [source], [source, tmp_path / "s", "--nope"]):
        code, _, err = run(capsys, command, *args)
        assert code == 2
        assert "Usage: dbksvd" in err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["import", "shuffle"])
def test_read_only_target_is_one_line(command, source, store, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    given = [source, tmp_path / "locked" / "s"] if command == "import" else [store, tmp_path / "locked" / "s"]
    done = run_apart(command, *given, *([] if command == "import" else ["--seed", 0]))
    assert (done.returncode, done.stdout) == (1, "")
    line = (
        r"dbksvd: error: \S*locked\S* cannot be written \(Permission denied\); choose a place where .* may write\n"
    )
    assert re.fullmatch(line, done.stderr)
    assert not os.listdir(tmp_path / "locked")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["import", "shuffle"])
def test_full_disk_is_one_line_and_can_be_gone_on_from(command, tmp_path, capsys):
    """A real limit on the size of files stands for the full disk: writes fail after the first chunks."""
    rows = ordered_rows(2000, 16)
    if command == "import":
        np.save(tmp_path / "a.npy", rows)
        args = ("import", tmp_path / "a.npy", tmp_path / "s", "--chunk-rows", 1024)
    else:
        store = make_store(tmp_path / "a", rows, 1024)
        args = ("shuffle", store, tmp_path / "s", "--seed", 0)
    done = run_apart(*args, file_bytes=50_000)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"dbksvd: error: no space left while writing .*s\S*\.partial \(File too large\); what is done is kept "
        r"there: make room and run the same command again, or delete .*\n",
        done.stderr,
    )
    assert not (tmp_path / "s").exists()
    assert run(capsys, *args)[0] == 0
    np.testing.assert_array_equal(np.sort(open_rows(tmp_path / "s").read(0, 2000), axis=0), np.sort(rows, axis=0))


def test_disk_that_is_too_small_is_noticed_before_anything_is_written(source, store, tmp_path, capsys):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "none", mount], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs rights that this process does not have")
    try:
        line = fails(capsys, "import", source, mount / "s")
        assert re.search(r"s.partial needs 9.6 kB more and .*small has [0-9.]+ k?B free; make room", line)
        line = fails(capsys, "shuffle", store, mount / "s", "--seed", 0)
        assert re.search(r"s\S*.partial needs [0-9.]+ kB more and .*small has [0-9.]+ k?B free; make room", line)
        assert not os.listdir(mount)
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.slow
def test_traceback_only_with_verbose(tmp_path):
    done = run_apart("-v", "import", tmp_path / "nowhere.npy", tmp_path / "s")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


# sizes


@pytest.mark.parametrize(
    ("text", "size"), [("128MiB", 1 << 27), ("0.5 GB", 5 * 10**8), ("4096", 4096), ("2k", 2000), ("1TiB", 1 << 40)]
)
def test_sizes_are_read(text, size):
    assert output.Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "much", "-3MB", "0", "1.2.3GB", "5XB"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(click.BadParameter, match=r"is not a size; write 128MiB, 0.5GB or a number of bytes"):
        output.Size().convert(text, None, None)
