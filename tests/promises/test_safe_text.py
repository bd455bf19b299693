"""Credentials are neither stored nor shown, and files cannot steer the terminal of whoever looks at them."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import logging
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr

from dbksvd_dask import errors
from dbksvd_dask.base.safe_text import printable, redacted, redacted_values
from dbksvd_dask.store.activations import open_rows
from tests.helpers.cli import fails, run
from tests.helpers.stores import make_store

PASSWORD = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pw@host:80/a", "http://***@host:80/a"),
        ("https://token@host/a", "https://***@host/a"),
        ("s3://AKIA:se/cr+et@bucket/key", "s3://***@bucket/key"),
        ("simplecache::http://me:pw@host/a and ftp://x:y@z", "simplecache::http://***@host/a and ftp://***@z"),
        ("'http://me:p%40w@host/a'", "'http://***@host/a'"),
        ("see https://host/a?sig=1&v=2; try", "see https://host/a?sig=***&v=***; try"),
        ("https://me:pw@host/a?sig=a;b,c", "https://***@host/a?sig=***"),
        ("http://127.0.0.1:9000/bucket/a@b", "http://127.0.0.1:9000/bucket/a@b"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("/home/me@work/what?x=1", "/home/me@work/what?x=1"),
        ("tcp://10.0.0.1:8786", "tcp://10.0.0.1:8786"),
    ],
)
def test_credentials_of_urls_are_left_out(text, expected):
    assert redacted(text) == expected
    assert redacted(expected) == expected
    assert redacted_values({"a": [text, 1, None], "b": {"c": text}}) == {
        "a": [expected, 1, None],
        "b": {"c": expected},
    }


KINDS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.DBKSVDError)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_of_ours_tells_a_password(kind):
    assert str(kind(f"cannot open http://me:{PASSWORD}@host/a")) == "cannot open http://***@host/a"


@pytest.mark.parametrize("kind", [errors.StoreError, errors.InputError])
def test_errors_of_workers_travel(kind):
    error = pickle.loads(pickle.dumps(kind(f"cannot open http://me:{PASSWORD}@host/a")))
    assert type(error) is kind
    assert str(error) == "cannot open http://***@host/a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("caf\u00e9 \u65e5\u672c \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u2713", None),
        ("\x1b]0;owned\x07 \x1b[2J", r"\x1b]0;owned\x07 \x1b[2J"),
        ("a\rb\x9bc\x7f", r"a\x0db\x9bc\x7f"),
        ("a\u202egpj.exe", r"a\u202egpj.exe"),
        ("broken \udcff", r"broken \udcff"),
        ("two\nlines", r"two\x0alines"),
    ],
)
def test_control_characters_are_written_out_and_letters_stay(text, expected):
    assert printable(text) == (text if expected is None else expected)
    assert printable("two\nlines", keep="\n") == "two\nlines"


class _Guarded(http.server.SimpleHTTPRequestHandler):
    """Serves a folder to whoever knows the password."""

    def do_GET(self):
        known = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {known}":
            self.send_error(401)
        elif self.command == "HEAD":
            super().do_HEAD()
        elif (asked := self.headers.get("Range")) and os.path.isfile(self.translate_path(self.path)):
            self.send_part(*map(int, asked.removeprefix("bytes=").split("-")))
        else:
            super().do_GET()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def send_part(self, first, last):
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])

    def log_message(self, *_):
        pass


class _PatientServer(http.server.ThreadingHTTPServer):
    """Accepts all the connections of a read at once: those beyond the queue would be tried again after seconds."""

    request_queue_size = 256


@pytest.fixture
def guarded(tmp_path):
    """URL, password and all, of an activation store behind HTTP."""
    pytest.importorskip("aiohttp")
    rng = np.random.default_rng(0)
    make_store(tmp_path / "served" / "s.zarr", rng.standard_normal((400, 6)).astype(np.float32), 100)
    handler = functools.partial(_Guarded, directory=str(tmp_path / "served"))
    server = _PatientServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://me:{PASSWORD}@127.0.0.1:{server.server_address[1]}/s.zarr"
    server.shutdown()
    server.server_close()


def contents(folder):
    for path in Path(folder).rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def test_a_password_in_the_url_of_a_store_is_nowhere_to_be_found(guarded, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    out = tmp_path / "out"
    out.mkdir()
    imported, mixed, codes, fit = (out / name for name in ("imported", "mixed", "codes", "run"))
    said = []
    for command in (
        ("info", guarded),
        ("info", guarded, "--json"),
        ("import", guarded, imported, "--plan"),
        ("import", guarded, imported),
        ("shuffle", guarded, mixed, "--seed", 1, "--json"),
        ("fit", guarded, fit, "--n-atoms", 8, "--k", 2, "--n-iter", 1, "--log", out / "log.jsonl"),
        ("encode", guarded, fit, codes),
        ("info", imported),
        ("info", codes, "--json"),
        ("info", f"{guarded}-nowhere"),
        ("-v", "info", f"{guarded}-nowhere"),
        ("import", guarded, mixed),
        ("import", guarded, out / "other", "--array", "nonsense"),
        ("fit", f"{guarded}/activations/c.0.0", out / "other", "--n-atoms", 8, "--k", 2),
    ):
        code, text, error = run(capsys, *command)
        said.append(f"{command[0]} {code}\n{text}\n{error}")
    assert [s.split()[1] for s in said if s[0] != "-"] == [*"000000000", "1", "1", "1", "1"]
    assert "http://***@127.0.0.1" in said[0]
    everything = "\n".join([*said, caplog.text, repr(open_rows(guarded))])
    assert PASSWORD not in everything
    for path, content in contents(out):
        assert PASSWORD.encode() not in content, path
    source = zarr.open_group(imported, mode="r").attrs["provenance"]["source"]
    assert source == guarded.replace(f"me:{PASSWORD}", "***")


def test_an_interrupted_import_from_behind_a_password_goes_on(guarded, tmp_path):
    """What is compared with an unfinished job is what was written: without credentials."""
    from dbksvd_dask.jobs.import_ import ImportJob, import_activations

    job = ImportJob(guarded, tmp_path / "a", chunk_rows=50, callbacks=[])
    job.init()
    job.run(parts=[0, 3])
    job.close()
    result = import_activations(guarded, tmp_path / "a", chunk_rows=50)
    assert (result.chunks_kept, result.chunks_written) == (2, 6)


def test_a_store_written_with_a_password_in_it_does_not_show_it(tmp_path, capsys):
    store = make_store(tmp_path / "s", np.ones((8, 3), np.float32))
    group = zarr.open_group(store, mode="r+")
    group.attrs["provenance"] = {"source": f"http://me:{PASSWORD}@host/a", "files": ["a?sig=1"]}
    for options in ((), ("--json",)):
        code, out, _ = run(capsys, "info", store, *options)
        assert code == 0
        assert PASSWORD not in out
        assert "http://***@host/a" in out


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\r"


def test_info_writes_terminal_codes_of_attributes_out(tmp_path, capsys):
    store = make_store(tmp_path / "s", np.ones((8, 3), np.float32))
    group = zarr.open_group(store, mode="r+")
    group.attrs["provenance"] = {f"name{HOSTILE}": HOSTILE, "list": [HOSTILE, {"k": "caf\u00e9\nline"}]}
    code, out, _ = run(capsys, "info", store)
    assert code == 0
    assert r"\x1b]0;owned\x07\x1b[2J\u202eevil\x0d" in out
    assert r"café\x0aline" in out
    assert not any(c in out for c in "\x1b\x07\r\u202e")
    _, machine, _ = run(capsys, "info", store, "--json")
    assert machine.isascii()
    assert json.loads(machine)["provenance"]["list"][0] == HOSTILE


def test_errors_write_terminal_codes_of_file_names_out(tmp_path, capsys):
    name = os.fsencode(str(tmp_path)) + b"/\x1b[31m\xffred"
    os.mkdir(name)
    message = fails(capsys, "info", os.fsdecode(name))
    assert r"\x1b[31m\udcffred" in message
    assert "\x1b" not in message
    for command in (("-v", "info", os.fsdecode(name)), ("import", os.fsdecode(name), tmp_path / "x")):
        code, out, err = run(capsys, *command)
        assert code == 1
        assert "\x1b" not in out + err
    code, out, err = run(capsys, "info", "--\x1b[31m")
    assert code == 2
    assert "\x1b" not in out + err


def test_log_lines_of_commands_are_safe():
    from dbksvd_dask.cli.main import _SafeLines, cli

    record = logging.LogRecord("x", logging.INFO, "f", 1, "at %s: %s", ("http://a:b@c", HOSTILE), None)
    text = _SafeLines("%(message)s", cli).format(record)
    assert text.startswith(r"at http://***@c: \x1b]0;")
    assert text.isprintable()
