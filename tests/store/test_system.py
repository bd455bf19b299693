"""Calls that not every system has: the portable way gives the same, shown by taking the call away."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import numpy as np
import pytest

import dbksvd_dask
from dbksvd_dask.store import _system, chunk_file
from dbksvd_dask.store.activations import create_activations, open_rows
from dbksvd_dask.store.picker import RowPicker, in_file_cache
from dbksvd_dask.store.verify import verify_store

CONTENT = np.random.default_rng(0).bytes(10_000)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(CONTENT)
    with open(path, "r+b") as opened:
        yield opened


def without_c_functions(monkeypatch):
    for name in ("_MEMCMP", "_FALLOCATE", "_SYNC_FILE_RANGE"):
        monkeypatch.setattr(_system, name, None)


def without_calls_of_linux(monkeypatch):
    without_c_functions(monkeypatch)
    for name in ("preadv", "RWF_NOWAIT", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.delattr(_system.mmap, "MAP_POPULATE", raising=False)


@pytest.fixture(params=["as it is", "portable"])
def system(request, monkeypatch):
    """This system, and one that has none of the calls."""
    if request.param == "portable":
        without_calls_of_linux(monkeypatch)
    return request.param


def test_bytes_are_read_at_a_place(system, file):
    found = bytearray(500)
    assert _system.read_at(file.fileno(), memoryview(found), 1234) == 500
    assert found == CONTENT[1234:1734]


def test_file_that_ends_gives_what_it_has(system, file):
    found = bytearray(500)
    assert _system.read_at(file.fileno(), memoryview(found), len(CONTENT) - 7) == 7
    assert found[:7] == CONTENT[-7:]
    assert _system.read_at(file.fileno(), memoryview(found), len(CONTENT)) == 0


@pytest.mark.parametrize("name", ["preadv", "pread"])
def test_call_that_reads_less_than_asked_is_repeated(name, file, monkeypatch):
    if name == "pread":
        without_calls_of_linux(monkeypatch)
        real = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, offset: real(fd, min(n, 300), offset))
    else:
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:300]], offset))
    found = bytearray(1000)
    assert _system.read_at(file.fileno(), memoryview(found), 17) == 1000
    assert found == CONTENT[17:1017]


def test_bytes_are_compared(system):
    a = np.frombuffer(CONTENT, np.uint8)
    b = a.copy()
    assert _system.same_bytes(a, b)
    b[-1] ^= 1
    assert not _system.same_bytes(a, b)
    assert not _system.same_bytes(a, a[:-1])
    assert _system.same_bytes(a[:0], b[:0])


def test_file_stays_as_it_is_whatever_the_kernel_is_asked(system, file):
    _system.start_writeback(file.fileno(), 0, 4096)
    _system.finish_writeback(file.fileno())
    _system.drop_pages(file.fileno())
    assert Path(file.name).read_bytes() == CONTENT
    assert _system.map_file(file.fileno()).tobytes() == CONTENT


@pytest.mark.skipif(_system._SYNC_FILE_RANGE is None, reason="only on Linux")
def test_file_that_cannot_be_written_out_is_told(file):
    closed = file.fileno()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        _system.finish_writeback(closed)


def test_without_the_call_a_file_is_forced_to_the_disk(file, monkeypatch):
    without_c_functions(monkeypatch)
    forced = []
    monkeypatch.setattr(os, "fsync", forced.append)
    _system.finish_writeback(file.fileno())
    assert forced == [file.fileno()]


@pytest.mark.skipif(_system._FALLOCATE is None, reason="only on Linux")
def test_room_is_reserved_or_its_lack_told_at_once(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        _system.reserve(file.fileno(), 1 << 20)
        status = os.fstat(file.fileno())
        assert (status.st_size, status.st_blocks * 512) == (1 << 20, 1 << 20)
        with pytest.raises(OSError, match=r"File too large|No space left"):
            _system.reserve(file.fileno(), 1 << 62)
    read, write = os.pipe()
    _system.reserve(write, 100)  # a place that cannot reserve is no error
    os.close(read)
    os.close(write)


def test_without_the_call_nothing_is_reserved(tmp_path, monkeypatch):
    without_c_functions(monkeypatch)
    with open(tmp_path / "a", "wb") as file:
        _system.reserve(file.fileno(), 1 << 62)
        assert os.fstat(file.fileno()).st_size == 0


def test_released_bytes_read_as_zeros_and_the_rest_stays(system, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(CONTENT * 3)
    could = _system.release_bytes(str(path), 0, 3 * 4096 + 7)
    assert _system.can_release(str(tmp_path)) == could
    assert could or system == "portable"
    cut = 3 * 4096 if could else 0
    assert path.read_bytes() == bytes(cut) + (CONTENT * 3)[cut:]


@pytest.mark.parametrize("name", ["RWF_NOWAIT", "preadv"])
def test_what_is_cached_is_not_known_without_the_call(name, file, monkeypatch):
    monkeypatch.delattr(os, name, raising=False)
    assert not _system.is_cached(file.fileno(), bytearray(512), 0)


def test_function_that_no_c_library_has_is_none():
    assert _system._c_function("no_such_function") is None


def test_store_of_a_system_without_the_calls_has_the_same_bytes(tmp_path, monkeypatch):
    rows = np.random.default_rng(1).standard_normal((1000, 16)).astype(np.float32)

    def write(name):
        writer = create_activations(tmp_path / name, *rows.shape, rows.dtype, chunk_rows=300)
        for i in range(4):
            writer.write_chunk(i, rows[i * 300 : (i + 1) * 300])
        writer.finish(verify=True)
        return {p.relative_to(tmp_path / name): p.read_bytes() for p in sorted((tmp_path / name).rglob("c.*"))}

    expected = write("linux")
    without_calls_of_linux(monkeypatch)
    assert write("other") == expected
    assert verify_store(tmp_path / "linux") == verify_store(tmp_path / "other") == 4
    reader = open_rows(tmp_path / "linux")
    np.testing.assert_array_equal(reader.read(250, 950), rows[250:950])
    assert not in_file_cache(reader), "not known is taken as no"
    out = np.empty((3, 16), np.float32)
    picker = RowPicker(reader, most_mapped=reader.nbytes)
    picker.pick(np.array([999, 0, 301]), out)
    picker.close()
    np.testing.assert_array_equal(out, rows[[999, 0, 301]])


def test_bad_read_back_is_noticed_without_the_calls(tmp_path, monkeypatch):
    without_calls_of_linux(monkeypatch)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: real(fd, n, offset)[:-1] + b"\xff")
    with pytest.raises(chunk_file.ReadBackError):
        chunk_file.write_chunk_file(str(tmp_path / "c"), np.zeros((4, 4), np.float32), folder=str(tmp_path))


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name):
    library, *rest = name.split(".")
    private = rest[:1] == ["core"] or any(part.startswith("_") for part in rest)
    return library in ("zarr", "fsspec", "numba") and private


def test_zarr_fsspec_and_numba_are_used_by_their_public_names_only():
    """What `zarr.core` and `numba.core` hold moves between releases."""
    files = sorted(Path(dbksvd_dask.__file__).parent.rglob("*.py"))
    found = {(file.name, name) for file in files for name in imported_modules(file) if is_private(name)}
    # `fsspec.core.url_to_fs` is documented API under that very name
    assert found == {("paths.py", "fsspec.core.url_to_fs")}
