"""Shards of BioNeMo's activation store: `shard_00000.parquet`, a column `dim_0`, `dim_1`, ... per feature.

`metadata.json` beside them says how many there are. Parquet keeps columns, so rows exist once a row group is
decoded: one of them at a time is in memory, as in BioNeMo itself (100,000 rows by default).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dbksvd_dask.errors import InputError, StoreError, brief
from dbksvd_dask.importers.arrow_files import damage_of, open_parquet, parquet_reader, pyarrow_for
from dbksvd_dask.importers.base import Array, ArrayInfo, Cursor, Hints, SourceFile
from dbksvd_dask.store import atomic

METADATA = "metadata.json"
PREFIX = "dim_"
# columns that are decoded together: their copy into rows then fills whole cache lines
COLUMNS = 64


class ColumnsFile(SourceFile):
    """A Parquet file with one column per feature; other columns are left alone."""

    def __init__(self, path: str) -> None:
        self.path, self._pa = path, pyarrow_for(path)
        self._file = parquet_reader(self._pa, path)
        schema, metadata = self._file.schema_arrow, self._file.metadata
        names = {name for name in schema.names if name.startswith(PREFIX) and name[len(PREFIX) :].isdecimal()}
        self._names = [f"{PREFIX}{i}" for i in range(len(names))]
        missing = [name for name in self._names if name not in names]
        if missing:
            raise StoreError(f"{path} has {len(names)} columns {PREFIX}N and no {missing[0]}; write it again")
        kinds = sorted({str(schema.field(name).type) for name in self._names})
        if len(kinds) > 1:
            raise InputError(f"{path} has columns {PREFIX}N of different types: {', '.join(kinds)}; need one")
        self._dtype = np.dtype(schema.field(self._names[0]).type.to_pandas_dtype())
        groups = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)])
        self.arrays = {"": ArrayInfo((metadata.num_rows, len(self._names)), self._dtype.name)}
        self._cursor = Cursor(self._groups)

    def read_items(self, name: str, start: int, stop: int) -> Array:
        """Read rows [start, stop)."""
        return self._cursor.read(start, stop)

    def _groups(self, row: int) -> Iterator[tuple[int, Array]]:
        first = int(np.searchsorted(self._starts, row, "right")) - 1
        for group in range(first, len(self._starts) - 1):
            if self._starts[group + 1] > self._starts[group]:
                yield int(self._starts[group]), self._rows(group)
        raise StoreError(f"{self.path} is damaged: it ends after row {int(self._starts[-1])}")

    def _rows(self, group: int) -> Array:
        rows = np.empty((int(self._starts[group + 1] - self._starts[group]), len(self._names)), self._dtype)
        for start in range(0, len(self._names), COLUMNS):
            names = self._names[start : start + COLUMNS]
            try:
                table = self._file.read_row_group(group, columns=names, use_threads=False)
                columns = [self._column(table, name) for name in names]
            except damage_of(self._pa) as error:
                if isinstance(error, StoreError):
                    raise
                raise StoreError(
                    f"{self.path} cannot be read after row {int(self._starts[group])}: {brief(error)}"
                ) from error
            rows[:, start : start + len(names)] = np.array(columns).T
        return rows

    def _column(self, table: Any, name: str) -> Array:
        column = table.column(name)
        if column.null_count:
            raise InputError(f"column {name} of {self.path} has {column.null_count} empty (null) values")
        values: Array = column.to_numpy()
        return values

    def close(self) -> None:
        """Close the file."""
        self._cursor.close()
        self._file.close()


def open_shard(path: str, hints: Hints) -> SourceFile:
    """Open one shard; a Parquet file of another kind opens as what it is."""
    reader = parquet_reader(pyarrow_for(path), path)
    has_columns = f"{PREFIX}0" in reader.schema_arrow.names
    reader.close()
    if not has_columns:
        return open_parquet(path, hints)
    file = ColumnsFile(path)
    stated = _metadata(path).get("hidden_dim")
    width = file.arrays[""].shape[-1]
    if stated is not None and stated != width:
        file.close()
        raise StoreError(f"{path} has {width} columns {PREFIX}N, {METADATA} beside it says hidden_dim {stated!r}")
    return file


def _metadata(path: str) -> dict[str, Any]:
    file = os.path.join(os.path.dirname(path), METADATA)
    found = atomic.read_json(file) if os.path.isfile(file) else {}
    return found if isinstance(found, dict) else {}


def require_all(paths: Sequence[str]) -> None:
    """Refuse a folder from which shards are missing."""
    stated, folder = _metadata(paths[0]).get("n_shards"), os.path.dirname(paths[0])
    if isinstance(stated, int) and stated != len(paths):
        raise StoreError(
            f"{folder} holds {len(paths)} shards, its {METADATA} says {stated}; copy the missing ones, or give a "
            f"pattern such as '{folder}/shard_*.parquet' to import those that exist"
        )
