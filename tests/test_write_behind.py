"""Files forced to the disk some files later, and then let go from memory."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from dbksvd_dask.errors import StoreError
from dbksvd_dask.import_job import import_activations
from dbksvd_dask.store import write_behind
from dbksvd_dask.store.activations import create_activations, open_rows
from dbksvd_dask.store.verify import verify_store
from dbksvd_dask.store.write_behind import MIN_BYTES, WriteBehind, settle

CONTENT = np.random.default_rng(0).bytes(MIN_BYTES)


def in_memory(path):
    """Whether the first page of a file can be had without waiting for the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(512)], 0, os.RWF_NOWAIT) == 512
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this filesystem does not tell what lies in memory")
    finally:
        os.close(fd)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what lies in memory")
def test_settled_file_is_whole_and_out_of_memory(tmp_path):
    (tmp_path / "a").write_bytes(CONTENT)
    assert in_memory(tmp_path / "a")
    settle(str(tmp_path / "a"))
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("the files of this disk are memory")
    assert not in_memory(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_files_are_settled_in_order_a_few_behind(monkeypatch):
    settled = []
    monkeypatch.setattr(write_behind, "settle", settled.append)
    behind = WriteBehind(depth=2 * MIN_BYTES)
    for name in "abcde":
        behind.add(name, MIN_BYTES)
    assert settled == ["a", "b", "c"]
    for name in "fgh":
        behind.add(name, MIN_BYTES - 1)
    assert settled == ["a", "b", "c"], "small files are left to the end"


def rows_of(n_chunks):
    """Rows of chunks that are just large enough to be followed."""
    rows = np.random.default_rng(1).standard_normal((n_chunks * 512, 512)).astype(np.float32)
    assert rows.nbytes // n_chunks == MIN_BYTES
    return rows


def test_store_written_behind_reads_back(tmp_path, monkeypatch):
    settled = []
    real = write_behind.settle
    monkeypatch.setattr(write_behind, "settle", lambda path: (settled.append(os.path.basename(path)), real(path)))
    monkeypatch.setattr(write_behind, "DEPTH_BYTES", 3 * MIN_BYTES)
    rows = rows_of(7)
    writer = create_activations(tmp_path / "s", *rows.shape, rows.dtype, chunk_rows=512)
    for i in range(7):
        writer.write_chunk(i, rows[i * 512 : (i + 1) * 512])
    assert settled == [f"c.{i}.0" for i in range(4)]
    writer.finish()
    np.testing.assert_array_equal(open_rows(tmp_path / "s").read(0, len(rows)), rows)
    assert verify_store(tmp_path / "s") == 7


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, StoreError), (errno.EIO, OSError)])
def test_chunk_that_does_not_reach_the_disk_stops_the_job_and_is_written_again(code, error, tmp_path, monkeypatch):
    """Some filesystems find out that they are full only when they are forced to write."""
    rows = rows_of(8)
    np.save(tmp_path / "a.npy", rows)

    def failing_disk(path):
        with open(path, "r+b") as file:  # what was in memory only is lost
            file.write(bytes(10))
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(write_behind, "settle", failing_disk)
        patch.setattr(write_behind, "DEPTH_BYTES", 3 * MIN_BYTES)
        with pytest.raises(
            error, match=r"no space left .* run the same command" if code == errno.ENOSPC else "Input/output"
        ):
            import_activations(tmp_path / "a.npy", tmp_path / "s", chunk_rows=512)
    assert not (tmp_path / "s").exists()
    result = import_activations(tmp_path / "a.npy", tmp_path / "s", chunk_rows=512)
    assert result.chunks_written + result.chunks_kept == 8
    assert result.chunks_kept < 8
    np.testing.assert_array_equal(open_rows(tmp_path / "s").read(0, len(rows)), rows)
