"""Many small pictures in a few large ones, which a browser opens once and shows piecewise."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dbksvd_dask.report.pack import Payload

# Browsers on phones refuse pictures beyond 4096 pixels a side.
MAX_SIDE = 4096
# PNG keeps every pixel; beyond this much of it, JPEG without chroma subsampling is a fifth of the size.
MAX_PNG_BYTES = 3 << 20
JPEG_QUALITY = 88
_BLOCK = 8  # of JPEG: pictures on its grid do not bleed into each other


@dataclass(frozen=True)
class Grid:
    """Places of the cells on the sheets."""

    cell: tuple[int, int]
    columns: int
    per_sheet: int


def make_sheets(name: str, pictures: NDArray[np.uint8]) -> Payload:
    """Arrange equal pictures on sheets.

    Parameters
    ----------
    name : str
        Under which the page finds them.
    pictures : uint8 ndarray of shape (n, height, width, 3)

    Returns
    -------
    Payload
        Head `name`: sizes and the format; arrays ``name_0``, ``name_1``, ...: encoded sheets.
    """
    n, height, width, _ = pictures.shape
    cell = (_rounded(height), _rounded(width))
    columns = max(1, min(MAX_SIDE // cell[1], int(np.ceil(n**0.5)) or 1))
    grid = Grid(cell, columns, columns * max(1, MAX_SIDE // cell[0]))
    sheets = [_sheet(pictures[a : a + grid.per_sheet], grid) for a in range(0, n, grid.per_sheet)]
    encoded, kind = [encode_image(s, "PNG") for s in sheets], "image/png"
    if sum(map(len, encoded)) > MAX_PNG_BYTES:
        encoded, kind = [encode_image(s, "JPEG") for s in sheets], "image/jpeg"
    head = {
        "n": n,
        "width": width,
        "height": height,
        "cell_width": cell[1],
        "cell_height": cell[0],
        "columns": columns,
        "per_sheet": grid.per_sheet,
        "sheets": [[s.shape[1], s.shape[0]] for s in sheets],
        "type": kind,
    }
    arrays = {f"{name}_{i}": np.frombuffer(content, np.uint8) for i, content in enumerate(encoded)}
    return Payload({name: head}, arrays)


def encode_image(pixels: NDArray[np.uint8], kind: str) -> bytes:
    """Encode a picture of shape (height, width, 3) as PNG or JPEG bytes."""
    options: dict[str, Any] = {"optimize": True}
    if kind == "JPEG":
        options |= {"quality": JPEG_QUALITY, "subsampling": 0}
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def _sheet(pictures: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
    """Lay pictures out, each continued by its edge pixels up to the end of its cell."""
    n, height, width, _ = pictures.shape
    down, right = grid.cell[0] - height, grid.cell[1] - width
    padded = np.pad(pictures, ((0, 0), (0, down), (0, right), (0, 0)), mode="edge")
    rows = -(-n // grid.columns)
    filled = np.zeros((rows * grid.columns, *grid.cell, 3), np.uint8)
    filled[:n] = padded
    tiled = filled.reshape(rows, grid.columns, *grid.cell, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiled.reshape(rows * grid.cell[0], grid.columns * grid.cell[1], 3))


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
