"""Writing stores: whole chunks in any order, nothing half-published, unfinished work resumed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import zarr

from dbksvd_dask.errors import InputError, JobError, MismatchError, StoreError
from dbksvd_dask.store import atomic, chunk_file, partial
from dbksvd_dask.store.activations import (
    Aligned,
    create_activations,
    default_chunk_rows,
    open_activations,
    open_rows,
    open_writer,
)
from dbksvd_dask.store.checksums import crc32c
from dbksvd_dask.store.chunk_file import Stream
from dbksvd_dask.store.verify import verify_store
from tests.helpers.import_patterns import values
from tests.helpers.stores import make_store, tree

ROWS = values((22, 6), "float16")


def begin(path, **options):
    return create_activations(path, 22, 6, "float16", chunk_rows=8, **options)


def write(writer, *chunks):
    for i in chunks:
        writer.write_chunk(i, ROWS[8 * i : 8 * i + 8])


@pytest.mark.parametrize("compressor", [None, "zstd", "blosc"])
def test_chunks_in_any_order_make_the_same_store(compressor, tmp_path):
    for name, order in (("one", (0, 1, 2)), ("two", (2, 0, 1))):
        writer = begin(tmp_path / name, compressor=compressor)
        write(writer, *order)
        writer.finish()
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    np.testing.assert_array_equal(open_rows(tmp_path / "one").read(0, 22).view("u2"), ROWS.view("u2"))


def test_store_is_zarr_version_3_that_zarr_reads(tmp_path):
    group = zarr.open_group(make_store(tmp_path / "s", ROWS, aligned={"label": np.arange(22)}), mode="r")
    array = group["activations"]
    assert group.metadata.zarr_format == 3
    assert array.metadata.dimension_names == ("sample", "feature")
    np.testing.assert_array_equal(np.asarray(array[...]).view("u2"), ROWS.view("u2"))
    np.testing.assert_array_equal(group["label"][...], np.arange(22))
    for key in ("format", "format_version", "package_version", "provenance", "complete", "content_id"):
        assert key in group.attrs


def test_chunk_of_zeros_is_written_too(tmp_path):
    make_store(tmp_path / "s", np.zeros((8, 6), np.float32), compressor="zstd")
    assert {p.name for p in (tmp_path / "s" / "activations").iterdir()} == {"zarr.json", "c.0.0", "c.1.0"}


def test_store_appears_when_it_is_finished(tmp_path):
    writer = begin(tmp_path / "s")
    write(writer, 0, 2)
    assert not (tmp_path / "s").exists()
    with pytest.raises(StoreError, match=r"no store at .*s; an unfinished one is at .*s.partial"):
        open_rows(tmp_path / "s")
    with pytest.raises(StoreError, match=r"s.partial is not finished; run the command that was writing it again"):
        open_rows(tmp_path / "s.partial")
    with pytest.raises(JobError, match=r"cannot be finished: chunks 1 of 3 are not written"):
        writer.finish()
    write(writer, 1)
    writer.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert {p.name for p in (tmp_path / "s").iterdir()} == {"activations", "crc32c", "zarr.json"}


def test_several_processes_can_write_one_store(tmp_path):
    write(begin(tmp_path / "s"), 0)
    other = open_writer(tmp_path / "s")
    assert other.missing() == [1, 2]
    write(other, 1, 2)
    open_writer(tmp_path / "s").finish()
    np.testing.assert_array_equal(open_rows(tmp_path / "s").read(0, 22).view("u2"), ROWS.view("u2"))
    with pytest.raises(StoreError, match=r"no store is being written at"):
        open_writer(tmp_path / "s")


def test_existing_store_stays_until_the_new_one_is_finished(tmp_path):
    path = make_store(tmp_path / "s", ROWS)
    before = tree(path)
    with pytest.raises(
        StoreError, match=r"s already exists; choose another name, or replace it with overwrite=True"
    ):
        begin(path)
    writer = begin(path, overwrite=True)
    write(writer, 0, 1)
    assert tree(path) == before
    write(writer, 2)
    writer.finish()
    assert open_rows(path).chunk_rows == 8
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_unfinished_store_is_gone_on_with(tmp_path):
    write(begin(tmp_path / "s"), 0, 1)
    writer = begin(tmp_path / "s", resume=True)
    assert writer.missing() == [2]
    write(writer, 2)
    writer.finish()
    verify_store(tmp_path / "s")


def test_going_on_with_other_options_is_refused_with_both_values(tmp_path):
    write(begin(tmp_path / "s"), 0)
    with pytest.raises(MismatchError, match=r"begun with compressor=None, now compressor='zstd'; use the same"):
        begin(tmp_path / "s", resume=True, compressor="zstd")
    assert begin(tmp_path / "s", resume=True).missing() == [1, 2]


@pytest.mark.parametrize("damage", ["short", "other bits", "gone", "marker"])
def test_chunk_lost_to_a_power_failure_is_written_again(damage, tmp_path):
    write(begin(tmp_path / "s"), 0, 1)
    chunk = tmp_path / "s.partial" / "activations" / "c.1.0"
    content = bytearray(chunk.read_bytes())
    if damage == "gone":
        chunk.unlink()
    elif damage == "marker":
        (tmp_path / "s.partial" / ".parts" / "chunk-00000001.json").write_text("")
    else:
        content[5] ^= 1
        chunk.write_bytes(content[:10] if damage == "short" else content)
    assert begin(tmp_path / "s", resume=True).missing() == [1, 2]


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_chunk_that_changes_on_the_disk_is_not_published(compressor, tmp_path):
    writer = begin(tmp_path / "s", compressor=compressor)
    write(writer, 0, 1, 2)
    other = begin(tmp_path / "t", compressor=compressor)
    other.write_chunk(1, np.zeros((8, 6), np.float16))
    chunk = (tmp_path / "t.partial" / "activations" / "c.1.0").read_bytes()
    (tmp_path / "s.partial" / "activations" / "c.1.0").write_bytes(chunk)
    with pytest.raises(JobError, match=r"chunks 1 do not read back as they were written"):
        writer.finish(verify=True)
    assert not (tmp_path / "s").exists()
    assert writer.missing() == [1]
    write(writer, 1)
    writer.finish(verify=True)


@pytest.mark.parametrize("damage", ["other bits", "short"])
def test_chunk_that_does_not_read_back_does_not_count_as_written(damage, tmp_path, monkeypatch):
    writer = begin(tmp_path / "s")
    preadv = os.preadv

    def failing_disk(fd, buffers, offset):
        n = preadv(fd, buffers, offset)
        buffers[0][n - 1] ^= 1
        return n // 2 if damage == "short" else n

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_disk)
        with pytest.raises(
            JobError, match=r"chunk 1 of `activations` in .*s.partial does not read back as it was written"
        ):
            write(writer, 1)
    assert not list((tmp_path / "s.partial" / "activations").glob("c.1*"))
    assert writer.missing() == [0, 1, 2]
    writer.write_chunk(1, ROWS[8:16], verify=False)
    assert writer.missing() == [0, 2]


def test_compressed_chunk_that_does_not_read_back_does_not_count_as_written(tmp_path, monkeypatch):
    writer = begin(tmp_path / "s", compressor="zstd")
    monkeypatch.setattr(partial, "same_bytes", lambda a, b: False)
    with pytest.raises(JobError, match=r"chunk 1 of `activations` in .* does not read back as it was written"):
        write(writer, 1)
    assert writer.missing() == [0, 1, 2]


PIECE = chunk_file.PIECE_BYTES


@pytest.mark.parametrize("n_bytes", [0, 1, 7, PIECE // 2 - 1, PIECE // 2, PIECE + 1, 3 * PIECE])
@pytest.mark.parametrize("streamed", [False, True])
def test_chunk_file_holds_the_bytes_and_returns_their_checksum(streamed, n_bytes, tmp_path, rng):
    content = rng.integers(0, 256, n_bytes, np.uint8)
    rows = as_stream(content) if streamed else content
    crc = chunk_file.write_chunk_file(str(tmp_path / "c"), rows, 5, folder=str(tmp_path))
    assert (tmp_path / "c").read_bytes() == content.tobytes() + bytes(5)
    assert crc == crc32c(content)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def as_stream(rows):
    def fill(first, out):
        out[...] = rows[first : first + len(out)]

    return Stream(rows.shape, rows.dtype, fill)


@pytest.mark.parametrize("row_bytes", [1, 2, 1536, PIECE, 3 * PIECE])
def test_pieces_are_whole_rows_and_stay_in_the_cache(row_bytes):
    rows = chunk_file.piece_rows(row_bytes)
    assert rows == 1 or rows * row_bytes <= PIECE < 2 * rows * row_bytes
    assert rows & (rows - 1) == 0


@pytest.mark.parametrize("compressor", [None, "zstd"])
@pytest.mark.parametrize("streamed", [False, True])
def test_rows_are_shown_in_order_before_the_chunk_counts_as_done(streamed, compressor, tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_file, "PIECE_BYTES", 3 * 12)  # two rows of 12 bytes, not three
    writer = begin(tmp_path / "s", compressor=compressor)
    seen = []

    def note():
        assert writer.missing() == [0, 1, 2]
        seen.append("done")

    rows = as_stream(ROWS[8:16]) if streamed else ROWS[8:16]
    writer.write_chunk(1, rows, on_rows=lambda first, part: seen.append((first, part.copy())), before_done=note)
    assert writer.missing() == [0, 2]
    assert seen.pop() == "done"
    assert [first for first, _ in seen] == ([0] if compressor else [0, 2, 4, 6])
    np.testing.assert_array_equal(np.concatenate([part for _, part in seen]), ROWS[8:16])


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_chunk_that_is_refused_while_it_is_written_leaves_nothing(compressor, tmp_path):
    writer = begin(tmp_path / "s", compressor=compressor)

    def refuse(first, rows):
        raise InputError("no such rows")

    with pytest.raises(InputError, match="no such rows"):
        writer.write_chunk(1, as_stream(ROWS[8:16]), on_rows=refuse)
    assert writer.missing() == [0, 1, 2]
    assert not [path for path in (tmp_path / "s.partial").rglob("*") if "c.1" in path.name]


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_number_of_samples_can_stay_open_until_the_end(compressor, tmp_path):
    writer = create_activations(tmp_path / "s", None, 6, "float16", chunk_rows=8, compressor=compressor)
    assert writer.n_chunks is None
    write(writer, 0, 1, 2)
    writer.finish()
    reader = open_rows(tmp_path / "s")
    np.testing.assert_array_equal(reader.read(0, 22).view("u2"), ROWS.view("u2"))
    verify_store(tmp_path / "s")


def test_short_chunk_in_the_middle_is_refused(tmp_path):
    writer = create_activations(tmp_path / "s", None, 6, "float16", chunk_rows=8)
    writer.write_chunk(0, ROWS[:5])
    writer.write_chunk(1, ROWS[8:16])
    with pytest.raises(JobError, match=r"chunks 0 have fewer than 8 rows; only the last chunk may"):
        writer.finish()


@pytest.mark.parametrize(
    ("chunk", "rows", "message"),
    [
        (0, ROWS[:7], r"chunk 0 of .* needs 8 rows, got 7"),
        (2, ROWS[:8], r"chunk 2 of .* needs 6 rows, got 8"),
        (3, ROWS[:1], r"chunk 3 of 1 rows .* 3 chunks"),
        (0, ROWS[:8].astype(np.float32), r"`activations` must be float16 of shape \(8, 6\), got float32"),
        (0, ROWS[:8, :5], r"must be float16 of shape \(8, 6\), got float16 of shape \(8, 5\)"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(chunk, rows, message, tmp_path):
    writer = begin(tmp_path / "s")
    with pytest.raises(InputError, match=message):
        writer.write_chunk(chunk, rows)
    assert writer.missing() == [0, 1, 2]


def test_aligned_arrays_must_come_with_every_chunk(tmp_path):
    writer = begin(
        tmp_path / "s", aligned={"label": "int32", "span": Aligned("int64", (2,), {"unit": "character"})}
    )
    with pytest.raises(
        InputError, match=r"came with \['activations'\]; .* needs \['activations', 'label', 'span'\]"
    ):
        writer.write_chunk(0, ROWS[:8])
    with pytest.raises(InputError, match=r"`label` must be int32 of shape \(8,\), got int64"):
        writer.write_chunk(0, ROWS[:8], {"label": np.arange(8), "span": np.zeros((8, 2), np.int64)})
    for i in range(3):
        n = len(ROWS[8 * i : 8 * i + 8])
        aligned = {"label": np.full(n, i, np.int32), "span": np.full((n, 2), i)}
        writer.write_chunk(i, ROWS[8 * i : 8 * i + 8], aligned)
    writer.finish()
    dataset = open_activations(tmp_path / "s")
    np.testing.assert_array_equal(dataset.label.values, np.repeat([0, 1, 2], [8, 8, 6]))
    assert dataset.span.attrs == {"unit": "character"}
    assert dataset.span.dims == ("sample", "span_0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int32"}, r"dtype int32 cannot be stored; use one of float16"),
        ({"compressor": "rar"}, r"compressor='rar' is not known"),
        ({"chunk_rows": 0}, r"chunk_rows=0; need at least 1"),
        ({"n_samples": 0}, r"shape \(0, 6\) has no content"),
        ({"aligned": {"text": "U5"}}, r"dtype <U5 cannot be stored; use numbers or booleans"),
        ({"aligned": {"crc32c": "int8"}}, r"cannot be called 'crc32c'"),
        ({"aligned": {"a/b": "int8"}}, r"cannot be called 'a/b'"),
    ],
)
def test_stores_that_cannot_be_are_refused_before_anything_is_written(options, message, tmp_path):
    given = {"n_samples": 22, "n_features": 6, "dtype": "float16", **options}
    with pytest.raises(InputError, match=message):
        create_activations(tmp_path / "s", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("width", "itemsize"), [(64, 2), (384, 2), (768, 2), (768, 4), (2304, 2), (4096, 4), (16384, 8)]
)
def test_default_chunk_is_16_to_64_megabytes_and_a_power_of_two(width, itemsize):
    rows = default_chunk_rows(width, itemsize)
    assert rows & (rows - 1) == 0
    assert 16 << 20 <= rows * width * itemsize <= 64 << 20


def test_row_wider_than_a_chunk_still_gets_one():
    assert default_chunk_rows(1 << 26, 4) == 1


def test_verify_names_the_chunks_that_differ(tmp_path):
    make_store(tmp_path / "s", ROWS, aligned={"label": np.arange(22)})
    assert verify_store(tmp_path / "s") == 6
    for name in ("activations/c.1.0", "label/c.4"):
        path = tmp_path / "s" / name
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    with pytest.raises(StoreError, match=r"chunks 1, 4 of .* differ from their checksums"):
        verify_store(tmp_path / "s")


def test_run_that_died_just_before_publishing_is_only_published(tmp_path, monkeypatch):
    writer = begin(tmp_path / "s")
    write(writer, 0, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "publish", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    again = begin(tmp_path / "s", resume=True)
    assert again.complete
    assert again.missing() == []
    again.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    verify_store(tmp_path / "s")


def test_small_store_is_one_chunk_of_its_own_size(tmp_path):
    make_store(tmp_path / "s", ROWS, chunk_rows=22)
    writer = create_activations(tmp_path / "t", 22, 6, "float16")
    assert (writer.chunk_rows, writer.n_chunks) == (22, 1)
