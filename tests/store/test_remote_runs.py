"""Runs, codes and sources on S3: published safely, resumed, read in ranges, retried; credentials stay secret."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import subprocess
import sys

import fsspec
import numpy as np
import pytest
import safetensors.numpy

from benchmarks.delay_proxy import DelayProxy
from dbksvd_dask import DBKSVD, Dictionary, encode_store, events, import_activations, open_codes, open_dictionary
from dbksvd_dask.dictionary import dictionary_fingerprint
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.plan import units
from dbksvd_dask.store import paths, remote
from dbksvd_dask.store.activations import open_rows
from dbksvd_dask.store.dictionary import save_dictionary
from dbksvd_dask.store.runs import checkpoints, write_checkpoint
from tests.helpers.cli import fails, run
from tests.helpers.jobs import PATIENCE, made_up
from tests.helpers.stores import make_store

HOW = {"n_atoms": 12, "k": 2, "n_iter": 3, "batch_size": 200, "seed": 0}
ROWS = made_up(600, 8)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)


def interrupt_at(iteration):
    def callback(event):
        if isinstance(event, events.BatchStarted) and event.iteration == iteration:
            raise KeyboardInterrupt

    return callback


# runs


def test_fit_into_a_bucket_resumes_with_the_bits_of_a_local_one(place, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        DBKSVD(**HOW, checkpoint=place, callbacks=[interrupt_at(2)]).fit(ROWS)
    assert [paths.base_name(path) for path in checkpoints(place)][-1] == "checkpoint-000002.zarr"
    with pytest.raises(StoreError, match="already holds a fit"):
        DBKSVD(**HOW, checkpoint=place).fit(ROWS)
    resumed = DBKSVD(**HOW, checkpoint=place).fit(ROWS, resume=True)
    whole = DBKSVD(**HOW, checkpoint=tmp_path / "run").fit(ROWS)
    assert resumed.components_.tobytes() == whole.components_.tobytes()
    assert open_dictionary(place).atoms.tobytes() == whole.components_.tobytes()
    kept = ["checkpoint-000002", "checkpoint-000003"]
    assert paths.list_names(place) == sorted(
        [f"{k}{e}" for k in kept for e in (".done", ".zarr")] + ["status.json"]
    )
    assert DBKSVD.load(place).components_.tobytes() == whole.components_.tobytes()
    with pytest.raises(MismatchError, match="was made with k=2"):
        DBKSVD(**{**HOW, "k": 3}, checkpoint=place).fit(ROWS, resume=True)


def small(iteration):
    return Dictionary(np.eye(4, dtype=np.float32), None, {"n_atoms": 4, "k": 1}, iteration=iteration)


def test_upload_that_was_cut_short_does_not_count_and_goes_with_the_next(place):
    write_checkpoint(place, small(1))
    write_checkpoint(place, small(2))
    paths.remove(f"{place}/checkpoint-000002.done")
    assert [paths.base_name(path) for path in checkpoints(place)] == ["checkpoint-000001.zarr"]
    assert open_dictionary(place).iteration == 1
    write_checkpoint(place, small(3))
    assert open_dictionary(place).iteration == 3
    assert "checkpoint-000002.zarr" not in paths.list_names(place)


def test_marker_comes_last_and_goes_first(place, monkeypatch):
    written, removed = [], []
    put, remove = paths.write_object, paths.remove
    monkeypatch.setattr(paths, "write_object", lambda path, content: (written.append(path), put(path, content)))
    monkeypatch.setattr(paths, "remove", lambda path: (removed.append(paths.base_name(path)), remove(path)))
    for i in range(1, 4):
        write_checkpoint(place, small(i))
        assert written[-1] == f"{place}/checkpoint-{i:06d}.done"
    assert removed.index("checkpoint-000001.done") < removed.index("checkpoint-000001.zarr", 2)


def test_dictionary_on_s3(place):
    save_dictionary(place, small(0))
    assert dictionary_fingerprint(open_dictionary(place)) == dictionary_fingerprint(small(0))
    with pytest.raises(StoreError, match="already exists"):
        save_dictionary(place, small(0))


def test_command_line_on_s3(place, tmp_path, capsys):
    make_store(f"{place}/store", ROWS, 100)
    sizes = ["--n-atoms", 12, "--k", 2, "--n-iter", 2, "--batch-size", 200]
    assert run(capsys, "fit", f"{place}/store", f"{place}/run", *sizes)[0] == 0
    said = json.loads(run(capsys, "info", f"{place}/run", "--json")[1])
    assert (said["kind"], said["iteration"], said["finished"]) == ("run", 2, True)
    assert run(capsys, "encode", f"{place}/store", f"{place}/run", f"{place}/codes")[0] == 0
    assert run(capsys, "fit", f"{place}/store", f"{place}/run", *sizes, "--force")[0] == 0
    assert "already holds a fit" in fails(capsys, "fit", f"{place}/store", f"{place}/run", *sizes)
    assert 'state="finished"} 1' in run(capsys, "info", f"{place}/run", "--prometheus")[1]


# codes


def test_codes_on_s3_are_few_objects_with_the_values_of_local_files(place, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "MIN_CHUNK_ROWS", 10)
    monkeypatch.setattr(units, "UNITS_WANTED", 4)
    store = make_store(tmp_path / "s", ROWS, 20)  # 30 chunks
    model = DBKSVD(**HOW).fit(ROWS)
    encode_store(store, model, tmp_path / "codes")
    encode_store(store, model, place)
    local, far = open_codes(tmp_path / "codes"), open_codes(place)
    for name in ("atom", "coefficient"):
        assert local[name].values.tobytes() == far[name].values.tobytes()
    assert local.attrs["metrics"] == far.attrs["metrics"]
    objects = [name for name in paths.list_names(f"{place}/atom") if name != "zarr.json"]
    assert (len(list((tmp_path / "codes" / "atom").glob("c.*"))), len(objects)) == (30, 5)


def test_interrupted_encode_to_s3_resumes(place, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "MIN_CHUNK_ROWS", 10)
    monkeypatch.setattr(units, "UNITS_WANTED", 4)
    store = make_store(tmp_path / "s", ROWS, 20)
    model = DBKSVD(**HOW).fit(ROWS)
    assert not encode_store(store, model, place, part=(1, 2)).finished
    result = encode_store(store, model, place)
    assert result.finished
    assert 0 < result.samples_kept < 600


# sources


def upload(place, name, content):
    fsspec.filesystem("s3").pipe_file(f"{place}/{name}".removeprefix("s3://"), content)


def npy(rows):
    import io

    out = io.BytesIO()
    np.save(out, rows)
    return out.getvalue()


def stored(path):
    reader = open_rows(path)
    return reader.read(0, reader.n_samples)


@pytest.mark.parametrize("kind", ["npy", "safetensors", "raw"])
def test_pattern_of_a_bucket_is_imported(kind, place, tmp_path):
    for i, part in ((2, ROWS[:100]), (10, ROWS[100:600])):  # in natural order
        if kind == "npy":
            upload(place, f"acts_{i}.npy", npy(part))
        elif kind == "safetensors":
            upload(place, f"acts_{i}.safetensors", safetensors.numpy.save({"rows": part}))
        else:
            upload(place, f"acts_{i}.bin", part.tobytes())
            upload(place, f"acts_{i}.bin.json", json.dumps({"dtype": "float32", "n_features": 8}).encode())
    ending = {"npy": "npy", "safetensors": "safetensors", "raw": "bin"}[kind]
    result = import_activations(f"{place}/acts_*.{ending}", tmp_path / "s", chunk_rows=64)
    assert (result.n_files, result.n_samples) == (2, 600)
    np.testing.assert_array_equal(stored(tmp_path / "s"), ROWS)


def test_object_that_changed_is_another_import(place, tmp_path):
    upload(place, "a.npy", npy(ROWS))
    import_activations(f"{place}/a.npy", tmp_path / "s")
    assert import_activations(f"{place}/a.npy", tmp_path / "s").chunks_written == 0
    upload(place, "a.npy", npy(-ROWS))
    with pytest.raises(StoreError, match="already exists"):
        import_activations(f"{place}/a.npy", tmp_path / "s")


def test_sources_of_a_bucket_that_cannot_be_read_are_refused(place, tmp_path):
    upload(place, "f.npy", npy(np.asfortranarray(ROWS)))
    with pytest.raises(InputError, match=r"f.npy is in column order, which is not read from a URL"):
        import_activations(f"{place}/f.npy", tmp_path / "s")
    with pytest.raises(StoreError, match=r"no file matches s3://.*/x\*.npy"):
        import_activations(f"{place}/x*.npy", tmp_path / "s")
    upload(place, "cut.npy", npy(ROWS)[:-5])
    with pytest.raises(StoreError, match=r"cut.npy is truncated"):
        import_activations(f"{place}/cut.npy", tmp_path / "s")
    upload(place, "a.npy", npy(ROWS))
    with pytest.raises(InputError, match="cannot be linked"):
        import_activations(f"{place}/a.npy", tmp_path / "s", link=True)


# requests


def test_long_ranges_are_read_in_parts(place, monkeypatch):
    make_store(place, ROWS, 100)
    reader, asked, find = open_rows(place), [], paths.filesystem

    class Counted:
        def __init__(self, fs):
            self.fs = fs

        def cat_ranges(self, files, *args, **how):
            asked.append(len(files))
            return self.fs.cat_ranges(files, *args, **how)

    monkeypatch.setattr(paths, "filesystem", lambda path: (Counted(find(path)[0]), find(path)[1]))
    monkeypatch.setattr(remote, "PART_BYTES", 1000)
    np.testing.assert_array_equal(reader.read(50, 250), ROWS[50:250])  # 1600 + 3200 + 1600 bytes
    assert asked == [2 + 4 + 2]


class Flaky:
    """A filesystem that fails some times before it answers."""

    def __init__(self, *failures):
        self.failures, self.calls = list(failures), 0

    def cat_ranges(self, files, starts, stops, on_error):
        self.calls += 1
        out = [bytes(range(a, b)) for a, b in zip(starts, stops, strict=True)]
        if self.failures:
            out[-1] = self.failures.pop(0)
        return out


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), OSError(errno.EBUSY, "SlowDown"), TimeoutError()]
)
def test_what_passes_is_tried_again(error):
    fs = Flaky(error, error)
    assert remote.read_ranges(fs, ["a", "b"], [0, 3], [5, 9], "x") == [bytes(range(5)), bytes(range(3, 9))]
    assert fs.calls == 3


@pytest.mark.parametrize("error", [FileNotFoundError("a"), PermissionError("a"), ValueError("a")])
def test_what_does_not_pass_is_an_error_at_once(error):
    fs = Flaky(error)
    assert remote.read_ranges(fs, ["a"], [0], [5], "x") == [error]
    assert fs.calls == 1

    def fail():
        fs.calls += 1
        raise error

    with pytest.raises(type(error)):
        remote.retrying(fail, "x")
    assert fs.calls == 2


def test_it_ends_after_some_attempts_and_waits_longer_each_time(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 1.0)
    slept, calls = [], []

    def fail():
        calls.append(1)
        raise ConnectionResetError("reset")

    with pytest.raises(ConnectionResetError):
        remote.retrying(fail, "x", slept.append)
    assert len(calls) == remote.ATTEMPTS
    assert all(0.5 * 2**i <= wait <= 2**i for i, wait in enumerate(slept[:4]))
    assert max(slept) <= remote.LONGEST_WAIT


READ = """
import sys
from dbksvd_dask.store import remote
from dbksvd_dask.store.activations import open_rows

remote.FIRST_WAIT = 0.0
sys.stdout.buffer.write(open_rows(sys.argv[1]).read(0, 600).tobytes())
"""
COMMAND = "import sys; from dbksvd_dask.cli import main; main(sys.argv[1:])"


def apart(code, *args, **variables):
    """Run code in a process that knows a server by its environment alone."""
    known = {n: v for n, v in os.environ.items() if not n.startswith(("AWS_", "FSSPEC_"))}
    known |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": os.devnull, **variables}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, args)]
    return subprocess.run(command, env=known, capture_output=True, timeout=PATIENCE, check=False)


@pytest.mark.slow
def test_broken_connections_are_survived(place, s3_server):
    """Every third request is cut by a proxy in front of the server."""
    make_store(place, ROWS, 50)
    with DelayProxy(*s3_server, breaks=lambda number: number % 3 == 1) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        done = apart(READ, place, FSSPEC_S3_ENDPOINT_URL=url, FSSPEC_S3_KEY="k", FSSPEC_S3_SECRET="s")
        assert done.stdout == ROWS.tobytes(), done.stderr
        assert proxy.requests > 10


# what to set


@pytest.mark.slow
def test_missing_credentials_and_address_say_what_to_set(tmp_path):
    pytest.importorskip("s3fs")
    nowhere = {"FSSPEC_S3_ENDPOINT_URL": "http://127.0.0.1:9"}
    done = apart(COMMAND, "fit", "s3://b/s", "s3://b/run", "--n-atoms", 4, "--k", 1, **nowhere)
    assert done.returncode == 1
    assert b"no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in done.stderr
    done = apart(COMMAND, "info", "s3://b/run", AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s", **nowhere)
    assert done.returncode == 1
    assert b"the server cannot be reached" in done.stderr
    assert b"set FSSPEC_S3_ENDPOINT_URL to its address" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_missing_bucket_says_what_to_set(s3, capsys):
    said = fails(capsys, "import", "s3://nowhere/*.npy", "store")
    assert "no file matches" in said or "FSSPEC_S3_ENDPOINT_URL" in said
    with pytest.raises(StoreError, match=r"there is no such bucket; .* set FSSPEC_S3_ENDPOINT_URL|may this user"):
        save_dictionary("s3://nowhere/d", small(0))


# credentials


def test_credentials_are_neither_stored_nor_logged(place, secret, tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG, "dbksvd_dask")
    upload(place, "a.npy", npy(ROWS))
    run(
        capsys,
        "import",
        f"{place}/a.npy",
        f"{place}/store",
        "--status",
        tmp_path / "i.json",
        "--log",
        tmp_path / "l",
    )
    run(capsys, "fit", f"{place}/store", f"{place}/run", "--n-atoms", 12, "--k", 2, "--n-iter", 2)
    code, out, err = run(capsys, "encode", f"{place}/store", f"{place}/run", f"{place}/codes")
    assert code == 0
    fs = fsspec.filesystem("s3")
    contents = [fs.cat_file(name) for name in fs.find(place.removeprefix("s3://"))]
    contents += [path.read_bytes() for path in tmp_path.iterdir()]
    contents += [pickle.dumps(open_rows(f"{place}/store")), caplog.text.encode(), out.encode(), err.encode()]
    assert len(contents) > 10
    assert not any(secret.encode() in content for content in contents)
