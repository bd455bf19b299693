"""Windows, blocks and batches."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask.errors import InputError
from dbksvd_dask.lm.windows import make_windows, padded, plan_batches, plan_blocks


class Words:
    """A tokenizer of words: the id is the length of the word, 99 begins."""

    is_fast, bos_token_id = True, 99

    def __call__(self, texts, **options):
        found = [list(re.finditer(r"\S+", text)) for text in texts]
        return {
            "input_ids": [[len(m.group()) for m in one] for one in found],
            "offset_mapping": [[m.span() for m in one] for one in found],
        }


class NoBeginning(Words):
    bos_token_id = None


TEXTS = ["a bb ccc dddd eeeee", "", "xx y", "   "]


def test_long_texts_are_split_and_each_window_begins_anew():
    windows = make_windows(Words(), TEXTS, context=3)
    assert [windows.tokens(w).tolist() for w in range(4)] == [[99, 1, 2], [99, 3, 4], [99, 5], [99, 2, 1]]
    assert windows.pieces == ["a bb", "ccc dddd", "eeeee", "xx y"]
    assert windows.document.tolist() == [0, 0, 0, 2]
    assert windows.n_empty == 2
    assert windows.n_rows == 7


def test_rows_say_where_their_token_stands():
    windows = make_windows(Words(), TEXTS, context=3)
    beside = windows.beside(1, 4, np.array([5, 6, 7, 8], np.int32))
    assert beside["token_id"].tolist() == [3, 4, 5, 2, 1]
    assert beside["document"].tolist() == [0, 0, 0, 2, 2]
    assert beside["position"].tolist() == [1, 2, 1, 1, 2]
    assert beside["text"].tolist() == [1, 1, 2, 3, 3]
    assert beside["label"].tolist() == [5, 5, 5, 7, 7]
    marked = [
        windows.pieces[t][a:b] for t, a, b in zip(beside["text"], beside["start"], beside["end"], strict=True)
    ]
    assert marked == ["ccc", "dddd", "eeeee", "xx", "y"]


def test_beginning_token_kept_or_left_out_altogether():
    kept = make_windows(Words(), TEXTS, context=3, bos="keep")
    assert kept.beside(0, 1, None)["token_id"].tolist() == [99, 1, 2]
    without = make_windows(NoBeginning(), TEXTS, context=3, bos="none")
    assert without.tokens(0).tolist() == [1, 2, 3]
    assert without.n_rows == 7


def test_cut_keeps_the_first_window_only():
    windows = make_windows(Words(), TEXTS, context=3, long="cut")
    assert windows.pieces == ["a bb", "xx y"]


def test_wanted_rows_stop_at_a_whole_window():
    windows = make_windows(Words(), TEXTS, context=3, n_rows=3)
    assert windows.n_rows == 4
    mixed = make_windows(Words(), TEXTS, context=3, order=np.array([2, 0]))
    assert mixed.document.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context=1 leaves no room for a token; give at least 2"),
        ({"bos": "maybe"}, "bos='maybe' is not known"),
        ({"long": "fold"}, "long='fold' is not known"),
        ({"n_rows": 0}, "n_tokens=0 asks for nothing"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        make_windows(Words(), TEXTS, **options)


def test_no_beginning_token_and_no_token_at_all():
    with pytest.raises(InputError, match=r"has no BOS token .* use bos='none'"):
        make_windows(NoBeginning(), TEXTS)
    with pytest.raises(InputError, match="none of 2 texts has a token"):
        make_windows(Words(), ["", "  "])


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 60))
def test_blocks_cover_every_window_once_in_order(lengths, size):
    blocks = plan_blocks(lengths, size)
    assert [w for first, last in blocks for w in range(first, last)] == list(range(len(lengths)))
    assert all(sum(lengths[a:b]) <= size or b - a == 1 for a, b in blocks)


@given(LENGTHS, st.integers(1, 60))
def test_batches_hold_every_window_once_and_fit(lengths, size):
    batches = plan_batches(lengths, size)
    assert sorted(w for batch in batches for w in batch) == list(range(len(lengths)))
    assert all(max(lengths[w] for w in b) * len(b) <= size or len(b) == 1 for b in batches)
    order = [lengths[w] for batch in batches for w in batch]
    assert order == sorted(order, reverse=True)


def test_padding_is_masked():
    ids, mask = padded(make_windows(Words(), TEXTS, context=3), [0, 2], 7)
    assert ids.tolist() == [[99, 1, 2], [99, 5, 7]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]
