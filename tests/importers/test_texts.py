"""Texts of imported rows: from a column or a file, beside the store, and with the rows wherever they go."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from dbksvd_dask import DBKSVD, encode_store
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.jobs.shuffle import shuffle_activations
from dbksvd_dask.report.inputs import open_inputs, open_samples
from dbksvd_dask.store.activations import open_activations
from tests.helpers.import_patterns import values

WRITERS = {"parquet": parquet.write_table, "feather": lambda table, path: feather.write_feather(table, path)}


def texts_of(store, rows):
    found = open_samples(store, open_activations(store).sizes["sample"])
    return found.words(np.asarray(rows, np.int64))


def write_table(path, texts, column="text", write=parquet.write_table, **more):
    rows = values((len(texts), 4), "float32")
    write(pa.table({column: texts, "embedding": list(rows), **more}), path)
    return rows


@pytest.mark.parametrize("kind", WRITERS)
def test_texts_of_a_table_go_beside_the_store(kind, tmp_path):
    texts = [f"text {i}\nof two lines" for i in range(30)]
    source = tmp_path / f"table.{kind}"
    write_table(source, texts, write=WRITERS[kind])
    result = import_activations(source, tmp_path / "store.zarr")
    assert result.texts == str(tmp_path / "store.texts.txt")
    assert texts_of(tmp_path / "store.zarr", [0, 29]) == ["text 0\u21b5of two lines", "text 29\u21b5of two lines"]


def test_texts_stay_with_their_rows_when_rows_are_left_out_and_shuffled(tmp_path):
    rows = write_table(tmp_path / "table.parquet", [f"text {i}" for i in range(40)])
    np.save(tmp_path / "mask.npy", np.arange(40) % 2 == 0)
    import_activations(tmp_path / "table.parquet", tmp_path / "raw.zarr", mask=str(tmp_path / "mask.npy"))
    (tmp_path / "elsewhere").mkdir()
    shuffle_activations(tmp_path / "raw.zarr", tmp_path / "elsewhere" / "mixed.zarr", seed=1)
    stored = open_activations(tmp_path / "elsewhere" / "mixed.zarr")["activations"].values
    number = [int(np.flatnonzero((rows == row).all(axis=1))[0]) for row in stored]
    assert number != sorted(number)
    assert texts_of(tmp_path / "elsewhere" / "mixed.zarr", range(20)) == [f"text {i}" for i in number]


def test_a_column_of_another_name_is_named(tmp_path):
    write_table(tmp_path / "table.parquet", ["a", "b"], column="caption", author=["x", "y"])
    assert import_activations(tmp_path / "table.parquet", tmp_path / "without").texts is None
    import_activations(tmp_path / "table.parquet", tmp_path / "store.zarr", texts="caption")
    assert texts_of(tmp_path / "store.zarr", [1]) == ["b"]
    with pytest.raises(InputError, match=r"texts='title' is neither a file nor a column .* has caption, author;"):
        import_activations(tmp_path / "table.parquet", tmp_path / "other.zarr", texts="title")


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_a_file_has_a_line_for_each_row_or_for_each_sequence(tmp_path):
    np.save(tmp_path / "rows.npy", values((4, 6, 4), "float32"))
    by_sequence = write_lines(tmp_path / "four.txt", ["a", "b", "c", "d"])
    import_activations(tmp_path / "rows.npy", tmp_path / "s.zarr", texts=by_sequence)
    assert texts_of(tmp_path / "s.zarr", [0, 5, 6, 23]) == ["a", "a", "b", "d"]
    by_row = write_lines(tmp_path / "all.txt", [f"row {i}" for i in range(24)])
    import_activations(tmp_path / "rows.npy", tmp_path / "r.zarr", texts=by_row, drop_first_token=True)
    assert texts_of(tmp_path / "r.zarr", [0, 4, 5]) == ["row 1", "row 5", "row 7"]
    with pytest.raises(InputError, match=r"has 3 lines for 24 rows; need one line per row, .*, or 4, one per seq"):
        import_activations(tmp_path / "rows.npy", tmp_path / "x", texts=write_lines(tmp_path / "x.txt", "abc"))


def test_marked_tokens_are_tokens_of_their_texts(tmp_path):
    np.save(tmp_path / "rows.npy", values((4, 4), "float32"))
    lines = ["<<the>> bird sings", "the <<bird>> sings", "the bird <<sings>>", "«<<é>>»"]
    import_activations(tmp_path / "rows.npy", tmp_path / "s.zarr", texts=write_lines(tmp_path / "t.txt", lines))
    found = open_samples(tmp_path / "s.zarr", 4)
    assert found.kind == "token"
    assert [excerpt.token for excerpt in found.excerpts(np.arange(4))] == ["the", "bird", "sings", "é"]
    assert (tmp_path / "s.texts.txt").read_text(encoding="utf-8") == "the bird sings\n«é»\n"


def test_a_file_of_other_texts_is_not_overwritten(tmp_path):
    write_table(tmp_path / "table.parquet", ["a", "b"])
    mine = write_lines(tmp_path / "store.texts.txt", ["mine"])
    with pytest.raises(InputError, match=r"store.texts.txt already exists and holds other texts; .* force=True"):
        import_activations(tmp_path / "table.parquet", tmp_path / "store.zarr")
    assert mine.read_text() == "mine\n"
    import_activations(tmp_path / "table.parquet", tmp_path / "store.zarr", force=True)
    assert mine.read_text() == "a\nb\n"


def test_the_same_import_succeeds_without_work_and_other_texts_are_another_import(tmp_path):
    np.save(tmp_path / "rows.npy", values((3, 4), "float32"))
    texts = write_lines(tmp_path / "t.txt", "abc")
    import_activations(tmp_path / "rows.npy", tmp_path / "s.zarr", texts=texts)
    assert import_activations(tmp_path / "rows.npy", tmp_path / "s.zarr", texts=texts).chunks_written == 0
    with pytest.raises(StoreError, match="already exists"):
        import_activations(
            tmp_path / "rows.npy", tmp_path / "s.zarr", texts=write_lines(tmp_path / "u.txt", "def")
        )


def test_texts_need_a_local_store(tmp_path):
    write_table(tmp_path / "table.parquet", ["a", "b"])
    assert import_activations(tmp_path / "table.parquet", "memory://texts/store.zarr").texts is None
    with pytest.raises(InputError, match="texts go beside a local store"):
        import_activations(tmp_path / "table.parquet", "memory://texts/other.zarr", texts="text")


def test_texts_by_number_beside_a_shuffled_store_are_warned_of(tmp_path, caplog):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((60, 4)).astype("f4"))
    import_activations(tmp_path / "rows.npy", tmp_path / "raw.zarr")
    shuffle_activations(tmp_path / "raw.zarr", tmp_path / "mixed.zarr", seed=0)
    texts = write_lines(tmp_path / "t.txt", [str(i) for i in range(60)])
    model = DBKSVD(8, 2, n_iter=1, checkpoint=tmp_path / "run").fit(tmp_path / "raw.zarr")
    for name, warned in (("raw", False), ("mixed", True)):
        encode_store(tmp_path / f"{name}.zarr", model, tmp_path / f"{name}-codes.zarr")
        caplog.clear()
        open_inputs(tmp_path / "run", tmp_path / f"{name}-codes.zarr", samples=texts)
        assert ("was shuffled: its row i is not text i" in caplog.text) == warned
