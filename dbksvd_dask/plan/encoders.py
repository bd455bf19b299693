"""The encoders: what each one is, what it can be combined with, and which kernel runs it.

A new encoder is one kernel module and one entry here. The names that parameters and options accept, the refused
combinations, the choice between host and device and the dispatch in `kernels.encode` follow from the entry.
"""

from __future__ import annotations

from typing import NamedTuple


class Encoder(NamedTuple):
    """One way to turn samples into codes.

    Attributes
    ----------
    meaning : what it does, in a few words
    kernel : "module:function" in `dbksvd_dask.kernels`, called as
        ``function(prods, gram, norm2, spec, atom, coefficient)``; see `kernels.encode.TileEncoder`
    nonneg : honours ``nonneg=True``
    least_squares : coefficients are least squares on their support, so ``refit=True`` adds nothing
    staged : can encode group by group, ``encode="staged"``
    weighted : can use one threshold per atom, as growing dictionaries do
    screened : can encode without a gram, ``gram="never"``
    compact : pursues on the host with a compact gram (`kernels.compact`), unless staged, weighted or refitted
    on_device : has a CUDA kernel; others run on the host, with products from the device
    """

    meaning: str
    kernel: str
    nonneg: bool = False
    least_squares: bool = False
    staged: bool = False
    weighted: bool = False
    screened: bool = False
    compact: bool = False
    on_device: bool = False


ENCODERS = {
    "mp": Encoder(
        meaning="matching pursuit",
        kernel="pursuit:encode_tile",
        nonneg=True,
        staged=True,
        weighted=True,
        screened=True,
        compact=True,
        on_device=True,
    ),
    "omp": Encoder(
        meaning="orthogonal matching pursuit",
        kernel="omp:encode_tile",
        least_squares=True,
    ),
    "fista": Encoder(
        meaning="lasso by FISTA, refitted on its k largest coefficients",
        kernel="fista:encode_tile",
        nonneg=True,
        least_squares=True,
    ),
}


def able(capability: str) -> str:
    """List the encoders that have a capability, as words of an error message.

    >>> able("staged")
    "encoder='mp'"
    """
    names = [repr(name) for name, encoder in ENCODERS.items() if getattr(encoder, capability)]
    return "encoder=" + " or ".join(names)
