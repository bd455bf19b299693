"""The demo: two photographs to patches on disk, a dictionary, codes, and a photograph back from its codes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask import events
from dbksvd_dask.codes import open_codes
from dbksvd_dask.demo.photographs import DEFAULT_STRIDE, PatchPlan, assemble_photo, load_photos, plan_patches
from dbksvd_dask.errors import StoreError
from dbksvd_dask.jobs.encode import EncodeResult, encode_store
from dbksvd_dask.model import DBKSVD
from dbksvd_dask.store.activations import create_activations, open_activations
from dbksvd_dask.store.paths import remove

Image = npt.NDArray[np.uint8]

# everything the demo writes into its folder; other files there are left alone
CONTENT = ("store.zarr", "run", "codes.zarr", "atoms.png", "photograph.png", "error.png", "report.html")


@dataclass(frozen=True)
class DemoSettings:
    """Size of the demo; the defaults take a minute or two on two cores.

    Attributes
    ----------
    patch, stride : side of a patch in pixels, and steps between patches
    n_atoms, k, batch_size, n_iter, seed : see `DBKSVD`
    photograph : number of the photograph that is put together from its codes
    """

    patch: int = 16
    stride: tuple[int, int] = DEFAULT_STRIDE
    n_atoms: int = 1024
    k: int = 12
    batch_size: int = 32768
    n_iter: int = 20
    seed: int = 0
    photograph: int = 0


# To check an installation: 8374 patches.
SMALL = DemoSettings(stride=(8, 8), n_atoms=128, k=8, batch_size=4096, n_iter=5)


@dataclass(frozen=True)
class DemoResult:
    """What the demo did.

    Attributes
    ----------
    folder : where everything is
    n_samples, n_features, n_atoms, k : int
    history : last value of every column of the fit's history
    metrics : of the codes of all patches
    psnr : peak signal-to-noise ratio of the photograph from its codes, in dB
    seconds : per step
    files : what was written, by name
    """

    folder: str
    n_samples: int
    n_features: int
    n_atoms: int
    k: int
    history: dict[str, float]
    metrics: dict[str, Any]
    psnr: float
    seconds: dict[str, float]
    files: dict[str, str]


@dataclass
class _Clock:
    """Seconds per step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def run_demo(
    folder: str | os.PathLike[str],
    *,
    settings: DemoSettings | None = None,
    images: Sequence[Image] | None = None,
    force: bool = False,
    callbacks: Iterable[events.Callback] = (),
) -> DemoResult:
    """Write patches of photographs to a store, fit, encode, put one photograph together, draw.

    Parameters
    ----------
    folder : path
        Created if it does not exist.
    settings : DemoSettings, optional
    images : sequence of ndarray of shape (height, width, 3), uint8, optional
        Default: the two photographs that ship with scikit-learn.
    force : bool
        Replace the results of an earlier demo in that folder.
    callbacks : iterable of callables
        Called with each progress event.
    """
    home, how, heard = _prepare(folder, force), settings or DemoSettings(), tuple(callbacks)
    photos = load_photos() if images is None else list(images)
    store, run, codes = (os.path.join(home, name) for name in CONTENT[:3])
    clock = _Clock()
    plan = write_patches(store, photos, how, heard)
    clock.lap("patches")
    model = _fit(store, run, how, heard)
    clock.lap("fit")
    encoded = encode_store(store, run, codes, callbacks=heard)
    clock.lap("encode")
    picture = reconstruct(store, codes, model, photos[how.photograph].shape, how.photograph)
    psnr = peak_signal_to_noise(photos[how.photograph], picture)
    clock.lap("reconstruct")
    files = {"store": store, "run": run, "codes": codes}
    files |= _draw(home, model, (photos[how.photograph], picture, psnr), encoded, how)
    clock.lap("pictures")
    files["report"] = _report(home, run, codes, store)
    clock.lap("report")
    last = {str(name): float(values[-1]) for name, values in model.history_.items()}
    return DemoResult(
        home,
        plan.n_samples,
        plan.n_features,
        how.n_atoms,
        how.k,
        last,
        encoded.metrics,
        psnr,
        clock.seconds,
        files,
    )


def _prepare(folder: str | os.PathLike[str], force: bool) -> str:
    """Make the folder, or clear it of an earlier demo."""
    home = os.fspath(folder)
    there = [os.path.join(home, name) for name in CONTENT]
    there += [f"{path}.partial" for path in there[:3]]
    there = [path for path in there if os.path.lexists(path)]
    if there and not force:
        raise StoreError(
            f"{home} holds an earlier demo ({there[0]}); choose another folder, or replace it with force=True"
        )
    if os.path.lexists(home) and not os.path.isdir(home):
        raise StoreError(f"{home} is a file; give the name of a folder")
    for path in there:
        remove(path)
    os.makedirs(home, exist_ok=True)
    return home


def write_patches(
    path: str, photos: Sequence[Image], settings: DemoSettings, callbacks: Iterable[events.Callback] = ()
) -> PatchPlan:
    """Write the patches of photographs, mixed, to an activation store; image, row and column beside each."""
    shapes = [photo.shape for photo in photos]
    plan = plan_patches(shapes, settings.patch, settings.stride, seed=settings.seed)
    writer = create_activations(
        path,
        plan.n_samples,
        plan.n_features,
        "float16",
        attributes={
            "kind": "image patches",
            "patch": settings.patch,
            "stride": list(settings.stride),
            "order_seed": settings.seed,
            "image_shapes": [list(shape) for shape in shapes],
        },
        aligned={"image": "int16", "row": "int32", "col": "int32"},
    )
    for chunk in range(writer.n_chunks or 0):
        start = chunk * writer.chunk_rows
        stop = min(start + writer.chunk_rows, plan.n_samples)
        rows, aligned = plan.cut(photos, start, stop)
        writer.write_chunk(chunk, rows.astype(np.float16), dict(aligned))
        events.emit(callbacks, events.JobProgress("patches", stop, plan.n_samples, "patches"))
    writer.finish()
    return plan


def _fit(store: str, run: str, settings: DemoSettings, callbacks: Sequence[events.Callback]) -> DBKSVD:
    return DBKSVD(
        settings.n_atoms,
        settings.k,
        init="uniform",  # many patches of a sky are alike: atoms that start as samples end as near-duplicates
        batch_size=settings.batch_size,
        n_iter=settings.n_iter,
        seed=settings.seed,
        checkpoint=run,
        callbacks=callbacks,
    ).fit(store)


def reconstruct(store: str, codes: str, model: DBKSVD, shape: tuple[int, ...], photograph: int) -> Image:
    """Put one photograph together from the codes of its patches; where they overlap the mean counts.

    Parameters
    ----------
    store, codes : paths
    shape : (height, width, 3)
    photograph : its number in the aligned array `image`

    Returns
    -------
    uint8 ndarray of shape (height, width, 3)
    """
    places = open_activations(store)
    image, row, col = (np.asarray(places[name]) for name in ("image", "row", "col"))
    own = np.flatnonzero(image == photograph)
    patches = model.inverse_transform(open_codes(codes).isel(sample=own))
    return assemble_photo(np.asarray(patches), row[own], col[own], shape)


def peak_signal_to_noise(photo: Image, other: Image) -> float:
    """Return the peak signal-to-noise ratio of two pictures of 8 bits, in dB; infinite when they are equal."""
    error = float(np.mean((photo.astype(np.float64) - other.astype(np.float64)) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf


# -- pictures ---------------------------------------------------------------------------------------------


def _draw(
    home: str, model: DBKSVD, photo: tuple[Image, Image, float], encoded: EncodeResult, settings: DemoSettings
) -> dict[str, str]:
    """Draw atoms, photograph and error curve; give the files by name."""
    from dbksvd_dask.plots import plot_atoms, plot_history
    from dbksvd_dask.store.codes import open_statistics

    paths = {name: os.path.join(home, f"{name}.png") for name in ("atoms", "photograph", "error")}
    used = np.argsort(-np.asarray(open_statistics(encoded.path)["count"]), kind="stable")
    shape = (settings.patch, settings.patch, 3)
    plot_atoms(model, shape, atoms=used[:512], n_columns=32).savefig(paths["atoms"], dpi=200)
    plot_history(model).savefig(paths["error"], dpi=150)
    _draw_photograph(paths["photograph"], *photo, settings)
    return paths


def _draw_photograph(path: str, before: Image, after: Image, psnr: float, settings: DemoSettings) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    n = settings.patch**2 * 3
    titles = ("the photograph", f"from its codes: {settings.k} of {n} numbers per patch, {psnr:.1f} dB")
    for ax, picture, title in zip(figure.subplots(1, 2), (before, after), titles, strict=True):
        ax.imshow(picture, interpolation="nearest")
        ax.set_title(title)
        ax.set_axis_off()
    figure.savefig(path, dpi=150)


def _report(home: str, run: str, codes: str, store: str) -> str:
    """Write the page to look through the dictionary with."""
    from dbksvd_dask.report import write_report

    return write_report(
        run, codes, os.path.join(home, "report.html"), samples=store, title="Demo: two photographs"
    )
