"""Rows out of Zarr stores: what Zarr reads, faster, and with damage noticed."""

from __future__ import annotations

import pickle

import dask
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store.activations import Aligned, fingerprint, open_activations, open_aligned, open_rows
from dbksvd_dask.store.reader import RowReader
from tests.helpers.import_patterns import pattern, values
from tests.helpers.stores import make_store

ROWS = values((22, 6), "float32")

LAYOUTS = {
    "plain": {},
    "flat keys": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "old keys": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "zstd": {"compressors": "auto"},
    "blosc": {"compressors": BloscCodec()},
    "sharded": {"chunks": (3, 6), "shards": (9, 6)},
    "sharded columns": {"chunks": (3, 2), "shards": (9, 6), "compressors": GzipCodec()},
    "columns apart": {"chunks": (5, 4)},
    "one chunk": {"chunks": (100, 6)},
    "transposed": {"filters": zarr.codecs.TransposeCodec(order=(1, 0))},
    "big endian": {"serializer": zarr.codecs.BytesCodec(endian="big")},
}


def make_array(path, rows, name=None, **options):
    settings = {"chunks": (5, rows.shape[1]), "compressors": None, **options}
    array = zarr.create_array(path, name=name, shape=rows.shape, dtype=rows.dtype, **settings)
    array[...] = rows
    return str(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_as_zarr_reads_it(layout, tmp_path):
    path = make_array(tmp_path / "a", ROWS, **LAYOUTS[layout])
    reader = open_rows(path)
    assert reader.shape == (22, 6)
    through_zarr = zarr.open_array(path, mode="r")
    for start, stop in ((0, 22), (0, 5), (3, 17), (4, 5), (7, 7), (21, 22)):
        rows = reader.read(start, stop)
        assert rows.flags.c_contiguous
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows.view(np.uint32), np.asarray(through_zarr[start:stop]).view(np.uint32))


RUNS = [(20, 22), (3, 4), (0, 2), (1, 12), (5, 5), (7, 9), (14, 16)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_come_one_below_the_other_and_every_chunk_is_decoded_once(layout, tmp_path, monkeypatch):
    reader, decoded = open_rows(make_array(tmp_path / "a", ROWS, **LAYOUTS[layout])), []
    read = RowReader._read_zarr
    monkeypatch.setattr(RowReader, "_read_zarr", lambda self, a, *rest: (decoded.append(a), read(self, a, *rest)))
    np.testing.assert_array_equal(reader.read_runs(RUNS), np.concatenate([ROWS[a:b] for a, b in RUNS]))
    chunks = [row // reader.chunk_rows for row in decoded]
    assert len(chunks) == len(set(chunks))
    assert bool(chunks) != reader.raw


def test_only_plain_whole_row_chunks_are_read_directly(tmp_path):
    direct = {name for name, o in LAYOUTS.items() if open_rows(make_array(tmp_path / name, ROWS, **o)).raw}
    assert direct == {"plain", "flat keys", "old keys", "one chunk"}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr_version_2_reads_as_zarr_reads_it(order, dtype, separator, tmp_path):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=2)
    array = group.create_array(
        "activations",
        shape=ROWS.shape,
        chunks=(5, 6),
        dtype=dtype,
        order=order,
        compressors=None,
        filters=None,
        chunk_key_encoding={"name": "v2", "separator": separator},
    )
    array[...] = ROWS
    reader = open_rows(tmp_path / "g")
    np.testing.assert_array_equal(reader.read(2, 19).view(np.uint32), ROWS[2:19].view(np.uint32))
    assert reader.raw == (order == "C" and dtype == "<f4")


def test_group_without_our_attributes_is_accepted(tmp_path):
    make_array(tmp_path / "g", ROWS, name="activations")
    np.testing.assert_array_equal(open_rows(tmp_path / "g").read(0, 22), ROWS)
    make_array(tmp_path / "h", ROWS, name="acts")
    np.testing.assert_array_equal(open_rows(tmp_path / "h", "acts").read(0, 22), ROWS)
    with pytest.raises(StoreError, match=r"has no array `activations`; its arrays: acts"):
        open_rows(tmp_path / "h")


def test_bfloat16_store_delivers_float32_exactly(tmp_path):
    bits = pattern((22, 6), "bfloat16")
    reader = open_rows(make_store(tmp_path / "s", bits, dtype="bfloat16"))
    assert reader.dtype == np.float32
    np.testing.assert_array_equal(reader.read(3, 20).view(np.uint32), bits[3:20].astype(np.uint32) << 16)
    np.testing.assert_array_equal(reader.read_stored(3, 20), bits[3:20])


def test_reader_travels_to_another_process_small(tmp_path):
    reader = open_rows(make_store(tmp_path / "s", ROWS, compressor="zstd"))
    reader.read(0, 22)
    packed = pickle.dumps(reader)
    assert len(packed) < 2000
    np.testing.assert_array_equal(pickle.loads(packed).read(0, 22), ROWS)


def test_store_that_was_replaced_is_not_read_from_the_old_handle(tmp_path):
    path = make_store(tmp_path / "s", ROWS, compressor="zstd")
    open_rows(path).read(0, 22)
    make_store(tmp_path / "s", ROWS[::-1].copy(), compressor="zstd", overwrite=True)
    np.testing.assert_array_equal(open_rows(path).read(0, 22), ROWS[::-1])


# damage


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_missing_chunk_of_a_complete_store_is_noticed(compressor, tmp_path):
    path = make_store(tmp_path / "s", np.zeros((22, 6), np.float32), compressor=compressor)
    (tmp_path / "s" / "activations" / "c.2.0").unlink()
    reader = open_rows(path)
    assert reader.read(0, 8).shape == (8, 6)
    with pytest.raises(StoreError, match=r"chunk 2 of .* \(rows 8 to 11\) is missing: .*/activations/c.2.0"):
        reader.read(7, 20)


def test_missing_chunk_of_a_foreign_store_is_the_fill_value(tmp_path):
    path = make_array(tmp_path / "a", ROWS, fill_value=7.5)
    (tmp_path / "a" / "c" / "1" / "0").unlink()
    np.testing.assert_array_equal(open_rows(path).read(4, 11), np.asarray(zarr.open_array(path)[4:11]))
    assert open_rows(path).read(5, 6)[0, 0] == 7.5


@pytest.mark.parametrize("size", [0, 10, 95, 97])
def test_chunk_of_the_wrong_size_is_noticed(size, tmp_path):
    path = make_store(tmp_path / "s", ROWS)
    with open(tmp_path / "s" / "activations" / "c.1.0", "r+b") as file:
        file.truncate(size)
    with pytest.raises(StoreError, match=rf"chunk 1 of .* \(rows 4 to 7\) has {size} bytes instead of 96"):
        open_rows(path).read(5, 6)


def test_chunk_that_cannot_be_decoded_is_named(tmp_path):
    path = make_store(tmp_path / "s", ROWS, compressor="zstd")
    (tmp_path / "s" / "activations" / "c.3.0").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match=r"chunk 3 of .* \(rows 12 to 15\) cannot be decoded"):
        open_rows(path).read(0, 22)


# refusals


def test_things_that_are_no_store_are_refused_with_advice(tmp_path):
    with pytest.raises(StoreError, match=r"no store at .*nowhere; make one with `dbksvd import SOURCE"):
        open_rows(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(StoreError, match=rf"{name} is not a Zarr store .* `dbksvd import"):
            open_rows(tmp_path / name)
    (tmp_path / "folder" / "zarr.json").write_text("{not json")
    with pytest.raises(StoreError, match=r"the Zarr metadata in .*folder.* cannot be read"):
        open_rows(tmp_path / "folder")


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros((3, 4, 5), np.float32), InputError, r"has shape \(3, 4, 5\); need two dimensions"),
        (np.zeros((3, 4), np.int32), InputError, r"has dtype int32; need float16, float32, float64 or bfloat16"),
        (np.zeros((3, 4), np.complex64), InputError, r"has dtype complex64"),
        (np.zeros((3, 4), np.uint16), InputError, r"has dtype uint16"),
        (np.zeros((0, 4), np.float32), StoreError, r"is empty: its shape is \(0, 4\)"),
    ],
)
def test_arrays_that_are_no_rows_are_refused(array, error, message, tmp_path):
    zarr.create_array(tmp_path / "a", shape=array.shape, dtype=array.dtype, chunks=(2,) * array.ndim)
    with pytest.raises(error, match=message):
        open_rows(tmp_path / "a")


def test_stores_of_another_kind_or_version_are_refused(tmp_path):
    path = make_store(tmp_path / "s", ROWS)
    group = zarr.open_group(path, mode="r+")
    group.attrs["format_version"] = 99
    with pytest.raises(StoreError, match=r"version 99; this package reads version 1"):
        open_rows(path)
    group.attrs["format"] = "dbksvd-codes"
    with pytest.raises(StoreError, match=r"holds dbksvd-codes, not dbksvd-activations"):
        open_rows(path)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 23), (5, 4)])
def test_rows_outside_the_store_are_refused(start, stop, tmp_path):
    reader = open_rows(make_store(tmp_path / "s", ROWS))
    with pytest.raises(InputError, match=rf"rows {start} to {stop} asked of .*, which has 22 rows"):
        reader.read(start, stop)


# fingerprint


def test_fingerprint_follows_content_not_place(tmp_path):
    one = fingerprint(make_store(tmp_path / "one", ROWS, attributes={"source": "a"}))
    two = fingerprint(make_store(tmp_path / "two", ROWS, attributes={"source": "b"}))
    changed = ROWS.copy()
    changed[20, 3] += 1
    assert one == two
    assert one != fingerprint(make_store(tmp_path / "three", changed))
    assert one != fingerprint(make_store(tmp_path / "four", ROWS, chunk_rows=5))


# xarray


def test_dataset_has_one_dask_chunk_per_zarr_chunk(tmp_path):
    path = make_store(tmp_path / "s", ROWS, aligned={"label": np.arange(22)})
    dataset = open_activations(path)
    assert dataset.activations.dims == ("sample", "feature")
    assert dataset.activations.chunks == ((4, 4, 4, 4, 4, 2), (6,))
    assert dataset.label.chunks == ((4, 4, 4, 4, 4, 2),)
    assert dataset.attrs["format"] == "dbksvd-activations"
    np.testing.assert_array_equal(dataset.activations.values.view(np.uint32), ROWS.view(np.uint32))


def test_dataset_reads_nothing_before_it_is_computed(tmp_path):
    path = make_store(tmp_path / "s", ROWS)
    for chunk in (tmp_path / "s" / "activations").glob("c.[1-5].0"):
        chunk.unlink()
    dataset = open_activations(path)
    np.testing.assert_array_equal(dataset.activations[1:3].values, ROWS[1:3])
    with pytest.raises(StoreError, match=r"chunk 2 .* is missing"):
        dataset.activations[9].compute()


@pytest.mark.parametrize(
    "key",
    [np.s_[::7, 2:4], np.s_[::-3], np.s_[17], np.s_[[3, 9, 21]], np.s_[5:5], np.s_[-3:, ::-1], np.s_[2:20:4, 3]],
    ids=str,
)
def test_dataset_is_indexed_like_an_array(key, tmp_path):
    path = make_store(
        tmp_path / "s",
        ROWS,
        aligned={"pair": np.arange(44).reshape(22, 2)},
        specs={"pair": Aligned("int64", (2,))},
    )
    found = open_activations(path).activations[key].values
    np.testing.assert_array_equal(found, ROWS[key])
    rows = key[0] if isinstance(key, tuple) else key
    np.testing.assert_array_equal(open_activations(path).pair[rows].values, np.arange(44).reshape(22, 2)[rows])


def test_missing_chunk_of_an_aligned_array_is_noticed(tmp_path):
    path = make_store(tmp_path / "s", ROWS, aligned={"label": np.arange(22)})
    (tmp_path / "s" / "label" / "c.1").unlink()
    with pytest.raises(StoreError, match=r"chunk 1 of .* is missing: .*/label/c.1"):
        open_activations(path).label.compute()
    with pytest.raises(StoreError, match=r"has no aligned array `nope`"):
        open_aligned(path, "nope")


def test_same_store_has_the_same_dask_name(tmp_path):
    path = make_store(tmp_path / "s", ROWS)
    assert dask.base.tokenize(open_rows(path)) == dask.base.tokenize(open_rows(path))
    assert open_activations(path).activations.data.name == open_activations(path).activations.data.name
