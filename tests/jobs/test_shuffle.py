"""Shuffle: every row once, in the order of the plan, well mixed, interrupted and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.evaluate.mixing import BatchMeans, MixingSample, batch_rows, choose_columns, pick_columns
from dbksvd_dask.jobs._passes import can_shrink
from dbksvd_dask.jobs.shuffle import ShuffleJob, shuffle_activations
from dbksvd_dask.plan.shuffle import ShufflePlan, default_block_bytes, plan_shuffle, spread
from dbksvd_dask.store.activations import Aligned, open_activations, open_rows
from dbksvd_dask.store.verify import verify_store
from tests.helpers.import_patterns import pattern
from tests.helpers.stores import make_store, ordered_rows, tree
from tests.naive.mixing import batch_mean_ratio, shuffled_order

# the plan: integers


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_plan_sends_every_row_somewhere_once(n_samples, chunk_rows, chunks, seed):
    plan = ShufflePlan(n_samples, chunks * chunk_rows, chunk_rows, seed)
    counts = plan.counts()
    sizes = [b - a for a, b in map(plan.bounds, range(plan.n_blocks))]
    assert counts.min() >= 0
    np.testing.assert_array_equal(counts.sum(axis=0), sizes)
    np.testing.assert_array_equal(counts.sum(axis=1), sizes)
    np.testing.assert_array_equal(np.sort(shuffled_order(plan)), np.arange(n_samples))


@settings(max_examples=100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum), st.data())
def test_rows_are_spread_within_one_of_the_exact_share(room, data):
    total = sum(room)
    n, offset = data.draw(st.integers(0, total)), data.draw(st.integers(0, total - 1))
    shares = spread(n, np.array(room), offset)
    assert shares.sum() == n
    assert (shares <= room).all()
    assert (np.abs(shares - np.array(room) * n / total) < 1 + 1e-9).all()


def test_blocks_grow_with_the_root_of_very_large_stores():
    assert default_block_bytes(10**9) == default_block_bytes(10**11) == 1 << 27
    total = 10**13
    assert default_block_bytes(total) ** 2 / total == pytest.approx(1 << 16, rel=1e-3)


def test_memory_of_a_block_bounds_a_plan_of_billions_of_rows():
    plan = plan_shuffle(3 * 10**9, 1536, 16384, seed=0)
    assert plan.block_rows * 1536 <= default_block_bytes(3 * 10**9 * 1536)


# the figure


@pytest.mark.parametrize("batch", [7, 50])
def test_figure_is_that_of_plain_loops(batch, rng):
    rows = ordered_rows(500, 5)
    rows[:, 3] = 2.5
    means = [BatchMeans(5), BatchMeans(5)]
    for i in range(0, 500, batch):
        means[(i // batch) % 2].add(rows[i : i + batch])
    merged = BatchMeans.merged(json.loads(json.dumps([m.to_json() for m in means])))
    assert merged.ratio() == pytest.approx(batch_mean_ratio(rows[:, [0, 1, 2, 4]], batch), rel=1e-9)


def test_figure_of_a_full_shuffle_is_one(rng):
    rows = ordered_rows(4000, 8)
    ratios = [batch_mean_ratio(rng.permutation(rows), 100) for _ in range(5)]
    assert np.mean(ratios) == pytest.approx(1, abs=0.15)


def test_figure_of_nothing_that_varies_is_undefined():
    means = BatchMeans(3)
    assert means.ratio() is None
    means.add(np.ones((5, 3)))
    assert means.ratio() is None
    means.add(np.ones((5, 3)))
    assert means.ratio() is None


@pytest.mark.parametrize("n_features", [1, 16, 17, 24, 32, 33, 48, 768, 4096])
def test_few_features_are_looked_at(n_features):
    every = np.arange(n_features)[None]
    columns = pick_columns(every, choose_columns(n_features))[0]
    assert len(columns) == min(n_features, 16)
    assert len(set(columns.tolist())) == len(columns)


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_rows_that_come_in_pieces_give_the_sums_of_whole_batches(n_rows, chunk_rows, batch, step):
    rows = ordered_rows(n_rows, 20)
    sample = MixingSample(n_rows, choose_columns(20), rows.dtype)
    for first in range(0, n_rows, step):
        sample.add(first, rows[first : first + step])
    expected = BatchMeans(16)
    for low in range(0, n_rows, chunk_rows):
        chunk = 2 * rows[low : low + chunk_rows, :16]
        for start in range(0, len(chunk), batch):
            expected.add(chunk[start : start + batch])
    assert sample.means(chunk_rows, batch, lambda part: 2 * part).to_json() == expected.to_json()


# the job


@pytest.fixture
def store(tmp_path):
    rows = ordered_rows(1000, 6)
    spans = np.arange(2000).reshape(1000, 2)
    aligned = {"row": np.arange(1000, dtype=np.int32), "span": spans}
    specs = {"row": "int32", "span": Aligned("int64", (2,), {"unit": "character"})}
    return make_store(tmp_path / "source", rows, 64, aligned, specs=specs)


# 36 bytes of a row with its aligned arrays + 8; blocks of one chunk, of three, and of the whole store
@pytest.mark.parametrize("block_bytes", [1, 3 * 64 * 44, None])
@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_order_is_that_of_the_plan_and_aligned_arrays_go_along(block_bytes, compressor, store, tmp_path):
    job = ShuffleJob(store, tmp_path / "s", seed=5, block_bytes=block_bytes)
    result = shuffle_activations(store, tmp_path / "s", seed=5, block_bytes=block_bytes, compressor=compressor)
    source, mixed = open_activations(store), open_activations(tmp_path / "s")
    order = shuffled_order(job.plan)
    np.testing.assert_array_equal(mixed.row.values, order)
    np.testing.assert_array_equal(mixed.activations.values, source.activations.values[order])
    np.testing.assert_array_equal(mixed.span.values, source.span.values[order])
    assert mixed.span.attrs == {"unit": "character"}
    assert result.blocks_written == job.plan.n_blocks
    assert verify_store(tmp_path / "s") == 16
    assert sorted(os.listdir(tmp_path)) == ["s", "source"]


def test_store_with_strong_order_comes_out_as_mixed_as_a_full_shuffle(tmp_path):
    """The figure of the result, over many seeds, is that of a full shuffle; that of the source is far above."""
    rows = ordered_rows(3000, 8)
    source = make_store(tmp_path / "source", rows, 100)
    figures = []
    for seed in range(4):
        result = shuffle_activations(source, tmp_path / "s", seed=seed, block_bytes=5 * 100 * 32, force=True)
        mixed = open_rows(tmp_path / "s").read(0, 3000)
        assert result.mixing_after == pytest.approx(batch_mean_ratio(mixed, 100), rel=1e-6)
        figures.append(result.mixing_after)
    assert result.mixing_before == pytest.approx(batch_mean_ratio(rows, 100), rel=1e-6)
    assert result.mixing_before > 30
    assert np.mean(figures) < 1.2
    assert open_activations(tmp_path / "s").attrs["mixing"] == result.mixing_after


def test_seed_decides_the_order(store, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        shuffle_activations(store, tmp_path / name, seed=seed, block_bytes=10_000)
    a, b, c = (open_activations(tmp_path / name).row.values for name in "abc")
    np.testing.assert_array_equal(a, b)
    assert (a != c).mean() > 0.9
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_bfloat16_and_other_chunks(tmp_path):
    bits = pattern((50, 4), "bfloat16")
    source = make_store(tmp_path / "source", bits, 8, {"row": np.arange(50)}, dtype="bfloat16")
    shuffle_activations(source, tmp_path / "s", seed=0, chunk_rows=16)
    reader = open_rows(tmp_path / "s")
    assert (reader.chunk_rows, reader.bfloat16) == (16, True)
    order = open_activations(tmp_path / "s").row.values
    np.testing.assert_array_equal(reader.read_stored(0, 50), bits[order])


def test_foreign_zarr_array_can_be_shuffled(tmp_path):
    rows = ordered_rows(100, 4)
    array = zarr.create_array(tmp_path / "z", shape=rows.shape, chunks=(9, 2), dtype=rows.dtype)
    array[...] = rows
    shuffle_activations(tmp_path / "z", tmp_path / "s", seed=0)
    mixed = open_rows(tmp_path / "s").read(0, 100)
    np.testing.assert_array_equal(np.sort(mixed[:, 0]), np.sort(rows[:, 0]))


def test_scratch_can_lie_elsewhere(store, tmp_path, monkeypatch):
    (tmp_path / "fast").mkdir()
    seen = []
    finish = ShuffleJob.finish
    monkeypatch.setattr(
        ShuffleJob, "finish", lambda job, **o: (seen.extend(os.listdir(tmp_path / "fast")), finish(job, **o))[1]
    )
    shuffle_activations(store, tmp_path / "s", seed=0, scratch=tmp_path / "fast")
    assert len(seen) == 1
    assert not os.listdir(tmp_path / "fast")


@pytest.mark.slow
def test_same_bytes_after_a_kill_at_any_write_and_no_work_twice(tmp_path):
    """SIGKILL at every other publishing of a file in turn; see kills/sweep.py."""
    command = [sys.executable, "-W", "error", "-m", "tests.kills.sweep", "shuffle", str(tmp_path), "2"]
    swept = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    chunks, blocks = swept["undisturbed"]["chunks_written"], swept["undisturbed"]["blocks_written"]
    assert 2 * len(swept["points"]) > chunks + blocks
    for point in swept["points"]:
        second = point["second"]
        done = chunks if point["complete"] else point["done"]["chunks"]
        assert point["same_bytes"], point
        assert (second["chunks_kept"], second["chunks_written"]) == (done, chunks - done), point
        assert second["blocks_kept"] == point["done"]["blocks"], point
        assert second["blocks_written"] == blocks - point["done"]["blocks"], point
        assert point["left"] == ["store"], point


def interrupt(store, path, seed=1):
    job = ShuffleJob(store, path, seed=seed, block_bytes=10_000)
    job.init()
    job.scatter()
    return job


def test_other_seed_is_not_mixed_in(store, tmp_path):
    interrupt(store, tmp_path / "s")
    with pytest.raises(MismatchError, match=r"begun with another store, seed or size; use the same to resume"):
        shuffle_activations(store, tmp_path / "s", seed=2, block_bytes=10_000)
    result = shuffle_activations(store, tmp_path / "s", seed=2, block_bytes=10_000, force=True)
    assert result.blocks_kept == 0


@pytest.mark.parametrize("damage", ["short", "other bits", "gone"])
def test_block_lost_to_a_power_failure_is_written_again(damage, store, tmp_path):
    job = interrupt(store, tmp_path / "s")
    file = tmp_path / "s.scratch.partial" / "00000002.activations"
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:9] if damage == "short" else content)
    result = shuffle_activations(store, tmp_path / "s", seed=1, block_bytes=10_000)
    assert (result.blocks_kept, result.blocks_written) == (job.plan.n_blocks - 1, 1)
    np.testing.assert_array_equal(open_activations(tmp_path / "s").row.values, shuffled_order(job.plan))


# the room of scratch files


@pytest.fixture
def larger(tmp_path):
    """A store of 1 MB, whose segments span many blocks of a filesystem."""
    rows = ordered_rows(4096, 64)
    return make_store(tmp_path / "source", rows, 128, {"row": np.arange(4096, dtype=np.int32)})


def begun(store, path, stop_after):
    """Shuffle in two passes until some buckets are written; return the job."""
    job = ShuffleJob(store, path, seed=1, block_bytes=8 * 128 * 260)

    def stop(event):
        if event.job == "gather" and event.done == stop_after:
            raise KeyboardInterrupt  # not an Exception: no subscriber may end a run

    job.callbacks = (stop,)
    job.init()
    job.scatter()
    with pytest.raises(KeyboardInterrupt):
        job.gather()
    return job


def room_of(folder):
    return sum(512 * file.stat().st_blocks for file in folder.glob("*.activations"))


def test_scratch_files_give_room_back_as_the_store_grows(larger, tmp_path):
    job = begun(larger, tmp_path / "s", stop_after=3)
    if not can_shrink(job.scratch):
        pytest.skip("this filesystem cannot release parts of a file")
    whole = 4096 * 64 * 4
    assert room_of(tmp_path / "s.scratch.partial") < 0.5 * whole  # three of four buckets are written
    result = shuffle_activations(larger, tmp_path / "s", seed=1, block_bytes=8 * 128 * 260)
    assert (result.blocks_written, result.blocks_kept) == (0, 4)
    np.testing.assert_array_equal(open_activations(tmp_path / "s").row.values, shuffled_order(job.plan))


def test_chunk_lost_after_its_segments_were_released_is_written_from_the_source(larger, tmp_path):
    job = begun(larger, tmp_path / "s", stop_after=2)
    (tmp_path / "s.partial" / "activations" / "c.3.0").unlink()
    result = shuffle_activations(larger, tmp_path / "s", seed=1, block_bytes=8 * 128 * 260)
    assert result.blocks_written == (4 if can_shrink(job.scratch) else 0)
    mixed = open_activations(tmp_path / "s")
    np.testing.assert_array_equal(mixed.row.values, shuffled_order(job.plan))
    np.testing.assert_array_equal(mixed.activations.values, open_rows(larger).read(0, 4096)[mixed.row.values])


def test_job_that_gathers_twice_never_takes_released_bytes_for_rows(larger, tmp_path):
    job = begun(larger, tmp_path / "s", stop_after=2)
    job.callbacks = ()
    job._writer.forget(1)
    job.gather()
    job.finish()
    rows = open_rows(larger).read(0, 4096)[shuffled_order(job.plan)]
    np.testing.assert_array_equal(open_activations(tmp_path / "s").activations.values, rows)


@pytest.mark.parametrize("shrinks", [True, False])
def test_room_is_asked_for_one_copy_and_some_blocks(shrinks, larger, tmp_path, monkeypatch):
    monkeypatch.setattr("dbksvd_dask.jobs._shuffle_job.can_shrink", lambda _: shrinks)
    asked = []
    monkeypatch.setattr("dbksvd_dask.store.atomic.require_space", lambda _, needed: asked.append(needed))
    job = ShuffleJob(larger, tmp_path / "s", seed=1, block_bytes=2 * 128 * 260)
    job.init()
    n = job.nbytes
    assert max(asked) == (n + 4 * n // 16 if shrinks else 2 * n)


def test_refusals(store, tmp_path):
    with pytest.raises(InputError, match=r"seed=-1; need 0 or more"):
        shuffle_activations(store, tmp_path / "s", seed=-1)
    with pytest.raises(StoreError, match=r"no store at .*nowhere"):
        shuffle_activations(tmp_path / "nowhere", tmp_path / "s", seed=0)
    shuffle_activations(store, tmp_path / "s", seed=0)
    with pytest.raises(StoreError, match=r"s already exists; .* force=True"):
        shuffle_activations(store, tmp_path / "s", seed=1)
    (tmp_path / "source" / "activations" / "c.3.0").unlink()
    with pytest.raises(StoreError, match=r"chunk 3 of .*source \(rows 192 to 255\) is missing"):
        shuffle_activations(store, tmp_path / "t", seed=0)
    assert not (tmp_path / "t").exists()


def test_batch_of_the_figure_is_a_chunk_or_less():
    assert batch_rows(1000, 64) == 62
    assert batch_rows(10, 64) == 1
