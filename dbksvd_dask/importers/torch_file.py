"""`.pt` and `.pth` files with tensors, when torch is installed; loaded with weights_only, so no code runs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.importers.base import Array, ArrayInfo, Hints, SourceFile

# dtypes that NumPy has under the same name; bfloat16 is read as bits
KNOWN = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


class TorchFile(SourceFile):
    """A file written by `torch.save`: one tensor, a list with one per text, or nested dicts and tuples of them."""

    def __init__(self, path: str, hints: Hints) -> None:
        try:
            import torch
        except ImportError as error:
            raise InputError(f"reading {path} needs torch: install it, or save the tensor with np.save") from error
        self.path = path
        self._torch = torch
        self._tensors: dict[str, Any] = dict(_tensors(self._load(), torch))
        self.arrays = {}
        for name, tensor in self._tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype in KNOWN:
                self.arrays[name] = ArrayInfo(tuple(tensor.shape), dtype)

    def _load(self) -> Any:
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        try:
            try:
                return self._torch.load(self.path, mmap=True, **options)
            except RuntimeError:  # a file in the format before torch 1.6 cannot be mapped
                return self._torch.load(self.path, **options)
        except pickle.UnpicklingError as error:  # its message advises to run code of the file
            raise StoreError(
                f"{self.path} cannot be loaded as tensors (weights only): it holds other objects, or is damaged; "
                "save the tensors alone, with torch.save or np.save"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, LookupError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise StoreError(f"{self.path} is not a readable torch file, or truncated: {reason}") from error

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read entries [start, stop) along the first axis."""
        part = self._tensors[name][start:stop].detach().contiguous()
        if part.dtype == self._torch.bfloat16:
            bits: Array = part.view(self._torch.int16).numpy().view(np.uint16)
            return bits
        block: Array = part.numpy()
        return block


class _Joined:
    """Tensors of a list, one per text, as one: rows of the same width, joined when they are read."""

    def __init__(self, tensors: list[Any], torch: Any) -> None:
        self._tensors, self._torch = tensors, torch
        self._ends = np.cumsum([len(tensor) for tensor in tensors])
        self.dtype = tensors[0].dtype
        self.shape = (int(self._ends[-1]), *tensors[0].shape[1:])

    def __getitem__(self, rows: slice) -> Any:
        first, last = np.searchsorted(self._ends, [rows.start, rows.stop - 1], side="right")
        before = int(self._ends[first - 1]) if first else 0
        joined = self._torch.cat([tensor.detach() for tensor in self._tensors[first : last + 1]])
        return joined[rows.start - before : rows.stop - before]


def _join(tensors: list[Any], torch: Any) -> _Joined | None:
    """Join the tensors of a list if they differ only in length; otherwise return None."""
    if any(t.layout != torch.strided or not t.ndim or t.dtype != tensors[0].dtype for t in tensors):
        return None
    if all(t.ndim == 1 and t.is_floating_point() and len(t) == len(tensors[0]) for t in tensors):
        return _Joined([t[None] for t in tensors], torch)  # one vector per text
    if all(t.ndim >= 2 and t.shape[-1] == tensors[0].shape[-1] for t in tensors):
        return _Joined(
            [t.reshape(-1, t.shape[-1]) for t in tensors], torch
        )  # (token, feature) or (1, token, feature)
    return _Joined(tensors, torch) if all(t.ndim == 1 for t in tensors) else None


def _tensors(node: Any, torch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts and lists by name; a list with one tensor per text is one tensor.

    Not so a tuple: models return one of their layers.
    """
    if isinstance(node, torch.Tensor):
        if node.layout == torch.strided and node.ndim:
            yield name, node
        return
    if isinstance(node, list) and len(node) > 1:
        if all(isinstance(value, torch.Tensor) for value in node):
            joined = _join(node, torch)
            if joined is not None:
                yield name, joined
                return
        elif all(isinstance(value, dict) and value.keys() == node[0].keys() for value in node):
            for key in node[0]:
                yield from _tensors([value[key] for value in node], torch, f"{name}.{key}" if name else str(key))
            return
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, torch, f"{name}.{key}" if name else str(key))


def open_torch(path: str, hints: Hints) -> SourceFile:
    """Open a file of tensors."""
    return TorchFile(path, hints)
