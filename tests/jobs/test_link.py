"""Linked stores: rows that stay in their files, the same bits as a copy, refused by name when a file changes."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import zarr

from dbksvd_dask import DBKSVD, encode_store, import_activations, open_activations, open_codes, shuffle_activations
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.importers.safetensors_file import DTYPES
from dbksvd_dask.jobs.import_ import ImportJob
from dbksvd_dask.store.reader import LinkedReader, fingerprint, open_rows
from dbksvd_dask.store.verify import verify_store
from tests.helpers.import_patterns import pattern
from tests.helpers.jobs import PATIENCE, made_up, python, tree
from tests.helpers.jobs import command as dbksvd


@pytest.fixture
def shards(tmp_path):
    """Three .npy files of uneven length: 700 rows of 16 features."""
    rows = made_up(700, 16)
    for i, (a, b) in enumerate([(0, 250), (250, 260), (260, 700)]):
        np.save(tmp_path / f"s{i}.npy", rows[a:b])
    return rows


def both(tmp_path, **options):
    """Import the shards as a copy and as links."""
    stores = [str(tmp_path / name) for name in ("copy.zarr", "link.zarr")]
    for store, link in zip(stores, (False, True), strict=True):
        import_activations(tmp_path / "s*.npy", store, chunk_rows=128, link=link, **options)
    return stores


def write_safetensors(path, name, dtype, bits):
    names = {value: key for key, value in DTYPES.items()}
    header = {name: {"dtype": names[dtype], "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())


def save_raw(path, bits, dtype):
    path.write_bytes(b"head" + bits.tobytes())
    described = {"dtype": dtype, "shape": list(bits.shape), "offset": 4}
    (path.parent / f"{path.name}.json").write_text(json.dumps(described))


def save_zarr(path, bits, dtype):
    array = zarr.create_array(
        store=str(path), shape=bits.shape, chunks=(7, bits.shape[1]), dtype=dtype, compressors=None
    )
    array[...] = bits.view(dtype)


SAVED = {
    "npy": lambda p, bits, dtype: np.save(p / "a.npy", bits.view(dtype)),
    "npz": lambda p, bits, dtype: np.savez(p / "a.npz", rows=bits.view(dtype)),
    "sequences": lambda p, bits, dtype: np.save(p / "a.npy", bits.view(dtype).reshape(4, 5, -1)),
    "safetensors": lambda p, bits, dtype: write_safetensors(p / "a.safetensors", "rows", dtype, bits),
    "raw": lambda p, bits, dtype: save_raw(p / "a.bin", bits, dtype),
    "zarr": lambda p, bits, dtype: save_zarr(p / "a.zarr", bits, dtype),
}
CASES = [(kind, "float32") for kind in SAVED] + [
    ("npy", "float16"),
    ("safetensors", "bfloat16"),
    ("raw", "bfloat16"),
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_linked_rows_are_those_of_a_copy_bit_for_bit(kind, dtype, tmp_path):
    bits = pattern((20, 6), dtype)
    SAVED[kind](tmp_path, bits, dtype)
    source = next(p for p in sorted(tmp_path.iterdir()) if not p.name.endswith(".json"))
    options = {"chunk_rows": 8, "nonfinite": "keep"}
    import_activations(source, tmp_path / "copy", **options)
    import_activations(source, tmp_path / "link", link=True, **options)
    linked, copied = open_rows(tmp_path / "link"), open_rows(tmp_path / "copy")
    assert isinstance(linked, LinkedReader)
    for start, stop in [(0, 20), (3, 17), (8, 16), (19, 20), (5, 5)]:
        np.testing.assert_array_equal(linked.read_stored(start, stop).view(bits.dtype), bits[start:stop])
        assert linked.read_stored(start, stop).tobytes() == copied.read_stored(start, stop).tobytes()


def test_nothing_but_metadata_and_aligned_arrays_is_written(tmp_path):
    np.savez(tmp_path / "a.npz", rows=np.ones((100_000, 16), np.float32), label=np.arange(100_000))
    result = import_activations(tmp_path / "a.npz", tmp_path / "s", array="rows", aligned=["label"], link=True)
    sizes = {
        str(p.relative_to(tmp_path / "s")): p.stat().st_size for p in (tmp_path / "s").rglob("*") if p.is_file()
    }
    assert result.nbytes == 6_400_000
    assert import_activations(tmp_path / "a.npz", tmp_path / "rows", array="rows", link=True).chunks_kept == 0
    assert sum(size for name, size in sizes.items() if not name.startswith("label")) < 10_000
    dataset = open_activations(tmp_path / "s")
    np.testing.assert_array_equal(dataset.label.values, np.arange(100_000))
    assert dataset.activations.values.sum() == 1_600_000


@pytest.mark.usefixtures("shards")
def test_fit_shuffle_and_encode_of_links_give_the_bits_of_a_copy(tmp_path):
    atoms, codes, shuffled = [], [], []
    for store in both(tmp_path):
        model = DBKSVD(n_atoms=24, k=3, n_iter=2, batch_size=256, seed=0).fit(store)
        atoms.append(model.dictionary_.values.tobytes())
        encode_store(store, model, f"{store}.codes")
        found = open_codes(f"{store}.codes")
        codes.append((found.atom.values.tobytes(), found.coefficient.values.tobytes()))
        shuffle_activations(store, f"{store}.shuffled", seed=3)
        shuffled.append(open_rows(f"{store}.shuffled").read(0, 700).tobytes())
    assert atoms[0] == atoms[1]
    assert codes[0] == codes[1]
    assert shuffled[0] == shuffled[1]


@pytest.mark.usefixtures("shards")
def test_links_with_checksums_have_the_fingerprint_of_a_copy(tmp_path):
    copy, link = both(tmp_path, verify=True)
    assert fingerprint(copy) == fingerprint(link)
    assert verify_store(link) == 6
    import_activations(tmp_path / "s*.npy", tmp_path / "quick", chunk_rows=128, link=True)
    assert fingerprint(tmp_path / "quick") != fingerprint(link)
    with pytest.raises(StoreError, match=r"linked without checksums.*link=True, verify=True and force=True"):
        verify_store(tmp_path / "quick")


@pytest.mark.usefixtures("shards")
def test_bytes_changed_under_an_old_time_are_found_by_checksums(tmp_path):
    _, link = both(tmp_path, verify=True)
    before = os.stat(tmp_path / "s2.npy")
    with open(tmp_path / "s2.npy", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\1\0")
    os.utime(tmp_path / "s2.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreError, match=r"chunks 5 of .*link\.zarr \(.*s2\.npy\) differ from their checksums"):
        verify_store(link)


@pytest.mark.usefixtures("shards")
@pytest.mark.parametrize("change", ["touched", "longer", "deleted"])
def test_changed_source_is_refused_by_name_when_opened_and_when_read(change, tmp_path):
    _, link = both(tmp_path)
    reader, path = open_rows(link), tmp_path / "s1.npy"
    if change == "touched":
        os.utime(path, ns=(1, 1))
    elif change == "longer":
        path.write_bytes(path.read_bytes() + b"more")
    else:
        path.unlink()
    words = "does not exist" if change == "deleted" else "has changed since a store was linked to it"
    for read in (lambda: open_rows(link), lambda: reader.read(0, 700)):
        with pytest.raises(StoreError, match=rf"s1\.npy.* {words}.*link=True and force=True"):
            read()
    np.testing.assert_array_equal(reader.read(0, 250), np.load(tmp_path / "s0.npy"))  # another file
    code, _, err = dbksvd("fit", link, tmp_path / "run", "--n-atoms", 8, "--k", 2)
    assert code == 1
    assert "s1.npy" in err
    assert "with --link and --force" in err


@pytest.mark.usefixtures("shards")
def test_touched_source_can_be_linked_again(tmp_path):
    _, link = both(tmp_path, verify=True)
    os.utime(tmp_path / "s1.npy", ns=(1, 1))
    import_activations(tmp_path / "s*.npy", link, chunk_rows=128, link=True, verify=True, force=True)
    assert verify_store(link) == 6


def refuse(tmp_path, source, match, **options):
    with pytest.raises(InputError, match=match):
        import_activations(source, tmp_path / "s", link=True, **options)
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / "s.partial").exists()


def test_rows_that_must_be_decoded_are_refused_with_what_to_type(tmp_path):
    rows = made_up(30, 4)
    np.savez_compressed(tmp_path / "a.npz", rows=rows)
    np.save(tmp_path / "columns.npy", np.asfortranarray(rows))
    np.save(tmp_path / "swapped.npy", rows.astype(">f4"))
    zarr.create_array(store=str(tmp_path / "z.zarr"), data=rows, chunks=(8, 4))
    zarr.create_array(store=str(tmp_path / "narrow.zarr"), data=rows, chunks=(8, 2), compressors=None)
    for name in ("a.npz", "columns.npy", "swapped.npy", "z.zarr", "narrow.zarr"):
        refuse(tmp_path, tmp_path / name, rf"{name} .*cannot be linked.*leave out link=True to write a copy")


def test_rows_to_leave_out_or_compress_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", made_up(30, 4))
    for rule in ({"nonfinite": "drop"}, {"drop_outliers": 10}):
        refuse(tmp_path, tmp_path / "a.npy", "rows are to be left out.*leave out link=True", **rule)
    refuse(tmp_path, tmp_path / "a.npy", "compressor='zstd'.*leave out link=True", compressor="zstd")
    with pytest.raises(InputError, match="a linked store is a local folder"):
        import_activations(tmp_path / "a.npy", "memory://x/s", link=True)
    code, _, err = dbksvd("import", tmp_path / "a.npy", tmp_path / "s", "--link", "--nonfinite", "drop")
    assert (code, "leave out --link to write a copy" in err) == (1, True)


def test_values_that_are_not_finite_are_found_with_verify_and_named_by_a_fit(tmp_path):
    rows = made_up(100, 4)
    rows[70, 2] = np.nan
    np.save(tmp_path / "a.npy", rows)
    with pytest.raises(InputError, match=r"^row 70 of .*a.npy holds a value that is NaN or infinite"):
        import_activations(tmp_path / "a.npy", tmp_path / "s", link=True, verify=True)
    import_activations(tmp_path / "a.npy", tmp_path / "s", link=True)
    with pytest.raises(InputError, match=r"sample 70 .*\(byte \d+ of .*a\.npy\)"):
        DBKSVD(n_atoms=4, k=1, n_iter=1, batch_size=100, validation=0).fit(str(tmp_path / "s"))


@pytest.mark.usefixtures("shards")
def test_link_of_a_linked_store_leads_to_the_files(tmp_path):
    _, link = both(tmp_path)
    import_activations(link, tmp_path / "second", link=True)
    assert [os.path.basename(f[0]) for f in open_rows(tmp_path / "second").links.files] == [
        "s0.npy",
        "s1.npy",
        "s2.npy",
    ]
    import_activations(link, tmp_path / "copied", chunk_rows=128)
    assert fingerprint(tmp_path / "copied") == fingerprint(tmp_path / "copy.zarr")


@pytest.mark.usefixtures("shards")
def test_zarr_itself_shows_no_numbers_of_a_linked_store(tmp_path):
    _, link = both(tmp_path)
    assert np.isnan(zarr.open_group(link, mode="r")["activations"][:]).all()


@pytest.mark.usefixtures("shards")
def test_info_names_the_files_and_damaged_links_are_refused(tmp_path):
    _, link = both(tmp_path)
    _, out, _ = dbksvd("info", link, "--json")
    found = json.loads(out)
    assert found["linked_files"] == [str(tmp_path / f"s{i}.npy") for i in range(3)]
    assert found["linked_by"] == "sizes and times; no checksums"
    path = tmp_path / "link.zarr" / "activations" / "links.json"
    path.write_text(path.read_text().replace("s1.npy", "s2.npy"))
    with pytest.raises(StoreError, match=r"links.json is damaged"):
        open_rows(link)


@pytest.mark.usefixtures("shards")
def test_plan_of_links_writes_nothing(tmp_path):
    for flags, read in (((), 0), (("--verify",), 700 * 16 * 4)):
        _, out, _ = dbksvd("import", tmp_path / "s*.npy", tmp_path / "s", "--link", "--plan", "--json", *flags)
        plan = json.loads(out)
        assert (plan["written_bytes"], plan["read_bytes"]) == (0, read)


@pytest.mark.usefixtures("shards")
def test_interrupted_link_resumes_and_another_kind_of_import_does_not(tmp_path):
    whole = tmp_path / "whole"
    options = {"chunk_rows": 128, "link": True, "verify": True, "source_row": True}
    import_activations(tmp_path / "s*.npy", whole, **options)
    job = ImportJob(tmp_path / "s*.npy", tmp_path / "s", **options)
    job.init()
    job.run([0, 2])
    job.close()
    with pytest.raises(MismatchError):
        import_activations(tmp_path / "s*.npy", tmp_path / "s", chunk_rows=128, source_row=True)
    result = import_activations(tmp_path / "s*.npy", tmp_path / "s", **options)
    assert (result.chunks_kept, result.chunks_written) == (2, 4)
    assert tree(tmp_path / "s") == tree(whole)


KILLED = """
import os, signal, sys
from dbksvd_dask import import_activations
from dbksvd_dask.store import atomic
write, count = atomic.write_bytes, [0]
def counted(*args, **kwargs):
    count[0] += 1
    if count[0] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args, **kwargs)
atomic.write_bytes = counted
import_activations(sys.argv[1], sys.argv[2], chunk_rows=128, link=True, verify=True, source_row=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shards")
def test_link_killed_at_any_write_resumes_to_the_same_bytes(tmp_path):
    options = {"chunk_rows": 128, "link": True, "verify": True, "source_row": True}
    import_activations(tmp_path / "s?.npy", tmp_path / "whole", **options)
    killed = 0
    for at in (3, 8):
        store = tmp_path / f"s{at}"
        process = python(KILLED, tmp_path / "s?.npy", store, at)
        process.communicate(timeout=PATIENCE)
        killed += process.returncode == -signal.SIGKILL
        import_activations(tmp_path / "s?.npy", store, **options)
        assert tree(store) == tree(tmp_path / "whole")
    assert killed == 2
