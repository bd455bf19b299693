"""Samples that are images: patches of a store with their photographs, features of pictures, or an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError, StoreError, brief
from dbksvd_dask.plots import image_shape
from dbksvd_dask.report.pack import Payload
from dbksvd_dask.report.samples import Ids, Samples, has_array, provenance, read_rows, require_rows
from dbksvd_dask.report.sprites import encode_image, make_sheets
from dbksvd_dask.store.reader import open_aligned, open_rows

MAX_PHOTOS = 6
# Of a photograph; browsers and JPEG draw no larger ones.
MAX_SIDE = 16_384
# Samples beyond this are not searched for the ones that cover the photographs.
MAX_PLACES = 20_000_000
# Brightness of what lies outside the cell of a token.
DIMMED = 0.4


@dataclass(frozen=True, eq=False)
class Cover:
    """Samples that cover one photograph without gaps.

    Attributes
    ----------
    image : int;  height, width : int
    sample : int64 ndarray of shape (n,);  row, col : the place of each one's upper left pixel
    """

    image: int
    height: int
    width: int
    sample: Ids
    row: NDArray[np.int64]
    col: NDArray[np.int64]


class ArrayImages(Samples):
    """Images given as an array.

    Parameters
    ----------
    images : ndarray of shape (n_samples, height, width) or (n_samples, height, width, 3)
        uint8, or floating point; the latter in [0, 1], or else scaled from its own range.
    n_samples : int
    """

    kind = "image"

    def __init__(self, images: NDArray[Any], n_samples: int) -> None:
        super().__init__(n_samples)
        if len(images) != n_samples:
            raise InputError(f"received {len(images)} images for {n_samples} samples; give one image per sample")
        sizes = images.shape[1:] if images.ndim == 4 else (*images.shape[1:], 1)
        if images.ndim > 4 or sizes[2] not in (1, 3):
            raise InputError(
                f"images of shape {images.shape}; need (n_samples, height, width) or (n_samples, height, width, 3)"
            )
        self.shape = (int(sizes[0]), int(sizes[1]), int(sizes[2]))
        self._images = images
        self._range = _value_range(images)

    def pixels(self, ids: Ids) -> NDArray[np.uint8]:
        """Return the pictures of some samples, shape (n, height, width, 3)."""
        return to_pixels(self._images[ids].reshape(len(ids), *self.shape), self._range)

    def payload(self, ids: Ids) -> Payload:
        """Pack sheets of the pictures."""
        sheets = make_sheets("pictures", self.pixels(ids))
        return Payload({"kind": self.kind, **sheets.head}, sheets.arrays)


class FeatureImages(Samples):
    """Rows that a network computed from pictures, which lie beside the store; of a token, its cell is bright.

    Parameters
    ----------
    store : path of the store, with the aligned array `image`, and `row` and `col` for tokens
    pictures : path of the file of pictures
    n_samples : int
    """

    kind = "image"
    one_per = "picture"

    def __init__(self, store: str, pictures: str, n_samples: int) -> None:
        super().__init__(n_samples, store)
        require_rows(open_rows(store), n_samples)
        try:
            self._pictures = np.load(pictures, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise StoreError(f"{pictures} is not a file of pictures: {brief(error)}") from error
        highest = int(_column(store, "image", n_samples).max(initial=-1))
        if self._pictures.ndim != 4 or highest >= len(self._pictures):
            raise StoreError(
                f"{pictures} holds an array of shape {self._pictures.shape}, and {store} needs pictures up to "
                f"number {highest}; write the store again"
            )
        self._grid = self.provenance.get("grid")

    def groups(self) -> NDArray[np.int64] | None:
        """Group the tokens of a picture."""
        return _column(str(self.store), "image", self.n_samples) if self._grid else None

    def pixels(self, ids: Ids) -> NDArray[np.uint8]:
        """Return the pictures of some samples, shape (n, height, width, 3)."""
        out = to_pixels(np.asarray(self._pictures[_column(str(self.store), "image", ids)]), (0.0, 1.0))
        if not self._grid:
            return out
        height, width = out.shape[1:3]
        n_rows, n_cols = self._grid
        row, col = (_column(str(self.store), name, ids) for name in ("row", "col"))
        inside_y = np.arange(height) * n_rows // height == row[:, None]
        inside_x = np.arange(width) * n_cols // width == col[:, None]
        inside = inside_y[:, :, None] & inside_x[:, None, :]
        return np.where(inside[..., None], out, (out * DIMMED).astype(np.uint8))

    def payload(self, ids: Ids) -> Payload:
        """Pack sheets of the pictures."""
        sheets = make_sheets("pictures", self.pixels(ids))
        return Payload({"kind": self.kind, **sheets.head}, sheets.arrays)


def pictures_beside(store: str) -> str | None:
    """Return the file of the pictures that were written with a store of their features, if it exists."""
    known = provenance(store)
    name = known.get("pictures") if known.get("kind") == "image features" else None
    path = Path(store).parent / Path(str(name)).name
    return str(path) if name and path.is_file() else None


def _column(store: str, name: str, which: int | Ids) -> NDArray[np.int64]:
    """Read an aligned array: of the first samples, or of some."""
    reader = open_aligned(store, name)
    rows = reader.read(0, which) if isinstance(which, int) else read_rows(reader, which)
    return rows.ravel().astype(np.int64)


class StoreImages(Samples):
    """Rows of an activation store that are pixels; with `image`, `row` and `col` also the photographs.

    Parameters
    ----------
    store : path of the store
    n_samples : int
    shape : (height, width) or (height, width, 3), optional
    """

    kind = "image"
    one_per = "place"

    def __init__(self, store: str, n_samples: int, shape: Sequence[int] | None = None) -> None:
        super().__init__(n_samples, store)
        self._rows = open_rows(store)
        require_rows(self._rows, n_samples)
        self.shape = image_shape(self._rows.n_features, shape)
        self._range = (0.0, 1.0) if self.provenance.get("kind") == "image patches" else None
        self._covers = self._find_covers()

    def groups(self) -> NDArray[np.int64] | None:
        """Group patches that overlap by half or more, roughly: those whose corners share a square."""
        if not self._covers:
            return None
        image, row, col = (self._column(name) for name in ("image", "row", "col"))
        down, right = row // max(self.shape[0] // 2, 1), col // max(self.shape[1] // 2, 1)
        return (image * (int(down.max()) + 1) + down) * (int(right.max()) + 1) + right

    def pixels(self, ids: Ids) -> NDArray[np.uint8]:
        """Return the pictures of some samples, shape (n, height, width, 3)."""
        rows = read_rows(self._rows, ids).astype(np.float32)
        if self._range is None:
            self._range = _value_range(rows)
        return to_pixels(rows.reshape(len(ids), *self.shape), self._range)

    def also(self) -> Ids | None:
        """Return the samples that cover the photographs."""
        return np.unique(np.concatenate([c.sample for c in self._covers])) if self._covers else None

    def payload(self, ids: Ids) -> Payload:
        """Pack sheets of the patches, the photographs, and the place of each sample."""
        pixels = self.pixels(ids)
        sheets = make_sheets("pictures", pixels)
        arrays = dict(sheets.arrays)
        photos = []
        for number, cover in enumerate(self._covers):
            places = np.searchsorted(ids, cover.sample)
            photo = _assemble(cover, pixels[places])
            arrays[f"photo_{number}"] = np.frombuffer(encode_image(photo, "JPEG"), np.uint8)
            arrays |= {f"photo_{number}_sample": places.astype(np.int32)}
            arrays |= {f"photo_{number}_{n}": getattr(cover, n).astype(np.int32) for n in ("row", "col")}
            photos.append({"width": cover.width, "height": cover.height, "name": self._photo_name(cover.image)})
        if photos:
            arrays |= self._places(ids)
        return Payload({"kind": self.kind, "photos": photos, **sheets.head}, arrays)

    def _places(self, ids: Ids) -> dict[str, NDArray[Any]]:
        """Return the photograph, row and column of each sample; photographs not on the page as -1."""
        columns = {name: self._column(name, ids) for name in ("image", "row", "col")}
        shown = np.array([c.image for c in self._covers])
        place = np.searchsorted(shown, columns["image"])
        known = shown[np.minimum(place, len(shown) - 1)] == columns["image"]
        return {
            "sample_photo": np.where(known, place, -1).astype(np.int16),
            "sample_row": columns["row"].astype(np.int32),
            "sample_col": columns["col"].astype(np.int32),
        }

    def _photo_name(self, image: int) -> str:
        names = self.provenance.get("images")
        return str(names[image]) if isinstance(names, list) and image < len(names) else f"photograph {image + 1}"

    def _column(self, name: str, ids: Ids | None = None) -> NDArray[np.int64]:
        return _column(str(self.store), name, self.n_samples if ids is None else ids)

    def _find_covers(self) -> list[Cover]:
        if self.n_samples > MAX_PLACES or not all(has_array(str(self.store), n) for n in ("image", "row", "col")):
            return []
        image, row, col = (self._column(name) for name in ("image", "row", "col"))
        wrong = np.flatnonzero(np.minimum(np.minimum(image, row), col) < 0)
        if wrong.size:
            i = int(wrong[0])
            raise StoreError(
                f"sample {i} of {self.store} is at row {row[i]}, column {col[i]} of image {image[i]}, which "
                "cannot be; restore the store or write it again"
            )
        covers = []
        for number in np.unique(image)[:MAX_PHOTOS].tolist():
            inside = np.flatnonzero(image == number)
            cover = _cover(int(number), inside, row[inside], col[inside], self.shape)
            if cover is not None:
                covers.append(cover)
        return covers


def to_pixels(values: NDArray[Any], scale: tuple[float, float]) -> NDArray[np.uint8]:
    """Scale pictures (n, height, width, 1 or 3), with values between the two ends of `scale`, to pixels."""
    if values.dtype != np.uint8:
        low, high = scale
        level = (values.astype(np.float32) - low) / (high - low if high > low else 1.0)
        values = np.rint(np.clip(level, 0.0, 1.0) * 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:3], 3)))


def _value_range(values: NDArray[Any]) -> tuple[float, float]:
    """Return [0, 1] if all values are within it, else their own smallest and largest."""
    if values.dtype == np.uint8 or values.size == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high)


def _cover(
    number: int, sample: Ids, row: NDArray[np.int64], col: NDArray[np.int64], shape: tuple[int, int, int]
) -> Cover | None:
    """Choose samples that cover a photograph: rows and columns of a grid as wide apart as patches allow."""
    rows, cols = _starts(np.unique(row), shape[0]), _starts(np.unique(col), shape[1])
    width = int(col.max()) + 1
    key = row * width + col
    order = np.argsort(key, kind="stable")
    wanted = (rows[:, None] * width + cols[None, :]).ravel()
    at = np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)
    found = order[at]
    if not np.array_equal(key[found], wanted):
        return None  # the patches do not lie on a grid
    height, width = int(row.max()) + shape[0], width - 1 + shape[1]
    if max(height, width) > MAX_SIDE:
        return None
    return Cover(number, height, width, sample[found], row[found], col[found])


def _starts(places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the fewest of some sorted places, first and last included, that leave no gap wider than `size`."""
    chosen = [int(places[0])]
    while chosen[-1] < places[-1]:
        reach = int(np.searchsorted(places, chosen[-1] + size, side="right")) - 1
        following = int(places[reach])
        chosen.append(following if following > chosen[-1] else int(places[reach + 1]))
    return np.array(chosen)


def _assemble(cover: Cover, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put the covering patches in their places: (height, width, 3)."""
    photo = np.zeros((cover.height, cover.width, 3), np.uint8)
    _, height, width, _ = pixels.shape
    for patch, r, c in zip(pixels, cover.row.tolist(), cover.col.tolist(), strict=True):
        photo[r : r + height, c : c + width] = patch
    return photo
