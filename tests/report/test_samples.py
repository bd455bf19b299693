"""Texts, tokens and images behind the codes, and what is refused."""

from __future__ import annotations

import io
import shutil

import numpy as np
import pytest
import zarr
from PIL import Image

from dbksvd_dask.encoding import encode
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.report import samples as samples_module
from dbksvd_dask.report.context import context_payload, find_context
from dbksvd_dask.report.facts import CodeReader
from dbksvd_dask.report.images import ArrayImages, StoreImages
from dbksvd_dask.report.inputs import open_inputs, open_samples
from dbksvd_dask.report.samples import Samples, StoreTexts, TextSamples, TokenSamples, texts_beside, utf16
from dbksvd_dask.report.sprites import make_sheets
from dbksvd_dask.store.reader import open_rows
from tests.helpers.report_parts import encoded, patch_store, text_samples, token_store, unit, write_store
from tests.helpers.stores import make_store


def ids(*numbers):
    return np.array(numbers, np.int64)


# -- texts --


def test_lines_of_a_file_are_the_samples(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes("one\x0bstill one\ntwo\u2028still two\r\nthree".encode())
    found = open_samples(path, 3)
    assert isinstance(found, TextSamples)
    assert found.payload(ids(0, 2)).head["texts"] == ["one\x0bstill one", "three"]
    assert found.words(ids(1)) == ["two\u2028still two"]


def test_a_list_of_texts_is_taken_as_it_is():
    assert open_samples(["a", "b"], 2).words(ids(1)) == ["b"]


@pytest.mark.parametrize("n_texts", [2, 4])
def test_texts_of_another_number_than_samples_are_refused(tmp_path, n_texts):
    path = tmp_path / "texts.txt"
    path.write_text("x\n" * n_texts)
    with pytest.raises(
        InputError, match=rf"texts.txt has {n_texts} texts for 3 samples; give one text per sample"
    ):
        open_samples(path, 3)
    with pytest.raises(InputError, match=f"received {n_texts} texts for 3 samples"):
        open_samples(["x"] * n_texts, 3)


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"bad\.txt is not UTF-8 text"):
        open_samples(tmp_path / "bad.txt", 1)
    with pytest.raises(StoreError, match=r"cannot read .*none\.txt: No such file"):
        open_samples(tmp_path / "none.txt", 1)
    with pytest.raises(InputError, match="samples hold a int; pass texts"):
        open_samples([1, 2], 2)


def test_long_texts_are_cut():
    (text,) = open_samples(["x" * 5000], 1).payload(ids(0)).head["texts"]
    assert len(text) == samples_module.MAX_CHARACTERS
    assert text.endswith("x…")


def test_without_samples_only_numbers_are_known():
    found = open_samples(None, 5)
    assert type(found) is Samples
    assert found.payload(ids(0, 3)).head == {"kind": "none"}
    assert found.words(ids(0)) is None


def test_texts_of_a_shuffled_store_follow_their_samples(tmp_path):
    Y, texts, _ = text_samples(150)
    order = np.random.default_rng(2).permutation(150)
    store = write_store(
        tmp_path / "s.zarr", Y[order], {"text": order, "category": order % 3}, {"texts": "given.txt"}
    )
    (tmp_path / "given.txt").write_text("\n".join(texts), encoding="utf-8")
    found = open_samples(store, 150)
    assert isinstance(found, StoreTexts)
    assert found.words(ids(0, 70, 149)) == [texts[order[i]] for i in (0, 70, 149)]
    labels, names = found.labels()
    assert names == ["root", "stem", "leaf"]
    np.testing.assert_array_equal(labels, order % 3)


def test_a_store_that_does_not_say_what_it_holds_is_refused(tmp_path):
    store = write_store(tmp_path / "s.zarr", np.ones((3, 4), np.float32), {}, {"texts": "gone.txt"})
    with pytest.raises(InputError, match=r"gone.txt is not beside it.* give samples=FILE .* image_shape"):
        open_samples(store, 3)


# -- tokens --


def test_each_token_is_found_in_its_text(tmp_path):
    store, texts, columns = token_store(tmp_path)
    n = len(columns["text"])
    found = open_samples(store, n)
    assert isinstance(found, TokenSamples)
    placed = found.place(np.arange(n))
    for i in range(n):
        piece = placed.texts[placed.text[i]][placed.start[i] : placed.end[i]]
        assert piece == texts[columns["text"][i]][columns["start"][i] : columns["end"][i]]


def test_places_are_counted_in_utf16_units_for_the_browser(tmp_path):
    store, texts, columns = token_store(tmp_path)
    rows = np.flatnonzero(columns["text"] == 3)
    payload = open_samples(store, len(columns["text"])).payload(rows)
    (text,) = payload.head["texts"]
    units = text.encode("utf-16-le")
    start, end = payload.arrays["sample_start"], payload.arrays["sample_end"]
    words = [units[2 * a : 2 * b].decode("utf-16-le") for a, b in zip(start, end, strict=True)]
    assert words == texts[3].split(" ")
    assert utf16("a\U0001f333b", 2) == 3


def test_a_long_text_is_cut_around_each_token(tmp_path):
    store, _, columns = token_store(tmp_path, long_text=True)
    rows = np.flatnonzero(columns["text"] == 5)
    placed = open_samples(store, len(columns["text"])).place(rows)
    assert placed.text.tolist() == [0, 1, 2]
    assert max(map(len, placed.texts[1:2])) <= samples_module.MAX_CHARACTERS
    assert placed.texts[1][placed.start[1] : placed.end[1]] == "oak"
    assert placed.texts[1].startswith("…x")
    assert placed.texts[1].endswith("y…")


def test_tokens_that_are_not_in_their_texts_are_named(tmp_path):
    store, _, columns = token_store(tmp_path)
    n = len(columns["text"])
    text = tmp_path / "tokens.txt"
    whole = text.read_text(encoding="utf-8")
    text.write_text("\n".join(["x", *whole.split("\n")[1:]]), encoding="utf-8")
    for reads in ("place", "words"):
        with pytest.raises(InputError, match=r"sample 0 of .* ends at character \d+ of text 0, which has 1; give"):
            getattr(open_samples(store, n), reads)(ids(0, 1))
    text.write_text(whole, encoding="utf-8")
    zarr.open_group(store, mode="r+")["start"][4] = -3
    with pytest.raises(StoreError, match=r"sample 4 of .* is characters -3 to"):
        open_samples(store, n).words(ids(4))


def test_patches_in_impossible_places_are_named_and_vast_photographs_left_out(tmp_path):
    store, _ = patch_store(tmp_path / "patches.zarr", size=24)
    columns = zarr.open_group(store, mode="r+")
    n = columns["row"].shape[0]
    last = np.flatnonzero(columns["image"][:] == 1)
    kept = columns["row"][:]
    columns["row"][...] = np.where(np.arange(n) == last[0], -5, kept)
    with pytest.raises(StoreError, match=rf"sample {last[0]} of .* is at row -5, column \d+ of image 1"):
        StoreImages(store, n)
    columns["row"][...] = np.where(columns["image"][:] == 1, kept + 10**6, kept)
    assert len(StoreImages(store, n).payload(np.arange(n)).head["photos"]) == 1


def test_words_of_tokens_are_whole_words(tmp_path):
    store, texts, columns = token_store(tmp_path)
    found = open_samples(store, len(columns["text"]))
    assert found.words(ids(0, 1, 2)) == texts[0].split(" ")
    assert samples_module._word("Un-believable, yes", 6, 9) == "believable"
    assert samples_module._word("yes, no", 3, 4) == ","


def test_context_holds_the_tokens_of_the_same_text_on_which_the_atom_is_active(tmp_path, rng):
    store, _, columns = token_store(tmp_path)
    rows = open_rows(store)
    Y = rows.read(0, rows.n_samples)
    codes = encode(Y, unit(rng.standard_normal((10, 16))), 3)
    reader, found = CodeReader(codes, 10), open_samples(store, rows.n_samples)
    atom, sample = ids(4, 4, 7, 2), ids(20, 55, 55, -1)
    context = find_context(reader, found, atom, sample)
    for e, (j, s) in enumerate(zip(atom[:3], sample[:3], strict=True)):
        same = np.flatnonzero(columns["text"] == columns["text"][s])
        expected = {
            int(i): float(codes["coefficient"].values[i, slot])
            for i in same
            for slot in range(3)
            if codes["atom"].values[i, slot] == j
        }
        part = slice(context.offset[e], context.offset[e + 1])
        items = zip(context.sample[part].tolist(), context.value[part].tolist(), strict=True)
        assert dict(items) == expected
    assert context.offset[4] == context.offset[3]
    shown = np.array([20, 55])
    arrays = context_payload(context, found, shown, ids(0, 1, 1, -1)).arrays
    assert arrays["context_start"].tolist() == columns["start"][context.sample].tolist()
    assert arrays["context_offset"].tolist() == context.offset.tolist()


def test_context_outside_the_piece_that_is_shown_is_left_out(tmp_path):
    store, _, columns = token_store(tmp_path, long_text=True)
    rows = open_rows(store)
    codes = encode(rows.read(0, rows.n_samples), unit(np.ones((1, 16))), 1)
    first = int(np.flatnonzero(columns["text"] == 5)[0])
    found = open_samples(store, rows.n_samples)
    context = find_context(CodeReader(codes, 1), found, ids(0), ids(first + 1))
    assert context.sample.tolist() == [first, first + 1, first + 2]
    arrays = context_payload(context, found, ids(first + 1), ids(0)).arrays
    assert arrays["context_offset"].tolist() == [0, 1]
    assert arrays["context_value"].tolist() == [context.value[1]]


def test_shuffled_tokens_have_no_context(tmp_path):
    store, _, _ = token_store(tmp_path, shuffled=True)
    rows = open_rows(store)
    codes = encode(rows.read(0, rows.n_samples), unit(np.ones((1, 16))), 1)
    found = open_samples(store, rows.n_samples)
    assert find_context(CodeReader(codes, 1), found, ids(0), ids(0)) is None
    assert found.place(ids(0)).text.tolist() == [0]


def test_a_store_of_other_samples_is_refused(tmp_path):
    store, _, columns = token_store(tmp_path)
    n = len(columns["text"])
    with pytest.raises(
        InputError, match=f"has {n} samples but the codes {n + 1}; give the store that was encoded"
    ):
        open_samples(store, n + 1)


# -- images --


def opened(content):
    return np.asarray(Image.open(io.BytesIO(content.tobytes())))


def test_patches_of_a_store_are_shown_as_they_are(tmp_path):
    store, _ = patch_store(tmp_path / "p.zarr")
    rows = open_rows(store)
    found = open_samples(store, rows.n_samples)
    assert isinstance(found, StoreImages)
    pixels = found.pixels(ids(3, 70, 200))
    expected = rows.read(0, rows.n_samples)[[3, 70, 200]].reshape(3, 8, 8, 3) * 255
    np.testing.assert_allclose(pixels, expected, atol=0.51)


def test_photographs_are_put_together_from_the_patches_that_cover_them(tmp_path):
    store, photos = patch_store(tmp_path / "p.zarr")
    found = open_samples(store, open_rows(store).n_samples)
    shown = np.unique(np.concatenate([found.also(), ids(1, 2)]))
    payload = found.payload(shown)
    assert [p["name"] for p in payload.head["photos"]] == ["china.jpg", "flower.jpg"]
    for number, photo in enumerate(photos):
        image = opened(payload.arrays[f"photo_{number}"]).astype(int)
        assert image.shape == photo.shape
        assert np.abs(image - photo).mean() < 6  # JPEG
        places = payload.arrays[f"photo_{number}_sample"]
        assert (payload.arrays["sample_photo"][places] == number).all()
        for p, r, c in zip(
            places, payload.arrays[f"photo_{number}_row"], payload.arrays[f"photo_{number}_col"], strict=True
        ):
            assert (payload.arrays["sample_row"][p], payload.arrays["sample_col"][p]) == (r, c)


def test_patches_that_are_on_no_grid_have_no_photograph(tmp_path):
    rows = np.zeros((3, 12), np.float32)
    places = {"image": [0, 0, 0], "row": [0, 1, 5], "col": [0, 3, 1]}
    store = write_store(tmp_path / "p.zarr", rows, places, {"kind": "image patches"})
    found = open_samples(store, 3)
    assert found.also() is None
    assert found.payload(ids(0, 1)).head["photos"] == []


def test_arrays_of_images_are_scaled_to_pixels(rng):
    grey = rng.uniform(-3, 5, (4, 6, 5))
    found = open_samples(grey, 4)
    assert isinstance(found, ArrayImages)
    pixels = found.pixels(ids(0, 2))
    assert pixels.shape == (2, 6, 5, 3)
    np.testing.assert_allclose(pixels[1, ..., 0], (grey[2] - grey.min()) / np.ptp(grey) * 255, atol=0.51)
    colour = rng.integers(0, 256, (3, 4, 4, 3), np.uint8)
    np.testing.assert_array_equal(open_samples(colour, 3).pixels(ids(1)), colour[[1]])


def test_images_that_do_not_fit_are_refused(rng):
    with pytest.raises(InputError, match="received 4 images for 5 samples"):
        open_samples(np.zeros((4, 2, 2)), 5)
    with pytest.raises(InputError, match=r"images of shape \(4, 2, 2, 7\)"):
        open_samples(np.zeros((4, 2, 2, 7)), 4)


@pytest.mark.parametrize("n", [1, 5, 40])
def test_sheets_hold_every_picture_in_its_cell(rng, n, monkeypatch):
    monkeypatch.setattr("dbksvd_dask.report.sprites.MAX_SIDE", 32)
    pictures = rng.integers(0, 256, (n, 6, 7, 3), np.uint8)
    payload = make_sheets("p", pictures)
    about = payload.head["p"]
    assert about["type"] == "image/png"
    for i in range(n):
        sheet, cell = divmod(i, about["per_sheet"])
        x, y = cell % about["columns"] * about["cell_width"], cell // about["columns"] * about["cell_height"]
        image = opened(payload.arrays[f"p_{sheet}"])
        assert list(image.shape[1::-1]) == about["sheets"][sheet]
        np.testing.assert_array_equal(image[y : y + 6, x : x + 7], pictures[i])


def test_large_sheets_are_jpeg(rng, monkeypatch):
    monkeypatch.setattr("dbksvd_dask.report.sprites.MAX_PNG_BYTES", 10)
    payload = make_sheets("p", np.full((4, 8, 8, 3), 90, np.uint8))
    assert payload.head["p"]["type"] == "image/jpeg"
    assert np.abs(opened(payload.arrays["p_0"]).astype(int) - 90).max() < 3


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/hosts"])
def test_a_store_cannot_name_a_file_of_texts_elsewhere(tmp_path, name):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "here").mkdir()
    store = make_store(tmp_path / "here" / "s.zarr", np.ones((1, 2), np.float32), attributes={"texts": name})
    assert texts_beside(store) is None
    (tmp_path / "here" / "s.txt").write_text("one")
    assert texts_beside(store) == str(tmp_path / "here" / "s.txt")


# -- the store that was encoded --


def test_a_store_that_moved_with_its_codes_is_found_beside_them(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    store, _, _ = token_store(here)
    encoded(here, store)
    here.rename(there)
    found = open_inputs(there / "run.zarr", there / "codes.zarr").samples
    assert found.store == str(there / "tokens.zarr")


def test_a_page_without_its_samples_says_why(tmp_path, caplog):
    store, _, _ = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    shutil.rmtree(store)
    assert open_inputs(run, codes).samples.kind == "none"
    (message,) = caplog.messages
    assert f"the store that was encoded, {store}, is not here; give samples=STORE" in message
