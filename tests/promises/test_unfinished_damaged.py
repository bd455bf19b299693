"""Unfinished work that was damaged is done again where that is possible, and named where it is not."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from dbksvd_dask import encode_store, import_activations, open_codes, shuffle_activations
from dbksvd_dask.errors import StoreError
from dbksvd_dask.importers.selection import Selection
from dbksvd_dask.store import atomic
from dbksvd_dask.store.activations import ActivationWriter
from tests.attack.kinds import stopped
from tests.helpers import encode_fixtures, jobs
from tests.helpers.encode_fixtures import rows, run, small_chunks, store, whole
from tests.helpers.stores import make_store, tree

__all__ = ["rows", "run", "small_chunks", "store", "whole"]


def change(file, **values):
    """Change values of a JSON file that stays JSON."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **values}))


def change_attributes(file, **values):
    content = json.loads(file.read_text())
    content["attributes"] |= values
    file.write_text(json.dumps(content))


# sealed files


def test_a_sealed_file_comes_back_and_a_changed_number_is_noticed(tmp_path):
    file = tmp_path / "a.json"
    content = {"rows": 5, "share": 0.1, "sizes": [1, 2], "names": {"1": None}}
    atomic.write_sealed(file, content)
    assert atomic.read_sealed(file) == content
    change(file, rows=6)
    with pytest.raises(StoreError, match=r"a\.json is damaged: it is not what was written"):
        atomic.read_sealed(file)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "{}"])
def test_what_is_no_sealed_file_is_refused_by_name(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(StoreError, match=r"a\.json is damaged"):
        atomic.read_sealed(tmp_path / "a.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*folder: Is a directory"):
        atomic.read_sealed(tmp_path / "folder")


# imports


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "rows.npy", jobs.made_up(60, 8))
    return tmp_path / "rows.npy"


def begun_import(source, target, **options):
    owner = (Selection, "_scan_block", 2) if options else (ActivationWriter, "write_chunk", 2)
    with stopped(*owner):
        import_activations(source, target, chunk_rows=20, **options)
    return target.with_name(target.name + (".scan.partial" if options else ".partial"))


def test_a_marker_with_another_number_is_a_chunk_to_write_again(source, tmp_path):
    work = begun_import(source, tmp_path / "store")
    change(work / ".parts" / "chunk-00000001.json", rows="20")
    result = import_activations(source, tmp_path / "store", chunk_rows=20)
    assert (result.chunks_written, result.chunks_kept) == (2, 1)


@pytest.mark.parametrize("damage", ["bits", "lost", "marker", "folder"])
def test_findings_of_a_scan_that_changed_are_looked_for_again(damage, source, tmp_path):
    import_activations(source, tmp_path / "whole", chunk_rows=20, drop_outliers=1.5)
    work = begun_import(source, tmp_path / "store", drop_outliers=1.5)
    if damage == "bits":
        keep = work / "keep-00000000.npy"
        keep.write_bytes(keep.read_bytes()[:-1] + b"\x55")
    elif damage == "lost":
        (work / "norms-00000001.npy").unlink()
    elif damage == "marker":
        change(work / "block-00000001.json", kept=3)
    else:
        (work / "block-00000001.json").unlink()
        (work / "block-00000001.json").mkdir()
    result = import_activations(source, tmp_path / "store", chunk_rows=20, drop_outliers=1.5)
    assert result.blocks_scanned == 2
    assert tree(tmp_path / "store" / "activations") == tree(tmp_path / "whole" / "activations")


def test_a_changed_plan_is_named_and_force_begins_again(source, tmp_path):
    work = begun_import(source, tmp_path / "store")
    change(work / ".parts" / "plan.json", chunk_rows=10)
    with pytest.raises(StoreError, match=r"plan\.json is damaged"):
        import_activations(source, tmp_path / "store", chunk_rows=20)
    assert import_activations(source, tmp_path / "store", chunk_rows=20, force=True).chunks_written == 3


@pytest.mark.parametrize("name", ["zarr.json", "activations/zarr.json"])
def test_changed_metadata_are_named(name, source, tmp_path):
    work = begun_import(source, tmp_path / "store")
    if name == "zarr.json":
        change_attributes(work / name, complete=True)
    else:
        change(work / name, chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}})
    with pytest.raises(StoreError, match=rf"{name} (is damaged|are not those).*begin again with force=True"):
        import_activations(source, tmp_path / "store", chunk_rows=20)
    assert not (tmp_path / "store").exists()


# shuffles


def begun_shuffle(tmp_path):
    make_store(tmp_path / "store", jobs.made_up(60, 8), 20)
    with stopped(ActivationWriter, "write_chunk", 2):
        shuffle_activations(tmp_path / "store", tmp_path / "mixed", seed=0)
    return tmp_path / "mixed.scratch.partial"


@pytest.mark.parametrize("kind", ["means", "block"])
def test_changed_sums_of_a_shuffle_are_made_again(kind, tmp_path):
    scratch = begun_shuffle(tmp_path)
    mark = sorted(scratch.parent.rglob(f"{kind}-*.json"))[0]
    change(mark, **{"n_rows": 7} if kind == "means" else {"means": {"total": [[]]}})
    result = shuffle_activations(tmp_path / "store", tmp_path / "mixed", seed=0)
    whole = shuffle_activations(tmp_path / "store", tmp_path / "again", seed=0)
    assert result.mixing_after == whole.mixing_after
    assert result.mixing_before == whole.mixing_before
    assert tree(tmp_path / "mixed" / "activations") == tree(tmp_path / "again" / "activations")


def test_a_changed_job_of_a_shuffle_is_named_and_force_begins_again(tmp_path):
    scratch = begun_shuffle(tmp_path)
    change(scratch / "job.json", source="x")
    with pytest.raises(StoreError, match=r"job\.json is damaged"):
        shuffle_activations(tmp_path / "store", tmp_path / "mixed", seed=0)
    assert shuffle_activations(tmp_path / "store", tmp_path / "mixed", seed=0, force=True).n_samples == 60


# encodes


@pytest.fixture
def half(tmp_path, store, run):
    """An encode of which half the units are done; its unfinished folder."""
    encode_store(store, run, tmp_path / "codes.zarr", part=(1, 2))
    return tmp_path / "codes.zarr.partial"


@pytest.mark.parametrize("name", ["unit-00000001.json", "sums-00000001.npz"])
def test_a_damaged_unit_is_named_and_encoded_again_without_its_marker(name, half, store, run, whole, tmp_path):
    file = half / ".parts" / name
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(StoreError, match=rf"{name} is damaged.*remove"):
        encode_store(store, run, tmp_path / "codes.zarr")
    (half / ".parts" / "unit-00000001.json").unlink()
    encode_store(store, run, tmp_path / "codes.zarr")
    assert tree(tmp_path / "codes.zarr") == tree(whole)


def test_attributes_that_changed_before_the_end_are_written_anew(half, store, run, whole, tmp_path):
    change_attributes(half / "zarr.json", n_atoms=1000, metrics={}, note="x")
    encode_store(store, run, tmp_path / "codes.zarr")
    assert tree(tmp_path / "codes.zarr") == tree(whole)


def test_an_unfinished_store_that_calls_itself_complete_is_refused(half, store, run, tmp_path):
    change_attributes(half / "zarr.json", complete=True)
    with pytest.raises(StoreError, match=r"zarr\.json is damaged: its attributes are not what was written"):
        encode_store(store, run, tmp_path / "codes.zarr", finish=True)


def test_chunks_are_not_published_under_other_metadata(half, store, run, tmp_path):
    change(half / "atom" / "zarr.json", data_type="uint32")
    with pytest.raises(StoreError, match=r"atom/zarr\.json are not those the store was begun with"):
        encode_store(store, run, tmp_path / "codes.zarr")
    encode_store(store, run, tmp_path / "codes.zarr", force=True)


def test_a_changed_plan_of_an_encode_is_named_and_force_begins_again(half, store, run, tmp_path):
    change(half / ".parts" / "plan.json", n_atoms=31)
    with pytest.raises(StoreError, match=r"plan\.json is damaged"):
        encode_store(store, run, tmp_path / "codes.zarr")
    encode_store(store, run, tmp_path / "codes.zarr", force=True)


def test_a_damaged_store_of_codes_has_no_statistics_to_show(whole, tmp_path):
    codes = shutil.copytree(whole, tmp_path / "copy.zarr")
    assert open_codes(codes).sizes["sample"] == encode_fixtures.N
    change_attributes(codes / "zarr.json", metrics={"fvu": 0.0})
    with pytest.raises(StoreError, match=r"its attributes are not what was written; encode again"):
        open_codes(codes)
