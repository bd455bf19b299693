"""Colour patches of images, straight into an activation store.

The two photographs that ship with scikit-learn, 172,216 patches of 16 x 16 x 3 = 768 features:

    python -m pipelines.image_patches patches.zarr

Every image of a folder, larger patches, half the bytes:

    python -m pipelines.image_patches patches.zarr --images photos/ --patch 24 --stride 4 --dtype float16

Beside each row stand its image, row and column. Run the same command again after an interruption: chunks that
are written are not cut again.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from PIL import Image

from dbksvd_dask.demo.photographs import DEFAULT_STRIDE, PatchPlan, load_photos, plan_patches
from dbksvd_dask.errors import InputError, StoreError
from pipelines.command import exit_code
from pipelines.filling import Chunk, fill_store, say

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
ALIGNED = {"image": "int16", "row": "int32", "col": "int32"}


class ImageFolder(Sequence[npt.NDArray[np.uint8]]):
    """The images of a folder as RGB, sorted by name and decoded when they are wanted.

    Parameters
    ----------
    folder : path
        Where to look, subfolders included.
    kept : int or None
        Decoded images held at a time; None holds all.
    """

    def __init__(self, folder: str | Path, kept: int | None = None) -> None:
        paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not paths:
            raise StoreError(f"no images in {folder}; files ending in {', '.join(SUFFIXES)} are needed")
        self.paths = paths
        self.names = [str(path.relative_to(folder)) for path in paths]
        self._decode = lru_cache(kept)(_decode)

    def shapes(self) -> list[tuple[int, ...]]:
        """Return (height, width, 3) of every image, from the head of its file."""
        sizes: list[tuple[int, ...]] = []
        for path in self.paths:
            with Image.open(path) as image:
                sizes.append((image.height, image.width, 3))
        return sizes

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, index: slice) -> list[npt.NDArray[np.uint8]]: ...
    def __getitem__(self, index: int | slice) -> npt.NDArray[np.uint8] | list[npt.NDArray[np.uint8]]:
        """Return an image of shape (height, width, 3), uint8."""
        if isinstance(index, slice):
            return [self._decode(path) for path in self.paths[index]]
        return self._decode(self.paths[index])


def _decode(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)


def check_memory(shapes: Sequence[tuple[int, ...]], max_memory: float) -> None:
    """Refuse to mix the patches of more images than `max_memory` GB hold: every chunk needs them all."""
    need = sum(int(np.prod(shape)) for shape in shapes) / 1e9
    if need > max_memory:
        raise InputError(
            f"mixing patches of {len(shapes)} images needs {need:.2g} GB; --max-memory: {max_memory:g}; "
            "give more or use --keep-order and mix the store afterwards with `dbksvd shuffle`"
        )


def write_store(
    path: str,
    plan: PatchPlan,
    images: Sequence[npt.NDArray[np.uint8]],
    dtype: str,
    attributes: dict[str, Any],
    **options: Any,
) -> bool:
    """Write the patches of a plan to the store `path`; see `fill_store`."""

    def make(start: int, stop: int) -> Chunk:
        rows, aligned = plan.cut(images, start, stop)
        return rows.astype(dtype, copy=False), dict(aligned)

    shape = (plan.n_samples, plan.n_features)
    return fill_store(path, make, shape, dtype, attributes=attributes, aligned=ALIGNED, **options)


def parse_stride(text: str) -> tuple[int, int]:
    """Read `2` or `1,3`.

    >>> parse_stride("2"), parse_stride("1,3")
    ((2, 2), (1, 3))
    """
    steps = [int(step) for step in text.split(",")]
    if len(steps) > 2:
        raise argparse.ArgumentTypeError(f"{text!r}: use one number or two, such as 2 or 1,3")
    return steps[0], steps[-1]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.image_patches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    step = ",".join(str(n) for n in DEFAULT_STRIDE)
    add("store", metavar="STORE", help="the store to write")
    add("--images", metavar="DIR", help="folder of images (default: two photographs of scikit-learn)")
    add("--patch", type=int, default=16, help="side of a patch in pixels (default: %(default)s)")
    add("--stride", type=parse_stride, default=DEFAULT_STRIDE, help=f"step, or down,right (default: {step})")
    add("--dtype", choices=("float16", "float32"), default="float32", help="default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the order of the patches (default: %(default)s)")
    add("--keep-order", action="store_true", help="keep the patches in the order of the images")
    add(
        "--max-memory",
        type=float,
        default=2.0,
        metavar="GB",
        help="for decoded images (default: %(default)s)",
    )
    add("--chunk-rows", type=int, help="rows per chunk (default: chunks of 16 to 32 MB)")
    add("--force", action="store_true", help="replace a store that is there")
    return parser


def run(options: argparse.Namespace) -> bool:
    """Write the store that was asked for."""
    seed = None if options.keep_order else options.seed
    images: Sequence[npt.NDArray[np.uint8]]
    if options.images:
        # in image order a chunk touches neighbours only; mixed, every chunk touches all images
        images = folder = ImageFolder(options.images, kept=2 if seed is None else None)
        shapes, names = folder.shapes(), folder.names
    else:
        images = load_photos()
        shapes, names = [image.shape for image in images], ["china.jpg", "flower.jpg"]
    if seed is not None:
        check_memory(shapes, options.max_memory)
    plan = plan_patches(shapes, options.patch, options.stride, seed=seed)
    about = {
        "kind": "image patches",
        "patch": options.patch,
        "stride": list(options.stride),
        "order_seed": seed,
        "images": names,
        "image_shapes": [list(shape) for shape in shapes],
    }
    keep = {"chunk_rows": options.chunk_rows, "overwrite": options.force, "report": say}
    return write_store(options.store, plan, images, options.dtype, about, **keep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return exit_code(run, make_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
