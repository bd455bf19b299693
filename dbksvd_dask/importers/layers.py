"""Arrays of several layers, (example, layer, token, feature): one layer of them is (sequence, token, feature)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dbksvd_dask._words import listed
from dbksvd_dask.errors import InputError
from dbksvd_dask.importers.base import Array, ArrayInfo, SourceFile
from dbksvd_dask.store.spans import Span


def numbers_of(info: ArrayInfo) -> tuple[int, ...]:
    """Return what the layers of an array are called: as its file says, else 0, 1, 2."""
    return info.layers or tuple(range(info.shape[1]))


def with_layer(file: SourceFile, layer: int | None) -> SourceFile:
    """Return a file as it appears to a user who has chosen a layer, or none.

    Parameters
    ----------
    file : SourceFile
    layer : int or None
        The number of a layer. None takes the only one of an array, and leaves alone what has several.

    Raises
    ------
    InputError
        When no array of the file has layers, or none has this one.
    """
    layered = {name: info for name, info in file.arrays.items() if info.has_layers}
    if layer is None:
        single = {name: 0 for name, info in layered.items() if info.shape[1] == 1}
        return LayerFile(file, single) if single else file
    if not layered:
        raise InputError(
            f"layer={layer} does not fit: {file.path} has no array of shape (example, layer, token, feature); "
            "leave it out"
        )
    chosen = {name: numbers_of(i).index(layer) for name, i in layered.items() if layer in numbers_of(i)}
    if not chosen:
        known = listed(map(str, numbers_of(next(iter(layered.values())))))
        raise InputError(f"layer={layer} does not fit: {file.path} has the layers {known}")
    return LayerFile(file, chosen)


class LayerFile(SourceFile):
    """A file of which one layer is seen.

    Parameters
    ----------
    file : SourceFile
    chosen : dict of str to int
        The place of the layer in each array that has some.
    """

    def __init__(self, file: SourceFile, chosen: dict[str, int]) -> None:
        self.path, self._file, self._chosen = file.path, file, chosen
        self.arrays = {name: _of_layer(i) if name in chosen else i for name, i in file.arrays.items()}

    @property
    def outside(self) -> dict[str, str]:
        """Arrays whose values are in other files."""
        return self._file.outside

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        if name not in self._chosen:
            return self._file.read_items(name, start, stop)
        _, tokens, width = self.arrays[name].shape
        return self.read_rows(name, start * tokens, stop * tokens).reshape(stop - start, tokens, width)

    def read_rows(self, name: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Read flattened rows [start, stop) of the layer."""
        if name not in self._chosen:
            return self._file.read_rows(name, start, stop, out)
        parts = [self._file.read_rows(name, a, b) for a, b in self._places(name, start, stop)]
        if out is None:
            return np.concatenate(parts) if parts else self._file.read_rows(name, 0, 0)
        return np.concatenate(parts, out=out) if parts else out

    def spans(self, name: str, start: int, stop: int) -> list[Span] | None:
        """Return where flattened rows [start, stop) of the layer are: a range per example."""
        if name not in self._chosen:
            return self._file.spans(name, start, stop)
        found = [self._file.spans(name, a, b) for a, b in self._places(name, start, stop)]
        return None if None in found else [span for spans in found for span in spans or ()]

    def _places(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows of the file that are rows [start, stop) of the layer."""
        _, n_layers, tokens, _ = self._file.arrays[name].shape
        while start < stop:
            example, token = divmod(start, tokens)
            n = min(stop - start, tokens - token)
            first = (example * n_layers + self._chosen[name]) * tokens + token
            yield first, first + n
            start += n

    def identity(self) -> tuple[int, int]:
        """Return what changes when the content does."""
        return self._file.identity()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _of_layer(info: ArrayInfo) -> ArrayInfo:
    examples, _, tokens, width = info.shape
    return ArrayInfo((examples, tokens, width), info.dtype)
