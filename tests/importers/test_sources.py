"""Which sources are taken, and for what: what changed since, what is unfinished, what was said of them."""

from __future__ import annotations

import json
import os

import fsspec
import h5py
import numpy as np
import pytest
import zarr

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.importers import Collection, Hints, find_files, zarr_file
from dbksvd_dask.jobs.import_ import ImportJob, import_activations
from dbksvd_dask.store.activations import open_activations, open_rows
from tests.helpers.import_patterns import pattern


def interrupt(source, path, **options):
    job = ImportJob(source, path, chunk_rows=8, **options)
    job.init()
    job.run(parts=[0])
    job.close()


# a source that changed


def write_foreign(path, value):
    array = zarr.create_array(path, shape=(40, 4), chunks=(10, 4), dtype="float32", overwrite=True)
    array[...] = value


def write_in_place(path, value):
    zarr.open_array(path, mode="r+")[20:30] = value


def write_own(path, value):
    rows = np.full((40, 4), value, np.float32)
    np.save(f"{path}.npy", rows)
    import_activations(f"{path}.npy", path, chunk_rows=10, force=True)


@pytest.mark.parametrize("write_again", [write_foreign, write_in_place, write_own])
def test_changed_zarr_source_is_not_mixed_with_its_past(write_again, tmp_path):
    source = tmp_path / "source"
    first = write_own if write_again is write_own else write_foreign
    first(source, 1)
    interrupt(source, tmp_path / "store")
    write_again(source, 2)
    with pytest.raises(MismatchError, match=r"unfinished store at .*store.partial was begun with files="):
        import_activations(source, tmp_path / "store", chunk_rows=8)
    import_activations(source, tmp_path / "store", chunk_rows=8, force=True)
    assert open_rows(tmp_path / "store").read(20, 30).min() == 2


def test_changed_remote_source_is_not_mixed_with_its_past(tmp_path):
    url = "memory://changed/source"
    write_foreign(url, 1)
    interrupt(url, tmp_path / "store")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/changed/source/c/2/0", fs.cat_file("/changed/source/c/1/0"))
    with pytest.raises(MismatchError, match=r"unfinished store at .*store.partial"):
        import_activations(url, tmp_path / "store", chunk_rows=8)


@pytest.mark.parametrize("url", ["{}/source", "memory://same/source"])
def test_zarr_source_that_stayed_the_same_is_gone_on_with(url, tmp_path):
    source = url.format(tmp_path)
    write_foreign(source, 3)
    interrupt(source, tmp_path / "store")
    result = import_activations(source, tmp_path / "store", chunk_rows=8)
    assert (result.chunks_kept, result.chunks_written) == (1, 4)


@pytest.mark.parametrize("write", [write_foreign, write_own])
def test_identity_survives_json(write, tmp_path):
    write(tmp_path / "source", 1)
    identity = Collection(tmp_path / "source").members[0].identity
    assert identity[1] > 0
    assert tuple(json.loads(json.dumps(identity))) == identity


def test_own_store_is_opened_once_however_often_it_is_read(tmp_path, monkeypatch):
    write_own(tmp_path / "source", 1)
    opened = []
    real = zarr_file.open_rows
    monkeypatch.setattr(zarr_file, "open_rows", lambda *a: (opened.append(a), real(*a))[1])
    import_activations(tmp_path / "source", tmp_path / "store", chunk_rows=1)
    assert len(opened) <= 2  # to look at it, and to read it


# unfinished work in the folder of the source


def test_store_inside_the_folder_of_its_source_is_gone_on_with(tmp_path):
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.full((10, 4), i, np.float32))
    interrupt(tmp_path, tmp_path / "out.zarr")
    (tmp_path / "out.zarr.scan.partial").mkdir()
    (tmp_path / "old.zarr.77-0.replaced").mkdir()
    (tmp_path / "old.zarr.77-0.replaced" / "zarr.json").write_text("{}")
    assert [os.path.basename(p) for p, _ in find_files(tmp_path)] == [f"{i}.npy" for i in range(4)]
    result = import_activations(tmp_path, tmp_path / "out.zarr", chunk_rows=8)
    assert (result.chunks_kept, result.chunks_written) == (1, 4)


@pytest.mark.parametrize("source", [".", "*", "**"])
def test_destination_is_no_source(source, tmp_path, monkeypatch):
    for name in ("a.npy", "out.npy"):
        np.save(tmp_path / name, np.zeros((10, 4), np.float32))
    import_activations(tmp_path / "a.npy", tmp_path / "out")
    interrupt(tmp_path / "a.npy", tmp_path / "out", force=True)
    monkeypatch.chdir(tmp_path)
    for exclude in ("out", tmp_path / "out"):
        assert [os.path.basename(p) for p, _ in find_files(source, exclude=exclude)] == ["a.npy", "out.npy"]
        assert Collection(source, exclude=exclude).n_rows == 20
    with pytest.raises(InputError, match=r"several formats \(npy, zarr\)"):
        find_files(tmp_path)


# what the user says of the files


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"dtype": "float16"}, r"dtype='float16' does not fit: .*a.npy \(npy\) holds float32 and says so itself"),
        ({"dtype": "nonsense"}, r"dtype='nonsense' does not fit: .*leave it out: it is for raw files"),
        ({"n_features": 3}, r"n_features=3 does not fit: .*\(npy\) has rows of 4 .*leave it out"),
    ],
)
def test_what_is_said_of_files_and_is_not_so_is_refused(hints, message, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((10, 4), np.float32))
    with pytest.raises(InputError, match=message):
        import_activations(tmp_path / "a.npy", tmp_path / "store", **hints)
    assert not list(tmp_path.glob("store*"))


def test_what_is_said_of_files_and_is_so_is_no_error(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((10, 4), np.float32))
    for name in ("float32", "torch.float32", "f4"):
        assert Collection(tmp_path / "a.npy", hints=Hints(name, 4)).dtype == "float32"


def test_bfloat16_is_said_of_the_rows_not_of_the_token_ids(tmp_path):
    bits, tokens = pattern((10, 4), "bfloat16"), np.arange(10, dtype=np.uint16)
    weights = np.array([0x3F80] * 10, np.uint16).view("V2")  # ones
    np.savez(tmp_path / "a.npz", acts=bits.view("V2"), tokens=tokens, weights=weights)
    options = {"array": "acts", "dtype": "bfloat16", "aligned": ["tokens", "weights"]}
    import_activations(tmp_path / "a.npz", tmp_path / "store", **options)
    stored = open_activations(tmp_path / "store")
    assert stored.tokens.dtype == np.uint16
    np.testing.assert_array_equal(stored.tokens.values, tokens)
    np.testing.assert_array_equal(stored.weights.values, np.ones(10, np.float32))
    np.testing.assert_array_equal(open_rows(tmp_path / "store").read_stored(0, 10), bits)


# what else lies in a file is in nobody's way


def test_object_array_beside_the_rows_is_refused_only_when_it_is_meant(tmp_path):
    rows = np.ones((3, 2), np.float32)
    np.savez(tmp_path / "a.npz", acts=rows, meta=np.array([{"a": 1}] * 3), pair=np.zeros(3, "f4,f4"))
    import_activations(tmp_path / "a.npz", tmp_path / "store", array="acts")
    np.testing.assert_array_equal(open_rows(tmp_path / "store").read(0, 3), rows)
    with pytest.raises(InputError, match=r"array `meta` of .*a.npz is object of shape \(3,\); need float16"):
        import_activations(tmp_path / "a.npz", tmp_path / "other", array="meta")
    with pytest.raises(InputError, match=r"`pair` of .*a.npz is structured; to be aligned"):
        import_activations(tmp_path / "a.npz", tmp_path / "other", array="acts", aligned=["pair"])


def test_nameless_array_beside_the_rows_is_refused_only_when_it_is_meant(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["acts"] = np.ones((3, 2), np.float32)
        file["other"] = np.zeros(3, "V2")
        file["wide"] = np.zeros((3, 2), "V2")
    import_activations(tmp_path / "a.h5", tmp_path / "store", array="acts")
    assert open_rows(tmp_path / "store").read(0, 3).min() == 1
    with pytest.raises(InputError, match=r"several arrays; name one .*wide void16 \(3, 2\)"):
        import_activations(tmp_path / "a.h5", tmp_path / "other")
    for options in ({"array": "wide"}, {"array": "acts", "aligned": ["other"]}):
        with pytest.raises(InputError, match=r"two-byte numbers without a name .*dtype='bfloat16'"):
            import_activations(tmp_path / "a.h5", tmp_path / "other", **options)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_bfloat16_in_npz_in_either_order(save, order, tmp_path):
    bits = pattern((11, 6), "bfloat16")
    save(tmp_path / "a.npz", acts=np.array(bits, order=order).view("V2"))
    import_activations(tmp_path / "a.npz", tmp_path / "store", dtype="bfloat16", chunk_rows=4)
    np.testing.assert_array_equal(open_rows(tmp_path / "store").read_stored(0, 11), bits)


def test_sequences_of_one_token_keep_their_ids_and_masks(tmp_path):
    rows, ids = np.arange(20, dtype=np.float32).reshape(5, 1, 4), np.arange(5).reshape(5, 1)
    np.savez(tmp_path / "a.npz", acts=rows, ids=ids, mask=np.array([[1], [0], [1], [1], [0]]), tag=np.arange(5))
    options = {"array": "acts", "aligned": ["ids", "tag"], "mask_array": "mask", "chunk_rows": 2}
    import_activations(tmp_path / "a.npz", tmp_path / "store", **options)
    stored = open_activations(tmp_path / "store")
    assert stored.ids.shape == (3,)
    np.testing.assert_array_equal(stored.ids.values, [0, 2, 3])
    np.testing.assert_array_equal(stored.tag.values, [0, 2, 3])
    np.testing.assert_array_equal(stored.activations.values, rows[[0, 2, 3], 0])


def test_digits_that_are_no_numbers_do_not_break_the_order(tmp_path):
    for name in ("x5²3.npy", "x10.npy", "x9.npy"):
        np.save(tmp_path / name, np.zeros((2, 2), np.float32))
    assert [os.path.basename(p) for p, _ in find_files(tmp_path)] == ["x5²3.npy", "x9.npy", "x10.npy"]


# outliers beside what is not finite


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_outlier_rule_leaves_what_is_not_finite_to_its_own_rule(value, tmp_path):
    rows = np.ones((20, 4), np.float64)
    rows[3, 1], rows[7], rows[8] = value, 100, 1e300  # the norm of the last overflows float32
    rows[12:, 0] = value  # many: they have no say in the median
    np.save(tmp_path / "a.npy", rows)
    with pytest.raises(InputError, match=r"row 3 of .*a.npy holds a value that is NaN or infinite"):
        import_activations(tmp_path / "a.npy", tmp_path / "store", drop_outliers=10, chunk_rows=4)
    kept = import_activations(
        tmp_path / "a.npy", tmp_path / "store", drop_outliers=10, chunk_rows=4, nonfinite="keep", source_row=True
    )
    assert kept.dropped == {"outliers": 2}
    expected = [i for i in range(20) if i not in (7, 8)]
    np.testing.assert_array_equal(open_activations(tmp_path / "store").source_row.values, expected)
    dropped = import_activations(
        tmp_path / "a.npy", tmp_path / "finite", drop_outliers=10, chunk_rows=4, nonfinite="drop"
    )
    assert dropped.dropped == {"nonfinite": 9, "outliers": 2}


def test_outlier_rule_where_nothing_is_finite_keeps_everything(tmp_path):
    np.save(tmp_path / "a.npy", np.full((6, 4), np.nan, np.float32))
    result = import_activations(tmp_path / "a.npy", tmp_path / "store", drop_outliers=10, nonfinite="keep")
    assert (result.n_samples, result.dropped) == (6, {"outliers": 0})
