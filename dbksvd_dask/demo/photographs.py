"""Colour patches of photographs: real data that ships with scikit-learn.

The two sample photographs of scikit-learn (427 x 640 pixels) give 172,216 patches of 16 x 16 x 3 = 768
features at the default steps. Every patch is a row of a plan that is known before a pixel is read, so any
part of it can be cut alone, in any order, and gives the same bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dbksvd_dask.errors import InputError

__all__ = ["PatchPlan", "assemble_photo", "load_photos", "photo_patches", "plan_patches"]

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Image = npt.NDArray[np.uint8]
Aligned = dict[str, npt.NDArray[np.integer]]

# Step 2 both ways gives only 129,582 patches of the two photographs; (1, 3) gives 172,216 and still covers
# every pixel evenly: 640 - 16 is a multiple of 3.
DEFAULT_STRIDE = (1, 3)
N_CHANNELS = 3


def load_photos() -> list[Image]:
    """Return the two sample photographs of scikit-learn, without a download.

    Returns
    -------
    list of ndarray of shape (427, 640, 3), uint8
        A temple in China, then a flower.
    """
    from sklearn.datasets import load_sample_images  # slow to import: only when photographs are needed

    photos = load_sample_images().images  # type: ignore[no-untyped-call]
    return [np.asarray(image, dtype=np.uint8) for image in photos]


@dataclass(frozen=True)
class PatchPlan:
    """Which patches are cut, in which order.

    Attributes
    ----------
    patch : int
        Side of a patch in pixels.
    image, row, col : ndarray of shape (n_samples,)
        The image of each patch and the place of its upper left pixel.
    """

    patch: int
    image: npt.NDArray[np.int16]
    row: npt.NDArray[np.int32]
    col: npt.NDArray[np.int32]

    @property
    def n_samples(self) -> int:
        """Number of patches."""
        return int(self.image.shape[0])

    @property
    def n_features(self) -> int:
        """Numbers per patch: patch * patch * 3."""
        return self.patch * self.patch * N_CHANNELS

    def cut(self, images: Sequence[Image], start: int, stop: int) -> tuple[FloatArray, Aligned]:
        """Cut patches start to stop of the plan.

        Parameters
        ----------
        images : sequence of ndarray of shape (height, width, 3), uint8
            The images the plan was made for.
        start, stop : int
            Half-open range of samples.

        Returns
        -------
        rows : ndarray of shape (stop - start, n_features), float32
            Pixels scaled to [0, 1]; a row runs over pixel row, pixel column, channel.
        aligned : dict of ndarray of shape (stop - start,)
            `image` int16, `row` int32, `col` int32.
        """
        part = slice(start, stop)
        image, row, col = self.image[part], self.row[part], self.col[part]
        pixels = np.empty((len(image), self.patch, self.patch, N_CHANNELS), dtype=np.uint8)
        for index in np.unique(image):
            chosen = np.flatnonzero(image == index)
            # axes of the view: (row, col, 1, patch, patch, channel)
            window = (self.patch, self.patch, N_CHANNELS)
            view = np.lib.stride_tricks.sliding_window_view(images[int(index)], window)
            pixels[chosen] = view[row[chosen], col[chosen], 0]
        rows = pixels.reshape(len(image), self.n_features).astype(np.float32)
        rows /= np.float32(255)
        return rows, {"image": image.copy(), "row": row.copy(), "col": col.copy()}


def plan_patches(
    shapes: Sequence[tuple[int, ...]],
    patch: int = 16,
    stride: int | tuple[int, int] = DEFAULT_STRIDE,
    *,
    seed: int | None = 0,
) -> PatchPlan:
    """Plan the patches of images of these shapes.

    Parameters
    ----------
    shapes : sequence of (height, width, 3)
        Shape of every image.
    patch : int
        Side of a patch in pixels.
    stride : int or (int, int)
        Step down and step right. The last place of each axis is always taken, so with steps no larger than
        the patch every pixel is in one.
    seed : int or None
        Seed of the order, mixed over all images; None keeps image order, row by row.

    Returns
    -------
    PatchPlan
        Places of all patches.
    """
    down, right = (stride, stride) if isinstance(stride, int) else stride
    if min(patch, down, right) < 1:
        raise InputError(f"patch={patch}, stride={stride}: each must be at least 1; use e.g. patch=16, stride=2")
    if len(shapes) > np.iinfo(np.int16).max:
        raise InputError(f"{len(shapes)} images; at most {np.iinfo(np.int16).max} fit one plan: split the list")
    image, row, col = [], [], []
    for index, shape in enumerate(shapes):
        _check_shape(index, shape, patch)
        rows, cols = np.meshgrid(_starts(shape[0], patch, down), _starts(shape[1], patch, right), indexing="ij")
        image.append(np.full(rows.size, index, dtype=np.int16))
        row.append(rows.ravel().astype(np.int32))
        col.append(cols.ravel().astype(np.int32))
    if not image:
        raise InputError("no images were given; at least one is needed")
    places = np.concatenate(image), np.concatenate(row), np.concatenate(col)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(places[0]))
        return PatchPlan(patch, places[0][order], places[1][order], places[2][order])
    return PatchPlan(patch, *places)


def photo_patches(
    patch: int = 16,
    stride: int | tuple[int, int] = DEFAULT_STRIDE,
    *,
    images: Sequence[Image] | None = None,
    seed: int | None = 0,
    chunk_rows: int = 8192,
) -> Iterator[tuple[FloatArray, Aligned]]:
    """Yield patches of photographs in chunks of whole rows.

    Parameters
    ----------
    patch : int
        Side of a patch in pixels.
    stride : int or (int, int)
        Step down and step right; see `plan_patches`, which also gives the number of patches in advance.
    images : sequence of ndarray of shape (height, width, 3), uint8, optional
        Default: the two photographs of `load_photos`.
    seed : int or None
        Seed of the order of the patches; None keeps image order.
    chunk_rows : int
        Rows per chunk; the last chunk may be shorter.

    Yields
    ------
    rows : ndarray of shape (n, patch * patch * 3), float32
        Pixels scaled to [0, 1].
    aligned : dict of ndarray of shape (n,)
        `image` int16, `row` int32, `col` int32: where each patch came from.
    """
    if chunk_rows < 1:
        raise InputError(f"chunk_rows={chunk_rows}; use at least 1")
    photos = load_photos() if images is None else images
    plan = plan_patches([photo.shape for photo in photos], patch, stride, seed=seed)
    for start in range(0, plan.n_samples, chunk_rows):
        yield plan.cut(photos, start, min(start + chunk_rows, plan.n_samples))


def assemble_photo(
    patches: npt.NDArray[np.floating],
    rows: npt.NDArray[np.integer],
    cols: npt.NDArray[np.integer],
    shape: tuple[int, ...],
) -> Image:
    """Put patches back into one image; where they overlap, use the mean.

    Parameters
    ----------
    patches : ndarray of shape (n, patch * patch * 3)
        Patches in [0, 1], such as reconstructions; values outside are clipped after the mean is taken.
    rows, cols : ndarray of shape (n,)
        Upper left pixel of each patch.
    shape : (height, width, 3)
        Shape of the image. Pixels that no patch covers become black.

    Returns
    -------
    ndarray of shape (height, width, 3), uint8
        The image.
    """
    side = _side_of(patches, rows, cols, shape)
    height, width = shape[:2]
    total = np.zeros((height * width, N_CHANNELS))
    count = np.zeros(height * width)
    corner = np.asarray(rows, dtype=np.int64) * width + np.asarray(cols, dtype=np.int64)
    pixels = np.asarray(patches).reshape(-1, side * side, N_CHANNELS)
    # One pass per pixel of the patch keeps memory at one float64 image per channel, whatever the overlap.
    for index in range(side * side):
        place = corner + (index // side) * width + index % side
        count += np.bincount(place, minlength=height * width)
        for channel in range(N_CHANNELS):
            total[:, channel] += np.bincount(place, weights=pixels[:, index, channel], minlength=height * width)
    mean = total / np.maximum(count, 1)[:, None]
    scaled = np.rint(np.clip(mean, 0.0, 1.0) * 255)
    return scaled.astype(np.uint8).reshape(height, width, N_CHANNELS)


def _starts(size: int, patch: int, step: int) -> IntArray:
    """Return first pixels along one axis, the last possible one included."""
    last = size - patch
    starts = np.arange(0, last + 1, step, dtype=np.int64)
    return starts if starts[-1] == last else np.append(starts, last)


def _check_shape(index: int, shape: tuple[int, ...], patch: int) -> None:
    if len(shape) != 3 or shape[2] != N_CHANNELS:
        raise InputError(f"image {index} has shape {shape}; (height, width, 3) is needed: convert it to RGB")
    if min(shape[:2]) < patch:
        raise InputError(
            f"image {index} of {shape[0]} x {shape[1]} pixels is smaller than patch={patch}; "
            f"leave it out or use patch <= {min(shape[:2])}"
        )


def _side_of(
    patches: npt.NDArray[np.floating],
    rows: npt.NDArray[np.integer],
    cols: npt.NDArray[np.integer],
    shape: tuple[int, ...],
) -> int:
    """Return the side of the patches after checking that they fit the image."""
    n_features = patches.shape[1] if patches.ndim == 2 else -1
    side = int(np.sqrt(max(n_features, 0) // N_CHANNELS))
    if side < 1 or side * side * N_CHANNELS != n_features:
        raise InputError(f"patches of shape {patches.shape}; (n, side * side * 3) is needed, such as (n, 768)")
    if not len(patches) == len(rows) == len(cols):
        raise InputError(f"{len(patches)} patches, {len(rows)} rows, {len(cols)} cols; the same number is needed")
    if len(patches) and not (
        0 <= np.min(rows) <= np.max(rows) <= shape[0] - side
        and 0 <= np.min(cols) <= np.max(cols) <= shape[1] - side
    ):
        raise InputError(
            f"patches of side {side} reach outside an image of shape {shape}; give the shape they came from"
        )
    return side
