"""The encode job: what it writes, in how many parts, after what interruptions."""

# ruff: noqa: F811 - fixtures are imported, and then named by the tests that use them

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import xarray as xr

from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import DeviceError, InputError, JobError, MismatchError, StoreError
from dbksvd_dask.evaluate.codes import code_summary
from dbksvd_dask.events import JobProgress
from dbksvd_dask.graph import encode
from dbksvd_dask.graph.sources import as_source
from dbksvd_dask.jobs.encode import EncodeJob, encode_store
from dbksvd_dask.plan import units as plan_units
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store import atomic, codes_writer
from dbksvd_dask.store.codes import open_statistics, stored_code_moments
from dbksvd_dask.store.codes_writer import CodesPlan
from dbksvd_dask.store.runs import open_dictionary
from tests.helpers import jobs
from tests.helpers.encode_fixtures import CHUNK, D, K, M, N, count_units, rows, run, small_chunks, store, whole  # noqa: F401
from tests.helpers.stores import tree
from tests.naive.codes import largest, per_atom, reconstruct

# -- what is written ---------------------------------------------------------------------------------------


def in_memory(rows, run):
    """Codes of rows in memory, in blocks like those of the job."""
    dictionary = open_dictionary(run)
    how = encode.EncodePlan(EncodeSpec(K), dictionary.mean, np.float32)
    return encode.encode_now(as_source(rows, CHUNK), dictionary.atoms, how, CHUNK)


def test_codes_are_those_of_an_encode_in_memory_bit_for_bit(whole, rows, run):
    atom, coefficient = in_memory(rows, run)
    codes = open_codes(whole)
    assert codes.atom.dtype == np.int32
    assert codes.coefficient.dtype == np.float32
    np.testing.assert_array_equal(codes.atom, atom)
    np.testing.assert_array_equal(codes.coefficient, coefficient)


def test_codes_open_lazily_and_with_plain_xarray(whole):
    codes = open_codes(whole)
    assert codes.chunks["sample"][0] == CHUNK
    assert (codes.sizes["sample"], codes.sizes["slot"], codes.attrs["n_atoms"]) == (N, K, M)
    plain = xr.open_zarr(whole, consolidated=False)
    assert plain.atom.dtype == np.int32
    np.testing.assert_array_equal(plain.atom, codes.atom)
    below = xr.open_zarr(whole, group="statistics", consolidated=False)
    np.testing.assert_array_equal(below["count"], open_statistics(whole)["count"])


def test_statistics_equal_plain_loops_over_the_codes(whole):
    codes, found = open_codes(whole).compute(), open_statistics(whole)
    atom, coefficient = codes.atom.to_numpy(), codes.coefficient.to_numpy()
    for name, wanted in per_atom(atom, coefficient, M).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12, err_msg=name)
    for name, sign in (("top", 1), ("bottom", -1)):
        sample, value = largest(atom, coefficient, M, 64, sign)
        np.testing.assert_array_equal(found[f"{name}_sample"], sample)
        np.testing.assert_array_equal(found[f"{name}_coefficient"], value)
        assert (value != 0).any()
    l0 = ((atom >= 0) & (coefficient != 0)).sum(axis=1)
    np.testing.assert_array_equal(found.l0_histogram, np.bincount(l0, minlength=K + 1))
    assert int(found.error_histogram.sum()) == np.count_nonzero(np.abs(jobs.made_up(N, D) - 0.3).max(axis=1) > 0)


def test_metrics_equal_numpy_on_the_reconstruction(whole, rows, run):
    dictionary, codes = open_dictionary(run), open_codes(whole).compute()
    Y = rows.astype(np.float64) - dictionary.mean
    R = Y - reconstruct(codes.atom.to_numpy(), codes.coefficient.to_numpy(), dictionary.atoms)
    norms = np.linalg.norm(Y, axis=1)
    metrics = codes.attrs["metrics"]
    assert metrics["mean_relative_error"] == pytest.approx(np.mean(np.linalg.norm(R, axis=1) / norms), rel=1e-5)
    assert metrics["variance_explained"] == pytest.approx(1 - np.mean(R.var(axis=0) / Y.var(axis=0)), rel=1e-5)
    assert metrics["fvu"] == pytest.approx((R**2).sum() / ((Y - Y.mean(axis=0)) ** 2).sum(), rel=1e-5)
    summary = code_summary(stored_code_moments(open_statistics(whole)))
    assert summary.l0_mean == metrics["l0_mean"]
    assert summary.l1_mean == metrics["l1_mean"]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_stores_of_other_precision_are_encoded(tmp_path, rows, run, dtype):
    store = jobs.write_store(tmp_path / "other.zarr", rows, CHUNK, dtype)
    encode_store(store, run, tmp_path / "codes.zarr")
    atom, coefficient = in_memory(rows.astype(dtype).astype(np.float32), run)
    codes = open_codes(tmp_path / "codes.zarr")
    np.testing.assert_array_equal(codes.atom, atom)
    np.testing.assert_array_equal(codes.coefficient, coefficient)


def test_half_precision_coefficients_are_stored_and_measured_as_stored(tmp_path, store, run, rows, whole):
    out = tmp_path / "half.zarr"
    encode_store(store, run, out, coefficient_dtype="float16")
    codes, full = open_codes(out).compute(), open_codes(whole).compute()
    assert codes.coefficient.dtype == np.float16
    np.testing.assert_array_equal(codes.coefficient, full.coefficient.astype(np.float16))
    dictionary = open_dictionary(run)
    Y = rows.astype(np.float64) - dictionary.mean
    R = Y - reconstruct(codes.atom.to_numpy(), codes.coefficient.to_numpy(), dictionary.atoms)
    error = np.mean(np.linalg.norm(R, axis=1) / np.linalg.norm(Y, axis=1))
    assert codes.attrs["metrics"]["mean_relative_error"] == pytest.approx(error, rel=1e-6)
    assert error != pytest.approx(full.attrs["metrics"]["mean_relative_error"], rel=1e-9)


def test_coefficients_too_large_for_half_precision_are_refused(tmp_path, run, rows):
    store = jobs.write_store(tmp_path / "large.zarr", rows * 1e5, CHUNK)
    with pytest.raises(
        InputError, match=r"does not fit into float16 \(at most 6.55e\+04\); use coefficient_dtype"
    ):
        encode_store(store, run, tmp_path / "codes.zarr", coefficient_dtype="float16")


def test_parameters_default_to_those_of_the_fit_and_can_be_changed(tmp_path, store):
    run = jobs.write_dictionary(tmp_path / "other", M, D, K, encoder="omp", rtol=0.25)
    job = EncodeJob(store, run, tmp_path / "codes.zarr")
    assert (job.how.spec.k, job.how.spec.encoder, job.how.spec.rtol) == (K, "omp", 0.25)
    job = EncodeJob(store, run, tmp_path / "codes.zarr", k=5, encoder="mp", rtol=0.0)
    assert (job.how.spec.k, job.how.spec.encoder, job.how.spec.rtol) == (5, "mp", 0.0)


def test_a_matryoshka_dictionary_can_be_encoded_group_by_group(tmp_path, store):
    run = jobs.write_dictionary(tmp_path / "groups", M, D, 4, groups=[8, 24])
    encode_store(store, run, tmp_path / "plain.zarr")
    encode_store(store, run, tmp_path / "staged.zarr", encode="staged")
    plain, staged = (open_codes(tmp_path / f"{name}.zarr").compute() for name in ("plain", "staged"))
    first = (staged.atom >= 0) & (staged.atom < 8)
    assert int(first.sum(dim="slot").max()) <= 2
    assert not plain.atom.equals(staged.atom)
    assert staged.attrs["params"]["stages"] == [[0, 8, 2], [8, 32, 2]]
    assert encode_store(store, run, tmp_path / "staged.zarr", encode="staged", resume=True).samples_written == 0


def test_samples_that_are_all_zero_are_encoded_without_an_error_to_report(tmp_path):
    store = jobs.write_store(tmp_path / "zero.zarr", np.zeros((70, D), np.float32), CHUNK)
    run = jobs.write_dictionary(tmp_path / "run", M, D, K)
    dictionary = open_dictionary(run)
    dictionary.mean = None
    result = encode_store(store, dictionary, tmp_path / "codes.zarr")
    assert result.metrics["n_dead"] == M
    assert result.metrics.get("mean_relative_error") is None
    assert (open_codes(tmp_path / "codes.zarr").atom == -1).all()


def test_progress_is_told_in_samples_up_to_the_total(tmp_path, store, run):
    heard = []
    encode_store(store, run, tmp_path / "codes.zarr", callbacks=[heard.append])
    assert all(isinstance(event, JobProgress) and event.job == "encode" for event in heard)
    done = [event.done for event in heard]
    assert done == sorted(done)
    assert (done[0], done[-1], heard[0].total) == (0, N, N)
    assert len(done) == 12


# -- parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parts", [1, 2, 4, 11, 30])
def test_any_number_of_parts_in_any_order_gives_the_same_bytes(tmp_path, store, run, whole, n_parts):
    out = tmp_path / "parts.zarr"
    order = np.random.default_rng(n_parts).permutation(n_parts) + 1
    written = [encode_store(store, run, out, part=(int(i), n_parts)).samples_written for i in order]
    assert sum(written) == N
    assert out.exists()
    assert encode_store(store, run, out, finish=True).finished
    assert jobs.tree(out) == jobs.tree(whole)


def test_bytes_do_not_depend_on_threads(tmp_path, store, run, whole):
    for n in (1, 2):
        with dask.config.set(scheduler="threads", num_workers=n):
            encode_store(store, run, tmp_path / f"{n}.zarr")
        assert jobs.tree(tmp_path / f"{n}.zarr") == jobs.tree(whole)


def test_a_part_that_is_run_again_does_nothing(tmp_path, store, run, count_units):
    out = tmp_path / "parts.zarr"
    first = encode_store(store, run, out, part=(2, 3))
    again = encode_store(store, run, out, part=(2, 3))
    assert (first.samples_kept, again.samples_written) == (0, 0)
    assert again.samples_kept == first.samples_written
    assert sorted(count_units) == sorted(set(count_units))


def test_finish_lists_the_parts_that_are_missing(tmp_path, store, run):
    out = tmp_path / "parts.zarr"
    for i in (1, 2, 8, 11):
        encode_store(store, run, out, part=(i, 11))
    with pytest.raises(
        JobError, match=r"cannot be finished. Parts not encoded: 3-7, 9-10 of 11 \(448 of 700 samples"
    ):
        encode_store(store, run, out, finish=True)
    assert not out.exists()


def test_finish_of_a_job_never_split_lists_the_chunks_that_are_missing(tmp_path, store, run):
    job = EncodeJob(store, run, tmp_path / "codes.zarr")
    job.init()
    job._encode([0, 1, 4], lambda unit: None)
    with pytest.raises(JobError, match=r"Chunks not encoded: 2-3, 5-10 \(508 of 700 samples\)"):
        job.finish()


def test_finish_without_parts_says_what_to_type(tmp_path, store, run):
    with pytest.raises(
        StoreError, match=r"no encode was begun at .*codes.zarr; run its parts first, such as part=\(1, 4\)"
    ):
        encode_store(store, run, tmp_path / "codes.zarr", finish=True)


@pytest.mark.parametrize("part", [(0, 4), (5, 4), (1, 0)])
def test_parts_that_do_not_exist_are_refused(tmp_path, store, run, part):
    with pytest.raises(InputError, match=r"part \d/\d does not exist; parts count from 1/"):
        encode_store(store, run, tmp_path / "codes.zarr", part=part)


def test_part_and_finish_together_are_refused(tmp_path, store, run):
    with pytest.raises(InputError, match="run every part first, then finish alone"):
        encode_store(store, run, tmp_path / "codes.zarr", part=(1, 2), finish=True)


def test_a_late_part_of_a_finished_job_is_harmless(store, run, whole, count_units):
    before = jobs.tree(whole)
    assert encode_store(store, run, whole, part=(1, 4)).samples_written == 0
    assert (count_units, jobs.tree(whole)) == ([], before)


def test_part_ranges_partition_the_units():
    for n_samples, n_parts in itertools.product((1, 63, 64, 65, 700, 5000), (1, 2, 3, 7, 90)):
        plan = CodesPlan(n_samples, D, M, 64, 8, "float32", {"k": 3}, "", "", {})
        units = [u for i in range(1, n_parts + 1) for u in plan.part_units(i, n_parts)]
        assert units == list(range(plan.n_units))
        assert sum(b - a for a, b in map(plan.unit_bounds, units)) == n_samples


def test_units_of_several_chunks_give_the_same_codes(tmp_path, store, run, whole, monkeypatch):
    monkeypatch.setattr(plan_units, "UNITS_WANTED", 3)
    out = tmp_path / "units.zarr"
    job = EncodeJob(store, run, out)
    assert job.plan.n_units == 4
    encode_store(store, run, out)
    for name in ("atom", "coefficient"):
        assert jobs.tree(out / name) == jobs.tree(whole / name)
    assert (out / "crc32c/c/0/0").read_bytes() == (whole / "crc32c/c/0/0").read_bytes()
    xr.testing.assert_allclose(open_statistics(out), open_statistics(whole), rtol=1e-12)


# -- existing output, other parameters --------------------------------------------------------------------


def test_existing_codes_are_kept_unless_told_otherwise(store, run, whole, count_units):
    result = encode_store(store, run, whole)
    assert (result.finished, result.samples_written, result.samples_kept, count_units) == (True, 0, N, [])
    assert result.metrics["n_samples"] == N
    before = jobs.tree(whole)
    assert encode_store(store, run, whole, force=True).samples_written == N
    assert jobs.tree(whole) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 2}, "k=3, this run has k=2"),
        ({"encoder": "omp"}, "encoder='mp', this run has encoder='omp'"),
        ({"rtol": 0.5}, "rtol=0.0, this run has rtol=0.5"),
        (
            {"coefficient_dtype": "float16"},
            "coefficient_dtype='float32', this run has coefficient_dtype='float16'",
        ),
        ({"n_top": 8}, "n_top=64, this run has n_top=8"),
    ],
)
def test_other_parameters_are_refused_with_both_values(tmp_path, store, run, whole, change, text):
    with pytest.raises(MismatchError, match=f"whole.zarr was begun with {text}"):
        encode_store(store, run, whole, resume=True, **change)
    out = tmp_path / "unfinished.zarr"
    encode_store(store, run, out, part=(1, 2))
    with pytest.raises(MismatchError, match=f"the unfinished encode at .* was begun with {text}; use the same"):
        encode_store(store, run, out, part=(2, 2), **change)


def test_another_dictionary_or_store_is_refused(tmp_path, store, run, whole):
    other = jobs.write_dictionary(tmp_path / "other", M, D, K, seed=9)
    text = r"was begun with dictionary='\w+' \(iteration \d+\), this run has dictionary='\w+' \(iteration \d+\)"
    with pytest.raises(MismatchError, match=text):
        encode_store(store, other, whole, resume=True)
    elsewhere = jobs.write_store(tmp_path / "other.zarr", jobs.made_up(N, D, seed=5), CHUNK)
    with pytest.raises(MismatchError, match="was begun with store='"):
        encode_store(elsewhere, run, whole, resume=True)


@pytest.mark.parametrize("taken", ["store", "run", "folder", "file"])
def test_force_replaces_codes_only(taken, tmp_path, store, run):
    """Whatever else bears the name stays: the activations and the dictionary themselves not least."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").touch()
    (tmp_path / "file").touch()
    out = {"store": store, "run": run}.get(taken, tmp_path / taken)
    before = tree(out) if os.path.isdir(out) else None
    with pytest.raises(StoreError, match=r"only a codes store is replaced"):
        encode_store(store, run, out, force=True)
    assert os.path.isfile(out) or tree(out) == before
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


@pytest.mark.parametrize("what", ["device", "room"])
def test_what_cannot_be_done_leaves_nothing_behind(what, tmp_path, store, run, monkeypatch):
    if what == "room":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises((StoreError, DeviceError)):
        encode_store(store, run, tmp_path / "out", device="gpu" if what == "device" else "cpu")
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out")]


def test_force_begins_again_when_parameters_differ_and_goes_on_when_not(tmp_path, store, run):
    out = tmp_path / "codes.zarr"
    encode_store(store, run, out, part=(1, 2))
    assert encode_store(store, run, out, force=True).samples_kept > 0
    encode_store(store, run, out, part=(1, 2), k=2, force=True)
    result = encode_store(store, run, out, k=5, force=True)
    assert (result.samples_kept, result.samples_written, open_codes(out).sizes["slot"]) == (0, N, 5)


def test_what_is_no_codes_store_is_never_replaced_by_resume(tmp_path, store, run):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("precious")
    with pytest.raises(StoreError, match="already exists and is not a codes store"):
        encode_store(store, run, tmp_path / "thesis", resume=True)


def test_a_folder_in_the_way_of_the_work_is_named(tmp_path, store, run):
    (tmp_path / "codes.zarr.partial").mkdir()
    (tmp_path / "codes.zarr.partial" / "text").write_text("precious")
    with pytest.raises(StoreError, match=r"codes.zarr.partial is in the way and is not an unfinished store"):
        encode_store(store, run, tmp_path / "codes.zarr")


# -- bad input --------------------------------------------------------------------------------------------


def test_not_finite_samples_are_named_and_nothing_is_published(tmp_path, rows, run):
    rows[300, 2] = np.nan
    store = jobs.write_store(tmp_path / "nan.zarr", rows, CHUNK)
    with pytest.raises(
        InputError, match=r"sample 300 \(chunk 4, row 44 in it\) of .*nan.zarr has NaN or infinity"
    ):
        encode_store(store, run, tmp_path / "codes.zarr")
    assert not (tmp_path / "codes.zarr").exists()


def test_width_k_and_missing_paths_are_refused_before_any_work(tmp_path, store, run):
    narrow = jobs.write_dictionary(tmp_path / "narrow", M, D - 1, K)
    with pytest.raises(InputError, match="has 16 features, but the dictionary has 15; use a dictionary fitted on"):
        encode_store(store, narrow, tmp_path / "codes.zarr")
    with pytest.raises(InputError, match="k=33 exceeds n_atoms=32"):
        encode_store(store, run, tmp_path / "codes.zarr", k=33)
    with pytest.raises(StoreError, match=r"no store at .*nowhere"):
        encode_store(tmp_path / "nowhere", run, tmp_path / "codes.zarr")
    with pytest.raises(StoreError, match="nowhere does not exist"):
        encode_store(store, tmp_path / "nowhere", tmp_path / "codes.zarr")
    with pytest.raises(InputError, match="coefficient_dtype='int8' is not known; use one of 'float32', 'float16'"):
        encode_store(store, run, tmp_path / "codes.zarr", coefficient_dtype="int8")
    with pytest.raises(TypeError, match="unknown parameter 'speed'"):
        EncodeJob(store, run, tmp_path / "codes.zarr", speed=9)
    assert not any(p.name.startswith("codes") for p in tmp_path.iterdir())


def test_codes_that_are_missing_unfinished_or_damaged_are_named(tmp_path, store, run, whole):
    with pytest.raises(StoreError, match=r"no codes at .*none.zarr; make them with `dbksvd encode"):
        open_codes(tmp_path / "none.zarr")
    encode_store(store, run, tmp_path / "half.zarr", part=(1, 2))
    with pytest.raises(StoreError, match=r"an unfinished encode is at .*half.zarr.partial"):
        open_codes(tmp_path / "half.zarr")
    with pytest.raises(StoreError, match="is not finished; run `dbksvd encode` again"):
        open_codes(tmp_path / "half.zarr.partial")
    with pytest.raises(StoreError, match="is 'dbksvd-activations', not 'dbksvd-codes'"):
        open_codes(store)
    os.truncate(whole / "atom" / "c.3.0", 100)
    with pytest.raises(StoreError, match=r"chunk 3 of .* has 100 bytes instead of 768"):
        open_codes(whole).atom.compute()
    (whole / "coefficient" / "c.5.0").unlink()
    with pytest.raises(StoreError, match=r"chunk 5 of .* is missing"):
        open_codes(whole).coefficient.compute()


def test_codes_of_another_version_are_refused(whole):
    head = json.loads((whole / "zarr.json").read_text())
    head["attributes"]["format_version"] = 7
    (whole / "zarr.json").write_text(json.dumps(head))
    with pytest.raises(MismatchError, match=r"has dbksvd-codes version 7, .* which reads versions 2 to 4"):
        open_codes(whole)


def test_a_full_disk_is_named_and_the_work_kept(tmp_path, store, run, monkeypatch, whole):
    real, written = codes_writer.CodesWriter.write_unit, []

    def full(self, unit, *args):
        if len(written) == 2:  # in whichever order the scheduler takes them
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(real(self, unit, *args))
        return written[-1]

    monkeypatch.setattr(codes_writer.CodesWriter, "write_unit", full)
    out = tmp_path / "codes.zarr"
    with dask.config.set(scheduler="synchronous"), pytest.raises(StoreError, match="no space left while writing"):
        encode_store(store, run, out)
    monkeypatch.undo()
    monkeypatch.setattr(plan_units, "MIN_CHUNK_ROWS", CHUNK)
    assert encode_store(store, run, out).samples_kept == sum(unit.n_samples for unit in written)
    assert jobs.tree(out) == jobs.tree(whole)


def test_too_little_space_is_refused_before_any_unit(tmp_path, store, run, monkeypatch, count_units):
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(StoreError, match=r"needs .* more and .* free; make room"):
        encode_store(store, run, tmp_path / "codes.zarr")
    assert count_units == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_target_is_an_error_of_the_system(tmp_path, store, run):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(PermissionError):
        encode_store(store, run, folder / "codes.zarr")
