"""Texts from lists, files and tables."""

import gzip
import json

import numpy as np
import pytest

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.lm import read_texts


def test_list_is_taken_as_it_is():
    found = read_texts(["one", "two"])
    assert found.texts == ["one", "two"]
    assert found.label is None


def test_folder_gives_one_text_per_file_in_natural_order(tmp_path):
    for name, text in [("part_10.txt", "ten"), ("part_2.txt", "two\nlines"), ("skipped.png", "no text")]:
        (tmp_path / name).write_text(text)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "more.md").write_text("deep")
    assert read_texts(tmp_path).texts == ["deep", "two\nlines", "ten"]
    assert read_texts(str(tmp_path / "part_*.txt")).texts == ["two\nlines", "ten"]


def test_lines_split_only_at_line_feeds(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\u2028still two\n\nfour\n".encode())
    assert read_texts(tmp_path / "a.txt", lines=True).texts == ["one", "two\u2028still two", "", "four"]


def test_csv_with_labels_also_compressed(tmp_path):
    content = 'prompt,prompt_len,target\n"a, ""quoted""\ntext",3,yes\nplain,1,no\n'
    (tmp_path / "a.csv").write_text(content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("a.csv", "b.csv.gz"):
        found = read_texts(tmp_path / name, label="target")
        assert found.texts == ['a, "quoted"\ntext', "plain"]
        assert found.names == ["no", "yes"]
        np.testing.assert_array_equal(found.label, [1, 0])


def test_zstd_and_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    with pa.output_stream(str(tmp_path / "a.csv.zst"), compression="zstd") as file:
        file.write(b"text,target\nhello,1\nthere,0\n")
    assert read_texts(tmp_path / "a.csv.zst").texts == ["hello", "there"]
    pyarrow.parquet.write_table(pa.table({"n": [1, 2], "content": ["x", None]}), tmp_path / "b.parquet")
    found = read_texts(tmp_path / "b.parquet", label="n")
    assert found.texts == ["x", ""]
    assert found.names == ["1", "2"]


def test_orange_table_names_its_own_label(tmp_path):
    (tmp_path / "news.tab").write_text(
        "category\ttext\ndiscrete\tstring\nclass\tmeta\n\nsport\ta game\nwar\ta battle\n"
    )
    found = read_texts(tmp_path / "news.tab")
    assert found.texts == ["a game", "a battle"]
    assert found.names == ["sport", "war"]
    (tmp_path / "talk.tab").write_text("Title\tQuote\nd\tstring\n\tinclude=True\n\nOne\t Hello there!\n")
    assert read_texts(tmp_path / "talk.tab").texts == [" Hello there!"]


def test_plain_tab_separated_rows_are_not_taken_for_a_header(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tkind\nhello world\tfoo\nclass\tbar\nmore text\tfoo\n")
    assert read_texts(tmp_path / "a.tsv").texts == ["hello world", "class", "more text"]


def test_json_lines_of_objects_and_of_strings(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t, "y": i}) for i, t in enumerate("ab")))
    (tmp_path / "b.jsonl").write_text('"one"\n"two"\n')
    assert read_texts(tmp_path / "a.jsonl", label="y").names == ["0", "1"]
    assert read_texts(tmp_path / "b.jsonl").texts == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", "x,y\n1,2\n", {}, "has the columns x, y; say which holds the texts: column='NAME'"),
        ("a.csv", "text,y\nhello,2\n", {"label": "topic"}, "has no column 'topic'; it has text, y"),
        ("a.csv", "text,y\nhello\n", {"label": "y"}, "row 0 has 1 columns"),
        ("a.csv", "", {}, "is empty"),
        ("a.jsonl", '{"text": 3}\n', {}, "holds a int, not texts"),
        ("a.jsonl", "{broken\n", {}, "cannot be read"),
        ("a.txt", b"\xff\xfe", {}, "not UTF-8"),
        ("a.png", "x", {}, "is not a file of texts"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, options, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message) as caught:
        read_texts(path, **options)
    assert "\n" not in str(caught.value)


def test_missing_texts_are_named(tmp_path):
    with pytest.raises(StoreError, match="no texts at"):
        read_texts(tmp_path / "nothing")
    with pytest.raises(InputError, match="hold a int"):
        read_texts(["a", 3])
