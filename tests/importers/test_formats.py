"""Every format that can be imported comes out bit for bit, from files written by the tools themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import zarr

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers import find_files, open_file
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.store.activations import open_activations, open_rows
from tests.helpers.import_patterns import pattern, values

DATA = Path(__file__).parents[1] / "data" / "imports"
FLOATS = ("float16", "float32", "float64")


def stored_bits(path):
    reader = open_rows(path)
    rows = reader.read_stored(0, reader.n_samples)
    return rows.view(f"uint{8 * rows.dtype.itemsize}")


def assert_same_bits(path, expected):
    found = stored_bits(path)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected.reshape(-1, expected.shape[-1]))


# one writer per format: (path without suffix, rows) -> path


def write_npy(base, rows):
    np.save(base.with_suffix(".npy"), rows)
    return base.with_suffix(".npy")


def write_npz(base, rows):
    np.savez(base.with_suffix(".npz"), activations=rows, labels=np.arange(len(rows)))
    return base.with_suffix(".npz")


def write_npz_compressed(base, rows):
    np.savez_compressed(base.with_suffix(".npz"), acts=rows)
    return base.with_suffix(".npz")


def write_fortran(base, rows):
    np.save(base.with_suffix(".npy"), np.asfortranarray(rows))
    return base.with_suffix(".npy")


def write_big_endian(base, rows):
    np.save(base.with_suffix(".npy"), rows.astype(rows.dtype.newbyteorder(">")))
    return base.with_suffix(".npy")


def write_raw(base, rows):
    path = base.with_suffix(".bin")
    mapped = np.memmap(path, rows.dtype, "w+", shape=rows.shape)
    mapped[...] = rows
    mapped.flush()
    base.with_suffix(".bin.json").write_text(json.dumps({"dtype": str(rows.dtype), "shape": rows.shape}))
    return path


def write_safetensors(base, rows):
    safetensors.numpy.save_file({"acts": rows}, base.with_suffix(".safetensors"))
    return base.with_suffix(".safetensors")


def write_hdf5(base, rows):
    with h5py.File(base.with_suffix(".h5"), "w") as file:
        file.create_dataset("group/acts", data=rows, chunks=(3, *rows.shape[1:]), compression="gzip")
    return base.with_suffix(".h5")


def arrow_table(rows):
    column = pa.array(rows.reshape(-1))
    for width in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, width)
    return pa.table({"acts": column, "label": pa.array(np.arange(len(rows)))})


def write_arrow_stream(base, rows):
    table = arrow_table(rows)
    with pa.OSFile(str(base.with_suffix(".arrow")), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return base.with_suffix(".arrow")


def write_arrow_file(base, rows):
    table = arrow_table(rows)
    with pa.OSFile(str(base.with_suffix(".feather")), "wb") as sink:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=4)
    return base.with_suffix(".feather")


def write_parquet(base, rows):
    lists = pa.table({"acts": pa.array(rows.tolist(), list_type(rows)), "label": pa.array(np.arange(len(rows)))})
    pq.write_table(lists, base.with_suffix(".parquet"), row_group_size=5)
    return base.with_suffix(".parquet")


def list_type(rows):
    kind = pa.from_numpy_dtype(rows.dtype)
    for _ in rows.shape[1:]:
        kind = pa.list_(kind)
    return kind


def write_zarr2(base, rows):
    array = zarr.create_array(base, shape=rows.shape, chunks=(4,) * rows.ndim, dtype=rows.dtype, zarr_format=2)
    array[...] = rows
    return base


WRITERS = {
    f.__name__.removeprefix("write_"): f
    for f in (
        write_npy,
        write_npz,
        write_npz_compressed,
        write_fortran,
        write_big_endian,
        write_raw,
        write_safetensors,
        write_hdf5,
        write_arrow_stream,
        write_arrow_file,
        write_parquet,
        write_zarr2,
    )
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", WRITERS)
def test_round_trip_of_rows_is_bit_for_bit(name, dtype, tmp_path):
    rows = values((11, 6), dtype)
    source = WRITERS[name](tmp_path / "source", rows)
    result = import_activations(source, tmp_path / "store", chunk_rows=4)
    assert (result.n_samples, result.n_features, result.dtype) == (11, 6, dtype)
    assert_same_bits(tmp_path / "store", pattern((11, 6), dtype))


@pytest.mark.parametrize("name", WRITERS)
def test_sequences_are_flattened_to_rows(name, tmp_path):
    rows = values((5, 3, 6), "float16")
    source = WRITERS[name](tmp_path / "source", rows)
    result = import_activations(source, tmp_path / "store", chunk_rows=4)
    assert result.n_samples == 15
    assert_same_bits(tmp_path / "store", pattern((5, 3, 6), "float16"))


# files written by torch, safetensors, datasets and SAELens; see data/README.md


def test_safetensors_of_torch_keeps_bfloat16_and_aligned_tokens(tmp_path):
    store = tmp_path / "store"
    result = import_activations(
        DATA / "torch.safetensors", store, array="layer_3", aligned=["token_ids"], chunk_rows=5
    )
    assert result.dtype == "bfloat16"
    assert_same_bits(store, pattern((7, 4, 6), "bfloat16"))
    np.testing.assert_array_equal(open_activations(store).token_ids.values, np.arange(28))


def test_bfloat16_is_widened_exactly(tmp_path):
    import_activations(DATA / "torch.safetensors", tmp_path / "store", array="layer_3")
    wide = open_activations(tmp_path / "store").activations.values
    assert wide.dtype == np.float32
    bits = pattern((28, 6), "bfloat16").astype(np.uint32) << 16
    np.testing.assert_array_equal(wide.view(np.uint32), bits)


def test_bfloat16_saved_by_numpy_needs_to_be_named(tmp_path):
    source = DATA / "ml_dtypes_bfloat16.npy"
    with pytest.raises(InputError, match="say dtype='bfloat16'"):
        import_activations(source, tmp_path / "store")
    import_activations(source, tmp_path / "store", dtype="bfloat16")
    assert_same_bits(tmp_path / "store", pattern((11, 6), "bfloat16"))


@pytest.mark.parametrize("source", ["hf_dataset", "hf_dataset.parquet"])
def test_hugging_face_dataset_with_array2d_column(source, tmp_path):
    store = tmp_path / "store"
    import_activations(DATA / source, store, array="blocks.0.hook_mlp_out", aligned=["token_ids"], chunk_rows=8)
    assert_same_bits(store, pattern((7, 4, 6), "float16"))
    np.testing.assert_array_equal(open_activations(store).token_ids.values, np.arange(28))


def test_activation_cache_of_saelens(tmp_path):
    store = tmp_path / "store"
    result = import_activations(DATA / "saelens_cache", store, aligned=["token_ids"], chunk_rows=10)
    assert (result.n_samples, result.n_files) == (64, 2)
    assert_same_bits(store, np.load(DATA / "saelens_expected.npy").view(np.uint32))
    tokens = open_activations(store).token_ids.values
    np.testing.assert_array_equal(tokens, np.load(DATA / "saelens_tokens.npy").reshape(-1))


def test_folder_of_saved_datasets_is_read_shard_by_shard(tmp_path):
    for name in ("shard_10", "shard_2"):
        shutil.copytree(DATA / "hf_dataset", tmp_path / "shards" / name)
    order = [Path(path).parent.name for path, _ in find_files(tmp_path / "shards")]
    assert order == ["shard_2", "shard_2", "shard_10", "shard_10"]


def test_dataset_dict_asks_for_a_split(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"splits train, test; give one of them"):
        find_files(tmp_path)


@pytest.mark.parametrize(
    ("file", "shape", "dtype", "options"),
    [
        ("float16.pt", (11, 6), "float16", {}),
        ("legacy.pt", (11, 6), "float32", {}),
        ("bfloat16.pt", (7, 4, 6), "bfloat16", {"aligned": ["input_ids"]}),
    ],
)
@pytest.mark.interop
def test_torch_tensors_round_trip(file, shape, dtype, options, tmp_path):
    pytest.importorskip("torch")
    import_activations(DATA / file, tmp_path / "store", chunk_rows=4, **options)
    assert_same_bits(tmp_path / "store", pattern(shape, dtype))


@pytest.mark.interop
def test_torch_file_with_code_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"tensor": torch.zeros(2, 2), "path": Path("x")}, tmp_path / "evil.pt")
    with pytest.raises(StoreError, match=r"weights only"):
        import_activations(tmp_path / "evil.pt", tmp_path / "store")


@pytest.mark.interop
def test_datasets_written_now_round_trip(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = values((9, 4, 6), "float32")
    features = datasets.Features({"hook": datasets.Array2D((4, 6), "float32")})
    datasets.Dataset.from_dict({"hook": rows}, features=features).save_to_disk(tmp_path / "ds", num_shards=3)
    import_activations(tmp_path / "ds", tmp_path / "store", chunk_rows=10)
    assert_same_bits(tmp_path / "store", pattern((9, 4, 6), "float32"))


def test_torch_file_without_torch_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(InputError, match=r"float16.pt needs torch: install it, or save the tensor with np.save"):
        open_file(str(DATA / "float16.pt"), "torch")


@pytest.mark.parametrize(("module", "file"), [("h5py", "x.h5"), ("pyarrow", "x.arrow")])
def test_optional_reader_that_is_not_installed_says_what_to_type(module, file, tmp_path, monkeypatch):
    (tmp_path / file).write_bytes(b"123")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(InputError, match=rf"needs {module}: pip install 'dbksvd-dask\[importers\]'"):
        import_activations(tmp_path / file, tmp_path / "store")


# many files, names, descriptions


def test_glob_of_files_goes_in_natural_order(tmp_path):
    for i in (10, 2, 1):
        np.save(tmp_path / f"acts_{i}.npy", np.full((3, 4), i, np.float32))
    result = import_activations(tmp_path / "acts_*.npy", tmp_path / "store", chunk_rows=4)
    assert result.n_files == 3
    rows = open_rows(tmp_path / "store").read(0, 9)
    np.testing.assert_array_equal(rows[:, 0], [1] * 3 + [2] * 3 + [10] * 3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.zeros((3, 5), np.float32), r"different width cannot be mixed: 4 in .*a1.npy, 5 in .*a2.npy"),
        (
            np.zeros((3, 4), np.float16),
            r"different dtype cannot be mixed: float32 in .*a1.npy, float16 in .*a2.npy",
        ),
        (np.zeros((3, 2, 4), np.float32), r"different dimensions cannot be mixed: 2 in .*a1.npy, 3 in .*a2.npy"),
    ],
)
def test_files_that_do_not_fit_together_are_refused_by_name(other, message, tmp_path):
    np.save(tmp_path / "a1.npy", np.zeros((3, 4), np.float32))
    np.save(tmp_path / "a2.npy", other)
    with pytest.raises(InputError, match=message):
        import_activations(tmp_path / "a*.npy", tmp_path / "store")
    assert not list(tmp_path.glob("store*"))


def test_raw_file_described_by_options_or_by_a_meta_file(tmp_path):
    bits = pattern((11, 6), "bfloat16")
    bits.tofile(tmp_path / "a.bin")
    import_activations(tmp_path / "a.bin", tmp_path / "one", dtype="bfloat16", n_features=6)
    assert_same_bits(tmp_path / "one", bits)
    bits.tofile(tmp_path / "shard_0.memmap")
    (tmp_path / "shard_0.meta").write_text('{"shape": [11, 6], "dtype": "torch.bfloat16"}')
    import_activations(tmp_path / "shard_0.memmap", tmp_path / "two")
    assert_same_bits(tmp_path / "two", bits)


def test_raw_file_without_description_says_what_to_give(tmp_path):
    np.zeros(12, np.float16).tofile(tmp_path / "a.bin")
    with pytest.raises(InputError, match=r"give its dtype and width, such as dtype='float16' n_features=768"):
        import_activations(tmp_path / "a.bin", tmp_path / "store")
    with pytest.raises(StoreError, match=r"24 bytes, not a whole number of rows of 5 float16 \(10 bytes\)"):
        import_activations(tmp_path / "a.bin", tmp_path / "store", dtype="float16", n_features=5)


def test_several_arrays_need_a_name(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3), np.float32), y=np.ones((2, 3), np.float32))
    with pytest.raises(
        InputError, match=r"several arrays; name one with array=NAME: x float32 \(2, 3\), y float32"
    ):
        import_activations(tmp_path / "a.npz", tmp_path / "store")
    with pytest.raises(InputError, match=r"no array `z`; it has: x float32"):
        import_activations(tmp_path / "a.npz", tmp_path / "store", array="z")
    import_activations(tmp_path / "a.npz", tmp_path / "store", array="y")
    assert open_rows(tmp_path / "store").read(0, 2).sum() == 6


def test_label_per_sequence_is_repeated_for_its_tokens(tmp_path):
    np.savez(tmp_path / "a.npz", acts=np.zeros((3, 2, 4), np.float32), label=np.array([5, 6, 7]))
    import_activations(tmp_path / "a.npz", tmp_path / "store", aligned=["label"], chunk_rows=3)
    np.testing.assert_array_equal(open_activations(tmp_path / "store").label.values, [5, 5, 6, 6, 7, 7])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.int32), r"is int32 of shape \(2, 3\); need float16"),
        (np.zeros(3, np.float32), r"is float32 of shape \(3,\); need"),
        (np.zeros((2, 3), np.complex64), r"is complex64"),
        (np.zeros((0, 3), np.float32), r"has no rows"),
        (np.array([{}]), r"holds dtype object; need an array of plain numbers"),
    ],
)
def test_arrays_that_are_no_activations_are_refused(array, message, tmp_path):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        import_activations(tmp_path / "a.npy", tmp_path / "store")


def test_ragged_list_column_is_refused_by_name(tmp_path):
    table = pa.table({"acts": pa.array([[1.0, 2.0], [3.0], [4.0, 5.0]], pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        InputError, match=r"column acts of .*a.parquet has lists of different lengths: 2 .* 1 in entry 1"
    ):
        import_activations(tmp_path / "a.parquet", tmp_path / "store")


def test_row_group_of_parquet_is_not_read_at_once(tmp_path):
    rows = np.random.default_rng(0).standard_normal((5000, 1000), np.float32)
    pq.write_table(arrow_table(rows), tmp_path / "a.parquet", row_group_size=5000, compression="none")
    before = pa.total_allocated_bytes()
    file = open_file(str(tmp_path / "a.parquet"), "parquet")
    np.testing.assert_array_equal(file.read_items("acts", 0, 10), rows[:10])
    assert pa.total_allocated_bytes() - before < rows.nbytes / 2
    file.close()


def test_null_in_a_column_is_refused(tmp_path):
    table = pa.table({"acts": pa.array([[1.0, 2.0], [None, 3.0]], pa.list_(pa.float32(), 2))})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"has 1 empty \(null\) values"):
        import_activations(tmp_path / "a.parquet", tmp_path / "store")


@pytest.mark.parametrize(
    "name", ["npy", "npz", "safetensors", "hdf5", "arrow_stream", "arrow_file", "parquet", "raw"]
)
def test_truncated_file_is_named_and_nothing_is_published(name, tmp_path):
    source = WRITERS[name](tmp_path / "source", values((64, 6), "float32"))
    with open(source, "r+b") as file:
        file.truncate(source.stat().st_size * 2 // 3)
    with pytest.raises(StoreError, match=str(source)):
        import_activations(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "h5", "arrow", "parquet", "bin", "pt"])
def test_empty_file_is_named(suffix, tmp_path):
    source = tmp_path / f"a.{suffix}"
    source.touch()
    with pytest.raises(StoreError, match=rf"a.{suffix} is empty: 0 bytes"):
        import_activations(source, tmp_path / "store")


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "h5", "arrow", "parquet"])
def test_file_of_another_kind_is_named(suffix, tmp_path):
    source = tmp_path / f"a.{suffix}"
    source.write_bytes(b"this is a text, whatever its name says" * 3)
    with pytest.raises(StoreError, match=rf"a.{suffix} is not a readable"):
        import_activations(source, tmp_path / "store")


def test_unknown_and_missing_sources_say_so(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"cannot tell the format of .*notes.txt; known are .npy"):
        find_files(tmp_path / "notes.txt")
    with pytest.raises(InputError, match=r"format='nope' is not known; use one of npy"):
        find_files(tmp_path / "notes.txt", format="nope")
    with pytest.raises(StoreError, match=r"no file or folder at .*nowhere.npy"):
        find_files(tmp_path / "nowhere.npy")
    with pytest.raises(StoreError, match=r"no file matches .*\*.npy"):
        find_files(tmp_path / "*.npy")
    with pytest.raises(StoreError, match=r"holds nothing that can be imported"):
        find_files(tmp_path)
    with pytest.raises(InputError, match=r"only npy, safetensors, raw, zarr are read from a URL"):
        find_files("s3://bucket/a.npy", format="hdf5")


def test_folder_of_several_formats_asks_for_a_pattern(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.float32))
    np.savez(tmp_path / "a.npz", a=np.zeros((2, 2), np.float32))
    with pytest.raises(InputError, match=r"several formats \(npy, npz\); give a pattern such as '.*/\*.npy'"):
        find_files(tmp_path)


def test_activation_store_can_be_imported_again(tmp_path):
    np.savez(tmp_path / "a.npz", acts=values((30, 6), "float32"), label=np.arange(30))
    import_activations(tmp_path / "a.npz", tmp_path / "one", aligned=["label"], chunk_rows=4)
    import_activations(tmp_path / "one", tmp_path / "two", aligned=["label"], chunk_rows=7, compressor="zstd")
    assert_same_bits(tmp_path / "two", pattern((30, 6), "float32"))
    np.testing.assert_array_equal(open_activations(tmp_path / "two").label.values, np.arange(30))
    (tmp_path / "one" / "activations" / "c.3.0").unlink()
    with pytest.raises(StoreError, match=r"chunk 3 of .*one .* is missing"):
        import_activations(tmp_path / "one", tmp_path / "three", aligned=["label"])
