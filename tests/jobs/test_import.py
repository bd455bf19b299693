"""Import as a job: rows left out by rule, interrupted and resumed, in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.events import JobProgress
from dbksvd_dask.importers.selection import Rules
from dbksvd_dask.importers.values import exact_median, nonfinite_rows, row_norms
from dbksvd_dask.jobs.import_ import ImportJob, import_activations
from dbksvd_dask.store.activations import open_activations, open_rows
from dbksvd_dask.store.dtypes import widen_bfloat16
from tests.helpers.import_patterns import pattern, values
from tests.helpers.stores import tree


def save(path, array):
    np.save(path, array)
    return path


@pytest.fixture
def tokens(tmp_path, rng):
    """Seven sequences of five tokens of four features, in two files."""
    rows = rng.standard_normal((7, 5, 4)).astype(np.float32)
    np.savez(tmp_path / "a1.npz", acts=rows[:3], attention_mask=np.tile([1, 1, 1, 1, 0], (3, 1)))
    np.savez(tmp_path / "a2.npz", acts=rows[3:], attention_mask=np.tile([1, 1, 1, 0, 0], (4, 1)))
    return rows


def imported(tmp_path, **options):
    result = import_activations(
        tmp_path / "a*.npz", tmp_path / "s", array="acts", chunk_rows=4, source_row=True, **options
    )
    dataset = open_activations(tmp_path / "s")
    return result, dataset.activations.values, dataset.source_row.values


# rows left out


def test_first_token_of_each_sequence_is_dropped(tokens, tmp_path):
    result, rows, numbers = imported(tmp_path, drop_first_token=True)
    np.testing.assert_array_equal(rows, tokens[:, 1:].reshape(-1, 4))
    np.testing.assert_array_equal(numbers % 5 != 0, True)
    assert result.dropped == {"first_token": 7}


def test_rows_are_dropped_by_an_array_of_the_files(tokens, tmp_path):
    result, rows, _ = imported(tmp_path, mask_array="attention_mask")
    expected = np.concatenate([tokens[:3, :4].reshape(-1, 4), tokens[3:, :3].reshape(-1, 4)])
    np.testing.assert_array_equal(rows, expected)
    assert result.dropped == {"mask_array": 11}


@pytest.mark.parametrize("shape", [(35,), (7, 5)])
def test_rows_are_dropped_by_a_mask_file(shape, tokens, tmp_path, rng):
    mask = rng.random(35) < 0.5
    mask[:9] = False  # a whole block without a kept row
    result, rows, numbers = imported(tmp_path, mask=str(save(tmp_path / "mask.npy", mask.reshape(shape))))
    np.testing.assert_array_equal(numbers, np.flatnonzero(mask))
    np.testing.assert_array_equal(rows, tokens.reshape(-1, 4)[mask])
    assert result.dropped == {"mask": 35 - mask.sum()}


def test_outliers_are_measured_against_the_median_of_the_other_rows(tokens, tmp_path):
    norms = np.linalg.norm(tokens.reshape(-1, 4).astype(np.float64), axis=1)
    others = np.arange(35) % 5 != 0
    limit = 1.3 * np.sort(norms[others])[(others.sum() - 1) // 2]
    result, rows, numbers = imported(tmp_path, drop_first_token=True, drop_outliers=1.3)
    np.testing.assert_array_equal(numbers, np.flatnonzero(others & (norms <= limit)))
    np.testing.assert_array_equal(rows, tokens.reshape(-1, 4)[numbers])
    assert result.dropped == {"first_token": 7, "outliers": int((others & (norms > limit)).sum())}


def test_rows_that_are_not_finite_are_refused_with_their_place(tmp_path):
    rows = np.zeros((4, 5, 3), np.float32)
    rows[2, 1, 0] = np.nan
    source = save(tmp_path / "a.npy", rows)
    with pytest.raises(InputError, match=r"row 11 \(sequence 2, token 1\) of .*a.npy holds .* nonfinite='drop'"):
        import_activations(source, tmp_path / "s", chunk_rows=4)
    assert sorted(os.listdir(tmp_path)) == ["a.npy"]
    with pytest.raises(InputError, match=r"row 11 "):
        import_activations(source, tmp_path / "s", chunk_rows=4, drop_first_token=True)
    assert sorted(os.listdir(tmp_path)) == ["a.npy"]
    assert import_activations(source, tmp_path / "drop", nonfinite="drop").dropped == {"nonfinite": 1}
    assert import_activations(source, tmp_path / "keep", nonfinite="keep").n_samples == 20
    assert np.isnan(open_rows(tmp_path / "keep").read(11, 12)[0, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outliers_and_values_that_are_not_finite_go_together(value, tokens, tmp_path):
    tokens[1, 1, 2] = value
    np.savez(tmp_path / "a1.npz", acts=tokens[:3])
    np.savez(tmp_path / "a2.npz", acts=tokens[3:])
    result, _, numbers = imported(tmp_path, nonfinite="drop", drop_outliers=1.5)
    assert 6 not in numbers
    assert result.dropped["nonfinite"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_outliers": 0.5}, r"drop_outliers=0.5; need a factor above 1, such as 10"),
        ({"nonfinite": "maybe"}, r"nonfinite='maybe' is not known; use 'error', 'drop' or 'keep'"),
        ({"mask": "nowhere.npy"}, r"no mask file at nowhere.npy"),
        ({"mask_array": "nope"}, r"has no array `nope` to align; it has: attention_mask"),
        ({"aligned": ["nope"]}, r"has no array `nope` to align"),
    ],
)
def test_rules_that_cannot_be_applied_are_refused(options, message, tokens, tmp_path):
    with pytest.raises(InputError, match=message):
        imported(tmp_path, **options)
    assert not list(tmp_path.glob("s*"))


def test_masks_and_aligned_arrays_of_the_wrong_size_are_refused(tokens, tmp_path):
    for array in (np.ones(34, bool), np.ones(35, np.float32)):
        with pytest.raises(InputError, match=r"need 35 booleans or integers"):
            imported(tmp_path, mask=str(save(tmp_path / "mask.npy", array)))
    np.savez(tmp_path / "b.npz", acts=np.zeros((4, 2), np.float32), label=np.arange(3))
    with pytest.raises(InputError, match=r"`label` of .*b.npz has shape \(3,\); .* one entry per row \(4\)"):
        import_activations(tmp_path / "b.npz", tmp_path / "s", aligned=["label"])


def test_first_token_needs_sequences(tmp_path):
    source = save(tmp_path / "a.npy", np.zeros((6, 4), np.float32))
    with pytest.raises(InputError, match=r"holds rows, not sequences of tokens"):
        import_activations(source, tmp_path / "s", drop_first_token=True)


def test_nothing_left_is_an_error_that_counts(tokens, tmp_path):
    mask = save(tmp_path / "mask.npy", np.zeros(35, bool))
    with pytest.raises(InputError, match=r"no row of .* is left: all 35 dropped \(mask 35\)"):
        imported(tmp_path, mask=str(mask))
    assert not list(tmp_path.glob("s*"))


# the numbers behind the rules, against plain NumPy


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rows_that_are_not_finite_are_those_numpy_finds(dtype):
    bits = pattern((50, 7), dtype)
    if dtype == "bfloat16":
        bits[3, 2], bits[49, 6], bits[10, 0] = 0x7FC0, 0x7F80, 0xFF80
        wide = widen_bfloat16(bits)
    else:
        wide = bits.view(dtype)
        wide[3, 2], wide[49, 6], wide[10, 0] = np.nan, np.inf, -np.inf
    expected = np.flatnonzero(~np.isfinite(wide).all(axis=1))
    assert expected.tolist() == [3, 10, 49]
    np.testing.assert_array_equal(nonfinite_rows(bits, dtype), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_norms_are_those_of_numpy(dtype):
    rows = values((30, 7), dtype)
    wide = (widen_bfloat16(rows) if dtype == "bfloat16" else rows).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = np.linalg.norm(wide, axis=1).astype(np.float32)
    np.testing.assert_allclose(row_norms(rows, dtype), expected, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_median_of_parts_is_the_lower_median(n, rng):
    numbers = (rng.random(n) * 10 ** rng.uniform(-30, 30, n)).astype(np.float32)
    parts = np.array_split(numbers, 3)
    assert exact_median(parts) == np.sort(numbers)[(n - 1) // 2]


# interrupted and resumed


@pytest.mark.slow
@pytest.mark.parametrize("job", ["import", "import-all"])
def test_same_bytes_after_a_kill_at_any_write_and_no_work_twice(job, tmp_path):
    """SIGKILL at each publishing of a file in turn; see kills/sweep.py."""
    command = [sys.executable, "-W", "error", "-m", "tests.kills.sweep", job, str(tmp_path)]
    swept = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    total, scans = swept["undisturbed"]["chunks_written"], swept["undisturbed"]["blocks_scanned"]
    assert len(swept["points"]) > total
    for point in swept["points"]:
        done = total if point["complete"] else point["done"]["chunks"]
        assert point["same_bytes"], point
        assert (point["second"]["chunks_kept"], point["second"]["chunks_written"]) == (done, total - done), point
        assert point["second"]["blocks_scanned"] == scans - point["done"]["scans"], point
        assert point["left"] == ["store"], point


def test_import_goes_on_after_an_error_without_reading_again(tmp_path, monkeypatch, rng):
    source = save(tmp_path / "a.npy", rng.standard_normal((40, 4)).astype(np.float32))
    import_activations(source, tmp_path / "whole", chunk_rows=8)
    with monkeypatch.context() as patch:
        load = ImportJob._load

        def fail():
            raise OSError("the cable was pulled")

        patch.setattr(ImportJob, "_load", lambda job, i: load(job, i) if i < 3 else fail())
        with pytest.raises(OSError, match="cable"):
            import_activations(source, tmp_path / "s", chunk_rows=8)
    assert not (tmp_path / "s").exists()
    loaded = []
    monkeypatch.setattr(ImportJob, "_load", lambda job, i: (loaded.append(i), load(job, i))[1])
    result = import_activations(source, tmp_path / "s", chunk_rows=8)
    assert (result.chunks_kept, result.chunks_written) == (3, 2)
    assert loaded == [3, 4]
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")


def interrupt(source, path, **options):
    job = ImportJob(source, path, chunk_rows=8, **options)
    job.init()
    job.run(parts=[0])
    job.close()


def test_other_options_or_changed_files_are_not_mixed_in(tmp_path):
    source = save(tmp_path / "a.npy", np.zeros((40, 4), np.float32))
    interrupt(source, tmp_path / "s")
    with pytest.raises(
        MismatchError, match=r"begun with chunk_rows=8, now chunk_rows=4; use the same options to resume"
    ):
        import_activations(source, tmp_path / "s", chunk_rows=4)
    save(source, np.ones((40, 4), np.float32))
    os.utime(source, ns=(1, 1))
    with pytest.raises(
        MismatchError, match=r"s.partial was begun with files=\['/.*a.npy', .*, now files=\['/.*, 1\];"
    ):
        import_activations(source, tmp_path / "s", chunk_rows=8)
    result = import_activations(source, tmp_path / "s", chunk_rows=8, force=True)
    assert (result.chunks_kept, result.chunks_written) == (0, 5)
    assert open_rows(tmp_path / "s").read(0, 40).min() == 1


def test_import_goes_on_however_its_source_is_spelled(tmp_path, monkeypatch, rng):
    source = save(tmp_path / "a.npy", rng.standard_normal((40, 4)).astype(np.float32))
    interrupt(source, tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    result = import_activations("./a.npy", "s", chunk_rows=8)
    assert result.chunks_kept > 0
    assert open_activations("s").attrs["provenance"]["source"] == str(source)


@pytest.mark.parametrize("finished", [True, False])
def test_store_inside_the_folder_it_is_made_from_is_no_part_of_it(finished, tmp_path, rng):
    folder = tmp_path / "files"
    folder.mkdir()
    save(folder / "a.npy", rng.standard_normal((40, 4)).astype(np.float32))
    if finished:
        import_activations(folder, folder / "s", chunk_rows=8)
    else:
        interrupt(folder, folder / "s")
    result = import_activations(folder, folder / "s", chunk_rows=8, force=finished)
    assert (result.n_samples, result.n_files) == (40, 1)
    assert (result.chunks_kept > 0) != finished
    assert sorted(os.listdir(folder)) == ["a.npy", "s"]


def test_mask_that_changed_is_not_mixed_with_its_past(tmp_path, rng):
    source = save(tmp_path / "a.npy", rng.standard_normal((40, 4)).astype(np.float32))
    mask = str(save(tmp_path / "mask.npy", np.arange(40) % 2))
    interrupt(source, tmp_path / "s", rules=Rules(mask=mask))
    os.utime(save(mask, 1 - np.arange(40) % 2), ns=(1, 1))
    with pytest.raises(MismatchError, match=r"begun with other files or options"):
        import_activations(source, tmp_path / "s", chunk_rows=8, mask=mask)


def test_aligned_arrays_need_room_too(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", acts=np.zeros((40, 4), np.float32), ids=np.zeros((40, 100)))
    free = shutil.disk_usage(tmp_path)._replace(free=40 * 4 * 4 + 40 * 800 - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    with pytest.raises(StoreError, match=r"s.partial needs 32.6 kB more"):
        import_activations(tmp_path / "a.npz", tmp_path / "s", array="acts", aligned=["ids"])


def test_unfinished_scan_of_other_rules_is_not_mixed_in(tmp_path, rng):
    source = save(tmp_path / "a.npy", rng.standard_normal((40, 4)).astype(np.float32))
    interrupt(source, tmp_path / "s", rules=Rules(drop_outliers=2))
    with pytest.raises(MismatchError, match=r"begun with other files or options"):
        import_activations(source, tmp_path / "s", chunk_rows=8, drop_outliers=3)
    import_activations(source, tmp_path / "s", chunk_rows=8, drop_outliers=3, force=True)
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "s"]


def test_refused_import_leaves_unfinished_work_of_another_alone(tmp_path):
    source = save(tmp_path / "a.npy", np.zeros((40, 4), np.float32))
    interrupt(source, tmp_path / "s")
    with pytest.raises(InputError, match=r"compressor='rar'"):
        import_activations(source, tmp_path / "s", chunk_rows=8, compressor="rar")
    assert import_activations(source, tmp_path / "s", chunk_rows=8).chunks_kept == 1


def test_existing_store_is_replaced_only_with_force(tmp_path):
    source = save(tmp_path / "a.npy", np.zeros((10, 4), np.float32))
    import_activations(source, tmp_path / "s")
    save(source, np.ones((10, 4), np.float32))
    with pytest.raises(StoreError, match=r"s already exists; .* force=True"):
        import_activations(source, tmp_path / "s")
    import_activations(source, tmp_path / "s", force=True)
    assert open_rows(tmp_path / "s").read(0, 10).min() == 1


def test_progress_is_told_in_rows(tmp_path):
    source = save(tmp_path / "a.npy", np.zeros((10, 4), np.float32))
    events = []
    import_activations(source, tmp_path / "s", chunk_rows=4, callbacks=[events.append])
    assert events == [JobProgress("import", n, 10, "rows") for n in (0, 4, 8, 10)]


def test_provenance_is_kept_with_the_store(tokens, tmp_path):
    imported(tmp_path, drop_first_token=True)
    found = open_activations(tmp_path / "s").attrs["provenance"]
    assert found["files"] == ["a1.npz", "a2.npz"]
    assert (found["source_rows"], found["array"]) == (35, "acts")
    assert found["dropped"] == {"first_token": 7}
    assert found["rules"] == {"drop_first_token": True, "nonfinite": "error"}


# memory


MEASURE = """
import resource, sys
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
folder = sys.argv[1]
import_activations(f"{folder}/tiny.npy", f"{folder}/warm")
shuffle_activations(f"{folder}/warm", f"{folder}/warm2", seed=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_activations(f"{folder}/a.npy", f"{folder}/s", chunk_rows=4096, drop_outliers=5)
imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shuffle_activations(f"{folder}/s", f"{folder}/t", seed=0, block_bytes=8 << 20)
shuffled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(imported - before, shuffled - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_size_of_the_file(tmp_path):
    """A file of 67 MB, in chunks of 2 MB and blocks of 8 MB, takes less than half of its size."""
    save(tmp_path / "tiny.npy", np.ones((100, 256), np.float16))
    whole = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float16, (1 << 17, 256))
    for start in range(0, len(whole), 1 << 12):
        whole[start : start + (1 << 12)] = np.random.default_rng(start).standard_normal((1, 256))
    del whole
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    imported_kb, shuffled_kb = map(int, printed.split())
    assert imported_kb < 33_000
    assert shuffled_kb < 33_000
