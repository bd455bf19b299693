"""Rows that lie in files as plain bytes: read by place, from any thread, whatever the files."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers import Collection
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.store import chunk_file
from dbksvd_dask.store.activations import open_rows
from dbksvd_dask.store.spans import Span, SpanReader
from tests.helpers.import_patterns import pattern


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 9))
def test_spans_read_as_one_sequence_of_rows(tmp_path_factory, lengths, step):
    """Files of `before + 3 n` bytes, of which the last 3 n are rows."""
    folder = tmp_path_factory.mktemp("spans")
    spans, rows = [], []
    for i, (before, n) in enumerate(lengths):
        content = np.random.default_rng(i).integers(0, 256, before + 3 * n, np.uint8)
        (folder / str(i)).write_bytes(content.tobytes())
        spans.append(Span(str(folder / str(i)), before, 3 * n))
        rows.append(content[before:].reshape(n, 3))
    expected = np.concatenate(rows)
    with SpanReader(spans) as reader:
        for first in (*range(0, len(expected), step), 0):  # forward, and back to the start
            found = np.zeros_like(expected[first : first + step])
            reader.fill(first, found)
            np.testing.assert_array_equal(found, expected[first : first + step])


def test_one_file_is_open_at_a_time_and_none_afterwards(tmp_path):
    for i in range(20):
        (tmp_path / str(i)).write_bytes(bytes([i, i]))
    before = len(os.listdir("/proc/self/fd"))
    with SpanReader([Span(str(tmp_path / str(i)), 0, 2) for i in range(20)]) as reader:
        rows = np.zeros((40, 1), np.uint8)
        reader.fill(0, rows)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
    np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(20), 2))


def test_file_that_is_cut_off_while_it_is_imported_is_named(tmp_path):
    (tmp_path / "a").write_bytes(bytes(10))
    with SpanReader([Span(str(tmp_path / "a"), 4, 8)]) as reader:
        with pytest.raises(StoreError, match=r"a is truncated: it ended at byte 10"):
            reader.fill(0, np.zeros((4, 2), np.uint8))


def test_only_bytes_in_the_order_of_the_store_are_spans(tmp_path):
    rows = pattern((12, 5), "float32").view(np.float32)
    np.save(tmp_path / "native.npy", rows)
    np.save(tmp_path / "swapped.npy", rows.astype(">f4"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(rows))
    np.savez(tmp_path / "stored.npz", rows)
    np.savez_compressed(tmp_path / "compressed.npz", rows)
    found = {}
    for path in tmp_path.iterdir():
        collection = Collection(path)
        found[path.stem] = collection.spans(3, 7)
        collection.close()
    assert [name for name, spans in sorted(found.items()) if spans is not None] == ["native", "stored"]
    assert [span.nbytes for span in found["native"]] == [4 * 5 * 4]


@pytest.mark.parametrize("n_files", [1, 7, 300])
def test_chunks_of_many_files_are_imported_bit_for_bit(n_files, tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_file, "PIECE_BYTES", 64)  # pieces of 4 rows: across files and chunks
    bits = pattern((3 * n_files, 8), "float16")
    for i in range(n_files):
        np.save(tmp_path / f"{i:04d}.npy", bits[3 * i : 3 * i + 3].view(np.float16))
    result = import_activations(tmp_path / "*.npy", tmp_path / "s", chunk_rows=50, nonfinite="keep")
    np.testing.assert_array_equal(open_rows(tmp_path / "s").read(0, 3 * n_files).view(np.uint16), bits)
    assert result.n_files == n_files


@pytest.mark.parametrize("row", [0, 49, 50, 71, 72, 149])
def test_value_that_is_not_finite_is_placed_whichever_piece_it_is_in(row, tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_file, "PIECE_BYTES", 64)
    rows = np.ones((150, 8), np.float16)
    rows[row, 5] = -np.inf
    np.save(tmp_path / "a.npy", rows[:72])
    np.save(tmp_path / "b.npy", rows[72:])
    name, place = ("a", row) if row < 72 else ("b", row - 72)
    with pytest.raises(InputError, match=rf"^row {place} of .*{name}.npy holds a value that is NaN or infinite"):
        import_activations(tmp_path / "?.npy", tmp_path / "s", chunk_rows=50)
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.npy"]
