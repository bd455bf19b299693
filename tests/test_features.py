"""Features in a notebook: what they show, find and answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.codes import codes_to_csr
from dbksvd_dask.errors import InputError
from dbksvd_dask.features import open_features
from tests.helpers.report_parts import WORDS, encoded, patch_store, text_report_parts, token_store


@pytest.fixture(scope="module")
def parts():
    dictionary, codes, texts, Y = text_report_parts()
    texts[7] = "<script>alert(1)</script> oak & elm"
    return open_features(dictionary, codes, texts, explanations={3: ("elm trees", 0.5)}), codes, texts, Y


def test_a_feature_has_the_samples_of_its_largest_coefficients(parts):
    features, codes, texts, _ = parts
    dense = codes_to_csr(codes).toarray()
    for j in range(len(WORDS)):
        own = features.material.facts.codes.sign[j] * dense[:, j]
        best = features[j].strongest[0]
        assert own[best.sample] == own.max()
        assert best.excerpt.text == texts[best.sample]
        assert features[j].n_active == np.count_nonzero(dense[:, j])
        for entry in (e for group in features[j].quarters for e in group):
            assert entry.value == pytest.approx(dense[entry.sample, j])
    assert features[3].name == "elm trees"
    assert math.isnan(features[12].mean)


def test_html_escapes_texts_and_holds_no_script(parts):
    features, *_ = parts
    shown = "".join(f._repr_html_() for f in features) + features._repr_html_() + features.on(7)._repr_html_()
    shown += features.search("alert")._repr_html_()
    assert "&lt;script&gt;alert" in shown
    assert "<script" not in shown
    assert "Never active on 300 samples" in features[12]._repr_html_()


def test_search_puts_whole_words_of_names_first_then_counts_texts(parts):
    features, *_ = parts
    found = features.search("elm", 100)
    assert found[0].atom == 3
    counts = [m.n_texts for m in found.matches if not m.whole]
    assert counts == sorted(counts, reverse=True)
    assert len(features.search("no such word")) == 0
    assert "elm" in features.search("elm")._repr_html_()


def test_a_row_its_vector_and_its_text_have_the_same_features():
    dictionary, codes, _, Y = text_report_parts(dead=0)
    texts = [f"text {i}" for i in range(len(Y))]
    features = open_features(dictionary, codes, texts)
    of = dict(zip(texts, Y, strict=True))
    asked = open_features(features.dictionary, codes, texts, capture=of.get)
    for row in (0, 5):
        expected = features.on(row).strength
        for found in (features.on(Y[row]), asked.on(texts[row])):
            assert list(found.strength) == list(expected)
            np.testing.assert_allclose(list(found.strength.values()), list(expected.values()), rtol=1e-5)
    assert features.on(0).to_pandas().index.tolist() == features.on(0).atoms


def test_features_of_a_sample_are_ranked_by_coefficient_times_rarity():
    dictionary, codes, _, Y = text_report_parts(dead=0)
    features = open_features(dictionary, codes, [f"text {i}" for i in range(len(Y))])
    shown = [features.on(row) for row in range(40)]
    table = features.to_pandas()
    for active in shown:
        telling = [abs(x) * math.log(1 / table.density[j]) for j, x in active.strength.items()]
        assert telling == pytest.approx(sorted(telling, reverse=True), abs=0.02)
        raw = dict(zip(active.atom[0].tolist(), active.coefficient[0].tolist(), strict=True))
        assert all(x == raw[j] for j, x in active.strength.items())
    by_size = [sorted(active.strength.values(), key=abs, reverse=True) for active in shown]
    assert [list(active.strength.values()) for active in shown] != by_size
    assert list(shown[0].to_pandas().columns) == ["coefficient", "density", "name"]
    assert "density" in shown[0]._repr_html_()
    assert "%" in repr(shown[0])


def test_nearest_are_the_largest_cosines(parts):
    features, *_ = parts
    D = features.dictionary.atoms
    cosine = np.abs(D @ D[2])
    cosine[2] = -1
    assert features.nearest(2, 3).atoms == np.argsort(-cosine)[:3].tolist()
    assert features.nearest(2, 12).atoms[:3] == features.nearest(2, 3).atoms
    assert features.nearest(D[2] * 5).atoms[0] == 2


def test_tables_agree_with_the_features(parts):
    features, *_ = parts
    table = features.to_pandas()
    assert table.index.tolist() == list(range(len(features)))
    assert table["name"].tolist() == [f.name for f in features]
    assert dict(features.to_xarray().sizes)["feature"] == len(features)


def test_tokens_and_pictures_are_shown(tmp_path):
    store, _, _ = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    features = open_features(run, codes)
    assert {e.excerpt.token for f in features for e in f.strongest} <= {*WORDS, "\U0001f333"}
    (tmp_path / "p").mkdir()
    store, _ = patch_store(tmp_path / "p" / "p.zarr")
    run, codes = encoded(tmp_path / "p", store, n_features=192)
    assert "data:image/png;base64," in open_features(run, codes)[0]._repr_html_()


def test_a_running_fit_is_opened_at_its_newest_checkpoint(tmp_path):
    Y = text_report_parts()[3]
    run = str(tmp_path / "run")
    DBKSVD(8, 2, n_iter=1, batch_size=256, checkpoint=run).fit(Y)
    features = open_features(run, activations=Y, max_samples=100)
    DBKSVD(8, 2, n_iter=3, batch_size=256, checkpoint=run).fit(Y, resume=True)
    assert (features.iteration, features.refresh().iteration) == (1, 3)
    expected = encode(Y[:100], run)
    assert features.refresh()[0].n_active == np.count_nonzero(codes_to_csr(expected).toarray()[:, 0])


def test_explorer_is_the_page_in_a_frame(parts, tmp_path):
    features, *_ = parts
    shown = features.explore(500)._repr_html_()
    assert shown.startswith("<iframe")
    assert "height:500px" in shown
    features.write_report(tmp_path / "page.html")
    assert "<!doctype html>" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda f: f["birds"], r"use search\('birds'\)"),
        (lambda f: f.on(9999), "there are samples 0 to 299"),
        (lambda f: f.on("a text"), "capture=FUNCTION"),
        (lambda f: f.on(np.ones(3)), "n_features=16"),
        (lambda f: f.steer(3, "The"), "model=PATH"),
        (lambda f: f.nearest(np.zeros(16)), "not all zero"),
        (lambda f: open_features(f.dictionary), "neither codes nor activations"),
    ],
)
def test_wrong_questions_say_what_to_type(parts, ask, message):
    with pytest.raises(InputError, match=message):
        ask(parts[0])
