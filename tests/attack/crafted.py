"""Files made to mislead: headers that parse and lie, for each format."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

Craft = Callable[[Path, np.random.Generator], None]

SHAPES = (
    (-1, 8),
    (0, 8),
    (60, 0),
    (10**12, 8),
    (60, 10**9),
    (2**62, 4),
    (2**63, 8),
    (10**30, 8),
    (1, 2, 3, 4),
    (),
    (480,),
    (61, 8),
    (59, 8),
)
DTYPES = (
    "<f4",
    ">f4",
    "<f2",
    "<f8",
    "<i4",
    "|b1",
    "|O",
    "<c8",
    "<U3",
    "<M8[s]",
    "|V2",
    "|V3",
    "|S4",
    "<f16",
    "x9",
)
NAMES = ("", "../up", "a/b/c", "\x00", "\u2028", "\x1b[2J", "x" * 5_000, "activations", "n\nm")


def _one(options: tuple[Any, ...], rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]


def _npy(rng: np.random.Generator) -> bytes:
    """An .npy file with a header of any shape, dtype and spelling."""
    shape, dtype = _one((*SHAPES, (60, 8)), rng), _one(DTYPES, rng)
    spellings = (
        f"{{'descr': '{dtype}', 'fortran_order': {bool(rng.integers(2))}, 'shape': {shape}, }}",
        f"{{'descr': [('a', '{dtype}'), ('b', '<f4')], 'fortran_order': False, 'shape': {shape}}}",
        f"{{'descr': '{dtype}', 'shape': {shape}}}",
        "{" * 400,
        "__import__('os').getcwd()",
        f"{{'descr': '{dtype}', 'fortran_order': 1, 'shape': '60'}}",
        "(" * 3_000 + ")" * 3_000,
    )
    header = (spellings[0] if rng.random() < 0.6 else _one(spellings, rng)).encode()
    version = _one((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x07\x00"), rng)
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header) % 65_536)
    return b"\x93NUMPY" + version + length + header + rng.standard_normal(480).astype("<f4").tobytes()


def npy(path: Path, rng: np.random.Generator) -> None:
    """Write a misleading .npy file."""
    path.write_bytes(_npy(rng))


def npz(path: Path, rng: np.random.Generator) -> None:
    """Write an archive of misleading members, some under odd names, some packed."""
    packing = _one((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA), rng)
    with zipfile.ZipFile(path, "w", packing) as archive:
        for _ in range(int(rng.integers(0, 3))):
            archive.writestr(f"{_one((*NAMES[1:3], 'acts', 'b'), rng)}.npy", _npy(rng))
        if rng.random() < 0.5:
            buffer = io.BytesIO()
            np.save(buffer, np.ones((60, 8), _one(("f4", "f2", "i4"), rng)))
            archive.writestr("good.npy", buffer.getvalue()[: int(rng.integers(1, 3_000))])


def safetensors(path: Path, rng: np.random.Generator) -> None:
    """Write a header of tensors that overlap, end outside or have no bytes."""
    tensors: dict[str, Any] = {}
    for _ in range(int(rng.integers(0, 4))):
        shape = list(_one((*SHAPES, (60, 8)), rng))
        offsets = _one(([0, 1920], [-8, 1912], [0, 2**70], [1920, 0], [8, 1928], "all", [0]), rng)
        dtype = _one(("F32", "F16", "BF16", "I64", "F8_E4M3", "Q7", 5, None), rng)
        tensors[_one(NAMES, rng)] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    if rng.random() < 0.3:
        tensors["__metadata__"] = _one(({"a": "b"}, 7, [1]), rng)
    header = json.dumps(tensors if rng.random() < 0.9 else [tensors]).encode()
    length = _one((len(header), len(header) + 1, 2**63, 0), rng) if rng.random() < 0.3 else len(header)
    path.write_bytes(struct.pack("<Q", length) + header + bytes(1920))


def hdf5(path: Path, rng: np.random.Generator) -> None:
    """Write datasets of odd kinds: empty, ragged, of texts, of compounds, absent chunks, links to nowhere."""
    with h5py.File(path, "w") as file:
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: file.create_dataset("a", data=h5py.Empty("f4")),
            lambda: file.create_dataset("b", shape=(0, 8), maxshape=(None, 8), dtype="f4"),
            lambda: file.create_dataset("c", shape=(60, 0), dtype="f4"),
            lambda: file.create_dataset("d", (5,), dtype=h5py.vlen_dtype(np.float32)),
            lambda: file.create_dataset("e", data=np.zeros(5, [("x", "f4"), ("y", "i4")])),
            lambda: file.create_dataset("f", data=np.array(["a", "b"], dtype=object), dtype=h5py.string_dtype()),
            lambda: file.create_dataset("g", shape=(60, 8), chunks=(7, 8), dtype="f4"),  # no chunk written
            lambda: file.__setitem__("h", h5py.SoftLink("/nowhere")),
            lambda: file.create_dataset("i", data=np.ones((60, 8), ">f2")),
            lambda: file.create_dataset("j", data=np.ones((60, 8), "c8")),
            lambda: file.create_dataset("k", data=np.ones((60, 8), "i1"), dtype=h5py.enum_dtype({"on": 1}, "i1")),
            lambda: file.__setitem__("l", np.dtype("f4")),
            lambda: file.create_dataset("m", data=1.5),
        )
        for place in rng.choice(len(kinds), int(rng.integers(0, 3)), replace=False):
            kinds[int(place)]()


def _table(rng: np.random.Generator) -> pa.Table:
    """Columns that are nearly rows of numbers: of unequal length, with nulls, of texts, empty, nested."""
    columns: dict[str, Any] = {
        "ragged": [[1.0] * (2 + i % 3) for i in range(12)],
        "nulls": [None if i == 5 else [1.0, 2.0] for i in range(12)],
        "inner": [[1.0, None] for _ in range(12)],
        "texts": [["a"] for _ in range(12)],
        "empty": [[] for _ in range(12)],
        "numbers": list(range(12)),
        "mixed": [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]] * 6,
        "tables": [{"x": 1.0}] * 12,
        "good": [[1.0, 2.0, 3.0]] * 12,
        "bytes": [b"\x00\x01"] * 12,
        "nothing": [None] * 12,
    }
    names = rng.choice(sorted(columns), int(rng.integers(0, 3)), replace=False)
    rows = slice(0, int(_one((12, 0, 1), rng)))
    return pa.table({str(name): pa.array(columns[name][rows]) for name in names})


def arrow(path: Path, rng: np.random.Generator) -> None:
    """Write an Arrow file or stream of odd columns."""
    table = _table(rng)
    new = pa.ipc.new_stream if rng.random() < 0.5 else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=int(rng.integers(1, 20)))


def parquet(path: Path, rng: np.random.Generator) -> None:
    """Write a Parquet file of odd columns."""
    pq.write_table(_table(rng), path, row_group_size=int(rng.integers(1, 20)))


def raw(path: Path, rng: np.random.Generator) -> None:
    """Write plain bytes with a description that lies."""
    path.write_bytes(bytes(1920))
    described = {
        "dtype": _one((*DTYPES, "float32", "bfloat16", 7, None, ["f4"], "torch.float16", "f4,i4", "(2,)f4"), rng),
        "shape": _one((*(list(s) for s in SHAPES), [60, 8], [60.0, 8], "60", [True, 8], None), rng),
        "offset": _one((0, 0, 0, -8, 1, 10**30, "0", None, 1.5), rng),
    }
    for key in rng.choice(sorted(described), int(rng.integers(0, 2)), replace=False):
        del described[str(key)]
    path.with_name(f"{path.name}.json").write_text(json.dumps(described))


def zarr_array(path: Path, rng: np.random.Generator) -> None:
    """Write a Zarr array or group of an odd kind."""
    version = int(_one((2, 3), rng))
    shape = _one(((60, 8), (0, 8), (60,), (), (6, 5, 4, 4), (12, 5, 8), (60, 0)), rng)
    dtype = _one(("f4", "f2", ">f8", "i4", "bool", "c8", "U3", "M8[s]", "u2"), rng)
    chunks = tuple(max(1, int(rng.integers(1, 9))) for _ in shape)
    if rng.random() < 0.5:
        zarr.create_array(str(path), shape=shape, dtype=dtype, chunks=chunks, zarr_format=version)
        return
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    for name in ("activations", "b", "c")[: int(rng.integers(0, 4))]:
        group.create_array(name, shape=shape, dtype=dtype, chunks=chunks)
    if rng.random() < 0.3:
        group.attrs["format"] = _one(("dbksvd-activations", "dbksvd-codes", "dbksvd-dictionary", 5), rng)
        group.attrs["format_version"] = _one((1, 2, "1", None), rng)
        group.attrs["complete"] = True


CRAFTED: dict[str, Craft] = {
    "npy": npy,
    "npz": npz,
    "safetensors": safetensors,
    "hdf5": hdf5,
    "arrow_stream": arrow,
    "arrow_file": arrow,
    "parquet": parquet,
    "raw": raw,
    "zarr2": zarr_array,
}
