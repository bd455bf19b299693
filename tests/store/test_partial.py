"""What both restartable writers share: names, checksums, resuming, publishing, and stores of earlier versions."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import dask
import fsspec
import numpy as np
import pytest

from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import JobError, StoreError
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.plan import units
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.activations import create_activations, open_rows
from dbksvd_dask.store.arrays import ArraySpec, chunk_key
from dbksvd_dask.store.checksums import CHECKSUMS, KINDS
from dbksvd_dask.store.codes import open_statistics, verify_codes
from dbksvd_dask.store.codes_writer import CodesWriter
from dbksvd_dask.store.partial import Partial, begun_plan, leftovers
from dbksvd_dask.store.verify import verify_store
from tests.helpers import jobs
from tests.helpers.stores import make_store, tree

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)
EARLIER = Path(__file__).parents[1] / "data" / "stores" / "before_partial.zip"


def partial_at(path, **options):
    options = {"part": "unit", "part_chunks": 2, "durable": True, **options}
    return Partial(path, [ArraySpec("rows", "float32", (3,), ("feature",))], 10, 4, **options)


def write_part(partial, part):
    rows = ROWS[8 * part : 8 * part + 8]
    crcs = [
        [partial.write_block("rows", 2 * part + i, rows[4 * i : 4 * i + 4])] for i in range(-(-len(rows) // 4))
    ]
    partial.mark(part, len(rows), crcs)


@pytest.fixture(params=["local", "compressed", "remote"])
def begun(request, tmp_path):
    path = "memory://partial/s" if request.param == "remote" else tmp_path / "s"
    partial = partial_at(path, compressor="zstd" if request.param == "compressed" else None)
    partial.begin({"complete": False}, {"what": "numbers"})
    yield partial
    if request.param == "remote":
        fsspec.filesystem("memory").rm("/partial", recursive=True)


def test_parts_of_several_chunks_are_written_checked_and_published(begun):
    write_part(begun, 1)
    assert (begun.done(), begun.missing(2)) == ([1], [0])
    write_part(begun, 0)
    assert begun.recheck() == []
    table = begun.checksums(range(2))
    assert table.tolist() == [[KINDS[CHECKSUMS](ROWS[a : a + 4], 0)] for a in (0, 4, 8)]
    group = begun.group()
    begun.write_checksums(group, table)
    begun.seal(group, {"known": 1})
    begun.publish(overwrite=False)
    published = paths.open_zarr(begun.path)
    np.testing.assert_array_equal(published["rows"][...], ROWS)
    assert dict(published.attrs) == {"known": 1, "complete": True}
    assert begun_plan(begun.path) is None
    assert leftovers(begun.path) == []


def test_a_chunk_that_changed_makes_its_part_missing(begun):
    write_part(begun, 0)
    write_part(begun, 1)
    file = begun.chunk_file("rows", 1)
    other = partial_at(f"{begun.path}-other", compressor=begun.compressor)
    other.begin({}, {})
    other.write_block("rows", 1, ROWS[:4])
    atomic.write_bytes(file, paths.read_bytes(other.chunk_file("rows", 1)))
    assert begun.recheck() == [0]
    assert begun.missing(2) == [0]


def test_a_remote_chunk_that_does_not_read_back_is_not_counted(monkeypatch):
    partial = partial_at("memory://partial-failing/s")
    partial.begin({}, {})
    monkeypatch.setattr(paths, "read_bytes", lambda path: b"other")
    with pytest.raises(JobError, match=r"chunk 0 of `rows` in memory://.* does not read back as it was written"):
        partial.write_block("rows", 0, ROWS[:4])
    assert partial.write_block("rows", 0, ROWS[:4], verify=False) == KINDS[CHECKSUMS](ROWS[:4], 0)


def test_a_copy_in_another_process_writes_the_same(begun):
    copy = pickle.loads(pickle.dumps(begun))
    write_part(copy, 0)
    assert begun.done() == [0]
    assert begun.check(0)


@pytest.mark.parametrize("tail", [(), (6,), (2, 3)])
def test_chunks_have_the_names_that_zarr_gives_them(tail, tmp_path):
    partial = Partial(
        tmp_path / "s", [ArraySpec("a", "int16", tail, ("x", "y")[: len(tail)])], 9, 4, part="p", durable=True
    )
    partial.begin({}, {})
    encoded = partial.array("a").metadata.encode_chunk_key((2,) + (0,) * len(tail))
    assert chunk_key(2, tail) == encoded


def test_the_first_to_begin_stays(tmp_path):
    first, second = partial_at(tmp_path / "s"), partial_at(tmp_path / "s")
    first.begin({"by": 1}, {"by": 1})
    second.begin({"by": 2}, {"by": 2})
    assert second.attributes() == {"by": 1}
    assert atomic.read_sealed(begun_plan(tmp_path / "s")) == {"by": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["s.partial"]


def test_something_else_in_the_place_of_the_work_is_named(tmp_path):
    (tmp_path / "s.partial").write_text("notes")
    with pytest.raises(StoreError, match=r"s.partial is in the way and is not an unfinished store; remove it"):
        partial_at(tmp_path / "s").begin({}, {})
    assert (tmp_path / "s.partial").read_text() == "notes"


def test_everything_is_on_the_disk_before_a_store_calls_itself_complete(tmp_path, monkeypatch):
    forced = []
    real = atomic.fsync_path
    writer = create_activations(tmp_path / "s", 10, 3, "float32", chunk_rows=4)
    for i in range(3):
        writer.write_chunk(i, ROWS[4 * i : 4 * i + 4])

    def note(path):
        forced.append((os.path.relpath(path, tmp_path), writer.complete))
        real(path)

    monkeypatch.setattr(atomic, "fsync_path", note)
    monkeypatch.setattr(atomic, "publish", lambda *a, **k: None)
    writer.finish()
    before = {name for name, complete in forced if not complete}
    files = {str(p.relative_to(tmp_path)) for p in (tmp_path / "s.partial").rglob("*") if ".parts" not in p.parts}
    assert files <= before
    assert ("s.partial/zarr.json", True) in forced


# ------------------------------------------------------------------------------- a killed `overwrite`


def kill_while_removing(monkeypatch, call):
    """Run a call that is killed when it is about to remove what it has replaced."""
    real = paths.remove

    def remove(path):
        if str(path).endswith(atomic.REPLACED_SUFFIX):
            raise KeyboardInterrupt
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(paths, "remove", remove)
        with pytest.raises(KeyboardInterrupt):
            call()


def replaced_in(folder):
    return [p.name for p in Path(folder).iterdir() if p.name.endswith(".replaced")]


@pytest.mark.parametrize("again", [{}, {"force": True}])
def test_what_a_killed_forced_shuffle_replaced_goes_with_the_next_run(again, tmp_path, monkeypatch):
    source = make_store(tmp_path / "source", ROWS)

    def shuffle(seed, **options):
        return shuffle_activations(source, tmp_path / "s", seed=seed, **options)

    shuffle(1)
    kill_while_removing(monkeypatch, lambda: shuffle(2, force=True))
    assert len(replaced_in(tmp_path)) == 1
    shuffle(2, **again)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "source"]


def test_what_a_killed_forced_encode_replaced_goes_with_the_next_run(tmp_path, monkeypatch):
    store, dictionary, out = tmp_path / "store", tmp_path / "d", tmp_path / "codes"
    jobs.write_store(store, jobs.made_up(40, 6), 16)
    jobs.write_dictionary(dictionary, 10, 6, 2)

    def encode(k, **options):
        with dask.config.set(scheduler="synchronous"):
            return encode_store(store, dictionary, out, k=k, n_top=4, **options)

    encode(2)
    kill_while_removing(monkeypatch, lambda: encode(1, force=True))
    assert len(replaced_in(tmp_path)) == 1
    assert encode(1).samples_written == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["codes", "d", "store"]


def test_the_previous_store_is_kept_while_there_is_no_new_one(tmp_path, monkeypatch):
    make_store(tmp_path / "s", ROWS)
    writer = create_activations(tmp_path / "s", 10, 3, "float32", chunk_rows=4, overwrite=True)
    for i in range(3):
        writer.write_chunk(i, ROWS[4 * i : 4 * i + 4])
    real = os.replace

    def killed(source, target):
        if str(target) == str(tmp_path / "s"):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    assert leftovers(tmp_path / "s") == []
    assert len(replaced_in(tmp_path)) == 1
    writer.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_names_that_only_look_alike_are_left_alone(tmp_path):
    make_store(tmp_path / "s", ROWS)
    alike = ["s.replaced", "s2.1-0.replaced", "s.partial.tmp", "s.1-x.replaced", "t.partial.host-1.tmp"]
    for name in alike:
        (tmp_path / name).mkdir()
    assert leftovers(tmp_path / "s") == []
    (tmp_path / "s.17-3.replaced").mkdir()
    (tmp_path / "s.partial.host-17.tmp").mkdir()
    assert sorted(os.path.basename(p) for p in leftovers(tmp_path / "s")) == [
        "s.17-3.replaced",
        "s.partial.host-17.tmp",
    ]


# ------------------------------------------------------------------------------- earlier versions


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """Stores that were written before both writers shared one way: codes of version 2, with CRC-32."""
    monkeypatch.setattr(units, "MIN_CHUNK_ROWS", 16)
    with zipfile.ZipFile(EARLIER) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def encode_again(folder, name):
    with dask.config.set(scheduler="synchronous"):
        return encode_store(folder / "store.zarr", folder / "dictionary", folder / name, n_top=4)


def test_codes_of_version_2_are_read_verified_and_recognised(earlier):
    codes = earlier / "codes.zarr"
    assert verify_codes(codes) == 3
    assert open_statistics(codes).sizes["atom"] == 10
    assert encode_again(earlier, "codes.zarr").samples_written == 0


def test_the_one_list_of_version_2_is_read_as_the_beginning_of_a_list_for_each_sign(earlier):
    encode_again(earlier, "new.zarr")
    found, whole = open_statistics(earlier / "codes.zarr"), open_statistics(earlier / "new.zarr")
    for name in ("top", "bottom"):
        listed, known = (one[f"{name}_sample"].to_numpy() for one in (found, whole))
        there = listed >= 0
        assert there.any()
        np.testing.assert_array_equal(listed[there], known[there])
        assert (np.diff(there.astype(int), axis=1) <= 0).all()  # no gaps
        value = found[f"{name}_coefficient"].to_numpy()
        assert ((value > 0) if name == "top" else (value < 0))[there].all()
    assert ((found["top_sample"] >= 0).sum("rank") + (found["bottom_sample"] >= 0).sum("rank")).max() == 4


@pytest.mark.parametrize("name", ["atom/c.1.0", "statistics/count/c/0"])
def test_damage_to_codes_of_version_2_is_noticed(name, earlier):
    file = earlier / "codes.zarr" / name
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"chunks 1 of .* differ from their checksums|differs from its checksum"):
        verify_codes(earlier / "codes.zarr")


def test_an_unfinished_encode_of_version_2_resumes(earlier):
    result = encode_again(earlier, "encode.zarr")
    assert (result.samples_kept, result.samples_written) == (24, 16)
    assert encode_again(earlier, "new.zarr").samples_written == 40
    assert verify_codes(earlier / "encode.zarr") == 3
    resumed, new = (open_codes(earlier / name) for name in ("encode.zarr", "new.zarr"))
    np.testing.assert_array_equal(resumed["atom"], new["atom"])
    # another processor than the one on which it began rounds differently
    np.testing.assert_allclose(resumed["coefficient"], new["coefficient"], rtol=1e-5)
    assert tree(earlier / "encode.zarr").keys() == tree(earlier / "new.zarr").keys()
    kept, fresh = (open_statistics(earlier / name) for name in ("encode.zarr", "new.zarr"))
    for name in ("top_sample", "bottom_sample"):  # units of version 2 had one list for both signs
        np.testing.assert_array_equal(kept[name], fresh[name])


def test_a_damaged_unit_of_version_2_is_written_anew(earlier):
    chunk = next((earlier / "encode.zarr.partial" / "atom").glob("c.*"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(JobError, match=r"part \d does not read back .* run again to write it anew"):
        encode_again(earlier, "encode.zarr")
    encode_again(earlier, "encode.zarr")
    assert verify_codes(earlier / "encode.zarr") == 3


def test_activations_written_before_are_read_and_an_unfinished_import_resumes(earlier):
    rows = jobs.made_up(40, 6)
    assert verify_store(earlier / "store.zarr") == 3
    np.testing.assert_array_equal(open_rows(earlier / "store.zarr").read(0, 40), rows)
    writer = create_activations(earlier / "import.zarr", 40, 6, "float32", chunk_rows=16, resume=True)
    assert writer.missing() == [2]
    writer.write_chunk(2, rows[32:])
    writer.finish()
    assert tree(earlier / "import.zarr") == tree(earlier / "store.zarr")


def test_codes_writer_travels_to_workers(earlier):
    writer = CodesWriter.begun(str(earlier / "encode.zarr"))
    assert pickle.loads(pickle.dumps(writer)).done() == writer.done()
