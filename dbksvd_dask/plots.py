"""Pictures of a fit, a dictionary and its codes, drawn with matplotlib.

Every function returns the figure it drew on. Without `ax` it makes a figure of its own, which a notebook shows as
the last line of a cell; pyplot is never used, so no figures accumulate and no window opens.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from dbksvd_dask.codes import code_blocks
from dbksvd_dask.errors import InputError
from dbksvd_dask.evaluate.codes import OVER_DENSE, CodeMoments, density_histogram, stream_code_moments
from dbksvd_dask.evaluate.coherence import Coherence, coherence
from dbksvd_dask.evaluate.reconstruction import ReconstructionMoments

# Distinguishable in light and dark, in grey print and by the colour-blind (blue and orange first); the report page
# finds each of these in the SVG and replaces it by its own theme colour.
INK = "#3b4252"
GRID = "#d8dce6"
BLUE = "#2f6fde"
ORANGE = "#d9731a"
GREEN = "#2c9c69"
RED = "#c8365a"

__all__ = [
    "atom_tiles",
    "plot_activations",
    "plot_atoms",
    "plot_coherence",
    "plot_density",
    "plot_errors",
    "plot_history",
    "plot_l0",
    "plot_sign_balance",
]


class Plot(Figure):
    """A matplotlib figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


# -- a fit -----------------------------------------------------------------------------------------------


def plot_history(history: Any, *, figsize: tuple[float, float] = (9.0, 3.2)) -> Figure:
    """Plot the error and the variance explained per iteration, on each batch and on the held-out samples.

    Parameters
    ----------
    history : fitted DBKSVD, Dictionary, xarray.Dataset over `iteration`, or mapping of name to values
    figsize : (float, float)
        Width and height in inches.

    Returns
    -------
    matplotlib.figure.Figure
        With one pair of axes for the relative error and one for the variance explained.
    """
    rows = _history(history)
    batch = "whitened batch" if _is_whitened(history) else "batch"
    figure = Plot(figsize=figsize, layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, rows, "relative_error", "Mean relative error", batch)
    _curves(right, rows, "variance_explained", "Variance explained", batch)
    return figure


def _legend(ax: Any, corner: str, room: float = 0.0) -> None:
    """Add the legend in a given corner: matplotlib's search for the emptiest one warns when it takes long.

    `room` is the part of the axes' height to add above the bars, for the legend alone.
    """
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + room * (high - low))
    ax.legend(loc=corner, frameon=False, fontsize="small", labelcolor=INK)


def _is_whitened(fitted: Any) -> bool:
    """Tell whether figures of batches are those of whitened samples, and so not comparable with held-out ones."""
    return getattr(fitted, "whitening", None) is not None or bool(getattr(fitted, "whiten", 0))


def _curves(ax: Any, rows: dict[str, NDArray[Any]], name: str, title: str, batch: str) -> None:
    lines = (
        (f"{name}_before", f"{batch}, before update", INK, ":"),
        (name, f"{batch}, after update", BLUE, "-"),
        (f"validation_{name}", "held-out", ORANGE, "-"),
    )
    for key, label, color, style in lines:
        if key in rows and np.isfinite(rows[key]).any():
            steps = np.arange(1, len(rows[key]) + 1)
            marker = "o" if len(steps) < 12 else None
            ax.plot(steps, rows[key], style, color=color, label=label, marker=marker, markersize=3.5, lw=1.8)
    _style(ax, title, "iteration", "")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if ax.lines:
        _legend(ax, "lower right" if "variance" in name else "upper right")


def _history(given: Any) -> dict[str, NDArray[Any]]:
    """Return the history of any object that has one."""
    held = getattr(given, "history_", getattr(given, "history", given))
    if hasattr(held, "data_vars"):
        rows = {str(name): np.asarray(values) for name, values in held.data_vars.items()}
    elif isinstance(held, Mapping):
        rows = {str(name): np.asarray(values, float) for name, values in held.items()}
    else:
        raise InputError(
            f"{type(given).__name__} has no history; pass a fitted DBKSVD, its history_, or what open_dictionary "
            "gave"
        )
    if not rows or not any(len(values) for values in rows.values()):
        raise InputError("the history is empty; fit for at least one iteration")
    return rows


# -- a dictionary ----------------------------------------------------------------------------------------


def plot_coherence(dictionary: Any, *, ax: Any = None, bins: int = 60) -> Figure:
    """Draw a histogram of ``max_l |<d_j, d_l>|`` over the atoms, with the Welch bound.

    Parameters
    ----------
    dictionary : array_like of shape (n_atoms, n_features), fitted DBKSVD, Dictionary or `Coherence`
    ax : matplotlib axes, optional
    bins : int, default 60

    Returns
    -------
    matplotlib.figure.Figure
    """
    found = dictionary if isinstance(dictionary, Coherence) else coherence(_atoms(dictionary))
    figure, ax = _axes(ax)
    ax.hist(np.clip(found.absolute, 0.0, 1.0), np.linspace(0.0, 1.0, bins + 1), color=BLUE)
    ax.axvline(found.welch_bound, color=ORANGE, ls="--", lw=1.5, label=f"Welch bound {found.welch_bound:.3f}")
    ax.axvline(found.mutual, color=RED, ls=":", lw=1.5, label=f"mutual coherence {found.mutual:.3f}")
    _style(ax, "Coherence per atom", "largest |cosine| to another atom", "atoms")
    _legend(ax, "upper center", room=0.25)  # between the two lines, which are mostly near 0 and near 1
    return figure


def plot_atoms(
    dictionary: Any,
    shape: Sequence[int] | None = None,
    *,
    atoms: Sequence[int] | NDArray[np.int64] | None = None,
    n_columns: int | None = None,
    ax: Any = None,
) -> Figure:
    """Draw the atoms of an image dictionary as tiles, zero as grey, each scaled by its own largest value.

    Parameters
    ----------
    dictionary : array_like of shape (n_atoms, n_features), fitted DBKSVD or Dictionary
    shape : (height, width) or (height, width, 3), optional
        Of one atom; default: a square of 3 channels or 1.
    atoms : sequence of int, optional
        Which to draw, in this order; default: the first 256.
    n_columns : int, optional
        Tiles per row; default: about as many as rows.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib.figure.Figure
    """
    D = _atoms(dictionary)
    chosen = np.arange(min(D.shape[0], 256)) if atoms is None else np.asarray(atoms, np.int64)
    tiles = atom_tiles(D[chosen], shape)
    columns = n_columns or max(1, round(len(tiles) ** 0.5))
    figure, ax = _axes(ax, (6.0, 6.0 * -(-len(tiles) // columns) / columns))
    ax.imshow(mosaic(tiles, columns), interpolation="nearest")
    ax.set_axis_off()
    return figure


def atom_tiles(D: ArrayLike, shape: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """Turn atoms into small pictures: grey is zero, the largest absolute value of each atom is black or white.

    Parameters
    ----------
    D : array_like of shape (n_atoms, n_features)
    shape : (height, width) or (height, width, 3), optional

    Returns
    -------
    uint8 ndarray of shape (n_atoms, height, width, 3)
    """
    atoms = np.asarray(D, np.float32)
    height, width, channels = image_shape(atoms.shape[1], shape)
    scale = np.abs(atoms).max(axis=1, keepdims=True)
    level = 0.5 + 0.5 * atoms / np.where(scale > 0, scale, 1)
    tiles = np.rint(level * 255).astype(np.uint8).reshape(-1, height, width, channels)
    return np.ascontiguousarray(np.broadcast_to(tiles, (len(tiles), height, width, 3)))


def image_shape(n_features: int, shape: Sequence[int] | None = None) -> tuple[int, int, int]:
    """Return the height, width and channels (1 or 3) of samples that are pictures.

    Parameters
    ----------
    n_features : int
    shape : (height, width) or (height, width, channels), optional
        As given by the user; default: a square of 3 channels, or of 1, if it fits.
    """
    if shape is None:
        for channels in (3, 1):
            side = round((n_features / channels) ** 0.5)
            if side * side * channels == n_features:
                return side, side, channels
        raise InputError(
            f"{n_features} features are not a square picture of 3 or 1 channels; give the shape, such as "
            "shape=(16, 16, 3)"
        )
    sizes = (*shape, 1) if len(shape) == 2 else tuple(shape)
    if len(sizes) != 3 or sizes[2] not in (1, 3) or int(np.prod(sizes)) != n_features:
        raise InputError(
            f"shape={tuple(shape)} does not fit {n_features} features; need height x width or height x width x 3"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def mosaic(tiles: NDArray[np.uint8], n_columns: int, gap: int = 1) -> NDArray[np.uint8]:
    """Arrange tiles side by side on white.

    Parameters
    ----------
    tiles : uint8 ndarray of shape (n, height, width, 3)
    n_columns : int
    gap : int, default 1
        Pixels between tiles.

    Returns
    -------
    uint8 ndarray of shape (rows, columns, 3)
    """
    n, height, width, _ = tiles.shape
    n_rows = -(-n // n_columns)
    page = np.full((n_rows * (height + gap) + gap, n_columns * (width + gap) + gap, 3), 255, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = gap + i // n_columns * (height + gap), gap + i % n_columns * (width + gap)
        page[top : top + height, left : left + width] = tile
    return page


# -- codes -----------------------------------------------------------------------------------------------


def plot_density(codes: Any, *, ax: Any = None, bins_per_decade: int = 20) -> Figure:
    """Draw a histogram of the fraction of samples on which each atom is active, on a logarithmic axis.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient`, or `CodeMoments`
    ax : matplotlib axes, optional
    bins_per_decade : int, default 20

    Returns
    -------
    matplotlib.figure.Figure
    """
    held = _code_moments(codes)
    bars = density_histogram(held, bins_per_decade)
    figure, ax = _axes(ax)
    ax.bar(10.0 ** bars.edges[:-1], bars.counts, width=np.diff(10.0**bars.edges), align="edge", color=BLUE)
    ax.set_xscale("log")
    ax.axvline(OVER_DENSE, color=ORANGE, ls="--", lw=1.5, label=f"over-dense above {OVER_DENSE:g}")
    dead = f"{bars.n_dead} dead on {bars.n_samples:,} samples"
    ax.plot([], [], " ", label=dead)
    _style(ax, "Density of the atoms", "fraction of samples on which an atom is active", "atoms")
    _legend(ax, "upper left", room=0.25)  # the line is on the right
    return figure


def plot_l0(codes: Any, *, ax: Any = None) -> Figure:
    """Draw a histogram of the number of active atoms per sample.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient`, or `CodeMoments`
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib.figure.Figure
    """
    held = _code_moments(codes)
    figure, ax = _axes(ax)
    counts = held.l0_histogram
    ax.bar(np.arange(counts.size), counts, width=0.9, color=BLUE)
    mean = float(held.n_active.sum() / max(held.n_samples, 1))
    ax.axvline(mean, color=ORANGE, ls="--", lw=1.5, label=f"mean {mean:.2f}")
    _style(ax, "Active atoms per sample (L0)", "active atoms", "samples")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(ax, "upper left", room=0.1)
    return figure


def plot_sign_balance(codes: Any, *, ax: Any = None, bins: int = 41) -> Figure:
    """Draw a histogram over the atoms of the share of positive coefficients.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient`, or `CodeMoments`
    ax : matplotlib axes, optional
    bins : int, default 41

    Returns
    -------
    matplotlib.figure.Figure
    """
    balance = _code_moments(codes).sign_balance
    figure, ax = _axes(ax)
    ax.hist(balance[np.isfinite(balance)], np.linspace(0.0, 1.0, bins + 1), color=BLUE)
    ax.axvline(0.5, color=ORANGE, ls="--", lw=1.5)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    _style(ax, "Sign balance", "positive share of an atom's coefficients", "atoms")
    return figure


def plot_activations(codes: Any, atom: int, *, ax: Any = None, bins: int = 40) -> Figure:
    """Draw a histogram of the nonzero coefficients of one atom.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    atom : int
    ax : matplotlib axes, optional
    bins : int, default 40

    Returns
    -------
    matplotlib.figure.Figure
    """
    chosen, coefficient = np.asarray(codes["atom"]), np.asarray(codes["coefficient"])
    held = coefficient[(chosen == atom) & (coefficient != 0)]
    if held.size == 0:
        raise InputError(f"atom {atom} is active on none of the {chosen.shape[0]} samples; choose another")
    figure, ax = _axes(ax)
    edges = np.histogram_bin_edges(held, bins)
    ax.hist(held[held > 0], edges, color=BLUE)
    ax.hist(held[held < 0], edges, color=ORANGE)
    share = held.size / chosen.shape[0]
    _style(ax, f"Atom {atom}: active on {held.size:,} samples ({share:.2%})", "coefficient", "samples")
    return figure


def plot_errors(reconstruction: ReconstructionMoments | ArrayLike, *, ax: Any = None) -> Figure:
    """Draw a histogram of the relative error ``|y - yhat| / |y|`` over the samples.

    Parameters
    ----------
    reconstruction : ReconstructionMoments, or its `error_histogram` of shape (n_bins + 1,)
        Equal bins over [0, 1), the last one for 1 and above.
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib.figure.Figure
    """
    counts = np.asarray(getattr(reconstruction, "error_histogram", reconstruction))
    figure, ax = _axes(ax)
    edges = np.linspace(0.0, 1.0, counts.size)
    ax.bar(edges[:-1], counts[:-1], width=np.diff(edges), align="edge", color=BLUE)
    label = "median" + ("" if counts[-1] == 0 else f"; {int(counts[-1]):,} samples at 1 or above")
    ax.axvline(_median(counts, edges), color=ORANGE, ls="--", lw=1.5, label=label)
    _style(ax, "Error per sample", "relative error", "samples")
    _legend(ax, "upper right")
    return figure


def _median(counts: NDArray[Any], edges: NDArray[Any]) -> float:
    """Return the middle of the bin that holds the median."""
    place = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2.0))
    return float(edges[min(place, edges.size - 1)] + 0.5 * (edges[1] - edges[0]))


# -- common ----------------------------------------------------------------------------------------------


def _axes(ax: Any, figsize: tuple[float, float] = (4.6, 3.2)) -> tuple[Figure, Any]:
    """Return the axes to draw on and their figure."""
    if ax is not None:
        return ax.figure, ax
    figure = Plot(figsize=figsize, layout="constrained")
    return figure, figure.subplots()


def _style(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, color=INK, fontsize="medium", loc="left")
    ax.set_xlabel(x, color=INK)
    ax.set_ylabel(y, color=INK)
    ax.tick_params(colors=INK, which="both")
    ax.grid(axis="y", color=GRID, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.patch.set_alpha(0.0)
    ax.figure.patch.set_alpha(0.0)


def _atoms(dictionary: Any) -> NDArray[Any]:
    """Return the matrix of any object that has a dictionary: (n_atoms, n_features)."""
    for name in ("components_", "atoms"):
        if hasattr(dictionary, name):
            return np.asarray(getattr(dictionary, name))
    D = np.asarray(dictionary)
    if D.ndim != 2:
        raise InputError(f"a dictionary of shape {D.shape} cannot be drawn; need (n_atoms, n_features)")
    return D


def _code_moments(codes: Any) -> CodeMoments:
    if isinstance(codes, CodeMoments):
        return codes
    if not hasattr(codes, "attrs") or "atom" not in codes or "n_atoms" not in codes.attrs:
        raise InputError("these are not codes; pass what transform() or encode() returned, or code_moments(...)")
    return stream_code_moments(lambda: code_blocks(codes), int(codes.attrs["n_atoms"]))
