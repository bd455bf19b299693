"""Sources that are damaged, cut off or not what they say are refused by name, in one line."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dbksvd_dask.errors import DBKSVDError, InputError, StoreError
from dbksvd_dask.importers import find_files, open_file
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.store.activations import open_rows
from tests.helpers.import_patterns import values
from tests.importers.test_formats import WRITERS, arrow_table

DATA = Path(__file__).parents[1] / "data" / "imports"
END_MARKS = {False: bytes.fromhex("ffffffff00000000"), True: bytes(4)}


def refused(source, message, error=InputError, **options):
    with pytest.raises(error, match=message) as caught:
        import_activations(source, source.parent / "store", **options)
    assert "\n" not in str(caught.value)
    assert not list(source.parent.glob("store*"))


# Arrow


def write_stream(path, rows, legacy=False, compression=None):
    table = arrow_table(rows)
    options = pa.ipc.IpcWriteOptions(use_legacy_format=legacy, compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("legacy", [False, True])
def test_arrow_stream_without_its_end_mark_is_refused(legacy, compression, tmp_path):
    rows = np.zeros((12, 6), np.float32)  # the bytes before the end look like an old end mark
    source = write_stream(tmp_path / "a.arrow", rows, legacy, compression)
    assert import_activations(source, tmp_path / "whole", array="acts").n_samples == 12
    whole = source.read_bytes()
    assert whole.endswith(END_MARKS[legacy])
    source.write_bytes(whole.removesuffix(END_MARKS[legacy]))
    refused(source, r"a.arrow has no end mark after 12 readable rows.*close the writer", StoreError, array="acts")


def test_arrow_stream_cut_between_two_batches_says_how_many_rows_are_left(tmp_path):
    source = write_stream(tmp_path / "a.arrow", values((12, 6), "float32"))
    whole, reader = source.read_bytes(), pa.BufferReader(source.read_bytes())
    for _ in range(3):  # the schema and two batches of four rows
        pa.ipc.read_message(reader)
    source.write_bytes(whole[: reader.tell()])
    refused(source, r"no end mark after 8 readable rows", StoreError)


@pytest.mark.parametrize("file", sorted(str(p.relative_to(DATA)) for p in DATA.rglob("*.arrow")))
def test_streams_of_datasets_have_their_end_mark(file):
    opened = open_file(str(DATA / file), "arrow")
    assert all(info.shape[0] > 0 for info in opened.arrays.values())
    opened.close()


@pytest.mark.parametrize("new_writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_dictionary_columns_and_empty_batches_are_in_nobodys_way(new_writer, tmp_path):
    rows = values((9, 6), "float32")
    table = arrow_table(rows).append_column("word", pa.array(list("abcabcabc")).dictionary_encode())
    batch = table.combine_chunks().to_batches()[0]
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, new_writer(sink, table.schema) as writer:
        for first, n in ((0, 0), (0, 4), (4, 0), (4, 5), (9, 0)):
            writer.write_batch(batch.slice(first, n))
    file = open_file(str(tmp_path / "a.arrow"), "arrow")
    for start, stop in ((0, 9), (3, 5), (0, 1), (8, 9), (4, 5)):  # back and forth
        np.testing.assert_array_equal(file.read_items("acts", start, stop), rows[start:stop])
    np.testing.assert_array_equal(file.read_items("label", 2, 8), np.arange(2, 8))
    file.close()


@pytest.mark.parametrize("suffix", ["arrow", "feather"])
def test_compressed_batches_are_decoded_one_at_a_time(suffix, tmp_path):
    rows = np.random.default_rng(0).standard_normal((4000, 500), np.float32)
    table, options = arrow_table(rows), pa.ipc.IpcWriteOptions(compression="lz4")
    new_writer = pa.ipc.new_stream if suffix == "arrow" else pa.ipc.new_file
    source = tmp_path / f"a.{suffix}"
    with pa.OSFile(str(source), "wb") as sink, new_writer(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=400)
    del table
    before = pa.total_allocated_bytes()
    file = open_file(str(source), "arrow")
    assert pa.total_allocated_bytes() - before < rows.nbytes / 100
    for start in range(0, 4000, 250):
        np.testing.assert_array_equal(file.read_items("acts", start, start + 250), rows[start : start + 250])
        assert pa.total_allocated_bytes() - before < rows.nbytes / 5
    file.close()
    assert pa.total_allocated_bytes() - before < rows.nbytes / 100


def test_parquet_page_whose_checksum_differs_is_refused(tmp_path):
    source = tmp_path / "a.parquet"
    table = pa.table({"acts": pa.array(np.arange(4000, dtype=np.float32).reshape(500, 8).tolist())})
    pq.write_table(table, source, write_page_checksum=True, compression="none", use_dictionary=False)
    whole = bytearray(source.read_bytes())
    whole[len(whole) // 2] ^= 1
    source.write_bytes(whole)
    refused(source, r"a.parquet cannot be read after entry 0 of acts: .*CRC", StoreError)


# .npy, .npz


def test_truncated_fortran_file_is_named(tmp_path):
    source = WRITERS["fortran"](tmp_path / "a", values((64, 6), "float32"))
    with open(source, "r+b") as file:
        file.truncate(1000)
    refused(source, r"a.npy is truncated: it has 1000 bytes, its header promises 1664", StoreError)


@pytest.mark.parametrize("shape", [(5, 0), (5, 2, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_without_features_are_refused(shape, order, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.float32, order=order))
    refused(tmp_path / "a.npy", r"a.npy is float32 of shape \(5, .*0\); need .* with one feature or more")


def test_empty_lists_of_parquet_are_refused(tmp_path):
    pq.write_table(pa.table({"acts": pa.array([[], []], pa.list_(pa.float32()))}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", r"array `acts` of .*a.parquet is float32 of shape \(2, 0\); need")


def test_mask_of_strings_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    np.save(tmp_path / "mask.npy", np.array(["yes", "no", "yes"]))
    refused(tmp_path / "a.npy", r"mask.npy is str96 of shape \(3,\); need 3 b", mask=str(tmp_path / "mask.npy"))


def test_array_that_is_no_number_cannot_be_aligned(tmp_path):
    np.savez(tmp_path / "a.npz", acts=np.zeros((3, 2), np.float32), words=np.array(["a", "b", "c"]))
    refused(tmp_path / "a.npz", r"`words` of .*a.npz is str32; to be aligned it needs to hold", aligned=["words"])


# safetensors


def write_header(path, header, n_bytes=96):
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(n_bytes))
    return path


GOOD = {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], r"its header is not a table of tensors"),
        ({"a": {}}, r"tensor 'a' needs dtype, shape and data_offsets in the header, which has {}"),
        ({"a": 3}, r"tensor 'a' needs dtype, shape and data_offsets in the header, which has 3"),
        ({"a": {**GOOD, "dtype": None}}, r"tensor 'a' needs dtype"),
        ({"a": {**GOOD, "shape": "4x6"}}, r"tensor 'a' needs dtype"),
        ({"a": {**GOOD, "shape": [4, -6]}}, r"tensor 'a' needs dtype"),
        ({"a": {**GOOD, "shape": [4, 6.5]}}, r"tensor 'a' needs dtype"),
        ({"a": {**GOOD, "data_offsets": [96]}}, r"tensor 'a' of shape \(4, 6\) needs 96 bytes.* are \[96\]"),
        ({"a": {**GOOD, "shape": [3, 6]}}, r"tensor 'a' of shape \(3, 6\) needs 72 bytes.* are \[0, 96\]"),
    ],
)
def test_safetensors_header_that_makes_no_sense_is_refused(header, message, tmp_path):
    source = write_header(tmp_path / "a.safetensors", header)
    refused(source, rf"a.safetensors is not a readable safetensors file: {message}", StoreError)


def test_safetensors_header_that_makes_sense_is_read(tmp_path):
    header = {"__metadata__": {"by": "hand"}, "a": GOOD, "odd": {**GOOD, "dtype": "F8_E4M3"}}
    source = write_header(tmp_path / "a.safetensors", header)
    assert import_activations(source, tmp_path / "store").n_samples == 4


# raw files


def write_raw(folder, **description):
    np.arange(1000 * 16, dtype=np.float32).tofile(folder / "a.bin")
    if description:
        (folder / "a.bin.json").write_text(json.dumps(description))
    return folder / "a.bin"


@pytest.mark.parametrize(
    ("shape", "offset", "needed"), [([900, 16], 0, 57600), ([1100, 16], 0, 70400), ([1000, 16], 4, 64004)]
)
def test_raw_file_of_another_size_than_described_is_refused(shape, offset, needed, tmp_path):
    source = write_raw(tmp_path, dtype="float32", shape=shape, offset=offset)
    refused(source, rf"a.bin holds 64000 bytes, but .* of float32 from byte {offset} on are {needed}", StoreError)


def test_raw_file_is_read_from_its_offset(tmp_path):
    source = write_raw(tmp_path, dtype="float32", shape=[999, 16], offset=64)
    import_activations(source, tmp_path / "store")
    assert open_rows(tmp_path / "store").read(0, 1)[0, 0] == 16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": "1000x16"}, r"shape of .*a.bin is '1000x16'; need a list such as \[1000, 768\]"),
        ({"shape": [1000, "16"]}, r"shape of .*a.bin is \[1000, '16'\]; need a list"),
        ({"offset": -4}, r"offset of .*a.bin is -4; need a whole number from 0 on"),
        ({"offset": "0"}, r"offset of .*a.bin is '0'; need a whole number from 0 on"),
        ({"shape": None, "n_features": 0}, r"n_features of .*a.bin is 0; need a whole number from 1 on"),
        ({"dtype": "U"}, r"dtype 'U' of .*a.bin is not known; use float16, float32 or bfloat16"),
        ({"dtype": "f4,f4"}, r"dtype 'f4,f4' of .*a.bin is not known"),
        ({"dtype": "nonsense"}, r"dtype 'nonsense' of .*a.bin is not known"),
    ],
)
def test_raw_description_that_makes_no_sense_is_refused(wrong, message, tmp_path):
    refused(write_raw(tmp_path, **{"dtype": "float32", "shape": [1000, 16], **wrong}), message)


@pytest.mark.parametrize("n_features", [0, -3])
def test_width_of_raw_rows_must_be_positive(n_features, tmp_path):
    refused(write_raw(tmp_path), r"n_features of .* is .*; need", dtype="float32", n_features=n_features)


def test_description_of_something_else_is_not_needed_when_all_is_said(tmp_path):
    source = write_raw(tmp_path)
    (tmp_path / "a.json").write_text("not JSON at all")
    refused(source, r"a.json is damaged: it is not JSON", StoreError, dtype="float32")
    result = import_activations(source, tmp_path / "store", dtype="float32", n_features=np.int64(16))
    assert result.n_samples == 1000


# torch, through a stand-in: what matters is what it raises


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(22, "Invalid argument"), r"a.pt is not a readable torch file, or truncated: .*Invalid argument"),
        (EOFError(), r"a.pt is not a readable torch file, or truncated: EOFError"),
        (
            RuntimeError("failed finding central directory\nmore"),
            r"or truncated: failed finding central directory$",
        ),
        (
            pickle.UnpicklingError("Weights only load failed. (1) set `weights_only` to False"),
            r"a.pt cannot be loaded as tensors \(weights only\): it holds other objects, or is damaged; save the",
        ),
    ],
)
def test_errors_of_torch_are_told_in_our_words(error, message, tmp_path, monkeypatch):
    def load(path, **options):
        raise error

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(load=load))
    (tmp_path / "a.pt").write_bytes(b"123")
    refused(tmp_path / "a.pt", message, StoreError)


@pytest.mark.interop
def test_truncated_torch_file_is_named(tmp_path):
    pytest.importorskip("torch")
    for name in ("float16.pt", "legacy.pt"):
        whole = (DATA / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
        refused(tmp_path / name, rf"{name} ", StoreError)


# folders and addresses


@pytest.mark.parametrize("name", ["/etc/hosts", "../secret.arrow", "a/../../secret.arrow"])
def test_saved_dataset_that_names_files_elsewhere_is_refused_by_name(name, tmp_path):
    (tmp_path / "ds" / "a").mkdir(parents=True)
    write_stream(tmp_path / "secret.arrow", np.ones((4, 6), np.float32))
    (tmp_path / "ds" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    refused(tmp_path / "ds", rf"state.json lists '{name}', which lies outside of .*ds; import that file itself")


def test_saved_dataset_with_files_in_a_folder_of_its_own_is_read(tmp_path):
    (tmp_path / "ds" / "a").mkdir(parents=True)
    write_stream(tmp_path / "ds" / "a" / "x.arrow", np.ones((4, 6), np.float32))
    (tmp_path / "ds" / "state.json").write_text('{"_data_files": [{"filename": "a/x.arrow"}]}')
    assert import_activations(tmp_path / "ds", tmp_path / "store", array="acts").n_samples == 4


@pytest.mark.parametrize("content", ["{}", "[]", '{"_data_files": [{}]}', '{"_data_files": 3}'])
def test_state_of_a_dataset_without_files_is_named(content, tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "state.json").write_text(content)
    refused(tmp_path / "ds", r"ds/state.json does not list the data files of a dataset", StoreError)


def test_dataset_with_a_missing_file_is_named(tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    refused(tmp_path / "ds", r"no file at .*ds/data-0.arrow, which .*state.json lists", StoreError)


@pytest.mark.parametrize("content", ["{}", "[]", '{"splits": []}', '{"splits": "train"}'])
def test_dataset_dict_without_splits_is_named(content, tmp_path):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(StoreError, match=r"dataset_dict.json names no splits; give the folder of one split"):
        find_files(tmp_path)


@pytest.mark.parametrize("url", ["http://host/a.h5", "https://host/x/a.parquet?download=1", "s3://bucket/a.npz"])
def test_remote_file_that_cannot_be_read_in_ranges_is_to_be_downloaded(url):
    with pytest.raises(InputError, match=r"are read from a URL; download this file, then import the copy"):
        find_files(url)


def test_bracket_in_a_pattern_is_explained(tmp_path):
    (tmp_path / "dir [x]").mkdir()
    np.save(tmp_path / "dir [x]" / "a.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(StoreError, match=r"no file matches .*; in a pattern the character \[ is written \[\[\]"):
        find_files(tmp_path / "dir [x]" / "*.npy")
    assert len(find_files(tmp_path / "dir [[]x]" / "*.npy")) == 1


# any byte


@contextlib.contextmanager
def naming(folder):
    """Turn an error of ours that names no path in `folder` into one that fails the test."""
    try:
        yield
    except DBKSVDError as error:
        if str(folder) not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        raise


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"zarr2"}))
def test_whatever_byte_is_wrong_the_error_names_the_file(name, tmp_path):
    """A wrong byte may go unnoticed where a format has no checksums, but nothing else may come out."""
    source = WRITERS[name](tmp_path / "source", values((64, 6), "float32"))
    whole = source.read_bytes()
    picked = np.random.default_rng(0).integers(0, len(whole), 60)
    for place in sorted({*range(0, min(len(whole), 16)), *picked.tolist()}):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        source.write_bytes(damaged)
        with contextlib.suppress(DBKSVDError), naming(tmp_path):
            import_activations(source, tmp_path / "store", nonfinite="keep", force=True)


# HDF5 files that keep their values elsewhere


@pytest.fixture
def led_outside(tmp_path):
    """An HDF5 file whose datasets lead to a secret in another folder, in every way that HDF5 knows."""
    there = tmp_path / "secret"
    there.mkdir()
    (there / "plain.bin").write_bytes(np.full((4, 3), 7, np.float32).tobytes())
    with h5py.File(there / "other.h5", "w") as file:
        file["y"] = np.full((4, 3), 7, np.float32)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["own"] = np.ones((4, 3), np.float32)
        file["linked"] = h5py.ExternalLink(str(there / "other.h5"), "/y")
        file["soft"] = h5py.SoftLink("/linked")
        file.create_dataset("external", (4, 3), "f4", external=[(str(there / "plain.bin"), 0, 48)])
        for name, source in (("virtual", (str(there / "other.h5"), "y")), ("indirect", (".", "linked"))):
            layout = h5py.VirtualLayout((4, 3), "f4")
            layout[:] = h5py.VirtualSource(*source, (4, 3))
            file.create_virtual_dataset(name, layout)
    return tmp_path / "a.h5"


@pytest.mark.parametrize("name", ["external", "virtual", "indirect"])
def test_values_outside_of_an_hdf5_file_are_refused_by_name(led_outside, name):
    refused(led_outside, rf"the values of `{name}` lie outside of .*a.h5, in .*secret/", array=name)


@pytest.mark.parametrize("name", ["linked", "soft"])
def test_links_to_other_hdf5_files_are_not_followed(led_outside, name):
    refused(led_outside, rf"has no array `{name}`", array=name)


def test_values_outside_are_refused_as_aligned_arrays_and_leave_others_to_import(led_outside, tmp_path):
    refused(led_outside, "the values of `external` lie outside", array="own", aligned=["external"])
    assert import_activations(led_outside, tmp_path / "store", array="own").n_samples == 4


def test_a_virtual_dataset_of_its_own_file_is_read(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["own"] = np.arange(12, dtype=np.float32).reshape(4, 3)
        layout = h5py.VirtualLayout((4, 3), "f4")
        layout[:] = h5py.VirtualSource(".", "own", (4, 3))
        file.create_virtual_dataset("virtual", layout)
    import_activations(tmp_path / "a.h5", tmp_path / "store", array="virtual")
    np.testing.assert_array_equal(open_rows(tmp_path / "store").read(0, 4), np.arange(12).reshape(4, 3))
