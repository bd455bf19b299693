"""The page: one file, nothing from outside, no text taken for markup, and the right things in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dbksvd_dask import Dictionary, decode, encode
from dbksvd_dask.cli.main import cli
from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.evaluate.autointerp import AutointerpResult, Interpretation
from dbksvd_dask.model import DBKSVD
from dbksvd_dask.report import write_report
from dbksvd_dask.report.naming import read_explanations
from dbksvd_dask.report.pack import narrow, pack
from dbksvd_dask.store.dictionary import save_dictionary
from dbksvd_dask.store.reader import open_rows
from tests.helpers.report_parts import (
    WORDS,
    dictionary_of,
    encoded,
    patch_store,
    text_report_parts,
    token_store,
    unit,
)
from tests.naive.report import page_data, unpack


@pytest.fixture(scope="module")
def text_page(tmp_path_factory):
    dictionary, codes, texts, Y = text_report_parts()
    texts[7] = "</script><script>alert(1)</script> <img src=x onerror=alert(2)> oak & elm"
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(dictionary, codes, out, samples=texts, activations=Y, title="A <b>bold</b> title @@DATA@@")
    return out, dictionary, codes, texts


# -- packing --


def test_packed_arrays_come_back(rng):
    arrays = {
        "a": rng.integers(-5, 5, (3, 4)).astype(np.int8),
        "b": rng.standard_normal(5).astype(np.float32),
        "c": np.empty((0, 2), np.int32),
    }
    head, found = unpack(pack({"x": np.float64(np.nan), "y": np.int64(3), "z": ["é", (1, 2)]}, arrays))
    assert head == {"x": None, "y": 3, "z": ["é", [1, 2]]}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_types_that_a_browser_lacks_are_refused():
    with pytest.raises(InputError, match="array a has dtype int64; a page can hold int8"):
        pack({}, {"a": np.zeros(2, np.int64)})


@pytest.mark.parametrize(
    ("values", "dtype"), [([-1, 127], "int8"), ([128], "int16"), ([-1, 70000], "int32"), ([2**40], "float64")]
)
def test_whole_numbers_take_the_smallest_type(values, dtype):
    held = narrow(np.array(values, np.int64))
    assert held.dtype == dtype
    assert held.tolist() == values


# -- the file --


@pytest.mark.slow
def test_the_page_asks_for_nothing_outside_itself(text_page):
    html = text_page[0].read_text(encoding="utf-8")
    outside = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["'](?!#|data:)([^"']+)""", html)
    assert outside == []
    assert "@import" not in html
    assert re.findall(r"url\((?!#)[^)]*\)", html.split("<script")[0]) == []
    assert "default-src 'none'" in html


def test_text_of_samples_and_titles_is_never_markup(text_page):
    html = text_page[0].read_text(encoding="utf-8")
    assert "alert(1)" not in html
    assert html.count("<script") == 2
    assert "<title>A &lt;b&gt;bold&lt;/b&gt; title @@DATA@@" in html
    assert page_data(text_page[0])[0]["texts"][7].startswith("</script>")


def test_only_the_script_of_the_page_may_run(text_page):
    html = text_page[0].read_text(encoding="utf-8")
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html
    assert not re.search(r"\binnerHTML\b|\bouterHTML\b|insertAdjacentHTML|document\.write|\beval\(", script)


def test_identifiers_of_the_page_are_unique(text_page):
    html = text_page[0].read_text(encoding="utf-8").split('<script type="application/gzip')[0]
    found = re.findall(r'\bid="([^"]+)"', html)
    assert len(found) == len(set(found))
    # each row has three nonzeros: a histogram of one bar is left out
    assert {
        "figure-history",
        "figure-coherence",
        "figure-density",
        "figure-balance",
        "figure-errors",
    } <= set(found)


def test_figures_take_their_colours_from_the_theme(text_page):
    html = text_page[0].read_text(encoding="utf-8")
    figures = html[html.index("<figure") : html.rindex("</figure>")]
    assert "fill: var(--blue)" in figures
    assert set(re.findall(r"#[0-9a-f]{6}\b", figures)) <= {"#000000", "#ffffff"}


@pytest.mark.slow
def test_the_same_inputs_give_the_same_bytes(tmp_path):
    dictionary, codes, texts, _ = text_report_parts()
    one, two = (write_report(dictionary, codes, tmp_path / f"{n}.html", samples=texts, title="t") for n in "ab")
    assert Path(one).read_bytes() == Path(two).read_bytes()


# -- what it says --


def test_every_atom_leads_to_its_strongest_texts(text_page):
    path, _, codes, texts = text_page
    head, arrays = page_data(path)
    atom, coefficient = codes["atom"].values, codes["coefficient"].values
    for j in range(len(WORDS)):
        held = np.where(atom == j, coefficient, 0).sum(axis=1)
        strongest = int(np.argmax(held if arrays["mean"][j] >= 0 else -held))
        place = arrays["strongest_sample"][j, 0]
        assert head["texts"][place] == texts[strongest]
        assert arrays["sample"][place] == strongest


def test_keywords_name_what_an_atom_stands_for(text_page):
    head, arrays = page_data(text_page[0])
    named = [head["keywords"][j].split(", ")[0] for j in range(len(WORDS))]
    assert sum(name == word for name, word in zip(named, WORDS, strict=True)) >= 10
    assert head["keywords"][-1] == ""
    assert arrays["active"][-1] == 0


def test_samples_carry_their_five_strongest_atoms(text_page):
    head, arrays = page_data(text_page[0])
    codes = text_page[2]
    assert arrays["sample_atom"].shape[1] == 3
    for place, sample in enumerate(arrays["sample"][:50]):
        held = codes["coefficient"].values[sample]
        order = np.argsort(-np.abs(held), kind="stable")
        np.testing.assert_array_equal(arrays["sample_value"][place], held[order])
    assert head["summary"]["n_samples"] == 300


def test_the_summary_names_errors_and_dead_atoms(text_page):
    summary = page_data(text_page[0])[0]["summary"]
    assert summary["n_dead"] == 2
    assert 0 < summary["variance_explained"] <= 1
    assert summary["mean_relative_error"] < 0.5
    assert summary["n_error_samples"] == 300


@pytest.mark.slow
def test_a_report_without_samples_or_activations_is_a_report(tmp_path):
    dictionary, codes, _, _ = text_report_parts()
    head, arrays = page_data(write_report(dictionary, codes, tmp_path / "new" / "r.html"))
    assert head["kind"] == "none"
    assert head["keywords"] is None
    assert "variance_explained" not in head["summary"]
    assert arrays["strongest_sample"].shape == (14, 10)


@pytest.mark.slow
def test_a_fitted_estimator_can_be_reported(tmp_path, rng):
    Y = rng.standard_normal((300, 8)).astype(np.float32)
    model = DBKSVD(n_atoms=16, k=2, n_iter=2).fit(Y)
    head, _ = page_data(write_report(model, model.transform(Y), tmp_path / "r.html", activations=Y))
    assert head["title"] == "DBKSVD"
    assert head["about"]["Fit"]["n_atoms"] == "16"
    assert head["summary"]["variance_explained"] == pytest.approx(model.score(Y), abs=1e-4)


@pytest.mark.slow
def test_stored_codes_bring_their_errors_and_their_samples(tmp_path):
    store, texts, columns = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    head, arrays = page_data(write_report(run, codes, tmp_path / "r.html"))
    metrics = open_codes(codes).attrs["metrics"]
    assert head["summary"]["variance_explained"] == pytest.approx(metrics["variance_explained"])
    assert head["kind"] == "token"
    assert head["title"] == "run.zarr"
    assert head["classes"] == ["root", "stem", "leaf"]
    for place, sample in enumerate(arrays["sample"].tolist()):
        text = head["texts"][arrays["sample_text"][place]]
        units = text.encode("utf-16-le")
        word = units[2 * arrays["sample_start"][place] : 2 * arrays["sample_end"][place]].decode("utf-16-le")
        assert text == texts[columns["text"][sample]]
        assert word == text.split(" ")[sample - np.searchsorted(columns["text"], columns["text"][sample])]
    n_entries = sum(arrays[f"{name}_sample"].size for name in head["lists"])
    assert arrays["context_offset"].shape == (n_entries + 1,)


@pytest.mark.slow
def test_patches_bring_photographs_with_whole_codes(tmp_path):
    store, _ = patch_store(tmp_path / "p.zarr")
    run, codes = encoded(tmp_path, store, n_features=192)
    head, arrays = page_data(write_report(run, codes, tmp_path / "r.html", samples=store))
    assert head["tiles"]["n"] == 32
    assert [p["name"] for p in head["photos"]] == ["china.jpg", "flower.jpg"]
    assert arrays["photo_0_atom"].shape == (len(arrays["photo_0_sample"]), 3)


# -- explanations --


@pytest.mark.parametrize("form", ["mapping", "pairs", "result", "file", "saved result"])
def test_explanations_are_read_in_every_form(tmp_path, form):
    result = AutointerpResult((Interpretation(3, False, "trees", 0.5, True, 10),), 0.5, 0)
    record = {"atom": 3, "explanation": "trees", "score": 0.5}
    path = tmp_path / "e.json"
    path.write_text(json.dumps([record] if form == "file" else {"interpretations": [record]}))
    given = {"mapping": {3: "trees"}, "pairs": {"3": ("trees", 0.5)}, "result": result}.get(form, path)
    found = read_explanations(given, 5)
    assert list(found) == [3]
    assert found[3].text == "trees"
    assert found[3].score == 0.5 or form == "mapping"


def test_explanations_of_other_atoms_are_refused(tmp_path):
    with pytest.raises(MismatchError, match="explanations name atom 7 but the dictionary has 5"):
        read_explanations({7: "x"}, 5)
    with pytest.raises(InputError, match=r"an explanation has the fields \['atom'\]; need atom and explanation"):
        read_explanations([{"atom": 1}], 5)
    for odd in (
        [7],
        [{"atom": [], "explanation": "x"}],
        [{"atom": 1, "explanation": "x", "score": "y"}],
        {1: 5},
        3,
    ):
        with pytest.raises(InputError, match=r"explanations are not in a form that can be read .*need a list"):
            read_explanations(odd, 5)
    (tmp_path / "e.json").write_text("{")
    with pytest.raises(InputError, match=r"e\.json is not JSON"):
        read_explanations(tmp_path / "e.json", 5)


def test_explanations_reach_the_page(tmp_path):
    dictionary, codes, texts, _ = text_report_parts()
    given = {2: ("all about cedars", 0.75), 3: "elms"}
    head, _ = page_data(write_report(dictionary, codes, tmp_path / "r.html", samples=texts, explanations=given))
    assert head["explanations"] == {"2": "all about cedars", "3": "elms"}
    assert head["scores"] == {"2": 0.75, "3": None}


# -- what does not belong together --


def test_stored_codes_of_another_dictionary_are_refused(tmp_path):
    store, _, _ = token_store(tmp_path)
    _, codes = encoded(tmp_path, store)
    other = save_dictionary(
        tmp_path / "other.zarr", dictionary_of(unit(np.random.default_rng(5).standard_normal((32, 16))))
    )
    with pytest.raises(MismatchError, match=r"another dictionary \(.*run\.zarr\) of as many atoms"):
        write_report(other, codes, tmp_path / "r.html")


def test_codes_that_do_not_give_the_samples_back_are_refused(tmp_path):
    dictionary, codes, texts, Y = text_report_parts()
    with pytest.raises(MismatchError, match="they belong to another dictionary or other samples"):
        write_report(dictionary, codes, tmp_path / "r.html", samples=texts, activations=-Y)
    with pytest.raises(MismatchError, match=r"activations of shape \(10, 16\) do not fit codes of 300 samples"):
        write_report(dictionary, codes, tmp_path / "r.html", activations=Y[:10])


def test_codes_of_whitened_samples_are_compared_in_their_coordinates(tmp_path):
    """The second feature hardly counts there: what fits the first makes the error larger than the sample."""
    W = np.diag([1, 0.01]).astype(np.float32)
    dictionary = Dictionary(np.array([[0.6, 0.8]], np.float32), None, {"n_atoms": 1, "k": 1}, whitening=W)
    Y = np.tile(np.array([[1, -5]], np.float32), (20, 1))
    codes = encode(Y, dictionary)
    left = np.linalg.norm(Y - decode(codes, dictionary.atoms), axis=1)
    assert (left > np.linalg.norm(Y, axis=1)).all()
    write_report(dictionary, codes, tmp_path / "r.html", activations=Y)
    with pytest.raises(MismatchError, match="they belong to another dictionary or other samples"):
        write_report(dictionary, codes, tmp_path / "r.html", activations=-Y)


def test_what_is_no_run_or_no_codes_is_refused(tmp_path):
    dictionary, codes, _, _ = text_report_parts()
    with pytest.raises(InputError, match="int is not a dictionary; pass the folder of a fit"):
        write_report(3, codes, tmp_path / "r.html")
    with pytest.raises(InputError, match="codes are a int; pass a codes store"):
        write_report(dictionary, 3, tmp_path / "r.html")
    with pytest.raises(InputError, match="n_top=0 is too small"):
        write_report(dictionary, codes, tmp_path / "r.html", n_top=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_report(dictionary, codes, tmp_path / "file" / "r.html")


# -- the command --


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path):
    store, _, _ = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    out = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["report", run, "--codes", codes, "--out", str(out), "--n-top", "3", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["path"] == str(out)
    assert page_data(out)[1]["strongest_sample"].shape == (32, 3)


@pytest.mark.slow
def test_the_command_reads_picture_shapes(tmp_path):
    store, _ = patch_store(tmp_path / "p.zarr")
    run, codes = encoded(tmp_path, store, n_features=192)
    args = [
        "report",
        run,
        "--codes",
        codes,
        "--samples",
        store,
        "--out",
        str(tmp_path / "r.html"),
        "--image-shape",
    ]
    assert CliRunner().invoke(cli, [*args, "8x24"]).exit_code == 0
    assert page_data(tmp_path / "r.html")[0]["tiles"]["width"] == 24
    done = CliRunner().invoke(cli, [*args, "8by8"])
    assert done.exit_code == 2
    assert "'8by8' is not a shape; write 16x16x3" in done.output


@pytest.mark.slow
def test_a_picture_shape_counts_for_the_store_of_the_codes_too(tmp_path):
    """Without --samples the store is the one that the codes name."""
    store, _ = patch_store(tmp_path / "p.zarr")
    run, codes = encoded(tmp_path, store, n_features=192)
    args = ["report", run, "--codes", codes, "--out", str(tmp_path / "r.html"), "--image-shape"]
    assert CliRunner().invoke(cli, [*args, "8x24"]).exit_code == 0
    assert page_data(tmp_path / "r.html")[0]["tiles"]["width"] == 24
    (tmp_path / "r.html").unlink()
    done = CliRunner().invoke(cli, [*args, "3x3x3"])
    assert isinstance(done.exception, InputError)
    assert "shape=(3, 3, 3) does not fit 192 features" in str(done.exception)
    assert not (tmp_path / "r.html").exists()


def test_a_picture_shape_needs_a_store_of_pictures(tmp_path):
    dictionary, codes, texts, _ = text_report_parts()
    for samples in (None, texts):
        with pytest.raises(InputError, match=r"image_shape=\(2, 4\) needs the store .* samples=STORE"):
            write_report(dictionary, codes, tmp_path / "r.html", samples=samples, image_shape=(2, 4))


def test_the_command_needs_texts_for_every_sample(tmp_path):
    store, _, _ = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    n = open_rows(store).n_samples
    done = CliRunner().invoke(cli, ["report", run, "--codes", codes, "--samples", str(tmp_path / "tokens.txt")])
    assert isinstance(done.exception, InputError)
    assert f"tokens.txt has 40 texts for {n} samples" in str(done.exception)
