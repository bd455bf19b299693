"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple

import pytest

from dbksvd_dask.errors import StoreError
from dbksvd_dask.store import atomic


def test_failed_write_leaves_the_old_file_and_no_scratch(tmp_path):
    target = tmp_path / "a.json"
    atomic.write_json(target, {"old": 1})

    def fail():
        with atomic.staged(target) as scratch:
            scratch.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert atomic.read_json(target) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(atomic, "fsync_path", lambda path: seen.append((path.suffix, (tmp_path / "a").exists())))
    atomic.write_bytes(tmp_path / "a", b"x", b"yz")
    assert seen == [(".tmp", False)]
    assert (tmp_path / "a").read_bytes() == b"xyz"


def test_unreadable_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(StoreError, match=r"a.json is damaged: it is not JSON"):
        atomic.read_json(tmp_path / "a.json")
    with pytest.raises(StoreError, match=r"no file at .*b.json"):
        atomic.read_json(tmp_path / "b.json")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_publish_replaces_only_when_told(kind, tmp_path):
    work, target = tmp_path / "w", tmp_path / "t"
    for path in (work, target):
        if kind == "file":
            path.write_text(path.name)
        else:
            path.mkdir()
            (path / path.name).touch()
    with pytest.raises(StoreError, match=r"t already exists; choose another name, or .* overwrite=True"):
        atomic.publish(work, target)
    atomic.publish(work, target, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert target.read_text() == "w" if kind == "file" else [p.name for p in target.iterdir()] == ["w"]


def test_ledger_knows_what_is_done(tmp_path):
    (tmp_path / "parts").mkdir()
    ledger = atomic.Ledger(tmp_path / "parts", "chunk")
    assert ledger.missing(3) == [0, 1, 2]
    ledger.mark(1, {"rows": 5})
    ledger.mark(12345678, {})
    (tmp_path / "parts" / "chunk-00000002.json.77-0.tmp").touch()
    atomic.Ledger(tmp_path / "parts", "other").mark(0, {})
    assert ledger.parts() == [1, 12345678]
    assert ledger.missing(3) == [0, 2]
    assert ledger.read(1) == {"rows": 5}
    ledger.unmark(1)
    assert ledger.missing(2) == [0, 1]


def test_many_missing_parts_are_shortened():
    text = atomic.describe_parts(range(0, 100, 2))
    assert text.startswith("0, 2, 4")
    assert text.endswith("and 38 more ranges")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_says_where_the_work_is(code, tmp_path):
    with pytest.raises(StoreError, match=r"no space left while writing /x.partial .* run the same command again"):
        with atomic.explain_full_disk("/x.partial"):
            raise OSError(code, "full")
    with pytest.raises(PermissionError), atomic.explain_full_disk("/x"):
        raise PermissionError(errno.EACCES, "no")


def test_work_that_cannot_fit_is_not_begun(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**10, 0, 10**9))
    atomic.require_space(tmp_path / "new" / "deep", 10**9)
    with pytest.raises(StoreError, match=r"needs 2.00 GB more and .* has 1.00 GB free; make room"):
        atomic.require_space(tmp_path / "new" / "deep", 2 * 10**9)
