"""The arrays of a store: chunks along the samples in one flat folder, and small arrays in one chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.base.late import late

if TYPE_CHECKING:
    import zarr
else:
    zarr = late("zarr")


def chunk_key(chunk: int, tail: Sequence[int]) -> str:
    """Name the file of a chunk: one flat folder per array, not a folder per chunk.

    >>> chunk_key(7, (768,)), chunk_key(7, ())
    ('c.7.0', 'c.7')
    """
    return f"c.{chunk}" + ".0" * len(tail)


CHUNK_KEYS = {"name": "default", "separator": "."}  # what Zarr calls the same


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store, in chunks along the samples.

    Attributes
    ----------
    name : str
    dtype : str
        NumPy name of the stored dtype.
    tail : tuple of int
        Shape of the entry of one sample.
    dims : tuple of str
        Names of the dimensions after `sample`.
    attributes : dict
        Kept with the array.
    """

    name: str
    dtype: str
    tail: tuple[int, ...]
    dims: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of the entry of one sample."""
        return math.prod(self.tail) * np.dtype(self.dtype).itemsize

    def create(
        self, group: zarr.Group, n_samples: int, chunk_rows: int, compressor: str | None, fill_value: float = 0
    ) -> None:
        """Make the empty array; `fill_value` is what Zarr itself shows where there is no chunk."""
        codecs: dict[str | None, Any] = {
            None: None,
            "zstd": zarr.codecs.ZstdCodec(level=1),
            "blosc": zarr.codecs.BloscCodec(
                cname="lz4", shuffle="shuffle", typesize=np.dtype(self.dtype).itemsize
            ),
        }
        group.create_array(
            self.name,
            shape=(n_samples, *self.tail),
            chunks=(chunk_rows, *self.tail),
            dtype=self.dtype,
            compressors=codecs[compressor],
            filters=None,
            fill_value=fill_value,
            dimension_names=("sample", *self.dims),
            attributes=self.attributes,
            chunk_key_encoding=CHUNK_KEYS,
            config={"write_empty_chunks": True, "order": "C"},
        )


def put_array(
    group: zarr.Group, name: str, values: npt.NDArray[Any], dims: tuple[str, ...], attributes: dict[str, Any]
) -> None:
    """Write a small array in one chunk."""
    group.create_array(
        name,
        data=values,
        chunks=values.shape,
        compressors=None,
        overwrite=True,
        dimension_names=dims,
        attributes=attributes,
        config={"write_empty_chunks": True, "order": "C"},
    )
