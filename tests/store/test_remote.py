"""Stores on a remote: S3 for real, against a server on the loopback interface."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from dbksvd_dask.errors import StoreError
from dbksvd_dask.jobs.import_ import ImportJob, import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import create_activations, fingerprint, open_activations, open_rows
from dbksvd_dask.store.verify import verify_store
from tests.helpers.import_patterns import values
from tests.helpers.stores import make_store

ROWS = values((50, 6), "float32")


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_store_on_s3_reads_as_written(compressor, place):
    make_store(place, ROWS, 16, {"label": np.arange(50)}, compressor=compressor)
    reader = pickle.loads(pickle.dumps(open_rows(place)))
    assert reader.raw == (compressor is None)
    for start, stop in ((0, 50), (3, 7), (10, 40), (48, 50)):
        np.testing.assert_array_equal(reader.read(start, stop).view("u4"), ROWS[start:stop].view("u4"))
    dataset = open_activations(place)
    np.testing.assert_array_equal(dataset.activations[5:25:3].values, ROWS[5:25:3])
    np.testing.assert_array_equal(dataset.label.values, np.arange(50))
    assert verify_store(place) == 4


def test_local_and_remote_copy_have_one_fingerprint(place, tmp_path):
    assert fingerprint(make_store(place, ROWS)) == fingerprint(make_store(tmp_path / "s", ROWS))


def test_unfinished_store_on_s3_is_refused_and_gone_on_with(place):
    writer = create_activations(place, 50, 6, "float32", chunk_rows=16)
    writer.write_chunk(0, ROWS[:16])
    with pytest.raises(StoreError, match=r"is not finished; run the command that was writing it again"):
        open_rows(place)
    again = create_activations(place, 50, 6, "float32", chunk_rows=16, resume=True)
    assert again.missing() == [1, 2, 3]
    for i in (1, 2, 3):
        again.write_chunk(i, ROWS[16 * i : 16 * i + 16])
    again.finish()
    np.testing.assert_array_equal(open_rows(place).read(0, 50).view("u4"), ROWS.view("u4"))
    assert ".parts" not in paths.list_names(place)
    with pytest.raises(StoreError, match=r"already exists; .* overwrite=True"):
        create_activations(place, 50, 6, "float32")


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_missing_object_of_a_complete_store_is_noticed(compressor, place):
    make_store(place, ROWS, 16, compressor=compressor)
    paths.remove(f"{place}/activations/c.2.0")
    reader = open_rows(place)
    assert reader.read(0, 32).shape == (32, 6)
    with pytest.raises(StoreError, match=r"chunk 2 of s3://.* \(rows 32 to 47\) is missing"):
        reader.read(30, 40)


def test_short_object_is_noticed(place):
    make_store(place, ROWS, 16)
    atomic.write_bytes(f"{place}/activations/c.1.0", b"1234567890")
    with pytest.raises(StoreError, match=r"chunk 1 of .* gave"):
        open_rows(place).read(16, 32)


def test_import_to_s3_goes_on_where_it_stopped(place, tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    job = ImportJob(tmp_path / "a.npy", place, chunk_rows=8, callbacks=[])
    job.init()
    job.run(parts=[0, 3])
    job.close()
    result = import_activations(tmp_path / "a.npy", place, chunk_rows=8)
    assert (result.chunks_kept, result.chunks_written) == (2, 5)
    np.testing.assert_array_equal(open_rows(place).read(0, 50).view("u4"), ROWS.view("u4"))


def test_rows_are_dropped_on_the_way_to_s3(place, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(60, dtype=np.float32).reshape(5, 4, 3))
    result = import_activations(tmp_path / "a.npy", place, chunk_rows=8, drop_first_token=True)
    assert result.n_samples == 15
    assert paths.list_names(f"{place}.scan") == []


def test_shuffle_from_s3_to_s3(place, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_store(place, ROWS, 25, {"row": np.arange(50)})
    shuffle_activations(place, f"{place}-mixed", seed=1, block_bytes=1)
    mixed = open_activations(f"{place}-mixed")
    np.testing.assert_array_equal(mixed.activations.values, ROWS[mixed.row.values])
    assert os.listdir(tmp_path) == []


def test_store_on_s3_can_be_imported_and_replaced(place, tmp_path):
    make_store(place, ROWS, 16)
    import_activations(place, tmp_path / "s", chunk_rows=7)
    np.testing.assert_array_equal(open_rows(tmp_path / "s").read(0, 50).view("u4"), ROWS.view("u4"))
    make_store(place, ROWS[:20], 16, overwrite=True)
    assert open_rows(place).n_samples == 20


def test_nothing_at_a_url_is_an_error_in_words(s3):
    with pytest.raises(StoreError, match=r"no store at s3://bucket/nowhere"):
        open_rows(f"{s3}/nowhere")


def test_any_fsspec_protocol_will_do(tmp_path):
    """A filesystem without asyncio of its own, here the one in memory."""
    make_store("memory://stores/s", ROWS, 16, {"label": np.arange(50)}, compressor="zstd")
    np.testing.assert_array_equal(open_rows("memory://stores/s").read(3, 40).view("u4"), ROWS[3:40].view("u4"))
    assert open_activations("memory://stores/s").label.values[-1] == 49


def test_file_urls_are_local_paths(tmp_path):
    make_store(f"file://{tmp_path}/s", ROWS)
    assert open_rows(f"file://{tmp_path}/s").path == f"{tmp_path}/s"


def test_unknown_protocol_is_named():
    with pytest.raises(StoreError, match=r"cannot open nonsense://x: Protocol not known: nonsense"):
        open_rows("nonsense://x")
