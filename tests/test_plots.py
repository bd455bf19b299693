"""Plots draw what they are given, on figures of their own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbksvd_dask import DBKSVD, plots
from dbksvd_dask.codes import make_codes
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.codes import code_moments
from dbksvd_dask.evaluate.coherence import coherence


@pytest.fixture(scope="module")
def fitted():
    Y = np.random.default_rng(3).standard_normal((400, 12)).astype(np.float32)
    model = DBKSVD(n_atoms=24, k=3, n_iter=3, validation=40).fit(Y)
    return model, model.transform(Y)


def heights(ax):
    return np.array([bar.get_height() for bar in ax.patches])


def test_history_has_one_line_per_curve_with_one_point_per_iteration(fitted):
    figure = plots.plot_history(fitted[0])
    error, explained = figure.axes
    assert [line.get_label() for line in error.lines] == [
        "batch, before update",
        "batch, after update",
        "held-out",
    ]
    np.testing.assert_array_equal(error.lines[1].get_ydata(), fitted[0].history_["relative_error"])
    np.testing.assert_array_equal(explained.lines[2].get_xdata(), [1, 2, 3])


@pytest.mark.parametrize("form", ["estimator", "dictionary"])
def test_history_of_a_whitened_fit_says_which_figures_are_not_those_of_samples(rng, form):
    Y = rng.standard_normal((300, 8)).astype(np.float32)
    model = DBKSVD(12, 3, n_iter=2, whiten=0.5).fit(Y)
    figure = plots.plot_history(model if form == "estimator" else model.to_dictionary())
    assert [line.get_label() for line in figure.axes[0].lines] == [
        "whitened batch, before update",
        "whitened batch, after update",
        "held-out",
    ]


@pytest.mark.parametrize("form", ["dataset", "dict"])
def test_history_is_read_from_dataset_and_dict(fitted, form):
    history = fitted[0].history_
    given = history if form == "dataset" else {str(k): v.values.tolist() for k, v in history.items()}
    assert len(plots.plot_history(given).axes[0].lines) == 3


def test_history_without_validation_leaves_that_curve_out():
    figure = plots.plot_history({"relative_error": [0.5, 0.4], "validation_relative_error": [np.nan, np.nan]})
    assert [line.get_label() for line in figure.axes[0].lines] == ["batch, after update"]


@pytest.mark.parametrize(("given", "message"), [(3, "int has no history"), ({}, "the history is empty")])
def test_history_of_nothing_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        plots.plot_history(given)


def test_coherence_counts_every_atom_and_marks_the_welch_bound(make_dictionary):
    D = make_dictionary(40, 10)
    found = coherence(D)
    ax = plots.plot_coherence(D).axes[0]
    assert heights(ax).sum() == 40
    assert ax.lines[0].get_xdata()[0] == pytest.approx(found.welch_bound)
    assert ax.lines[1].get_xdata()[0] == pytest.approx(found.mutual)


def test_every_legend_has_a_corner(fitted, monkeypatch):
    """Matplotlib's search for the emptiest corner warns when it takes a second, as it may on a busy machine."""
    corners, legend = [], Axes.legend
    monkeypatch.setattr(Axes, "legend", lambda ax, **how: corners.append(how["loc"]) or legend(ax, **how))
    model, codes = fitted
    for draw, given in (
        (plots.plot_history, model),
        (plots.plot_coherence, model),
        (plots.plot_density, codes),
        (plots.plot_l0, codes),
        (plots.plot_errors, np.array([3, 4, 1])),
    ):
        draw(given)
    assert len(corners) == 6
    assert "best" not in corners


def test_density_counts_atoms_in_use_and_names_the_dead():
    codes = make_codes(np.array([[0, 1], [0, -1], [0, 2]], np.int32), np.ones((3, 2), np.float32), {"n_atoms": 5})
    ax = plots.plot_density(codes).axes[0]
    assert heights(ax).sum() == 3
    assert "2 dead on 3 samples" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_l0_and_sign_balance_agree_with_the_moments(fitted):
    codes = fitted[1]
    moments = code_moments(codes["atom"].values, codes["coefficient"].values, 24)
    np.testing.assert_array_equal(heights(plots.plot_l0(codes).axes[0]), moments.l0_histogram)
    assert heights(plots.plot_sign_balance(moments).axes[0]).sum() == np.isfinite(moments.sign_balance).sum()


def test_activations_counts_the_samples_of_one_atom(fitted):
    codes = fitted[1]
    atom = int(codes["atom"].values[0, 0])
    used = (codes["atom"].values == atom) & (codes["coefficient"].values != 0)
    ax = plots.plot_activations(codes, atom).axes[0]
    assert heights(ax).sum() == used.sum()
    with pytest.raises(InputError, match="atom 99 is active on none of the 400 samples"):
        plots.plot_activations(codes, 99)


def test_errors_mark_the_bin_of_the_median():
    counts = np.zeros(101, np.int64)
    counts[[20, 40, 60]] = 1, 2, 1
    ax = plots.plot_errors(counts).axes[0]
    assert heights(ax).sum() == 4
    assert ax.lines[0].get_xdata()[0] == pytest.approx(0.405)


def test_plots_draw_on_given_axes(fitted):
    figure = Figure()
    ax = figure.subplots()
    assert plots.plot_l0(fitted[1], ax=ax) is figure
    assert len(ax.patches) == 4


def test_atom_tiles_show_zero_as_grey_and_the_largest_value_as_white():
    D = np.zeros((2, 12), np.float32)
    D[0, 0], D[1, :2] = 1.0, (-0.8, 0.6)
    tiles = plots.atom_tiles(D)
    assert tiles.shape == (2, 2, 2, 3)
    assert tiles[0, 0, 0].tolist() == [255, 128, 128]
    assert tiles[1, 0, 0].tolist() == [0, 223, 128]


def test_grey_tiles_have_three_equal_channels():
    tiles = plots.atom_tiles(np.eye(4, dtype=np.float32), (2, 2))
    assert tiles.shape == (4, 2, 2, 3)
    assert (tiles == tiles[..., :1]).all()


def test_atoms_are_laid_out_row_by_row(make_dictionary):
    D = make_dictionary(6, 12)
    image = plots.plot_atoms(D, atoms=[4, 1, 5], n_columns=2).axes[0].images[0].get_array()
    assert image.shape == (7, 7, 3)
    np.testing.assert_array_equal(image[1:3, 4:6], plots.atom_tiles(D)[1])
    np.testing.assert_array_equal(image[4:6, 1:3], plots.atom_tiles(D)[5])


@pytest.mark.parametrize(
    ("n_features", "shape", "message"),
    [
        (10, None, "10 features are not a square picture"),
        (12, (2, 2, 2), r"shape=\(2, 2, 2\) does not fit 12 features"),
        (12, (5, 5), r"shape=\(5, 5\) does not fit 12 features"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(n_features, shape, message):
    with pytest.raises(InputError, match=message):
        plots.image_shape(n_features, shape)


def test_what_is_not_codes_or_a_dictionary_is_refused():
    with pytest.raises(InputError, match="these are not codes"):
        plots.plot_density(np.zeros(3))
    with pytest.raises(InputError, match=r"a dictionary of shape \(3,\) cannot be drawn"):
        plots.plot_atoms(np.zeros(3))


def test_a_figure_shows_itself_as_png(fitted):
    assert plots.plot_l0(fitted[1])._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_pyplot_is_never_imported():
    code = (
        "import sys, dbksvd_dask.plots as p; p.plot_errors([1, 2, 0]); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
