"""What dictionaries, codes and estimators show of themselves in a notebook."""

from __future__ import annotations

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, _words
from dbksvd_dask.codes import make_codes
from dbksvd_dask.errors import InputError
from tests.helpers.report_parts import dictionary_of, unit


@pytest.fixture(scope="module")
def fitted():
    Y = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    return DBKSVD(n_atoms=16, k=2, n_iter=2).fit(Y), Y


def test_a_dictionary_shows_size_parameters_and_curves(rng):
    dictionary = dictionary_of(unit(rng.standard_normal((1200, 8))), encoder="<mp>")
    shown = dictionary._repr_html_()
    assert "1,200" in shown
    assert "held-out <b>0.3500</b>" in shown
    assert "<polyline" in shown
    assert "&lt;mp&gt;" in shown
    assert "<mp>" not in shown


def test_an_estimator_shows_its_fit_once_it_is_fitted(fitted):
    model, _ = fitted
    shown = model._repr_mimebundle_()["text/html"]
    assert "16 atoms x 8 features" in shown
    assert "n_iter" in shown
    white = DBKSVD(n_atoms=16, k=2, n_iter=2, whiten=0.5).fit(fitted[1])
    assert "error, batch" in shown
    assert "error, whitened batch" in white._repr_mimebundle_()["text/html"]
    assert "error, whitened batch" in white.to_dictionary()._repr_html_()
    assert "Fitted</strong>" not in DBKSVD(n_atoms=4, k=1)._repr_mimebundle_()["text/html"]


def test_codes_are_summed_up_by_their_accessor(fitted):
    model, Y = fitted
    codes = model.transform(Y)
    shown = codes.dbksvd._repr_html_()
    assert "300" in shown
    assert "2.00 (2 to 2)" in shown
    assert codes.dbksvd.moments().n_active.sum() == 600
    assert "l0_mean=2.0" in repr(codes.dbksvd)


def test_lazy_codes_give_the_same_summary(fitted):
    model, Y = fitted
    codes = model.transform(Y)
    assert vars(codes.chunk({"sample": 70}).dbksvd.summary()) == vars(codes.dbksvd.summary())


def test_codes_that_do_not_say_their_atoms_are_refused():
    codes = make_codes(np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32), {})
    with pytest.raises(InputError, match="these are no codes"):
        codes.dbksvd.summary()


def test_a_sparkline_spans_its_box():
    assert "1.0,18.0" in _words.sparkline([1.0, 3.0], width=50, height=20)
    assert "49.0,2.0" in _words.sparkline([1.0, 3.0], width=50, height=20)
    assert "nan" not in _words.sparkline([1.0, np.nan, 3.0])
    assert "aria-label='&lt;b&gt;'" in _words.sparkline([1.0], label="<b>")


def test_a_dictionary_in_one_line(tmp_path):
    from dbksvd_dask.dictionary import Dictionary

    D = Dictionary(np.eye(4, 6, dtype=np.float32), None, {"n_atoms": 4, "k": 2}, source="store.zarr", iteration=3)
    assert repr(D) == "<Dictionary: 4 atoms of 6 features, k=2, 3 batches, fitted on store.zarr>"
