"""The table of a vision network: variance explained and sparse probing by class, as in the paper's second half.

    python -m pipelines.image_features features.zarr --cifar package
    python -m benchmarks.vision features.zarr --k 16 32 64 --out vision.jsonl
    python -m benchmarks.networks --table vision.jsonl

Dictionaries are trained on the first five sixths of the images (50,000 of CIFAR-10's 60,000) and measured on the
others. As in the paper, the same matching pursuit encodes with every dictionary, also with the decoders of sparse
autoencoders; what an autoencoder explains by its own encoder is a column of its own. Probing is one class against
the rest with the balanced accuracy of one, two and five atoms. Lines are added and resumed as in
`benchmarks.networks`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network_methods import METHODS
from benchmarks.network_scores import Subject, coherent
from benchmarks.network_table import table
from benchmarks.networks import Size, Table, cells, fill
from dbksvd_dask import Dictionary
from dbksvd_dask.evaluate.features import CodeFeatures
from dbksvd_dask.evaluate.metrics import fvu, variance_explained
from dbksvd_dask.evaluate.probing import probe
from dbksvd_dask.kernels.moments import moments
from dbksvd_dask.lm.reconstruct import Coder, SparseAutoencoder
from dbksvd_dask.store.reader import open_aligned, open_rows

K_SP = (1, 2, 5)
PARTS = ("variance", "coherence", "probing", "stability")
HELD_OUT = 6  # the last sixth of the images
SIZES = {"tiny": Size(24, 2, 4, 2, 0, 0), "full": Size(4096, 20, 1000, 200, 0, 0)}


@dataclass(frozen=True)
class Features:
    """A store of image features with labels, and where its dictionaries lie.

    Attributes
    ----------
    folder : Path
    hook : str
        Name of the store.
    store : Path
    k : int
        Nonzeros of the pursuit that measures; 0 where none is measured.
    """

    folder: Path
    hook: str
    store: Path
    k: int = 0

    @cached_property
    def _split(self) -> int:
        """First row of the held-out images; the tokens of an image stay together."""
        image = open_aligned(str(self.store), "image")
        number = np.asarray(image.read(0, image.shape[0])).ravel()
        n_images = int(number.max()) + 1
        return int(np.searchsorted(number, n_images - n_images // HELD_OUT))

    def train(self) -> np.ndarray:
        """Training rows."""
        return np.asarray(open_rows(str(self.store)).read(0, self._split), np.float32)

    @cached_property
    def held_out(self) -> np.ndarray:
        """Rows of the other images."""
        rows = open_rows(str(self.store))
        return np.asarray(rows.read(self._split, rows.shape[0]), np.float32)

    @cached_property
    def label(self) -> np.ndarray:
        """Classes of the held-out rows."""
        label = open_aligned(str(self.store), "label")
        return np.asarray(label.read(self._split, label.shape[0])).ravel()


def pursuit(subject: Subject, k: int) -> Coder:
    """Return matching pursuit with the atoms of a dictionary, or of an autoencoder's decoder."""
    given = subject.reconstruct
    mean = given.tensors["b_dec"] if isinstance(given, SparseAutoencoder) else given.dictionary.mean
    return Coder(Dictionary(subject.atoms, mean, {"n_atoms": len(subject.atoms), "k": k}))


def variance(subject: Subject, data: Features) -> dict[str, Any]:
    """Held-out variance explained by one pursuit for all, and by the method's own encoder."""
    rows, by_pursuit = data.held_out, pursuit(subject, data.k)
    sums = moments(rows, rows - by_pursuit(rows).astype(np.float32))
    own = moments(rows, rows - subject.reconstruct(rows).astype(np.float32))
    atom, _ = by_pursuit.codes(rows)
    return {
        "variance_explained": variance_explained(sums).value,
        "fvu": fvu(sums),
        "own_variance": variance_explained(own).value,
        "l0": float((atom >= 0).sum(axis=1).mean()),
        "held_out_rows": len(rows),
    }


def probing(subject: Subject | None, data: Features) -> dict[str, Any]:
    """Mean balanced accuracy over classes, of atoms; without a subject, of the features themselves."""
    features: Any = data.held_out
    if subject is not None:
        atom, coefficient = pursuit(subject, data.k).codes(data.held_out)
        features = CodeFeatures.from_arrays(atom, coefficient, len(subject.atoms))
    found = probe(features, data.label, k_sp=K_SP)
    means = found.balanced_accuracy.mean(axis=0)
    return {f"accuracy_{k}": float(value) for k, value in zip(K_SP, means, strict=True)}


class VisionTable(Table):
    """The table of a store of image features."""

    scores = {"variance": variance, "coherence": coherent, "probing": probing}  # noqa: RUF012

    @cached_property
    def rows(self) -> np.ndarray:
        """Training rows in random order."""
        rows: np.ndarray = self.data.train()[: self.size.rows]
        return rows[np.random.default_rng(0).permutation(len(rows))]

    def possible(self, parts: Any) -> list[str]:
        """Every part can be measured."""
        return list(parts)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run from the command line; return all lines of the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("store", type=Path, help="written by pipelines.image_features")
    add("--folder", type=Path, help="for the dictionaries (default: beside the store)")
    add("--size", choices=SIZES, default="full")
    add("--k", type=int, nargs="+", default=[16, 32, 64], help="default: 16 32 64")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--seeds", type=int, nargs="+", default=[0], help="two or more for stability (default: 0)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    for name in ("n-atoms", "n-iter", "sae-steps", "sae-trial-steps"):
        add(f"--{name}", type=int, help=f"default: {getattr(SIZES['full'], name.replace('-', '_'))}")
    add("--out", type=Path, default=Path("vision.jsonl"), help="results (default: %(default)s)")
    options = parser.parse_args(argv)
    folder = options.folder or options.store.parent
    data = Features(folder, options.store.name.removesuffix(".zarr"), options.store)
    given = {name: getattr(options, name) for name in vars(SIZES["full"]) if getattr(options, name, None)}
    size = replace(SIZES[options.size], **given, rows=len(data.train()))
    found = VisionTable(data, size, options.out, "efficientnet-lite0", options)
    for k in options.k:
        found.data = replace(data, k=k)
        fill(found, list(cells(options.methods, [k], options.seeds)), options.parts)
    print(table(found.lines))
    return found.lines


if __name__ == "__main__":
    main()
